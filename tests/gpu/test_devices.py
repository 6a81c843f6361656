"""Every call on device arrays of several libraries, with every route."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from driver import (
    COALESCED,
    DTYPES,
    MOVES,
    NAMES,
    REDUCTIONS,
    Call,
    Uneven,
    legal_operations,
    together,
    wait_for_all,
)  # fmt: skip
from driver import team as group_of

import mpicoll as dist
from mpicoll.arrays import host_staging
from mpicoll.core.reproducible import LEVELS
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import MismatchError, UnsupportedError
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes import registry
from mpicoll.routes.device import staged
from mpicoll.routes.device.space import DeviceSpace

#: One dtype of each kind and of each size that has its own code.
SOME = [row for row in DTYPES if row.name in (
    "bool", "int32", "float32", "bfloat16", "float8_e5m2", "complex64")]  # fmt: skip

#: Primitives with a root.
ROOTED = {name for row in PRIMITIVES if row.root for name in (row.name, *row.aliases)}


@pytest.fixture(scope="module")
def teams(route):
    """All ranks, a subset, and all ranks in another order. New groups for each route."""
    dist.init_process_group(timeout=60)
    n = dist.get_world_size()
    subset = group_of("subset", range(1, n) if n > 1 else [0])
    yield [group_of("world", range(n)), subset, group_of("reordered", range(n)[::-1])]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(teams):
    return teams[0]


@pytest.fixture
def reducing(route, world):
    """Skip routes without reductions."""
    if route != "auto" and "all_reduce" not in registry.DEVICE[route].serves.primitives:
        pytest.skip(f"{route} has no reductions")


@pytest.fixture(autouse=True)
def working(arrays):
    with arrays.working():
        yield


def dtypes_of(route, arrays):
    """Return all dtypes if mpicoll selects the route, otherwise the sample."""
    return [row for row in (DTYPES if route == "auto" else SOME) if arrays.serves(row)]


def serves(route, name, dtype, op):
    """Return True if the forced route serves the call with the same bits as the reference."""
    if route == "auto":
        return True
    if not registry.DEVICE[route].can_run(NAMES[name], op, dtype):
        return False
    if route == "nccl" and op is not None:  # different results for NaN and narrow floats
        return dtype.name in ("int32", "float32") and op in (ReduceOp.SUM, ReduceOp.PRODUCT)
    return True


class DeviceCall(Call):
    """A call with device arrays. If the library has streams, each array is filled with delay in its
    own stream.
    """

    def __init__(self, arrays, *arguments, index=None, layout="C", kind="plain", **options):
        self.made = []
        index = dist.get_rank() % arrays.devices if index is None else index

        def make(shape, dtype):
            host = np.empty(shape, dtype.numpy)
            array = arrays.make(host, index, layout, kind)
            self.made.append(array)
            return array.given, host

        super().__init__(*arguments, make=make, **options)

    def start(self, async_op=False, by_group_rank=False):
        for array in self.made:
            array.upload()
        return super().start(async_op, by_group_rank)

    def check(self):
        for array in self.made:
            array.download()
        super().check()

    def run_and_check(self, async_op=False):
        work = self.start(async_op)
        assert work is None or work.wait()
        self.check()


class UnevenDeviceCall(DeviceCall, Uneven):
    """A device call with blocks of different sizes."""


#: Count, index in ``teams``, layout, kind of memory, async_op. Rows 0, 4 and 5 use another group in
#: each sweep. Dtypes that are not in SOME use every second row.
CASES = [
    (0, 0, "C", "plain", True),
    (1, 1, "C", "plain", False),
    (7, 0, "third", "plain", False),
    (1000, 0, "C", "other", True),
    (7, 1, "third", "plain", True),
    (1000, 2, "C", "other", False),
]


def sweep(route, arrays, teams, mpi, name, dtype, op, turn):
    if not serves(route, name, dtype, op):
        if not registry.DEVICE[route].can_run(NAMES[name], op, dtype):
            with pytest.raises(UnsupportedError, match=f"{route} does not serve"):
                DeviceCall(arrays, name, teams[0], dtype, 7, op).start()
        return
    for place, (count, which, layout, kind, async_op) in enumerate(CASES):
        if dtype not in SOME and (place + turn) % 2:
            continue
        moving = place in (0, 4, 5)
        team = teams[(which + turn) % len(teams) if moving else which]
        if team.size < teams[0].size:
            wait_for_all(mpi)
        if team.me is None:
            continue
        root = count % team.size if name in ROOTED else 0
        kind = arrays.kinds[turn % len(arrays.kinds)] if kind == "other" else kind
        DeviceCall(
            arrays, name, team, dtype, count, op, root, layout=layout, kind=kind
        ).run_and_check(async_op)


#: Primitives without their aliases.
MOVED, REDUCED = (
    [name for name in names if NAMES[name].name == name] for names in (MOVES, REDUCTIONS)
)


@pytest.mark.parametrize("name", MOVED)
def test_data_movement(route, arrays, teams, mpi, name):
    for turn, dtype in enumerate(dtypes_of(route, arrays), MOVED.index(name)):
        sweep(route, arrays, teams, mpi, name, dtype, None, turn)


@pytest.mark.parametrize("name", REDUCED)
def test_reductions(route, arrays, teams, mpi, name):
    for place, dtype in enumerate(dtypes_of(route, arrays), REDUCED.index(name)):
        for turn, op in enumerate(legal_operations(dtype), place):
            if dtype not in SOME and turn % len(REDUCED):
                continue  # covered by another primitive
            sweep(route, arrays, teams, mpi, name, dtype, op, turn)


@pytest.mark.parametrize("dtype", SOME, ids=repr)
def test_chunk_boundaries(route, arrays, world, monkeypatch, dtype):
    """One or several chunks, with a remainder."""
    if not arrays.serves(dtype):
        pytest.skip(f"the library has no arrays of {dtype}")
    monkeypatch.setattr(staged, "CHUNK", 16 * dtype.itemsize)
    monkeypatch.setattr(DeviceSpace, "chunk", 16 * dtype.itemsize)
    monkeypatch.setattr(DeviceSpace, "small", 8 * dtype.itemsize)
    world = group_of("chunks", range(world.size))
    for count in (8, 9, 16, 17, 61):
        for name in MOVED:
            if serves(route, name, dtype, None):
                DeviceCall(arrays, name, world, dtype, count, None, count % world.size).run()
        for name in REDUCED:
            op = legal_operations(dtype)[count % len(legal_operations(dtype))]
            if serves(route, name, dtype, op):
                DeviceCall(arrays, name, world, dtype, count, op, count % world.size).run()
        op = legal_operations(dtype)[count % len(legal_operations(dtype))]
        if serves(route, "reduce_scatter", dtype, op):
            UnevenDeviceCall(arrays, world, dtype, [count, 0, 7, 19], op).run()


def test_uneven_blocks(route, arrays, world):
    """all_gather and reduce_scatter of arrays of different sizes, all_to_all_single with splits."""
    for dtype in dtypes_of(route, arrays):
        for turn, op in enumerate(legal_operations(dtype)):
            if serves(route, "reduce_scatter", dtype, op):
                for sizes in ([5, 0, 3, 17], [0, 7, 0, 1], [300, 1, 2, 40]):
                    UnevenDeviceCall(arrays, world, dtype, sizes, op).run_and_check(turn % 2 == 1)
        blocks = [oracle.any_bits(dtype, (5, 0, 3, 17)[r], r) for r in range(world.size)]
        source = uploaded(arrays, blocks[world.me])
        outputs = [uploaded(arrays, np.zeros_like(block)) for block in blocks]
        dist.all_gather([output.given for output in outputs], source.given)
        for output, block in zip(outputs, blocks, strict=True):
            oracle.same_bits(output.download(), block, f"all_gather of {dtype}")
        if not serves(route, "all_to_all_single", dtype, None):
            continue
        sends = [world.me + r for r in range(world.size)]
        sent, expected = (
            np.concatenate([oracle.any_bits(dtype, s + r, 10 * s + r) for s, r in pairs])
            for pairs in ([(world.me, r) for r in range(world.size)],
                          [(s, world.me) for s in range(world.size)])
        )  # fmt: skip
        source, output = uploaded(arrays, sent), uploaded(arrays, np.zeros_like(sent))
        dist.all_to_all_single(output.given, source.given, sends, sends)
        oracle.same_bits(output.download(), expected, f"all_to_all_single of {dtype}")


def uploaded(arrays, host, index=0):
    array = arrays.make(host.copy(), index)
    array.upload()
    return array


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.usefixtures("reducing")
def test_chain_of_calls_and_kernels_in_one_stream(arrays, world, async_op):
    array = arrays.make(np.ones(arrays.large, np.float32))
    array.upload(long=True)
    for _ in range(3):
        work = dist.all_reduce(array.given, async_op=async_op)
        if async_op:
            work.wait()
        array.double()
    assert (array.download() == (2.0 * world.size) ** 3).all()


@pytest.mark.parametrize("chunk", [host_staging.CHUNK, 16])
def test_point_to_point(arrays, world, monkeypatch, chunk):
    """send, recv, isend, irecv and batches; other layouts; a device array to a host array.

    chunk: size of the pinned memory, in one or many parts of which a message is copied.
    """
    if world.size == 1:
        return
    monkeypatch.setattr(host_staging, "CHUNK", chunk)
    right, left = (world.me + 1) % world.size, (world.me - 1) % world.size
    numbers = np.arange(20, dtype=np.float32).reshape(4, 5)
    source = uploaded(arrays, numbers + world.me)
    target = arrays.make(np.zeros((4, 5), np.float32), layout="F")
    target.upload()
    works = [dist.irecv(target.given, left), dist.isend(source.given, right)]
    for work in works:
        work.wait()
    assert (target.download() == numbers + left).all()
    host = np.zeros((4, 5), np.float32)
    if world.me == 0:
        dist.send(source.given, right)
        assert dist.recv(host, left) == left
    else:
        dist.recv(host, left)
        dist.send(source.given, right)
    assert (host == numbers + left).all()
    target.host[...] = -1
    target.upload()
    batch = [(dist.irecv, target.given, left), (dist.isend, source.given, right)]
    for work in dist.batch_isend_irecv([dist.P2POp(*each) for each in batch]):
        work.wait()
    assert (target.download() == numbers + left).all()


def test_arrays_on_different_devices_raise(arrays, world):
    zero = uploaded(arrays, np.zeros(4 * world.size, np.float32))
    with pytest.raises(UnsupportedError, match=r"reduce_scatter_single: .*the host.*cuda:0"):
        dist.reduce_scatter_single(np.zeros(4, np.float32), zero.given)
    if arrays.devices < 2:
        return
    piece = uploaded(arrays, np.zeros(4, np.float32), 1).given
    with pytest.raises(UnsupportedError, match=r"all_gather_single: .*cuda:0.*cuda:1"):
        dist.all_gather_single(zero.given, piece)
    if world.size > 1:
        with pytest.raises(UnsupportedError, match=r"all_gather: tensor_list: .*cuda:0.*cuda:1"):
            dist.all_gather([zero.given, *[piece] * (world.size - 1)], zero.given)


@pytest.mark.usefixtures("reducing")
def test_capture_raises_for_routes_that_cannot_be_captured(arrays, world):
    array = uploaded(arrays, np.ones(4, np.float32))
    dist.all_reduce(array.given)
    array.upload()
    if world.size > 1 and world.group.resources.find("devices").names[0] == "peer":
        pytest.skip("test_peer.py tests captures")
    with arrays.capturing(array), pytest.raises(UnsupportedError, match="captured"):
        dist.all_reduce(array.given)
    assert (array.download() == 1).all()
    dist.all_reduce(array.given)
    assert (array.download() == world.size).all()


@pytest.mark.usefixtures("reducing")
def test_host_array_on_one_rank_raises_mismatch(arrays, world):
    if world.size == 1:
        return
    group = dist.new_group()
    array = np.zeros(4, np.float32)
    mine = array if world.me == 0 else uploaded(arrays, array).given
    with pytest.raises(MismatchError, match="on a device"):
        dist.all_reduce(mine, group=group)


@pytest.mark.parametrize("name", COALESCED)
def test_coalesced_calls(route, arrays, world, name):
    """Inputs are produced late, and consumers do not synchronize with the host."""
    if route in ("peer", "nccl") and name == "all_gather_single":
        pytest.skip("tested with the other primitives")
    for turn, dtype in enumerate((by_name["float32"], by_name["bfloat16"])):
        op = ReduceOp.SUM if NAMES[name].reduces else None
        if not (arrays.serves(dtype) and serves(route, name, dtype, op)):
            continue
        calls = [
            DeviceCall(arrays, name, world, dtype, int(np.prod(shape)), op, shape=shape,
                       layout="F" if len(shape) > 1 else "C", stacked=place % 2 == 0)
            for place, shape in enumerate([(3,), (0,), (100,), (4, 6), (9000,), (5,)])
        ]  # fmt: skip
        for array in (array for call in calls for array in call.made):
            array.upload()
        work = together(name, calls, turn == 1)
        if turn:
            work.wait(60)
        for call in calls:
            call.check()
    if name == "all_reduce":
        one, other = uploaded(arrays, np.ones(3)), np.ones(3)
        for wrong in ([other, one.given], [one.given, other]):
            with pytest.raises(ValueError, match="different devices"):
                dist.all_reduce_coalesced(wrong)


@pytest.mark.parametrize("level", LEVELS)
def test_reproducible_groups_have_the_bits_of_the_host(route, arrays, world, level):
    """For calls that the route does not serve with this level, the error says so."""
    group = dist.new_group(reproducible=level)
    for name, op, dtype in (
        ("all_reduce", "SUM", "float32"), ("reduce_scatter_single", "SUM", "float32"),
        ("all_reduce", "AVG", "float64"), ("all_reduce", "SUM", "complex64"),
        ("all_reduce", "SUM", "bfloat16"), ("scan", "SUM", "float32"),
    ):  # fmt: skip
        row, n = by_name[dtype], world.size
        if not arrays.serves(row):
            continue
        rng = np.random.default_rng(world.me)
        given = (rng.normal(0, 1, 300 * n) * 2.0 ** rng.integers(-9, 9, 300 * n)).astype(row.numpy)
        out = np.zeros(300 * (1 if "scatter" in name else n), row.numpy)
        on_host, on_device = ((given.copy(), out.copy()) for _ in range(2))
        made = [uploaded(arrays, one) for one in on_device]

        def call(arguments, name=name, op=op):
            given, out = arguments
            several = [given] if name == "all_reduce" else [out, given]
            getattr(dist, name)(*several, op=getattr(ReduceOp, op), group=group)

        call(on_host)
        try:
            call([one.given for one in made])
        except UnsupportedError as error:
            assert route != "auto" and f"reproducible={level!r}" in str(error)
            continue
        for array, expected in zip(made, on_host, strict=True):
            oracle.same_bits(array.download(), expected, f"{name} of {dtype}")
    dist.destroy_process_group(group)
