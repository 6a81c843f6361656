"""Probes of a review."""
from __future__ import annotations

import gc
import os
import weakref

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT
from device_arrays import forced
from test_devices import got, uploaded
from test_shared_gpu import again_at

import mpicoll as dist
from mpicoll.cuda import capabilities, runtime
from mpicoll.routes.device import copy_engine, peer

pytestmark = pytest.mark.any_mpi


@pytest.fixture
def plain(mpi, monkeypatch):
    arrays = simulated.Arrays(4)
    monkeypatch.setattr(runtime, "_runtime", arrays.cuda)
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "none")
    monkeypatch.setattr(capabilities, "_known", None)
    monkeypatch.setattr(peer, "WORKSPACE", 64 * 1024)
    dist.init_process_group(timeout=TIMEOUT)
    yield arrays
    dist.destroy_process_group()


def test_workspace_goes_with_the_group(plain):
    """After destroy, though the program keeps the group's object."""
    me = dist.get_rank()
    group = dist.new_group()
    array = plain.make(np.full(1000, me, np.float32), me)
    array.upload()
    dist.all_reduce(array, group=group)
    got(array)
    part = group.resources.find("devices").peer
    assert part is not None
    weak = weakref.ref(part._workspaces._own)
    del part
    dist.destroy_process_group(group)
    gc.collect()
    assert weak() is None


def test_workspace_goes_without_gc(plain):
    me = dist.get_rank()
    gc.disable()
    try:
        group = dist.new_group()
        array = plain.make(np.full(1000, me, np.float32), me)
        array.upload()
        dist.all_reduce(array, group=group)
        got(array)
        weak = weakref.ref(group.resources.find("devices").peer._workspaces._own)
        dist.destroy_process_group(group)
        del group
        assert weak() is None
    finally:
        gc.enable()


def test_already_mapped(plain, monkeypatch):
    """As CUDA's driver: error 208 for a handle of memory where a mapping of other memory of that
    process is still open."""
    cuda, me, n = plain.cuda, dist.get_rank(), dist.get_world_size()
    export, opens, live = cuda.export, cuda.open, {}
    bases = {}

    def export_(index, memory):
        return (export(index, memory).rstrip(b"\0") + f"@{memory.address}".encode()).ljust(64, b"\0")

    failed = []

    def open_(index, handle):
        words, base = handle.rstrip(b"\0").split(b"@")
        pid, file, size, nbytes = map(int, words.split())
        inode = os.stat(f"/proc/{pid}/fd/{file}").st_ino
        for key in [k for k, (w, _) in live.items() if w() is None]:
            del live[key]
        for (p, b, i), (w, s) in live.items():
            if p == pid and b < int(base) + size and int(base) < b + s and i != inode:
                failed.append(base)
                raise RuntimeError("cudaErrorAlreadyMapped: resource already mapped")
        memory = opens(index, words.ljust(64, b"\0"))
        live[pid, int(base), inode] = weakref.ref(memory._owner), size
        return memory

    monkeypatch.setattr(cuda, "export", export_)
    monkeypatch.setattr(cuda, "open", open_)
    count = copy_engine.LEAST // 4
    given, output = plain.make(np.full(count, me, np.float32), me), plain.make(np.zeros((n, count), np.float32), me)
    given.upload()
    dist.all_gather_single(output, given)
    got(output)
    part = dist.group.WORLD.resources.find("devices").copy_engine
    for turn in range(1, 4):
        again_at(plain, given.memory)
        given.host[...] = me + 10 * turn
        given.upload()
        dist.all_gather_single(output, given)
        assert (got(output) == np.arange(n)[:, None] + 10 * turn).all()
    assert not part._refused, (part._refused, failed)
    del part


def test_nccl_comes_first(mpi, monkeypatch):
    from test_nccl import Arrays, WithNccl

    found = Arrays(WithNccl(mpi.rank))
    monkeypatch.setattr(runtime, "_runtime", found.cuda)
    monkeypatch.setattr(capabilities, "_known", None)
    monkeypatch.setattr(peer, "WORKSPACE", 64 * 1024)
    dist.init_process_group("nccl", timeout=TIMEOUT)
    try:
        me, n = dist.get_rank(), dist.get_world_size()
        for count in (1000, copy_engine.LEAST // 4):
            given, output = uploaded(found, np.full(count, me, np.float32)), uploaded(found, np.zeros((n, count), np.float32))
            before = found.cuda.asked
            dist.all_gather_single(output, given)
            assert (got(output) == np.arange(n)[:, None]).all()
            assert found.cuda.asked > before, (count, dist.group.WORLD.resources.find("devices").names)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("where", ["load_for_all", "open"])
def test_late_writes(mpi, monkeypatch, where):
    """A rank that has left a call with an error has its array to itself."""
    import time

    from mpicoll.errors import DistBackendError
    from mpicoll.watch import consistency

    arrays = simulated.Arrays(1)
    monkeypatch.setattr(runtime, "_runtime", arrays.cuda)
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "none")
    monkeypatch.setattr(capabilities, "_known", None)
    monkeypatch.setattr(consistency, "FIRST", 1)
    dist.init_process_group(timeout=TIMEOUT)
    me, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=1.0)
    for _ in range(3):
        array = uploaded(arrays, np.full(100_000, me + 1, np.float32))
        dist.all_reduce(array, group=group)
        got(array)
    print(group.resources.find("devices").names, group.agree)
    array = uploaded(arrays, np.full(100_000, me + 1, np.float32))
    combine = getattr(arrays.cuda, where)

    def late(*what):
        time.sleep(3)
        return combine(*what)

    monkeypatch.setattr(arrays.cuda, where, late)
    try:
        dist.all_reduce(array, group=group)
    except DistBackendError as error:
        print("raised:", error)
    if me:
        array.host[...] = 7
        array.upload()
        assert (got(array) == 7).all()
        time.sleep(3.5)
        assert (got(array) == 7).all(), "written by another process after the call has failed here"
    else:
        arrays.cuda.synchronize(arrays.cuda.record(0, array.number))
        time.sleep(1)
    dist.destroy_process_group()


def test_fork_keeps_nccl(mpi, monkeypatch):
    """A forked child destroys nothing of its parent's."""
    from test_nccl import Arrays, WithNccl

    found = Arrays(WithNccl(mpi.rank))
    monkeypatch.setattr(runtime, "_runtime", found.cuda)
    monkeypatch.setattr(capabilities, "_known", None)
    dist.init_process_group("nccl", timeout=TIMEOUT)
    given = uploaded(found, np.full(10, 1, np.float32))
    dist.all_reduce(given)
    got(given)
    weak = weakref.ref(dist.group.WORLD.resources.find("devices").nccl.comm)
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(int(weak() is None))
    _, status = os.waitpid(child, 0)
    dist.destroy_process_group()
    assert status == 0
