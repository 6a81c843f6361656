"""The route of GPUs that reach each other's memory, one for each rank: on simulated devices."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT
from conftest import team as group_of
from device_arrays import forced
from driver import DTYPES, NAMES, legal_operations
from test_devices import SOME, DeviceCall, UnevenDeviceCall, got, uploaded

import mpicoll as dist
from mpicoll.cuda import runtime
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.kernels import peers
from mpicoll.routes import registry
from mpicoll.routes.device import peer

pytestmark = pytest.mark.on_3

PRIMITIVES = registry.DEVICE["peer"].primitives


class Arrays(simulated.Arrays):
    """Of four devices: each rank has one of its own."""

    devices = 4


@pytest.fixture(scope="module")
def arrays():
    with pytest.MonkeyPatch.context() as patch, forced("auto"):
        made = Arrays()
        patch.setattr(runtime, "_runtime", made.cuda)
        patch.setenv("MPICOLL_CUDA_AWARE", "none")
        # Seams everywhere: several chunks of each block, and both ways for few elements.
        patch.setattr(peer, "WORKSPACE", 16 * 1024)
        patch.setattr(peers, "LEAST", 256)
        patch.setattr(peers, "ONE_SHOT", 2048)
        yield made
    gc.collect()


@pytest.fixture(scope="module")
def teams(arrays):
    dist.init_process_group(timeout=TIMEOUT)
    n = dist.get_world_size()
    yield [group_of("world", range(n)), group_of("reordered", range(n)[::-1])]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(teams):
    return teams[0]


def taken(group):
    """The routes of a group that has called."""
    return group.resources.find("devices").names


@pytest.mark.parametrize("name", PRIMITIVES)
def test_calls(arrays, teams, name):
    """All that it serves, by the route that mpicoll chooses; any layout, synchronous or not."""
    cases = itertools.cycle([("C", False), ("third", True), ("1", False), ("C", True)])
    for dtype in SOME if name == "broadcast" else DTYPES:
        reduces = NAMES[name].reduces
        ops = legal_operations(dtype) if reduces else [None]
        for op in ops if dtype in SOME else ops[:1]:
            for count, (layout, async_op) in zip((1, 100, 3001), cases, strict=False):
                team = teams[count % 2]
                DeviceCall(
                    arrays, name, team, dtype, count, op, count % team.size
                    if NAMES[name].root else 0, layout=layout,
                ).complete(async_op)  # fmt: skip
    for team in teams:
        assert team.size == 1 or taken(team.group)[0] == "peer"


def test_blocks_of_different_sizes(arrays, world):
    for dtype in SOME:
        for turn, op in enumerate(legal_operations(dtype)):
            for sizes in ([5, 0, 3, 17], [0, 700, 0, 1], [300, 1, 2000, 40]):
                UnevenDeviceCall(arrays, world, dtype, sizes, op).complete(turn % 2 == 1)
    counts = [5, 0, 300, 17][: world.size]
    given = uploaded(arrays, np.full(counts[world.me], world.me + 1, "i8"), world.me)
    outputs = [uploaded(arrays, np.zeros(count, "i8"), world.me) for count in counts]
    dist.all_gather(outputs, given)
    for rank, output in enumerate(outputs):
        assert (got(output) == rank + 1).all()


def test_the_host_meets_nobody(arrays, world, mpi):
    """A rank goes on while the others have not made the call."""
    array = uploaded(arrays, np.full(1000, world.me, np.float32), world.me)
    mpi.Barrier()
    if world.me == 0:
        for _ in range(3):
            dist.all_reduce(array)
    mpi.Barrier()
    if world.me:
        for _ in range(3):
            dist.all_reduce(array)
    assert (got(array) == sum(range(world.size)) * world.size**2).all()


def test_ranks_that_share_a_gpu(arrays, world):
    """Take another route, without a warning."""
    if world.size == 1:
        return
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32))
    dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all()
    assert "peer" not in taken(group)
    why = group.resources.find("devices").describe()["peer"]
    assert why == f"ranks {', '.join(map(str, range(world.size)))} share a GPU"
    dist.destroy_process_group(group)
    with forced("peer"), pytest.raises(UnsupportedError, match="share a GPU; unset it"):
        dist.all_reduce(array, group=dist.new_group())


# ---- Graphs --------------------------------------------------------------------------------------


def test_graphs(arrays, world):
    """Calls are captured and replayed, among others; nothing happens in the capture itself."""
    if world.size == 1:
        pytest.skip("one rank goes by another route")
    count = 700
    array = uploaded(arrays, np.full(count, world.me + 1, np.int64), world.me)
    small = uploaded(arrays, np.full(3, 1, np.float32), world.me)
    output = uploaded(arrays, np.zeros((world.size, 3), np.float32), world.me)
    for other in (small, output):
        other.number = array.number  # one stream
        other.upload()
    dist.all_reduce(array)
    dist.all_gather_single(output, small)
    total = sum(range(1, world.size + 1))
    assert (got(array) == total).all()
    with arrays.capturing(array) as graph:
        dist.all_reduce(array)
        array.double()
        dist.all_gather_single(output, small)
    assert (got(array) == total).all() and len(graph.tasks) == 3
    for turn in range(4):
        if turn == world.me:
            time.sleep(0.01)
        graph.launch()
        total *= 2 * world.size
        if turn % 2:
            dist.all_reduce(array)
            total *= world.size
    assert (got(array) == total).all() and (got(output) == 1).all()


def test_what_cannot_be_captured(arrays, world):
    """Is refused by name, on all ranks, and the capture goes on."""
    if world.size == 1:
        pytest.skip("one rank goes by another route")
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    narrow = uploaded(arrays, np.full(50, 1, np.int16), world.me)
    third = arrays.make(np.ones(50, np.float32), world.me, "third")
    for other in (narrow, third):
        other.number = array.number
        other.upload()
    group = dist.new_group()
    dist.all_reduce(array)
    dist.all_reduce(third)
    arrays.cuda.loaded = {line for line in arrays.cuda.loaded if "int16" not in line}
    with arrays.capturing(array):
        with pytest.raises(UnsupportedError, match="captured"):
            dist.all_reduce(array, group=group)  # the first call of a group
        with pytest.raises(UnsupportedError, match=r"captured .* without async_op"):
            dist.all_reduce(array, async_op=True)
        with pytest.raises(UnsupportedError, match=r"captured .* contiguous"):
            dist.all_reduce(third)
        with pytest.raises(UnsupportedError, match="captured"):
            dist.isend(array, 0)
    dist.all_reduce(narrow)
    arrays.cuda.loaded = set()
    with arrays.capturing(array), pytest.raises(UnsupportedError, match=r"captured .* not there"):
        dist.all_reduce(narrow)
    dist.all_reduce(narrow)
    assert (got(narrow) == world.size**2).all() and (got(array) == world.size).all()
    dist.destroy_process_group(group)


# ---- Trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wrong", "late", "cannot be mapped"])
def test_a_try_that_fails(arrays, world, monkeypatch, how):
    """All take another route, and the first rank says why."""
    if world.size == 1:
        return
    monkeypatch.setattr(peer, "TRY_LIMIT", 0.3)
    last = world.size - 1
    works = {name: getattr(arrays.cuda, name) for name in ("collective", "open")}
    if world.me == last:
        if how == "wrong":
            monkeypatch.setattr(
                arrays.cuda, "collective",
                lambda i, p, call, s: works["collective"](i, p, replace(call, send=call.recv), s),
            )  # fmt: skip
        elif how == "late":
            monkeypatch.setattr(arrays.cuda, "collective", lambda *what: None)
        else:

            def refuse(*what):
                raise RuntimeError("no peer access")

            monkeypatch.setattr(arrays.cuda, "open", refuse)
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    words = {"wrong": "is wrong there", "late": "does not arrive within"}.get(how, "no peer access")
    if world.me == 0:
        with pytest.warns(RuntimeWarning, match=words):
            dist.all_reduce(array, group=group)
    else:
        dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all() and "peer" not in taken(group)
    dist.destroy_process_group(group)


def test_ranks_that_give_up(arrays, world):
    """All learn it from their next call, by name; the group is of no use any more."""
    if world.size == 1:
        return
    group = dist.new_group(timeout=2)
    mine = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    dist.all_reduce(mine, group=group)
    assert (got(mine) == sum(range(world.size))).all()
    found = group.resources.find("devices").peer
    if world.me:  # rank 0 has not called
        given, output = (
            uploaded(arrays, np.zeros(peer._TRIED * n, "u1"), world.me) for n in (1, 4)
        )
        call = peer._tried(given.memory.address, output.memory.address, world.size)
        found.carry_out(call)
        found.context.synchronize(found.context.work)
    dist.barrier()
    if world.me == 0:
        found.carry_out(peer._tried(mine.memory.address, mine.memory.address, world.size))
        found.context.synchronize(found.context.work)
    for _ in range(2):
        with pytest.raises(DistBackendError, match=r"rank \d's GPU has waited 2\S* s for rank 0"):
            dist.all_reduce(mine, group=group)
    dist.destroy_process_group(group)


def test_calls_that_differ(arrays, world):
    """The kernels compare what the hosts have not."""
    if world.size == 1:
        return
    group = dist.new_group(timeout=30)
    array = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    for _ in range(3):
        dist.all_reduce(array, group=group)
    found, begun = group.resources.find("devices").peer, time.monotonic()
    call = peer._tried(array.memory.address, array.memory.address, world.size)
    found.carry_out(replace(call, starts=[4 * k for k in range(world.size + 1)], call=world.me + 1))
    found.context.synchronize(found.context.work)
    assert time.monotonic() - begun < 20, "it is not the time that has ended this"
    with pytest.raises((DistBackendError, MismatchError), match="do not belong together"):
        dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)
