"""The kinds of operations: what their ranks must have alike, and how each is carried out.

A row of ``KINDS`` is all that the engine knows of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mpicoll as dist
from mpicoll.horovod.torch.adasum import adasum

if TYPE_CHECKING:
    from mpicoll.horovod.torch.engine import Engine

__all__ = ["KINDS", "OPERATIONS", "Adasum", "Average", "Call", "Facts", "Max", "Min", "Product"]
__all__ += ["Sum", "scale", "synchronize_devices"]

#: What a rank tells the others of a request, as JSON knows it.
Facts = dict[str, Any]

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"

OPERATIONS = {
    Average: dist.ReduceOp.AVG,
    Sum: dist.ReduceOp.SUM,
    Adasum: None,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


@dataclass(eq=False)
class Call:
    """One rank's part of an operation.

    kind: a key of ``KINDS``.
    inputs: its tensors.
    given: the tensors that are to be changed in place, of which the inputs are detached.
    outputs: its results, new ones or those given, when it is done.
    single: the result is the first output, not a list.
    """

    kind: str
    inputs: Sequence[Tensor]
    given: Sequence[Tensor] | None = None
    single: bool = True
    outputs: Sequence[Any] | None = None

    def targets(self) -> list[Tensor]:
        """Return tensors to work in: the inputs, or copies of them."""
        if self.given is not None:
            self.outputs = self.given
            return list(self.inputs)
        self.outputs = [tensor.clone() for tensor in self.inputs]
        return list(self.outputs)

    def facts(self, name: str, **more: Any) -> Facts:
        """Return what other ranks have to know.

        more: op, prescale, postscale, root (a global rank), splits.
        """
        return {
            "name": name,
            "kind": self.kind,
            "dtypes": [str(tensor.dtype) for tensor in self.inputs],
            "shapes": [list(tensor.shape) for tensor in self.inputs],
            "device": self.inputs[0].device.type if self.inputs else "cpu",
            **more,
        }

    @classmethod
    def stand_in(cls, facts: Facts, gpu: int | None) -> Call:
        """Return the part of a rank that has joined: zeros, of others' CUDA tensors on its GPU."""
        device = torch.device(facts["device"], gpu if facts["device"] == "cuda" else None)
        inputs = [
            torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            for shape, dtype in zip(facts["shapes"], facts["dtypes"], strict=True)
        ]
        return cls(facts["kind"], inputs, inputs)

    def nbytes(self) -> int:
        """Count the bytes of the inputs."""
        return sum(tensor.nbytes for tensor in self.inputs)

    def result(self) -> Any:
        """Return the only output, or a tuple of all; None if there is none."""
        if self.outputs is None:
            return None
        return self.outputs[0] if self.single else tuple(self.outputs)


def synchronize_devices(calls: Sequence[Call]) -> None:
    """Wait for what this thread's current streams hold, of the devices that the calls are on."""
    for device in {tensor.device for call in calls for tensor in call.inputs if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


#: What each rank has said of an operation; None for ranks that have joined and not begun it.
Known = Sequence[Facts | None]


def _agreed(known: Known) -> Facts:
    """Return what one rank has said, for what all have said alike."""
    return next(facts for facts in known if facts is not None)


def _rows(facts: Facts, index: int) -> int:
    return int(facts["shapes"][index][0])


# --- allreduce -----------------------------------------------------------------------------------


def _all_reduce(engine: Engine, calls: Sequence[Call], known: Known) -> None:
    facts = _agreed(known)
    outputs = []
    for call in calls:
        outputs += call.targets()
    _reduce(engine, outputs, facts)


def _reduce(engine: Engine, tensors: Sequence[Tensor], facts: Facts) -> None:
    """Scale, reduce and scale tensors in place."""
    op = facts["op"]
    for tensor in tensors:
        scale(tensor, facts["prescale"])
    if op == Adasum:
        for tensor in tensors:
            adasum(tensor, engine.group)
    else:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            dist.all_reduce_coalesced(alike, _operation(op, alike[0]), engine.group)
    for tensor in tensors:
        _divide(tensor, op, engine.size)
        scale(tensor, facts["postscale"])


def _operation(op: str, tensor: Tensor) -> Any:
    """Return mpicoll's operation. Integers are averaged by their sum, which ``_divide`` divides."""
    return OPERATIONS[Sum if op == Average and not _has_fractions(tensor) else op]


def _divide(tensor: Tensor, op: str, size: int) -> None:
    if op == Average and not _has_fractions(tensor):
        tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))


def _has_fractions(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; integers and floats of 8 bits as float64, integers towards zero."""
    if factor == 1:
        return
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1):
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


# --- reducescatter -------------------------------------------------------------------------------


def _shares(rows: int, size: int) -> list[int]:
    """Share out rows; the first ranks get one more where it does not come out even."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _reduce_scatter(engine: Engine, calls: Sequence[Call], known: Known) -> None:
    (call,), facts = calls, _agreed(known)
    op, outputs = facts["op"], []
    for tensor in call.inputs:
        # A copy where there is something to change; else the inputs are only read.
        own = tensor.contiguous()
        if facts["prescale"] != 1:
            own = own.clone()
            scale(own, facts["prescale"])
        parts = list(own.split(_shares(len(own), engine.size)))
        output = torch.empty_like(parts[engine.rank])
        dist.reduce_scatter(output, parts, _operation(op, own), engine.group)
        _divide(output, op, engine.size)
        scale(output, facts["postscale"])
        outputs.append(output)
    call.outputs = outputs


# --- moves ---------------------------------------------------------------------------------------


def _all_gather(engine: Engine, calls: Sequence[Call], known: Known) -> None:
    (call,), outputs = calls, []
    for index, tensor in enumerate(call.inputs):
        rows = [_rows(facts, index) for facts in known if facts is not None]
        output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        dist.all_gather(list(output.split(rows)), tensor.contiguous(), engine.group)
        outputs.append(output)
    call.outputs = outputs


def _broadcast(engine: Engine, calls: Sequence[Call], known: Known) -> None:
    (call,), root = calls, engine.ranks.index(_agreed(known)["root"])
    (target,) = call.targets()
    dist.broadcast(target, group=engine.group, group_src=root)


def _splits(facts: Facts, size: int) -> list[int]:
    """Return how many rows each rank is sent."""
    return facts["splits"] or [_rows(facts, 0) // size] * size


def _all_to_all(engine: Engine, calls: Sequence[Call], known: Known) -> None:
    (call,) = calls
    (tensor,) = call.inputs
    splits = [_splits(facts, engine.size) for facts in known if facts is not None]
    sent, received = splits[engine.rank], [each[engine.rank] for each in splits]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    rows = tensor[: sum(sent)].contiguous()
    dist.all_to_all_single(output, rows, received, sent, engine.group)
    call.outputs = [output, torch.tensor(received, dtype=torch.int32)]


def _nothing(engine: Engine, calls: Sequence[Call], known: Known) -> None:
    """All ranks have begun it: that is all."""
    calls[0].outputs = None


# --- what ranks must have alike ------------------------------------------------------------------


def _alike(*names: str) -> Callable[[Facts], Facts]:
    """Return what finds these facts."""
    return lambda facts: {name: facts[name] for name in names}


def _all_but_rows(facts: Facts) -> Facts:
    """Return dtypes, device, and shapes without the first dimension."""
    shapes = {"shapes[1:]": [shape[1:] for shape in facts["shapes"]]}
    dimensions = {"dimensions": [len(shape) for shape in facts["shapes"]]}
    return _alike("dtypes", "device")(facts) | dimensions | shapes


# --- what a rank can see by itself ----------------------------------------------------------------


def _right(facts: Facts, size: int) -> str | None:
    return None


def _has_rows(facts: Facts, size: int) -> str | None:
    if not all(facts["shapes"]):
        return "tensor: expected one dimension or more, got a scalar"
    return None


def _can_be_reduced(facts: Facts, size: int) -> str | None:
    if facts["op"] == Average and "torch.bool" in facts["dtypes"]:
        return "tensor: Average: expected numbers, got torch.bool"
    if facts["op"] != Adasum:
        return None
    if size & (size - 1):
        return f"op: Adasum: expected a number of ranks that is a power of 2, got {size}"
    if any("float" not in dtype for dtype in facts["dtypes"]):
        return f"tensor: Adasum: expected floats, got {', '.join(facts['dtypes'])}"
    return None


def _can_be_split(facts: Facts, size: int) -> str | None:
    if wrong := _has_rows(facts, size):
        return wrong
    rows, splits = _rows(facts, 0), facts["splits"]
    if splits is None:
        if rows % size:
            return f"tensor: expected rows that {size} ranks share evenly, or splits; got {rows}"
    elif len(splits) != size or min(splits) < 0 or sum(splits) > rows:
        return f"splits: expected {size} numbers of rows, {rows} in all or fewer, got {splits}"
    return None


@dataclass(frozen=True)
class Kind:
    """A kind of operations.

    perform: carries out the calls of this rank, more than one if they go together.
    common: what all ranks must say alike, by name.
    check: what is wrong with one rank's part, by itself, on ``size`` ranks; None if nothing is.
    together: requests with the same such value go together; None: never.
    with_joined: whether it goes on without ranks that have joined.
    """

    perform: Callable[[Engine, Sequence[Call], Known], None]
    common: Callable[[Facts], Facts]
    check: Callable[[Facts, int], str | None] = _right
    together: Callable[[Facts], Any] = lambda facts: None
    with_joined: Callable[[Facts], bool] = lambda facts: False


def _fusion(facts: Facts) -> Any:
    dtypes = set(facts["dtypes"])
    if len(dtypes) != 1:
        return None
    return [*dtypes, *(facts[name] for name in ("device", "op", "prescale", "postscale"))]


_SCALED = ("op", "prescale", "postscale")

KINDS = {
    "allreduce": Kind(
        _all_reduce,
        _alike("dtypes", "device", "shapes", *_SCALED),
        _can_be_reduced,
        _fusion,
        lambda facts: facts["op"] in (Average, Sum),
    ),
    "allgather": Kind(_all_gather, _all_but_rows, _has_rows),
    "broadcast": Kind(_broadcast, _alike("dtypes", "device", "shapes", "root")),
    "alltoall": Kind(_all_to_all, _all_but_rows, _can_be_split),
    "reducescatter": Kind(
        _reduce_scatter,
        _alike("dtypes", "device", "shapes", *_SCALED),
        lambda facts, size: _has_rows(facts, size) or _can_be_reduced(facts, size),
    ),
    "barrier": Kind(_nothing, _alike(), with_joined=lambda facts: True),
}
