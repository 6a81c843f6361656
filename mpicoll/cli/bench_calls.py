"""The arrays and the calls of a primitive, made from its row of the table: mpicoll's own, and the
same by others on the same memory.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

import mpicoll
from mpicoll.cuda import binding, runtime
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.errors import UnsupportedError
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "OTHERS",
    "PLACES",
    "Buffers",
    "Call",
    "Case",
    "Other",
    "Place",
    "missing",
    "named_call",
    "op_name",
    "own_call",
    "rounded",
    "taken",
    "variants",
]

Call = Callable[[], object]


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
        """Bytes of the larger array."""
        return 0 if self.dtype is None else self.count * _blocks(self.row, self.n) * self._item

    @property
    def _item(self) -> int:
        return 0 if self.dtype is None else self.dtype.itemsize

    @property
    def at_root(self) -> bool:
        """This rank has the array that only the root has, if there is such a one."""
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
    Layout.EMPTY: _Kinds("", ""),
}


def _blocks(row: Primitive, n: int) -> int:
    """Blocks of the larger array."""
    return n if "all" in _KINDS[row.layout] else 1


def rounded(row: Primitive, dtype: DType, n: int, size: int) -> int:
    """Elements of a block where the larger array has about ``size`` bytes, no more where that is
    one element a block.
    """
    return max(1, size // (_blocks(row, n) * dtype.itemsize))


def op_name(op: ReduceOp) -> str:
    """As the command line and the table have it."""
    return {"PRODUCT": "prod"}.get(op.name, op.name.lower())


def variants(row: Primitive) -> tuple[str, ...]:
    """How a primitive is called; the first is what others are compared with."""
    if row.layout is Layout.IN_PLACE:
        return ("in_place",)
    if row.layout in (Layout.GATHERED, Layout.SCATTERED):
        return ("out_of_place", "in_place")
    return ("out_of_place",)


# --- where arrays are ---------------------------------------------------------------------------


class Place(Protocol):
    """Where arrays are.

    name:    for the header.
    memory:  names the memory, the same on all ranks that take from it.
    """

    name: str
    memory: str

    def empty(self, count: int, dtype: DType) -> Any:
        """A new array of shape (count,); raises UnsupportedError for a dtype that none has."""

    def put(self, array: Any) -> Any:
        """A NumPy array of unsigned integers, there."""

    def get(self, array: Any) -> Any:
        """An array of unsigned integers from there, as NumPy's."""

    def settle(self) -> None:
        """Returns when what was called is done."""

    def available(self) -> int:
        """Bytes that can be had."""


class Host:
    """NumPy arrays."""

    def __init__(self) -> None:
        self.name = "host memory, NumPy arrays"
        self.memory = socket.gethostname()

    def empty(self, count: int, dtype: DType) -> Any:
        """Of NumPy."""
        return np.empty(count, dtype.numpy)

    def put(self, array: Any) -> Any:
        """The array."""
        return array

    def get(self, array: Any) -> Any:
        """The array."""
        return array

    def settle(self) -> None:
        """Nothing is pending."""

    def available(self) -> int:
        """MemAvailable of /proc/meminfo."""
        with suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


class Gpu:
    """CuPy arrays on the GPU that mpicoll.cuda.binding gives the rank.

    Raises UnsupportedError where there is no CuPy or no GPU.
    """

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
        """Of CuPy."""
        try:
            return self._cupy.empty(count, dtype.numpy)
        except (TypeError, ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedError(f"CuPy has no arrays of {dtype}: {error}") from error

    def put(self, array: Any) -> Any:
        """Copies."""
        return self._cupy.asarray(array)

    def get(self, array: Any) -> Any:
        """Copies."""
        return self._cupy.asnumpy(array)

    def settle(self) -> None:
        """Waits for the current stream."""
        self._cupy.cuda.get_current_stream().synchronize()

    def available(self) -> int:
        """As the driver says."""
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
        """Input and output; in place one of them is the other's block of this rank."""
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
        arrays = [_zeros(case.count, case.dtype, place) for _ in range(case.n)]
        return Side(arrays, arrays)
    n = case.n if kind == "all" else 1
    whole = _zeros(n * case.count, case.dtype, place)
    return Side(whole, [whole[i * case.count :][: case.count] for i in range(n)])


def _zeros(count: int, dtype: DType, place: Place) -> Any:
    """Written, as memory that was only asked for is one page of zeros."""
    array = place.empty(count, dtype)
    array.view(np.uint8).fill(0)
    return array


#: What routes, MPI and the check may take besides, as much as the larger array and so much at most.
_SCRATCH = 64 << 20


def taken(case: Case, others: list[str]) -> int:
    """Bytes of this rank that a case takes at the most."""
    block = case.size // _blocks(case.row, case.n)
    sides = [
        (case.n if kind == "all" else 1) * block
        for kind in _KINDS[case.row.layout]
        if kind and (kind == "one" or case.at_root)
    ]
    own = sum(sides) if case.row.listed and "mpi4py" in others else 0
    return sum(sides) + own + min(case.size, _SCRATCH)


# --- calls --------------------------------------------------------------------------------------


def own_call(case: Case, buffers: Buffers, variant: str, waits: bool) -> Call:
    """mpicoll's. ``waits``: with async_op, and waited for at once."""
    input, output = buffers.of(case, variant)
    call = named_call(mpicoll, case, input and input.given, output and output.given, waits)
    if not waits:
        return call
    return lambda: call().wait()


def named_call(api: Any, case: Case, input: Any, output: Any, waits: bool = False) -> partial[Any]:
    """The call of a module that has torch.distributed's names."""
    row = case.row
    named: dict[str, Any] = {row.output: output, row.input: input, row.root: case.root}
    if case.op is not None:
        named["op"] = getattr(api.ReduceOp, case.op.name)
    named.pop("", None)
    if waits:
        named["async_op"] = True
    names = (row.name, *row.aliases)
    function = getattr(api, next((name for name in names if hasattr(api, name)), row.name))
    bound = inspect.signature(function).bind(**named)  # by position, as they are mostly called
    return partial(function, *bound.args, **bound.kwargs)


class Other(Protocol):
    """Somebody who makes the same calls."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """The same call as mpicoll's first variant; None where there is none."""

    def close(self) -> None:
        """At the end."""


#: MPI's methods by layout, rooted or not, combining or not.
_METHODS = {
    (Layout.IN_PLACE, True, False): "Bcast",
    (Layout.IN_PLACE, False, True): "Allreduce",
    (Layout.IN_PLACE, True, True): "Reduce",
    (Layout.GATHERED, False, False): "Allgather",
    (Layout.GATHERED, True, False): "Gather",
    (Layout.SCATTERED, True, False): "Scatter",
    (Layout.SCATTERED, False, True): "Reduce_scatter_block",
    (Layout.EXCHANGED, False, False): "Alltoall",
    (Layout.EMPTY, False, False): "Barrier",
}


class RawMpi:
    """mpi4py with ready ``[buffer, count of a block, datatype]``.

    MPI has no lists of arrays: what mpicoll does on a list it does on one array for all ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm

    def close(self) -> None:
        """Nothing is to be closed."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """None where MPI does not compute: averages, and floats of half a word and less."""
        row, op, dtype = case.row, case.op, case.dtype
        arguments: list[Any] = [self._ready(case, side) for side in (buffers.input, buffers.output)]
        if row.layout is Layout.EMPTY:
            arguments = []
        elif row.layout is Layout.IN_PLACE:
            ready = arguments[1]
            arguments = [self._mpi.IN_PLACE, ready] if case.at_root else [ready, None]
            if not row.reduces:
                arguments = [ready]
        if op is not None and dtype is not None:
            if op is ReduceOp.AVG or dtype.kind is Kind.NARROW_FLOAT:
                return None
            name = op.mpi_logical if dtype.kind is Kind.BOOL else op.mpi
            arguments.append(getattr(self._mpi, str(name)))
        if row.root:
            arguments.append(case.root)
        method = _METHODS[row.layout, bool(row.root), row.reduces]
        return partial(getattr(self._comm, method), *arguments)

    def _ready(self, case: Case, side: Side | None) -> Any:
        if side is None or case.dtype is None:
            return None
        array = side.given
        if isinstance(array, list):
            array = _zeros(len(array) * case.count, case.dtype, Host())
        return [array.view(np.uint8), case.count, getattr(self._mpi, case.dtype.mpi)]


class Gloo:
    """torch.distributed's gloo group of the same ranks, on tensors of the same memory."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        import torch
        import torch.distributed as api

        rank, n = comm.Get_rank(), comm.Get_size()
        host = os.environ["MASTER_ADDR"]  # set by init_process_group
        port = 0
        if rank == 0:
            store = api.TCPStore(host, 0, n, True, wait_for_workers=False)
            port = store.port
        port = comm.bcast(port, 0)
        if rank:
            store = api.TCPStore(host, port, n, False, wait_for_workers=False)
        api.init_process_group("gloo", store=store, rank=rank, world_size=n)
        self._torch, self._api = torch, api

    def close(self) -> None:
        """Ends the group."""
        self._api.destroy_process_group()

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """None where torch has no such dtype."""
        if case.dtype is not None and not hasattr(self._torch, case.dtype.name):
            return None
        sides = buffers.of(case, variants(case.row)[0])
        input, output = (self._tensors(case, side and side.given) for side in sides)
        return named_call(self._api, case, input, output)

    def _tensors(self, case: Case, given: Any) -> Any:
        if isinstance(given, list):
            return [self._tensors(case, array) for array in given]
        if given is None or case.dtype is None:
            return None
        dtype = getattr(self._torch, case.dtype.name)
        return self._torch.frombuffer(given.view(np.uint8), dtype=dtype)


#: By the value of --compare.
OTHERS: dict[str, Callable[[MPI.Intracomm], Other]] = {"mpi4py": RawMpi, "gloo": Gloo}


def missing(name: str) -> str:
    """Why a comparison cannot be made; "" where it can."""
    if name == "gloo" and importlib.util.find_spec("torch") is None:
        return "--compare gloo needs torch, which is not installed: pip install torch"
    return ""
