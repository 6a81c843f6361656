"""What the kernels of device_peers.cu do together, in Python: each rank's part of a collective, by
the flags and areas of the workspaces that their processes map.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np

from mpicoll.dtypes import by_name
from mpicoll.kernels.library import kernels
from mpicoll.kernels.peers import (
    ALL,
    DIFFERS,
    HEADER,
    LATE,
    STEP_BITS,
    Collective,
    Failure,
    Peers,
)

#: As in device_peers.cu.
LOOK = 1_000_000


class GaveUp(Exception):
    """The kernel ends."""


class _Block:
    """One block of a kernel, in its steps."""

    def __init__(self, peers: Peers, call: Collective, block: int, chunk: int) -> None:
        self.peers, self.call, self.block, self.chunk = peers, call, block, chunk
        self.n, self.me = len(peers.addresses), peers.me
        self.headers = [
            np.frombuffer((ctypes.c_uint8 * HEADER.itemsize).from_address(each), HEADER)[0]
            for each in peers.addresses
        ]
        self.step = int(self.headers[self.me]["steps"][block]) + 1

    def area(self, rank: int, source: int) -> int:
        """The address in a rank's workspace of what a rank pushes in this step."""
        areas = self.block * 2 + self.step % 2
        places = areas * self.n + source
        return self.peers.addresses[rank] + HEADER.itemsize + places * self.peers.room

    def push(self, rank: int, address: int, count: int) -> None:
        if rank != self.me:
            self.move(self.area(rank, self.me), address, count)

    def take(self, rank: int, address: int, count: int) -> None:
        if rank != self.me:
            self.move(address, self.area(self.me, rank), count)

    def move(self, into: int, source: int, count: int) -> None:
        ctypes.memmove(into, source, max(count, 0) * self.call.width)

    def meet(self) -> None:
        value, parity = self.call.call << STEP_BITS | self.step, self.step % 2
        others = [rank for rank in range(self.n) if rank != self.me]
        for rank in others:
            self.headers[rank]["signals"][self.block, parity, self.me] = value
        begun = looked = time.monotonic_ns()
        on_host = ctypes.c_uint64.from_address(self.peers.failure)
        for rank in others:
            while True:
                seen = int(self.headers[self.me]["signals"][self.block, parity, rank])
                failure = int(self.headers[self.me]["failure"])
                if failure:
                    on_host.value = on_host.value or failure
                    raise GaveUp
                if seen == value:
                    break
                now = time.monotonic_ns()
                if seen & (1 << STEP_BITS) - 1 == self.step:
                    self.give_up(DIFFERS, rank)
                elif now - begun > self.peers.limit:
                    self.give_up(LATE, rank)
                elif now - looked > LOOK:
                    self.headers[self.me]["failure"], looked = on_host.value, now
                time.sleep(1e-5)

    def give_up(self, why: int, rank: int) -> None:
        for header in self.headers:
            header["failure"] = Failure(self.call.call, why, self.me, rank).pack()

    def next(self) -> None:
        self.step += 1
        self.headers[self.me]["steps"][self.block] = self.step - 1

    def combine(self, own: int, out: int, count: int) -> None:
        call = self.call
        if count <= 0:
            return
        assert kernels is not None, "the simulation computes with the C library"
        assert call.by is not None and by_name[call.by.format].itemsize == call.width
        sources = [own if r == self.me else self.area(self.me, r) for r in range(self.n)]
        kernels.combine(
            kernels.format(call.by.format.encode()), call.by.operation,
            (ctypes.c_void_p * self.n)(*sources), self.n, out, count, call.divisor,
        )  # fmt: skip


def carry_out(peers: Peers, call: Collective) -> None:
    """A rank's kernel. Its blocks come one after the other, on all ranks alike."""
    cut = call.cut(peers)
    for number in range(cut.blocks):
        block = _Block(peers, call, number, cut.chunk)
        try:
            if call.starts:
                _out_of_place(block, cut.blocks)
            else:
                _in_place(block, cut.blocks, cut.shots)
        except GaveUp:
            return


def _out_of_place(block: _Block, blocks: int) -> None:
    call, chunk, me = block.call, block.chunk, block.me
    counts = np.diff(call.starts).tolist()
    for first in range(block.block * chunk, max(counts), blocks * chunk):
        lengths = [min(chunk, count - first) for count in counts]
        into = [call.recv + (start + first) * call.width for start in call.starts]
        for rank, length in enumerate(lengths):
            if call.by is None:
                block.push(rank, call.send + first * call.width, lengths[me])
            else:
                block.push(rank, call.send + (call.starts[rank] + first) * call.width, length)
        block.meet()
        if call.by is None:
            block.move(into[me], call.send + first * call.width, lengths[me])
            for rank, length in enumerate(lengths):
                block.take(rank, into[rank], length)
        else:
            own = call.send + (call.starts[me] + first) * call.width
            block.combine(own, call.recv + first * call.width, lengths[me])
        block.next()


def _in_place(block: _Block, blocks: int, shots: int) -> None:
    call, chunk, n, me = block.call, block.chunk, block.n, block.me
    stride = chunk if shots == 1 else n * chunk
    gives = range(n) if call.root == ALL or call.by is None else [call.root]
    keeps = call.by is None or call.root in (ALL, me)
    for first in range(block.block * stride, call.count, blocks * stride):
        begin, left = call.recv + first * call.width, call.count - first
        if shots == 1:
            length = min(chunk, left)
            for rank in gives if call.by is not None or me == call.root else ():
                block.push(rank, begin, length)
            block.meet()
            if call.by is None:
                block.take(call.root, begin, length)
            elif keeps:
                block.combine(begin, begin, length)
            block.next()
            continue
        at = [begin + rank * chunk * call.width for rank in range(n)]
        lengths = [min(chunk, left - rank * chunk) for rank in range(n)]
        for rank in range(n) if call.by is not None or me == call.root else ():
            block.push(rank, at[rank], lengths[rank])
        block.meet()
        made = np.empty(max(lengths[me], 0) * call.width + 1, np.uint8)
        share = made.ctypes.data
        if call.by is not None:
            block.combine(at[me], share, lengths[me])
        elif me == call.root:
            block.move(share, at[me], lengths[me])
        else:
            block.take(call.root, share, lengths[me])
        block.next()
        for rank in gives:
            if call.by is not None or rank != call.root:
                block.push(rank, share, lengths[me])
        if keeps:
            block.move(at[me], share, lengths[me])
        block.meet()
        for rank in range(n) if keeps and (call.by is not None or me != call.root) else ():
            block.take(rank, at[rank], lengths[rank])
        block.next()
