"""Arrays, calls and expected results of a primitive, built from its row of the table."""

from __future__ import annotations

import inspect
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

import mpicoll
from mpicoll.arrays.views import Array
from mpicoll.cli.timing import Call
from mpicoll.cuda import binding, runtime
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.errors import UnsupportedError
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "MEMORIES",
    "PERIOD",
    "Buffers",
    "Case",
    "Expected",
    "Memory",
    "MemoryArray",
    "Side",
    "allocate_zeros",
    "block_count",
    "contents",
    "count_wrong",
    "expected",
    "fill",
    "named_call",
    "needed_bytes",
    "op_name",
    "own_call",
    "variants",
    "wrong",
]


@dataclass(frozen=True)
class Case:
    """One line of the table, on this rank.

    count: elements of one block; the whole array if there is only one block.
    op:    None without a reduction.
    dtype: None without an array.
    n, me, root: number of ranks, this rank, and the root.
    """

    row: Primitive
    dtype: DType | None
    op: ReduceOp | None
    count: int
    n: int
    me: int
    root: int

    @property
    def size(self) -> int:
        """Size of the larger array in bytes."""
        return 0 if self.dtype is None else self.count * _blocks(self.row, self.n) * self._item

    @property
    def _item(self) -> int:
        return 0 if self.dtype is None else self.dtype.itemsize

    @property
    def at_root(self) -> bool:
        """Whether this rank has the array that only the root has, if there is one."""
        return not self.row.root or self.me == self.root


class _Kinds(NamedTuple):
    """Kinds of input and output: "one" block, "all" (a block per rank), or "" if missing."""

    input: str
    output: str


_KINDS = {
    Layout.IN_PLACE: _Kinds("", "one"),
    Layout.GATHERED: _Kinds("one", "all"),
    Layout.SCATTERED: _Kinds("all", "one"),
    Layout.EXCHANGED: _Kinds("all", "all"),
    Layout.ALIKE: _Kinds("one", "one"),
    Layout.EMPTY: _Kinds("", ""),
}


def _blocks(row: Primitive, n: int) -> int:
    """Return the number of blocks of the larger array."""
    return n if "all" in _KINDS[row.layout] else 1


def block_count(row: Primitive, dtype: DType, n: int, size: int) -> int:
    """Return the elements of a block for a size of the larger array, at least 1."""
    return max(1, size // (_blocks(row, n) * dtype.itemsize))


def op_name(op: ReduceOp) -> str:
    """Return the name of an operation on the command line and in the table."""
    return {"PRODUCT": "prod"}.get(op.name, op.name.lower())


def variants(row: Primitive) -> tuple[str, ...]:
    """Return the variants of a call. Comparisons use the first one."""
    if row.layout is Layout.IN_PLACE:
        return ("in_place",)
    if row.layout in (Layout.GATHERED, Layout.SCATTERED):
        return ("out_of_place", "in_place")
    return ("out_of_place",)


# --- memory -------------------------------------------------------------------------------------


#: A NumPy array, or a CuPy array, which has no types.
MemoryArray: TypeAlias = Any


class Memory:
    """Host memory with NumPy arrays.

    name: name in the header.
    pool: name of the physical memory, the same for all ranks that share it.
    """

    def __init__(self) -> None:
        self.name = "host memory, NumPy arrays"
        self.pool = socket.gethostname()

    def empty(self, count: int, dtype: DType) -> MemoryArray:
        """Allocate an array of shape (count,). Raises UnsupportedError for an unsupported dtype."""
        return np.empty(count, dtype.numpy)

    def put(self, array: Array) -> MemoryArray:
        """Copy a NumPy array of unsigned integers to this memory."""
        return array

    def get(self, array: MemoryArray) -> Array:
        """Copy an array of unsigned integers to the host."""
        found: Array = array
        return found

    def settle(self) -> None:
        """Wait until all calls are done."""

    def available(self) -> int:
        """Return the free memory in bytes."""
        with suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


class _Gpu(Memory):
    """Memory of the GPU that mpicoll.cuda.binding selects, with CuPy arrays.

    Raises UnsupportedError without CuPy or GPU.
    """

    def __init__(self) -> None:
        cuda = runtime.get_runtime()
        index = binding.bind()
        if index is None:
            raise UnsupportedError("arrays on a GPU: CuPy finds no GPU on this host")
        import cupy

        self._cupy: ModuleType = cupy
        self.name = f"GPU memory, CuPy {cupy.__version__} arrays, rank 0 on {cuda.name(index)}"
        self.pool = f"GPU {cuda.pci_bus_id(index)} of {socket.gethostname()}"

    def empty(self, count: int, dtype: DType) -> MemoryArray:
        try:
            return self._cupy.empty(count, dtype.numpy)
        except (TypeError, ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedError(f"CuPy has no arrays of {dtype}: {error}") from error

    def put(self, array: Array) -> MemoryArray:
        return self._cupy.asarray(array)

    def get(self, array: MemoryArray) -> Array:
        copy: Array = self._cupy.asnumpy(array)
        return copy

    def settle(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def available(self) -> int:
        return int(self._cupy.cuda.runtime.memGetInfo()[0])


#: Memory by value of --device.
MEMORIES: dict[str, Callable[[], Memory]] = {"cpu": Memory, "cuda": _Gpu}


# --- arrays -------------------------------------------------------------------------------------


class Side(NamedTuple):
    """Input or output of a call.

    given:  the argument: an array, or a list with one array per rank.
    blocks: its blocks.
    """

    given: MemoryArray | list[MemoryArray]
    blocks: list[MemoryArray]


class Buffers:
    """Arrays of a case on this rank, filled with zeros, in separate memory.

    input, output: None if this rank, or the primitive, has none.
    """

    def __init__(self, case: Case, memory: Memory) -> None:
        kinds = _KINDS[case.row.layout]
        self.input, self.output = (_side(kind, case, memory) for kind in kinds)

    def of(self, case: Case, variant: str) -> tuple[Side | None, Side | None]:
        """Return input and output. In place, one is this rank's block in the other array."""
        kinds = _KINDS[case.row.layout]
        if variant == "in_place" and self.input and self.output and "one" in kinds:
            block = (self.input if kinds.input == "all" else self.output).blocks[case.me]
            own = Side(block, [block])
            return (own, self.output) if kinds.input == "one" else (self.input, own)
        return self.input, self.output


def _side(kind: str, case: Case, memory: Memory) -> Side | None:
    if not kind or (kind == "all" and not case.at_root):
        return None
    assert case.dtype is not None
    if kind == "all" and case.row.listed:
        arrays = [allocate_zeros(case.count, case.dtype, memory) for _ in range(case.n)]
        return Side(arrays, arrays)
    n = case.n if kind == "all" else 1
    whole = allocate_zeros(n * case.count, case.dtype, memory)
    return Side(whole, [whole[i * case.count :][: case.count] for i in range(n)])


def allocate_zeros(count: int, dtype: DType, memory: Memory) -> MemoryArray:
    """Allocate and write an array. Memory that was never written is a single page of zeros."""
    array = memory.empty(count, dtype)
    array.view(np.uint8).fill(0)
    return array


#: Additional memory that routes, MPI and the check may use, at most the size of the larger array.
_SCRATCH_BYTES = 64 << 20


def needed_bytes(case: Case, others: Sequence[str], routes: int = 0) -> int:
    """Return the maximum memory of a case on this rank; ``routes``: number of additional routes."""
    block = case.size // _blocks(case.row, case.n)
    sides = [
        (case.n if kind == "all" else 1) * block
        for kind in _KINDS[case.row.layout]
        if kind and (kind == "one" or case.at_root)
    ]
    own = sum(sides) if case.row.listed and "mpi4py" in others else 0
    own += 2 * case.size if "copy" in others else 0
    return sum(sides) + own + (1 + routes) * min(case.size, _SCRATCH_BYTES)


# --- calls --------------------------------------------------------------------------------------


def own_call(
    case: Case,
    buffers: Buffers,
    variant: str,
    waits: bool = False,
    group: ProcessGroup | None = None,
) -> Call:
    """Return a call of mpicoll. ``waits``: with async_op and wait()."""
    input, output = buffers.of(case, variant)
    sides = input and input.given, output and output.given
    call = named_call(mpicoll, case, *sides, waits, group)
    if not waits:
        return call
    return lambda: call().wait()


def named_call(
    api: ModuleType,
    case: Case,
    input: object,
    output: object,
    waits: bool = False,
    group: object = None,
) -> partial[Any]:
    """Return a call of a module with the names of torch.distributed."""
    row = case.row
    named: dict[str, Any] = {row.output: output, row.input: input, row.root: case.root}
    if case.op is not None:
        named["op"] = getattr(api.ReduceOp, case.op.name)
    named.pop("", None)
    if group is not None:
        named["group"] = group
    if waits:
        named["async_op"] = True
    names = (row.name, *row.aliases)
    function = getattr(api, next((name for name in names if hasattr(api, name)), row.name))
    bound = inspect.signature(function).bind(**named)  # by position, as most programs call
    return partial(function, *bound.args, **bound.kwargs)


# --- the check ----------------------------------------------------------------------------------

# Any rank can compute the input of any other rank, and the expected results, with NumPy.
#
# An array repeats a pattern of PERIOD elements. The period is prime, so an element from a wrong
# position differs, unless their distance is a multiple of it. Only one period has to be computed.
#
# - Calls that move data: random bits, which must all arrive.
# - Integers: random bits, reduced modulo 2**64. Bools are counted. Both are exact.
# - MIN and MAX: exact.
# - Sums and products of floating point: magnitudes from 1/2 to 2 with random signs (complex:
#   directions), reduced as long doubles. With n numbers added in any order, and a rounding error of
#   at most eps / 2 per addition, the error is at most (n - 1) eps / 2 times the sum of the
#   magnitudes, to first order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
#   section 4.2). The same holds for products with the product of the magnitudes, and for complex
#   products with a factor of sqrt(5) (Brent, Percival, Zimmermann, Math. Comp. 76, 2007). AVG adds
#   one division. The tolerance is therefore 2 n eps times that magnitude, with the eps of the dtype
#   in which the reduction is computed. Both ends are rounded to the dtype, as the result is.

#: Number of elements after which inputs repeat.
PERIOD = 8191
#: Layouts with a block per rank.
_FOR_EACH = (Layout.SCATTERED, Layout.EXCHANGED)
#: Number of periods compared at a time.
_COMPARED_COUNT = 64


class Expected(NamedTuple):
    """Expected results of one period: between ``low`` and ``high``, or the bits of ``low``.

    An end that exceeds the dtype is its infinity.
    """

    low: Array
    high: Array | None = None


def _pattern(op: ReduceOp | None, dtype: DType, source: int, block: int, count: int) -> Array:
    """Return the contents of a block of rank ``source``, at most one period."""
    length = min(count, PERIOD)
    rng = np.random.default_rng([dtype.code, source, block])
    if dtype.kind is Kind.BOOL:
        return rng.integers(0, 2, length).astype(np.bool_)
    if op is None or dtype.kind is Kind.INTEGER:
        bits: Array = np.frombuffer(rng.bytes(length * dtype.itemsize), dtype.numpy)
        return bits
    size = np.exp2(rng.uniform(-1, 1, length))
    if dtype.kind is Kind.COMPLEX:
        number: Array = size * np.exp(2j * np.pi * rng.uniform(0, 1, length))
        return number.astype(dtype.numpy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pattern: Array = (size * rng.choice([-1.0, 1.0], length)).astype(dtype.numpy)
        unsigned = np.isnan(pattern.astype(float))  # float8_e8m0fnu
    pattern[unsigned] = size[unsigned].astype(dtype.numpy)
    return pattern


def contents(case: Case) -> Iterator[Array]:
    """Yield the contents of each block that this rank reads."""
    assert case.dtype is not None
    if case.row.layout is Layout.IN_PLACE and case.row.root == "src" and not case.at_root:
        return
    for block in range(case.n if case.row.layout in _FOR_EACH and case.at_root else 1):
        yield _pattern(case.op, case.dtype, case.me, block, case.count)


def expected(case: Case) -> Iterator[Expected]:
    """Yield the expected contents of each block of this rank's output."""
    row, op, dtype = case.row, case.op, case.dtype
    assert dtype is not None
    block = case.me if row.layout in _FOR_EACH else 0
    if op is not None and case.at_root:
        ranks = row.combined(case.me, case.n)
        terms = (_pattern(op, dtype, rank, block, case.count) for rank in ranks)
        if ranks:
            yield _reduced(op, dtype, terms)
        else:  # the output keeps its zeros
            nothing = np.zeros(min(case.count, PERIOD) * dtype.itemsize, np.uint8)
            yield Expected(nothing.view(dtype.numpy))
        return
    if row.layout in (Layout.GATHERED, Layout.EXCHANGED):
        sources = list(range(case.n)) if case.at_root else []
    elif row.layout is Layout.ALIKE:
        sources = list(row.combined(case.me, case.n))
    else:  # a reduction does not change the arrays of other ranks
        sources = [case.root if op is None else case.me]
    for source in sources:
        yield Expected(_pattern(op, dtype, source, block, case.count))


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}

_COUNTED: dict[str, Callable[[Array, int], Array]] = {
    **dict.fromkeys(("SUM", "MAX", "BOR"), lambda true, n: true > 0),
    **dict.fromkeys(("PRODUCT", "MIN", "BAND"), lambda true, n: true == n),
    "BXOR": lambda true, n: true % 2 == 1,
}


def _reduced(op: ReduceOp, dtype: DType, terms: Iterable[Array]) -> Expected:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if dtype.kind is Kind.BOOL:
            counts = [term.astype(int) for term in terms]
            return Expected(_COUNTED[op.name](np.sum(counts, axis=0), len(counts)))
        if dtype.kind is not Kind.INTEGER and op.name not in ("MIN", "MAX"):
            return _between(op, dtype, terms)
        exact: Array | None = None
        for term in terms:
            if op.name not in ("MIN", "MAX"):
                term = term.astype(np.uint64)
            exact = term if exact is None else _COMBINE[op.name](exact, term)
        assert exact is not None
        return Expected(exact.astype(dtype.numpy))


def _between(op: ReduceOp, dtype: DType, terms: Iterable[Array]) -> Expected:
    wide: Any = np.clongdouble if dtype.kind is Kind.COMPLEX else np.longdouble
    combine = _COMBINE[op.name]
    n, total, size = 0, np.array(op.name == "PRODUCT", wide), np.longdouble(op.name == "PRODUCT")
    for term in terms:
        operand = term.astype(dtype.accumulate).astype(wide)
        n, total, size = n + 1, combine(total, operand), combine(size, abs(operand))
    if op.name == "AVG":
        total, size = total / n, size / n
    slack = (2 * n * np.finfo(dtype.accumulate).eps * size).astype(wide)
    if dtype.kind is Kind.COMPLEX:
        slack = slack * wide(1 + 1j)
    low, high = (end.astype(dtype.accumulate).astype(dtype.numpy)
                 for end in (total - slack, total + slack))  # fmt: skip
    return Expected(low, high)


def _words(array: MemoryArray, dtype: DType) -> MemoryArray:
    """Return the memory of an array as unsigned integers."""
    return array.view(np.dtype(f"u{min(dtype.itemsize, 8)}"))


def fill(
    array: MemoryArray, pattern: Array, dtype: DType, put: Callable[[Array], MemoryArray]
) -> None:
    """Fill an array with a pattern. ``put`` copies it to the memory of the array."""
    words, period = _words(array, dtype), put(_words(pattern, dtype))
    if not len(period):
        return
    whole = len(words) - len(words) % len(period)
    words[:whole].reshape(-1, len(period))[:] = period
    words[whole:] = period[: len(words) - whole]


def wrong(
    array: MemoryArray, right: Expected, dtype: DType, get: Callable[[MemoryArray], Array]
) -> int:
    """Return the number of wrong elements. ``get`` copies a part of the array to the host."""
    step = _COMPARED_COUNT * PERIOD
    found = 0
    for start in range(0, len(array), step):
        part = get(_words(array[start : start + step], dtype)).view(dtype.numpy)
        whole = len(part) - len(part) % PERIOD
        if whole:
            found += _different(part[:whole].reshape(-1, PERIOD), right, dtype)
        if whole < len(part):
            rest = len(part) - whole
            high = None if right.high is None else right.high[:rest]
            found += _different(part[None, whole:], Expected(right.low[:rest], high), dtype)
    return found


def _different(got: Array, right: Expected, dtype: DType) -> int:
    """Return the number of wrong elements in an array of shape (periods, elements)."""
    if right.high is None:
        shape = (*got.shape, -1)
        bits = np.ascontiguousarray(got).view(np.uint8).reshape(shape)
        differs = bits != np.ascontiguousarray(right.low).view(np.uint8).reshape(shape[1:])
        return int(np.count_nonzero(differs.any(axis=-1)))
    got, low, high = (_numbers(one, dtype) for one in (got, right.low, right.high))
    with np.errstate(invalid="ignore"):
        beyond = np.isnan(low) | np.isnan(high)  # for dtypes with NaN instead of inf
        inside: Any = (np.where(np.isnan(low), -np.inf, low) <= got) & (
            got <= np.where(np.isnan(high), np.inf, high)
        )
        inside |= beyond & np.isnan(got)
    if dtype.kind is Kind.COMPLEX:
        inside = inside.reshape(*inside.shape[:-1], -1, 2).all(axis=-1)
    return int(np.count_nonzero(~inside))


def _numbers(array: Array, dtype: DType) -> Array:
    """Return comparable numbers: complex as two parts, narrow floats as float32."""
    array = np.ascontiguousarray(array)
    if dtype.kind is Kind.COMPLEX:
        return array.view(array.real.dtype)
    return array.astype(dtype.accumulate) if dtype.kind is Kind.NARROW_FLOAT else array


def count_wrong(call: Call, case: Case, buffers: Buffers, variant: str, memory: Memory) -> int:
    """Fill the arrays, make the call, and count the wrong elements on this rank."""
    assert case.dtype is not None
    input, output = buffers.of(case, variant)
    read = output if case.row.layout is Layout.IN_PLACE else input
    for block in output.blocks if output else ():
        block.view(np.uint8).fill(0)
    # A rank that reads nothing has unused contents, or no contents.
    for block, pattern in zip(read.blocks if read else (), contents(case), strict=False):
        fill(block, pattern, case.dtype, memory.put)
    call()
    memory.settle()
    pairs = zip(output.blocks if output else (), expected(case), strict=True)
    return sum(wrong(block, right, case.dtype, memory.get) for block, right in pairs)
