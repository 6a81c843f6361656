"""Collectives of GPUs that can access each other's memory, run by ``src/device_peers.cu``: the
parameters of a kernel, and how it splits a call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpicoll.kernels.reduction import Loop

#: Bytes that a thread reads or writes at once; LENGTH in device.cu. Arrays to combine are read in
#: pieces of this size if their addresses are equal modulo this number, else element by element.
PIECE = 16
#: As in device_peers.cu: maximum numbers of ranks and blocks, bits of a step number, root of calls
#: without one, and reasons to abort: timed out, and collective mismatch. Hosts abort kernels
#: because their rank has failed, or because the group is closed after a timeout.
RANKS, BLOCKS, STEP_BITS = 16, 32, 48
ALL = -1
LATE, DIFFERS, FAILED, CLOSED = 1, 2, 3, 4
#: The struct Header of device_peers.cu, padded to whole cache lines.
_LINE, _HEADER = (
    128,
    [("signals", "u8", (BLOCKS, 2, RANKS)), ("steps", "u8", BLOCKS), ("failure", "u8")],
)
_PADDING = -np.dtype(_HEADER).itemsize % _LINE
HEADER = np.dtype([*_HEADER, ("padding", "u1", _PADDING)])

#: Maximum size in bytes for one shot: every rank pushes the whole array to all ranks.
ONE_SHOT_MAX_BYTES = 256 * 1024
#: Minimum number of bytes per block: a batch of pieces for each thread.
BLOCK_MIN_BYTES = 32 * 1024


class Peers(NamedTuple):
    """The workspaces of a group's ranks, as one rank's device sees them."""

    addresses: tuple[int, ...]  # of each rank's workspace, mapped on this device
    me: int  # this rank
    #: Address of 8 bytes in host memory that all ranks' hosts and devices can access: a Failure
    #: after a device or a host has aborted the kernels; zero before.
    failure: int
    limit: int  # nanoseconds after which a device aborts
    room: int  # bytes of the area for the data that one rank pushes in a step
    blocks: int  # maximum number of blocks of a kernel, which every rank's device can run at once

    def pack(self, call: int) -> bytes:
        """Return the struct Peers of a call."""
        n = len(self.addresses)
        return struct.pack(
            f"={RANKS}Q4Q2i", *self.addresses, *[0] * (RANKS - n), self.failure, self.limit,
            self.room, call, n, self.me,
        )  # fmt: skip


class Failure(NamedTuple):
    """Reason that kernels have been aborted, encoded in 64 bits: the call field of the Collective,
    the reason, the rank that has aborted it, and the rank that its device has waited for.
    """

    call: int
    why: int
    rank: int
    other: int

    @classmethod
    def unpack(cls, word: int) -> Failure:
        """Decode 64 bits."""
        return cls(word >> 48, word >> 32 & 0xFFFF, word >> 16 & 0xFFFF, word & 0xFFFF)

    def pack(self) -> int:
        """Encode as 64 bits."""
        return self.call << 48 | self.why << 32 | self.rank << 16 | self.other


def room_of(nbytes: int, ranks: int, blocks: int) -> int:
    """Return the bytes of an area for each rank, in a workspace of ``nbytes`` plus a header."""
    return nbytes // (2 * ranks * blocks) // PIECE * PIECE


class Cut(NamedTuple):
    """How a call is split: blocks of the kernel, shots, and elements per block at a time."""

    blocks: int
    shots: int
    chunk: int


@dataclass(frozen=True)
class Collective:
    """A collective call of one rank."""

    name: str  # all_reduce (also for reduce), reduce_scatter, all_gather or broadcast
    by: Loop | None  # the loop that combines; None to copy
    width: int  # bytes of an element, or of a number if they are combined
    #: Addresses; in-place calls use recv only.
    send: int
    recv: int
    count: int = 0  # elements of an in-place call
    #: Otherwise the index of the first element of each rank's block, and of the end.
    starts: Sequence[int] = ()
    root: int = ALL  # the rank that receives or sends; ALL without a root
    divisor: float = 1  # of the result
    call: int = 0  # 16 bits that must match on all ranks

    def cut(self, peers: Peers) -> Cut:
        """Return how the call is split, with the same bytes on all ranks."""
        n, most = len(peers.addresses), self.count
        if self.starts:
            most = max(end - start for start, end in pairwise(self.starts))
        nbytes = most * self.width
        shots = 1 if self.starts or nbytes <= ONE_SHOT_MAX_BYTES or n == 1 else 2
        each = nbytes if shots == 1 else -(-nbytes // n)
        chunk = max(-(-each // peers.blocks), BLOCK_MIN_BYTES)
        chunk = min(-(-chunk // PIECE) * PIECE, peers.room)
        return Cut(min(peers.blocks, -(-each // chunk)), shots, chunk // self.width)

    def line(self) -> str:
        """Return the line that defines the kernel, after the text of device_peers.cu."""
        if self.by is None:
            return f"{self.name.upper()}(uint{8 * self.width}_t)"
        return f"{self.name.upper()}({self.by.format}, {self.by.operation})"
