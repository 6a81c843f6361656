"""The C code of shared memory, with threads for ranks: as many as a large node has."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mpicoll.kernels.library import describe, kernels

pytestmark = [pytest.mark.any_mpi, pytest.mark.skipif(kernels is None, reason=describe())]

#: Seconds after which a thread that waits for another counts as hanging.
LIMIT = 60


def kind_of(hold, whole=0, combines=True, **layout):
    """Sums, or copies."""
    format = kernels.format(b"int32") if combines else -1
    return kernels.CallPlan(
        ctypes.addressof(hold), signature=7, divisor=1, size=4, numbers_per_element=1,
        one_shot_max_count=whole, format=format, **layout,
    )  # fmt: skip


def holds_of(whole, slot, n, few):
    """Each thread's hold on the memory, who waits for each other itself if n <= ``few``."""
    return [
        kernels.Segment(whole.ctypes.data, slot, n, rank, flat_max_ranks=few) for rank in range(n)
    ]


def on_threads(rank, n):
    """Calls ``rank(me)`` on n threads at once, and waits for all."""
    threads = [threading.Thread(target=rank, args=(me,), daemon=True) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread waits for ever"


#: Signals are passed on in log2 n steps, or each rank waits for each other.
WAYS = [pytest.param(0, id="passed-on"), pytest.param(256, id="each-by-each")]


@pytest.mark.parametrize(
    ("n", "slot", "few"),
    [
        *itertools.product((1, 2, 3, 5, 8, 13, 33), (64, 640, 4096), (0, 256)),
        pytest.param(65, 4096, 256, marks=pytest.mark.slow),
        pytest.param(256, 4096, 0, marks=pytest.mark.slow),
    ],
)
def test_all_reduce_of_n_threads(n, few, slot):
    """Sums that shares and slots do not divide; what lies behind the segment stays as it is."""
    region = kernels.shared_region(slot, n)
    memory = mmap.mmap(-1, n * region + 4096)
    whole = np.frombuffer(memory, np.uint8)
    whole[n * region :] = 0xA5
    holds = holds_of(whole, slot, n, few)
    counts = [1, 7, slot // 4, slot // 4 + 1, 3 * slot + 5, 0, 2 * n + 1]
    wrong = []

    def rank(me):
        kinds = [kind_of(holds[me], whole) for whole in (0, 1 << 40)]
        for call, count in enumerate(counts):
            for split, kind in enumerate(kinds):
                array = np.arange(count, dtype=np.int32) * (me + 1)
                at = ctypes.addressof(kind)
                done = kernels.shared_all_reduce(at, array.ctypes.data, count, call)
                expected = np.arange(count, dtype=np.int32) * (n * (n + 1) // 2)
                if not done or not np.array_equal(array, expected):
                    wrong.append((me, count, split))

    on_threads(rank, n)
    assert not wrong
    assert (whole[n * region :] == 0xA5).all()


@pytest.mark.parametrize("few", WAYS)
@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 9, 16, 33])
def test_one_rank_in_another_call(n, few):
    """All hear of it, whoever it is, and whatever else differs; the next call goes well."""
    slot = 4096
    whole = np.frombuffer(mmap.mmap(-1, n * kernels.shared_region(slot, n)), np.uint8)
    holds = holds_of(whole, slot, n, few)
    results = [[] for _ in range(n)]

    def rank(me):
        at = ctypes.addressof(holds[me])
        kind = kind_of(holds[me])
        for number in range(2 * n):
            # Of another kind or size, or with several rounds, where the others have one.
            odd, large = me == number % n, number // n
            if large and odd:
                array = np.ones(3 * slot, np.int32)
                kind_at = ctypes.addressof(kind)
                done = kernels.shared_all_reduce(kind_at, array.ctypes.data, array.size, 2 * number)
            else:
                done = kernels.shared_compare(at, 2 * number, 5, number + 10**12 * odd)
            array = np.full(slot, me, np.int32)
            both = kernels.shared_all_reduce(
                ctypes.addressof(kind), array.ctypes.data, array.size, 2 * number + 1
            )
            results[me].append((done, both, (array == n * (n - 1) // 2).all()))

    on_threads(rank, n)
    assert results == [[(0, 1, True)] * (2 * n)] * n


#: How blocks are laid out, by the names of the collectives.
BLOCKS = {
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
    ("n", "slot", "few"),
    [
        *itertools.product((1, 2, 3, 8), (16384, 65536), (0, 256)),
        pytest.param(65, 16384, 256, marks=pytest.mark.slow),
        pytest.param(256, 65536, 0, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_n_threads(n, few, slot):
    """Every collective with blocks that fill no slot, one, and several."""
    region = kernels.shared_region(slot, n)
    whole = np.frombuffer(mmap.mmap(-1, n * region), np.uint8)
    holds = holds_of(whole, slot, n, few)
    # Each thread has arrays of n such blocks: less than a slot where there are many threads.
    most = (max if n <= 8 else min)(slot // 4 + 3, 3001)
    wrong = []
    ranks = np.arange(n, dtype=np.int32)[:, None]
    of_all = 1000 * (n * (n - 1) // 2)
    # What a rank gets, made when it is compared: all of them would need gigabytes.
    results = {
        "broadcast": lambda me, root, block: 1000 * root + block,
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
        kinds = {name: kind_of(holds[me], **{"combines": False, **layout})
                 for name, layout in BLOCKS.items()}  # fmt: skip
        for call, size in enumerate((0, 1, 37, most)):
            root = (call + 1) % n
            for at, (name, kind) in enumerate(kinds.items()):
                # A slot holds n such blocks at a time: five times and a rest are enough.
                count = min(size, 5 * slot // (4 * n) + 3) if kind.many_blocks and n > 8 else size
                # Rank r's block for rank s holds 1000 r + s + 3 i.
                block = 3 * np.arange(count, dtype=np.int32)
                send = 1000 * me + (ranks + block if kind.many_blocks else block)
                in_place = name in ("broadcast", "reduce")
                recv = send if in_place else np.full((n, count), -1, np.int32)
                done = kernels.shared_blocks(
                    ctypes.addressof(kind), send.ctypes.data, recv.ctypes.data, count,
                    root if kind.has_src or kind.has_dst else 0, 9 * call + at,
                )  # fmt: skip
                if kind.has_dst and me != root:
                    right = (recv == (send if in_place else -1)).all()
                else:
                    expected = results[name](me, root, block)
                    found = recv.reshape(-1)[: expected.size].reshape(expected.shape)
                    right = np.array_equal(found, expected)
                if not done or not right:
                    wrong.append((name, me, count))

    on_threads(rank, n)
    assert not wrong


@pytest.mark.parametrize("start, extra", [(0, 0), (1, 63), (15, 64), (16, 1), (31, 100)])
def test_results_that_leave_the_caches(start, extra):
    """They are written in another way: every byte, wherever it starts, and nothing beside it."""
    n, slot, size = 2, 65536, (32 << 20) + extra
    region = kernels.shared_region(slot, n)
    whole = np.frombuffer(mmap.mmap(-1, n * region), np.uint8)
    holds = holds_of(whole, slot, n, n)
    expected = np.random.default_rng(extra).integers(0, 256, size, np.uint8)
    memory = np.full((n, size + 128), 0xA5, np.uint8)
    arrays = [row[start : start + size] for row in memory]
    arrays[1][:] = expected

    def rank(me):
        kind = kind_of(holds[me], combines=False, has_src=1)
        kind.size = 1
        at = arrays[me].ctypes.data
        assert kernels.shared_blocks(ctypes.addressof(kind), at, at, size, 1, 1)

    on_threads(rank, n)
    for row in memory:
        assert np.array_equal(row[start : start + size], expected)
        assert (row[:start] == 0xA5).all() and (row[start + size :] == 0xA5).all()


@pytest.mark.any_mpi
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_a_mapping_keeps_no_file_open():
    from mpicoll.routes.host.shared_segment import _mapped

    file, size = os.memfd_create("test"), 3 * mmap.PAGESIZE
    os.ftruncate(file, size)
    before = len([*Path("/proc/self/fd").iterdir()])
    one, other = _mapped(file, size), _mapped(file, size)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    os.close(file)
    one[-3:] = b"abc"
    assert other[-3:] == b"abc" and len(one) == size
    with pytest.raises(OSError):
        _mapped(file, size)
    del one
    assert other[-3:] == b"abc"
