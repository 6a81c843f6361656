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

    threads = [threading.Thread(target=rank, args=(me,), daemon=True) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread waits for ever"
    assert not wrong
    assert (whole[n * region :] == 0xA5).all()
