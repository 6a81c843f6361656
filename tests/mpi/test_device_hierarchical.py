"""Route ``hierarchical``: several simulated nodes, or several ranks on each simulated GPU."""

from __future__ import annotations

import gc
import itertools
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
from mpicoll.routes.device import hierarchical, ipc, peer, shared_gpu
from mpicoll.serialized_mpi import unwrap

pytestmark = pytest.mark.any_mpi

#: Two clusters, one with two ranks.
MIN_RANKS = 3
ROUTE = registry.DEVICE["hierarchical"]


def with_min_bytes(route, min_bytes):
    return replace(route, policy=replace(route.policy, min_bytes=min_bytes))


#: Node and GPU of each of n ranks.
PLACES = {
    "two GPUs": lambda n: [(0, 2 * rank // n) for rank in range(n)],
    "two nodes": lambda n: [(2 * rank // n, rank % 2) for rank in range(n)],
    "two nodes across": lambda n: [(int(0 < rank < n - 1), rank // 2) for rank in range(n)],
    "two nodes, a GPU each": lambda n: [(rank % 2, 0) for rank in range(n)],
    "a rank alone": lambda n: [(int(rank == n - 1), rank % 2) for rank in range(n)],
}
#: Places where every rank is on a rail, if the nodes have equal numbers of ranks.
EVEN = ("two nodes", "two nodes across")


class ExactOnDevice(DeviceCall, Exact):
    """A call whose result does not depend on the order of reductions."""


@pytest.fixture(scope="module")
def arrays():
    if MPI.COMM_WORLD.Get_size() < MIN_RANKS:
        pytest.skip(f"takes {MIN_RANKS} ranks")
    with pytest.MonkeyPatch.context() as patch, forced("auto"):
        made = simulated.Arrays()
        patch.setattr(runtime, "_runtime", made.cuda)
        # Several chunks and stripes with few elements.
        patch.setattr(hierarchical, "CHUNK", 4096)
        patch.setattr(hierarchical, "LINE", 64)
        patch.setattr(shared_gpu, "SMALL", 64)
        patch.setattr(peer, "WORKSPACE", 64 * 1024)
        patch.setattr(ipc, "SLOT", 4096)
        set_min_bytes(patch, 1)
        yield made
    gc.collect()


def set_min_bytes(patch, nbytes):
    """Select the route for calls of at least ``nbytes``."""
    patch.setitem(
        registry.DEVICE,
        "hierarchical",
        with_min_bytes(ROUTE, dict.fromkeys(ROUTE.serves.primitives, nbytes)),
    )


class PlacedGroup:
    """A group whose ranks have the nodes and GPUs of a row of PLACES.

    cuda: MPI's support for device memory.
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

    def check_all_reduce(self, count=1000):
        array = self.array(count)
        dist.all_reduce(array, group=self.group)
        assert (got(array) == sum(range(self.n))).all()


@pytest.fixture
def compared(monkeypatch):
    """The signatures of the calls that used the route."""
    calls, original = [], hierarchical.Levels.compare

    def compare(levels, signature, number, failure):
        calls.append(signature)
        return original(levels, signature, number, failure)

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
    placed = PlacedGroup(arrays, patch, request.param)
    yield placed
    dist.destroy_process_group(placed.group)


@pytest.fixture(params=["two GPUs", "two nodes", "a rank alone"])
def placed(request, arrays, world, monkeypatch):
    """A group that has made a call."""
    placed = PlacedGroup(arrays, monkeypatch, request.param)
    placed.check_all_reduce()
    yield placed
    dist.destroy_process_group(placed.group)


#: Dtypes and operations in turn, so that each place tests different ones.
KINDS = {
    True: itertools.cycle([(dtype, op) for dtype in SOME for op in legal_operations(dtype)]),
    False: itertools.cycle([(dtype, None) for dtype in SOME]),
}
LAYOUTS = itertools.cycle([("C", False), ("third", True), ("1", False), ("C", True)])


@pytest.mark.parametrize("name", ROUTE.serves.primitives)
def test_calls(kept, mpi, compared, name):
    """Every primitive of the route, at boundaries of stripes and chunks, in any layout."""
    row, done = NAMES[name], []
    for count in (0, 17, 1024, 3001):
        dtype, op = next(KINDS[row.reduces])
        layout, async_op = next(LAYOUTS)
        exact = op is not ReduceOp.PREMUL_SUM
        made = (ExactOnDevice if exact else DeviceCall)(
            kept.arrays, name, kept.team, dtype, count, op, count % kept.n if row.root else 0,
            index=kept.index, layout=layout if count else "C",
        )  # fmt: skip
        made.run_and_check(async_op)
        done += [made] if name == "all_reduce" else []
    check_same_bits(mpi, done)
    uses_route = kept.even or name in ("all_reduce", "reduce", "broadcast")
    assert bool(compared) == uses_route, kept.name


@pytest.mark.parametrize("name", ["two nodes", "two nodes, a GPU each"])
def test_rails_are_staged_if_mpi_does_not_support_device_memory(
    arrays, world, monkeypatch, compared, name
):
    placed = PlacedGroup(arrays, monkeypatch, name, cuda="none")
    for count in (1000, 3001):
        placed.check_all_reduce(count)
    levels = placed.agreed.states["hierarchical"]
    assert compared and placed.agreed.names == ("hierarchical", "staged")
    assert levels.along is None or levels.along.agreement.names == ("staged",)
    dist.destroy_process_group(placed.group)


def test_blocks_of_different_sizes_use_the_next_route(kept, compared):
    for sizes in ([500, 0, 3, 17], [0, 700, 0, 1]):
        UnevenDeviceCall(
            kept.arrays, kept.team, by_name["float32"], sizes, ReduceOp.SUM, index=kept.index
        ).run_and_check()
    assert not compared


#: Routes of the group, of its clusters and of its rails, with four ranks.
ROUTES = {
    "two GPUs": (("hierarchical", "copy_engine", "ipc", "staged"), "shared_gpu", "peer"),
    "two nodes": (("hierarchical", "direct", "mpi", "staged"), "peer", "direct"),
    "two nodes across": (("hierarchical", "direct", "mpi", "staged"), "peer", "direct"),
    "two nodes, a GPU each": (("hierarchical", "direct", "mpi", "staged"), "shared_gpu", "direct"),
    "a rank alone": (("hierarchical", "direct", "mpi", "staged"), "hierarchical", "direct"),
}


def test_selected_groups_and_sizes(kept, monkeypatch, compared):
    """Small calls use the next route."""
    names, inside, along = ROUTES[kept.name]
    kept.check_all_reduce()
    agreed = kept.agreed
    assert agreed.names == names and not agreed.missing and agreed.describe()["hierarchical"] == ""
    levels, one_gpu = agreed.states["hierarchical"], len(set(kept.places)) == 1
    assert levels.rails == (2 if kept.even else 1) and not one_gpu
    if kept.n == 4:
        assert levels.inside is None or levels.inside.agreement.names[0] == inside
        assert levels.along is None or levels.along.agreement.names[0] == along
    set_min_bytes(monkeypatch, 4000)
    group = dist.new_group()
    for count, uses_route in ((999, 0), (1000, 1)):
        array = kept.array(count)
        compared.clear()
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(kept.n))).all() and bool(compared) == uses_route
    dist.destroy_process_group(group)


@pytest.mark.parametrize("how", ["on one GPU", "with a GPU each", "on a node each"])
def test_groups_without_levels_do_not_use_the_route(arrays, world, monkeypatch, how):
    """``describe`` has the reason. Forcing the route raises."""
    places = {
        "on one GPU": ("all ranks share a GPU", lambda rank: (0, 0)),
        "with a GPU each": ("each rank has a GPU to itself", lambda rank: (0, rank)),
        "on a node each": ("each rank has a node to itself", lambda rank: (rank, 0)),
    }
    reason, place = places[how]
    monkeypatch.setitem(PLACES, how, lambda n: list(map(place, range(n))))
    many = simulated.Arrays(4)
    monkeypatch.setattr(runtime, "_runtime", many.cuda)
    placed = PlacedGroup(many, monkeypatch, how)
    placed.check_all_reduce()
    assert "hierarchical" not in placed.agreed.names
    assert placed.agreed.describe()["hierarchical"] == reason
    dist.destroy_process_group(placed.group)
    with forced("hierarchical"):
        placed = PlacedGroup(many, monkeypatch, how)
        with pytest.raises(UnsupportedError, match=f"hierarchical: {reason}; unset it"):
            placed.check_all_reduce()
        dist.destroy_process_group(placed.group)


@pytest.mark.parametrize("name", ["two GPUs", "two nodes"])
def test_forced_route_serves_small_calls_and_raises_for_other_primitives(
    arrays, world, monkeypatch, name
):
    with forced("hierarchical"):
        placed = PlacedGroup(arrays, monkeypatch, name)
        set_min_bytes(monkeypatch, 4000)
        for count in (0, 10, 3000):
            placed.check_all_reduce(count)
        assert placed.agreed.names == ("hierarchical",)
        array = placed.array(placed.n)
        with pytest.raises(UnsupportedError, match="hierarchical does not serve"):
            dist.scatter(array, [array] * placed.n if placed.me == 0 else None, group=placed.group)
        counts = [500, *[1] * (placed.n - 1)]
        outputs = [placed.array(count) for count in counts]
        with pytest.raises(UnsupportedError, match="hierarchical"):
            dist.all_gather(outputs, placed.array(counts[placed.me]), group=placed.group)
        placed.check_all_reduce()
        dist.destroy_process_group(placed.group)


@pytest.mark.parametrize("name", ["two GPUs", "two nodes"])
def test_route_is_off_if_a_cluster_cannot_map_memory(arrays, world, monkeypatch, name):
    """All ranks use another route, and rank 0 warns."""

    def refuse(*arguments):
        raise RuntimeError("no such thing here")

    placed = PlacedGroup(arrays, monkeypatch, name)
    if placed.places[placed.me] == placed.places[0]:
        for what in ("open", "open_event"):
            monkeypatch.setattr(arrays.cuda, what, refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed.check_all_reduce()
    warned = [str(one.message) for one in caught if "hierarchical is off" in str(one.message)]
    if placed.n == 4 or name == "two GPUs":
        assert len(warned) == (placed.me == 0)
        assert "hierarchical" not in placed.agreed.names
        assert "no such thing here" in placed.agreed.describe()["hierarchical"]
    dist.destroy_process_group(placed.group)


@pytest.mark.parametrize("eager", [0, 1])
def test_devices_that_run_ahead_do_not_corrupt_data(placed, eager):
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


def test_destroyed_groups_release_handles_and_streams(placed, monkeypatch):
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


def test_mismatch_raises_on_all_ranks_of_all_clusters(placed):
    """Later calls succeed."""
    for _ in range(2):
        with pytest.raises(MismatchError):
            dist.broadcast(placed.array(), 0 if placed.me else 1, group=placed.group)
        with pytest.raises(MismatchError, match=r"(2000|1000) elements"):
            dist.all_reduce(placed.array(2000 if placed.me else 1000), group=placed.group)
    placed.check_all_reduce(3000)


@pytest.mark.parametrize(
    ("what", "failing"), [("allocate", 0), ("scale", -1), ("find_allocation", -1), ("pack", 0)]
)
def test_failure_of_one_rank_before_or_in_the_first_step(placed, mpi, what, failing):
    """The call fails on all ranks of all clusters. Later calls succeed."""
    cuda, failing = placed.arrays.cuda, failing % placed.n
    levels = placed.agreed.states["hierarchical"]
    narrow = placed.arrays.make(
        np.full(3000, placed.me, by_name["bfloat16"].numpy), placed.index,
        "third" if what == "pack" else "C",
    )  # fmt: skip
    narrow.upload()
    name = "allocate" if what == "pack" else what
    if what in ("allocate", "pack"):  # force an allocation
        levels.context._blocks, levels.context._since = [], []
    with simulated.Fault(cuda, name, placed.me == failing) as fault:
        dist.all_reduce(narrow, group=placed.group)
    outcomes = mpi.allgather((fault.failed, str(fault.error)))
    if any(failed for failed, _ in outcomes):
        for rank, (_, message) in enumerate(outcomes):
            assert ("injected failure" if rank == failing else "another rank failed") in message
        assert isinstance(fault.error, DistBackendError) or placed.me == failing
    else:
        assert what == "find_allocation" and fault.error is None
    for count in (10, 3000):
        placed.check_all_reduce(count)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("place", ["two GPUs", "two nodes", "two nodes, staged"])
def test_failure_of_one_rank_on_a_rail(arrays, world, monkeypatch, mpi, place, name):
    """With any route of the rails, the group fails on all ranks, on rails or not."""
    placed = PlacedGroup(
        arrays, monkeypatch, place.split(", ")[0], "none" if "staged" in place else "full"
    )
    if name in ("reduce_scatter", "all_gather") and not placed.even:
        dist.destroy_process_group(placed.group)
        pytest.skip("uses another route")
    placed.check_all_reduce()
    levels = placed.agreed.states["hierarchical"]
    step, start = hierarchical.Step.__call__, time.monotonic()
    failing = [levels.clusters[0][place] for place in levels.lanes[0]][-1]

    def fails(self, send, recv, extent, root=0, before=None):
        if placed.me == failing and self._part is levels.along.group:
            before = lambda: 1 / 0  # noqa: E731
        step(self, send, recv, extent, root, before)

    def call():
        array = placed.array(3000 * placed.n)
        if name == "all_reduce":
            dist.all_reduce(array, group=placed.group)
        elif name == "broadcast":
            dist.broadcast(array, failing, group=placed.group)
        elif name == "reduce_scatter":
            dist.reduce_scatter_single(placed.array(3000), array, group=placed.group)
        else:
            dist.all_gather_single(array, placed.array(3000), group=placed.group)
        got(array)

    monkeypatch.setattr(hierarchical.Step, "__call__", fails)
    if placed.me == failing:
        with pytest.raises(ZeroDivisionError):
            call()
    else:
        with pytest.raises(DistBackendError):
            call()
            while placed.group.error is None and time.monotonic() < start + TIMEOUT / 2:
                time.sleep(0.01)
            call()
    assert time.monotonic() < start + TIMEOUT / 2
    mpi.Barrier()
    # The failed rank, or the rank that reported the failure.
    expected = rf"rank {failing}\b.* failed in call 2|rank \d has closed the group, .* has failed"
    with pytest.raises(DistBackendError, match=expected):
        dist.barrier(group=placed.group)
    monkeypatch.undo()
    dist.destroy_process_group(placed.group)


@pytest.mark.parametrize("chunks", [1, 3])
def test_failure_of_one_rank_after_the_rails(arrays, world, monkeypatch, chunks):
    """The next chunk fails on all ranks. After the last chunk, only the rank's cluster fails. Later
    calls succeed.
    """
    placed = PlacedGroup(arrays, monkeypatch, "two GPUs")
    placed.check_all_reduce()
    levels = placed.agreed.states["hierarchical"]
    cluster = max(levels.clusters, key=len)
    if len(cluster) == 1:
        dist.destroy_process_group(placed.group)
        pytest.skip("no rank shares its GPU")
    step, inside = hierarchical.Step.__call__, []

    def fails(self, send, recv, extent, root=0, before=None):
        inside.append(levels.inside is not None and self._part is levels.inside.group)
        if placed.me == cluster[0] and inside[-1] and inside.count(True) == 2:
            before = lambda: 1 / 0  # noqa: E731
        step(self, send, recv, extent, root, before)

    count = chunks * (hierarchical.CHUNK // 4) - 5
    with monkeypatch.context() as patched:
        patched.setattr(hierarchical.Step, "__call__", fails)
        if placed.me == cluster[0]:
            with pytest.raises(ZeroDivisionError):
                placed.check_all_reduce(count)
        elif chunks > 1 or placed.me in cluster:
            with pytest.raises(DistBackendError, match="another rank failed in this call"):
                placed.check_all_reduce(count)
        else:
            placed.check_all_reduce(count)
    placed.check_all_reduce(count)
    dist.destroy_process_group(placed.group)


def test_routes_that_are_off_in_a_cluster_are_reported(arrays, world, monkeypatch):
    """Rank 0 warns, and ``describe`` has the reason."""

    def refuse(*arguments):
        raise RuntimeError("no such thing here")

    placed = PlacedGroup(arrays, monkeypatch, "two GPUs")
    last = placed.places[-1]
    alone = placed.places.count(last) == 1  # a cluster of one rank has no group
    cluster = placed.places[0] if alone else last
    if placed.places[placed.me] == cluster:
        monkeypatch.setattr(arrays.cuda, "create_shared_event", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed.check_all_reduce()
    ranks = [rank for rank, place in enumerate(placed.places) if place == cluster]
    message = (
        f"ranks {', '.join(map(str, ranks))} use ipc, because shared_gpu is off: rank 0: cannot"
    )
    warned = [str(one.message) for one in caught if "shared_gpu is off" in str(one.message)]
    assert len(warned) == (placed.me == 0) and all(message in each for each in warned)
    assert placed.agreed.names[0] == "hierarchical"
    assert f"in hierarchical {message}" in placed.agreed.describe()["shared_gpu"]
    dist.destroy_process_group(placed.group)


def test_failing_the_group_fails_its_clusters_and_rails(placed, mpi):
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
