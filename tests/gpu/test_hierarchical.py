"""Route ``hierarchical`` with three or more ranks on two nodes, which are set by the tests.

Every rank runs every test.
"""

from __future__ import annotations

import itertools
import time
import warnings

import numpy as np
import pytest

pytest.importorskip("cupy")

import real
from device_arrays import forced
from driver import NAMES, Exact, check_same_bits, legal_operations
from driver import team as group_of
from mpi4py import MPI
from test_devices import SOME, DeviceCall, UnevenDeviceCall, got, uploaded

import mpicoll as dist
from mpicoll.cuda import capabilities
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import hierarchical
from mpicoll.routes.device.select import Agreement

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size < 3, reason="needs three ranks")

ROUTE = registry.DEVICE["hierarchical"]
LIMIT_S = 30
#: Number of elements of a call of several chunks.
MANY = 3001

#: Node and GPU of each of n ranks, and the route in a node.
PLACES = {
    "a GPU each": (lambda n: [(2 * rank // n, rank % 2) for rank in range(n)], "peer"),
    "across": (lambda n: [(int(0 < rank < n - 1), rank // 2) for rank in range(n)], "peer"),
    "a shared GPU": (lambda n: [(2 * rank // n, 0) for rank in range(n)], "ipc"),
    "a rank alone": (lambda n: [(int(rank == n - 1), 0) for rank in range(n)], "ipc"),
}


class ExactOnDevice(DeviceCall, Exact):
    """A call whose result does not depend on the order of reductions."""


@pytest.fixture(scope="module")
def arrays():
    """Several chunks and stripes with few elements; all sizes use the route."""
    made = real.Arrays("interface")
    if made.devices < 2:
        pytest.skip("needs two GPUs")
    with pytest.MonkeyPatch.context() as patch, forced("auto"):
        patch.setattr(hierarchical, "CHUNK", 4096)
        patch.setattr(hierarchical, "LINE", 64)
        for name in ROUTE.policy.min_bytes:
            patch.setitem(ROUTE.policy.min_bytes, name, 1)
        dist.init_process_group(timeout=60)
        yield made
        dist.destroy_process_group()


class PlacedGroup:
    """A group whose ranks have the nodes and GPUs of a row of PLACES."""

    def __init__(self, arrays, patch, name):
        self.arrays, self.me, self.n = arrays, dist.get_rank(), dist.get_world_size()
        self.name, (place, self.inside) = name, PLACES[name]
        self.places = place(self.n)
        node, self.index = self.places[self.me]
        patch.setattr(capabilities, "node", lambda: f"node {node}")
        patch.setattr(capabilities, "_known", None)
        nodes = [node for node, _ in self.places]
        self.even = nodes.count(0) == nodes.count(1)
        self.team = group_of(name, range(self.n))
        self.group = self.team.group

    @property
    def agreed(self):
        return self.group.resources.find("devices")

    @property
    def levels(self):
        return self.agreed.states["hierarchical"]

    def array(self, count=1000):
        return uploaded(self.arrays, np.full(count, self.me, np.float32), self.index)

    def check_all_reduce(self, count=1000):
        array = self.array(count)
        dist.all_reduce(array.given, group=self.group)
        assert (got(array) == sum(range(self.n))).all()


@pytest.fixture(params=["a GPU each", "a rank alone"])
def placed(request, arrays, monkeypatch):
    """A group that has made a call."""
    placed = PlacedGroup(arrays, monkeypatch, request.param)
    placed.check_all_reduce()
    yield placed
    monkeypatch.undo()
    dist.destroy_process_group(placed.group)


#: Dtypes and operations in turn, so that each place tests different ones.
KINDS = {
    True: itertools.cycle([(dtype, op) for dtype in SOME for op in legal_operations(dtype)]),
    False: itertools.cycle([(dtype, None) for dtype in SOME]),
}
LAYOUTS = itertools.cycle([("C", False), ("third", True), ("1", False), ("C", True)])


@pytest.mark.parametrize("name", PLACES)
def test_calls(arrays, monkeypatch, name):
    """Every primitive of the route, at boundaries of stripes and chunks, in any layout."""
    placed = PlacedGroup(arrays, monkeypatch, name)
    placed.check_all_reduce()
    levels, calls, same = placed.levels, [], []
    assert placed.agreed.names[0] == "hierarchical" and not placed.agreed.missing
    assert levels.rails == (placed.n // 2 if placed.even else 1)
    assert levels.inside is None or levels.inside.names[0] == placed.inside
    compare = hierarchical.Levels.compare
    monkeypatch.setattr(
        hierarchical.Levels, "compare", lambda *call: calls.append(call) or compare(*call)
    )
    for primitive in ROUTE.serves.primitives:
        row = NAMES[primitive]
        calls.clear()
        for count in (0, 17, 1024, MANY):
            dtype, op = next(KINDS[row.reduces])
            layout, async_op = next(LAYOUTS)
            exact = op is not ReduceOp.PREMUL_SUM
            made = (ExactOnDevice if exact else DeviceCall)(
                arrays, primitive, placed.team, dtype, count, op, count % placed.n
                if row.root else 0, index=placed.index, layout=layout if count else "C",
            )  # fmt: skip
            made.run_and_check(async_op)
            same += [made] if primitive == "all_reduce" else []
        served = placed.even or primitive in ("all_reduce", "reduce", "broadcast")
        assert bool(calls) == served, primitive
    check_same_bits(MPI.COMM_WORLD, same)
    calls.clear()
    for sizes in ([500, 0, 3, 17], [0, 700, 0, 1]):  # blocks of different sizes use another route
        UnevenDeviceCall(
            arrays, placed.team, by_name["float32"], sizes, ReduceOp.SUM, index=placed.index
        ).run_and_check()
    assert not calls
    monkeypatch.setitem(ROUTE.policy.min_bytes, "all_reduce", 4000)
    group = dist.new_group()
    for count, expected in ((999, 0), (1000, 1)):  # small calls use another route
        array = placed.array(count)
        dist.all_reduce(array.given, group=group)
        assert (got(array) == sum(range(placed.n))).all() and bool(calls) == expected
    dist.destroy_process_group(group)
    dist.destroy_process_group(placed.group)


def test_calls_and_kernels_in_one_stream(placed):
    array = placed.array(MANY)
    array.host[...] = 1
    array.upload(long=placed.me == 0)
    for turn in range(4):
        work = dist.all_reduce(array.given, group=placed.group, async_op=turn % 2 == 1)
        if work is not None:
            work.wait()
        array.double()
    assert (got(array) == (2.0 * placed.n) ** 4).all()


@pytest.mark.parametrize("how", ["a GPU each", "a node each"])
def test_groups_without_levels_do_not_use_the_route(arrays, monkeypatch, how):
    """``describe`` has the reason. Forcing the route raises."""
    places = {"a GPU each": lambda rank: (0, rank % 2), "a node each": lambda rank: (rank, 0)}
    monkeypatch.setitem(PLACES, how, (lambda n: list(map(places[how], range(n))), ""))
    placed = PlacedGroup(arrays, monkeypatch, how)
    placed.check_all_reduce()
    reason = placed.agreed.describe()["hierarchical"]
    assert "hierarchical" not in placed.agreed.names and "node" in reason
    dist.destroy_process_group(placed.group)
    with forced("hierarchical"):
        placed = PlacedGroup(arrays, monkeypatch, how)
        with pytest.raises(UnsupportedError, match=f"hierarchical: {reason}; unset it"):
            placed.check_all_reduce()
        dist.destroy_process_group(placed.group)


def test_forced_route_serves_small_calls_and_raises_for_other_primitives(arrays, monkeypatch):
    with forced("hierarchical"):
        placed = PlacedGroup(arrays, monkeypatch, "a GPU each")
        monkeypatch.setitem(ROUTE.policy.min_bytes, "all_reduce", 4000)
        for count in (0, 10, MANY):
            placed.check_all_reduce(count)
        assert placed.agreed.names == ("hierarchical",)
        given = placed.array(placed.n).given
        with pytest.raises(UnsupportedError, match="hierarchical does not serve"):
            dist.scatter(given, [given] * placed.n if placed.me == 0 else None, group=placed.group)
        counts = [500, *[1] * (placed.n - 1)]
        outputs = [placed.array(count).given for count in counts]
        with pytest.raises(UnsupportedError, match="hierarchical"):
            dist.all_gather(outputs, placed.array(counts[placed.me]).given, group=placed.group)
        placed.check_all_reduce()
        dist.destroy_process_group(placed.group)


def test_route_is_off_if_a_node_cannot_map_memory(arrays, monkeypatch):
    """All ranks use another route, and rank 0 warns."""
    placed = PlacedGroup(arrays, monkeypatch, "a GPU each")
    cuda = real.runtime.get_runtime()
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if placed.me < 2:
            patch.setattr(cuda, "open", lambda *arguments: 1 / 0)
        placed.check_all_reduce()
    warned = [str(one.message) for one in caught if "hierarchical is off" in str(one.message)]
    assert len(warned) == (placed.me == 0)
    assert "hierarchical" not in placed.agreed.names
    assert "division by zero" in placed.agreed.describe()["hierarchical"]
    dist.destroy_process_group(placed.group)


def test_rank_that_fails_after_the_agreement_of_its_node(arrays, monkeypatch):
    """The other ranks of the node do not wait for it, and all ranks use another route."""
    placed, set_names = PlacedGroup(arrays, monkeypatch, "a GPU each"), Agreement._set_names

    def fails(self):
        set_names(self)
        if self.group.whole is not None and placed.me == 0:
            raise RuntimeError("injected failure")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Agreement, "_set_names", fails)
        patch.setattr(hierarchical, "RELEASE_TIMEOUT_S", 3600)
        placed.check_all_reduce()
    assert placed.agreed.describe()["hierarchical"] == "rank 0: injected failure"
    dist.destroy_process_group(placed.group)


# ---- Failures ------------------------------------------------------------------------------------


def test_mismatch_raises_on_all_ranks_of_all_nodes(placed):
    """Later calls succeed."""
    for _ in range(2):
        with pytest.raises(MismatchError):
            dist.broadcast(placed.array().given, 0 if placed.me else 1, group=placed.group)
        with pytest.raises(MismatchError, match=r"(2000|1000) elements"):
            dist.all_reduce(placed.array(2000 if placed.me else 1000).given, group=placed.group)
    placed.check_all_reduce(MANY)


@pytest.mark.parametrize(("what", "failing"), [("allocate", 0), ("scale", -1), ("copy_strided", 0)])
def test_failure_of_one_rank_before_or_in_the_first_step(placed, what, failing):
    """The call fails on all ranks of all nodes. Later calls succeed."""
    failing %= placed.n
    layout = "third" if what == "copy_strided" else "C"
    numbers = np.full(MANY, placed.me, by_name["bfloat16"].numpy)
    narrow = placed.arrays.make(numbers, placed.index, layout)
    narrow.upload()
    placed.levels.context._blocks, placed.levels.context._since = [], []  # force an allocation
    with real.Fault(what, placed.me == failing) as fault:
        dist.all_reduce(narrow.given, group=placed.group)
    message = "injected failure" if placed.me == failing else "another rank failed"
    assert message in str(fault.error)
    for count in (10, MANY):
        placed.check_all_reduce(count)


@pytest.mark.parametrize(
    "name", ["all_reduce", "reduce", "broadcast", "reduce_scatter_single", "all_gather_single"]
)
@pytest.mark.parametrize("place", ["a GPU each", "a shared GPU"])
def test_failure_of_one_rank_on_a_rail(arrays, monkeypatch, place, name):
    """The group fails on all ranks, on rails or not."""
    placed = PlacedGroup(arrays, monkeypatch, place)
    if name.endswith("single") and not placed.even:
        dist.destroy_process_group(placed.group)
        pytest.skip("uses another route")
    placed.check_all_reduce()
    levels, group = placed.levels, placed.group
    step, start = hierarchical.Step.__call__, time.monotonic()
    failing = levels.nodes[0][0]

    def fails(self, send, recv, extent, root=0, before=None):
        if placed.me == failing and self._part is levels.along.group:
            before = lambda: 1 / 0  # noqa: E731
        step(self, send, recv, extent, root, before)

    def call():
        op = ReduceOp.SUM if NAMES[name].reduces else None
        DeviceCall(
            arrays, name, placed.team, by_name["float32"], MANY, op,
            {"broadcast": failing, "reduce": levels.nodes[-1][0]}.get(name, 0), index=placed.index,
        ).run()  # fmt: skip

    monkeypatch.setattr(hierarchical.Step, "__call__", fails)
    if placed.me == failing:
        with pytest.raises(ZeroDivisionError):
            call()
    else:
        with pytest.raises(DistBackendError):
            call()
            while group.error is None and time.monotonic() < start + LIMIT_S:
                time.sleep(0.01)
            call()
    assert time.monotonic() < start + LIMIT_S
    MPI.COMM_WORLD.Barrier()
    # The failed rank, or the rank that reported the failure.
    expected = rf"rank {failing}\b.* failed in call 2|rank \d has closed the group, .* has failed"
    with pytest.raises(DistBackendError, match=expected):
        dist.barrier(group=group)
    monkeypatch.undo()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("chunks", [1, 3])
def test_failure_of_one_rank_after_the_rails(arrays, monkeypatch, chunks):
    """The next chunk fails on all ranks. After the last chunk, only the rank's node fails. Later
    calls succeed.
    """
    placed = PlacedGroup(arrays, monkeypatch, "a shared GPU")
    placed.check_all_reduce()
    levels, step, inside = placed.levels, hierarchical.Step.__call__, []
    node = max(levels.nodes, key=len)

    def fails(self, send, recv, extent, root=0, before=None):
        inside.append(levels.inside is not None and self._part is levels.inside.group)
        if placed.me == node[0] and inside[-1] and inside.count(True) == 2:
            before = lambda: 1 / 0  # noqa: E731
        step(self, send, recv, extent, root, before)

    count = chunks * (hierarchical.CHUNK // 4) - 5
    with monkeypatch.context() as patched:
        patched.setattr(hierarchical.Step, "__call__", fails)
        if placed.me == node[0]:
            with pytest.raises(ZeroDivisionError):
                placed.check_all_reduce(count)
        elif chunks > 1 or placed.me in node:
            with pytest.raises(DistBackendError, match="another rank failed in this call"):
                placed.check_all_reduce(count)
        else:
            placed.check_all_reduce(count)
    placed.check_all_reduce(count)
    dist.destroy_process_group(placed.group)


def test_failing_the_group_fails_its_nodes_and_rails(placed):
    error = DistBackendError("a call has timed out")
    MPI.COMM_WORLD.Barrier()
    placed.group.fail(error)
    placed.group.resources.leave()
    assert all(part.group.error is error for part in placed.levels.parts)
    with pytest.raises(DistBackendError, match="a call has timed out"):
        dist.barrier(group=placed.group)
