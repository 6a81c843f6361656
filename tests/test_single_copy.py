"""The C code of copies from process to process, with threads for ranks: who copies what, what
cannot be copied, and ranks that are lost.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mpicoll.kernels.library import describe, kernels

pytestmark = [pytest.mark.any_mpi, pytest.mark.skipif(kernels is None, reason=describe())]

#: Seconds after which a thread that waits for another counts as hanging.
LIMIT = 60
FAILED, DONE, UNMOVED, UNFIT = range(4)


class Ranks:
    """Threads of this process that take each other for other processes."""

    def __init__(self, n, slot=65536):
        self.n = n
        self.memory = np.frombuffer(mmap.mmap(-1, n * kernels.shared_region(slot, n)), np.uint8)
        self.pids = np.full((n, n), os.getpid(), np.int64)  # as each rank has them
        self.words = np.zeros(n, np.uint64)
        self.tokens = self.words.ctypes.data + 8 * np.arange(n, dtype=np.uint64)
        at = self.memory.ctypes.data
        self.holds = [
            kernels.Segment(at, slot, n, me, bytes_until_measurement=1 << 62) for me in range(n)
        ]  # all count as near
        self.all = [
            kernels.Processes(
                ctypes.addressof(self.holds[me]), self.pids[me].ctypes.data,
                self.tokens.ctypes.data, n, me,
            )
            for me in range(n)
        ]  # fmt: skip
        # By the kernel: that both ways have been tried, and slots took for ever.
        self.histories = np.zeros((n, kernels.single_copy_histories()), np.uint8)
        each = self.histories[:, : 128 * 32].view(np.uint64).reshape(n, -1, 4)
        each[:, :, 1], each[:, :, 2] = 1 << 60, 2 | 2 << 32
        self.number = 0

    def kind(self, me, what, **layout):
        return kernels.Copies(
            ctypes.addressof(self.all[me]), self.histories[me].ctypes.data, what, 1, **layout
        )

    def start(self, call):
        """Start ``call(me, number)`` on a thread for each rank; return them, and their results."""
        self.number += 1
        results = [None] * self.n

        def run(me):
            results[me] = call(me, self.number)

        threads = [threading.Thread(target=run, args=(me,), daemon=True) for me in range(self.n)]
        for thread in threads:
            thread.start()
        return threads, results

    def run(self, call):
        threads, results = self.start(call)
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a thread waits for ever"
        return results

    def spans(self, me, number, sends, receives, what=7):
        """Carry out a rank's part of blocks: arrays, or addresses with their bytes."""
        both = [
            (0, 0) if each is None else (each.ctypes.data, each.nbytes)
            if isinstance(each, np.ndarray) else each
            for each in (*sends, *receives)
        ]  # fmt: skip
        blocks = np.array(both, np.uintp)
        kind = self.kind(me, what)
        return kernels.single_copy_spans(ctypes.addressof(kind), blocks.ctypes.data, 0, 0, number)


def guarded(size, start=3):
    """Bytes in the middle of others."""
    memory = np.full(size + 64, 0xA5, np.uint8)
    return memory[start : start + size]


def unharmed(array):
    whole = array.base
    start = array.ctypes.data - whole.ctypes.data
    return (whole[:start] == 0xA5).all() and (whole[start + array.size :] == 0xA5).all()


PAGE, SPLIT, PIECE = 4096, 128 << 10, 4 << 20
SIZES = [0, 1, PAGE + 1, SPLIT, SPLIT + 1, 3 * PIECE + 777]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_blocks_of_any_size(n):
    """Each rank sends each other a block of its own size, some of them none."""
    ranks, rng = Ranks(n), np.random.default_rng(n)
    for _ in range(3):
        sizes = rng.choice(SIZES, (n, n))
        sends = [[rng.integers(0, 256, sizes[i, j], np.uint8) for j in range(n)] for i in range(n)]
        receives = [[guarded(sizes[i, j], 1 + i) for i in range(n)] for j in range(n)]
        results = ranks.run(lambda me, k: ranks.spans(me, k, sends[me], receives[me]))  # noqa: B023
        assert results == [DONE] * n
        for i in range(n):
            for j in range(n):
                assert np.array_equal(receives[j][i], sends[i][j]) and unharmed(receives[j][i])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "layout",
    [{"has_src": 1}, {"has_src": 1, "many_blocks": 1}, {"has_dst": 1}, {}, {"many_blocks": 1}],
    ids=["broadcast", "scatter", "gather", "all_gather", "all_to_all"],
)  # fmt: skip
def test_layouts(layout, n, size):
    ranks, rng = Ranks(n), np.random.default_rng(size)
    root = n - 1
    given = rng.integers(0, 256, (n, n * size), np.uint8)
    kinds = [ranks.kind(me, 9, **layout) for me in range(n)]
    in_place = layout == {"has_src": 1}
    taken = [guarded(size if layout.get("has_src") else n * size) for _ in range(n)]
    if in_place:
        taken[root][:] = given[root, :size]

    def call(me, number):
        send = taken[me] if in_place else given[me]
        return kernels.single_copy_blocks(
            ctypes.addressof(kinds[me]), send.ctypes.data, taken[me].ctypes.data, size,
            root if layout.get("has_src") or layout.get("has_dst") else 0, number,
        )  # fmt: skip

    assert ranks.run(call) == [DONE] * n
    for me in range(n):
        if layout.get("has_dst") and me != root:
            expected = np.full(n * size, 0xA5, np.uint8)
        elif layout.get("has_src"):
            block = me if layout.get("many_blocks") else 0
            expected = given[root, block * size : (block + 1) * size]
        else:
            block = me if layout.get("many_blocks") else 0
            expected = given[:, block * size : (block + 1) * size].reshape(-1)
        assert np.array_equal(taken[me], expected) and unharmed(taken[me])


def test_blocks_that_do_not_fit():
    """All ranks learn of it, the receiver of how much was sent, and can go on."""
    n = 3
    ranks = Ranks(n)
    some, more, into = (np.zeros(size, np.uint8) for size in (5, 6, 5))
    for wrong in (False, True, False):
        sends = [[some] * n for _ in range(n)]
        if wrong:
            sends[2] = [some, more, some]
        results = ranks.run(
            lambda me, k: ranks.spans(me, k, sends[me], [into.copy() for _ in range(n)])  # noqa: B023
        )
        assert results == [UNFIT if wrong else DONE] * n
        if wrong:
            assert ranks.all[1].mismatch_rank == 2 and ranks.all[1].mismatch_bytes == 6
            assert ranks.all[0].mismatch_rank == ranks.all[2].mismatch_rank == n


def test_calls_that_differ():
    ranks = Ranks(2)
    array = np.zeros(5, np.uint8)
    for whats in ((7, 8), (7, 7), (9, 8), (8, 8)):
        results = ranks.run(
            lambda me, k: ranks.spans(me, k, [array] * 2, [array.copy()] * 2, whats[me])  # noqa: B023
        )
        assert results == [FAILED if whats[0] != whats[1] else DONE] * 2


@pytest.mark.parametrize("writes", [False, True])
def test_memory_that_is_not_there(writes):
    """The copy ends at a page that is not mapped: no rank takes the result for whole."""
    n, size = 3, 2 * PIECE
    ranks = Ranks(n)
    hole = mmap.mmap(-1, size)
    at = np.frombuffer(hole, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(at + (size - PAGE if writes else PAGE))
    assert libc.mprotect(page, PAGE, 0) == 0  # PROT_NONE
    good = np.zeros(size, np.uint8)
    for there in ((at, size), good):
        # Rank 0 sends to rank 1 from what is not there, or gets it from rank 1.
        def call(me, number, there=there):
            pair = {0: there, 1: good}.get(me)
            sends, receives = [None] * n, [None] * n
            if me < 2:
                (sends if (me == 0) != writes else receives)[1 - me] = pair
            return ranks.spans(me, number, sends, receives)

        assert ranks.run(call) == [DONE if there is good else UNMOVED] * n
    assert libc.mprotect(page, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_which_way():
    """Both are tried, the faster one is taken, the other one now and then again: on all ranks."""
    ranks, sizes = Ranks(2), (1 << 20, 1 << 23)
    ranks.histories[:] = 0
    arrays = {size: np.zeros((4, size), np.uint8) for size in sizes}

    def ways(size, slots, calls):
        """The results of calls, of which those by slots are said to take so long."""

        def call(me, number):
            kind = ranks.kind(me, 7)
            some = arrays[size]
            blocks = np.array([(each.ctypes.data, size) for each in some], np.uintp)
            result = kernels.single_copy_spans(
                ctypes.addressof(kind), blocks.ctypes.data, 0, 0, number
            )
            if result == UNMOVED:
                kernels.single_copy_record(ctypes.addressof(kind), slots)
            return result

        found = [ranks.run(call) for _ in range(calls)]
        assert all(one == other for one, other in found), "the ranks choose differently"
        return [one for one, _ in found]

    for size in sizes:
        assert ways(size, 10**10, 4) == [DONE, UNMOVED] * 2
        assert UNMOVED not in ways(size, 10**10, 60)
        assert ways(size, 1, 20).count(UNMOVED) >= 1, "it is never tried again"
    taken = ways(sizes[0], 1, 400)
    assert taken[-1] == UNMOVED and DONE in taken[-130:]


def test_a_process_that_is_lost():
    """The ranks that need it wait until they are told, and leave together."""
    n = 3
    ranks = Ranks(n)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ranks.pids[0, 2] = child.pid
    arrays = [[np.zeros(1000, np.uint8) for _ in range(2 * n)] for _ in range(n)]
    threads, results = ranks.start(lambda me, k: ranks.spans(me, k, arrays[me][:n], arrays[me][n:]))
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in threads)
    ranks.holds[1].aborted = 1
    time.sleep(0.2)
    assert threads[1].is_alive(), "rank 0 may still read its memory"
    ranks.holds[0].aborted = ranks.holds[2].aborted = 1
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread waits for ever"
    assert results == [FAILED] * n


def test_a_rank_that_never_comes():
    """The others are told, and do not wait for each other any more."""
    n = 3
    ranks = Ranks(n)
    arrays = [[np.zeros(1000, np.uint8) for _ in range(2 * n)] for _ in range(n)]

    def call(me, number):
        return None if me == 2 else ranks.spans(me, number, arrays[me][:n], arrays[me][n:])

    threads, results = ranks.start(call)
    time.sleep(0.2)
    for hold in ranks.holds:
        hold.aborted = 1
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread waits for ever"
    assert results == [FAILED, FAILED, None]
