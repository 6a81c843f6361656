"""The arrays and the calls of a primitive, built from its row of the table."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

import mpicoll
from mpicoll.arrays.views import Array
from mpicoll.cli.timing import Call
from mpicoll.cuda import binding, runtime
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import UnsupportedError
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "PLACES",
    "Buffers",
    "Case",
    "Host",
    "Place",
    "PlacedArray",
    "Side",
    "allocate_zeros",
    "block_count",
    "named_call",
    "needed_bytes",
    "op_name",
    "own_call",
    "variants",
]


@dataclass(frozen=True)
class Case:
    """One line of the table, on this rank.

    count: elements of one block, the whole array if there is only one.
    op:    None if nothing is combined.
    dtype: None if there is no array.
    n, me, root: the number of ranks, this rank, and the root.
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
        """Return the bytes of the larger array."""
        return 0 if self.dtype is None else self.count * _blocks(self.row, self.n) * self._item

    @property
    def _item(self) -> int:
        return 0 if self.dtype is None else self.dtype.itemsize

    @property
    def at_root(self) -> bool:
        """Return whether this rank has the array that only the root has, if there is one."""
        return not self.row.root or self.me == self.root


class _Kinds(NamedTuple):
    """The kinds of input and output: "one" block, a block for "all" ranks, "" for none."""

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
    """Return the count of a block if the larger array has ``size`` bytes: rounded down, at least
    one.
    """
    return max(1, size // (_blocks(row, n) * dtype.itemsize))


def op_name(op: ReduceOp) -> str:
    """Return the operation's name on the command line and in the table."""
    return {"PRODUCT": "prod"}.get(op.name, op.name.lower())


def variants(row: Primitive) -> tuple[str, ...]:
    """Return the variants of a primitive's call; comparisons are with the first."""
    if row.layout is Layout.IN_PLACE:
        return ("in_place",)
    if row.layout in (Layout.GATHERED, Layout.SCATTERED):
        return ("out_of_place", "in_place")
    return ("out_of_place",)


# --- where arrays are ---------------------------------------------------------------------------


#: An array in the memory of a Place: NumPy's, or CuPy's, which has no types.
PlacedArray: TypeAlias = Any


class Place(Protocol):
    """The memory that arrays are in.

    name:   for the header.
    memory: names the memory; the same for all ranks that allocate from it.
    device: the value of ``--device``.
    """

    name: str
    memory: str
    device: str

    def empty(self, count: int, dtype: DType) -> PlacedArray:
        """Allocate an array of shape (count,). Raises UnsupportedError for unknown dtypes."""

    def put(self, array: Array) -> PlacedArray:
        """Return a NumPy array of unsigned integers in this memory."""

    def get(self, array: PlacedArray) -> Array:
        """Return an array of unsigned integers as a NumPy array."""

    def settle(self) -> None:
        """Wait until all calls are done."""

    def available(self) -> int:
        """Return the free bytes."""


class Host:
    """NumPy arrays."""

    device = "cpu"

    def __init__(self) -> None:
        self.name = "host memory, NumPy arrays"
        self.memory = socket.gethostname()

    def empty(self, count: int, dtype: DType) -> PlacedArray:
        """Allocate with NumPy."""
        return np.empty(count, dtype.numpy)

    def put(self, array: Array) -> PlacedArray:
        """Return the array."""
        return array

    def get(self, array: Array) -> Array:
        """Return the array."""
        return array

    def settle(self) -> None:
        """Return at once: nothing is pending."""

    def available(self) -> int:
        """Return MemAvailable of /proc/meminfo."""
        with suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


class Gpu:
    """CuPy arrays on the GPU that mpicoll.cuda.binding gives the rank.

    Raises UnsupportedError where there is no CuPy or no GPU.
    """

    device = "cuda"

    def __init__(self) -> None:
        cuda = runtime.get_runtime()
        index = binding.bind()
        if index is None:
            raise UnsupportedError("arrays on a GPU: CuPy finds no GPU on this host")
        import cupy

        self._cupy: ModuleType = cupy
        self.name = f"GPU memory, CuPy {cupy.__version__} arrays, rank 0 on {cuda.name(index)}"
        self.memory = f"GPU {cuda.pci_bus_id(index)} of {socket.gethostname()}"

    def empty(self, count: int, dtype: DType) -> PlacedArray:
        """Allocate with CuPy."""
        try:
            return self._cupy.empty(count, dtype.numpy)
        except (TypeError, ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedError(f"CuPy has no arrays of {dtype}: {error}") from error

    def put(self, array: Array) -> PlacedArray:
        """Copy to the GPU."""
        return self._cupy.asarray(array)

    def get(self, array: PlacedArray) -> Array:
        """Copy to the host."""
        copy: Array = self._cupy.asnumpy(array)
        return copy

    def settle(self) -> None:
        """Wait for the current stream."""
        self._cupy.cuda.get_current_stream().synchronize()

    def available(self) -> int:
        """Return the driver's figure."""
        return int(self._cupy.cuda.runtime.memGetInfo()[0])


#: By the value of --device.
PLACES: dict[str, Callable[[], Place]] = {"cpu": Host, "cuda": Gpu}


# --- arrays -------------------------------------------------------------------------------------


class Side(NamedTuple):
    """The input or the output of a call.

    given:  the argument: an array, or a list of one array for each rank.
    blocks: its blocks, one for each rank or a single one.
    """

    given: PlacedArray | list[PlacedArray]
    blocks: list[PlacedArray]


class Buffers:
    """The arrays of a case on this rank, filled with zeros, each in separate memory.

    input, output: None if this rank, or the primitive, has none.
    """

    def __init__(self, case: Case, place: Place) -> None:
        kinds = _KINDS[case.row.layout]
        self.input, self.output = (_side(kind, case, place) for kind in kinds)

    def of(self, case: Case, variant: str) -> tuple[Side | None, Side | None]:
        """Return input and output; in place, one of them is this rank's block of the other."""
        kinds = _KINDS[case.row.layout]
        if variant == "in_place" and self.input and self.output and "one" in kinds:
            block = (self.input if kinds.input == "all" else self.output).blocks[case.me]
            own = Side(block, [block])
            return (own, self.output) if kinds.input == "one" else (self.input, own)
        return self.input, self.output


def _side(kind: str, case: Case, place: Place) -> Side | None:
    if not kind or (kind == "all" and not case.at_root):
        return None
    assert case.dtype is not None
    if kind == "all" and case.row.listed:
        arrays = [allocate_zeros(case.count, case.dtype, place) for _ in range(case.n)]
        return Side(arrays, arrays)
    n = case.n if kind == "all" else 1
    whole = allocate_zeros(n * case.count, case.dtype, place)
    return Side(whole, [whole[i * case.count :][: case.count] for i in range(n)])


def allocate_zeros(count: int, dtype: DType, place: Place) -> PlacedArray:
    """Allocate and write: memory never written is one page of zeros."""
    array = place.empty(count, dtype)
    array.view(np.uint8).fill(0)
    return array


#: The most bytes that routes, MPI and the check use besides; the larger array's, if fewer.
_SCRATCH = 64 << 20


def needed_bytes(case: Case, others: Sequence[str], routes: int = 0) -> int:
    """Return the most bytes of a case on this rank; ``routes``: number beside the chosen one."""
    block = case.size // _blocks(case.row, case.n)
    sides = [
        (case.n if kind == "all" else 1) * block
        for kind in _KINDS[case.row.layout]
        if kind and (kind == "one" or case.at_root)
    ]
    own = sum(sides) if case.row.listed and "mpi4py" in others else 0
    own += 2 * case.size if "copy" in others else 0
    return sum(sides) + own + (1 + routes) * min(case.size, _SCRATCH)


# --- calls --------------------------------------------------------------------------------------


def own_call(
    case: Case,
    buffers: Buffers,
    variant: str,
    waits: bool = False,
    group: ProcessGroup | None = None,
) -> Call:
    """Return mpicoll's call. ``waits``: with async_op, and an immediate wait."""
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
    """Return the call of a module with torch.distributed's names."""
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
