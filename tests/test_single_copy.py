"""Copies between processes in C, with threads as ranks: layouts, unmapped memory, lost ranks."""

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

#: Seconds after which a blocked thread counts as hanging.
TIMEOUT_S = 60
FAILED, DONE, UNMOVED, UNFIT = range(4)


def join(threads):
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a thread hangs"


class Ranks:
    """Threads as ranks, with the process ID of this process."""

    def __init__(self, n, slot=65536):
        self.n = n
        self.memory = np.frombuffer(mmap.mmap(-1, n * kernels.shared_region(slot, n)), np.uint8)
        self.pids = np.full((n, n), os.getpid(), np.int64)  # one row per rank
        self.words = np.zeros(n, np.uint64)
        self.tokens = self.words.ctypes.data + 8 * np.arange(n, dtype=np.uint64)
        at = self.memory.ctypes.data
        self.segments = [
            kernels.Segment(at, slot, n, me, bytes_until_measurement=1 << 62) for me in range(n)
        ]  # every rank is near
        self.all = [
            kernels.Processes(
                ctypes.addressof(self.segments[me]), self.pids[me].ctypes.data,
                self.tokens.ctypes.data, n, me,
            )
            for me in range(n)
        ]  # fmt: skip
        # History: both methods were measured, and slots are far slower.
        self.histories = np.zeros((n, kernels.single_copy_histories()), np.uint8)
        each = self.histories[:, : 128 * 32].view(np.uint64).reshape(n, -1, 4)
        each[:, :, 1], each[:, :, 2] = 1 << 60, 2 | 2 << 32
        self.number = 0

    def kind(self, me, signature, **layout):
        return kernels.Copies(
            ctypes.addressof(self.all[me]), self.histories[me].ctypes.data, signature, 1, **layout
        )

    def start(self, call):
        """Start ``call(me, number)`` on one thread per rank. Return the threads and results."""
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
        join(threads)
        return results

    def spans(self, me, number, sends, receives, signature=7):
        """Run one rank's part of a call. A block is an array or (address, bytes)."""
        both = [
            (0, 0) if each is None else (each.ctypes.data, each.nbytes)
            if isinstance(each, np.ndarray) else each
            for each in (*sends, *receives)
        ]  # fmt: skip
        blocks = np.array(both, np.uintp)
        kind = self.kind(me, signature)
        return kernels.single_copy_spans(ctypes.addressof(kind), blocks.ctypes.data, 0, 0, number)


def guarded(size, start=3):
    """Return an array with guard bytes before and after it."""
    memory = np.full(size + 64, 0xA5, np.uint8)
    return memory[start : start + size]


def guards_intact(array):
    whole = array.base
    start = array.ctypes.data - whole.ctypes.data
    return (whole[:start] == 0xA5).all() and (whole[start + array.size :] == 0xA5).all()


PAGE, SPLIT, PIECE = 4096, 128 << 10, 4 << 20
SIZES = [0, 1, PAGE + 1, SPLIT, SPLIT + 1, 3 * PIECE + 777]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_blocks_of_any_size(n):
    """Each pair of ranks exchanges blocks of different sizes, including 0."""
    ranks, rng = Ranks(n), np.random.default_rng(n)
    for _ in range(3):
        sizes = rng.choice(SIZES, (n, n))
        sends = [[rng.integers(0, 256, sizes[i, j], np.uint8) for j in range(n)] for i in range(n)]
        receives = [[guarded(sizes[i, j], 1 + i) for i in range(n)] for j in range(n)]
        results = ranks.run(lambda me, k: ranks.spans(me, k, sends[me], receives[me]))  # noqa: B023
        assert results == [DONE] * n
        for i in range(n):
            for j in range(n):
                assert np.array_equal(receives[j][i], sends[i][j]) and guards_intact(receives[j][i])


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
    sent = rng.integers(0, 256, (n, n * size), np.uint8)
    kinds = [ranks.kind(me, 9, **layout) for me in range(n)]
    in_place = layout == {"has_src": 1}
    received = [guarded(size if layout.get("has_src") else n * size) for _ in range(n)]
    if in_place:
        received[root][:] = sent[root, :size]

    def call(me, number):
        send = received[me] if in_place else sent[me]
        return kernels.single_copy_blocks(
            ctypes.addressof(kinds[me]), send.ctypes.data, received[me].ctypes.data, size,
            root if layout.get("has_src") or layout.get("has_dst") else 0, number,
        )  # fmt: skip

    assert ranks.run(call) == [DONE] * n
    for me in range(n):
        if layout.get("has_dst") and me != root:
            expected = np.full(n * size, 0xA5, np.uint8)
        elif layout.get("has_src"):
            block = me if layout.get("many_blocks") else 0
            expected = sent[root, block * size : (block + 1) * size]
        else:
            block = me if layout.get("many_blocks") else 0
            expected = sent[:, block * size : (block + 1) * size].reshape(-1)
        assert np.array_equal(received[me], expected) and guards_intact(received[me])


def test_block_larger_than_the_receive_buffer_fails_on_all_ranks():
    """The receiver gets the number of bytes sent. Later calls succeed."""
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


def test_calls_with_different_signatures_fail():
    ranks = Ranks(2)
    array = np.zeros(5, np.uint8)
    for signatures in ((7, 8), (7, 7), (9, 8), (8, 8)):
        results = ranks.run(
            lambda me, k: ranks.spans(me, k, [array] * 2, [array.copy()] * 2, signatures[me])  # noqa: B023
        )
        assert results == [FAILED if signatures[0] != signatures[1] else DONE] * 2


@pytest.mark.parametrize("writes", [False, True])
def test_copy_from_or_to_an_unmapped_page_fails_on_all_ranks(writes):
    n, size = 3, 2 * PIECE
    ranks = Ranks(n)
    hole = mmap.mmap(-1, size)
    at = np.frombuffer(hole, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(at + (size - PAGE if writes else PAGE))
    assert libc.mprotect(page, PAGE, 0) == 0  # PROT_NONE
    good = np.zeros(size, np.uint8)
    for block in ((at, size), good):
        # Rank 0 sends the unmapped memory to rank 1 or receives into it.
        def call(me, number, block=block):
            pair = {0: block, 1: good}.get(me)
            sends, receives = [None] * n, [None] * n
            if me < 2:
                (sends if (me == 0) != writes else receives)[1 - me] = pair
            return ranks.spans(me, number, sends, receives)

        assert ranks.run(call) == [DONE if block is good else UNMOVED] * n
    assert libc.mprotect(page, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_faster_method_is_selected_on_all_ranks():
    """Both methods are measured. The slower one is measured again from time to time."""
    ranks, sizes = Ranks(2), (1 << 20, 1 << 23)
    ranks.histories[:] = 0
    arrays = {size: np.zeros((4, size), np.uint8) for size in sizes}

    def run_calls(size, slots_ns, calls):
        """Return the results of calls. Report ``slots_ns`` as the time through slots."""

        def call(me, number):
            kind = ranks.kind(me, 7)
            blocks = np.array([(each.ctypes.data, size) for each in arrays[size]], np.uintp)
            result = kernels.single_copy_spans(
                ctypes.addressof(kind), blocks.ctypes.data, 0, 0, number
            )
            if result == UNMOVED:
                kernels.single_copy_record(ctypes.addressof(kind), slots_ns)
            return result

        found = [ranks.run(call) for _ in range(calls)]
        assert all(one == other for one, other in found), "the ranks choose differently"
        return [one for one, _ in found]

    for size in sizes:
        assert run_calls(size, 10**10, 4) == [DONE, UNMOVED] * 2
        assert UNMOVED not in run_calls(size, 10**10, 60)
        assert run_calls(size, 1, 20).count(UNMOVED) >= 1, (
            "the slower method is never measured again"
        )
    received = run_calls(sizes[0], 1, 400)
    assert received[-1] == UNMOVED and DONE in received[-130:]


def test_ranks_wait_for_a_lost_process_until_aborted():
    """A rank returns only when no other rank can still read its memory."""
    n = 3
    ranks = Ranks(n)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ranks.pids[0, 2] = child.pid
    arrays = [[np.zeros(1000, np.uint8) for _ in range(2 * n)] for _ in range(n)]
    threads, results = ranks.start(lambda me, k: ranks.spans(me, k, arrays[me][:n], arrays[me][n:]))
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in threads)
    ranks.segments[1].aborted = 1
    time.sleep(0.2)
    assert threads[1].is_alive(), "returned while rank 0 may still read its memory"
    ranks.segments[0].aborted = ranks.segments[2].aborted = 1
    join(threads)
    assert results == [FAILED] * n


def test_aborted_ranks_do_not_wait_for_a_missing_rank():
    n = 3
    ranks = Ranks(n)
    arrays = [[np.zeros(1000, np.uint8) for _ in range(2 * n)] for _ in range(n)]

    def call(me, number):
        return None if me == 2 else ranks.spans(me, number, arrays[me][:n], arrays[me][n:])

    threads, results = ranks.start(call)
    time.sleep(0.2)
    for segment in ranks.segments:
        segment.aborted = 1
    join(threads)
    assert results == [FAILED, FAILED, None]
