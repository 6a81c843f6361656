"""Groups on several simulated nodes, or several ranks on each of several simulated GPUs."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT
from conftest import team as group_of
from device_arrays import forced
from driver import NAMES, Exact, check_same_bits, legal_operations
from mpi4py import MPI
from test_devices import SOME, DeviceCall, UnevenDeviceCall, got, uploaded

import mpicoll as dist
from mpicoll.cuda import capabilities, runtime
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import copy_engine, hierarchical, ipc, peer, shared_gpu
from mpicoll.serialized_mpi import unwrap

pytestmark = pytest.mark.any_mpi

#: Two clusters, one of two ranks, have three.
LEAST = 3
ROUTE = registry.DEVICE["hierarchical"]


def with_min_bytes(route, min_bytes):
    return replace(route, policy=replace(route.policy, min_bytes=min_bytes))


#: Where ranks are: node and GPU of each of n.
PLACES = {
    "two GPUs": lambda n: [(0, 2 * rank // n) for rank in range(n)],
    "two nodes": lambda n: [(2 * rank // n, rank % 2) for rank in range(n)],
    "two nodes across": lambda n: [(int(0 < rank < n - 1), rank // 2) for rank in range(n)],
    "two nodes, a GPU each": lambda n: [(rank % 2, 0) for rank in range(n)],
    "a rank alone": lambda n: [(int(rank == n - 1), rank % 2) for rank in range(n)],
}
#: Those of which all ranks are on rails, if there are as many on each node.
EVEN = ("two nodes", "two nodes across")


class ExactOnDevice(DeviceCall, Exact):
    """A call whose result depends on no order."""


@pytest.fixture(scope="module")
def arrays():
    if MPI.COMM_WORLD.Get_size() < LEAST:
        pytest.skip(f"takes {LEAST} ranks")
    with pytest.MonkeyPatch.context() as patch, forced("auto"):
        made = simulated.Arrays()
        patch.setattr(runtime, "_runtime", made.cuda)
        # Seams everywhere: several chunks and stripes of few elements, but no small calls.
        patch.setattr(hierarchical, "CHUNK", 4096)
        patch.setattr(hierarchical, "LINE", 64)
        patch.setattr(shared_gpu, "SMALL", 64)
        patch.setattr(peer, "WORKSPACE", 64 * 1024)
        patch.setattr(ipc, "SLOT", 4096)
        least(patch, 1)
        yield made
    gc.collect()


def least(patch, nbytes):
    """Calls of so many bytes go by the route from now on."""
    patch.setitem(
        registry.DEVICE,
        "hierarchical",
        with_min_bytes(ROUTE, dict.fromkeys(ROUTE.serves.primitives, nbytes)),
    )


class Where:
    """A group of ranks that are where PLACES says.

    cuda: what MPI does with device memory.
    """

    def __init__(self, arrays, patch, name, cuda="full"):
        self.arrays, self.me, self.n = arrays, dist.get_rank(), dist.get_world_size()
        self.name, self.places = name, PLACES[name](self.n)
        node, self.index = self.places[self.me]
        patch.setattr(capabilities, "node", lambda: f"node {node}")
        patch.setattr(capabilities, "_known", None)
        patch.setenv("MPICOLL_CUDA_AWARE", cuda)
        self.even = name in EVEN and self.n % 2 == 0
        self.team = group_of(name, range(self.n))
        self.group = self.team.group

    @property
    def agreed(self):
        return self.group.resources.find("devices")

    def array(self, count=1000, dtype=np.float32):
        return uploaded(self.arrays, np.full(count, self.me, dtype), self.index)

    def total(self, count=1000):
        """An all_reduce gives the right sum."""
        array = self.array(count)
        dist.all_reduce(array, group=self.group)
        assert (got(array) == sum(range(self.n))).all()


@pytest.fixture
def met(monkeypatch):
    """The calls whose ranks have met to go by the route."""
    calls, works = [], hierarchical.Levels.compare

    def compare(levels, signature, number, failure):
        calls.append(signature)
        return works(levels, signature, number, failure)

    monkeypatch.setattr(hierarchical.Levels, "compare", compare)
    return calls


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def world(arrays):
    dist.init_process_group(timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=list(PLACES))
def kept(request, arrays, world, patch):
    """A group for many tests."""
    where = Where(arrays, patch, request.param)
    yield where
    dist.destroy_process_group(where.group)


@pytest.fixture(params=["two GPUs", "two nodes", "a rank alone"])
def placed(request, arrays, world, monkeypatch):
    """A group that has called."""
    where = Where(arrays, monkeypatch, request.param)
    where.total()
    yield where
    dist.destroy_process_group(where.group)


# ---- Calls ---------------------------------------------------------------------------------------

#: Dtypes and operations in turn, so that the places have different ones.
KINDS = {
    True: itertools.cycle([(dtype, op) for dtype in SOME for op in legal_operations(dtype)]),
    False: itertools.cycle([(dtype, None) for dtype in SOME]),
}
LAYOUTS = itertools.cycle([("C", False), ("third", True), ("1", False), ("C", True)])


@pytest.mark.parametrize("name", ROUTE.serves.primitives)
def test_calls(kept, mpi, met, name):
    """All that it serves, around the borders of stripes and chunks; any layout."""
    row, done = NAMES[name], []
    for count in (0, 17, 1024, 3001):
        dtype, op = next(KINDS[row.reduces])
        layout, async_op = next(LAYOUTS)
        exact = op is not ReduceOp.PREMUL_SUM
        made = (ExactOnDevice if exact else DeviceCall)(
            kept.arrays, name, kept.team, dtype, count, op, count % kept.n if row.root else 0,
            index=kept.index, layout=layout if count else "C",
        )  # fmt: skip
        made.complete(async_op)
        done += [made] if name == "all_reduce" else []
    check_same_bits(mpi, done)
    takes = kept.even or name in ("all_reduce", "reduce", "broadcast")
    assert bool(met) == takes, kept.name


@pytest.mark.parametrize("name", ["two nodes", "two nodes, a GPU each"])
def test_an_mpi_that_takes_no_device_memory(arrays, world, monkeypatch, met, name):
    """Then the rails are staged."""
    where = Where(arrays, monkeypatch, name, cuda="none")
    for count in (1000, 3001):
        where.total(count)
    levels = where.agreed.states["hierarchical"]
    assert met and where.agreed.names == ("hierarchical", "staged")
    assert levels.along is None or levels.along.agreement.names == ("staged",)
    dist.destroy_process_group(where.group)


def test_blocks_of_different_sizes(kept, met):
    """Go by the next route, on all ranks."""
    for sizes in ([500, 0, 3, 17], [0, 700, 0, 1]):
        UnevenDeviceCall(
            kept.arrays, kept.team, by_name["float32"], sizes, ReduceOp.SUM, index=kept.index
        ).complete(False)
    assert not met


# ---- Which groups take it ------------------------------------------------------------------------

#: Which routes the group takes, its clusters, and its rails, of four ranks.
TAKEN = {
    "two GPUs": (("hierarchical", "copy_engine", "ipc", "staged"), "shared_gpu", "peer"),
    "two nodes": (("hierarchical", "direct", "mpi", "staged"), "peer", "direct"),
    "two nodes across": (("hierarchical", "direct", "mpi", "staged"), "peer", "direct"),
    "two nodes, a GPU each": (("hierarchical", "direct", "mpi", "staged"), "shared_gpu", "direct"),
    "a rank alone": (("hierarchical", "direct", "mpi", "staged"), "hierarchical", "direct"),
}


def test_who_takes_it(kept, monkeypatch, met):
    """Small calls go by the next route."""
    names, inside, along = TAKEN[kept.name]
    kept.total()
    agreed = kept.agreed
    assert agreed.names == names and not agreed.missing and agreed.describe()["hierarchical"] == ""
    levels, one_gpu = agreed.states["hierarchical"], len(set(kept.places)) == 1
    assert levels.rails == (2 if kept.even else 1) and not one_gpu
    if kept.n == 4:
        assert levels.inside is None or levels.inside.agreement.names[0] == inside
        assert levels.along is None or levels.along.agreement.names[0] == along
    least(monkeypatch, 4000)
    group = dist.new_group()
    for count, takes in ((999, 0), (1000, 1)):
        array = kept.array(count)
        met.clear()
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(kept.n))).all() and bool(met) == takes
    dist.destroy_process_group(group)


def test_copies_inside_a_node(kept, monkeypatch):
    """Where nothing is combined, the ranks of a node copy from each other's arrays."""
    route = registry.DEVICE["copy_engine"]
    every = with_min_bytes(route, dict.fromkeys(route.policy.min_bytes, 1))
    monkeypatch.setitem(registry.DEVICE, "copy_engine", every)
    group, calls = dist.new_group(), []
    works = copy_engine.Copiers.work_together

    def noted(part, kind, *how):
        calls.append((part, kind.primitive.name))
        return works(part, kind, *how)

    monkeypatch.setattr(copy_engine.Copiers, "work_together", noted)
    total, spread = kept.array(3000), kept.array(3000)
    dist.all_reduce(total, group=group)
    dist.broadcast(spread, 0, group=group)
    assert (got(total) == sum(range(kept.n))).all() and (got(spread) == 0).all()
    levels = group.resources.find("devices").states["hierarchical"]
    states = {} if levels.inside is None else levels.inside.agreement.states
    if "copy_engine" in states and "hierarchical" not in states:
        name = "broadcast" if levels.rails == 1 else "all_gather"
        assert (states["copy_engine"], name) in calls
    dist.destroy_process_group(group)


@pytest.mark.parametrize("how", ["on one GPU", "with a GPU each", "on a node each"])
def test_who_does_not(arrays, world, monkeypatch, how):
    """And why; without levels it is refused where it is forced."""
    places = {
        "on one GPU": ("all ranks share a GPU", lambda rank: (0, 0)),
        "with a GPU each": ("each rank has a GPU to itself", lambda rank: (0, rank)),
        "on a node each": ("each rank has a node to itself", lambda rank: (rank, 0)),
    }
    words, place = places[how]
    monkeypatch.setitem(PLACES, how, lambda n: list(map(place, range(n))))
    many = simulated.Arrays(4)
    monkeypatch.setattr(runtime, "_runtime", many.cuda)
    where = Where(many, monkeypatch, how)
    where.total()
    assert "hierarchical" not in where.agreed.names
    assert where.agreed.describe()["hierarchical"] == words
    dist.destroy_process_group(where.group)
    with forced("hierarchical"):
        where = Where(many, monkeypatch, how)
        with pytest.raises(UnsupportedError, match=f"hierarchical: {words}; unset it"):
            where.total()
        dist.destroy_process_group(where.group)


@pytest.mark.parametrize("name", ["two GPUs", "two nodes"])
def test_forced(arrays, world, monkeypatch, name):
    """Then it takes small calls, too, and refuses by name what it does not serve."""
    with forced("hierarchical"):
        where = Where(arrays, monkeypatch, name)
        least(monkeypatch, 4000)
        for count in (0, 10, 3000):
            where.total(count)
        assert where.agreed.names == ("hierarchical",)
        array = where.array(where.n)
        with pytest.raises(UnsupportedError, match="hierarchical does not serve"):
            dist.scatter(array, [array] * where.n if where.me == 0 else None, group=where.group)
        counts = [500, *[1] * (where.n - 1)]
        outputs = [where.array(count) for count in counts]
        with pytest.raises(UnsupportedError, match="hierarchical"):
            dist.all_gather(outputs, where.array(counts[where.me]), group=where.group)
        where.total()
        dist.destroy_process_group(where.group)


@pytest.mark.parametrize("name", ["two GPUs", "two nodes"])
def test_where_ranks_cannot_map_memory(arrays, world, monkeypatch, name):
    """Of one cluster: all take another route, and the first rank says why."""

    def refuse(*what):
        raise RuntimeError("no such thing here")

    where = Where(arrays, monkeypatch, name)
    if where.places[where.me] == where.places[0]:
        for what in ("open", "open_event"):
            monkeypatch.setattr(arrays.cuda, what, refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        where.total()
    told = [str(one.message) for one in caught if "hierarchical is off" in str(one.message)]
    if where.n == 4 or name == "two GPUs":
        assert len(told) == (where.me == 0)
        assert "hierarchical" not in where.agreed.names
        assert "no such thing here" in where.agreed.describe()["hierarchical"]
    dist.destroy_process_group(where.group)


# ---- Order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [0, 1])
def test_devices_that_are_ahead(placed, eager):
    """Whatever a rank's device has done: nothing is read early, or written late."""
    placed.arrays.cuda.eager = placed.me == eager
    array = placed.array(3000)
    array.host[...] = 1
    array.upload()
    works = []
    for turn in range(4):
        works.append(dist.all_reduce(array, group=placed.group, async_op=turn % 2 == 1))
        if works[-1] is not None:
            works[-1].wait()
        array.double()
    assert (got(array) == (2.0 * placed.n) ** 4).all()
    placed.arrays.cuda.eager = False


def test_groups_leave_nothing_open(placed, monkeypatch):
    """In a loop of groups."""
    cuda, array = placed.arrays.cuda, placed.array(3000)
    gc.collect()
    opened, streams = len(cuda.opened), len(cuda.streams)
    for _ in range(2):
        group = dist.new_group()
        array.host[...] = placed.me
        array.upload()
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(placed.n))).all()
        levels = group.resources.find("devices").states["hierarchical"]
        parts = [part.group for part in (levels.inside, levels.along) if part is not None]
        dist.destroy_process_group(group)
        assert all(unwrap(part.inner) == MPI.COMM_NULL for part in parts)
        del levels, parts
        gc.collect()
        assert len(cuda.opened) == opened and len(cuda.streams) == streams


# ---- Trouble -------------------------------------------------------------------------------------


def test_calls_that_differ(placed):
    """All learn it, whatever cluster they are in, and go on."""
    for _ in range(2):
        with pytest.raises(MismatchError):
            dist.broadcast(placed.array(), 0 if placed.me else 1, group=placed.group)
        with pytest.raises(MismatchError, match=r"(2000|1000) elements"):
            dist.all_reduce(placed.array(2000 if placed.me else 1000), group=placed.group)
    placed.total(3000)


@pytest.mark.parametrize(
    ("what", "who"), [("allocate", 0), ("scale", -1), ("find_allocation", -1), ("pack", 0)]
)
def test_a_rank_that_fails(placed, mpi, monkeypatch, what, who):
    """Before its first step, or in it: all leave the call, whatever cluster they are in, and the
    group goes on.
    """
    cuda, who = placed.arrays.cuda, who % placed.n
    levels, state = placed.agreed.states["hierarchical"], []
    narrow = placed.arrays.make(
        np.full(3000, placed.me, by_name["bfloat16"].numpy), placed.index,
        "third" if what == "pack" else "C",
    )  # fmt: skip
    narrow.upload()
    name = "allocate" if what == "pack" else what
    works = getattr(cuda, name)

    def fails(*how):
        if placed.me == who and not state:
            state.append(how)
            raise RuntimeError("it cannot be done")
        return works(*how)

    if what in ("allocate", "pack"):  # a group keeps its scratch
        levels.context._blocks, levels.context._since = [], []
    monkeypatch.setattr(cuda, name, fails)
    error = None
    try:
        dist.all_reduce(narrow, group=placed.group)
    except RuntimeError as caught:
        error = caught
    monkeypatch.setattr(cuda, name, works)
    said = mpi.allgather((bool(state), str(error)))
    if any(failed for failed, _ in said):
        for rank, (_, words) in enumerate(said):
            assert ("it cannot be done" if rank == who else "another rank failed") in words
        assert isinstance(error, DistBackendError) or placed.me == who
    else:
        assert what == "find_allocation" and error is None
    for count in (10, 3000):
        placed.total(count)


def test_devices_are_asked_before_the_ranks_meet(placed, monkeypatch):
    """And not behind that: no rank alone leaves out a step for which others wait."""
    levels, here, met = placed.agreed.states["hierarchical"], threading.get_ident(), []
    compare = levels.compare

    def find_failure(wait=False):
        behind = len(met) == 1 and threading.get_ident() == here
        return DistBackendError("one that is late") if behind and placed.me == 0 else None

    monkeypatch.setattr(levels, "compare", lambda *how: compare(*how) or met.append(how))
    monkeypatch.setattr(levels, "find_failure", find_failure)
    placed.total(10)
    assert len(met) == 2


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("place", ["two GPUs", "two nodes", "two nodes, staged"])
def test_a_rank_that_fails_along_the_rails(arrays, world, monkeypatch, mpi, place, name):
    """Whatever carries the rails: nobody waits for it, and all learn it, on rails or not."""
    where = Where(
        arrays, monkeypatch, place.split(", ")[0], "none" if "staged" in place else "full"
    )
    if name in ("reduce_scatter", "all_gather") and not where.even:
        dist.destroy_process_group(where.group)
        pytest.skip("goes by another route")
    where.total()
    levels = where.agreed.states["hierarchical"]
    step, begun = hierarchical.Step.__call__, time.monotonic()
    who = [levels.clusters[0][place] for place in levels.lanes[0]][-1]

    def fails(self, send, recv, extent, root=0, before=None):
        if where.me == who and self._part is levels.along.group:
            before = lambda: 1 / 0  # noqa: E731
        step(self, send, recv, extent, root, before)

    def call():
        array = where.array(3000 * where.n)
        if name == "all_reduce":
            dist.all_reduce(array, group=where.group)
        elif name == "broadcast":
            dist.broadcast(array, who, group=where.group)
        elif name == "reduce_scatter":
            dist.reduce_scatter_single(where.array(3000), array, group=where.group)
        else:
            dist.all_gather_single(array, where.array(3000), group=where.group)
        got(array)

    monkeypatch.setattr(hierarchical.Step, "__call__", fails)
    if where.me == who:
        with pytest.raises(ZeroDivisionError):
            call()
    else:
        with pytest.raises(DistBackendError):
            call()
            while where.group.error is None and time.monotonic() < begun + TIMEOUT / 2:
                time.sleep(0.01)
            call()
    assert time.monotonic() < begun + TIMEOUT / 2
    mpi.Barrier()
    # Who has heard of it from a rank that knows names that one.
    meant = rf"rank {who}\b.* failed in call 2|rank \d has closed the group, .* has failed"
    with pytest.raises(DistBackendError, match=meant):
        dist.barrier(group=where.group)
    monkeypatch.undo()
    dist.destroy_process_group(where.group)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_rank_that_fails_behind_the_rails(arrays, world, monkeypatch, chunks):
    """Fails the call on all ranks, with the next chunk; of the last one in its cluster alone. The
    group goes on.
    """
    where = Where(arrays, monkeypatch, "two GPUs")
    where.total()
    levels = where.agreed.states["hierarchical"]
    cluster = max(levels.clusters, key=len)
    if len(cluster) == 1:
        dist.destroy_process_group(where.group)
        pytest.skip("no rank shares its GPU")
    step, inside = hierarchical.Step.__call__, []

    def fails(self, send, recv, extent, root=0, before=None):
        inside.append(levels.inside is not None and self._part is levels.inside.group)
        if where.me == cluster[0] and inside[-1] and inside.count(True) == 2:
            before = lambda: 1 / 0  # noqa: E731
        step(self, send, recv, extent, root, before)

    count = chunks * (hierarchical.CHUNK // 4) - 5
    with monkeypatch.context() as patched:
        patched.setattr(hierarchical.Step, "__call__", fails)
        if where.me == cluster[0]:
            with pytest.raises(ZeroDivisionError):
                where.total(count)
        elif chunks > 1 or where.me in cluster:
            with pytest.raises(DistBackendError, match="another rank failed in this call"):
                where.total(count)
        else:
            where.total(count)
    where.total(count)
    dist.destroy_process_group(where.group)


def test_routes_that_parts_lose(arrays, world, monkeypatch):
    """Are told by name, on the first rank, and by what ``doctor`` asks."""

    def refuse(*what):
        raise RuntimeError("no such thing here")

    where = Where(arrays, monkeypatch, "two GPUs")
    last = where.places[-1]
    alone = where.places.count(last) == 1  # its cluster has no part
    meant = where.places[0] if alone else last
    if where.places[where.me] == meant:
        monkeypatch.setattr(arrays.cuda, "create_shared_event", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        where.total()
    ranks = [rank for rank, place in enumerate(where.places) if place == meant]
    words = f"ranks {', '.join(map(str, ranks))} use ipc, because shared_gpu is off: rank 0: cannot"
    told = [str(one.message) for one in caught if "shared_gpu is off" in str(one.message)]
    assert len(told) == (where.me == 0) and all(words in each for each in told)
    assert where.agreed.names[0] == "hierarchical"
    assert f"in hierarchical {words}" in where.agreed.describe()["shared_gpu"]
    dist.destroy_process_group(where.group)


def test_a_group_that_is_broken(placed, mpi):
    """Its parts are, too: calls that wait there end, and each rank learns it."""
    levels, error = placed.agreed.states["hierarchical"], DistBackendError("a call has timed out")
    parts = [part for part in (levels.inside, levels.along) if part is not None]
    for part in (None, *parts):
        assert (part or placed).group.error is None
    mpi.Barrier()
    placed.group.fail(error)
    placed.group.resources.leave()
    for part in parts:
        assert part.group.error is error
    with pytest.raises(DistBackendError, match="a call has timed out"):
        dist.barrier(group=placed.group)
