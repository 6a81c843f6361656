"""Message algorithms: every primitive, dtype and operation, in both kinds of memory.

`Late` models device memory: enqueued work runs only at `synchronize`.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import oracle
import pytest
from conftest import members, on_2_ranks
from conftest import team as group_of
from driver import (
    MOVES,
    NAMES,
    REDUCTIONS,
    Call,
    Uneven,
    by_dtype,
    check_same_bits,
    legal_operations,
    wait_for_all,
)

import mpicoll as dist
from mpicoll.arrays import views
from mpicoll.core.plan import Implementation
from mpicoll.dtypes import Kind, ReduceOp, by_name
from mpicoll.primitives import Layout
from mpicoll.routes import algorithms, messages, moves, reductions, wire
from mpicoll.routes.host import lists, select
from mpicoll.routes.space import Host

#: Host memory, as passed to algorithms.
HOST = Host()


#: Sizes in bytes at which the algorithms change, reduced so that small calls cover them.
SEAMS = {"GATHERED": 160, "LEAST": 16, "MOST": 48, "LINKS": 3}
#: The same for thresholds that belong to the memory.
SPACE = {"small": 128, "chunk": 48, "stack": 4096}


class Late(Host):
    """Host memory whose operations run at `synchronize`. New buffers hold garbage."""

    mpi = False

    def __init__(self):
        super().__init__()
        self.enqueued = []

    def empty(self, dtype, count):
        view = views.empty(dtype, count)
        view.flat.view(np.uint8)[...] = 0xAA
        if dtype.kind in (Kind.FLOAT, Kind.NARROW_FLOAT, Kind.COMPLEX):
            view.flat[...] = np.nan
        return view

    def copy(self, source, into):
        self.enqueued.append((HOST.copy, source, into))

    def combine(self, op, sources, out, divisor, exact=False):
        self.enqueued.append((HOST.combine, op, list(sources), out, divisor, exact))

    def scale(self, source, factor, out):
        self.enqueued.append((HOST.scale, source, factor, out))

    def narrow(self, source, out):
        self.enqueued.append((HOST.narrow, source, out))

    def synchronize(self):
        for work, *arguments in self.enqueued:
            work(*arguments)
        self.enqueued.clear()


@pytest.fixture(scope="module")
def make_place():
    """Create a group whose calls run on a kind of memory."""
    spaces = {}
    chosen = select.choose

    def choose(kind, listed):
        space = spaces.get(kind.group.group_name)
        if space is None or kind.primitive.name not in algorithms.ALGORITHMS:
            return chosen(kind, listed)
        route = algorithms.build(kind, space)

        def settled(send, recv, extent, root):
            route(send, recv, extent, root)
            space.synchronize()

        return Implementation(
            lists.packed(kind, settled, lambda count: False) if listed else settled
        )

    def made(name, ranks, space):
        team = group_of(name, ranks)
        if team.me is not None:
            spaces[team.group.group_name] = space
        return team

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "choose", choose)
        yield made


@pytest.fixture(scope="module")
def places(world, make_place):
    """Groups for each kind of memory: all ranks, and all but one in reverse order."""
    n = world.size
    orders = (("", range(n)), (", reversed", range(n)[::-1][: max(1, n - 1)]))
    return [
        make_place(name + order, ranks, kind())
        for name, kind in (("late", Late), ("host", Host))
        for order, ranks in orders
    ]


@pytest.fixture
def late(places):
    """All ranks, with `Late` memory."""
    return places[0]


@pytest.fixture
def seams(monkeypatch):
    for name, value in SEAMS.items():
        monkeypatch.setattr(moves, name, value)
    for name, value in SPACE.items():
        monkeypatch.setattr(Host, name, value)
    monkeypatch.setattr(wire, "INT_MAX", 20)  # longer messages use a derived datatype


def counts(name, dtype, n):
    """Element counts around each change of algorithm."""
    row, size = NAMES[name], dtype.itemsize
    block = SPACE["chunk"] // size
    if row.reduces and row.layout is Layout.SCATTERED:
        borders = [block, 4 * block]
    elif row.reduces:
        borders = [SPACE["small"] // n // size, n * block, 4 * n * block]
    elif name == "broadcast":
        borders = [n * SEAMS["LEAST"] // size, 500 // size]
    elif row.layout is Layout.GATHERED and not row.root:
        borders = [SEAMS["GATHERED"] // n // size]
    else:
        borders = [40]
    return sorted({0, 1, n - 1, n, n + 1}.union(*((border, border + 1) for border in borders)))


def swept(places, name, dtype, op):
    """Run and yield calls over all counts, cycling groups and roots.

    Reductions use every other count.
    """
    turn = dtype.code + (op.code if op else 0)
    most = max(team.size for team in places)
    for i, count in enumerate(counts(name, dtype, most)):
        if op is not None and (i + dtype.code + op.code // 2) % 2:
            continue
        team = places[(i // 2 + turn) % len(places)]
        if team.me is not None:
            call = Call(name, team, dtype, count, op, i % team.size if NAMES[name].root else 0)
            call.run(by_group_rank=True)
            yield call


@pytest.mark.parametrize("name", [name for name in MOVES if name not in NAMES[name].aliases])
@by_dtype
def test_data_movement_gives_the_right_elements(places, mpi, seams, name, dtype):
    wait_for_all(mpi)
    calls = list(swept(places, name, dtype, None))
    assert calls


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name not in NAMES[name].aliases])
@by_dtype
def test_reductions_give_the_right_results(places, mpi, seams, monkeypatch, name, dtype):
    wait_for_all(mpi)
    calls = []
    for i, op in enumerate(legal_operations(dtype)):
        monkeypatch.setattr(reductions, "DIRECT", 8 if i % 2 else 1)
        calls += swept(places, name, dtype, op)
    assert calls
    if name == "all_reduce":
        check_same_bits(mpi, calls)


@pytest.mark.parametrize("gathered", [0, 10**6], ids=["ring", "doubling"])
def test_all_gather_supports_uneven_blocks(places, mpi, monkeypatch, gathered):
    monkeypatch.setattr(moves, "GATHERED", gathered)
    dtype = by_name["int32"]
    for sizes in ([5, 70, 3, 40, 1], [61, 0, 1, 130, 0], [0, 200, 0, 0, 0], [0, 0, 0, 0, 7]):
        wait_for_all(mpi)
        for team in members(places):
            blocks = [oracle.any_bits(dtype, sizes[r], r) for r in team.ranks]
            outputs = [np.zeros(block.size, dtype.numpy) for block in blocks]
            dist.all_gather(outputs, blocks[team.me], team.group)
            for r, (output, block) in enumerate(zip(outputs, blocks, strict=True)):
                oracle.same_bits(output, block, f"{sizes} from {r} in {team.name}")


@pytest.mark.parametrize("dtype", [by_name["int32"], by_name["bfloat16"], by_name["complex64"]])
def test_reduce_scatter_supports_uneven_blocks(places, mpi, seams, dtype):
    for sizes in ([5, 70, 3, 40, 1], [61, 0, 1, 130, 0], [0, 200, 0, 0, 0], [0, 0, 0, 0, 7]):
        wait_for_all(mpi)
        for team in members(places):
            for op in legal_operations(dtype):
                Uneven(team, dtype, sizes, op).run()


def test_all_to_all_supports_different_block_sizes(places, mpi):
    """Sizes differ between all pairs of ranks, in a single array and in lists."""
    wait_for_all(mpi)
    for team in members(places):
        me, n = team.me, team.size

        def block(source, target):
            start = 1000 * source + 100 * target
            return np.arange(start, start + (7 * source + 3 * target) % 11)

        sends = [block(me, r) for r in range(n)]
        receives = [block(r, me) for r in range(n)]
        whole = np.zeros(sum(map(len, receives)), int)
        dist.all_to_all_single(
            whole, np.concatenate(sends), [*map(len, receives)], [*map(len, sends)], team.group
        )
        assert (whole == np.concatenate(receives)).all(), team.name
        # Even ranks pass strided arrays, as input and as output.
        step = 2 if me % 2 == 0 else 1
        outputs = [np.zeros(step * len(one), int)[::step] for one in receives]
        dist.all_to_all(outputs, [np.repeat(one, step)[::step] for one in sends], team.group)
        for output, expected in zip(outputs, receives, strict=True):
            assert (output == expected).all(), team.name


def test_all_to_all_works_in_place(places, mpi):
    """The input is also the output."""
    wait_for_all(mpi)
    for team in members(places):
        array = np.arange(team.size) + 10 * team.me
        rows = list(array.reshape(team.size, 1))
        dist.all_to_all(rows, rows[::-1], team.group)
        at = team.size - 1 - team.me
        assert (array == 10 * np.arange(team.size) + at).all(), team.name


def test_nan_results_have_equal_bits_on_all_ranks(late, mpi):
    """Each rank contributes a NaN with a different payload and sign."""
    for name, word in (("float32", np.uint32), ("complex128", np.uint64), ("bfloat16", np.uint16)):
        dtype = by_name[name]
        for count in (5, HOST.small // dtype.itemsize):
            for op in legal_operations(dtype):
                if op.op is ReduceOp.PREMUL_SUM:
                    op = op(2)
                array = np.ones(count, dtype.numpy)
                parts = array.view(array.real.dtype)
                bits = parts.view(word)
                parts[::3] = np.nan
                bits[::3] += word(late.me + 1)
                bits[::6] ^= word(late.me % 2 << (8 * bits.itemsize - 1))
                dist.all_reduce(array, op, late.group)
                assert np.isnan(parts[::3]).all()
                everybody = mpi.allgather(array.tobytes())
                assert len(set(everybody)) == 1, f"{name} {op} {count}"


def test_completed_messages_release_their_memory(late):
    held = len(messages.in_flight)
    for name in ("broadcast", "all_gather", "gather", "scatter"):
        Call(name, late, by_name["int8"], 7).run(by_group_rank=True)
    for count in (7, HOST.small + 7):
        Call("reduce", late, by_name["int8"], count, ReduceOp.SUM).run(by_group_rank=True)
    assert len(messages.in_flight) == held


def test_messages_keep_datatypes_evicted_from_the_cache(monkeypatch):
    monkeypatch.setattr(wire, "INT_MAX", 20)
    memory = np.zeros(100, np.int8)
    made = [wire.message(memory, 21 + i % 40, by_name["int8"]) for i in range(60)]
    assert [one[-1].Get_size() for one in made] == [21 + i % 40 for i in range(60)]


@on_2_ranks
def test_mismatched_counts_never_return_wrong_results(make_place, world):
    elements = np.ones(7 if world.me == 0 else 5)
    into = [elements.copy(), elements.copy()] if world.me == 0 else None
    words = r"expected 7 elements from rank 1, .* 5"
    for name, call in {
        "all_reduce": lambda group: dist.all_reduce(elements, group=group),
        "gather": lambda group: dist.gather(elements, into, group_dst=0, group=group),
    }.items():
        group = make_place(f"mismatched {name}", range(2), Late()).group
        for _ in range(64):  # the first calls of a group are compared, with another message
            dist.barrier(group)
        # 7 elements may not fit into 5: then MPI reports an error, and the group fails
        fails = pytest.raises(dist.MismatchError, match=words)
        with fails if world.me == 0 else suppress(dist.MPIError, dist.MismatchError):
            call(group)
        dist.destroy_process_group(group)
