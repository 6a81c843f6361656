"""Calls of every primitive with their expected results, built from the table of primitives.

A primitive with a new layout needs a method of ``Call``; any other new primitive needs no change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import oracle
import pytest
from oracle import Array, Between

import mpicoll as dist
from mpicoll.dispatch import execute
from mpicoll.dtypes import DTYPES, OPERATIONS, DType, Kind, ReduceOp
from mpicoll.primitives import PRIMITIVES, Layout, Primitive
from mpicoll.routes import tuning

#: Rows of the table of primitives by public name, including aliases.
NAMES = {name: row for row in PRIMITIVES for name in (row.name, *row.aliases)}
MOVES = [n for n, row in NAMES.items() if not row.reduces and row.layout is not Layout.EMPTY]
REDUCTIONS = [name for name, row in NAMES.items() if row.reduces]

#: With more than two ranks they show nothing that other dtypes of their kind do not show.
RARE = (
    "int8", "uint16", "uint32", "uint64", "complex128", "float8_e3m4", "float8_e4m3",
    "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
by_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=[pytest.mark.up_to_2] * (dtype.name in RARE)) for dtype in DTYPES],
    ids=repr,
)

#: Names of the coalesced calls by primitive. Some exist only in the PyTorch backend.
COALESCED = {
    "all_reduce": "all_reduce_coalesced",
    "all_gather": "all_gather_coalesced",
    "all_gather_single": "all_gather_single_coalesced",
    "reduce_scatter_single": "reduce_scatter_single_coalesced",
}

#: Number of elements before and after an array that no call may write.
GUARD_COUNT = 4

#: Creates an array from a shape and a dtype. Returns it and NumPy's view of its elements.
Maker = Callable[[tuple[int, ...], DType], tuple[Any, Array]]


@dataclass(frozen=True)
class Team:
    """A group and its members.

    group: the process group, or the value of new_group on a rank that is not a member.
    ranks: global ranks in group order.
    me:    this rank's group rank; None if it is not a member.
    """

    name: str
    group: Any
    ranks: tuple[int, ...]
    me: int | None

    @property
    def size(self) -> int:
        return len(self.ranks)


def team(name: str, ranks: Any, **options: Any) -> Team:
    """Create a group of these ranks with options of new_group. All ranks must call this."""
    ranks, options = tuple(ranks), {"sort_ranks": False, **options}
    group = dist.group.WORLD if name == "world" else dist.new_group(list(ranks), **options)
    me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
    return Team(name, group, ranks, me)


def legal_operations(dtype: DType) -> list[ReduceOp]:
    """Return the reduction operations that a dtype supports."""
    return [op for op in OPERATIONS if dtype.kind in op.kinds]


def guarded(shape: tuple[int, ...], dtype: DType) -> tuple[Any, Array]:
    """Return a contiguous NumPy array in the middle of a larger one."""
    count = int(np.prod(shape))
    memory = np.full((count + 2 * GUARD_COUNT) * dtype.itemsize, 0xA5, np.uint8).view(dtype.numpy)
    array = memory[GUARD_COUNT : GUARD_COUNT + count].reshape(shape)
    return array, array


def guard_is_intact(array: Array) -> bool:
    """Return True if the guard elements around an array of ``guarded`` are unchanged."""
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    edge = GUARD_COUNT * array.dtype.itemsize
    ends = memory.view(np.uint8)
    return bool((ends[:edge] == 0xA5).all() and (ends[len(ends) - edge :] == 0xA5).all())


@lru_cache(maxsize=512)
def combined(
    op: ReduceOp, dtype: DType, count: int, ranks: tuple[int, ...], terms: range
) -> Between:
    """Return the expected result of reducing the operands of global ranks; terms: group ranks."""
    premul = op is ReduceOp.PREMUL_SUM
    by = oracle.factors(dtype, terms.stop)[terms.start :] if premul else None
    return oracle.reduced(op, dtype, [oracle.operands(op, dtype, count, r) for r in ranks], by)


class Call:
    """One rank's call of a primitive: ``start`` makes the call, ``check`` compares its results.

    count:   number of elements in a block, the data that one rank sends to another.
    op:      the reduction operation; PREMUL_SUM uses a different factor on each rank.
    root:    group rank.
    make:    creates this rank's arrays.
    shape:   shape of a block; default (count,).
    stacked: True if an array of all blocks has an additional first dimension, False if its blocks
             are concatenated.
    """

    #: The module whose functions are called.
    api: ClassVar[Any] = dist

    def __init__(
        self,
        name: str,
        team: Team,
        dtype: DType,
        count: int,
        op: ReduceOp | None = None,
        root: int = 0,
        make: Maker = guarded,
        shape: tuple[int, ...] | None = None,
        stacked: bool = False,
    ) -> None:
        assert team.me is not None
        row = NAMES[name]
        self.what = f"{name} of {dtype} {op} {count} from {root} in {team.name}, {team.me}"
        self.name, self.row, self.team, self.dtype, self.op = name, row, team, dtype, op
        self.count, self.root, self.me = count, root, team.me
        self.shape = (count,) if shape is None else shape
        self.stacked, self.make = stacked, make
        self.arguments: dict[str, Any] = {}
        self.watched: list[tuple[str, Array, Between]] = []
        rooted = not row.root or root == team.me
        mine = self.given(team.me)
        self._LAYOUTS[row.layout](self, row, mine, rooted)

    def given(self, rank: int) -> Array:
        """Return the input of a group rank."""
        if self.op is None:
            return oracle.any_bits(self.dtype, self.input_count, self.team.ranks[rank])
        return oracle.operands(self.op, self.dtype, self.input_count, self.team.ranks[rank])

    @property
    def input_count(self) -> int:
        """Number of elements of an input: one block, or a block for each rank."""
        many = self.row.layout in (Layout.SCATTERED, Layout.EXCHANGED)
        return self.count * (self.team.size if many else 1)

    @property
    def terms(self) -> range:
        """Group ranks whose operands are reduced to this rank's result."""
        return self.row.combined(self.me, self.team.size)

    def result(self) -> Between:
        """Return this rank's expected result of a reduction."""
        assert self.op is not None
        ranks = tuple(self.team.ranks[rank] for rank in self.terms)
        return combined(self.op, self.dtype, self.given(0).size, ranks, self.terms)

    def read(self, argument: str, whole: bool, values: Array) -> None:
        """Add an input: one array or a list of one per rank, which must not change."""
        self._place(argument, whole, values, Between(values))

    def written(self, argument: str, whole: bool, expected: Between) -> None:
        """Add an output: one array or a list of one per rank, with its expected contents."""
        self._place(argument, whole, None, expected)

    def _place(self, argument: str, whole: bool, values: Array | None, expected: Between) -> None:
        if not whole:
            self.arguments[argument] = self._one(argument, self.shape, values, expected)
        elif self.row.listed:
            parts = [(r * self.count, self.count) for r in range(self.team.size)]
            self.arguments[argument] = [
                self._one(
                    f"{argument}[{r}]",
                    self.shape,
                    None if values is None else values[start : start + count],
                    expected.part(start, count),
                )
                for r, (start, count) in enumerate(parts)
            ]
        else:
            n = self.team.size
            if self.stacked or not self.shape:
                shape = (n, *self.shape)
            else:
                shape = (n * self.shape[0], *self.shape[1:])
            self.arguments[argument] = self._one(argument, shape, values, expected)

    def _one(
        self, name: str, shape: tuple[int, ...], values: Array | None, expected: Between
    ) -> Any:
        array, alias = self.make(shape, self.dtype)
        if values is not None:
            alias[...] = values.reshape(shape)
        self.watched.append((name, alias, expected))
        return array

    def _in_place(self, row: Primitive, mine: Array, rooted: bool) -> None:
        if not row.reduces:
            expected = Between(self.given(self.root))
        else:
            expected = self.result() if rooted else Between(mine)
        self._place(row.output, False, mine, expected)

    def _gathered(self, row: Primitive, mine: Array, rooted: bool) -> None:
        self.read(row.input, False, mine)
        if rooted:
            everything = [self.given(r) for r in range(self.team.size)]
            self.written(row.output, True, Between(np.concatenate(everything)))

    def _scattered(self, row: Primitive, mine: Array, rooted: bool) -> None:
        whole = self.result() if row.reduces else Between(self.given(self.root))
        self.written(row.output, False, whole.part(self.me * self.count, self.count))
        if rooted:
            self.read(row.input, True, mine)

    def _exchanged(self, row: Primitive, mine: Array, rooted: bool) -> None:
        start = self.me * self.count
        blocks = [self.given(r)[start : start + self.count] for r in range(self.team.size)]
        self.read(row.input, True, mine)
        self.written(row.output, True, Between(np.concatenate(blocks)))

    def _alike(self, row: Primitive, mine: Array, rooted: bool) -> None:
        self.read(row.input, False, mine)
        if self.terms:
            expected = self.result() if row.reduces else Between(self.given(self.terms[0]))
            self.written(row.output, False, expected)
        else:  # the output must not change
            self.read(row.output, False, oracle.any_bits(self.dtype, self.count, self.me))

    _LAYOUTS: ClassVar = {
        Layout.ALIKE: _alike,
        Layout.IN_PLACE: _in_place,
        Layout.GATHERED: _gathered,
        Layout.SCATTERED: _scattered,
        Layout.EXCHANGED: _exchanged,
    }

    def start(self, async_op: bool = False, by_group_rank: bool = False) -> Any:
        """Make the call. Pass the root as a global rank or as a group rank."""
        arguments = dict(self.arguments)
        if self.row.root and by_group_rank:
            arguments[f"group_{self.row.root}"] = self.root
        elif self.row.root:
            arguments[self.row.root] = self.team.ranks[self.root]
        if self.op is not None:
            arguments["op"] = self.operation()
        group = None if self.team.name == "world" else self.team.group
        work = getattr(self.api, self.name)(**arguments, group=group, async_op=async_op)
        assert isinstance(work, self.api.Work) if async_op else work is None, self.what
        return work

    def operation(self) -> Any:
        """Return the argument ``op``."""
        if self.op is ReduceOp.PREMUL_SUM:
            return self.op(oracle.factors(self.dtype, self.team.size)[self.me])
        return self.op

    def check(self) -> None:
        """Compare all arrays with their expected contents."""
        for name, array, expected in self.watched:
            what = f"{self.what}: {name}"
            expected.check(np.ascontiguousarray(array).reshape(-1), what)
            assert self.make is not guarded or guard_is_intact(array), f"{what}: written beside it"

    def run(self, by_group_rank: bool = False) -> None:
        """Make the call and check it."""
        self.start(False, by_group_rank)
        self.check()


class InPlace(Call):
    """A call whose smaller array is this rank's block of the larger one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, make=lambda shape, dtype: (np.zeros(shape, dtype.numpy),) * 2)
        gathers = self.row.layout is Layout.GATHERED
        names = self.row.input, self.row.output
        small, large = names if gathers else reversed(names)
        whole = self.arguments.get(large)
        if whole is None:  # it is at the root only
            return
        own = whole[self.me] if self.row.listed else whole[self.me * self.count :][: self.count]
        if gathers:
            own[...] = self.given(self.me)
        self.arguments[small] = own
        expected = {name: one for name, _, one in self.watched}
        self.watched = [one for one in self.watched if gathers and one[0] != small]
        self.watched += [] if gathers else [(small, own, expected[small])]


class Uneven(Call):
    """reduce_scatter of blocks of different sizes. Sizes beyond the group's size are ignored."""

    def __init__(
        self, team: Team, dtype: DType, sizes: Sequence[int], op: ReduceOp, make: Maker = guarded
    ) -> None:
        self.sizes = list(sizes)[: team.size]
        super().__init__("reduce_scatter", team, dtype, 0, op, make=make)
        self.what += f", sizes {self.sizes}"

    def given(self, rank: int) -> Array:
        """Return the input of a group rank."""
        assert self.op is not None
        return oracle.operands(self.op, self.dtype, sum(self.sizes), self.team.ranks[rank])

    def _scattered(self, row: Primitive, mine: Array, rooted: bool) -> None:
        spans = [(sum(self.sizes[:r]), size) for r, size in enumerate(self.sizes)]
        expected = self.result().part(*spans[self.me])
        self.arguments["output"] = self._one("output", (self.sizes[self.me],), None, expected)
        self.arguments["input_list"] = [
            self._one(f"input_list[{r}]", (size,), part, Between(part))
            for r, (start, size) in enumerate(spans)
            for part in [mine[start : start + size]]
        ]

    _LAYOUTS: ClassVar = {Layout.SCATTERED: _scattered}


class Exact(Call):
    """A call with one correct result: sums and products of its narrow floats are exact in float32,
    in any order, and need rounding to the narrow dtype.
    """

    def given(self, rank):
        if self.dtype.kind is not Kind.NARROW_FLOAT or self.op is None:
            return super().given(rank)
        count, rank = self.input_count, self.team.ranks[rank]
        rng = np.random.default_rng([self.dtype.code, self.op.code, count, rank])
        if self.op is ReduceOp.PRODUCT:
            made = rng.choice([-1.0, -0.5, 1, 1.25, 1.5], count)
        else:
            digits = {"float16": 11, "bfloat16": 8}.get(self.dtype.name, 3)
            made = rng.integers(1 - 2**digits, 2**digits, count) / 8
        places = np.arange(count) % 29
        made[places == 3 + 5 * rank] = np.nan
        if np.isinf(np.float32(np.inf).astype(self.dtype.numpy)):
            made[places == 4 + rank] = np.inf
        return made.astype(np.float32).astype(self.dtype.numpy)

    def result(self):
        if self.dtype.kind is not Kind.NARROW_FLOAT:
            return super().result()
        given = [self.given(rank) for rank in self.terms]
        return oracle.reduced(self.op, self.dtype, given, None)


def use_route(
    patch: pytest.MonkeyPatch, route: str, place: str = "node", kinds: Iterable[str] = tuning.KINDS
) -> None:
    """Use a host route for these kinds of calls, at every size, in groups created from now on."""
    rows = {kind: {place: ((0, route),)} for kind in kinds}
    patch.setattr(tuning.job, "table", tuning.Table({1: rows}))


def together(name: str, calls: Sequence[Call], async_op: bool = False) -> Any:
    """Make one coalesced call of the arrays of ``calls``. Returns a Work, a Future or None."""
    first = calls[0]
    team, op, row = first.team, first.op, NAMES[name]
    if op is ReduceOp.PREMUL_SUM:
        op = op(oracle.factors(first.dtype, team.size)[team.me])
    made = [call.arguments for call in calls]
    if name == "all_reduce":
        tensors = [one["tensor"] for one in made]
        assert op is not None
        return dist.all_reduce_coalesced(tensors, op, team.group, async_op)
    if name == "all_gather":
        outputs = [[one["tensor_list"][rank] for one in made] for rank in range(team.size)]
        inputs = [one["tensor"] for one in made]
        return dist.all_gather_coalesced(outputs, inputs, team.group, async_op)
    into, out = ([one[side] for one in made] for side in (row.output, row.input))
    return execute.run_all(COALESCED[name], row, team.group, async_op, into, out, op)


def wait_for_all(mpi: Any) -> None:
    """Wait for all ranks without using a core, so that the other ranks can compute.

    The ranks outside a group call this while its members make their calls.
    """
    request = mpi.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


def check_same_bits(mpi: Any, calls: Sequence[Call]) -> None:
    """Raise AssertionError unless the outputs have equal bits on all members of each group.

    All ranks must call this, with the calls in the same order. The bytes are compared by mpi4py.
    """
    mine: dict[str, list[bytes]] = {}
    for call in calls:
        array = next(array for name, array, _ in call.watched if name == call.row.output)
        mine.setdefault(call.team.name, []).append(array.tobytes())
    everybody = mpi.allgather(mine)
    for call in calls:
        for rank in call.team.ranks:
            assert everybody[rank][call.team.name] == mine[call.team.name], (
                f"{call.name} of {call.dtype}: ranks {rank} and {mpi.rank} hold different bits"
            )


__all__ = [
    "DTYPES", "MOVES", "NAMES", "REDUCTIONS", "Call", "Kind", "Team", "Uneven", "by_dtype",
    "check_same_bits", "legal_operations", "team", "wait_for_all",
]  # fmt: skip
