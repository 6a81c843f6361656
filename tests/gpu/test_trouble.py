"""Memory pools, a full GPU, and messages of unfinished arrays.

Every rank runs every test, on its own GPU if there are enough.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy
import real
from mpi4py import MPI

import mpicoll as dist
from mpicoll.cuda import runtime
from mpicoll.errors import DeviceMemoryError

MIB = 1 << 20


def one_after_another(task):
    """Run a task on one rank after another, because ranks may share a GPU."""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            task()
        MPI.COMM_WORLD.Barrier()


def check_all_reduce(n, count=1000):
    array = cupy.full(count, dist.get_rank(), cupy.float32)
    dist.all_reduce(array)
    assert (array.get() == sum(range(n))).all()


def fill_pool(left):
    """Fill CuPy's pool with unused memory until ``left`` bytes are free."""
    pool = cupy.get_default_memory_pool()
    held, size = [], 16 << 30
    while size >= 16 * MIB:
        free = cupy.cuda.runtime.memGetInfo()[0]
        if free - size < left:
            size //= 2
            continue
        try:
            held.append(pool.malloc(size))
        except cupy.cuda.memory.OutOfMemoryError:
            size //= 2
    held.clear()
    assert pool.free_bytes() > 0


def test_memory_pools_are_emptied_if_memory_is_short(n):
    index, needed = cupy.cuda.Device().id, 1024 * MIB

    def task():
        fill_pool(needed // 2)
        free = cupy.cuda.runtime.memGetInfo()[0]
        assert free < needed, "the pool is too small for this test"
        memory = runtime.allocate(runtime.get_runtime(), index, needed)
        assert memory.nbytes == needed

    one_after_another(task)
    cupy.get_default_memory_pool().free_all_blocks()
    check_all_reduce(n)


def test_error_of_a_full_gpu_has_the_needed_size(n):
    """Later calls succeed."""
    index = cupy.cuda.Device().id

    def task():
        free, size = cupy.cuda.runtime.memGetInfo()
        for needed in (size + MIB, 2 * size):
            with pytest.raises(DeviceMemoryError, match=f"{needed >> 20} MiB are needed"):
                runtime.allocate(runtime.get_runtime(), index, needed)
        assert free

    one_after_another(task)
    check_all_reduce(n)


def test_messages_are_sent_after_earlier_kernels(n):
    """Messages of host arrays that are sent later do not overtake them."""
    me = dist.get_rank()
    if n == 1:
        return
    right, left = (me + 1) % n, (me - 1) % n
    array = cupy.full(1000, 77, cupy.float32)
    real.spin((1,), (1,), (np.uint64(1_000_000_000),))
    array.fill(me)
    works = [dist.isend(array, right)]
    works += [dist.isend(np.full(1000, me + k, np.float32), right) for k in (10, 20)]
    assert not any(work.is_completed() for work in works)
    received = [np.zeros(1000, np.float32) for _ in range(3)]
    for work in [*[dist.irecv(one, left) for one in received], *works]:
        work.wait()
    for one, added in zip(received, (0, 10, 20), strict=True):
        assert (one == left + added).all()
