"""The kernels of device_peers.cu in Python, with flags and areas in mapped workspaces."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from mpicoll.dtypes import by_name
from mpicoll.kernels.library import kernels
from mpicoll.kernels.peers import ALL, DIFFERS, HEADER, LATE, STEP_BITS, Collective, Failure, Peers

#: Nanoseconds between polls of the host's failure word, as in device_peers.cu.
POLL_INTERVAL_NS = 1_000_000


class Aborted(Exception):
    """The kernel has failed."""


class _Block:
    """One block of a kernel, which executes numbered steps."""

    def __init__(self, peers: Peers, call: Collective, block: int, chunk: int) -> None:
        self.peers, self.call, self.block, self.chunk = peers, call, block, chunk
        self.n, self.me = len(peers.addresses), peers.me
        self.headers = [
            np.frombuffer((ctypes.c_uint8 * HEADER.itemsize).from_address(each), HEADER)[0]
            for each in peers.addresses
        ]
        self.step = int(self.headers[self.me]["steps"][block]) + 1

    def area(self, rank: int, source: int) -> int:
        """Return the address of the source rank's area for this step in a rank's workspace."""
        area = (self.block * 2 + self.step % 2) * self.n + source
        return self.peers.addresses[rank] + HEADER.itemsize + area * self.peers.room

    def push(self, rank: int, address: int, count: int) -> None:
        if rank != self.me:
            self.move(self.area(rank, self.me), address, count)

    def take(self, rank: int, address: int, count: int) -> None:
        if rank != self.me:
            self.move(address, self.area(self.me, rank), count)

    def move(self, into: int, source: int, count: int) -> None:
        ctypes.memmove(into, source, max(count, 0) * self.call.width)

    def synchronize(self) -> None:
        value, parity = self.call.call << STEP_BITS | self.step, self.step % 2
        peers = [rank for rank in range(self.n) if rank != self.me]
        for rank in peers:
            self.headers[rank]["signals"][self.block, parity, self.me] = value
        start = polled = time.monotonic_ns()
        on_host = ctypes.c_uint64.from_address(self.peers.failure)
        for rank in peers:
            while True:
                seen = int(self.headers[self.me]["signals"][self.block, parity, rank])
                failure = int(self.headers[self.me]["failure"])
                if failure:
                    on_host.value = on_host.value or failure
                    raise Aborted
                if seen == value:
                    break
                now = time.monotonic_ns()
                if seen & (1 << STEP_BITS) - 1 == self.step:
                    self.fail(DIFFERS, rank)
                elif now - start > self.peers.limit:
                    self.fail(LATE, rank)
                elif now - polled > POLL_INTERVAL_NS:
                    self.headers[self.me]["failure"], polled = on_host.value, now
                time.sleep(1e-5)

    def fail(self, why: int, rank: int) -> None:
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


def execute(peers: Peers, call: Collective) -> None:
    """Execute a rank's kernel. Blocks run one after another, in the same order on all ranks."""
    cut = call.cut(peers)
    for number in range(cut.blocks):
        block = _Block(peers, call, number, cut.chunk)
        try:
            if call.starts:
                _out_of_place(block, cut.blocks)
            else:
                _in_place(block, cut.blocks, cut.shots)
        except Aborted:
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
        block.synchronize()
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
    destinations = range(n) if call.root == ALL or call.by is None else [call.root]
    keeps = call.by is None or call.root in (ALL, me)
    for first in range(block.block * stride, call.count, blocks * stride):
        begin, left = call.recv + first * call.width, call.count - first
        if shots == 1:
            length = min(chunk, left)
            for rank in destinations if call.by is not None or me == call.root else ():
                block.push(rank, begin, length)
            block.synchronize()
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
        block.synchronize()
        made = np.empty(max(lengths[me], 0) * call.width + 1, np.uint8)
        share = made.ctypes.data
        if call.by is not None:
            block.combine(at[me], share, lengths[me])
        elif me == call.root:
            block.move(share, at[me], lengths[me])
        else:
            block.take(call.root, share, lengths[me])
        block.next()
        for rank in destinations:
            if call.by is not None or rank != call.root:
                block.push(rank, share, lengths[me])
        if keeps:
            block.move(at[me], share, lengths[me])
        block.synchronize()
        for rank in range(n) if keeps and (call.by is not None or me != call.root) else ():
            block.take(rank, at[rank], lengths[rank])
        block.next()
