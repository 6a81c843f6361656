"""Memory that the ranks share: for groups whose ranks are all on one node.

The algorithm, in chunks that stay in the processors' caches, is in ``kernels/src/shared.c``. It
needs the C library, on every rank.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Callable
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
    Short,
    Table,
    add_fused,
    add_short,
    find_short,
)
from mpicoll.core.reproducible import LEVELS
from mpicoll.core.signature import describe, encode_kind, is_comparison, is_list, parts_per_element
from mpicoll.dtypes import Kind, ReduceOp
from mpicoll.errors import MismatchError
from mpicoll.failures import interruptions, timeouts
from mpicoll.failures.consistency import describe_by_rank
from mpicoll.kernels.calls import AGREE, ALL_REDUCE, BLOCKS, FUSED, LISTS
from mpicoll.kernels.library import kernels
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.host import clusters
from mpicoll.routes.host.shared_segment import Segment, exchange_words, share
from mpicoll.routes.route import EXCHANGES, MOVES, PREFIXES, REDUCTIONS, MemoryKind, Route
from mpicoll.routes.transfers import Get, Transfer, addresses, cut, misfit

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["ROUTE", "Shared", "create", "get_or_create"]

#: Bytes of a slot, the most that goes through in a round, and of the slots of all ranks together.
SLOT, TOGETHER = 256 * 1024, 48 * 1024 * 1024
#: The most ranks that share memory: today's nodes of two sockets have up to so many cores; and 8
#: bits, in shared.c.
MOST = 256
#: Ranks up to which each waits for each other, while among more each hears of all from log2 n of
#: them. By the model (docs/model.md) the latter is ahead from 4 ranks on, if a look at a signal
#: takes 0.1 us; several looks at signals that have come take less.
FEW = 8
#: Bytes of the others' messages, together, up to which every rank combines everything: one wait
#: instead of two.
WHOLE = 16 * 1024

#: Bytes of an all_reduce from which on they cross once from one cluster of ranks to another: a wait
#: more for each cluster, which many rounds hide (docs/model.md).
LARGE = 1024 * 1024

#: How often a rank polls for another's progress before it sleeps, at some 40 to 140 cycles each.
#: And where threads that compute, or other ranks, want the processor.
LOOKS, LOOKS_IN_A_CROWD = 2000, 50
#: Seconds that a rank waits for the others before it leaves an asynchronous call to the group's
#: thread: the cost if that thread and the one that goes on computing take turns.
PATIENCE = 1e-3

_SLOTS, _FAILED, _BITS = 4, -1, 8  # as in shared.c
_DIFFERED, _MOVED, _UNMOVED, _MISFIT = range(4)  # what all_to_all comes to, as in shared.c


class _Hold(ctypes.Structure):
    """struct mpicoll_shared of shared.c."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("slot", ctypes.c_size_t),
        ("n", ctypes.c_uint32),
        ("me", ctypes.c_uint32),
        ("round", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("looks", ctypes.c_uint32),
        ("left", ctypes.c_uint32),
        ("measurements", ctypes.c_uint32),
        ("latency", ctypes.c_uint32),
        ("far", ctypes.c_uint32),
        ("few", ctypes.c_uint32),
        ("until", ctypes.c_uint64),
        ("firsts", ctypes.c_void_p),
        ("clusters", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
    )


class _Kind(ctypes.Structure):
    """struct mpicoll_kind of shared.c."""

    _fields_ = (
        ("shared", ctypes.c_void_p),
        ("what", ctypes.c_uint64),
        ("divisor", ctypes.c_double),
        ("size", ctypes.c_size_t),
        ("parts", ctypes.c_size_t),
        ("whole", ctypes.c_size_t),
        ("format", ctypes.c_int32),
        ("operation", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("giver", ctypes.c_int32),
        ("taker", ctypes.c_int32),
        ("prefix", ctypes.c_int32),
        ("in_place", ctypes.c_int32),
        ("large", ctypes.c_size_t),
        ("misfit", ctypes.c_uint32),
        ("found", ctypes.c_uint64),
        ("most", ctypes.c_uint64),
    )


class Shared:
    """A group's hold on the memory that its ranks share.

    kernels: the C library.
    pointer: its own description of the memory.
    slot:    bytes of a slot.
    """

    def __init__(self, group: ProcessGroup, segment: Segment, slot: int) -> None:
        assert kernels is not None
        self._group = group
        self.kernels = kernels
        self._memory = np.frombuffer(segment.memory, np.uint8)  # as long as any rank may be inside
        n = group.size()
        self._hold = _Hold(self._memory.ctypes.data, slot, n, group.rank())
        self.pointer = ctypes.addressof(self._hold)
        self.slot = slot
        self._kinds: dict[Any, _Kind] = {}  # the C library has their addresses
        self._crowded = segment.processors < n
        self._crowded_beside = segment.processors < 2 * n
        # Where ranks take turns on processors, each signal passed on may take a turn.
        self._hold.few = n if self._crowded else FEW
        self._looks = self._hold.looks = LOOKS_IN_A_CROWD if self._crowded else LOOKS
        self.clusters = self._find_clusters(segment)
        firsts = [0, *itertools.accumulate(self.clusters)]
        self._firsts = (ctypes.c_uint32 * len(firsts))(*firsts)
        self._hold.firsts = ctypes.addressof(self._firsts)
        self._hold.clusters = len(self.clusters)
        self._hold.cluster = bisect.bisect(firsts, group.rank()) - 1

    def _find_clusters(self, segment: Segment) -> list[int]:
        """Return how many ranks in a row are near each other. All ranks call."""
        comm, latencies = self._group.tested, np.zeros(_BITS, np.uint32)
        if not self._crowded:
            comm.Barrier()  # for ranks to measure they have to be there at once
            self.kernels.shared_measure(self.pointer, latencies.ctypes.data)
        domain = clusters.find_domain(segment.own)
        seen = clusters.Seen(settings.CLUSTERS.value(), domain, latencies.tolist())
        everybody = [clusters.Seen(*each) for each in exchange_words(comm, [*seen])]
        return clusters.choose(everybody, self._crowded, self.kernels.far())

    def build(self, kind: CallKind) -> Implementation:
        """Return the implementation for calls of one kind.

        It raises MismatchError, on all ranks, if they do not agree on primitive, count, dtype,
        operation and root.
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

        return self._with_short(kind, shared_all_reduce, ALL_REDUCE, all_reduce)

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
            return self._with_short(kind, shared_blocks, LISTS, lists)
        return self._with_short(kind, shared_blocks, BLOCKS, blocks)

    def _with_short(
        self, kind: CallKind, route: Implementation, shape: int, function: Callable[..., Any]
    ) -> Implementation:
        """Return an implementation with its short way and, if there is no root, those of tables."""
        at = ctypes.addressof(self.described(kind))
        shorts = [self.short(shape, function, at)]
        if not kind.primitive.root:
            fused = self._build_fused(at)
            shorts.append(self.short(FUSED, self.kernels.shared_fused, at))
            add_fused(route, lambda count: fused)
        return add_short(route, lambda: shorts)

    def _build_fused(self, at: int) -> Implementation:
        function = self.kernels.shared_fused

        def shared_fused(send: Table | None, recv: Table, count: int, root: int) -> None:
            ends = recv.ends.copy()  # the C library makes another unit of them
            sent = None if send is None else send.addresses.ctypes.data
            self.call(
                function, at, sent, recv.addresses.ctypes.data, ends.ctypes.data, len(ends), 0
            )

        return shared_fused

    def short(self, shape: int, function: Any, argument: int) -> Short:
        """Return how calls by a function of the C library are made in short."""
        ask = (_address(self.kernels.shared_ask), self.pointer, round(1e9 * PATIENCE))
        short = Short(self, shape, _address(function), argument)
        return short._replace(ask=ask) if self._crowded_beside and shape != AGREE else short

    @property
    def short_agreement(self) -> Short:
        """What compares a call of no array, in short."""
        return self.short(AGREE, self.kernels.shared_agree, self.pointer)

    def build_exchange(self, kind: CallKind, large: Implementation | None = None) -> Implementation:
        """Return the implementation of all_to_all, whose first round carries the sizes of all
        blocks and, where they have room in it, the blocks.

        large: carries out the others, instead of further rounds.
        """
        exchange = _Exchange(self, kind, large)
        return add_short(partial(exchange.carry_out), lambda: (exchange.short,))

    def finish(self, result: int, send: Any, recv: Any, extent: Extent) -> None:
        """Raise why a call that was begun without Python was not carried out; see ``Short``."""
        raise self.failure()

    def exchange(self, kind: CallKind, transfer: Transfer, root: int) -> None:
        """Carry out this rank's part of a call whose blocks may differ in size; see ``build``."""
        group, described = self._group, self.described(kind)
        parts = described.parts
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
            self.kernels.shared_sizes, self.pointer, self.described(kind).what, sends.ctypes.data,
            receives.ctypes.data, theirs.ctypes.data, self._group.sequence,
        )  # fmt: skip
        if most == _FAILED:
            raise self.failure()
        return theirs, most if most >= 0 else None

    def call(self, function: Callable[..., int], *arguments: Any) -> int:
        """Call a function of the C library that makes the group's call at hand in this memory, and
        takes its number last; return what it returns.

        Raises MismatchError, on all ranks, if that is 0, and the group's own error if this rank
        has left.
        """
        result: int = self._run(function, *arguments, self._group.sequence)
        if not result:
            raise self.failure()
        return result

    def described(self, kind: CallKind) -> _Kind:
        """Return the C library's description of a kind of call."""
        key = kind.primitive, kind.dtype, kind.op
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._describe(kind)
        return found

    def _describe(self, kind: CallKind) -> _Kind:
        primitive, _, op, dtype = kind
        assert dtype is not None
        by = None if op is None else find_loop(op, dtype, kind.exact)
        parts = 1 if by is None else by.elements
        rounds_once = kind.exact or dtype.kind is Kind.NARROW_FLOAT
        return _Kind(
            shared=self.pointer,
            what=encode_kind(primitive, dtype, op, 0),
            divisor=max(1, len(kind.combined)) if op is ReduceOp.AVG else 1,
            size=dtype.itemsize // parts,
            parts=parts,
            whole=WHOLE // max(1, self._hold.n - 1) * parts // dtype.itemsize,
            format=-1 if by is None else self.kernels.format(by.format.encode()),
            operation=0 if by is None else by.operation,
            blocks=primitive.many_in,
            giver=primitive.root == "src",
            taker=primitive.root == "dst",
            prefix=PREFIXES.index(primitive.name) + 1 if primitive.name in PREFIXES else 0,
            in_place=not (primitive.input or primitive.root),
            large=-1 if rounds_once else LARGE * parts // dtype.itemsize,
        )

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the C library, in which a rank sleeps soon if it waits on the group's
        thread and the processor is wanted by a thread that computes.
        """
        worker = self._group.worker
        if worker is None or not (worker.is_current and self._crowded_beside):
            return function(*arguments)
        self._hold.looks = LOOKS_IN_A_CROWD
        try:
            return function(*arguments)
        finally:
            self._hold.looks = self._looks

    def should_run_inline(self, kind: int, count: int) -> bool:
        """Return whether an asynchronous call is best carried out at once: all ranks make it now,
        and no processor is free for a thread that would.

        kind: as ``encode_kind`` has it; count: of elements, or whatever else the ranks have alike.
        """
        if not self._crowded_beside:
            return False
        number = (self._group.sequence + 1) & 0xFFFFFFFF
        count *= _parts(kind)
        patience = round(1e9 * PATIENCE)
        return bool(self.kernels.shared_ask(self.pointer, number, kind, count, patience))

    def agree(self, kind: int, count: int) -> None:
        """Compare a call with the other ranks'; all have begun it when this returns.

        kind: with the root; count: of elements, or whatever else the ranks have alike.
        Raises MismatchError, on all ranks, if theirs differ.
        """
        count *= _parts(kind)
        agree, number = self.kernels.shared_agree, self._group.sequence
        if not self._run(agree, self.pointer, number, kind, count):
            raise self.failure()

    def compare(self, kind: int, number: int) -> bool:
        """Compare two numbers with all other ranks; see ``signature.compared``.

        Returns False on all of them if they compare others. Raises MismatchError, on all ranks, if
        some make a call that goes by this memory instead.
        """
        agree, call = self.kernels.shared_agree, self._group.sequence
        if self._run(agree, self.pointer, call, kind, number):
            return True
        left = self._hold.left or self.kernels.shared_closer(self.pointer) >= 0
        if not left and all(is_comparison(each) for each, _ in self._calls()):
            return False
        raise self.failure()

    def _calls(self) -> list[tuple[int, int]]:
        """Return kind and numbers of each rank's call, after one that was not agreed on."""
        return [(kind, count) for _, kind, count in self._read_calls(self.kernels.shared_call)]

    def _read_calls(self, read: Callable[..., Any]) -> list[tuple[Any, int, int]]:
        """Return what a function of the C library returns and writes for each rank."""
        what, count = ctypes.c_uint64(), ctypes.c_uint64()
        at = ctypes.addressof(what), ctypes.addressof(count)
        return [
            (read(self.pointer, rank, *at), what.value, count.value) for rank in range(self._hold.n)
        ]

    def leave(self) -> None:
        """Wait for no other rank here any more: the call at hand, and all that come, raise what the
        group is ``broken`` with.
        """
        self._hold.left = 1

    def close(self) -> None:
        """Leave, and have all other ranks leave, too."""
        self.kernels.shared_close(self.pointer)

    def leave_or_close(self, alone: bool) -> None:
        """Leave; if not alone, have all other ranks leave, too."""
        self.leave() if alone else self.close()

    def last_calls(self) -> dict[int, tuple[int, str]]:
        """Return the number of the last call that each rank has come to, 0 for none, and that call
        in words.
        """
        calls = self._read_calls(self.kernels.shared_last_call)
        return {
            rank: (number, describe(kind, count // _parts(kind)) if number else "")
            for rank, (number, kind, count) in enumerate(calls)
        }

    def failure(self) -> BaseException:
        """Return why the last call was not carried out, and strike it from the group's record."""
        interruption = interruptions.take()
        if interruption is not None:
            self._group.fail_after_signal(interruption)
            return interruption
        closer = self.kernels.shared_closer(self.pointer)
        if self._hold.left or closer >= 0:
            if self._group.error is None:
                timeouts.fail_with_peer(self._group, closer)
            return self._group.failure()
        if self._group.compared:
            self._group.drop_last()
        calls = self._calls()
        texts = [describe(kind, count // _parts(kind)) for kind, count in calls]
        name = texts[self._hold.me].partition(" ")[0]
        if any(is_list(kind) for kind, _ in calls):  # only its rank knows what a list's sizes are
            own = [texts[self._hold.me]]
            texts = [words for (words,) in exchange_words(self._group.tested, own)]
        return MismatchError(
            f"{name} on rank {self._hold.me} of group {self._group.group_name}: collective "
            f"mismatch: the ranks made different calls: {describe_by_rank(texts)}"
        )


class _Exchange:
    """The calls of all_to_all of one kind: see ``Shared.build_exchange``."""

    def __init__(self, memory: Shared, kind: CallKind, large: Implementation | None) -> None:
        self._memory = memory
        self._kind = kind
        self._large = large

    @property
    def short(self) -> Short:
        """The first round, in short, and the large calls', if they have a short way."""
        large = find_short(self._large) if self._large else None
        if large:
            return large[0]._replace(owner=self)
        at, function = self._memory.described(self._kind), self._memory.kernels.shared_all_to_all
        return self._memory.short(LISTS, function, ctypes.addressof(at))._replace(owner=self)

    def carry_out(self, send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        """Carry a call out; an implementation."""
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
        """End a call that has taken its first round: if nothing was moved, move it.

        Raises MismatchError, on all ranks, if a rank expects another size than is sent.
        """
        kind, n = self._kind, self._kind.group.size()
        assert isinstance(extent, Blocks)
        if result == _DIFFERED:
            raise self._memory.failure()
        at = self._memory.described(kind)
        if result == _MISFIT:
            rank = at.misfit
            raise misfit(kind, *((rank, extent.receives[rank], at.found) if rank < n else (None,)))
        if self._large is not None:
            self._large(send, recv, extent, 0)
            return
        me = kind.group.rank()
        puts = list(cut(addresses(send), extent.sends, self._itemsize))
        places = cut(addresses(recv), extent.receives, self._itemsize)
        gets = [Get(rank, me, *put) for rank, put in enumerate(places)]
        self._memory.exchange(kind, Transfer(n, at.most, 0, puts, gets), 0)

    @property
    def _itemsize(self) -> int:
        assert self._kind.dtype is not None
        return self._kind.dtype.itemsize


def _each(buffers: Any, count: int) -> Any:
    """Return addresses and counts of the buffers of a list, of one, or of none."""
    found = addresses(buffers if isinstance(buffers, list) or buffers is None else [buffers])
    return np.array([(at, count) for at in found or ()], _PUT)


def _address(function: Any) -> int:
    """Return the address of a function of the C library."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def _parts(kind: int) -> int:
    """Return how many numbers the C library counts for each that is counted elsewhere."""
    return 1 if is_list(kind) else parts_per_element(kind)


#: struct mpicoll_given and struct mpicoll_taken.
_PUT = np.dtype([("data", np.uintp), ("count", np.uintp)])
_GET = np.dtype([(name, np.uintp) for name in ("rank", "place", "data", "count")])

#: The C library's part, by the name of the primitive.
_FUNCTIONS: dict[str, Callable[[Shared, CallKind], Implementation]] = {
    "all_reduce": Shared._build_all_reduce,
    **dict.fromkeys((*MOVES, *REDUCTIONS[1:], *PREFIXES), Shared._build_blocks),
    **dict.fromkeys(EXCHANGES, Shared.build_exchange),
}


def get_or_create(group: ProcessGroup) -> Shared | None:
    """Return the memory that the ranks of a group share, or None on all of them. All ranks call."""
    return group.resources.get_or_create(
        "shared",
        lambda: create(group) if 1 < group.size() <= MOST else None,
        abandon=lambda _: None,
        leave=Shared.leave_or_close,
    )


def _build(kind: CallKind) -> Implementation | None:
    shared = get_or_create(kind.group)
    return None if shared is None else shared.build(kind)


def create(group: ProcessGroup) -> Shared | None:
    """Return memory that the ranks share, or None on all of them. All ranks call."""
    n = group.size()
    slot = min(SLOT, TOGETHER // (_SLOTS * n)) // 64 * 64
    able = kernels is not None and not settings.SHARED_MEMORY.is_set_to("0")
    region = 0 if kernels is None else kernels.shared_region(slot, n)
    segment = share(group.tested, region, able)
    return None if segment is None else Shared(group, segment, slot)


ROUTE = Route(
    "shared",
    "shared memory",
    MemoryKind.HOST,
    tuple(_FUNCTIONS),
    _build,
    reproducible=LEVELS,
    combines=lambda op, dtype: find_loop(op, dtype) is not None,
    uneven=EXCHANGES,
    place="node",
    needs="all ranks on one node, and the C library",
    compares=True,
    lists=True,
)
