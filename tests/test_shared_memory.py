"""The shared-memory protocol in C, with threads as ranks: up to 256."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading

import numpy as np
import pytest

from mpicoll.kernels.library import describe, kernels

pytestmark = [pytest.mark.any_mpi, pytest.mark.skipif(kernels is None, reason=describe())]

#: Seconds after which a blocked thread counts as hanging.
TIMEOUT_S = 60


def call_plan(segment, one_shot=0, combines=True, **layout):
    """Return a plan that sums (``combines``) or copies int32."""
    format = kernels.format(b"int32") if combines else -1
    return kernels.CallPlan(
        ctypes.addressof(segment), signature=7, divisor=1, size=4, numbers_per_element=1,
        one_shot_max_bytes=one_shot, format=format, **layout,
    )  # fmt: skip


def segments_of(memory, slot, n, flat):
    """Return the segment of each rank. Each rank polls every other rank if n <= ``flat``."""
    return [kernels.make_channels(memory.ctypes.data, slot, n, rank, flat) for rank in range(n)]


def on_threads(rank, n):
    """Call ``rank(me)`` on n threads at once and wait for all of them."""
    threads = [threading.Thread(target=rank, args=(me,), daemon=True) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a thread hangs"


#: A dissemination barrier of log2 n steps, or each rank polls every other rank.
FLAT_MAX_RANKS = [pytest.param(0, id="dissemination"), pytest.param(256, id="flat")]


@pytest.mark.parametrize("flat", FLAT_MAX_RANKS)
@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 9, 16, 33])
def test_all_ranks_find_a_mismatch(n, flat):
    """Any rank may differ, in signature or size. The next call succeeds."""
    slot = 4096
    shared = np.frombuffer(mmap.mmap(-1, n * kernels.shared_region(slot, n)), np.uint8)
    segments = segments_of(shared, slot, n, flat)
    results = [[] for _ in range(n)]

    def rank(me):
        at = ctypes.addressof(segments[me])
        plan = call_plan(segments[me], in_place=1)
        for number in range(2 * n):
            # Another signature or size, or several rounds instead of one.
            odd, large = me == number % n, number // n
            if large and odd:
                array = np.ones(3 * slot, np.int32)
                plan_at = ctypes.addressof(plan)
                done = kernels.shared_blocks(
                    plan_at, None, array.ctypes.data, array.size, 0, 2 * number
                )
            else:
                done = kernels.shared_compare(at, 2 * number, 5, number + 10**12 * odd)
            array = np.full(slot, me, np.int32)
            both = kernels.shared_blocks(
                ctypes.addressof(plan), None, array.ctypes.data, array.size, 0, 2 * number + 1
            )
            results[me].append((done, both, (array == n * (n - 1) // 2).all()))

    on_threads(rank, n)
    assert results == [[(0, 1, True)] * (2 * n)] * n


#: Layouts of blocks, by collective.
BLOCKS = {
    "all_reduce": {"in_place": 1, "combines": True},
    "broadcast": {"has_src": 1},
    "reduce": {"has_dst": 1, "combines": True},
    "all_gather": {},
    "gather": {"has_dst": 1},
    "scatter": {"has_src": 1, "many_blocks": 1},
    "reduce_scatter": {"many_blocks": 1, "combines": True},
    "all_to_all": {"many_blocks": 1},
    "scan": {"prefix": 1, "combines": True},
    "exscan": {"prefix": 2, "combines": True},
}


@pytest.mark.parametrize(  # a line for each of 256 blocks at least
    ("n", "slot", "flat"),
    [
        *itertools.product((1, 2, 3, 8, 33), (16384, 65536), (0, 256)),
        pytest.param(65, 16384, 256, marks=pytest.mark.slow),
        pytest.param(256, 65536, 0, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_n_threads(n, flat, slot):
    """Every collective, with blocks smaller than a slot, of one slot and of several slots."""
    region = kernels.shared_region(slot, n)
    shared = np.frombuffer(mmap.mmap(-1, n * region + 4096), np.uint8)
    shared[n * region :] = 0xA5  # is not written
    segments = segments_of(shared, slot, n, flat)
    # Each thread has arrays of n blocks: blocks smaller than a slot if n is large.
    max_count = (max if n <= 8 else min)(slot // 4 + 3, 3001)
    wrong = []
    ranks = np.arange(n, dtype=np.int32)[:, None]
    of_all = 1000 * (n * (n - 1) // 2)
    # Computed when compared, because all expected results need gigabytes.
    results = {
        "broadcast": lambda me, root, block: 1000 * root + block,
        "all_reduce": lambda me, root, block: of_all + n * block,
        "reduce": lambda me, root, block: of_all + n * block,
        "all_gather": lambda me, root, block: 1000 * ranks + block,
        "gather": lambda me, root, block: 1000 * ranks + block,
        "scatter": lambda me, root, block: 1000 * root + me + block,
        "reduce_scatter": lambda me, root, block: of_all + n * (me + block),
        "all_to_all": lambda me, root, block: 1000 * ranks + me + block,
        "scan": lambda me, root, block: 1000 * (me * (me + 1) // 2) + (me + 1) * block,
        "exscan": lambda me, root, block: (
            1000 * (me * (me - 1) // 2) + me * block if me else np.full(len(block), -1)
        ),
    }

    def rank(me):
        plans = {name: call_plan(segments[me], **{"combines": False, **layout})
                 for name, layout in BLOCKS.items()}  # fmt: skip
        for call, size in enumerate((0, 1, 37, max_count)):
            root = (call + 1) % n
            for at, (name, plan) in enumerate(plans.items()):
                # A slot holds n blocks. Five rounds and a remainder are enough.
                count = min(size, 5 * slot // (4 * n) + 3) if plan.many_blocks and n > 8 else size
                # Rank r's block for rank s holds 1000 r + s + 3 i.
                block = 3 * np.arange(count, dtype=np.int32)
                send = 1000 * me + (ranks + block if plan.many_blocks else block)
                in_place = name in ("broadcast", "reduce", "all_reduce")
                recv = send if in_place else np.full((n, count), -1, np.int32)
                done = kernels.shared_blocks(
                    ctypes.addressof(plan), send.ctypes.data, recv.ctypes.data, count,
                    root if plan.has_src or plan.has_dst else 0, 10 * call + at,
                )  # fmt: skip
                if plan.has_dst and me != root:
                    correct = (recv == (send if in_place else -1)).all()
                else:
                    expected = results[name](me, root, block)
                    found = recv.reshape(-1)[: expected.size].reshape(expected.shape)
                    correct = np.array_equal(found, expected)
                if not done or not correct:
                    wrong.append((name, me, count))

    on_threads(rank, n)
    assert not wrong
    assert (shared[n * region :] == 0xA5).all()
