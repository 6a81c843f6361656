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
MISMATCHED, MOVED = range(2)
#: As in choice.h and choice.c.
BY_KERNEL, FAILED_NS = 8, 2**32 - 1


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
        self.segments = [kernels.make_channels(at, slot, n, me)[0] for me in range(n)]
        self.all = [
            kernels.Processes(
                ctypes.addressof(self.segments[me]), self.pids[me].ctypes.data,
                self.tokens.ctypes.data, n, me,
            )
            for me in range(n)
        ]  # fmt: skip
        self.choices = np.zeros((n, kernels.choices_size()), np.uint8)
        self.number = 0

    def kernel_failed(self, nbytes):
        """Return by rank whether copies by the kernel have failed in calls of this size."""
        return [self._ways(me, nbytes).get(BY_KERNEL) == FAILED_NS for me in range(self.n)]

    def _ways(self, me, nbytes):
        """Return the measured duration of each way."""
        way, ns = ctypes.c_int32(), ctypes.c_uint32()
        found, choices = {}, self.choices[me].ctypes.data
        while kernels.choice_read(
            choices, nbytes, len(found), ctypes.addressof(way), ctypes.addressof(ns)
        ):
            found[way.value] = ns.value
        return found

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

    def all_to_all(self, me, number, sends, receives, signature=7):
        """Run one rank's part of a call; return its result. A block is an array or None."""
        out, into = (
            np.array([
                (0, 0) if each is None else (each.ctypes.data, each.nbytes) for each in side
            ], np.uintp)
            for side in (sends, receives)
        )  # fmt: skip
        plan = kernels.CallPlan(
            ctypes.addressof(self.segments[me]), self.choices[me].ctypes.data,
            processes=ctypes.addressof(self.all[me]), signature=signature, divisor=1, size=1,
            numbers_per_element=1, format=-1, many_blocks=1,
        )  # fmt: skip
        return kernels.shared_all_to_all(
            ctypes.addressof(plan), out.ctypes.data, into.ctypes.data, 0, 0, number
        )


PIECE = 4 << 20


@pytest.mark.parametrize(("rank", "other"), [(1, 0), (0, 1)], ids=["reads", "writes"])
def test_memory_that_the_kernel_cannot_copy_goes_through_slots(rank, other):
    """One rank has the number of a process that does not have the other rank's memory."""
    n, size = 3, 2 * PIECE
    ranks, rng = Ranks(n), np.random.default_rng(rank)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for pid, fails in ((child.pid, True), (os.getpid(), False)):
            ranks.pids[rank, other] = pid
            ranks.choices[:] = 0  # calls of this size are copied by the kernel by default
            block, into = rng.integers(0, 256, size, np.uint8), np.zeros(size, np.uint8)
            sends, receives = ([[None] * n for _ in range(n)] for _ in range(2))
            sends[0][1], receives[1][0] = block, into
            results = ranks.run(lambda me, k: ranks.all_to_all(me, k, sends[me], receives[me]))  # noqa: B023
            assert results == [MOVED] * n and (into == block).all()
            assert ranks.kernel_failed(size * n) == [fails] * n
    finally:
        child.communicate(b"\n")


def test_ranks_wait_for_a_lost_process_until_aborted():
    """A rank returns only when no other rank can still read its memory."""
    n = 3
    ranks = Ranks(n)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ranks.pids[0, 2] = child.pid
    arrays = [[np.zeros(400000, np.uint8) for _ in range(2 * n)] for _ in range(n)]
    threads, results = ranks.start(
        lambda me, k: ranks.all_to_all(me, k, arrays[me][:n], arrays[me][n:])
    )
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in threads)
    ranks.segments[1].aborted = 1
    time.sleep(0.2)
    assert threads[1].is_alive(), "returned while rank 0 may still read its memory"
    ranks.segments[0].aborted = ranks.segments[2].aborted = 1
    join(threads)
    assert results == [MISMATCHED] * n


def test_aborted_ranks_do_not_wait_for_a_missing_rank():
    n = 3
    ranks = Ranks(n)
    arrays = [[np.zeros(400000, np.uint8) for _ in range(2 * n)] for _ in range(n)]

    def call(me, number):
        if me == 2:
            return None
        return ranks.all_to_all(me, number, arrays[me][:n], arrays[me][n:])

    threads, results = ranks.start(call)
    time.sleep(0.2)
    for segment in ranks.segments:
        segment.aborted = 1
    join(threads)
    assert results == [MISMATCHED, MISMATCHED, None]
