"""Horovod's operations. Each has an ``_async`` form that returns a Request for poll and
synchronize.

Common arguments:

name:        matches the operation between ranks; None: the number of calls of this operation so
             far.
process_set: the ranks that run the operation.

Forms with a trailing underscore work in place. Forms without ``_async`` and underscore are
differentiable, as in Horovod: allreduce reduces gradients with the same operation, allgather and
broadcast average the ranks' gradients.

After a collective mismatch, such as different dtypes or shapes, and other failures, waiting for the
Request raises HorovodInternalError on all ranks. Local errors are raised at once: ArgumentError (a
ValueError), NotInitializedError (a ValueError).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from mpicoll.core.indices import check_index
from mpicoll.errors import ArgumentError
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.engine import Request
from mpicoll.horovod.torch.implementations import REDUCE_OPS, Adasum, Average, Call, Sum
from mpicoll.horovod.torch.process_sets import (
    ProcessSet,
    engine_of,
    global_process_set,
    rank,
)

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join",
    "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async", "synchronize",
]  # fmt: skip

P = ParamSpec("P")
#: Argument of synchronize; the sum of sparse tensors is a function, computed when it is waited for.
Handle = Request | Callable[[], Tensor]


# --- waiting -------------------------------------------------------------------------------------


def poll(handle: Request) -> bool:
    """Return whether an operation is done, so that synchronize returns at once.

    handle: the result of an ``_async`` form.
    """
    return handle.done.is_set()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation.

    handle: the result of an ``_async`` form.

    Returns its tensor; a tuple of tensors for a grouped operation; for alltoall the tensor and the
    number of rows from each rank.

    Raises HorovodInternalError if the operation failed.
    """
    return handle.wait() if isinstance(handle, Request) else handle()


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have joined.

    Until then it contributes zeros to sums and averages of the other ranks. Averages are over all
    ranks. Other operations fail while a rank has joined.

    device: the GPU for the zeros if CUDA tensors are reduced; -1: this thread's current device.

    Returns the rank that joined last.
    """
    engine = engine_of(global_process_set, "join")
    gpu = None
    if torch.cuda.is_available():  # current_device is per thread, and the engine has a thread
        gpu = torch.cuda.current_device() if device < 0 else device
    return engine.join(gpu)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called."""
    _submit("barrier", [], process_set, None).wait()


# --- asynchronous ---------------------------------------------------------------------------------


def _submit(
    operation: str,
    tensors: Sequence[Tensor],
    process_set: ProcessSet,
    name: str | None,
    *,
    in_place: bool = False,
    single: bool = True,
    **signature: Any,
) -> Request:
    """Begin an operation."""
    engine = engine_of(process_set, operation)
    inputs = []
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"{operation}: tensor: expected a tensor, got {type(tensor).__name__}"
            )
        if tensor.layout is not torch.strided:
            raise ArgumentError(
                f"{operation}: tensor: expected a dense tensor, got {tensor.layout}; "
                "sparse_allreduce_async accepts sparse tensors"
            )
        inputs.append(tensor.detach())
    if not single and not inputs:
        raise ArgumentError(f"grouped_{operation}: tensors: expected at least one, got none")
    call = Call(operation, inputs, tensors if in_place else None, single)
    return engine.submit(call, name, **signature)


def _for_one(
    grouped: Callable[Concatenate[Sequence[Tensor], P], Request],
) -> Callable[Concatenate[Tensor, P], Request]:
    """Return the form of a grouped operation for one tensor."""

    def begin(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> Request:
        request = grouped([tensor], *args, **kwargs)
        request.call.single = True
        return request

    begin.__name__ = grouped.__name__.removeprefix("grouped_")
    begin.__doc__ = grouped.__doc__
    signature = inspect.signature(grouped)
    first, *others = signature.parameters.values()
    tensor = first.replace(name="tensor", annotation="Tensor")
    begin.__signature__ = signature.replace(parameters=[tensor, *others])  # type: ignore[attr-defined]
    return begin  # type: ignore[return-value]  # also accepts tensor as a keyword


def _waiting(begin: Callable[P, Request]) -> Callable[P, Any]:
    """Return the form of an operation in place that waits, and returns the tensor or a list."""

    @functools.wraps(begin)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = begin(*args, **kwargs).wait()
        return list(result) if isinstance(result, tuple) else result

    run.__name__ = begin.__name__.replace("_async", "")
    run.__doc__ = (begin.__doc__ or "").replace("Begin", "Run")
    run.__signature__ = inspect.signature(begin).replace(return_annotation=Any)  # type: ignore[attr-defined]
    return run


def _resolve(op: str | None, average: bool | None, where: str) -> str:
    """Return the operation; ``average`` is a deprecated form of ``op``."""
    if average is not None:
        if op is not None:
            raise ArgumentError(f"{where}: op and average: expected one of them, got both")
        warnings.warn(f"{where}: average is deprecated; use op", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    op = Average if op is None else op
    if op not in REDUCE_OPS:
        raise ArgumentError(
            f"{where}: op: expected hvd.Average, Sum, Adasum, Min, Max or Product, got {op!r}"
        )
    return op


def _begin_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
) -> Request:
    op = _resolve(op, average, "allreduce")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("allreduce: Adasum is only supported in the set of all ranks")
    return _submit(
        "allreduce", tensors, process_set, name, in_place=in_place, single=False,
        op=op, prescale=float(prescale), postscale=float(postscale),
    )  # fmt: skip


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Request:
    """Begin an allreduce, once all ranks have all tensors; see allreduce."""
    return _begin_allreduce(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, False
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Request:
    """Begin an allreduce in place, once all ranks have all tensors; see allreduce."""
    return _begin_allreduce(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, True
    )


allreduce_async = _for_one(grouped_allreduce_async)
allreduce_async_ = _for_one(grouped_allreduce_async_)
allreduce_ = _waiting(allreduce_async_)
grouped_allreduce_ = _waiting(grouped_allreduce_async_)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Request:
    """Begin an allgather; see allgather."""
    return _submit("allgather", tensors, process_set, name, single=False)


allgather_async = _for_one(grouped_allgather_async)


def _begin_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> Request:
    root = check_index(root_rank, "broadcast: root_rank")
    if root not in process_set.ranks:
        engine_of(process_set, "broadcast")
        raise ArgumentError(
            f"broadcast: root_rank: expected a rank of {process_set.ranks}, got {root_rank}"
        )
    return _submit("broadcast", [tensor], process_set, name, in_place=in_place, root=root)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Request:
    """Begin a broadcast; see broadcast."""
    return _begin_broadcast(tensor, root_rank, name, process_set, False)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Request:
    """Begin a broadcast in place; see broadcast."""
    return _begin_broadcast(tensor, root_rank, name, process_set, True)


broadcast_ = _waiting(broadcast_async_)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Request:
    """Begin an alltoall; see alltoall."""
    numbers = splits
    if isinstance(splits, Tensor):
        if splits.is_floating_point() or splits.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"alltoall: splits: expected int32 or int64, got {splits.dtype}")
        numbers = splits.tolist()
    numbers = [int(number) for number in numbers] if numbers is not None else None
    return _submit("alltoall", [tensor], process_set, name, single=False, splits=numbers)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Request:
    """Begin a reducescatter; see reducescatter."""
    op = _resolve(op, None, "reducescatter")
    if op == Adasum:
        raise ArgumentError("reducescatter: op: Adasum is only supported in allreduce")
    return _submit(
        "reducescatter", tensors, process_set, name, single=False,
        op=op, prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


reducescatter_async = _for_one(grouped_reducescatter_async)


def sparse_allreduce_async(
    tensor: Tensor,
    name: str,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Begin to add or average sparse COO tensors, whose entries are gathered.

    tensor: of the same shape on all ranks; entries may differ.
    op: Average or Sum.

    Returns a function for synchronize, which waits and returns an uncoalesced sparse tensor.

    Raises ArgumentError (a ValueError) for another op or layout.
    """
    op = _resolve(op, None, "sparse_allreduce")
    if op not in (Average, Sum) or tensor.layout is not torch.sparse_coo:
        raise ArgumentError(
            f"sparse_allreduce: expected a sparse COO tensor and hvd.Average or Sum, got "
            f"{tensor.layout} and {op}"
        )
    entries, size = tensor.detach().coalesce(), engine_of(process_set, "sparse_allreduce").size
    indices = allgather_async(entries.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(entries.values(), f"{name}.values", process_set)

    def finish() -> Tensor:
        all_values, all_indices = values.wait(), indices.wait()
        if op == Average:
            all_values = all_values / size
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape)

    return finish


# --- differentiable -----------------------------------------------------------------------------


class _AllReduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.options = options
        return grouped_allreduce_async(list(tensors), name=name, **options).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *grouped_allreduce_async(list(gradients), **ctx.options).wait()


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        gathered = grouped_allgather_async(list(tensors), name, process_set).wait()
        ctx.rows, ctx.process_set = [len(tensor) for tensor in tensors], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        averaged = grouped_allreduce_async(list(gradients), process_set=ctx.process_set)
        rows = allgather_async(torch.tensor([ctx.rows]), process_set=ctx.process_set).wait()
        before = rows[: ctx.process_set.rank()].sum(0).tolist()
        own = [
            gradient.narrow(0, start, count)
            for gradient, start, count in zip(averaged.wait(), before, ctx.rows, strict=True)
        ]
        return None, None, *own


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root, ctx.process_set = root_rank, process_set
        return broadcast_async(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        averaged = allreduce_async(gradient, process_set=ctx.process_set).wait()
        return averaged if rank() == ctx.root else torch.zeros_like(averaged), None, None, None


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        output, received = alltoall_async(tensor, splits, name, process_set).wait()
        ctx.rows, ctx.received, ctx.process_set = len(tensor), received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        own, _ = alltoall_async(gradient, ctx.received, process_set=ctx.process_set).wait()
        # Rows that were not sent have no gradient.
        rest = own.new_zeros((ctx.rows - len(own), *own.shape[1:]))
        return torch.cat([own, rest]) if len(rest) else own, None, None, None


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.options = options
        return grouped_reducescatter_async(list(tensors), name, **options).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        options, process_set = ctx.options, ctx.options["process_set"]
        factor = options["prescale_factor"] * options["postscale_factor"]
        if options["op"] == Sum:
            factor *= process_set.size()
        scaled = [gradient * factor for gradient in gradients]
        return None, None, *grouped_allgather_async(scaled, process_set=process_set).wait()


def _compressed(
    function: type[torch.autograd.Function],
    name: str | None,
    options: dict[str, Any],
    tensors: Sequence[Tensor],
    compression: Any,
) -> list[Tensor]:
    """Apply an autograd function to compressed tensors; return its decompressed results."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    outputs = function.apply(name, options, *(tensor for tensor, _ in compressed))
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, compressed, strict=True)
    ]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Allreduce each of several tensors; see allreduce. Returns a list."""
    options = {
        "op": _resolve(op, average, "allreduce"),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    return _compressed(_AllReduce, name, options, tensors, compression)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over the ranks, element by element.

    tensor: of the same dtype and shape on all ranks; not modified.
    average: deprecated; True is Average, False Sum.
    compression: Compression.none, or fp16: floats are sent as float16.
    op: Average (default), Sum, Min, Max, Product, or Adasum, for floats on a power of 2 ranks.
        Averages of integers are rounded towards zero.
    prescale_factor, postscale_factor: factors of inputs and results.

    Returns a new tensor.
    """
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Allgather each of several tensors; see allgather. Returns a list."""
    return list(_AllGather.apply(name, process_set, *tensors))


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension.

    tensor: of the same dtype and shape on all ranks, except for the first dimension.

    Returns a new tensor.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of the root rank on all ranks.

    tensor: of the same dtype and shape on all ranks; not modified.
    root_rank: a global rank in the set.

    Returns a new tensor. Raises ArgumentError (a ValueError) for a root outside the set.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank and receive rows from each rank.

    tensor: of the same dtype and shape on all ranks, except for the first dimension.
    splits: number of rows for each rank, in rank order, int32 or int64; None: equal numbers.

    Returns the received rows, in rank order; with splits, also the number of rows from each rank
    (an int32 tensor).
    """
    output, received = _AllToAll.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reducescatter each of several tensors; see reducescatter. Returns a list."""
    options = {
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    return _compressed(_ReduceScatter, name, options, tensors, compression)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks, and scatter its rows.

    tensor: of the same dtype and shape on all ranks.
    op: Average, Sum, Min, Max or Product.
    compression, prescale_factor, postscale_factor: as in allreduce.

    Returns this rank's rows; the first ranks get the remainder.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]
