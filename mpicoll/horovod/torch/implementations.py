"""Horovod's operations: the signature that must match on all ranks, and the implementation.

The engine knows an operation only by its row in ``OPERATIONS``. Implementations take the engine's
process group, requests (several if they are fused), and each rank's signature.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mpicoll as dist
from mpicoll.horovod.common.exceptions import HorovodInternalError

#: A rank's description of a request, sent to the other ranks as JSON.
Signature = dict[str, Any]

Average, Sum, Min, Max, Product = "Average", "Sum", "Min", "Max", "Product"

REDUCE_OPS = {
    Average: dist.ReduceOp.AVG,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


@dataclass(eq=False)
class Request:
    """An operation that this rank has begun, for ``poll`` and ``synchronize``."""

    inputs: Sequence[Tensor]  # its tensors
    #: Name, operation (a key of ``OPERATIONS``), dtypes, shapes, device, and, depending on the
    #: operation, op, prescale, postscale, root, splits.
    signature: Signature
    #: The tensors to change in place, of which the inputs are detached; None: new outputs.
    in_place: Sequence[Tensor] | None = None
    single: bool = False  # the result is the first output, not a tuple
    outputs: Sequence[Any] | None = None  # the results, once the operation is done
    done: threading.Event = field(default_factory=threading.Event)
    error: HorovodInternalError | None = None
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def build(
        cls,
        operation: str,
        inputs: Sequence[Tensor],
        in_place: Sequence[Tensor] | None = None,
        single: bool = False,
        **more: Any,
    ) -> Request:
        """Build a request without a name. more: further fields of the signature."""
        signature = {
            "name": operation,
            "operation": operation,
            "dtypes": [str(tensor.dtype) for tensor in inputs],
            "shapes": [list(tensor.shape) for tensor in inputs],
            "device": inputs[0].device.type if inputs else "cpu",
            **more,
        }
        return cls(inputs, signature, in_place, single)

    @classmethod
    def placeholder(cls, signature: Signature, gpu: int | None) -> Request:
        """Return the part of a rank that has joined: zeros, on its GPU for CUDA tensors."""
        device = torch.device(signature["device"], gpu if signature["device"] == "cuda" else None)
        inputs = [
            torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            for shape, dtype in zip(signature["shapes"], signature["dtypes"], strict=True)
        ]
        return cls(inputs, signature, inputs)

    @property
    def name(self) -> str:
        """Operation and name, which match requests between ranks."""
        return str(self.signature["name"])

    def nbytes(self) -> int:
        """Return the size of the inputs in bytes."""
        return sum(tensor.nbytes for tensor in self.inputs)

    def buffers(self) -> list[Tensor]:
        """Return the tensors to change in place: the inputs, or copies of them."""
        if self.in_place is not None:
            self.outputs = self.in_place
            return list(self.inputs)
        self.outputs = [tensor.clone() for tensor in self.inputs]
        return list(self.outputs)

    def fail(self, cause: BaseException | str) -> None:
        """Make ``wait`` raise HorovodInternalError."""
        self.error = HorovodInternalError(f"{self.name}: {cause}")
        self.error.__cause__ = cause if isinstance(cause, BaseException) else None

    def wait(self) -> Any:
        """Wait for the operation; return its result. Raises HorovodInternalError if it failed."""
        self.done.wait()
        if self.error is not None:
            raise HorovodInternalError(str(self.error)) from self.error.__cause__
        if self.outputs is None:
            return None
        return self.outputs[0] if self.single else tuple(self.outputs)


def synchronize_devices(requests: Sequence[Request]) -> None:
    """Wait for the current streams of this thread on all devices of the requests."""
    for device in {tensor.device for each in requests for tensor in each.inputs if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


#: Each rank's signature of an operation; None for ranks that have joined without beginning it.
Signatures = Sequence[Signature | None]


def _any_signature(signatures: Signatures) -> Signature:
    """Return the signature of any rank, for fields that match on all ranks."""
    return next(signature for signature in signatures if signature is not None)


def _rows(signature: Signature) -> int:
    return int(signature["shapes"][0][0])


# --- allreduce -----------------------------------------------------------------------------------


def _all_reduce(group: Any, requests: Sequence[Request], signatures: Signatures) -> None:
    signature = _any_signature(signatures)
    tensors = [tensor for request in requests for tensor in request.buffers()]
    op = signature["op"]
    for tensor in tensors:
        _scale(tensor, signature["prescale"])
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        dist.all_reduce_coalesced(alike, _reduce_op(op, alike[0]), group)
    for tensor in tensors:
        _divide(tensor, op, group.size())
        _scale(tensor, signature["postscale"])


def _reduce_op(op: str, tensor: Tensor) -> Any:
    """Return mpicoll's operation. Averages of integers are sums, which ``_divide`` divides."""
    return REDUCE_OPS[Sum if op == Average and not _is_inexact(tensor) else op]


def _divide(tensor: Tensor, op: str, size: int) -> None:
    if op == Average and not _is_inexact(tensor):
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


def _is_inexact(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; integers and 8-bit floats in float64; integers round towards zero."""
    if factor == 1:
        return
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1):
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


# --- reducescatter -------------------------------------------------------------------------------


def _reduce_scatter(group: Any, requests: Sequence[Request], signatures: Signatures) -> None:
    (request,), signature = requests, _any_signature(signatures)
    op, own = signature["op"], request.inputs[0].contiguous()
    if signature["prescale"] != 1:  # otherwise the input is only read
        own = own.clone()
        _scale(own, signature["prescale"])
    rows, size = len(own), group.size()
    # The first ranks get the remainder.
    parts = list(own.split([rows // size + (rank < rows % size) for rank in range(size)]))
    output = torch.empty_like(parts[group.rank()])
    dist.reduce_scatter(output, parts, _reduce_op(op, own), group)
    _divide(output, op, size)
    _scale(output, signature["postscale"])
    request.outputs = [output]


# --- data movement ------------------------------------------------------------------------------


def _all_gather(group: Any, requests: Sequence[Request], signatures: Signatures) -> None:
    (request,) = requests
    (tensor,) = request.inputs
    rows = [_rows(signature) for signature in signatures if signature is not None]
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    dist.all_gather(list(output.split(rows)), tensor.contiguous(), group)
    request.outputs = [output]


def _broadcast(group: Any, requests: Sequence[Request], signatures: Signatures) -> None:
    (target,) = requests[0].buffers()
    dist.broadcast(target, group=group, group_src=_any_signature(signatures)["root"])


def _all_to_all(group: Any, requests: Sequence[Request], signatures: Signatures) -> None:
    (request,) = requests
    (tensor,) = request.inputs
    size, rank = group.size(), group.rank()
    splits = [  # the number of rows for each rank, by rank
        each["splits"] or [_rows(each) // size] * size for each in signatures if each is not None
    ]
    sent, received = splits[rank], [each[rank] for each in splits]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    dist.all_to_all_single(output, tensor[: sum(sent)].contiguous(), received, sent, group)
    request.outputs = [output, torch.tensor(received, dtype=torch.int32)]


def _barrier(group: Any, requests: Sequence[Request], signatures: Signatures) -> None:
    """Do nothing: all ranks have begun it."""


# --- fields that must match ---------------------------------------------------------------------


def _fields(*names: str) -> Callable[[Signature], Signature]:
    return lambda signature: {name: signature[name] for name in names}


def _all_except_rows(signature: Signature) -> Signature:
    """Select dtypes, device, and shapes without the first dimension."""
    shapes = {"shapes[1:]": [shape[1:] for shape in signature["shapes"]]}
    dimensions = {"dimensions": [len(shape) for shape in signature["shapes"]]}
    return _fields("dtypes", "device")(signature) | dimensions | shapes


# --- local checks -------------------------------------------------------------------------------


def _check_rows(signature: Signature, size: int) -> str | None:
    if not all(signature["shapes"]):
        return "tensor: expected one dimension or more, got a scalar"
    return None


def _check_reduction(signature: Signature, size: int) -> str | None:
    if signature["op"] == Average and "torch.bool" in signature["dtypes"]:
        return "tensor: Average: expected numbers, got torch.bool"
    return None


def _check_splits(signature: Signature, size: int) -> str | None:
    if wrong := _check_rows(signature, size):
        return wrong
    rows, splits = _rows(signature), signature["splits"]
    if splits is None:
        if rows % size:
            return f"tensor: expected rows that {size} ranks share evenly, or splits; got {rows}"
    elif len(splits) != size or min(splits) < 0 or sum(splits) > rows:
        return f"splits: expected {size} numbers of rows, {rows} in all or fewer, got {splits}"
    return None


@dataclass(frozen=True)
class Operation:
    """A row of ``OPERATIONS``."""

    #: Runs the requests of this rank; several if they are fused.
    run: Callable[[Any, Sequence[Request], Signatures], None]
    #: Selects the fields of the signature that must be equal on all ranks.
    must_match: Callable[[Signature], Signature]
    #: Describes an error in a rank's signature on ``size`` ranks, or returns None.
    check: Callable[[Signature, int], str | None] = lambda signature, size: None
    #: Requests with equal keys are fused; None: never.
    fusion_key: Callable[[Signature], Any] = lambda signature: None
    #: Whether the operation may run without ranks that have joined.
    allows_joined: Callable[[Signature], bool] = lambda signature: False


def _fusion_key(signature: Signature) -> Any:
    dtypes = set(signature["dtypes"])
    if len(dtypes) != 1:
        return None
    return [*dtypes, *(signature[name] for name in ("device", "op", "prescale", "postscale"))]


_REDUCTION = ("op", "prescale", "postscale")

OPERATIONS = {
    "allreduce": Operation(
        _all_reduce,
        _fields("dtypes", "device", "shapes", *_REDUCTION),
        _check_reduction,
        _fusion_key,
        lambda signature: signature["op"] in (Average, Sum),
    ),
    "allgather": Operation(_all_gather, _all_except_rows, _check_rows),
    "broadcast": Operation(_broadcast, _fields("dtypes", "device", "shapes", "root")),
    "alltoall": Operation(_all_to_all, _all_except_rows, _check_splits),
    "reducescatter": Operation(
        _reduce_scatter,
        _fields("dtypes", "device", "shapes", *_REDUCTION),
        lambda signature, size: _check_rows(signature, size) or _check_reduction(signature, size),
    ),
    "barrier": Operation(_barrier, _fields(), allows_joined=lambda signature: True),
}
