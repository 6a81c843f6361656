"""Collectives through a shared-memory segment, for groups whose ranks are all on one node.

The algorithm, in chunks that stay in the processors' caches, is in ``kernels/src/shared.c``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll import control_messages, machine, settings
from mpicoll.arrays.views import Buffer
from mpicoll.core.plan import (
    Blocks,
    CallKind,
    Contiguous,
    Extent,
    Implementation,
    NativeCall,
    SegmentTable,
)  # fmt: skip
from mpicoll.core.reproducible import LEVELS
from mpicoll.core.signature import describe, encode_kind, is_comparison, is_list, parts_per_element
from mpicoll.dtypes import Kind, ReduceOp
from mpicoll.errors import MismatchError
from mpicoll.failures.group_failure import fail_with_peer
from mpicoll.failures.report import describe_by_rank
from mpicoll.kernels.calls import COMPARE, FUSED, LISTS, take_interruption
from mpicoll.kernels.library import address_of, kernels
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.host import mpi
from mpicoll.routes.host.shared_segment import Segment, share
from mpicoll.routes.host.single_copy import find_peers
from mpicoll.routes.host.ways import Ways
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
)  # fmt: skip
from mpicoll.routes.transfers import Transfer, addresses, cut, misfit

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

#: Maximum size in bytes of a slot, which is the data of a round, and of all ranks' slots. A slot
#: has a quarter of the second-level cache, at least half of SLOT: with a cache of 512 KiB, half of
#: SLOT takes 20 to 30 % less time for 1 MiB.
SLOT, MAX_SEGMENT_BYTES = 256 * 1024, 48 * 1024 * 1024
#: Maximum number of ranks that share memory. shared.c stores a rank in 8 bits.
MAX_RANKS = 256
#: Up to this number of ranks, every rank polls every other rank. Above it, ranks use a
#: dissemination barrier with log2(n) steps.
FLAT_MAX_RANKS = 8
#: Maximum size in bytes of the other ranks' messages, in total, for which every rank combines all
#: elements before measured: one wait instead of two.
ONE_SHOT_MAX_BYTES = 16 * 1024

#: Number of polls, of 40 to 140 cycles each, before a waiting rank yields its processor: about as
#: long as waking up takes (A. Karlin et al., Empirical studies of competitive spinning for a
#: shared-memory multiprocessor, SOSP 1991). With fewer processors than ranks, it yields at once.
SPIN_COUNT, CROWDED_SPIN_COUNT = 2000, 1
#: Seconds to spin for the other ranks before handing an async call to the progress thread.
INLINE_WAIT_S = 1e-3

_SLOTS = 4  # as in shared.c
_MISMATCHED, _MOVED, _NO_ROOM, _WRONG_SIZE = range(4)  # results, as in shared.h


class Shared:
    """The shared-memory segment of a group; ``pointer`` is the address of its C structure.

    peers: the other ranks' processes, for copies by the kernel; None if a rank cannot make them.
    no_single_copy: reason why this rank cannot copy by the kernel, or "".
    """

    def __init__(self, group: ProcessGroup, segment: Segment, slot: int, copies: bool) -> None:
        """All ranks call. copies: see ``create``."""
        assert kernels is not None
        self._group = group
        self.kernels = kernels
        self._memory = np.frombuffer(segment.memory, np.uint8)  # keeps the mapping alive
        n = group.size()
        # The C library has the addresses of these and of `peers`.
        self._kinds: dict[Any, Any] = {}
        self._mpi_plans: list[Any] = []
        self.ways = Ways(kernels, group, segment.placement)
        self._crowded = segment.processors < n
        # MPI libraries poll without yielding: a call may last many time slices, a trial also.
        self._calls_mpi = segment.calls_mpi and not self._crowded
        self._crowded_beside = segment.processors < 2 * n
        # If ranks share processors, each step of a dissemination barrier may cost a time slice.
        flat_max_ranks = n if self._crowded else FLAT_MAX_RANKS
        self._channels = kernels.make_channels(
            self._memory.ctypes.data, slot, n, group.rank(), flat_max_ranks, segment.threads
        )
        self._segment = self._channels[0]
        self.pointer = ctypes.addressof(self._segment)
        self._processes = None
        self.peers, self.no_single_copy = find_peers(group, slot) if copies else (None, "")
        if self.peers:
            pids, tokens = self.peers.pids.ctypes.data, self.peers.tokens.ctypes.data
            self._processes = kernels.Processes(self.pointer, pids, tokens, n, group.rank())
        self._spin_count = CROWDED_SPIN_COUNT if self._crowded else SPIN_COUNT
        for channel in self._channels:
            channel.spin_count = self._spin_count

    def build(self, kind: CallKind) -> Implementation:
        """Return the implementation; calls that differ raise MismatchError on all ranks."""
        if not kind.primitive.even:
            return Exchange(self, kind)
        at, group, address = ctypes.addressof(self.described(kind)), self._group, MPI.Get_address
        library, fused = self.kernels, self.kernels.shared_fused
        blocks, lists = library.shared_blocks, library.shared_lists

        def run_blocks(
            send: Buffer | list[Buffer] | None, recv: Buffer | list[Buffer] | None, count: int,
            root: int,
        ) -> None:  # fmt: skip
            if list in (send.__class__, recv.__class__):
                out, into = blocks_of_call(kind, send, recv, count)
                function, there, here = lists, out.ctypes.data, into.ctypes.data
            else:
                here = None if recv is None else address(recv)
                there = here if send is None else address(send)
                function = blocks
            run = function if group.worker is None else partial(self._run, function)
            result = run(at, there, here, count, root, group.sequence)
            if result <= 0:
                raise self.failure(result)

        def run_fused(send: SegmentTable | None, recv: SegmentTable, count: int, root: int) -> None:
            ends = recv.ends.copy()  # the C library converts them in place
            sent = None if send is None else send.addresses.ctypes.data
            self.call(fused, at, sent, recv.addresses.ctypes.data, ends.ctypes.data, len(ends), 0)

        native_calls = [self.native_call(self, LISTS, lists, at)]
        if kind.primitive.root:
            return Implementation(run_blocks, native_calls)
        native_calls.append(self.native_call(self, FUSED, fused, at))
        return Implementation(run_blocks, native_calls, run_fused)

    def native_call(self, owner: Any, shape: int, function: Any, argument: int) -> NativeCall:
        """Return the native call of a function of the C library."""
        check = (
            address_of(self.kernels.shared_all_entered),
            self.pointer,
            round(1e9 * INLINE_WAIT_S),
        )
        if not self._crowded_beside or shape == COMPARE:
            check = (0, 0, 0)
        return NativeCall(owner, shape, address_of(function), argument, inline_check=check)

    @property
    def native_comparison(self) -> NativeCall:
        """Return the native call that compares a call without arrays."""
        return self.native_call(self, COMPARE, self.kernels.shared_compare, self.pointer)

    def finish(self, result: int, send: Any, recv: Any, extent: Extent) -> None:
        """Raise the error of a failed native call."""
        raise self.failure(result)

    def exchange(self, kind: CallKind, transfer: Transfer, root: int) -> None:
        """Run this rank's part of a call whose blocks may differ in size."""
        group, described = self._group, self.described(kind)
        parts = described.numbers_per_element
        puts = np.array([(at, count * parts) for at, count in transfer.puts], _BLOCK)
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

    def call(self, function: Callable[..., int], *arguments: Any) -> int:
        """Run the current call by a C function whose last argument is the call number, or raise."""
        result: int = self._run(function, *arguments, self._group.sequence)
        if result <= 0:
            raise self.failure(result)
        return result

    def described(self, kind: CallKind) -> Any:
        """Return the C library's description of a kind of call."""
        key = kind.primitive, kind.dtype, kind.op
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._describe(kind, key)
        return found

    def _describe(self, kind: CallKind, key: Any) -> Any:
        primitive, _, op, dtype = kind
        by = None if op is None else find_loop(op, dtype, kind.exact)
        parts = 1 if by is None else by.elements
        return self.kernels.CallPlan(
            shared=self.pointer,
            choices=self.ways.make(
                " ".join([primitive.name, dtype.name, *([op.op.name] if op else [])])
            ),
            mpi=self._describe_mpi(kind),
            processes=ctypes.addressof(self._processes) if self._processes and op is None else 0,
            signature=encode_kind(primitive, dtype, op),
            divisor=max(1, len(kind.combined)) if op is ReduceOp.AVG else 1,
            size=dtype.itemsize // parts,
            numbers_per_element=parts,
            one_shot_max_bytes=ONE_SHOT_MAX_BYTES // max(1, self._segment.n - 1),
            format=-1 if by is None else self.kernels.format(by.format.encode()),
            operation=0 if by is None else by.operation,
            many_blocks=primitive.many_in,
            has_src=primitive.root == "src",
            has_dst=primitive.root == "dst",
            prefix=PREFIXES.index(primitive.name) + 1 if primitive.name in PREFIXES else 0,
            lazy=self._group.stride > 1,  # not if each call must be compared before it runs
            in_place=not (primitive.input or primitive.root),
        )

    def _describe_mpi(self, kind: CallKind) -> int:
        """Return the address of the description of MPI's call; 0 if it may give other bits.

        Sums of floats may: of two NaNs, the processor returns the first operand, and MPI libraries
        add in an order that differs between ranks.
        """
        _, group, op, dtype = kind
        same_bits = op is None or (dtype.kind is Kind.INTEGER and op is not ReduceOp.AVG)
        # A group inside a node may have freed its communicator.
        if not (self._calls_mpi and group.inner and same_bits and mpi.ROUTE.can_run_kind(kind)):
            return 0
        self._mpi_plans.append(mpi.describe(kind))  # the C library has its address
        return ctypes.addressof(self._mpi_plans[-1])

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the C library; spin less on the progress thread of a crowded node."""
        worker = self._group.worker
        if worker is None or not (worker.is_current and self._crowded_beside):
            return function(*arguments)
        self._segment.spin_count = CROWDED_SPIN_COUNT
        try:
            return function(*arguments)
        finally:
            self._segment.spin_count = self._spin_count

    def should_run_inline(self, kind: int, count: int) -> bool:
        """Return whether every rank has entered an async call, and the progress thread has no free
        processor. kind, count: of the call; see mpicoll.core.signature.
        """
        if not self._crowded_beside:
            return False
        number = (self._group.sequence + 1) & 0xFFFFFFFF
        wait_ns = round(1e9 * INLINE_WAIT_S)
        asks, count = self.kernels.shared_all_entered, count * _parts(kind)
        return bool(asks(self.pointer, number, kind, count, wait_ns))

    def agree(self, kind: int, count: int) -> None:
        """Wait until all ranks have entered their calls; raise MismatchError on all of them if the
        calls differ in ``kind``, with the root, or ``count``.
        """
        agree, number = self.kernels.shared_compare, self._group.sequence
        if not self._run(agree, self.pointer, number, kind, count * _parts(kind)):
            raise self.failure()

    def compare(self, kind: int, number: int) -> bool:
        """Return whether two numbers are the same on all ranks. kind: of ``encode_comparison``.
        Raises MismatchError on all ranks if one of them runs another call on this segment instead.
        """
        agree, call = self.kernels.shared_compare, self._group.sequence
        if self._run(agree, self.pointer, call, kind, number):
            return True
        left = self._segment.aborted or self.kernels.shared_closed_by(self.pointer) >= 0
        if not left and all(call and is_comparison(call[0]) for call in self._calls()):
            return False
        raise self.failure()

    def _calls(self) -> list[tuple[int, int] | None]:
        """Return kind and count of each rank's call, after a mismatch; None if it made none yet."""
        kind, count = ctypes.c_uint64(), ctypes.c_uint64()
        at = ctypes.addressof(kind), ctypes.addressof(count)
        found, number = [], self.kernels.shared_mismatch(self.pointer)
        for rank in range(self._segment.n):
            made = self.kernels.shared_call(self.pointer, rank, number, *at)
            found.append((kind.value, count.value) if made else None)
        return found

    def leave(self, alone: bool = True) -> None:
        """Make this rank (``alone``) or all ranks stop waiting: calls raise the group's error."""
        if alone:
            self._segment.aborted = 1
        else:
            self.kernels.shared_close(self.pointer)

    def close(self, limit: float) -> None:
        """Save the measured ways."""
        self.ways.save()

    def failure(self, result: int = 0) -> BaseException:
        """Return the error of the last call, and fail the group or erase the call's record.

        result: 0, or an error code of MPI times -1.
        """
        if result < 0:
            return MPI.Exception(-result)
        # Signal handlers run on the main thread alone.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and (interruption := take_interruption()) is not None:
            self._group.fail_after_signal(interruption)
            return interruption
        closer = self.kernels.shared_closed_by(self.pointer)
        if self._segment.aborted or closer >= 0:
            if self._group.error is None and self.kernels.shared_is_mismatched(self.pointer):
                self._group.fail(self._mismatch(". The group cannot be used any more"))
            elif self._group.error is None:
                fail_with_peer(self._group, closer)
            return self._group.failure()
        if self._group.compared:
            self._group.drop_last()
        return self._mismatch()

    def _mismatch(self, consequence: str = "") -> MismatchError:
        calls = self._calls()
        texts = [
            describe(call[0], call[1] // _parts(call[0])) if call else "no call yet"
            for call in calls
        ]
        own = texts[self._segment.me]
        # Only its rank knows the sizes of a list.
        if not consequence and any(call and is_list(call[0]) for call in calls):
            texts = control_messages.allgather(self._group.tested, own, str)
        rank = f"rank {self._segment.me} of group {self._group.group_name}"
        return MismatchError(
            f"{own.partition(' ')[0]} on {rank}: collective mismatch: the ranks made different "
            f"calls: {describe_by_rank(texts)}{consequence}"
        )


class Exchange(Implementation):
    """all_to_all. The first round sends the sizes of all blocks, and the blocks if they fit.

    large: implementation of calls that do not fit; None: the C library runs them.
    """

    def __init__(self, memory: Shared, kind: CallKind, large: Implementation | None = None) -> None:
        library, self._described = memory.kernels, memory.described(kind)
        self._memory, self._kind, self._large = memory, kind, large
        self._argument = ctypes.addressof(self._described)
        self._function = library.shared_small_all_to_all if large else library.shared_all_to_all

    def native_calls(self) -> Sequence[NativeCall]:
        """Return the native call of the C library's function."""
        return (self._memory.native_call(self, LISTS, self._function, self._argument),)

    def run(self, send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        """Run one call."""
        n = self._kind.group.size()
        extent = Blocks([extent] * n, [extent] * n) if isinstance(extent, int) else extent
        out, into = blocks_of_call(self._kind, send, recv, extent)
        result = self._memory.call(
            self._function, self._argument, out.ctypes.data, into.ctypes.data, 0, root
        )
        if result != _MOVED:
            self.finish(result, send, recv, extent)

    def finish(self, result: int, send: Any, recv: Any, extent: Extent) -> None:
        """Move the blocks that did not fit in the first round. Raises MismatchError on all ranks if
        a block's sizes differ on its sender and receiver.
        """
        assert isinstance(extent, Blocks)
        if result == _MISMATCHED:
            raise self._memory.failure()
        if result == _WRONG_SIZE:
            rank = self._described.mismatch_rank
            if rank == self._kind.group.size():
                raise misfit(self._kind, None)
            raise misfit(self._kind, rank, extent.receives[rank], self._described.mismatch_count)
        assert result == _NO_ROOM and self._large is not None
        self._large.run(send, recv, extent, 0)


def blocks_of_call(kind: CallKind, send: Any, recv: Any, extent: Extent) -> tuple[Any, Any]:
    """Return the blocks of both sides as arrays of struct mpicoll_block; no blocks for None."""
    primitive, group, _, dtype = kind
    if isinstance(extent, int):
        extent = Blocks(*([extent] * (group.size() if many else 1)
                          for many in (primitive.many_in, primitive.many_out)))  # fmt: skip
    sides = zip(map(addresses, (send, recv)), extent, strict=True)
    out, into = (
        np.array([] if start is None else [*cut(start, counts, dtype.itemsize)], _BLOCK)
        for start, counts in sides
    )
    return out, into


def _parts(kind: int) -> int:
    """Return the number of the C library's elements per element of the dtype (2 for complex)."""
    return 1 if is_list(kind) else parts_per_element(kind)


#: struct mpicoll_block and struct mpicoll_get.
_BLOCK = np.dtype([("data", np.uintp), ("count", np.uintp)])
_GET = np.dtype([(name, np.uintp) for name in ("rank", "place", "data", "count")])


def get_or_create(group: ProcessGroup) -> Shared | None:
    """Return the segment of a group, or None on all ranks. All ranks call."""
    return group.resources.get_or_create(
        "shared",
        lambda: create(group) if 1 < group.size() <= MAX_RANKS else None,
        close=Shared.close,
        abandon=lambda _: None,
        leave=Shared.leave,
    )


def _build(kind: CallKind) -> Implementation | None:
    shared = get_or_create(kind.group)
    return None if shared is None else shared.build(kind)


def create(group: ProcessGroup, copies: bool = True) -> Shared | None:
    """Create the segment of a group; None on all ranks if they cannot. All ranks call.

    copies: whether calls may copy by the kernel, which ``exchange`` never does.
    """
    n = group.size()
    slot = max(SLOT // 2, machine.l2_cache_bytes() // _SLOTS)
    slot = min(SLOT, slot, MAX_SEGMENT_BYTES // (_SLOTS * n))
    slot = control_messages.bcast(group.tested, slot // 64 * 64, 0, int)
    able = kernels is not None and not settings.SHARED_MEMORY.is_set_to("0")
    region = 0 if kernels is None else kernels.shared_region(slot, n)
    segment = share(group.tested, region, able, mpi.can_call(group))
    return None if segment is None else Shared(group, segment, slot, copies)


ROUTE = Route(
    __name__,
    "shared memory",
    Serves(
        (*MOVES, *REDUCTIONS, *PREFIXES, *EXCHANGES),
        combines=has_loop,
        reproducible=LEVELS,
        uneven=EXCHANGES,
        buffer_lists=True,
    ),
    _build,
    Needs("node", "all ranks on one node, and the C library"),
    Policy(compares_calls=True),
)
