"""Collectives of GPUs that reach each other's memory, as ``src/device_peers.cu`` carries them out:
what a kernel is told, and how it cuts a call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpicoll.kernels.reduction import Loop

__all__ = [
    "ALL",
    "BLOCKS",
    "CLOSED",
    "DIFFERS",
    "FAILED",
    "HEADER",
    "LATE",
    "PIECE",
    "RANKS",
    "STEP_BITS",
    "Collective",
    "Cut",
    "Failure",
    "Peers",
    "room_of",
]

#: Bytes that a thread reads or writes at once; LENGTH in device.cu. Arrays that are combined are
#: read so if their addresses are alike modulo this number, else element by element.
PIECE = 16
#: As in device_peers.cu: ranks of a group, blocks of a kernel, bits of the number of a step, no
#: root, and why a rank gives up: it has waited too long, or the calls differ. A host ends kernels
#: because its rank has failed, or because the group is closed for a timeout.
RANKS, BLOCKS, STEP_BITS = 16, 32, 48
ALL = -1
LATE, DIFFERS, FAILED, CLOSED = 1, 2, 3, 4
#: The struct Header there, in whole lines of memory.
_LINE, _HEADER = (
    128,
    [("told", "u8", (BLOCKS, 2, RANKS)), ("steps", "u8", BLOCKS), ("failure", "u8")],
)
_PADDING = -np.dtype(_HEADER).itemsize % _LINE
HEADER = np.dtype([*_HEADER, ("padding", "u1", _PADDING)])

#: Bytes up to which all is pushed to all, in one shot.
ONE_SHOT = 256 * 1024
#: Bytes that a block takes at least, if there are so many: a batch of pieces for each thread.
LEAST = 32 * 1024


class Peers(NamedTuple):
    """The workspaces of a group's ranks, as one rank's device sees them.

    addresses: of each rank's, as this device maps it.
    me:        this rank.
    failure:   address of 8 bytes on the host that all ranks' hosts and devices see: a Failure once
               a device has given up, or a host has ended all kernels; zeros before.
    limit:     nanoseconds after which one does.
    room:      bytes of an area for what one rank pushes in a step.
    blocks:    the most of a kernel: what every rank's device holds at once.
    """

    addresses: tuple[int, ...]
    me: int
    failure: int
    limit: int
    room: int
    blocks: int

    def pack(self, call: int) -> bytes:
        """Return the struct Peers of a call."""
        n = len(self.addresses)
        return struct.pack(
            f"={RANKS}Q4Q2i", *self.addresses, *[0] * (RANKS - n), self.failure, self.limit,
            self.room, call, n, self.me,
        )  # fmt: skip


class Failure(NamedTuple):
    """Why kernels have ended without a result, as 64 bits say it.

    call:  what all ranks have alike of the call, of which a device has given up; see Collective.
    why:   LATE or DIFFERS, which a device says; FAILED or CLOSED, which a host does.
    rank:  whose device or host it is.
    other: the rank that its device has waited for.
    """

    call: int
    why: int
    rank: int
    other: int

    @classmethod
    def unpack(cls, word: int) -> Failure:
        """Return what 64 bits say."""
        return cls(word >> 48, word >> 32 & 0xFFFF, word >> 16 & 0xFFFF, word & 0xFFFF)

    def pack(self) -> int:
        """Return the 64 bits."""
        return self.call << 48 | self.why << 32 | self.rank << 16 | self.other


def room_of(nbytes: int, ranks: int, blocks: int) -> int:
    """Return the bytes of an area for each rank, in workspaces of ``nbytes`` and a header."""
    return nbytes // (2 * ranks * blocks) // PIECE * PIECE


class Cut(NamedTuple):
    """How a call is cut: blocks of the kernel, shots, and elements that a block takes at once."""

    blocks: int
    shots: int
    chunk: int


@dataclass(frozen=True)
class Collective:
    """A collective call of one rank.

    name:    all_reduce, which is reduce as well, reduce_scatter, all_gather or broadcast.
    by:      what combines; None if nothing is.
    width:   bytes of an element: of a number, if they are combined.
    send, recv: addresses; in place, recv alone.
    count:   elements of a call in place.
    starts:  otherwise where the block of each rank begins, and where the last one ends.
    root:    that gets or gives all; ALL.
    divisor: of the result.
    call:    what all ranks must have alike of the call, in 16 bits.
    """

    name: str
    by: Loop | None
    width: int
    send: int
    recv: int
    count: int = 0
    starts: Sequence[int] = ()
    root: int = ALL
    divisor: float = 1
    call: int = 0

    def cut(self, peers: Peers) -> Cut:
        """Return how the call is cut, in bytes alike on all ranks."""
        n, most = len(peers.addresses), self.count
        if self.starts:
            most = max(end - start for start, end in pairwise(self.starts))
        nbytes = most * self.width
        shots = 1 if self.starts or nbytes <= ONE_SHOT or n == 1 else 2
        each = nbytes if shots == 1 else -(-nbytes // n)
        chunk = max(-(-each // peers.blocks), LEAST)
        chunk = min(-(-chunk // PIECE) * PIECE, peers.room)
        return Cut(min(peers.blocks, -(-each // chunk)), shots, chunk // self.width)

    def line(self) -> str:
        """Return the line that makes the kernel, behind the text of device_peers.cu."""
        if self.by is None:
            return f"{self.name.upper()}(uint{8 * self.width}_t)"
        return f"{self.name.upper()}({self.by.format}, {self.by.operation})"
