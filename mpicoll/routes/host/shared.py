"""Collectives through a shared-memory segment, for groups whose ranks are all on one node.

The algorithm, in chunks that stay in the processors' caches, is in ``kernels/src/shared.c``.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll import settings
from mpicoll.arrays.views import Buffer
from mpicoll.core.plan import (
    Blocks,
    CallKind,
    Contiguous,
    Extent,
    Implementation,
    NativeCall,
    Run,
    SegmentTable,
)
from mpicoll.core.reproducible import LEVELS
from mpicoll.core.signature import describe, encode_kind, is_comparison, is_list, parts_per_element
from mpicoll.dtypes import Kind, ReduceOp
from mpicoll.errors import MismatchError
from mpicoll.failures import timeouts
from mpicoll.failures.consistency import describe_by_rank
from mpicoll.kernels.calls import (
    ALL_REDUCE,
    BLOCKS,
    COMPARE,
    FUSED,
    LISTS,
    take_interruption,
)
from mpicoll.kernels.library import kernels
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.host import clusters
from mpicoll.routes.host.shared_segment import Segment, exchange_words, share
from mpicoll.routes.route import (
    EXCHANGES,
    MOVES,
    PREFIXES,
    REDUCTIONS,
    Needs,
    Policy,
    Route,
    Serves,
    has_loop,
)
from mpicoll.routes.transfers import Get, Transfer, addresses, cut, misfit

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["ROUTE", "Shared", "create", "get_or_create"]

#: Maximum size in bytes of a slot, which is the data of a round, and of all ranks' slots.
SLOT, MAX_SEGMENT_BYTES = 256 * 1024, 48 * 1024 * 1024
#: Maximum number of ranks that share memory. shared.c stores a rank in 8 bits.
MAX_RANKS = 256
#: Up to this number of ranks, every rank polls every other rank. Above it, ranks use a
#: dissemination barrier with log2(n) steps.
FLAT_MAX_RANKS = 8
#: Maximum size in bytes of the other ranks' messages, in total, for which every rank combines all
#: elements: one wait instead of two.
ONE_SHOT_MAX_BYTES = 16 * 1024

#: Minimum size in bytes of an all_reduce that combines the elements cluster by cluster, so that
#: each crosses between two clusters once. It costs one more wait per cluster (docs/model.md).
CLUSTERED_MIN_BYTES = 1024 * 1024

#: Number of polls before a waiting rank sleeps, at about 40 to 140 cycles each; the second number
#: applies if there are fewer processors than runnable threads.
SPIN_COUNT, CROWDED_SPIN_COUNT = 2000, 50
#: Seconds to spin for the other ranks before handing an async call to the progress thread.
INLINE_WAIT_S = 1e-3

_SLOTS, _FAILED, _BITS = 4, -1, 8  # as in shared.c
_DIFFERED, _MOVED, _UNMOVED, _MISFIT = range(4)  # results of all_to_all, as in shared.c


class Shared:
    """The shared-memory segment of a group.

    kernels: the C library.
    pointer: address of its description of the segment.
    slot:    size of a slot in bytes.
    """

    def __init__(self, group: ProcessGroup, segment: Segment, slot: int) -> None:
        assert kernels is not None
        self._group = group
        self.kernels = kernels
        self._memory = np.frombuffer(segment.memory, np.uint8)  # keeps the mapping alive
        n = group.size()
        self._segment = kernels.Segment(self._memory.ctypes.data, slot, n, group.rank())
        self.pointer = ctypes.addressof(self._segment)
        self.slot = slot
        self._kinds: dict[Any, Any] = {}  # the C library has their addresses
        self._crowded = segment.processors < n
        self._crowded_beside = segment.processors < 2 * n
        # If ranks share processors, each step of a dissemination barrier may cost a time slice.
        self._segment.flat_max_ranks = n if self._crowded else FLAT_MAX_RANKS
        self._spin_count = self._segment.spin_count = (
            CROWDED_SPIN_COUNT if self._crowded else SPIN_COUNT
        )
        self.clusters = self._find_clusters(segment)
        firsts = [0, *itertools.accumulate(self.clusters)]
        self._cluster_starts = (ctypes.c_uint32 * len(firsts))(*firsts)
        self._segment.cluster_starts = ctypes.addressof(self._cluster_starts)
        self._segment.cluster_count = len(self.clusters)
        self._segment.cluster = bisect.bisect(firsts, group.rank()) - 1

    def _find_clusters(self, segment: Segment) -> list[int]:
        """Return the number of ranks of each cluster. All ranks call."""
        comm, latencies = self._group.tested, np.zeros(_BITS, np.uint32)
        if not self._crowded:
            comm.Barrier()  # the ranks measure at the same time
            self.kernels.shared_measure(self.pointer, latencies.ctypes.data)
        domain = clusters.find_domain(segment.own)
        seen = clusters.Seen(settings.CLUSTERS.value(), domain, latencies.tolist())
        everybody = [clusters.Seen(*each) for each in exchange_words(comm, [*seen])]
        return clusters.choose(everybody, self._crowded, self.kernels.far_ns())

    def build(self, kind: CallKind) -> Implementation:
        """Return the implementation for calls of one kind.

        It raises MismatchError on all ranks if primitive, count, dtype, reduce operation or root
        differ.
        """
        build = _FUNCTIONS[kind.primitive.name]
        return build(self, kind)

    def _build_all_reduce(self, kind: CallKind) -> Implementation:
        at, group, address = ctypes.addressof(self.described(kind)), self._group, MPI.Get_address
        all_reduce = self.kernels.shared_all_reduce

        def shared_all_reduce(send: None, recv: Buffer, count: int, root: int) -> None:
            run = all_reduce if group.worker is None else partial(self._run, all_reduce)
            if not run(at, address(recv), count, group.sequence):
                raise self.failure()

        return self._implementation(kind, shared_all_reduce, ALL_REDUCE, all_reduce)

    def _build_blocks(self, kind: CallKind) -> Implementation:
        at, group, address = ctypes.addressof(self.described(kind)), self._group, MPI.Get_address
        blocks, lists = self.kernels.shared_blocks, self.kernels.shared_lists

        def shared_blocks(
            send: Buffer | list[Buffer] | None, recv: Buffer | list[Buffer] | None, count: int,
            root: int,
        ) -> None:  # fmt: skip
            if list in (send.__class__, recv.__class__):
                out, into = _each(send, count), _each(recv, count)
                function, there, here = lists, out.ctypes.data, into.ctypes.data
            else:
                here = None if recv is None else address(recv)
                there = here if send is None else address(send)
                function = blocks
            run = function if group.worker is None else partial(self._run, function)
            if not run(at, there, here, count, root, group.sequence):
                raise self.failure()

        if kind.primitive.listed:
            return self._implementation(kind, shared_blocks, LISTS, lists)
        return self._implementation(kind, shared_blocks, BLOCKS, blocks)

    def _implementation(
        self, kind: CallKind, run: Run, shape: int, function: Callable[..., Any]
    ) -> Implementation:
        """Return an implementation with its native calls, also on segment tables for operations
        without a root.
        """
        at = ctypes.addressof(self.described(kind))
        native_calls = [self.native_call(shape, function, at)]
        fused = None
        if not kind.primitive.root:
            fused = self._build_fused(at)
            native_calls.append(self.native_call(FUSED, self.kernels.shared_fused, at))
        return _Native(run, native_calls, fused)

    def _build_fused(self, at: int) -> Run:
        function = self.kernels.shared_fused

        def shared_fused(
            send: SegmentTable | None, recv: SegmentTable, count: int, root: int
        ) -> None:
            ends = recv.ends.copy()  # the C library converts them in place
            sent = None if send is None else send.addresses.ctypes.data
            self.call(
                function, at, sent, recv.addresses.ctypes.data, ends.ctypes.data, len(ends), 0
            )

        return shared_fused

    def native_call(self, shape: int, function: Any, argument: int) -> NativeCall:
        """Return the native call of a function of the C library."""
        check = (
            _address(self.kernels.shared_all_entered),
            self.pointer,
            round(1e9 * INLINE_WAIT_S),
        )
        call = NativeCall(self, shape, _address(function), argument)
        return (
            call._replace(inline_check=check) if self._crowded_beside and shape != COMPARE else call
        )

    @property
    def native_comparison(self) -> NativeCall:
        """Return the native call that compares a call without arrays."""
        return self.native_call(COMPARE, self.kernels.shared_compare, self.pointer)

    def build_exchange(self, kind: CallKind, large: Implementation | None = None) -> Implementation:
        """Return the implementation of all_to_all. Its first round sends the sizes of all blocks,
        and the blocks if they fit.

        large: implementation of larger calls, instead of further rounds.
        """
        return _Exchange(self, kind, large)

    def finish(self, result: int, send: Any, recv: Any, extent: Extent) -> None:
        """Raise the error of a call that failed on the native fast path; see NativeCall."""
        raise self.failure()

    def exchange(self, kind: CallKind, transfer: Transfer, root: int) -> None:
        """Run this rank's part of a call whose blocks may differ in size; see ``build``."""
        group, described = self._group, self.described(kind)
        parts = described.numbers_per_element
        puts = np.array([(at, count * parts) for at, count in transfer.puts], _PUT)
        gets = np.array(
            [(rank, place, at, count * parts) for rank, place, at, count in transfer.gets], _GET
        )
        done = self._run(
            self.kernels.shared_exchange, ctypes.addressof(described), transfer.places,
            transfer.most * parts, puts.ctypes.data, len(puts), gets.ctypes.data, len(gets), root,
            group.sequence, transfer.total * parts,
        )  # fmt: skip
        if not done:
            raise self.failure()

    def exchange_sizes(self, kind: CallKind, sends: Any, receives: Any) -> tuple[Any, int | None]:
        """Exchange the sizes of blocks; see ``transfers``."""
        theirs = np.empty_like(sends)
        most = self._run(
            self.kernels.shared_sizes, self.pointer, self.described(kind).signature,
            sends.ctypes.data, receives.ctypes.data, theirs.ctypes.data, self._group.sequence,
        )  # fmt: skip
        if most == _FAILED:
            raise self.failure()
        return theirs, most if most >= 0 else None

    def call(self, function: Callable[..., int], *arguments: Any) -> int:
        """Run the current call by a function of the C library, whose last argument is the call
        number; return its result.

        A result of 0 raises MismatchError on all ranks, or the group's error if it has failed.
        """
        result: int = self._run(function, *arguments, self._group.sequence)
        if not result:
            raise self.failure()
        return result

    def described(self, kind: CallKind) -> Any:
        """Return the C library's description of a kind of call."""
        key = kind.primitive, kind.dtype, kind.op
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._describe(kind)
        return found

    def _describe(self, kind: CallKind) -> Any:
        primitive, _, op, dtype = kind
        assert dtype is not None
        by = None if op is None else find_loop(op, dtype, kind.exact)
        parts = 1 if by is None else by.elements
        rounds_once = kind.exact or dtype.kind is Kind.NARROW_FLOAT
        return self.kernels.CallPlan(
            shared=self.pointer,
            signature=encode_kind(primitive, dtype, op, 0),
            divisor=max(1, len(kind.combined)) if op is ReduceOp.AVG else 1,
            size=dtype.itemsize // parts,
            numbers_per_element=parts,
            one_shot_max_count=ONE_SHOT_MAX_BYTES
            // max(1, self._segment.n - 1)
            * parts
            // dtype.itemsize,
            format=-1 if by is None else self.kernels.format(by.format.encode()),
            operation=0 if by is None else by.operation,
            many_blocks=primitive.many_in,
            has_src=primitive.root == "src",
            has_dst=primitive.root == "dst",
            prefix=PREFIXES.index(primitive.name) + 1 if primitive.name in PREFIXES else 0,
            in_place=not (primitive.input or primitive.root),
            clusters_min_count=-1 if rounds_once else CLUSTERED_MIN_BYTES * parts // dtype.itemsize,
        )

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the C library. On the progress thread of a crowded node, spin less, so
        that computing threads get the processor.
        """
        worker = self._group.worker
        if worker is None or not (worker.is_current and self._crowded_beside):
            return function(*arguments)
        self._segment.spin_count = CROWDED_SPIN_COUNT
        try:
            return function(*arguments)
        finally:
            self._segment.spin_count = self._spin_count

    def should_run_inline(self, kind: int, count: int) -> bool:
        """Return True if an async call should run inline: every rank has entered it, and the
        progress thread has no free processor.

        kind: from ``encode_kind``; count: number of elements, or another number to compare.
        """
        if not self._crowded_beside:
            return False
        number = (self._group.sequence + 1) & 0xFFFFFFFF
        count *= _parts(kind)
        wait_ns = round(1e9 * INLINE_WAIT_S)
        return bool(self.kernels.shared_all_entered(self.pointer, number, kind, count, wait_ns))

    def agree(self, kind: int, count: int) -> None:
        """Compare the ranks' calls; when this returns, all ranks have entered theirs.

        kind: with the root; count: number of elements, or another number to compare.
        Raises MismatchError on all ranks if the calls differ.
        """
        count *= _parts(kind)
        agree, number = self.kernels.shared_compare, self._group.sequence
        if not self._run(agree, self.pointer, number, kind, count):
            raise self.failure()

    def compare(self, kind: int, number: int) -> bool:
        """Compare two numbers on all ranks; see ``signature.compared``.

        Returns False on all ranks if they differ. Raises MismatchError on all ranks if one of them
        runs another call on this segment instead.
        """
        agree, call = self.kernels.shared_compare, self._group.sequence
        if self._run(agree, self.pointer, call, kind, number):
            return True
        left = self._segment.aborted or self.kernels.shared_closed_by(self.pointer) >= 0
        if not left and all(is_comparison(each) for each, _ in self._calls()):
            return False
        raise self.failure()

    def _calls(self) -> list[tuple[int, int]]:
        """Return kind and count of each rank's call, after a mismatch."""
        return [(kind, count) for _, kind, count in self._read_calls(self.kernels.shared_call)]

    def _read_calls(self, read: Callable[..., Any]) -> list[tuple[Any, int, int]]:
        """Call a getter of the C library for each rank; return its results and outputs."""
        what, count = ctypes.c_uint64(), ctypes.c_uint64()
        at = ctypes.addressof(what), ctypes.addressof(count)
        return [
            (read(self.pointer, rank, *at), what.value, count.value)
            for rank in range(self._segment.n)
        ]

    def leave(self) -> None:
        """Stop waiting for other ranks: current and later calls raise the group's error."""
        self._segment.aborted = 1

    def close(self) -> None:
        """Make all ranks leave."""
        self.kernels.shared_close(self.pointer)

    def leave_or_close(self, alone: bool) -> None:
        """Leave, or make all ranks leave if not ``alone``."""
        self.leave() if alone else self.close()

    def last_calls(self) -> dict[int, tuple[int, str]]:
        """Return the number of each rank's latest call, 0 for none, and its description."""
        calls = self._read_calls(self.kernels.shared_last_call)
        return {
            rank: (number, describe(kind, count // _parts(kind)) if number else "")
            for rank, (number, kind, count) in enumerate(calls)
        }

    def failure(self) -> BaseException:
        """Return the error of the last call, and remove the call from the group's log."""
        # Signal handlers run on the main thread alone.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and (interruption := take_interruption()) is not None:
            self._group.fail_after_signal(interruption)
            return interruption
        closer = self.kernels.shared_closed_by(self.pointer)
        if self._segment.aborted or closer >= 0:
            if self._group.error is None:
                timeouts.fail_with_peer(self._group, closer)
            return self._group.failure()
        if self._group.compared:
            self._group.drop_last()
        calls = self._calls()
        texts = [describe(kind, count // _parts(kind)) for kind, count in calls]
        name = texts[self._segment.me].partition(" ")[0]
        if any(is_list(kind) for kind, _ in calls):  # only its rank knows the sizes of a list
            own = [texts[self._segment.me]]
            texts = [words for (words,) in exchange_words(self._group.tested, own)]
        return MismatchError(
            f"{name} on rank {self._segment.me} of group {self._group.group_name}: collective "
            f"mismatch: the ranks made different calls: {describe_by_rank(texts)}"
        )


class _Native(Implementation):
    """Calls through slots, with their native calls."""

    def __init__(self, run: Run, native_calls: Sequence[NativeCall], fused: Run | None) -> None:
        super().__init__(run)
        self._native_calls, self._fused = native_calls, fused

    def native_calls(self) -> Sequence[NativeCall]:
        """Return them."""
        return self._native_calls

    def fused(self, count: int) -> Run | None:
        """Return the function for segment tables, for any count."""
        return self._fused


class _Exchange(Implementation):
    """all_to_all: see ``Shared.build_exchange``."""

    def __init__(self, memory: Shared, kind: CallKind, large: Implementation | None) -> None:
        self._memory = memory
        self._kind = kind
        self._large = large

    def native_calls(self) -> Sequence[NativeCall]:
        """Return the native call of the large implementation or, without one, the first round."""
        large = self._large.native_calls() if self._large else None
        if large:
            return (large[0]._replace(owner=self),)
        at, function = self._memory.described(self._kind), self._memory.kernels.shared_all_to_all
        call = self._memory.native_call(LISTS, function, ctypes.addressof(at))
        return (call._replace(owner=self),)

    def run(self, send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        """Run one call."""
        memory, at = self._memory, ctypes.addressof(self._memory.described(self._kind))
        n, itemsize = self._kind.group.size(), self._itemsize
        blocks = Blocks([extent] * n, [extent] * n) if isinstance(extent, int) else extent
        out = np.array(list(cut(addresses(send), blocks.sends, itemsize)), _PUT)
        into = np.array(list(cut(addresses(recv), blocks.receives, itemsize)), _PUT)
        result = memory.call(
            memory.kernels.shared_all_to_all, at, out.ctypes.data, into.ctypes.data, 0, root
        )
        if result != _MOVED:
            self.finish(result, send, recv, blocks)

    def finish(self, result: int, send: Any, recv: Any, extent: Extent) -> None:
        """Finish a call after its first round: move the blocks that did not fit in it.

        Raises MismatchError on all ranks if a block's sizes differ on its sender and receiver.
        """
        kind, n = self._kind, self._kind.group.size()
        assert isinstance(extent, Blocks)
        if result == _DIFFERED:
            raise self._memory.failure()
        at = self._memory.described(kind)
        if result == _MISFIT:
            rank = at.mismatch_rank
            raise misfit(
                kind, *((rank, extent.receives[rank], at.mismatch_count) if rank < n else (None,))
            )
        if self._large is not None:
            self._large.run(send, recv, extent, 0)
            return
        me = kind.group.rank()
        puts = list(cut(addresses(send), extent.sends, self._itemsize))
        places = cut(addresses(recv), extent.receives, self._itemsize)
        gets = [Get(rank, me, *put) for rank, put in enumerate(places)]
        self._memory.exchange(kind, Transfer(n, at.max_count, 0, puts, gets), 0)

    @property
    def _itemsize(self) -> int:
        assert self._kind.dtype is not None
        return self._kind.dtype.itemsize


def _each(buffers: Any, count: int) -> Any:
    """Return addresses and counts of a list of buffers, one buffer or None."""
    found = addresses(buffers if isinstance(buffers, list) or buffers is None else [buffers])
    return np.array([(at, count) for at in found or ()], _PUT)


def _address(function: Any) -> int:
    """Return the address of a function of the C library."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def _parts(kind: int) -> int:
    """Return the number of the C library's elements per element of the dtype (2 for complex)."""
    return 1 if is_list(kind) else parts_per_element(kind)


#: struct mpicoll_given and struct mpicoll_taken.
_PUT = np.dtype([("data", np.uintp), ("count", np.uintp)])
_GET = np.dtype([(name, np.uintp) for name in ("rank", "place", "data", "count")])

_FUNCTIONS: dict[str, Callable[[Shared, CallKind], Implementation]] = {
    "all_reduce": Shared._build_all_reduce,
    **dict.fromkeys((*MOVES, *REDUCTIONS[1:], *PREFIXES), Shared._build_blocks),
    **dict.fromkeys(EXCHANGES, Shared.build_exchange),
}


def get_or_create(group: ProcessGroup) -> Shared | None:
    """Return the segment of a group, or None on all ranks. All ranks call."""
    return group.resources.get_or_create(
        "shared",
        lambda: create(group) if 1 < group.size() <= MAX_RANKS else None,
        abandon=lambda _: None,
        leave=Shared.leave_or_close,
    )


def _build(kind: CallKind) -> Implementation | None:
    shared = get_or_create(kind.group)
    return None if shared is None else shared.build(kind)


def create(group: ProcessGroup) -> Shared | None:
    """Create the segment of a group; None on all ranks if they cannot. All ranks call."""
    n = group.size()
    slot = min(SLOT, MAX_SEGMENT_BYTES // (_SLOTS * n)) // 64 * 64
    able = kernels is not None and not settings.SHARED_MEMORY.is_set_to("0")
    region = 0 if kernels is None else kernels.shared_region(slot, n)
    segment = share(group.tested, region, able)
    return None if segment is None else Shared(group, segment, slot)


ROUTE = Route(
    __name__,
    "shared memory",
    Serves(
        tuple(_FUNCTIONS),
        combines=has_loop,
        reproducible=LEVELS,
        uneven=EXCHANGES,
        buffer_lists=True,
    ),
    _build,
    Needs("node", "all ranks on one node, and the C library"),
    Policy(compares_calls=True),
)
