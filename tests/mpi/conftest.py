"""Groups that the tests call in.

Every rank runs every test, in the same order. The default group is created once per module, so that
modules can also create and destroy their own.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Call, Team, team
from mpi4py import MPI

import mpicoll as dist
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.failures import consistency
from mpicoll.kernels import library
from mpicoll.routes import registry

# Hundreds of tests cause a mismatch, and each mismatch writes a flight record.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")
os.environ.setdefault(
    "TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/mpicoll-tests-{os.getuid()}/rank_"
)

#: Timeout of the default group, in seconds. It ends a run in which a rank is missing.
TIMEOUT = 60

needs_2_ranks = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks")
needs_shared_memory = pytest.mark.skipif(
    library.kernels is None or not hasattr(os, "memfd_create"), reason="needs the C library, Linux"
)
on_2_ranks = pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="runs on 2 ranks only")


@pytest.fixture(scope="module")
def world():
    dist.init_process_group(timeout=TIMEOUT)
    yield team("world", range(dist.get_world_size()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def teams(world):
    """Three groups: all ranks, a subset, and all ranks in another order."""
    n = world.size
    subset = {1: [0], 2: [1], 3: [0, 2]}.get(n, list(range(1, n)))
    reordered = {3: [1, 2, 0], 4: [2, 0, 3, 1]}.get(n, list(range(n))[::-1])
    return [world, team("subset", subset), team("reordered", reordered)]


def members(teams: list[Team], least: int = 1) -> list[Team]:
    """Return the groups of at least ``least`` ranks that this rank is a member of."""
    return [team for team in teams if team.me is not None and team.size >= least]


@pytest.fixture
def new_team(world):
    """Create groups that are destroyed after the test: ``new_team(name, ranks=all ranks)``."""
    made = []

    def create(name: str, ranks: Iterable[int] = range(world.size), **options: Any) -> Team:
        made.append(team(name, ranks, **options))
        return made[-1]

    yield create
    for one in reversed(made):
        if one.me is not None and not one.group.closed:
            dist.destroy_process_group(one.group)


def check_usable(group: Any = None) -> None:
    """Check that the ranks of a group make the same calls and get the right sum."""
    x = np.ones(3)
    dist.all_reduce(x, group=group)
    assert (x == dist.get_world_size(group)).all()


def pass_first_calls(group: Any) -> None:
    """Make a group's first calls, which the ranks compare by messages, and one stride more."""
    for _ in range(2 * consistency.FIRST + 2):
        dist.barrier(group)


def check_mismatches(team: Team, odd: bool) -> None:
    """Check that all ranks raise if the calls of the odd ranks differ, and that the group stays
    usable.
    """
    f32, SUM = np.float32, ReduceOp.SUM
    for count, dtype, op, words in (
        (4097 if odd else 10**6, f32, SUM, "4097 elements of float32, SUM"),
        (10**6 if odd else 4097, f32, SUM, "4097 elements of float32, SUM"),
        (0 if odd else 1, f32, SUM, "all_reduce of 0 elements of float32, SUM"),
        (700, np.int32 if odd else f32, SUM, "all_reduce of 700 elements of int32, SUM"),
        (4096, f32, ReduceOp.AVG if odd else SUM, "4096 elements of float32, AVG"),
        (4096, np.complex64 if odd else np.float64, SUM, "4096 elements of complex64"),
    ):
        for async_op in (False, True):
            array = np.ones(count, dtype)
            with pytest.raises(dist.MismatchError, match=f"rank {team.me} of .*{words}"):
                work = dist.all_reduce(array, op, team.group, async_op=async_op)
                if work is not None:
                    work.wait()
            Call("all_reduce", team, by_name["float32"], 300000, SUM).run()


def check_size_mismatch(team: Team, odd: bool, count: int) -> None:
    """Check that all ranks raise if the blocks of the odd ranks have one element more."""
    words = f"reduce_scatter_single of {count + 1} elements of int32"
    mine = count + odd
    with pytest.raises(dist.MismatchError, match=words):
        dist.reduce_scatter_single(
            np.empty(mine, np.int32), np.ones(mine * team.size, np.int32), group=team.group
        )


def mapped_segments() -> int:
    """Return the number of mpicoll's shared segments in the memory of this process."""
    return Path("/proc/self/maps").read_text().count("memfd:mpicoll")


def watch_routes(patch: pytest.MonkeyPatch, may_build: Callable[[Any, Any], bool]) -> list[str]:
    """Record the names of host routes that are built, and check ``may_build(route, kind)``."""
    built: list[str] = []
    for name, route in registry.HOST.items():

        def build(kind: Any, route: Any = route) -> Any:
            assert may_build(route, kind), (route.name, kind)
            built.append(route.name)
            return route.build(kind)

        patch.setitem(registry.HOST, name, route._replace(build=build))
    return built


def run_threads(*functions: Callable[[], object]) -> None:
    """Run each function in its own thread, and wait for all of them."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def mpi():
    """MPI_COMM_WORLD, which mpicoll does not use."""
    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")
