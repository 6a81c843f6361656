"""Plans and implementations: how the calls of one kind run in one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpicoll.arrays.views import Buffer, DeviceView, View
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.reproducible import EXACT, needed
from mpicoll.core.signature import encode_kind
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Primitive


class Blocks(NamedTuple):
    """Counts of the blocks sent to and received from each rank, where they may differ."""

    sends: Sequence[int]
    receives: Sequence[int]


#: How much a call moves: the count of one block if all blocks are equal, else all counts.
Extent = int | Blocks

#: One side of a call as implementations get it, contiguous: on the host a buffer, or a list of
#: buffers for an operation with one array per rank; on a device a DeviceView.
Contiguous: TypeAlias = "Buffer | list[Buffer] | DeviceView"

#: Runs a call: send, recv, extent, rank of the root in the group. Each function declares the part
#: of Contiguous, None and Extent that its operation uses.
Run = Callable[[Any, Any, Any, int], None]

#: Runs a call on views of any memory layout.
RunOnViews = Callable[["View | None", "View | None", Extent, int], None]


class NativeCall(NamedTuple):
    """A function of the C library that the native fast path calls (``kernels/src/calls.c``)."""

    #: Keeps the memory of ``argument`` alive. The fast path calls its method ``finish(result, send,
    #: recv, extent)`` if the function returns a result other than 1: the method completes the call
    #: or raises its error.
    owner: Any
    shape: int  # the argument list of the function, a constant of ``mpicoll.kernels.calls``
    #: Addresses of the function and of its first argument.
    function: int
    argument: int
    #: Block counts that it serves; ``end_count`` is excluded.
    min_count: int = 0
    end_count: int = 1 << 62
    #: Function, its first argument, and timeout in nanoseconds. The function returns whether all
    #: ranks have entered an async call, which then runs inline. (0, 0, 0): Python runs async calls.
    inline_check: tuple[int, int, int] = (0, 0, 0)


class SegmentTable(NamedTuple):
    """Inputs or outputs of several calls that run as one: each block has one segment per call."""

    addresses: Any  # of the segments, block by block, as an array of ``np.uintp``
    ends: Any  # end of each segment within a block in elements, as an array of ``np.uintp``


class Implementation:
    """The functions of a route for one kind of call in one group.

    A route that supports more than ``run`` overrides further methods.

    run: runs one call on contiguous buffers. ``send`` is None if the call is in place or this rank
         sends nothing; ``recv`` is None if this rank receives nothing.
    native_calls, fused: results of the methods, by default.
    """

    run: Run
    _native_calls: Sequence[NativeCall] = ()
    _fused: Run | None = None

    def __init__(
        self, run: Run, native_calls: Sequence[NativeCall] = (), fused: Run | None = None
    ) -> None:
        self.run, self._native_calls, self._fused = run, native_calls, fused

    def native_calls(self) -> Sequence[NativeCall] | None:
        """Return the functions for the native fast path; None if they are not known yet."""
        return self._native_calls

    def fused(self, count: int) -> Run | None:
        """Return a function for calls on SegmentTables with blocks of at most ``count`` elements,
        None if there is none. Called inside a call, in the order of the group's calls.
        """
        return self._fused

    def notify_failure(self, error: Exception, context: Any, extent: Extent) -> None:
        """Notify ranks that wait for this one that it failed in a call on a device."""

    def only_enqueues(self, extent: Extent | None = None) -> bool:
        """Return whether a call of this extent, or of any, only enqueues work on device streams,
        without waiting for the host of another rank. The same on all ranks.
        """
        return False

    @property
    def capturable(self) -> bool:
        """Whether calls may be captured into a CUDA graph, as far as is known."""
        return False


class Wrapper(Implementation):
    """An implementation with the native functions of ``inner`` and another ``run``."""

    def __init__(self, inner: Implementation, run: Run) -> None:
        super().__init__(run)
        self._inner = inner

    def native_calls(self) -> Sequence[NativeCall] | None:
        """Return those of the inner implementation."""
        return self._inner.native_calls()

    def fused(self, count: int) -> Run | None:
        """Return that of the inner implementation."""
        return self._inner.fused(count)


class CallKind(NamedTuple):
    """The properties of calls that share one implementation."""

    primitive: Primitive
    group: ProcessGroup
    op: ReduceOp | None
    dtype: DType  # None for a barrier, which reads no dtype

    @property
    def combined(self) -> range:
        """Return the ranks whose elements are combined into this rank's result, if it has one."""
        return self.primitive.combined(self.group.rank(), self.group.size())

    @property
    def level(self) -> str | None:
        """Return the level of reproducibility that the calls must keep."""
        if self.op is None:
            return None
        return needed(self.group.reproducible, self.op, self.dtype, self.group.size())

    @property
    def exact(self) -> bool:
        """Return whether sums must be correctly rounded."""
        return self.level == EXACT


class Plan:
    """The plan that all calls of one kind in one group share.

    name, primitive: the operation and its row in the table.
    group:     the group that calls.
    op:        the reduce operation; None if nothing is combined.
    dtype:     the dtype of the elements; None if there are none.
    on_device: the arrays are on a device.
    implementation: runs calls on contiguous buffers.
    run:       runs calls on views: the implementation, with packing and unpacking around it.
    kind:      the signature without the root; see mpicoll.core.signature.
    even:      block counts are equal on all ranks and part of the signature.
    compares:  in a group that compares every call, the implementation does it.
    fast_path_registered: the group has the native calls that are known, or there are none.
    native_calls: the native calls that the group has.
    """

    __slots__ = (
        "compares", "dtype", "even", "fast_path_registered", "group", "implementation", "kind",
        "name", "native_calls", "on_device", "op", "primitive", "run",
    )  # fmt: skip

    def __init__(
        self, kind: CallKind, on_device: bool, implementation: Implementation, run: RunOnViews
    ) -> None:
        self.primitive, self.group, self.op, self.dtype = kind
        self.name = self.primitive.name
        self.on_device = on_device
        self.implementation = implementation
        self.run = run
        self.kind = encode_kind(self.primitive, self.dtype, self.op, on_device)
        self.even = self.primitive.even
        self.compares = not on_device and self.dtype is not None
        self.fast_path_registered = False
        self.native_calls: list[NativeCall] = []


class Task(NamedTuple):
    """A task that runs in the order of a group's collectives, in the form of a Plan."""

    group: ProcessGroup
    name: str
    kind: int
    even: bool = False
    compares: bool = False
    implementation: None = None


def agreed_sizes(primitive: Primitive, extent: Extent) -> int | tuple[int, ...]:
    """Return the part of an extent that all ranks must share: a count, or the counts of all blocks.

    0 if no more than two ranks know any of the sizes.
    """
    if not primitive.even:
        return 0
    if isinstance(extent, int):
        return extent
    return tuple(extent.sends if primitive.many_in else extent.receives)
