"""The C code of shared memory, with threads for ranks: as many as a large node has."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np
import pytest

from mpicoll.kernels import how, kernels

pytestmark = pytest.mark.skipif(kernels is None, reason=how())

#: Seconds after which a thread that waits for another counts as hanging.
LIMIT = 60


class Hold(ctypes.Structure):
    """struct mpicoll_shared."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("slot", ctypes.c_size_t),
        *((name, ctypes.c_uint32) for name in ("n", "me", "round", "calls", "looks")),
    )


def on_threads(rank, n):
    """Calls ``rank(me)`` on n threads at once, and waits for all."""
    threads = [threading.Thread(target=rank, args=(me,), daemon=True) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread waits for ever"


@pytest.mark.parametrize("slot", [64, 640, 4096])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 65, 100, 128])
def test_all_reduce_of_n_threads(n, slot):
    """Sums that shares and slots do not divide; what lies behind the segment stays as it is."""
    region = kernels.shared_region(slot, n)
    memory = mmap.mmap(-1, n * region + 4096)
    whole = np.frombuffer(memory, np.uint8)
    whole[n * region :] = 0xA5
    holds = [Hold(whole.ctypes.data, slot, n, rank, 0, 0, 0) for rank in range(n)]
    number = kernels.format(b"int32")
    counts = [1, 7, slot // 4, slot // 4 + 1, 3 * slot + 5, 0, 2 * n + 1]
    wrong = []

    def rank(me):
        pointer = ctypes.addressof(holds[me])
        for call, count in enumerate(counts):
            for split in (0, 1):
                array = np.arange(count, dtype=np.int32) * (me + 1)
                done = kernels.shared_all_reduce(
                    pointer, number, 0, array.ctypes.data, count, 1, split, call, 7
                )
                expected = np.arange(count, dtype=np.int32) * (n * (n + 1) // 2)
                if not done or not np.array_equal(array, expected):
                    wrong.append((me, count, split))

    on_threads(rank, n)
    assert not wrong
    assert (whole[n * region :] == 0xA5).all()


@pytest.mark.parametrize("slot", [8192, 65536])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 65, 128])
def test_exchanges_of_n_threads(n, slot):
    """All-to-all of blocks of any size, then sums of one block each, then one rank's block."""
    region = kernels.shared_region(slot, n)
    whole = np.frombuffer(mmap.mmap(-1, n * region), np.uint8)
    holds = [Hold(whole.ctypes.data, slot, n, rank, 0, 0, 0) for rank in range(n)]
    number = kernels.format(b"int32")
    wrong = []

    def exchange(me, call, format, places, most, gives, takes):
        given = np.array([(a.ctypes.data, len(a)) for a in gives], np.uintp).reshape(-1, 2)
        taken = [(rank, place, a.ctypes.data, len(a)) for rank, place, a in takes]
        taken = np.array(taken, np.uintp).reshape(-1, 4)
        return kernels.shared_exchange(
            ctypes.addressof(holds[me]), format, 0, 1, 4, places, most,
            given.ctypes.data, len(given), taken.ctypes.data, len(taken), call, 7, 0,
        )  # fmt: skip

    def rank(me):
        call = 0
        for scale in (0, 1, 3 if n > 8 else 37 if n > 3 else 3001):
            counts = [[scale * ((3 * r + s) % 5 + 1) for s in range(n)] for r in range(n)]
            most = max(map(max, counts))
            gives = [np.full(counts[me][s], n * me + s, np.int32) for s in range(n)]
            into = [np.zeros(counts[r][me], np.int32) for r in range(n)]
            takes = [(r, me, into[r]) for r in range(n)]
            done = exchange(me, call, -1, n, most, gives, takes)
            if not done or any((into[r] != n * r + me).any() for r in range(n)):
                wrong.append(("all_to_all", me, scale))
            gives = [np.arange(most, dtype=np.int32) * (me + s) for s in range(n)]
            total = np.zeros(most, np.int32)
            takes = [(r, me, total) for r in range(n)]
            done = exchange(me, call + 1, number, n, most, gives, takes)
            expected = np.arange(most) * (n * (n - 1) // 2 + n * me)
            if not done or not np.array_equal(total, expected):
                wrong.append(("reduce_scatter", me, scale))
            root = scale % n
            array = np.full(scale * slot // 16, me, np.int32)
            takes = [] if me == root else [(root, 0, array)]
            done = exchange(me, call + 2, -1, 1, len(array), [array] if me == root else [], takes)
            if not done or (array != root).any():
                wrong.append(("broadcast", me, scale))
            call += 3

    on_threads(rank, n)
    assert not wrong
