"""GPUs of a node that reach each other's memory, one for each rank: a call is one kernel on each.

The kernels (``kernels/src/device_peers.cu``) push data into each other's workspaces and wait for
each other by flags there. The hosts do not meet. A call only puts work into streams, and may be
captured into a CUDA graph. Ranks that share a GPU take another route: their kernels would wait for
each other in turns.

Kernels that wait in vain end, on all ranks: one that has waited for longer than the group's timeout
gives up, and a rank that fails before it has put its kernel into a stream ends those of the others,
as does one that leaves the group, or hears that another rank is lost. All see why in one word of
memory that the hosts share and the devices read; the host that has written it says more in words
beside it. Whoever looks for a result finds it there (``find_failure``), and the group is broken:
streams have gone on without results.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation
from mpicoll.core.reproducible import ORDER
from mpicoll.core.signature import describe
from mpicoll.cuda.runtime import CUDA, Memory
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    MismatchError,
    UnsupportedError,
    UsageError,
)
from mpicoll.failures import lost_ranks
from mpicoll.kernels import peers
from mpicoll.kernels.peers import (
    CLOSED,
    DIFFERS,
    FAILED,
    HEADER,
    LATE,
    RANKS,
    Collective,
    Failure,
)
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.device.state import Agreed, RouteState, build_at_home, first_problem
from mpicoll.routes.device.user_buffers import signature_of
from mpicoll.routes.device.workspaces import Workspaces, map_each_other
from mpicoll.routes.host.shared_segment import share
from mpicoll.routes.route import MemoryKind, Route

__all__ = ["ROUTE", "Peers"]

#: Bytes of a workspace beside its header.
WORKSPACE = 32 * 1024 * 1024
#: Seconds to wait for a rank in the try that comes before the first call.
TRY_LIMIT = 20.0
#: Bytes of each rank that are tried.
_TRIED = 4096
#: Where a rank's words begin on its page of the board; on rank 0's, what kernels read is before.
_WORDS = 128
#: What is raised, by why kernels have ended.
_ERRORS = {
    LATE: CollectiveTimeoutError,
    DIFFERS: MismatchError,
    FAILED: DistBackendError,
    CLOSED: CollectiveTimeoutError,
}


class Peers(RouteState):
    """The workspaces of a group's ranks.

    board:   memory that the hosts share, by rank: _WORDS and what the rank's host has to say.
    failure: where the devices read, and write, why kernels have ended; rank 0's word.
    """

    ends_on_devices = True

    def __init__(
        self,
        agreed: Agreed,
        workspaces: Workspaces[int],
        board: np.ndarray[Any, np.dtype[np.uint8]],
        pinned: object,
        failure: int,
    ) -> None:
        super().__init__(agreed.group, agreed.context)
        self._workspaces = workspaces
        self._board, self._pinned = board, pinned
        self._failure = board[0, :8].view(np.uint64)
        self._calls: dict[int, tuple[int, int]] = {}  # by digest
        self._captured = False  # calls are in graphs, which run in streams that only users know
        blocks = min(workspaces.said)
        self._peers = peers.Peers(
            tuple(memory.address for memory in workspaces.all), self.me, failure,
            _nanoseconds(self.group.timeout), peers.room_of(WORKSPACE, self.n, blocks), blocks,
        )  # fmt: skip

    def digest(self, kind: CallKind, extent: Extent, root: int) -> int:
        """Return what the kernels compare of a call: 16 bits, which stand for the call."""
        signature = signature_of(kind, extent, root)
        digest = zlib.crc32(repr(signature).encode()) & 0xFFFF
        self._calls[digest] = signature
        return digest

    def carry_out(self, call: Collective) -> None:
        """Enqueue this rank's part of a call.

        Raises the group's error if kernels have ended without a result, and UnsupportedError in a
        capture for a kernel that is not there yet.
        """
        self.check()
        whole = self.group.whole or self.group
        context, limit = self.context, _nanoseconds(whole.timeout)
        if limit != self._peers.limit:  # which programs may set at any time
            self._peers = self._peers._replace(limit=limit)
        if context.captured and not context.runtime.has_collective(context.index, call):
            raise UnsupportedError(
                f"{call.name}: the current stream is being captured into a CUDA graph, and the "
                "kernel is not there yet; make such a call, with arrays that lie alike, before"
            )
        context.runtime.load_collective(context.index, call)
        context.runtime.collective(context.index, self._peers, call, context.work)
        self._captured = self._captured or context.captured

    # ---- Kernels that end without a result -------------------------------------------------------

    def check(self) -> None:
        """Raise if kernels have ended without a result."""
        failure = self.find_failure()
        if failure is not None:
            raise failure

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return why kernels have ended without a result; None if none has, as far as is known.

        wait: until this rank's are done.
        """
        whole, ranks = self.group.whole or self.group, self.group.ranks
        if wait:
            try:
                self._synchronize()
            except Exception as error:
                return DistBackendError(
                    f"rank {ranks[self.me]} of group {whole.group_name}: the device has failed: "
                    f"{error}"
                )
        if not self._failure[0]:
            return None
        if lost_ranks.is_fault_tolerant() and lost_ranks.check(whole):
            return whole.failure()
        call, why, rank, other = Failure.unpack(int(self._failure[0]))
        name = f"group {whole.group_name}"
        if why in (LATE, DIFFERS) and call in self._calls:
            name = f"{describe(*self._calls[call])}, on rank {ranks[self.me]} of {name}"
        limit = whole.timeout
        words = {
            LATE: f"rank {ranks[rank]}'s GPU has waited {limit} s for rank {ranks[other]}'s",
            DIFFERS: f"collective mismatch: ranks {ranks[other]} and {ranks[rank]} made different "
            "calls",
        }.get(why) or self._said(rank)
        return _ERRORS[why](
            f"{name}: {words}. What that and later calls gave is incomplete on any rank; destroy "
            "the group, and make another"
        )

    def _synchronize(self) -> None:
        """Wait until this rank's kernels are done; those of graphs are in any of its streams."""
        context = self.context
        if self._captured:
            context.runtime.synchronize_device(context.index)
        else:
            context.synchronize(context.work)

    def end_kernels(self, why: int, words: str) -> None:
        """End the kernels of all ranks, those that wait now and all later ones, unless that has
        been done: FAILED or CLOSED, and more in words.

        This asks nothing of the driver, and so works whatever the device and other threads are at.
        """
        if not self._failure[0]:
            said = words.encode()[: self._board.shape[1] - _WORDS]
            self._board[self.me, _WORDS : _WORDS + len(said)] = np.frombuffer(said, np.uint8)
            self._failure[0] = Failure(0, why, self.me, 0).pack()

    def _said(self, rank: int) -> str:
        said = self._board[rank, _WORDS:].tobytes().rstrip(b"\0").decode(errors="replace")
        return said or f"rank {self.group.ranks[rank]} has failed"

    def take_leave(self, kind: CallKind, error: Exception) -> None:
        """End the other ranks' kernels, and break the group: this rank has failed on its way to a
        call. What was refused is refused on all ranks, and no kernel of theirs waits.
        """
        if isinstance(error, UsageError):
            return
        group, number = self.group, (self.group.whole or self.group).sequence
        self.end_kernels(
            FAILED,
            f"rank {group.ranks[self.me]} failed in call {number}, {kind.primitive.name}: "
            f"{type(error).__name__}: {error}",
        )
        if group.error is None and (failure := self.find_failure()) is not None:
            group.fail(failure)

    def break_with(self, error: DistBackendError, alone: bool) -> None:
        """End the kernels of all ranks; the group is broken."""
        why = CLOSED if isinstance(error, CollectiveTimeoutError) else FAILED
        self.end_kernels(why, f"rank {self.group.ranks[self.me]} has left the group: {error}")

    # ---- Begin and end ---------------------------------------------------------------------------

    def try_once(self) -> str:
        """Carry out an all-gather in a short time; return why it failed, "" if it did not."""
        context, n, me, found = self.context, self.n, self.me, self._peers
        send, recv = context.scratch(_TRIED), context.scratch(n * _TRIED)
        pinned = context.runtime.allocate_pinned(context.index, (n + 1) * _TRIED)
        host = pinned.on_host()[: (n + 1) * _TRIED].reshape(n + 1, _TRIED)
        host[0], host[1:] = _pattern(me), 0
        runtime, index, stream = context.runtime, context.index, context.to_device
        call = _tried(send.address, recv.address, n)
        self._peers = found._replace(limit=_nanoseconds(TRY_LIMIT))
        runtime.copy(index, send.address, pinned.address, _TRIED, stream)
        runtime.collective(index, self._peers, call, stream)
        runtime.copy(index, pinned.address + _TRIED, recv.address, n * _TRIED, stream)
        context.synchronize(stream)
        self._peers = found
        if self._failure[0]:
            if Failure.unpack(int(self._failure[0])).why == FAILED:
                return "another rank has failed, and says why"
            return f"what a rank writes to another's memory does not arrive within {TRY_LIMIT} s"
        wrong = [rank for rank in range(n) if (host[1 + rank] != _pattern(rank)).any()]
        return f"what rank {wrong[0]} writes to this rank's memory is wrong there" if wrong else ""

    def close(self, limit: float) -> None:
        """Let go of the workspaces, waiting for others for so many seconds; all ranks call."""
        self._synchronize()
        self._workspaces.close(limit)


def _nanoseconds(seconds: float | None) -> int:
    return 1 << 62 if seconds is None else int(seconds * 1e9)


def _pattern(rank: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(rank).integers(0, 256, _TRIED, np.uint8)


def _tried(send: int, recv: int, n: int) -> Collective:
    starts = range(0, (n + 1) * _TRIED // 8, _TRIED // 8)
    return Collective("all_gather", None, 8, send, recv, starts=list(starts))


def _meet(agreed: Agreed) -> Peers | str:
    """Return what the ranks have of each other, once a try has shown that it works, or why not."""
    group, context = agreed.group, agreed.context
    runtime, index, n = context.runtime, context.index, group.size()
    if n > RANKS:
        return f"the kernels serve {RANKS} ranks at most, and the group has {n}"

    def prepare(own: Memory) -> int:
        zeros = runtime.allocate_pinned(index, HEADER.itemsize)
        zeros.on_host()[: HEADER.itemsize] = 0
        # In a stream of its own: the host does not wait for what the call comes after.
        runtime.copy(index, own.address, zeros.address, HEADER.itemsize, context.to_device)
        context.synchronize(context.to_device)
        runtime.load_collective(index, _tried(0, 0, n))
        return min(peers.BLOCKS, runtime.multiprocessors(index))

    workspaces = map_each_other(group, context, HEADER.itemsize + WORKSPACE, prepare, int)
    if isinstance(workspaces, str):
        return workspaces
    made, problem = None, ""
    segment = share(group.inner, mmap.PAGESIZE, True)
    try:
        if segment is None:
            raise UnsupportedError("the ranks share no memory of the host")
        board = np.frombuffer(segment.memory, np.uint8).reshape(n, -1)
        pinned = runtime.register(index, board.ctypes.data, board.nbytes)
        failure = runtime.reach(index, board.ctypes.data)
        made = Peers(agreed, workspaces, board, pinned, failure)
    except Exception as error:
        problem = f"no memory by which kernels can be ended: {error}"
    why = first_problem(control_messages.allgather(group.inner, problem, str))
    if made is not None and not why:
        try:
            problem = made.try_once()
        except Exception as error:
            problem = str(error)
            made.end_kernels(FAILED, problem)
        why = first_problem(control_messages.allgather(group.inner, problem, str))
        if not why:
            return made
    workspaces.close()
    return why


# --- calls --------------------------------------------------------------------------------------


def _build(kind: CallKind, agreed: Agreed) -> Implementation:
    return build_at_home(kind, agreed, agreed.state(Peers), _FUNCTIONS[kind.primitive.name])


def _reduction(found: Peers, kind: CallKind) -> Callable[[Collective, Extent, int], None]:
    """Return what carries out a reduction of some elements, given its name, addresses and blocks:
    of elements; and the extent and the root.
    """
    _, _, op, dtype = kind
    assert op is not None and dtype is not None
    by = find_loop(op, dtype)
    assert by is not None
    numbers, width = by.elements, by_name[by.format].itemsize
    divisor = found.n if op is ReduceOp.AVG else 1

    def carry_out(call: Collective, extent: Extent, root: int) -> None:
        count, starts = call.count * numbers, [start * numbers for start in call.starts]
        found.carry_out(
            replace(
                call, by=by, width=width, divisor=divisor, count=count, starts=starts,
                call=found.digest(kind, extent, root),
            )
        )  # fmt: skip

    return carry_out


def _reduce(found: Peers, kind: CallKind) -> Implementation:
    """Build reduce, and all_reduce, which has no root."""
    carry_out, rooted = _reduction(found, kind), kind.primitive.name == "reduce"

    def reduce(send: None, view: DeviceView, count: int, root: int) -> None:
        call = Collective("all_reduce", None, 0, 0, view.address, view.count)
        carry_out(replace(call, root=root) if rooted else call, count, root)

    return reduce


def _reduce_scatter(found: Peers, kind: CallKind) -> Implementation:
    carry_out = _reduction(found, kind)

    def reduce_scatter(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        counts = extent.sends if isinstance(extent, Blocks) else [extent] * found.n
        starts = list(accumulate(counts, initial=0))
        carry_out(
            Collective("reduce_scatter", None, 0, send.address, recv.address, starts=starts),
            extent,
            0,
        )

    return reduce_scatter


def _all_gather(found: Peers, kind: CallKind) -> Implementation:
    def all_gather(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        counts = extent.receives if isinstance(extent, Blocks) else [extent] * found.n
        starts = [each * recv.dtype.itemsize for each in accumulate(counts, initial=0)]
        width = gcd(8, send.address, recv.address, *starts)
        found.carry_out(
            Collective(
                "all_gather", None, width, send.address, recv.address,
                starts=[start // width for start in starts],
                call=found.digest(kind, extent, 0),
            )
        )  # fmt: skip

    return all_gather


def _broadcast(found: Peers, kind: CallKind) -> Implementation:
    def broadcast(send: None, view: DeviceView, count: int, root: int) -> None:
        width = gcd(8, view.address, view.nbytes)
        found.carry_out(
            Collective(
                "broadcast", None, width, 0, view.address, view.nbytes // width, root=root,
                call=found.digest(kind, count, root),
            )
        )  # fmt: skip

    return broadcast


#: By the name of the primitive.
_FUNCTIONS: dict[str, Callable[[Peers, CallKind], Implementation]] = {
    "all_reduce": _reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "broadcast": _broadcast,
}


class _Loader(Peers):
    """Compiles the kernels of calls, and carries out none."""

    def __init__(self, found: Peers) -> None:
        vars(self).update(vars(found))

    def carry_out(self, call: Collective) -> None:
        """Compile what the call needs."""
        self.context.runtime.load_collective(self.context.index, call)


def _build_loader(kind: CallKind, agreed: Agreed) -> Implementation:
    """Return what compiles the kernels of such calls."""
    return _FUNCTIONS[kind.primitive.name](_Loader(agreed.state(Peers)), kind)


ROUTE = Route(
    "peer",
    "one kernel on each GPU, which writes to the others' memory",
    MemoryKind.DEVICE,
    tuple(_FUNCTIONS),
    _build,
    _meet,
    combines=lambda op, dtype: find_loop(op, dtype) is not None,
    reproducible=(ORDER,),
    scales=True,
    uneven=("all_gather", "reduce_scatter"),
    place="gpus",
    needs="all ranks on one node, each with a GPU of its own, and CUDA IPC between them",
    lacks=lambda own: own.lacks_gpu(CUDA),
    blocks="",
    captures=True,
    load=_build_loader,
)
