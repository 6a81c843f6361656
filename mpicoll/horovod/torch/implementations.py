"""Horovod's operations: the signature that must match on all ranks, and the implementation.

The engine knows an operation only by its row in ``OPERATIONS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mpicoll as dist

__all__ = [
    "OPERATIONS", "REDUCE_OPS", "Adasum", "Average", "Call", "Max", "Min", "Product", "Ranks",
    "Signature", "Sum", "synchronize_devices",
]  # fmt: skip

#: A rank's description of a request, sent to the other ranks as JSON.
Signature = dict[str, Any]

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"

REDUCE_OPS = {
    Average: dist.ReduceOp.AVG,
    Sum: dist.ReduceOp.SUM,
    Adasum: None,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class Ranks(NamedTuple):
    """The ranks of a process set.

    group: a process group that only the set's engine uses.
    global_ranks: the global ranks of its members, in its order.
    size, rank: of the group.
    """

    group: Any
    global_ranks: Sequence[int]
    size: int
    rank: int


@dataclass(eq=False)
class Call:
    """One rank's part of an operation.

    operation: a key of ``OPERATIONS``.
    inputs: its tensors.
    in_place: the tensors to change in place, of which the inputs are detached; None: new outputs.
    outputs: the results, once the operation is done.
    single: the result is the first output, not a list.
    """

    operation: str
    inputs: Sequence[Tensor]
    in_place: Sequence[Tensor] | None = None
    single: bool = True
    outputs: Sequence[Any] | None = None

    def buffers(self) -> list[Tensor]:
        """Return the tensors to reduce in place: the inputs, or copies of them."""
        if self.in_place is not None:
            self.outputs = self.in_place
            return list(self.inputs)
        self.outputs = [tensor.clone() for tensor in self.inputs]
        return list(self.outputs)

    def signature(self, name: str, **more: Any) -> Signature:
        """Return the signature.

        more: op, prescale, postscale, root (a global rank), splits.
        """
        return {
            "name": name,
            "operation": self.operation,
            "dtypes": [str(tensor.dtype) for tensor in self.inputs],
            "shapes": [list(tensor.shape) for tensor in self.inputs],
            "device": self.inputs[0].device.type if self.inputs else "cpu",
            **more,
        }

    @classmethod
    def placeholder(cls, signature: Signature, gpu: int | None) -> Call:
        """Return the part of a rank that has joined: zeros, on its GPU for CUDA tensors."""
        device = torch.device(signature["device"], gpu if signature["device"] == "cuda" else None)
        inputs = [
            torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            for shape, dtype in zip(signature["shapes"], signature["dtypes"], strict=True)
        ]
        return cls(signature["operation"], inputs, inputs)

    def nbytes(self) -> int:
        """Return the size of the inputs in bytes."""
        return sum(tensor.nbytes for tensor in self.inputs)

    def result(self) -> Any:
        """Return the only output, or a tuple of all outputs; None without outputs."""
        if self.outputs is None:
            return None
        return self.outputs[0] if self.single else tuple(self.outputs)


def synchronize_devices(calls: Sequence[Call]) -> None:
    """Wait for the current streams of this thread on all devices of the calls."""
    for device in {tensor.device for call in calls for tensor in call.inputs if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


#: Each rank's signature of an operation; None for ranks that have joined without beginning it.
Signatures = Sequence[Signature | None]


def _any_signature(signatures: Signatures) -> Signature:
    """Return the signature of any rank, for fields that match on all ranks."""
    return next(signature for signature in signatures if signature is not None)


def _rows(signature: Signature, index: int) -> int:
    return int(signature["shapes"][index][0])


# --- allreduce -----------------------------------------------------------------------------------


def _all_reduce(ranks: Ranks, calls: Sequence[Call], signatures: Signatures) -> None:
    """Scale, reduce and scale tensors in place."""
    signature = _any_signature(signatures)
    tensors = [tensor for call in calls for tensor in call.buffers()]
    op = signature["op"]
    for tensor in tensors:
        _scale(tensor, signature["prescale"])
    if op == Adasum:
        for tensor in tensors:
            _adasum(tensor, ranks.group)
    else:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            dist.all_reduce_coalesced(alike, _reduce_op(op, alike[0]), ranks.group)
    for tensor in tensors:
        _divide(tensor, op, ranks.size)
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


# --- Adasum --------------------------------------------------------------------------------------


def _adasum(tensor: Tensor, group: Any) -> None:
    """Combine the ranks' tensors in place; the number of ranks is a power of 2, the dtype a float.

    Adasum is a sum that does not count twice the common part of gradients (S. Maleki et al.,
    "Scaling distributed training with adaptive summation", MLSys 2021). Of two gradients it is ``(1
    - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: their sum if they are orthogonal, and their mean if
    they are equal. More gradients are combined in pairs, then pairs of pairs, and so on.

    In step k two ranks whose numbers differ in bit k exchange their results. Both combine them in
    rank order, so all ranks get the same bits.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    distance = 1
    while distance < size:
        peer = rank ^ distance
        own, other = (
            tensor.contiguous(),
            torch.empty_like(tensor, memory_format=torch.contiguous_format),
        )
        sending = dist.isend(own, group=group, group_dst=peer)
        dist.recv(other, group=group, group_src=peer)
        assert sending is not None
        sending.wait()
        tensor.copy_(_add_pair(own, other) if rank < peer else _add_pair(other, own))
        distance *= 2


def _add_pair(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    # As in the paper, dot products use float64, because they sum a large number of elements.
    x, y = a.double().flatten(), b.double().flatten()
    dot, aa, bb = float(x @ y), float(x @ x), float(y @ y)
    return a * (1 - dot / (2 * aa) if aa else 1.0) + b * (1 - dot / (2 * bb) if bb else 1.0)


# --- reducescatter -------------------------------------------------------------------------------


def _split_rows(rows: int, size: int) -> list[int]:
    """Split rows among ranks; the first ranks get the remainder."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _reduce_scatter(ranks: Ranks, calls: Sequence[Call], signatures: Signatures) -> None:
    (call,), signature = calls, _any_signature(signatures)
    op, outputs = signature["op"], []
    for tensor in call.inputs:
        # A copy only if it is scaled; otherwise the input is only read.
        own = tensor.contiguous()
        if signature["prescale"] != 1:
            own = own.clone()
            _scale(own, signature["prescale"])
        parts = list(own.split(_split_rows(len(own), ranks.size)))
        output = torch.empty_like(parts[ranks.rank])
        dist.reduce_scatter(output, parts, _reduce_op(op, own), ranks.group)
        _divide(output, op, ranks.size)
        _scale(output, signature["postscale"])
        outputs.append(output)
    call.outputs = outputs


# --- data movement ------------------------------------------------------------------------------


def _all_gather(ranks: Ranks, calls: Sequence[Call], signatures: Signatures) -> None:
    (call,), outputs = calls, []
    for index, tensor in enumerate(call.inputs):
        rows = [_rows(signature, index) for signature in signatures if signature is not None]
        output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        dist.all_gather(list(output.split(rows)), tensor.contiguous(), ranks.group)
        outputs.append(output)
    call.outputs = outputs


def _broadcast(ranks: Ranks, calls: Sequence[Call], signatures: Signatures) -> None:
    (call,), root = calls, ranks.global_ranks.index(_any_signature(signatures)["root"])
    (target,) = call.buffers()
    dist.broadcast(target, group=ranks.group, group_src=root)


def _splits(signature: Signature, size: int) -> list[int]:
    """Return the number of rows for each rank."""
    return signature["splits"] or [_rows(signature, 0) // size] * size


def _all_to_all(ranks: Ranks, calls: Sequence[Call], signatures: Signatures) -> None:
    (call,) = calls
    (tensor,) = call.inputs
    splits = [_splits(signature, ranks.size) for signature in signatures if signature is not None]
    sent, received = splits[ranks.rank], [each[ranks.rank] for each in splits]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    rows = tensor[: sum(sent)].contiguous()
    dist.all_to_all_single(output, rows, received, sent, ranks.group)
    call.outputs = [output, torch.tensor(received, dtype=torch.int32)]


def _barrier(ranks: Ranks, calls: Sequence[Call], signatures: Signatures) -> None:
    """Do nothing: all ranks have begun it."""
    calls[0].outputs = None


# --- fields that must match ---------------------------------------------------------------------


def _fields(*names: str) -> Callable[[Signature], Signature]:
    """Return a function that selects fields of a signature."""
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
    if signature["op"] != Adasum:
        return None
    if size & (size - 1):
        return f"op: Adasum: expected a number of ranks that is a power of 2, got {size}"
    if any("float" not in dtype for dtype in signature["dtypes"]):
        return f"tensor: Adasum: expected floats, got {', '.join(signature['dtypes'])}"
    return None


def _check_splits(signature: Signature, size: int) -> str | None:
    if wrong := _check_rows(signature, size):
        return wrong
    rows, splits = _rows(signature, 0), signature["splits"]
    if splits is None:
        if rows % size:
            return f"tensor: expected rows that {size} ranks share evenly, or splits; got {rows}"
    elif len(splits) != size or min(splits) < 0 or sum(splits) > rows:
        return f"splits: expected {size} numbers of rows, {rows} in all or fewer, got {splits}"
    return None


@dataclass(frozen=True)
class Operation:
    """A row of ``OPERATIONS``.

    run: runs the calls of this rank; several calls if they are fused.
    must_match: selects the fields of the signature that must be equal on all ranks.
    check: describes an error in a rank's signature on ``size`` ranks, or returns None.
    fusion_key: requests with equal keys are fused; None: never.
    allows_joined: whether the operation may run without ranks that have joined.
    """

    run: Callable[[Ranks, Sequence[Call], Signatures], None]
    must_match: Callable[[Signature], Signature]
    check: Callable[[Signature, int], str | None] = lambda signature, size: None
    fusion_key: Callable[[Signature], Any] = lambda signature: None
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
