"""Arrays on devices, by every route, on simulated devices: see simulated.py."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from conftest import TIMEOUT
from conftest import team as group_of
from driver import DTYPES, MOVES, REDUCTIONS, Call, legal, meet
from simulated import DeviceArray, Simulated

import mpicoll as dist
from mpicoll import capabilities, device
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import MismatchError, UnsupportedError
from mpicoll.primitives import PRIMITIVES
from mpicoll.reduction import loop
from mpicoll.routes import native, peer, staged

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)


@pytest.fixture(scope="module", params=["staged", "peer", "direct", "native"])
def road(request):
    """The device route that is forced, on an MPI that takes what is the host's memory in truth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOLL_DEVICE_ROUTE", request.param)
        patch.setenv("MPICOLL_CUDA_AWARE", "full")
        patch.setattr(capabilities, "_known", None)
        yield request.param


@pytest.fixture(scope="module")
def cuda(road):
    """The devices of this process; some of their memory not of a kind that MPI takes."""
    with pytest.MonkeyPatch.context() as patch:
        found = Simulated()
        patch.setattr(device, "_runtime", found)
        yield found


@pytest.fixture(scope="module")
def teams(cuda):
    """Groups of their own for each route; all ranks, some, and all in another order."""
    dist.init_process_group(timeout=TIMEOUT)
    n = dist.get_world_size()
    everybody = group_of("world", range(n))
    some = group_of("subset", range(1, n) if n > 1 else [0])
    yield [everybody, some, group_of("reordered", range(n)[::-1])]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(teams):
    return teams[0]


def serves(road, name, dtype, op):
    """Whether a route that is forced serves such calls."""
    if op is None:
        return road != "native" or not name.startswith("all_to_all")
    if road == "native":
        return name in ("all_reduce", "reduce") and op.op is not ReduceOp.PREMUL_SUM and (
            native.reducible(op, dtype))  # fmt: skip
    return road == "staged" or loop(op, dtype) is not None


class DeviceCall(Call):
    """A call whose arrays are on a device, each made in a stream of its own, late."""

    def __init__(self, cuda, *what, index=None, strided=False, **how):
        self.made = []
        index = dist.get_rank() % 2 if index is None else index

        def make(shape, dtype):
            host = np.empty(shape, dtype.numpy)
            array = DeviceArray(cuda, host, index)
            if strided:
                wide = DeviceArray(cuda, np.empty((*shape, 3), dtype.numpy), index, array.number)
                array.memory, array.offset = wide.memory, dtype.itemsize
                array.strides = wide.host.strides[: len(shape)]
            self.made.append(array)
            return array, host

        super().__init__(*what, make=make, **how)

    def start(self, async_op=False, by_group_rank=False):
        for array in self.made:
            array.upload()
        return super().start(async_op, by_group_rank)

    def check(self):
        for array in self.made:
            array.host.view(np.uint8)[...] = 0x77
            array.download()
        super().check()


def sweep(road, cuda, teams, mpi, name, dtype, op, counts):
    for team in teams:
        meet(mpi)
        if team.me is None:
            continue
        for count in counts if serves(road, name, dtype, op) else ():
            root = count % team.size if any(
                row.name == name and row.root for row in PRIMITIVES) else 0  # fmt: skip
            call = DeviceCall(cuda, name, team, dtype, count, op, root, strided=count == 7)
            if count == 1000:
                cuda.pool.update(array.memory.address for array in call.made)
            if count % 2:
                call.run()
            else:
                work = call.start(async_op=True)
                assert work.wait()
                call.check()


@pytest.mark.parametrize("name", MOVES)
@by_dtype
def test_moves(road, cuda, teams, mpi, name, dtype):
    sweep(road, cuda, teams, mpi, name, dtype, None, (0, 1, 7, 1000))


@pytest.mark.parametrize("name", REDUCTIONS)
@by_dtype
def test_reduces(road, cuda, teams, mpi, name, dtype):
    for op in legal(dtype):
        sweep(road, cuda, teams, mpi, name, dtype, op, (0, 1, 7, 1000))


# ---- The same with seams everywhere --------------------------------------------------------------


@by_dtype
def test_pieces(road, cuda, world, monkeypatch, dtype):
    """One, two and more pieces, with a rest."""
    monkeypatch.setattr(staged, "PIECE", 8 * dtype.itemsize * (world.size + 1))
    monkeypatch.setattr(peer, "SLOT", 64 * world.size)
    monkeypatch.setattr(peer, "_LINE", 16)
    monkeypatch.setattr(peer, "WHOLE", 32)
    world = group_of("seams", range(world.size))
    for count in (8, 9, 16, 17, 61):
        for name in MOVES:
            if serves(road, name, dtype, None):
                DeviceCall(cuda, name, world, dtype, count, None, count % world.size).run()
        for name in REDUCTIONS:
            op = legal(dtype)[count % len(legal(dtype))]
            if serves(road, name, dtype, op):
                DeviceCall(cuda, name, world, dtype, count, op, count % world.size).run()


@by_dtype
def test_uneven_blocks(road, cuda, world, dtype):
    """all_gather of arrays of different sizes, and all_to_all_single with splits."""
    counts = [5, 0, 3, 17][: world.size]
    mine = oracle.any_bits(dtype, counts[world.me], world.me)
    given = uploaded(cuda, mine)
    outputs = [uploaded(cuda, np.zeros(count, dtype.numpy)) for count in counts]
    dist.all_gather(outputs, given)
    for r, output in enumerate(outputs):
        oracle.same_bits(got(output), oracle.any_bits(dtype, counts[r], r), f"{r} of {dtype}")
    if road == "native":
        return
    sends = [world.me + r for r in range(world.size)]
    mine = oracle.any_bits(dtype, sum(sends), world.me)
    output = uploaded(cuda, np.zeros(sum(sends), dtype.numpy))
    dist.all_to_all_single(output, uploaded(cuda, mine), sends, sends)
    expected = []
    for r in range(world.size):
        theirs = [r + k for k in range(world.size)]
        start = sum(theirs[: world.me])
        whole = oracle.any_bits(dtype, sum(theirs), r)
        expected.append(whole[start : start + theirs[world.me]])
    oracle.same_bits(got(output), np.concatenate(expected), f"all_to_all_single of {dtype}")


def uploaded(cuda, host, index=0):
    array = DeviceArray(cuda, host.copy(), index)
    array.upload()
    return array


def got(array):
    array.host.view(np.uint8)[...] = 0x77
    array.download()
    return array.host


# ---- Order ---------------------------------------------------------------------------------------


def test_many_calls_without_a_look(cuda, world):
    """What one call leaves on its way is not disturbed by the next."""
    arrays = [uploaded(cuda, np.full(1000, world.me + i, np.float32)) for i in range(5)]
    for array in arrays:
        dist.all_reduce(array)
    for i, array in enumerate(arrays):
        expected = sum(range(world.size)) + i * world.size
        assert (got(array) == expected).all()


def test_one_stream_for_all(cuda, world):
    """A chain of calls and kernels in one stream."""
    array = uploaded(cuda, np.ones(100, np.float64))

    def double():
        array._numpy()[...] *= 2

    for _ in range(3):
        dist.all_reduce(array)
        cuda.enqueue(0, array.number, double)
    assert (got(array) == (2.0 * world.size) ** 3).all()


def test_two_streams_in_one_call(cuda, world):
    """The input is made in one stream, the output is used in another."""
    given = uploaded(cuda, np.full(10, world.me, np.int32))
    output = uploaded(cuda, np.zeros(10 * world.size, np.int32))
    assert given.number != output.number
    dist.all_gather_single(output, given)
    assert (np.arange(world.size) == got(output).reshape(world.size, 10).T).all()


def test_another_device(cuda, world):
    """A group's ranks may call with one device, and then with another."""
    group = dist.new_group()
    for index in (0, 1, 0):
        array = uploaded(cuda, np.full(50, world.me + index, np.float32), index)
        output = uploaded(cuda, np.zeros((world.size, 50), np.float32), index)
        dist.all_reduce(array, group=group)
        dist.all_gather_single(output, array, group=group)
        expected = sum(range(world.size)) + index * world.size
        assert (got(array) == expected).all() and (got(output) == expected).all()
    dist.destroy_process_group(group)


def test_messages(cuda, world):
    """send, recv, isend and irecv; contiguous or not; a device array to a host array."""
    if world.size == 1:
        return
    right, left = (world.me + 1) % world.size, (world.me - 1) % world.size
    given = uploaded(cuda, np.full((4, 5), world.me, np.float32))
    taken = uploaded(cuda, np.zeros((4, 5), np.float32))
    taken.strides = (4, 16)  # another order of the elements
    works = [dist.irecv(taken, left), dist.isend(given, right)]
    for work in works:
        work.wait()
    assert (got(taken) == left).all()
    host = np.zeros((4, 5), np.float32)
    if world.me == 0:
        dist.send(given, right)
        assert dist.recv(host, left) == left
    else:
        dist.recv(host, left)
        dist.send(given, right)
    assert (host == left).all()
    with_rank = uploaded(cuda, np.full(3, -1, np.int64))
    batch = [
        dist.P2POp(dist.irecv, with_rank, left),
        dist.P2POp(dist.isend, uploaded(cuda, np.full(3, world.me, np.int64)), right),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (got(with_rank) == left).all()


# ---- What is refused -----------------------------------------------------------------------------


def test_devices_are_not_mixed(cuda, world):
    zero, one = (uploaded(cuda, np.zeros(4 * world.size, np.float32), i) for i in range(2))
    piece = uploaded(cuda, np.zeros(4, np.float32), 1)
    with pytest.raises(UnsupportedError, match=r"all_gather_single: .*cuda:0.*cuda:1"):
        dist.all_gather_single(zero, piece)
    with pytest.raises(UnsupportedError, match=r"reduce_scatter_single: .*the host.*cuda:1"):
        dist.reduce_scatter_single(np.zeros(4, np.float32), one)
    if world.size > 1:
        with pytest.raises(UnsupportedError, match=r"all_gather: tensor_list: .*cuda:0.*cuda:1"):
            dist.all_gather([zero, *[one] * (world.size - 1)], zero)


def test_capture_is_refused(cuda, world):
    array = uploaded(cuda, np.zeros(4, np.float32))
    cuda.captured.add(array.number)
    with pytest.raises(UnsupportedError, match="captured"):
        dist.all_reduce(array)


def test_a_rank_with_host_memory(cuda, world):
    """The ranks find out together, with the first calls of a group."""
    if world.size == 1:
        return
    group = dist.new_group()
    array = np.zeros(4, np.float32)
    with pytest.raises(MismatchError, match="on a device"):
        dist.all_reduce(array if world.me == 0 else uploaded(cuda, array), group=group)


def test_without_a_gpu(monkeypatch, world):
    """The error says what is missing, before anything is sent."""
    array = uploaded(Simulated(), np.zeros(4, np.float32))
    monkeypatch.setattr(device, "_runtime", None)
    with pytest.raises(UnsupportedError, match=r"GPU.*(CuPy|no GPU)"):
        dist.all_reduce(array)
