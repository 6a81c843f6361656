"""Arguments of torch's ProcessGroup methods: options, operations and lists of tensors.

Most methods take either an Options object or what would be in it:
``pg.broadcast([tensor], opts)`` and ``pg.broadcast(tensor, root)``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch.distributed as c10d

from mpicoll.dtypes import OPERATIONS, ReduceOp
from mpicoll.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "OPERATION_BY_HASH", "CallOptions", "DefaultOptions", "Operation", "Tensors", "convert_op",
    "fill_options", "fill_timeout", "unwrap_list", "unwrap_tensor",
]  # fmt: skip

SomeOptions = TypeVar("SomeOptions")

Tensors: TypeAlias = "Sequence[Tensor]"
#: An operation as torch passes it.
Operation: TypeAlias = "c10d.ReduceOp | c10d.ReduceOp.RedOpType"

#: The core's operation of each of torch's. A ReduceOp and its RedOpType hash to their number, and
#: looking a number up takes a tenth of the time that comparing two of torch's enums takes.
OPERATION_BY_HASH = {hash(getattr(c10d.ReduceOp.RedOpType, row.name)): row for row in OPERATIONS}


class CallOptions(Protocol):
    """What the options of all calls have: torch's, or the defaults."""

    asyncOp: bool
    timeout: timedelta


class DefaultOptions:
    """Options that a caller passed as single arguments, or left out."""

    __slots__ = ("asyncOp", "reduceOp", "rootRank", "timeout")

    def __init__(
        self,
        *,
        op: Operation = c10d.ReduceOp.SUM,
        root: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        self.asyncOp = True
        self.reduceOp = op
        self.rootRank = root
        self.timeout = timedelta(milliseconds=-1) if timeout is None else timeout


def convert_op(op: Operation) -> ReduceOp:
    """Return the core's operation for torch's ReduceOp, or for its RedOpType."""
    row = OPERATION_BY_HASH[hash(op)]
    # Its state is the operation and the factor; an attribute for that there is from torch 2.13 on.
    return row if row is not ReduceOp.PREMUL_SUM else row(op.__getstate__()[1])


def fill_options(
    kind: type[SomeOptions],
    opts: SomeOptions | Operation | int | None,
    first: str,
    **arguments: Any,
) -> SomeOptions | DefaultOptions:
    """Return the options object, or one filled from single arguments.

    first: the argument that may stand in the place of the options.
    """
    if isinstance(opts, kind):
        return opts
    return DefaultOptions(**(arguments if opts is None else arguments | {first: opts}))


def fill_timeout(
    opts: SomeOptions | timedelta | None, timeout: timedelta | None = None
) -> SomeOptions | DefaultOptions:
    """Return the options object, or one filled with a timeout."""
    if opts is None or isinstance(opts, timedelta):
        return DefaultOptions(timeout=timeout if opts is None else opts)
    return opts


def unwrap_tensor(name: str, tensors: Tensor | Tensors, opts: object = None) -> Tensor:
    """Return the tensor of a list of one, or the tensor itself.

    opts: its rootTensor, if it has one, has to be the first.
    """
    if isinstance(tensors, (list, tuple)):
        if len(tensors) != 1:
            raise ArgumentError(
                f"{name}: requires a single-element tensor list (one device a process), got "
                f"{len(tensors)}; call {name} for each, or its coalesced form"
            )
        (tensors,) = tensors
    which = getattr(opts, "rootTensor", 0)
    if which != 0:
        raise ArgumentError(f"{name}: invalid root tensor: {which}; there is one, number 0")
    return tensors


def unwrap_list(name: str, lists: Tensors | Sequence[Tensors]) -> Tensors:
    """Return the list of tensors of a list of one list, or the list itself."""
    if lists and isinstance(lists[0], (list, tuple)):
        return unwrap_tensor(name, lists)  # type: ignore[no-any-return]
    return lists
