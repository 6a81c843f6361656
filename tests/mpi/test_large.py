"""Calls with more than 2**31 elements or bytes, on two ranks."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll as dist
from mpicoll.dtypes import ReduceOp

pytestmark = pytest.mark.slow

#: Element count that does not fit a C int.
MANY = 2**31 + 16
#: Free memory required on the machine, in GiB. The tests use half of it, plus MPI's buffers.
NEEDED = 12

#: Elements in the repeated pattern. Not a power of two, so that misplaced data differs.
TILE = 2**20 - 3


def free() -> float:
    """Free memory in GiB, limited by the machine and the container."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        found[name] = int(amount.split()[0]) / 2**20
    limits = [found["MemAvailable"]]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / name for name in ("memory.max", "memory.current"))
        limits.append((int(limit.read_text()) - int(used.read_text())) / 2**30)
    except (OSError, ValueError):  # missing, or "max"
        pass
    return min(limits)


@pytest.fixture(scope="module")
def memory(world):
    """A buffer shared by all tests, because allocation takes most of the time.

    Skips unless on two ranks.
    """
    if world.size != 2:
        pytest.skip("runs on 2 ranks only")
    there = min(MPI.COMM_WORLD.allgather(free()))
    if there < NEEDED:
        pytest.skip(f"needs {NEEDED} GiB of free memory, got {there:.0f}")
    return np.empty(MANY, np.uint8)


def tile(seed, dtype):
    """One pattern of small numbers, so that the sum of two is exact."""
    return np.random.default_rng(seed).integers(0, 60, TILE, np.uint8).astype(dtype)


def fill(array, seed):
    one = tile(seed, array.dtype)
    for start in range(0, array.size, TILE):
        part = array[start : start + TILE]
        part[...] = one[: part.size]
    return array


def check(array, expected):
    """Compare every element with the repeated pattern."""
    words = f"u{array.itemsize}"
    for start in range(0, array.size, TILE):
        part = array[start : start + TILE]
        assert np.array_equal(part.view(words), expected[: part.size].view(words)), start


@pytest.mark.nightly
def test_broadcast_of_more_than_2_31_elements(world, memory):
    if world.me == 1:
        fill(memory, 1)
    dist.broadcast(memory, src=1)
    check(memory, tile(1, np.uint8))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX], ids=repr)
def test_all_reduce_of_more_than_2_31_elements(world, memory, op):
    array = fill(memory.view(np.int8 if op is ReduceOp.SUM else np.uint8), world.me)
    dist.all_reduce(array, op)
    check(array, op.ufunc(tile(0, array.dtype), tile(1, array.dtype)))


def test_all_reduce_of_more_than_2_31_bytes(world, memory):
    array = fill(memory.view(ml_dtypes.bfloat16), world.me)
    dist.all_reduce(array)
    check(array, tile(0, array.dtype) + tile(1, array.dtype))


def test_all_gather_of_more_than_2_31_elements(world, memory):
    """Each input has fewer than 2**31 elements."""
    half = MANY // 2
    dist.all_gather_single(memory, fill(np.empty(half, np.uint8), world.me))
    for r in range(2):
        check(memory[r * half : (r + 1) * half], tile(r, np.uint8))


def test_message_of_more_than_2_31_elements(world, memory):
    if world.me == 0:
        dist.send(fill(memory, 3), 1)
    else:
        memory[:] = 255
        assert dist.recv(memory, 0) == 0
        check(memory, tile(3, np.uint8))


def test_all_to_all_of_more_than_2_31_elements(world, memory):
    """Rank 0 sends almost all data; rank 1 sends 7 bytes."""
    small = np.arange(7, dtype=np.uint8)
    if world.me == 0:
        got = np.zeros(7, np.uint8)
        dist.all_to_all_single(got, fill(memory, 4), [0, 7], [0, MANY])
        assert (got == small).all()
    else:
        memory[:] = 255
        dist.all_to_all_single(memory, small, [MANY, 0], [7, 0])
        check(memory, tile(4, np.uint8))
