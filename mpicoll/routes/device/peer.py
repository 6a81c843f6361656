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
from mpicoll.core.plan import Blocks, CallKind, Extent, Run
from mpicoll.core.reproducible import ORDER
from mpicoll.core.signature import describe
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.runtime import Memory, allocate
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
from mpicoll.kernels.peers import CLOSED, DIFFERS, FAILED, LATE, RANKS, Collective, Failure
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.device.mappings import BLOCK, open_memory
from mpicoll.routes.device.space import DeviceSpace
from mpicoll.routes.device.state import (
    RELEASE_TIMEOUT_S,
    RouteState,
    Unavailable,
    on_all_ranks,
    share_pages,
    signature_of,
    timed_barrier,
)
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
    """The workspaces of a group's ranks."""

    can_fail_on_device = True

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._calls: dict[int, tuple[int, int]] = {}  # by digest
        self._captured = False  # calls are in graphs, which users may run in any stream
        self._own: Memory | None = None  # this rank's workspace
        self._workspaces: list[Memory] = []  # by rank
        self._peers: peers.Peers
        if self.n > RANKS:
            raise Unavailable(
                f"the kernels support {RANKS} ranks at most, and the group has {self.n}"
            )
        try:
            self._connect()
        except Unavailable:
            self._free(RELEASE_TIMEOUT_S)
            raise

    def bind(self, kind: CallKind, space: DeviceSpace) -> Run:
        return partial(_FUNCTIONS[kind.primitive.name], self, kind)

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
        failure = self.find_failure()
        if failure is not None:
            raise failure
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
        said = self._board[rank, _WORDS:].tobytes().rstrip(b"\0").decode(errors="replace")
        words = {
            LATE: f"timed out: rank {ranks[rank]}'s GPU has waited {limit} s for rank "
            f"{ranks[other]}'s",
            DIFFERS: f"collective mismatch: ranks {ranks[other]} and {ranks[rank]} made different "
            "calls",
        }.get(why, said or f"rank {ranks[rank]} has failed")
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

    def _connect(self) -> None:
        """Map the workspaces and the failure word, and run a trial call. All ranks call."""
        group = self.group
        exported, blocks = on_all_ranks(group, "no workspace: ", self._prepare)
        said = control_messages.allgather(group.inner, (exported, blocks), tuple[bytes, int])

        def map_all() -> None:
            for rank, (handle, _) in enumerate(said):
                own = self._own if rank == self.me else None
                self._workspaces.append(own or open_memory(self.context, handle))

        on_all_ranks(group, "cannot map another rank's device memory (CUDA IPC): ", map_all)
        board = share_pages(group, mmap.PAGESIZE)
        failure = on_all_ranks(
            group, "no memory for the failure word: ", lambda: self._register(board)
        )
        blocks = min(blocks for _, blocks in said)
        self._peers = peers.Peers(
            tuple(memory.address for memory in self._workspaces), self.me, failure,
            _nanoseconds(group.timeout), peers.room_of(WORKSPACE, self.n, blocks), blocks,
        )  # fmt: skip
        on_all_ranks(group, "", self._try_once)

    def _prepare(self) -> tuple[bytes, int]:
        """Prepare the trial call; return the workspace's handle and the most blocks of a kernel."""
        context, header = self.context, peers.HEADER.itemsize
        runtime, index, stream = context.runtime, context.index, context.to_device
        own = allocate(runtime, index, -(-(header + WORKSPACE) // BLOCK) * BLOCK)
        zeros = runtime.allocate_pinned(index, header)
        zeros.on_host()[:header] = 0
        # Not in the work stream, so that the host does not wait for the user's work.
        runtime.copy(index, own.address, zeros.address, header, stream)
        context.synchronize(stream)
        runtime.load_collective(index, _tried(0, 0, self.n))
        handle = runtime.export(index, own)
        self._own = own
        _exported.append(own)
        return handle, min(peers.BLOCKS, runtime.multiprocessors(index))

    def _register(self, board: np.ndarray[Any, np.dtype[np.uint8]] | None) -> int:
        """Return the address of the failure word on the device.

        board: shared host memory, by rank: _WORDS bytes, then the rank's failure message.
        """
        if board is None:
            raise UnsupportedError("the ranks cannot share host memory")
        runtime, index, address = self.context.runtime, self.context.index, board.ctypes.data
        self._pinned = runtime.register(index, address, board.nbytes)
        self._board, self._failure = board, board[0, :8].view(np.uint64)
        return runtime.reach(index, address)

    def _try_once(self) -> None:
        """Run an all_gather with a short timeout. Raises the reason why it failed."""
        context, n = self.context, self.n
        runtime, index, stream = context.runtime, context.index, context.to_device
        try:
            send, recv = context.scratch(_TRIED), context.scratch(n * _TRIED)
            pinned = runtime.allocate_pinned(index, (n + 1) * _TRIED)
            host = pinned.on_host()[: (n + 1) * _TRIED].reshape(n + 1, _TRIED)
            host[0], host[1:] = _pattern(self.me), 0
            limited = self._peers._replace(limit=_nanoseconds(TRY_LIMIT))
            runtime.copy(index, send.address, pinned.address, _TRIED, stream)
            runtime.collective(index, limited, _tried(send.address, recv.address, n), stream)
            runtime.copy(index, pinned.address + _TRIED, recv.address, n * _TRIED, stream)
            context.synchronize(stream)
        except Exception as error:
            self.end_kernels(FAILED, str(error))
            raise
        if self._failure[0]:
            if Failure.unpack(int(self._failure[0])).why == FAILED:
                raise DistBackendError("another rank failed, see its error")
            raise DistBackendError(
                f"data written to another rank's memory did not arrive within {TRY_LIMIT} s"
            )
        for rank in range(n):
            if (host[1 + rank] != _pattern(rank)).any():
                raise DistBackendError(
                    f"data that rank {rank} wrote to this rank's memory is wrong"
                )

    def close(self, limit: float) -> None:
        self._synchronize()
        self._free(limit)

    def _free(self, limit: float) -> None:
        """Unmap the other ranks' workspaces, and free this rank's once no rank maps it: never, if a
        rank does not call within ``limit`` seconds. All ranks call.
        """
        self._workspaces.clear()
        if timed_barrier(self.group, limit) and self._own is not None:
            _exported.remove(self._own)
            self._own = None


#: Workspaces that other ranks may have mapped, which must not be freed.
_exported: list[Memory] = []


def _nanoseconds(seconds: float | None) -> int:
    return 1 << 62 if seconds is None else int(seconds * 1e9)


def _pattern(rank: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(rank).integers(0, 256, _TRIED, np.uint8)


def _tried(send: int, recv: int, n: int) -> Collective:
    starts = range(0, (n + 1) * _TRIED // 8, _TRIED // 8)
    return Collective("all_gather", None, 8, send, recv, starts=list(starts))


# --- calls --------------------------------------------------------------------------------------


def _reduce_by(found: Peers, kind: CallKind, call: Collective, extent: Extent, root: int) -> None:
    """Enqueue a reduction. The Collective is in units of elements."""
    assert kind.op is not None
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
    Peers.build,
    Needs(
        "gpus",
        "all ranks on one node, each with its own GPU, and CUDA IPC between them",
        Capabilities.lacks_gpu,
    ),
    Policy(host_waits_for="", capturable=True),
    negotiate=Peers,
)
