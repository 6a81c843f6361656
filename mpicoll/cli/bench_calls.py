"""Arrays, calls and expected results of a primitive, built from its row of the table."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

import mpicoll
from mpicoll import control_messages
from mpicoll.arrays.views import Array
from mpicoll.cli.timing import Call, Fresh
from mpicoll.cuda import binding, runtime
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.errors import UnsupportedError
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup


@dataclass(frozen=True)
class Case:
    """One line of the table, on this rank."""

    row: Primitive
    dtype: DType  # None without an array
    op: ReduceOp | None  # None without a reduction
    count: int  # elements of one block; the whole array if there is only one block
    #: Number of ranks, this rank, and the root.
    n: int
    me: int
    root: int

    @property
    def size(self) -> int:
        """Size of the larger array in bytes."""
        if self.dtype is None:
            return 0
        return self.count * _larger(self.row, self.n) * self.dtype.itemsize

    @property
    def at_root(self) -> bool:
        """Whether this rank has the array that only the root has, if there is one."""
        return not self.row.root or self.me == self.root

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of blocks of this rank's input and output."""
        row, many = self.row, self.n if self.at_root else 0
        return (
            (many if row.many_in else 1) if row.input else 0,
            (many if row.many_out else 1) if row.output else 0,
        )


def _larger(row: Primitive, n: int) -> int:
    return n if row.many_in or row.many_out else 1


def block_count(row: Primitive, dtype: DType, n: int, size: int) -> int:
    """Return the elements of a block for a size of the larger array, at least 1."""
    return max(1, size // (_larger(row, n) * dtype.itemsize))


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
    """Input or output of a call."""

    #: The argument: an array, or a list with one array per rank.
    given: MemoryArray | list[MemoryArray]
    blocks: list[MemoryArray]  # its blocks
    whole: MemoryArray  # the memory of all blocks, as one array


class Buffers:
    """Arrays of a case on this rank, filled with zeros, in separate memory.

    input, output: None if this rank, or the primitive, has none.
    """

    def __init__(self, case: Case, memory: Memory) -> None:
        row, (read, written) = case.row, case.blocks
        self.input = _side(case, read, row.many_in, memory)
        self.output = _side(case, written, row.many_out, memory)

    def of(self, case: Case, variant: str) -> tuple[Side | None, Side | None]:
        """Return input and output. In place, one is this rank's block in the other array."""
        row = case.row
        if variant == "in_place" and self.input and self.output and row.many_in != row.many_out:
            block = (self.input if row.many_in else self.output).blocks[case.me]
            own = Side(block, [block], block)
            return (self.input, own) if row.many_in else (own, self.output)
        return self.input, self.output


def _side(case: Case, blocks: int, many: bool, memory: Memory) -> Side | None:
    if not blocks:
        return None
    whole = allocate_zeros(blocks * case.count, case.dtype, memory)
    arrays = [whole[i * case.count :][: case.count] for i in range(blocks)]
    return Side(arrays if many and case.row.listed else whole, arrays, whole)


def allocate_zeros(count: int, dtype: DType, memory: Memory) -> MemoryArray:
    """Allocate and write an array. Memory that was never written is a single page of zeros."""
    array = memory.empty(count, dtype)
    array.view(np.uint8).fill(0)
    return array


#: Maximum bytes, and maximum number, of the buffers of a ring.
_RING_BYTES, _RING_COUNT = 32 << 10, 64


def ring(case: Case, memory: Memory) -> list[Buffers]:
    """Allocate buffers for ``fresh``. Small calls need several, to be timed together."""
    count = min(_RING_COUNT, max(1, _RING_BYTES // max(1, case.size)))
    return [Buffers(case, memory) for _ in range(count)]


def fresh(case: Case, buffers: list[Buffers], calls: Sequence[Call], variant: str = "") -> Fresh:
    """Return the calls on these buffers, to be timed with new data. variant: default, the first."""
    row, is_in_place = case.row, case.row.layout is Layout.IN_PLACE
    sides = [each.of(case, variant or variants(row)[0])[is_in_place] for each in buffers]
    is_sent = not is_in_place or row.root != "src" or case.at_root
    sent = [side.whole.view(np.uint8) for side in sides if side and is_sent]
    # Numbers of about 1, or bools.
    contents = 1 if case.dtype and case.dtype.kind is Kind.BOOL else 0x3F

    def write() -> None:
        for array in sent:
            array.fill(contents)

    return Fresh(write, calls)


#: Additional memory that routes, MPI and the check may use, at most the size of the larger array.
_SCRATCH_BYTES = 64 << 20


def find_memory_problem(
    comm: MPI.Intracomm, memory: Memory, cases: Iterable[Case], others: Sequence[str], routes: int
) -> str:
    """Return why a memory cannot hold the arrays of its ranks, the same on all ranks, or "".

    others, routes: names of other libraries, and number of routes, that are also called.
    """
    needed, name = max((_needed_bytes(case, others, routes), case.row.name) for case in cases)
    own = memory.pool, needed, memory.available()
    users: dict[str, list[tuple[int, int]]] = {}
    for pool, *use in control_messages.allgather(comm, own, tuple[str, int, int]):
        users.setdefault(pool, []).append((use[0], use[1]))
    for pool, uses in users.items():
        total, free = sum(use[0] for use in uses), min(use[1] for use in uses)
        if total > free:
            return (
                f"{name} needs {total / 2**30:.1f} GiB on {pool} for its {len(uses)} ranks, "
                f"{free / 2**30:.1f} GiB are available"
            )
    return ""


def _needed_bytes(case: Case, others: Sequence[str], routes: int) -> int:
    """Return the maximum memory of a case on this rank."""
    if case.dtype is None:
        return 0
    arrays = sum(case.blocks) * case.count * case.dtype.itemsize
    copies = 2 * case.size * ("copy" in others)
    return arrays + copies + (1 + routes) * min(case.size, _SCRATCH_BYTES)


# --- calls --------------------------------------------------------------------------------------


def own_call(case: Case, buffers: Buffers, variant: str, group: ProcessGroup | None = None) -> Call:
    """Return a call of mpicoll."""
    input, output = buffers.of(case, variant)
    return named_call(mpicoll, case, input and input.given, output and output.given, group)


def named_call(
    api: ModuleType, case: Case, input: object, output: object, group: object = None
) -> partial[Any]:
    """Return a call of a module with the names of torch.distributed."""
    row = case.row
    named: dict[str, Any] = {row.output: output, row.input: input, row.root: case.root}
    if case.op is not None:
        named["op"] = getattr(api.ReduceOp, case.op.name)
    named.pop("", None)
    if group is not None:
        named["group"] = group
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
# - Calls that move data, and reductions of bools and integers: random bits.
# - Reductions of floating point: random integers, so small that a sum of all ranks is exact in the
#   dtype, in any order. For PRODUCT, all ranks but the first have 1 and -1.
#
# Results must therefore be exact, except for an AVG that does not divide the exact sum.

#: Number of elements after which inputs repeat.
PERIOD = 8191
#: Layouts with a block per rank.
_FOR_EACH = (Layout.SCATTERED, Layout.EXCHANGED)
#: Number of elements that are written or compared at a time.
_STEP = 64 * PERIOD
_finfo: Any = ml_dtypes.finfo  # of NumPy's dtypes, too; has no types


def _pattern(case: Case, source: int, block: int) -> Array:
    """Return the contents of a block of rank ``source``, at most one period."""
    op, dtype, length = case.op, case.dtype, min(case.count, PERIOD)
    rng = np.random.default_rng([dtype.code, source, block])
    if dtype.kind is Kind.BOOL:
        return rng.integers(0, 2, length).astype(np.bool_)
    if op is None or dtype.kind is Kind.INTEGER:
        bits: Array = np.frombuffer(rng.bytes(length * dtype.itemsize), dtype.numpy)
        return bits
    is_factor = op is ReduceOp.PRODUCT and source > 0
    limit = 1 if is_factor else max(1, 2 ** _finfo(dtype.numpy).nmant // case.n)
    number: Any = rng.integers(1, limit, length, endpoint=True)
    if op is not ReduceOp.AVG and dtype.name != "float8_e8m0fnu":  # which has no sign
        number = number * rng.choice((-1, 1), length)
    if dtype.kind is Kind.COMPLEX and not is_factor:
        number = number + 1j * rng.integers(1, limit, length, endpoint=True)
    pattern: Array = number.astype(dtype.accumulate).astype(dtype.numpy)
    return pattern


def contents(case: Case) -> Iterator[Array]:
    """Yield the contents of each block that this rank reads."""
    if case.row.layout is Layout.IN_PLACE and case.row.root == "src" and not case.at_root:
        return
    for block in range(case.n if case.row.layout in _FOR_EACH and case.at_root else 1):
        yield _pattern(case, case.me, block)


def expected(case: Case) -> Iterator[Array]:
    """Yield the expected contents of each block of this rank's output, at most one period."""
    row, op, dtype = case.row, case.op, case.dtype
    block = case.me if row.layout in _FOR_EACH else 0
    if op is not None and case.at_root:
        ranks = row.combined(case.me, case.n)
        if not ranks:  # the output keeps its zeros
            yield np.zeros(min(case.count, PERIOD) * dtype.itemsize, np.uint8).view(dtype.numpy)
            return
        combine = op.logical if dtype.kind is Kind.BOOL else op.ufunc
        assert combine is not None
        with np.errstate(all="ignore"):
            terms = (_pattern(case, rank, block).astype(dtype.accumulate) for rank in ranks)
            total = reduce(combine, terms)
            if op is ReduceOp.AVG:
                total = total / total.dtype.type(len(ranks))
            yield total.astype(dtype.numpy)
        return
    if row.layout in (Layout.GATHERED, Layout.EXCHANGED):
        sources = list(range(case.n)) if case.at_root else []
    elif row.layout is Layout.ALIKE:
        sources = list(row.combined(case.me, case.n))
    else:  # a reduction does not change the arrays of other ranks
        sources = [case.root if op is None else case.me]
    for source in sources:
        yield _pattern(case, source, block)


def _words(array: MemoryArray, dtype: DType) -> MemoryArray:
    """Return the memory of an array as unsigned integers."""
    return array.view(np.dtype(f"u{min(dtype.itemsize, 8)}"))


def fill(
    array: MemoryArray, pattern: Array, dtype: DType, put: Callable[[Array], MemoryArray]
) -> None:
    """Fill an array with a pattern. ``put`` copies it to the memory of the array."""
    words, own = _words(array, dtype), _words(pattern, dtype)
    for start in range(0, len(words), _STEP):
        part = words[start : start + _STEP]
        part[:] = put(np.resize(own, len(part)))


def wrong(array: MemoryArray, right: Array, case: Case, get: Callable[[MemoryArray], Array]) -> int:
    """Return the number of wrong elements. ``get`` copies a part of the array to the host."""
    dtype, found = case.dtype, 0
    for start in range(0, len(array), _STEP):
        got = get(_words(array[start : start + _STEP], dtype)).view(dtype.numpy)
        expected = np.resize(right, len(got))
        bits = [one.view(np.uint8).reshape(len(got), -1) for one in (got, expected)]
        differs: Any = (bits[0] != bits[1]).any(axis=-1)
        if case.op is ReduceOp.AVG:
            wide = got.astype(dtype.accumulate), expected.astype(dtype.accumulate)
            eps = float(_finfo(dtype.numpy).eps), np.finfo(dtype.accumulate).eps * case.n
            differs &= ~np.isclose(*wide, rtol=max(eps), atol=0)
        found += int(np.count_nonzero(differs))
    return found


def count_wrong(call: Call, case: Case, buffers: Buffers, variant: str, memory: Memory) -> int:
    """Fill the arrays, make the call, and count the wrong elements on this rank."""
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
    return sum(wrong(block, right, case, memory.get) for block, right in pairs)
