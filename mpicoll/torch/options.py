"""Options, operations and lists of tensors, as torch passes them.

Most methods of a ProcessGroup take either an Options object or its values:
``pg.broadcast([tensor], opts)`` and ``pg.broadcast(tensor, root)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

import torch.distributed as c10d
from torch import Tensor
from torch._C._distributed_c10d import Backend

from mpicoll.core import reproducible as levels
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import parse_timeout
from mpicoll.dtypes import OPERATIONS, ReduceOp
from mpicoll.errors import ArgumentError
from mpicoll.torch import NAME

# --- options of a group -------------------------------------------------------------------------

#: A hundred years in seconds: C++ counts milliseconds, and cannot express an infinite timeout.
MAX_TIMEOUT_S = 3e9


class Options(Backend.Options):  # type: ignore[misc]
    """The ``pg_options`` of ``init_process_group`` and ``new_group``, the same on all ranks.

    reproducible: level of reproducible reductions. None is the level of the default group, which
        defaults to MPICOLL_REPRODUCIBLE.
        "order": the same bits for every size, route and placement on nodes.
        "exact": also for every order and number of ranks, for sums and averages.
    wire: "float32" or "bfloat16", as in ``mpicoll.init_process_group``, with MPICOLL_WIRE.

    Raises ArgumentError (a ValueError) for another value.
    """

    def __init__(self, reproducible: str | None = None, wire: str | None = None) -> None:
        super().__init__(NAME)
        options = levels.parse(reproducible, wire, levels.DEFAULTS, "Options")
        self.reproducible, self.wire = options


class GroupOptions(Backend.Options):  # type: ignore[misc]
    """As Options, with the backend, the ranks, and the timeout of a group, which can be set."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.backend, _get_timeout(group))
        self._group = group
        self.reproducible, self.wire = group.reductions
        self.global_ranks_in_group = list(group.ranks)
        self.group_name = group.group_name

    @property
    def _timeout(self) -> timedelta:
        """The group's timeout; setting it applies to all later calls."""
        return _get_timeout(self._group)

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.timeout = parse_timeout(timeout, None, "options._timeout")


def _get_timeout(group: ProcessGroup) -> timedelta:
    limit = group.timeout
    return timedelta(seconds=MAX_TIMEOUT_S if limit is None else min(limit, MAX_TIMEOUT_S))


def get_seconds(options: Backend.Options) -> float:
    """Return the timeout in seconds that C++ has set in the options of a new group."""
    # Not options._timeout: GroupOptions returns the timeout of the parent group.
    timeout: timedelta = Backend.Options._timeout.__get__(options)
    return timeout.total_seconds()


# --- arguments of a call --------------------------------------------------------------------------

SomeOptions = TypeVar("SomeOptions")

Tensors: TypeAlias = Sequence[Tensor]
#: An operation as torch passes it.
Operation: TypeAlias = "c10d.ReduceOp | c10d.ReduceOp.RedOpType"

#: The core's operation for each one of torch. A ReduceOp and its RedOpType hash to their number.
#: Looking up the number is ten times faster than comparing torch enums.
OPERATION_BY_HASH = {hash(getattr(c10d.ReduceOp.RedOpType, row.name)): row for row in OPERATIONS}


class CallOptions(Protocol):
    """Attributes that the options of all calls have."""

    asyncOp: bool
    timeout: timedelta


class DefaultOptions:
    """Options that a caller passed as separate arguments or omitted."""

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
    """Return the core's operation for a ReduceOp or RedOpType of torch."""
    row = OPERATION_BY_HASH[hash(op)]
    # The state is (operation, factor). The factor is an attribute only from torch 2.13 on.
    return row if row is not ReduceOp.PREMUL_SUM else row(op.__getstate__()[1])


def fill_options(
    kind: type[SomeOptions],
    opts: SomeOptions | Operation | int | None,
    first: str,
    **arguments: Any,
) -> SomeOptions | DefaultOptions:
    """Return the options object, or one made of separate arguments.

    first: name of the argument that may be passed as ``opts``.
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
    """Return the tensor of a one-element list, or the tensor itself.

    opts: its rootTensor, if any, must be 0.
    """
    if isinstance(tensors, (list, tuple)):
        if len(tensors) != 1:
            raise ArgumentError(
                f"{name}: requires a single-element tensor list (one device per process), got "
                f"{len(tensors)}; call {name} for each, or its coalesced form"
            )
        (tensors,) = tensors
    which = getattr(opts, "rootTensor", 0)
    if which != 0:
        raise ArgumentError(f"{name}: invalid root tensor: {which}; rootTensor must be 0")
    return tensors


def unwrap_list(name: str, lists: Tensors | Sequence[Tensors]) -> Tensors:
    """Return the list of tensors of a one-element list of lists, or the list itself."""
    if lists and isinstance(lists[0], (list, tuple)):
        return unwrap_tensor(name, lists)  # type: ignore[no-any-return]
    return lists
