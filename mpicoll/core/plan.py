"""Plans, which all calls of one kind in one group share, and the types of implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mpicoll.core.reproducible import EXACT, needed
from mpicoll.core.signature import encode_kind
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Primitive

if TYPE_CHECKING:
    from mpicoll.arrays.views import Buffer, DeviceView, View
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "Blocks",
    "CallKind",
    "Extent",
    "Implementation",
    "Plan",
    "Run",
    "Short",
    "Table",
    "Task",
    "add_capturable",
    "add_enqueuing",
    "add_fused",
    "add_leave",
    "add_short",
    "agreed_sizes",
    "can_be_captured",
    "find_fused",
    "find_short",
    "only_enqueues",
    "take_leave",
]  # fmt: skip


class Blocks(NamedTuple):
    """Counts for and from each rank, where they may differ from rank to rank."""

    sends: Sequence[int]
    receives: Sequence[int]


#: How much a call moves: the count of a block where all blocks are alike, else those of each rank.
Extent = int | Blocks

#: One side of a call as implementations get it, contiguous: on the host a buffer, or a list of such
#: if the arrays of a list stay where they are; on a device a DeviceView.
Contiguous: TypeAlias = "Buffer | list[Buffer] | DeviceView"

#: An implementation: of the send and the receive side, the extent, the root's rank in the group.
#: Send is None if the call is in place or this rank sends nothing; recv is None if it receives
#: nothing. Any, for each declares the part of Contiguous, None and Extent that its own calls have.
Implementation = Callable[[Any, Any, Any, int], None]

#: The same for views of arrays, however these lie in memory.
Run = Callable[["View | None", "View | None", Extent, int], None]


class Short(NamedTuple):
    """How calls are carried out without Python, see ``kernels/src/calls.c``.

    owner:    keeps the memory that ``argument`` is in; its ``finish(result, send, recv, extent)``
              ends a call of which the function has returned another result than 1, or raises why
              it failed. The sides are as an implementation gets them.
    shape:    which arguments the function takes, one of ``mpicoll.kernels.calls``.
    function, argument: addresses, of a function of the C library and its first argument.
    fewest, end: counts of a block that this is for.
    ask:      a function that asks whether all ranks make an asynchronous call now, so that it is
              best carried out at once; its first argument, and the nanoseconds that it waits for
              them. Without one asynchronous calls are left to Python.
    """

    owner: Any
    shape: int
    function: int
    argument: int
    fewest: int = 0
    end: int = 1 << 62
    ask: tuple[int, int, int] = (0, 0, 0)


def add_short(route: Implementation, find: Callable[[], Sequence[Short] | None]) -> Implementation:
    """Return an implementation with short ways; ``find`` returns them, None if it is too early."""
    route.find_short = find  # type: ignore[attr-defined]
    return route


def find_short(route: Implementation) -> Sequence[Short] | None:
    """Return the short ways of an implementation; None if it is too early to know them."""
    find: Callable[[], Sequence[Short] | None] | None = getattr(route, "find_short", None)
    return () if find is None else find()


class Table(NamedTuple):
    """One side of several calls that are made as one: a block of it is one of each call, in turn.

    addresses: of each block's parts, block by block: an array of ``np.uintp``.
    ends:      of each part in the block, in elements: another one, the same on both sides.
    """

    addresses: Any
    ends: Any


def add_fused(
    route: Implementation, find: Callable[[int], Implementation | None]
) -> Implementation:
    """Return an implementation that may have another one for tables: ``find`` returns it for a
    count of elements of each block, None if there is none.
    """
    route.find_fused = find  # type: ignore[attr-defined]
    return route


def find_fused(route: Implementation, count: int) -> Implementation | None:
    """Return the implementation for tables; inside a call, in order of the group's calls."""
    find: Callable[[int], Implementation | None] | None = getattr(route, "find_fused", None)
    return None if find is None else find(count)


def add_leave(
    route: Implementation, leave: Callable[[Exception, Any, Extent], None]
) -> Implementation:
    """Return an implementation whose other ranks learn of one that fails on its way to it.

    leave: tells them, unless they know; gets the error, the device context and the extent.
    """
    route.leave = leave  # type: ignore[attr-defined]
    return route


def take_leave(route: Implementation, error: Exception, context: Any, extent: Extent) -> None:
    """Let the other ranks, who may wait for this one in an implementation, leave the call, too."""
    leave: Callable[[Exception, Any, Extent], None] | None = getattr(route, "leave", None)
    if leave is not None:
        leave(error, context, extent)


def add_enqueuing(route: Implementation, find: Callable[[Extent | None], bool]) -> Implementation:
    """Return an implementation of which ``find`` returns whether it only puts work into streams, as
    all ranks know it: in a call of an extent, or in all.
    """
    route.only_enqueues = find  # type: ignore[attr-defined]
    return route


def only_enqueues(route: Implementation | None, extent: Extent | None = None) -> bool:
    """Return whether an implementation, as known so far, waits for no other rank's host: in a call
    of an extent, or in all.
    """
    find: Callable[[Extent | None], bool] | None = getattr(route, "only_enqueues", None)
    return find is not None and find(extent)


def add_capturable(route: Implementation, find: Callable[[], bool]) -> Implementation:
    """Return an implementation of which ``find`` returns whether a graph may have it."""
    route.can_be_captured = find  # type: ignore[attr-defined]
    return route


def can_be_captured(route: Implementation) -> bool:
    """Return whether an implementation, as known so far, may be captured into a CUDA graph."""
    find: Callable[[], bool] | None = getattr(route, "can_be_captured", None)
    return find is not None and find()


class CallKind(NamedTuple):
    """A kind of call, with an implementation. op and dtype are None if the primitive has none."""

    primitive: Primitive
    group: ProcessGroup
    op: ReduceOp | None
    dtype: DType | None

    @property
    def combined(self) -> range:
        """Return the ranks whose elements are combined on this rank, if it gets a result."""
        return self.primitive.combined(self.group.rank(), self.group.size())

    @property
    def level(self) -> str | None:
        """Return the level of reproducibility that such calls have to keep."""
        if self.op is None or self.dtype is None:
            return None
        return needed(self.group.reproducible, self.op, self.dtype, self.group.size())

    @property
    def exact(self) -> bool:
        """Return whether sums are exact ones."""
        return self.level == EXACT


class Plan:
    """The plan of all calls of one kind in one group.

    primitive: the row of the table, of that name.
    group:     the group that calls.
    op:        the reduce operation; None if nothing is combined.
    dtype:     the dtype of the elements; None if there are none.
    on_device: they are on a CUDA device, each rank's own.
    route:     the implementation, on contiguous buffers.
    run:       the same on views: the route, with packing, cutting and unpacking around it.
    kind:      the signature of such calls, without the root; see mpicoll.core.signature.
    even:      the count of a block is the same on all ranks, and part of the signature.
    compares:  where each call of the group is compared by itself, the route does it.
    learnt:    the group knows whether, and how, such calls can be carried out without Python.
    """

    __slots__ = (
        "compares", "dtype", "even", "group", "kind", "learnt", "name", "on_device", "op",
        "primitive", "route", "run",
    )  # fmt: skip

    def __init__(self, kind: CallKind, on_device: bool, route: Implementation, run: Run) -> None:
        self.primitive, self.group, self.op, self.dtype = kind
        self.name = self.primitive.name
        self.on_device = on_device
        self.route = route
        self.run = run
        self.kind = encode_kind(self.primitive, self.dtype, self.op, 0, on_device)
        self.even = self.primitive.even
        self.compares = not on_device and self.dtype is not None
        self.learnt = False


class Task(NamedTuple):
    """A task among a group's collectives that is no primitive, in the form of a Plan."""

    group: ProcessGroup
    name: str
    kind: int
    even: bool = False
    compares: bool = False
    route: None = None


def agreed_sizes(primitive: Primitive, extent: Extent) -> int | tuple[int, ...]:
    """Return what all ranks must have alike of an extent: a count, or the counts of all blocks.

    0 if no size is known to more than two ranks.
    """
    if not primitive.even:
        return 0
    if isinstance(extent, int):
        return extent
    return tuple(extent.sends if primitive.many_in else extent.receives)
