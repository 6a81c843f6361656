"""GPU-to-GPU kernels: one kernel per rank and call, with a GPU per rank and peer access.

The kernels (``kernels/src/device_peers.cu``) write into each other's workspaces and wait for flags
there. The hosts do not synchronize: a call only enqueues work on a stream, and may be captured into
a CUDA graph. Ranks that share a GPU use another route, because their kernels would be time-sliced.

A *failure word* in shared host memory, which the devices read, ends the kernels of all ranks with a
reason. It is written by a kernel that has waited for the group's timeout, or by a rank that fails
before it enqueues its kernel, closes the group, or learns that a rank is lost. That rank's host
stores a message beside it. ``find_failure`` reads both; then the group has failed, because streams
have continued without results.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation, Run
from mpicoll.core.reproducible import ORDER
from mpicoll.core.signature import describe
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.runtime import Memory
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
from mpicoll.routes.device.state import (
    RouteState,
    build_on_home_device,
    first_problem,
    signature_of,
)
from mpicoll.routes.device.workspaces import Workspaces, map_each_other, share_pages
from mpicoll.routes.route import Needs, Policy, Route, Serves, has_loop

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]

#: Size of a workspace in bytes, without its header.
WORKSPACE = 32 * 1024 * 1024
#: Seconds to wait for another rank in the trial call.
TRY_LIMIT = 20.0
#: Bytes of each rank in the trial call.
_TRIED = 4096
#: Offset of a rank's message on its page of the board; rank 0's page starts with the failure word.
_WORDS = 128
#: Exception class by reason in the failure word.
_ERRORS = {
    LATE: CollectiveTimeoutError,
    DIFFERS: MismatchError,
    FAILED: DistBackendError,
    CLOSED: CollectiveTimeoutError,
}


class Peers(RouteState):
    """The workspaces of a group's ranks.

    board:   shared host memory, by rank: _WORDS bytes, then the rank's failure message.
    failure: device address of the failure word.
    """

    can_fail_on_device = True

    def __init__(
        self,
        agreement: Agreement,
        workspaces: Workspaces,
        board: np.ndarray[Any, np.dtype[np.uint8]],
        pinned: object,
        failure: int,
    ) -> None:
        super().__init__(agreement)
        self._workspaces = workspaces
        self._board, self._pinned = board, pinned
        self._failure = board[0, :8].view(np.uint64)
        self._calls: dict[int, tuple[int, int]] = {}  # by digest
        self._captured = False  # calls are in graphs, which users may run in any stream
        blocks = min(workspaces.said)
        self._peers = peers.Peers(
            tuple(memory.address for memory in workspaces.all), self.me, failure,
            _nanoseconds(self.group.timeout), peers.room_of(WORKSPACE, self.n, blocks), blocks,
        )  # fmt: skip

    def digest(self, kind: CallKind, extent: Extent, root: int) -> int:
        """Return the 16-bit hash of a call's signature, which the kernels compare."""
        signature = signature_of(kind, extent, root)
        digest = zlib.crc32(repr(signature).encode()) & 0xFFFF
        self._calls[digest] = signature
        return digest

    def carry_out(self, call: Collective) -> None:
        """Enqueue this rank's kernel.

        Raises the group's error if kernels have ended without a result, and UnsupportedError in a
        capture if the kernel is not compiled yet.
        """
        self.check()
        whole = self.group.whole or self.group
        context, limit = self.context, _nanoseconds(whole.timeout)
        if limit != self._peers.limit:
            self._peers = self._peers._replace(limit=limit)
        if context.captured and not context.runtime.has_collective(context.index, call):
            raise UnsupportedError(
                f"{call.name}: the current stream is being captured into a CUDA graph, and the "
                "kernel is not compiled yet; make the same call, with arrays of the same "
                "alignment, before the capture"
            )
        context.runtime.load_collective(context.index, call)
        context.runtime.collective(context.index, self._peers, call, context.work)
        self._captured = self._captured or context.captured

    # ---- Kernels that end without a result -------------------------------------------------------

    def check(self) -> None:
        failure = self.find_failure()
        if failure is not None:
            raise failure

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        whole, ranks = self.group.whole or self.group, self.group.ranks
        if wait:
            try:
                self._synchronize()
            except Exception as error:
                return DistBackendError(
                    f"rank {ranks[self.me]} of group {whole.group_name}: the device failed: {error}"
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
            LATE: f"timed out: rank {ranks[rank]}'s GPU has waited {limit} s for rank "
            f"{ranks[other]}'s",
            DIFFERS: f"collective mismatch: ranks {ranks[other]} and {ranks[rank]} made different "
            "calls",
        }.get(why) or self._said(rank)
        return _ERRORS[why](
            f"{name}: {words}. Results of this call and later ones may be incomplete on all ranks; "
            "destroy the group and create a new one"
        )

    def _synchronize(self) -> None:
        """Wait until this rank's kernels are done, in any stream if there are graphs."""
        context = self.context
        if self._captured:
            context.runtime.synchronize_device(context.index)
        else:
            context.synchronize(context.work)

    def end_kernels(self, why: int, words: str) -> None:
        """End the current and later kernels of all ranks, unless that was done before.

        why: FAILED or CLOSED; words: the message. It does not call the driver, which may block.
        """
        if not self._failure[0]:
            said = words.encode()[: self._board.shape[1] - _WORDS]
            self._board[self.me, _WORDS : _WORDS + len(said)] = np.frombuffer(said, np.uint8)
            self._failure[0] = Failure(0, why, self.me, 0).pack()

    def _said(self, rank: int) -> str:
        said = self._board[rank, _WORDS:].tobytes().rstrip(b"\0").decode(errors="replace")
        return said or f"rank {self.group.ranks[rank]} has failed"

    def notify_failure(self, kind: CallKind, error: Exception) -> None:
        """End the other ranks' kernels and fail the group: this rank failed before a call."""
        if isinstance(error, UsageError):  # raised on all ranks
            return
        group, number = self.group, (self.group.whole or self.group).sequence
        self.end_kernels(
            FAILED,
            f"rank {group.ranks[self.me]} failed in call {number}, {kind.primitive.name}: "
            f"{type(error).__name__}: {error}",
        )
        if group.error is None and (failure := self.find_failure()) is not None:
            group.fail(failure)

    def abort(self, error: DistBackendError, alone: bool) -> None:
        why = CLOSED if isinstance(error, CollectiveTimeoutError) else FAILED
        self.end_kernels(why, f"rank {self.group.ranks[self.me]} has left the group: {error}")

    # ---- Begin and end ---------------------------------------------------------------------------

    def try_once(self) -> str:
        """Run an all_gather with a short timeout; return "" or the reason why it failed."""
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
                return "another rank failed, see its error"
            return f"data written to another rank's memory did not arrive within {TRY_LIMIT} s"
        wrong = [rank for rank in range(n) if (host[1 + rank] != _pattern(rank)).any()]
        return f"data that rank {wrong[0]} wrote to this rank's memory is wrong" if wrong else ""

    def close(self, limit: float) -> None:
        self._synchronize()
        self._workspaces.close(limit)


def _nanoseconds(seconds: float | None) -> int:
    return 1 << 62 if seconds is None else int(seconds * 1e9)


def _pattern(rank: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(rank).integers(0, 256, _TRIED, np.uint8)


def _tried(send: int, recv: int, n: int) -> Collective:
    starts = range(0, (n + 1) * _TRIED // 8, _TRIED // 8)
    return Collective("all_gather", None, 8, send, recv, starts=list(starts))


def _negotiate(agreement: Agreement) -> Peers | str:
    """Return the mapped workspaces after a successful trial call, or the reason why not."""
    group, context = agreement.group, agreement.context
    runtime, index, n = context.runtime, context.index, group.size()
    if n > RANKS:
        return f"the kernels support {RANKS} ranks at most, and the group has {n}"

    def prepare(own: Memory) -> int:
        zeros = runtime.allocate_pinned(index, HEADER.itemsize)
        zeros.on_host()[: HEADER.itemsize] = 0
        # Not in the work stream, so that the host does not wait for the user's work.
        runtime.copy(index, own.address, zeros.address, HEADER.itemsize, context.to_device)
        context.synchronize(context.to_device)
        runtime.load_collective(index, _tried(0, 0, n))
        return min(peers.BLOCKS, runtime.multiprocessors(index))

    workspaces = map_each_other(group, context, HEADER.itemsize + WORKSPACE, prepare)
    if isinstance(workspaces, str):
        return workspaces
    made, problem = None, ""
    board = share_pages(group, mmap.PAGESIZE)
    try:
        if board is None:
            raise UnsupportedError("the ranks cannot share host memory")
        pinned = runtime.register(index, board.ctypes.data, board.nbytes)
        failure = runtime.reach(index, board.ctypes.data)
        made = Peers(agreement, workspaces, board, pinned, failure)
    except Exception as error:
        problem = f"no memory for the failure word: {error}"
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


def _reduce_by(found: Peers, kind: CallKind, call: Collective, extent: Extent, root: int) -> None:
    """Enqueue a reduction. The Collective is in units of elements."""
    assert kind.op is not None and kind.dtype is not None
    by = find_loop(kind.op, kind.dtype)
    assert by is not None
    found.carry_out(
        replace(
            call, by=by, width=by_name[by.format].itemsize, count=call.count * by.elements,
            starts=[start * by.elements for start in call.starts],
            divisor=found.n if kind.op is ReduceOp.AVG else 1,
            call=found.digest(kind, extent, root),
        )
    )  # fmt: skip


def _reduce(
    found: Peers, kind: CallKind, send: None, view: DeviceView, count: int, root: int
) -> None:
    call = Collective("all_reduce", None, 0, 0, view.address, view.count)
    rooted = kind.primitive.name == "reduce"
    _reduce_by(found, kind, replace(call, root=root) if rooted else call, count, root)


def _reduce_scatter(
    found: Peers, kind: CallKind, send: DeviceView, recv: DeviceView, extent: Extent, root: int
) -> None:
    counts = extent.sends if isinstance(extent, Blocks) else [extent] * found.n
    starts = list(accumulate(counts, initial=0))
    call = Collective("reduce_scatter", None, 0, send.address, recv.address, starts=starts)
    _reduce_by(found, kind, call, extent, 0)


def _all_gather(
    found: Peers, kind: CallKind, send: DeviceView, recv: DeviceView, extent: Extent, root: int
) -> None:
    counts = extent.receives if isinstance(extent, Blocks) else [extent] * found.n
    starts = [each * recv.dtype.itemsize for each in accumulate(counts, initial=0)]
    width = gcd(8, send.address, recv.address, *starts)
    found.carry_out(
        Collective(
            "all_gather", None, width, send.address, recv.address,
            starts=[start // width for start in starts], call=found.digest(kind, extent, 0),
        )
    )  # fmt: skip


def _broadcast(
    found: Peers, kind: CallKind, send: None, view: DeviceView, count: int, root: int
) -> None:
    width, call = gcd(8, view.address, view.nbytes), found.digest(kind, count, root)
    count = view.nbytes // width
    found.carry_out(
        Collective("broadcast", None, width, 0, view.address, count, root=root, call=call)
    )


_FUNCTIONS: dict[str, Callable[..., None]] = {
    "all_reduce": _reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "broadcast": _broadcast,
}


def _make(found: Peers, kind: CallKind) -> Run:
    return partial(_FUNCTIONS[kind.primitive.name], found, kind)


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    return build_on_home_device(kind, agreement, agreement.state(Peers), _make)


class _Loader(Peers):
    """Compiles the kernels of calls without running them."""

    def __init__(self, found: Peers) -> None:
        vars(self).update(vars(found))

    def carry_out(self, call: Collective) -> None:
        self.context.runtime.load_collective(self.context.index, call)


def _build_loader(kind: CallKind, agreement: Agreement) -> Implementation:
    return Implementation(_make(_Loader(agreement.state(Peers)), kind))


ROUTE = Route(
    __name__,
    "one kernel on each GPU, which writes to the memory of the other GPUs",
    Serves(
        tuple(_FUNCTIONS),
        combines=has_loop,
        reproducible=(ORDER,),
        premultiplies=True,
        uneven=("all_gather", "reduce_scatter"),
    ),
    _build,
    Needs(
        "gpus",
        "all ranks on one node, each with its own GPU, and CUDA IPC between them",
        Capabilities.lacks_gpu,
    ),
    Policy(host_waits_for="", capturable=True),
    negotiate=_negotiate,
    preload=_build_loader,
)
