"""What is short on a GPU, late, or not the library's: memory that libraries keep unused, a GPU that
is full, messages that are not due, contexts of threads.

Every rank runs every test, on its own GPU if there are as many.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="make test-gpu starts it, and lets it find tests/mpi")
import real
from device_arrays import forced, routes
from mpi4py import MPI

import mpicoll as dist
from mpicoll.cuda import binding, runtime
from mpicoll.errors import DeviceMemoryError

pytestmark = pytest.mark.on_a_gpu

MIB = 1 << 20


@pytest.fixture(scope="module", params=routes("auto", "staged"))
def n(request):
    """The number of ranks, in a default group; this rank's GPU is CuPy's current one."""
    with forced(request.param):
        dist.init_process_group(timeout=60)
        binding.bind()
        yield dist.get_world_size()
        dist.destroy_process_group()


def one_after_another(task):
    """Ranks may share a GPU, whose memory each of them fills in its turn."""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            task()
        MPI.COMM_WORLD.Barrier()


def total(n, count=1000):
    array = cupy.full(count, dist.get_rank(), cupy.float32)
    dist.all_reduce(array)
    assert (array.get() == sum(range(n))).all()


# ---- Memory --------------------------------------------------------------------------------------


def fill_pool(left):
    """Let CuPy's pool keep all but so many bytes, unused."""
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


def test_memory_that_libraries_keep_unused(n):
    """What CuPy's pool keeps is given back to the driver where the library has too little."""
    index, needed = cupy.cuda.Device().id, 1024 * MIB

    def task():
        fill_pool(needed // 2)
        free = cupy.cuda.runtime.memGetInfo()[0]
        assert free < needed, "the pool keeps too little for this to show something"
        memory = runtime.allocate(runtime.get_runtime(), index, needed)
        assert memory.nbytes == needed

    one_after_another(task)
    cupy.get_default_memory_pool().free_all_blocks()
    total(n)


def test_a_gpu_that_is_full(n):
    """The error says how much is needed and how much is free; nothing is broken by it."""
    index = cupy.cuda.Device().id

    def task():
        free, size = cupy.cuda.runtime.memGetInfo()
        for needed in (size + MIB, 2 * size):
            with pytest.raises(DeviceMemoryError, match=f"{needed >> 20} MiB are needed"):
                runtime.allocate(runtime.get_runtime(), index, needed)
        assert free

    one_after_another(task)
    total(n)


# ---- Messages ------------------------------------------------------------------------------------


def test_messages_that_are_not_due(n):
    """They arrive with the values of the kernels before them, whatever the rank sends meanwhile."""
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
    taken = [np.zeros(1000, np.float32) for _ in range(3)]
    for work in [*[dist.irecv(one, left) for one in taken], *works]:
        work.wait()
    for one, added in zip(taken, (0, 10, 20), strict=True):
        assert (one == left + added).all()


# ---- Contexts ------------------------------------------------------------------------------------


def current_context():
    """Of the calling thread, as the driver has it: an address, None where there is none."""
    found = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value


def test_threads_keep_their_contexts(n):
    """A thread that has used no device has none after the library has worked there; one that has
    used a device has that one.
    """
    index, last, seen = cupy.cuda.Device().id, cupy.cuda.runtime.getDeviceCount() - 1, []

    def task():
        cuda = runtime.get_runtime()
        seen.append(current_context())
        with cuda.on(index):
            memory = cuda.allocate(index, MIB)
        del memory
        seen.append(current_context())
        with cupy.cuda.Device(last):
            cupy.cuda.runtime.free(0)
            seen.append(current_context())
            cuda.synchronize(cuda.record(index, runtime.LEGACY))
            seen.append(current_context())

    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
    assert len(seen) == 4, "the thread has failed"
    assert seen[0] is None and seen[1] is None
    assert seen[2] is not None and seen[3] == seen[2]
    total(n)
