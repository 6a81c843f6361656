"""NVIDIA's NCCL, for those who ask for it by ``backend="nccl"``: every rank has a GPU of its own.

NCCL adds half types as it goes along, and does not say in which order: its sums are not those of
the other routes to the last bit, and ranks do not compare their calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.arrays.views import DeviceView, View
from mpicoll.core.calls import Blocks, Route
from mpicoll.cuda.streams import DeviceContext
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.launch.session import node
from mpicoll.primitives import Primitive
from mpicoll.routes.wire import all_gather_bytes

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Nccl", "asked_for", "meet"]

#: NCCL's operations (ncclRedOp_t) and the dtypes that it computes with (ncclDataType_t).
_OPERATIONS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_BYTE = _DTYPES["uint8"]


def asked_for(backend: str) -> bool:
    """The name of a group's backend asks for NCCL: "nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"."""
    return any(part in ("nccl", "cuda:nccl") for part in backend.split(","))


class Nccl:
    """A group's NCCL communicator.

    context: what this rank has of its device.
    """

    def __init__(self, group: ProcessGroup, context: DeviceContext, comm: Any) -> None:
        self.group = group
        self.n, self.me = group.size(), group.rank()
        self.context = context
        self.comm = comm

    def close(self) -> None:
        """Ends the communicator, when what was enqueued is done."""
        self.context.synchronize(self.context.work)
        self.comm.destroy()


def meet(group: ProcessGroup, context: DeviceContext) -> Nccl | None:
    """The communicator of all ranks; None on all of them where one has no NCCL, or two share a GPU.

    All call.
    """
    runtime = context.runtime
    able = runtime.has_nccl()
    mine = f"{node()} {runtime.pci_bus_id(context.index)}" if able else ""
    everybody = [
        bytes(one) for one in all_gather_bytes(group.inner, np.frombuffer(mine.encode(), np.uint8))
    ]
    if not all(everybody) or len(set(everybody)) < len(everybody):
        return None
    identity = None
    if group.rank() == 0:
        with suppress(Exception):  # whatever NCCL says: all ranks take another route then
            identity = runtime.nccl_unique_id()
    identity = group.inner.bcast(identity, 0)
    if identity is None:
        return None
    made = runtime.create_nccl(context.index, group.size(), identity, group.rank())
    return Nccl(group, context, made)


def route(nccl: Nccl, primitive: Primitive, op: ReduceOp | None, dtype: DType) -> Route | None:
    """What carries out calls of this kind; None for what NCCL cannot compute with."""
    if op is None:
        return _moves(nccl, primitive, dtype)
    if dtype.name not in _DTYPES or op.name not in _OPERATIONS or op.factor is not None:
        return None
    if op.name == "AVG" and dtype.kind is Kind.INTEGER:
        return None
    return _reductions(nccl, primitive, _OPERATIONS[op.name], dtype)


def _on(view: View | None) -> DeviceView:
    assert isinstance(view, DeviceView)
    return view


def _unit(nbytes: int) -> tuple[int, int]:
    """NCCL's dtype in which so many bytes are moved, and its bytes: CuPy counts in C's int."""
    return (_BYTE, 1) if nbytes % 8 else (_DTYPES["uint64"], 8)


def _moves(nccl: Nccl, primitive: Primitive, dtype: DType) -> Route:
    """Broadcasts and all-gathers of NCCL's, all else by its messages."""
    size, n = dtype.itemsize, nccl.n
    name = primitive.name.partition("_single")[0]

    def messages(
        sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]
    ) -> None:
        """Of each message the rank, the address, and the bytes."""
        stream = nccl.context.work
        with nccl.context.runtime.nccl_group():
            for rank, address, nbytes in sends:
                kind, unit = _unit(nbytes)
                nccl.comm.send(address, nbytes // unit, kind, rank, stream)
            for rank, address, nbytes in receives:
                kind, unit = _unit(nbytes)
                nccl.comm.recv(address, nbytes // unit, kind, rank, stream)

    def blocks_of(view: DeviceView, counts: Sequence[int]) -> list[tuple[int, int, int]]:
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        return [
            (rank, view.address + start * size, count * size)
            for rank, (start, count) in enumerate(zip(starts, counts, strict=True))
            if count
        ]

    def moves(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        stream = nccl.context.work
        with nccl.context.runtime.on(nccl.context.index):
            if name == "broadcast":
                array = _on(recv)
                kind, unit = _unit(array.nbytes)
                count = array.nbytes // unit
                nccl.comm.broadcast(array.address, array.address, count, kind, root, stream)
            elif name == "all_gather" and blocks is None:
                own, all_ = _on(send), _on(recv)
                kind, unit = _unit(own.nbytes)
                nccl.comm.allGather(own.address, all_.address, own.nbytes // unit, kind, stream)
            elif name in ("all_gather", "gather"):
                own = _on(send)
                targets = range(n) if name == "all_gather" else [root]
                counts = [own.count] * n if blocks is None else blocks.receives
                messages(
                    [(r, own.address, own.nbytes) for r in targets if own.count],
                    [] if recv is None else blocks_of(_on(recv), counts),
                )
            elif name == "scatter":
                mine = _on(recv)
                messages(
                    [] if send is None else blocks_of(_on(send), [mine.count] * n),
                    [(root, mine.address, mine.nbytes)] if mine.count else [],
                )
            else:
                assert blocks is not None
                messages(blocks_of(_on(send), blocks.sends), blocks_of(_on(recv), blocks.receives))

    return moves


def _reductions(nccl: Nccl, primitive: Primitive, operation: int, dtype: DType) -> Route:
    """NCCL's own."""
    name, kind = primitive.name, _DTYPES[dtype.name]

    def reductions(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        out, stream = _on(recv), nccl.context.work
        with nccl.context.runtime.on(nccl.context.index):
            if name == "all_reduce":
                nccl.comm.allReduce(out.address, out.address, out.count, kind, operation, stream)
            elif name == "reduce":
                nccl.comm.reduce(out.address, out.address, out.count, kind, operation, root, stream)
            elif blocks is None:
                given = _on(send).address
                nccl.comm.reduceScatter(given, out.address, out.count, kind, operation, stream)
            else:  # one rank's block after another
                given = _on(send).address
                for rank, count in enumerate(blocks.sends):
                    if count:
                        nccl.comm.reduce(given, out.address, count, kind, operation, rank, stream)
                    given += count * dtype.itemsize

    return reductions
