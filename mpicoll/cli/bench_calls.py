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
from typing import Any, NamedTuple, Protocol

import numpy as np

import mpicoll
from mpicoll.cli.timing import Call
from mpicoll.cuda import binding, runtime
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import UnsupportedError
from mpicoll.primitives import Layout, Primitive

__all__ = [
    "PLACES",
    "Buffers",
    "Case",
    "Host",
    "Place",
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

    count: elements of one block, the whole array where there is only one.
    op:    None where nothing is combined.
    dtype: None where there is no array.
    n, me, root: number of ranks, this one, and the root.
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
        """Whether this rank has the array that only the root has, if there is one."""
        return not self.row.root or self.me == self.root


class _Kinds(NamedTuple):
    """Of the input and of the output: "one" block, a block for "all" ranks, or "" for none."""

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
    """Return the elements of a block where the larger array has ``size`` bytes, rounded down, and
    one at least.
    """
    return max(1, size // (_blocks(row, n) * dtype.itemsize))


def op_name(op: ReduceOp) -> str:
    """Return its name on the command line and in the table."""
    return {"PRODUCT": "prod"}.get(op.name, op.name.lower())


def variants(row: Primitive) -> tuple[str, ...]:
    """Return how a primitive is called; others are compared with the first."""
    if row.layout is Layout.IN_PLACE:
        return ("in_place",)
    if row.layout in (Layout.GATHERED, Layout.SCATTERED):
        return ("out_of_place", "in_place")
    return ("out_of_place",)


# --- where arrays are ---------------------------------------------------------------------------


class Place(Protocol):
    """Where arrays are.

    name:   for the header.
    memory: names the memory; the same for all ranks that allocate from it.
    device: the value of ``--device``.
    """

    name: str
    memory: str
    device: str

    def empty(self, count: int, dtype: DType) -> Any:
        """Allocate an array of shape (count,); raises UnsupportedError for unknown dtypes."""

    def put(self, array: Any) -> Any:
        """Bring a NumPy array of unsigned integers there."""

    def get(self, array: Any) -> Any:
        """Bring an array of unsigned integers from there to NumPy."""

    def settle(self) -> None:
        """Return when what was called is done."""

    def available(self) -> int:
        """Return the free bytes."""


class Host:
    """NumPy arrays."""

    device = "cpu"

    def __init__(self) -> None:
        self.name = "host memory, NumPy arrays"
        self.memory = socket.gethostname()

    def empty(self, count: int, dtype: DType) -> Any:
        """Allocate with NumPy."""
        return np.empty(count, dtype.numpy)

    def put(self, array: Any) -> Any:
        """Return the array."""
        return array

    def get(self, array: Any) -> Any:
        """Return the array."""
        return array

    def settle(self) -> None:
        """Return: nothing is pending."""

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

        self._cupy: Any = cupy
        self.name = f"GPU memory, CuPy {cupy.__version__} arrays, rank 0 on {cuda.name(index)}"
        self.memory = f"GPU {cuda.pci_bus_id(index)} of {socket.gethostname()}"

    def empty(self, count: int, dtype: DType) -> Any:
        """Allocate with CuPy."""
        try:
            return self._cupy.empty(count, dtype.numpy)
        except (TypeError, ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedError(f"CuPy has no arrays of {dtype}: {error}") from error

    def put(self, array: Any) -> Any:
        """Copy."""
        return self._cupy.asarray(array)

    def get(self, array: Any) -> Any:
        """Copy."""
        return self._cupy.asnumpy(array)

    def settle(self) -> None:
        """Wait for the current stream."""
        self._cupy.cuda.get_current_stream().synchronize()

    def available(self) -> int:
        """Return what the driver says."""
        return int(self._cupy.cuda.runtime.memGetInfo()[0])


#: By the value of --device.
PLACES: dict[str, Callable[[], Place]] = {"cpu": Host, "cuda": Gpu}


# --- arrays -------------------------------------------------------------------------------------


class Side(NamedTuple):
    """The input or the output of a call.

    given:  what is passed: an array, or a list of one array for each rank.
    blocks: of it, one for each rank or a single one.
    """

    given: Any
    blocks: list[Any]


class Buffers:
    """The arrays of a case on this rank, filled with zeros, each in memory of its own.

    input, output: None where this rank, or the primitive, has none.
    """

    def __init__(self, case: Case, place: Place) -> None:
        kinds = _KINDS[case.row.layout]
        self.input, self.output = (_side(kind, case, place) for kind in kinds)

    def of(self, case: Case, variant: str) -> tuple[Side | None, Side | None]:
        """Return input and output; in place one of them is this rank's block of the other."""
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


def allocate_zeros(count: int, dtype: DType, place: Place) -> Any:
    """Allocate and write: memory that was never written is one page of zeros."""
    array = place.empty(count, dtype)
    array.view(np.uint8).fill(0)
    return array


#: Bytes at most that routes, MPI and the check use besides; as much as the larger array, if less.
_SCRATCH = 64 << 20


def needed_bytes(case: Case, others: Sequence[str], routes: int = 0) -> int:
    """Return the most bytes that a case uses on this rank, by so many routes beside the chosen."""
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
    case: Case, buffers: Buffers, variant: str, waits: bool = False, group: Any = None
) -> Call:
    """Return mpicoll's call. ``waits``: with async_op, and waited for at once."""
    input, output = buffers.of(case, variant)
    sides = input and input.given, output and output.given
    call = named_call(mpicoll, case, *sides, waits, group)
    if not waits:
        return call
    return lambda: call().wait()


def named_call(
    api: Any, case: Case, input: Any, output: Any, waits: bool = False, group: Any = None
) -> partial[Any]:
    """Return the call of a module that has torch.distributed's names."""
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
    bound = inspect.signature(function).bind(**named)  # by position, as they are mostly called
    return partial(function, *bound.args, **bound.kwargs)
