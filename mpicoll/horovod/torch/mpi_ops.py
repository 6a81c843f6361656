"""Horovod's operations. Each has an ``_async`` form that returns a Request for poll and
synchronize. Scripts also import the functions of ``basics`` from this module.

name: matches the operation between ranks; None: the number of calls of this operation so far.

Forms with a trailing underscore work in place. Forms without ``_async`` and underscore are
differentiable, as in Horovod: allreduce reduces gradients with the same operation, allgather and
broadcast average the ranks' gradients.

After a collective mismatch, such as different dtypes or shapes, and other failures, waiting for the
Request raises HorovodInternalError on all ranks. Local errors are raised at once: ArgumentError (a
ValueError), NotInitializedError (a ValueError).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from mpicoll.core.indices import check_index
from mpicoll.errors import ArgumentError
from mpicoll.horovod.torch import basics
from mpicoll.horovod.torch.basics import *  # noqa: F403
from mpicoll.horovod.torch.basics import current, rank, size
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.implementations import (
    REDUCE_OPS,
    Average,
    Max,
    Min,
    Product,
    Request,
    Sum,
)

__all__ = [
    "Average", "Max", "Min", "Product", "Sum", "allgather", "allgather_async", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "join", "poll",
    "reducescatter", "reducescatter_async", "synchronize",
]  # fmt: skip
__all__ += basics.__all__

P = ParamSpec("P")


# --- waiting -------------------------------------------------------------------------------------


def poll(handle: Request) -> bool:
    """Return whether an operation is done, so that synchronize returns at once.

    handle: the result of an ``_async`` form.
    """
    return handle.done.is_set()


def synchronize(handle: Request) -> Any:
    """Wait for an operation.

    handle: the result of an ``_async`` form.

    Returns its tensor; a tuple of tensors for a grouped operation; for alltoall the tensor and the
    number of rows from each rank.

    Raises HorovodInternalError if the operation failed.
    """
    return handle.wait()


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have joined.

    Until then it contributes zeros to sums and averages of the other ranks. Averages are over all
    ranks. Other operations fail while a rank has joined.

    device: the GPU for the zeros if CUDA tensors are reduced; -1: this thread's current device.

    Returns the rank that joined last.
    """
    engine = current("join").engine
    gpu = None
    if torch.cuda.is_available():  # current_device is per thread, and the engine has a thread
        gpu = torch.cuda.current_device() if device < 0 else device
    return engine.join(gpu)


def barrier() -> None:
    """Wait until all ranks have called."""
    _begin("barrier", [], None).wait()


# --- asynchronous ---------------------------------------------------------------------------------


def _begin(
    operation: str,
    tensors: Sequence[Tensor],
    name: str | None,
    in_place: bool = False,
    single: bool = False,
    **signature: Any,
) -> Request:
    """Begin an operation. signature, in_place and single: see ``Request``."""
    engine = current(operation).engine
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"{operation}: tensor: expected a tensor, got {type(tensor).__name__}"
            )
        if tensor.layout is not torch.strided:
            raise ArgumentError(
                f"{operation}: tensor: expected a dense tensor, got {tensor.layout}; "
                "convert it with to_dense()"
            )
    if not tensors and operation != "barrier":
        raise ArgumentError(f"grouped_{operation}: tensors: expected at least one, got none")
    inputs = [tensor.detach() for tensor in tensors]
    request = Request.build(operation, inputs, tensors if in_place else None, single, **signature)
    return engine.submit(request, name)


def _for_one(
    grouped: Callable[Concatenate[Sequence[Tensor], P], Request],
) -> Callable[Concatenate[Tensor, P], Request]:
    @wraps(grouped)
    def begin(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> Request:
        request = grouped([tensor], *args, **kwargs)
        request.single = True
        return request

    return begin  # type: ignore[return-value]  # also accepts tensor as a keyword


def _waiting(begin: Callable[P, Request]) -> Callable[P, Any]:
    """Return the form of an operation in place that waits, and returns the tensor or a list."""

    @wraps(begin)
    def run(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = begin(*args, **kwargs).wait()
        return list(result) if isinstance(result, tuple) else result

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
            f"{where}: op: expected hvd.Average, Sum, Min, Max or Product, got {op!r}"
        )
    return op


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    in_place: bool = False,
) -> Request:
    """Begin an allreduce, once all ranks have all tensors; see allreduce."""
    return _begin(
        "allreduce", tensors, name, in_place, op=_resolve(op, average, "allreduce"),
        prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


grouped_allreduce_async_ = partial(grouped_allreduce_async, in_place=True)
grouped_allreduce_ = _waiting(grouped_allreduce_async_)
allreduce_async = _for_one(grouped_allreduce_async)
allreduce_async_ = _for_one(grouped_allreduce_async_)
allreduce_ = _waiting(allreduce_async_)


def allgather_async(tensor: Tensor, name: str | None = None) -> Request:
    """Begin an allgather; see allgather."""
    return _begin("allgather", [tensor], name, single=True)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, *, in_place: bool = False
) -> Request:
    """Begin a broadcast; see broadcast."""
    root, size = check_index(root_rank, "broadcast: root_rank"), current("broadcast").size
    if not 0 <= root < size:
        raise ArgumentError(
            f"broadcast: root_rank: expected a rank of 0 to {size - 1}, got {root_rank}"
        )
    return _begin("broadcast", [tensor], name, in_place, single=True, root=root)


broadcast_async_ = partial(broadcast_async, in_place=True)
broadcast_ = _waiting(broadcast_async_)


def alltoall_async(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None
) -> Request:
    """Begin an alltoall; see alltoall."""
    numbers = splits
    if isinstance(splits, Tensor):
        if splits.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"alltoall: splits: expected int32 or int64, got {splits.dtype}")
        numbers = splits.tolist()
    numbers = [int(number) for number in numbers] if numbers is not None else None
    return _begin("alltoall", [tensor], name, splits=numbers)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Request:
    """Begin a reducescatter; see reducescatter."""
    return _begin(
        "reducescatter", [tensor], name, single=True, op=_resolve(op, None, "reducescatter"),
        prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


# --- differentiable -----------------------------------------------------------------------------

#: A function of tensors that returns tensors, one or more.
_Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]
    """Runs ``run`` on tensors, and ``run_backward`` on the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, run: _Run, run_backward: _Run, *tensors: Tensor) -> Any:
        ctx.run_backward = run_backward
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.run_backward(gradients)


def _compressed(
    run: _Run, run_backward: _Run, tensors: Sequence[Tensor], compression: Any
) -> list[Tensor]:
    """Run a differentiable function on compressed tensors; return its decompressed results."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    outputs = _Differentiable.apply(run, run_backward, *(tensor for tensor, _ in compressed))
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
) -> list[Tensor]:
    """Allreduce each of several tensors; see allreduce. Returns a list."""
    op = _resolve(op, average, "allreduce")

    def run(tensors: Sequence[Tensor], name: str | None = None) -> Any:
        factors = prescale_factor, postscale_factor
        return grouped_allreduce_async(tensors, None, name, op, *factors).wait()

    return _compressed(partial(run, name=name), run, tensors, compression)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks, element by element.

    tensor: of the same dtype and shape on all ranks; not modified.
    average: deprecated; True is Average, False Sum.
    compression: Compression.none, or fp16: floats are sent as float16.
    op: Average (default), Sum, Min, Max or Product. Averages of integers are rounded towards zero.
    prescale_factor, postscale_factor: factors of inputs and results.

    Returns a new tensor.
    """
    return grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor
    )[0]


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension.

    tensor: of the same dtype and shape on all ranks, except for the first dimension.

    Returns a new tensor.
    """

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [allgather_async(tensors[0], name).wait()]

    def run_backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        averaged = allreduce_async(gradients[0])
        rows = allgather_async(torch.tensor([own_rows])).wait()
        return [averaged.wait().narrow(0, int(rows[: rank()].sum()), own_rows)]

    (output,) = _Differentiable.apply(run, run_backward, tensor)
    own_rows = len(tensor)
    return output


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return the tensor of the root rank on all ranks.

    tensor: of the same dtype and shape on all ranks; not modified.

    Returns a new tensor. Raises ArgumentError (a ValueError) for an invalid root.
    """

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [broadcast_async(tensors[0], root_rank, name).wait()]

    def run_backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        averaged = allreduce_async(gradients[0]).wait()
        return [averaged if rank() == root_rank else torch.zeros_like(averaged)]

    (output,) = _Differentiable.apply(run, run_backward, tensor)
    return output


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None = None, name: str | None = None
) -> Any:
    """Send rows to each rank and receive rows from each rank.

    tensor: of the same dtype and shape on all ranks, except for the first dimension.
    splits: number of rows for each rank, in rank order, int32 or int64; None: equal numbers.

    Returns the received rows, in rank order; with splits, also the number of rows from each rank
    (an int32 tensor).
    """
    received = torch.empty(0)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        nonlocal received
        output, received = alltoall_async(tensors[0], splits, name).wait()
        return [output]

    def run_backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        own, _ = alltoall_async(gradients[0], received).wait()
        # Rows that were not sent have no gradient.
        rest = own.new_zeros((rows - len(own), *own.shape[1:]))
        return [torch.cat([own, rest]) if len(rest) else own]

    (output,) = _Differentiable.apply(run, run_backward, tensor)
    rows = len(tensor)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the ranks, and scatter its rows.

    tensor: of the same dtype and shape on all ranks.
    op: Average, Sum, Min, Max or Product.
    compression, prescale_factor, postscale_factor: as in allreduce.

    Returns this rank's rows; the first ranks get the remainder.
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [reducescatter_async(tensors[0], name, op, **factors).wait()]

    def run_backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        factor = prescale_factor * postscale_factor * (size() if op == Sum else 1)
        return [allgather_async(gradients[0] * factor).wait()]

    return _compressed(run, run_backward, [tensor], compression)[0]
