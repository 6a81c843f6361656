"""More than 2**31 elements or bytes, on two ranks."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll as dist
from mpicoll.dtypes import ReduceOp

pytestmark = pytest.mark.slow

#: More than a C int counts.
MANY = 2**31 + 16
#: GiB that must be free on the machine; half of them are used, and MPI's own.
NEEDED = 12

#: What an array repeats: as long as no power of two, so that what is misplaced differs.
TILE = 2**20 - 3


def free() -> float:
    """GiB of memory that this machine, and this container, would give."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        found[name] = int(amount.split()[0]) / 2**20
    limits = [found["MemAvailable"]]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / name for name in ("memory.max", "memory.current"))
        limits.append((int(limit.read_text()) - int(used.read_text())) / 2**30)
    except (OSError, ValueError):  # none, or "max"
        pass
    return min(limits)


@pytest.fixture(scope="module")
def memory(world):
    """The bytes that all tests use, as new memory takes most of the time; on two ranks only."""
    if world.size != 2:
        pytest.skip("counts beyond 2**31 are tested on two ranks")
    there = min(MPI.COMM_WORLD.allgather(free()))
    if there < NEEDED:
        pytest.skip(f"counts beyond 2**31: {there:.0f} GiB are free, {NEEDED} are needed")
    return np.empty(MANY, np.uint8)


def tile(seed, dtype):
    """One tile; its numbers are small, so that sums of two are exact."""
    return np.random.default_rng(seed).integers(0, 60, TILE, np.uint8).astype(dtype)


def fill(array, seed):
    one = tile(seed, array.dtype)
    for start in range(0, array.size, TILE):
        part = array[start : start + TILE]
        part[...] = one[: part.size]
    return array


def check(array, expected):
    """Every element, against an array that repeats a tile from its beginning."""
    words = f"u{array.itemsize}"
    for start in range(0, array.size, TILE):
        part = array[start : start + TILE]
        assert np.array_equal(part.view(words), expected[: part.size].view(words)), start


def test_broadcast(world, memory):
    if world.me == 1:
        fill(memory, 1)
    dist.broadcast(memory, src=1)
    check(memory, tile(1, np.uint8))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX], ids=repr)
def test_all_reduce(world, memory, op):
    array = fill(memory.view(np.int8 if op is ReduceOp.SUM else np.uint8), world.me)
    dist.all_reduce(array, op)
    check(array, op.ufunc(tile(0, array.dtype), tile(1, array.dtype)))


def test_all_reduce_of_bfloat16(world, memory):
    """More than 2**31 bytes."""
    array = fill(memory.view(ml_dtypes.bfloat16), world.me)
    dist.all_reduce(array)
    check(array, tile(0, array.dtype) + tile(1, array.dtype))


def test_all_gather(world, memory):
    """Each input has fewer, the output more."""
    half = MANY // 2
    dist.all_gather_single(memory, fill(np.empty(half, np.uint8), world.me))
    for r in range(2):
        check(memory[r * half : (r + 1) * half], tile(r, np.uint8))


def test_messages(world, memory):
    """From rank 0 to rank 1."""
    if world.me == 0:
        dist.send(fill(memory, 3), 1)
    else:
        memory[:] = 255
        assert dist.recv(memory, 0) == 0
        check(memory, tile(3, np.uint8))


def test_all_to_all(world, memory):
    """Rank 0 has nearly all for rank 1, which has little for it."""
    small = np.arange(7, dtype=np.uint8)
    if world.me == 0:
        got = np.zeros(7, np.uint8)
        dist.all_to_all_single(got, fill(memory, 4), [0, 7], [0, MANY])
        assert (got == small).all()
    else:
        memory[:] = 255
        dist.all_to_all_single(memory, small, [MANY, 0], [7, 0])
        check(memory, tile(4, np.uint8))
