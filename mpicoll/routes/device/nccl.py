"""NCCL, for programs that request it by ``backend="nccl"``, with a GPU per rank.

NCCL rounds half types at each addition, in an unspecified order, so its sums may differ in the last
bit from other routes. Ranks do not compare their calls.

NCCL's kernels wait for other ranks without a timeout. So the route keeps the pending calls with the
time when they were enqueued. The watchdog thread and each wait for a result check NCCL for errors
and calls for the group's timeout. After a failure the communicator is aborted (ncclCommAbort),
which ends its kernels, and the group fails, as in torch's ProcessGroupNCCL.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import Blocks, CallKind, Extent, Run
from mpicoll.core.signature import describe
from mpicoll.cuda.runtime import Event
from mpicoll.cuda.streams import poll_until
from mpicoll.cuda.threads import use_process_device
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.errors import CollectiveTimeoutError, DistBackendError, UsageError
from mpicoll.failures.group_failure import fail_all_ranks
from mpicoll.launch.host_identity import node
from mpicoll.routes.device.space import DeviceSpace
from mpicoll.routes.device.state import RouteState, Unavailable, on_all_ranks, signature_of
from mpicoll.routes.route import EXCHANGES, MOVES, REDUCTIONS, Needs, Policy, Route, Serves

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE", "asked_for"]

#: NCCL's operations (ncclRedOp_t) and the dtypes that it computes with (ncclDataType_t).
_OPERATIONS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
#: ncclInProgress (ncclResult_t).
_IN_PROGRESS = 7


def asked_for(backend: str) -> bool:
    """Return whether a backend asks for NCCL: "nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"."""
    return any(part in ("nccl", "cuda:nccl") for part in backend.split(","))


#: Seconds between checks for failures, without and with waiting; seconds to wait for an abort.
_INTERVAL, _PAUSE, _ABORT = 0.1, 1e-3, 10.0
#: Seconds to wait for another thread's check before the communicator ends.
_CHECK_TIMEOUT_S = 1.0
#: Seconds for all ranks to return from ncclCommInitRank; size in bytes of a rank's error message.
_INIT_TIMEOUT_S, _WORDS = 60.0, 512
#: Buffers of exchanges of these messages that have timed out.
_left_behind: list[object] = []
#: Number of pending calls above which a call removes completed ones.
_MAX_PENDING_COUNT = 64


class _Pending(NamedTuple):
    """An enqueued call, with its call number and time."""

    number: int
    signature: tuple[int, int]
    since: float
    done: Event


class Nccl(RouteState):
    """A group's NCCL communicator (CuPy's class)."""

    can_fail_on_device = True

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.comm = self._create_communicator()
        self._pending: deque[_Pending] = deque()
        self._failure: DistBackendError | None = None
        self._next_look = time.monotonic() + _INTERVAL
        # Several threads check. Any line may block until the communicator is aborted, because the
        # garbage collector runs destructors that wait for the device. So no thread waits for these
        # locks without a timeout.
        self._lock = threading.Lock()
        self._end_lock = threading.Lock()  # never released
        self._ended = threading.Event()

    def _create_communicator(self) -> Any:
        """Return CuPy's communicator of all ranks. All ranks call.

        Where NCCL fails on a rank and other ranks stay blocked in it, the failed rank raises
        DistBackendError after a timeout.
        """
        group, runtime, index = self.group, self.context.runtime, self.context.index
        gpu = f"{node()} {runtime.pci_bus_id(index)}" if runtime.has_nccl() else ""
        gpus = control_messages.allgather(group.inner, gpu, str)
        if "" in gpus:
            raise Unavailable(f"rank {gpus.index('')} has no NCCL")
        if len(set(gpus)) < len(gpus):
            raise Unavailable("two ranks share a GPU")
        identity = on_all_ranks(group, "", lambda: b"" if self.me else runtime.nccl_unique_id())
        identity = control_messages.bcast(group.inner, identity, 0, bytes)
        made, problem = None, ""
        try:
            made = runtime.create_nccl(index, self.n, identity, self.me)
        except Exception as error:
            problem = f"rank {self.me}: {error}"
        why = _first_problem(group, problem)
        if why:
            if made is not None:
                made.abort()  # a local operation
            raise Unavailable(why)
        return made

    def bind(self, kind: CallKind, space: DeviceSpace) -> Run:
        function = _FUNCTIONS[kind.primitive.name]

        def run(
            send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
        ) -> None:
            with self.context.runtime.on(self.context.index):
                function(self, kind, send, recv, extent, root)
            self._enter(kind, extent, root)

        return run

    def _enter(self, kind: CallKind, extent: Extent, root: int) -> None:
        number, signature = self.group.sequence, signature_of(kind, extent, root)
        self._pending.append(_Pending(number, signature, time.monotonic(), self.context.record()))
        if len(self._pending) > _MAX_PENDING_COUNT and self._lock.acquire(blocking=False):
            try:
                self._forget_done()
            finally:
                self._lock.release()

    def _forget_done(self) -> None:
        while self._pending and self.context.runtime.is_done(self._pending[0].done):
            self._pending.popleft()

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return the failure of NCCL's calls, or None. Abort the communicator after an error of
        NCCL or a timeout.

        wait: first wait until the calls are done or one has timed out.
        """
        if self._failure is None and (wait or time.monotonic() > self._next_look):
            self._check()
            while wait and self._failure is None and self._pending:
                time.sleep(_PAUSE)
                self._check()
        if self._failure is not None:
            self._abort()
        return self._failure

    def _check(self) -> None:
        self._next_look = time.monotonic() + _INTERVAL
        name = f"rank {self.me} of group {self.group.group_name}"
        try:
            if self._lock.acquire(blocking=False):  # else another thread checks
                try:
                    if self._failure is None:
                        self._check_async_error()
                        self._forget_done()
                finally:
                    self._lock.release()
            failure = self._find_late_call(name)
        except Exception as error:
            failure = DistBackendError(f"{name}: NCCL failed: {error}")
        if failure is not None:
            (words,) = failure.args
            self._failure = self._failure or type(failure)(
                f"{words}. NCCL's communicator was aborted, and results of this call and later "
                "ones may be incomplete; destroy the group and create a new one"
            )

    def _find_late_call(self, name: str) -> DistBackendError | None:
        """Return the error of the first call that is not done within the group's timeout.

        Completed calls may come first: a blocked thread that holds the lock does not remove them.
        """
        limit, now = self.group.timeout, time.monotonic()
        for number, signature, since, done in list(self._pending):
            if limit is None or now <= since + limit:
                break
            if not self.context.runtime.is_done(done):
                return CollectiveTimeoutError(
                    f"{describe(*signature)}, on {name}, call {number}: timed out: NCCL has not "
                    f"done it within the group's timeout of {limit:g} s; another rank has not made "
                    "this call, or is late"
                )
        return None

    def _check_async_error(self) -> None:
        try:
            self.comm.check_async_error()
        except KeyError as error:  # CuPy's table of errors lacks ncclInProgress, which is none
            if error.args != (_IN_PROGRESS,):
                raise

    def _abort(self) -> None:
        """Abort the communicator on a thread, because it may block; wait a limited time."""
        if not self._end_lock.locked():
            threading.Thread(
                target=self._abort_once, name="mpicoll-nccl-abort", daemon=True
            ).start()
            self._ended.wait(_ABORT)

    def _abort_once(self) -> None:
        use_process_device()
        self._end(self.comm.abort)

    def _end(self, end: Callable[[], object]) -> None:
        """Abort or destroy the communicator, unless another thread does: NCCL allows only one."""
        if not self._end_lock.acquire(blocking=False):
            return
        self._lock.acquire(timeout=_CHECK_TIMEOUT_S)  # from now on no thread reads NCCL's error
        try:
            end()
        finally:
            self._ended.set()

    def notify_failure(self, kind: CallKind, error: Exception) -> None:
        if not isinstance(error, UsageError):
            fail_all_ranks(self.group, error)

    def abort(self, error: DistBackendError, alone: bool) -> None:
        self._failure = self._failure or error
        self._abort()

    def close(self, limit: float) -> None:
        if self._failure is None:  # destroy_process_group has called ``find_failure(wait=True)``
            self._end(self.comm.destroy)


def _first_problem(group: ProcessGroup, problem: str) -> str:
    """Return the first rank's problem, or "". All ranks call after ncclCommInitRank.

    Raises DistBackendError if a rank does not call within _INIT_TIMEOUT_S seconds.
    """
    mine, said = np.zeros(_WORDS, np.uint8), np.zeros((group.size(), _WORDS), np.uint8)
    words = problem.encode()[:_WORDS]
    mine[: len(words)] = np.frombuffer(words, np.uint8)
    request = group.inner.Iallgather(mine, said)
    if not poll_until(request.Test, time.monotonic() + _INIT_TIMEOUT_S):
        _left_behind.append((request, mine, said))
        raise DistBackendError(
            f"group {group.group_name}: {problem or 'NCCL created a communicator'}; timed out: "
            f"other ranks are still in ncclCommInitRank after {_INIT_TIMEOUT_S:g} s"
        )
    found = (one.tobytes().rstrip(b"\0").decode(errors="replace") for one in said)
    return next(filter(None, found), "")


def _combines(op: ReduceOp, dtype: DType) -> bool:
    """Return whether NCCL supports an operation on a dtype; it does not average integers."""
    if dtype.name not in _DTYPES or op.name not in _OPERATIONS:
        return False
    return op is not ReduceOp.AVG or dtype.kind is not Kind.INTEGER


# --- moves --------------------------------------------------------------------------------------


def _unit(nbytes: int) -> tuple[int, int]:
    """Return NCCL's dtype for moving ``nbytes`` bytes, and its size; CuPy's counts are C ints."""
    return (_DTYPES["uint8"], 1) if nbytes % 8 else (_DTYPES["uint64"], 8)


def _cut(view: DeviceView, counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the rank, address and bytes of each rank's block."""
    size, starts = view.dtype.itemsize, accumulate(counts, initial=0)
    return [
        (rank, view.address + start * size, count * size)
        for rank, (start, count) in enumerate(zip(starts, counts, strict=False))
    ]


def _exchange(
    nccl: Nccl, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: Extent,
    root: int,
) -> None:  # fmt: skip
    """Send and receive all messages of a call in one NCCL group; skip empty ones."""
    primitive, comm, n = kind.primitive, nccl.comm, nccl.n
    ranks = [root] if primitive.root else range(n)
    blocks = Blocks([extent] * n, [extent] * n) if isinstance(extent, int) else extent
    with nccl.context.runtime.nccl_group():
        for transfer, view, counts, in_blocks in (
            (comm.send, send, blocks.sends, primitive.many_in),
            (comm.recv, recv, blocks.receives, primitive.many_out),
        ):
            if view is None:
                continue
            whole = [(rank, view.address, view.nbytes) for rank in ranks]
            for rank, address, nbytes in _cut(view, counts) if in_blocks else whole:
                if nbytes:
                    dtype, unit = _unit(nbytes)
                    transfer(address, nbytes // unit, dtype, rank, nccl.context.work)


def _broadcast(
    nccl: Nccl, kind: CallKind, send: None, recv: DeviceView, extent: Extent, root: int
) -> None:
    (moved, unit), at = _unit(recv.nbytes), recv.address
    nccl.comm.broadcast(at, at, recv.nbytes // unit, moved, root, nccl.context.work)


def _all_gather(
    nccl: Nccl, kind: CallKind, send: DeviceView, recv: DeviceView, extent: Extent, root: int
) -> None:
    """Run all_gather; blocks of different sizes are sent as messages."""
    if isinstance(extent, Blocks):
        _exchange(nccl, kind, send, recv, extent, root)
        return
    moved, unit = _unit(send.nbytes)
    count, stream = send.nbytes // unit, nccl.context.work
    nccl.comm.allGather(send.address, recv.address, count, moved, stream)


# --- reductions ---------------------------------------------------------------------------------


def _constants(kind: CallKind) -> tuple[int, int]:
    assert kind.op is not None
    return _DTYPES[kind.dtype.name], _OPERATIONS[kind.op.name]


def _reduce(
    nccl: Nccl, kind: CallKind, send: None, recv: DeviceView, count: int, root: int
) -> None:
    """Run all_reduce or reduce."""
    both, numbers, stream = (recv.address, recv.address), _constants(kind), nccl.context.work
    if kind.primitive.root:
        nccl.comm.reduce(*both, count, *numbers, root, stream)
    else:
        nccl.comm.allReduce(*both, count, *numbers, stream)


def _reduce_scatter(
    nccl: Nccl, kind: CallKind, send: DeviceView, recv: DeviceView, extent: Extent, root: int
) -> None:
    """Run reduce_scatter; blocks of different sizes are reduced one after another."""
    numbers, stream = _constants(kind), nccl.context.work
    if not isinstance(extent, Blocks):
        nccl.comm.reduceScatter(send.address, recv.address, extent, *numbers, stream)
        return
    for (rank, address, _), count in zip(_cut(send, extent.sends), extent.sends, strict=True):
        if count:
            nccl.comm.reduce(address, recv.address, count, *numbers, rank, stream)


_FUNCTIONS: dict[str, Callable[..., None]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "gather": _exchange,
    "scatter": _exchange,
    "all_to_all": _exchange,
    "all_to_all_single": _exchange,
    "all_reduce": _reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
}

ROUTE = Route(
    __name__,
    "NCCL",
    Serves(
        (*MOVES, *REDUCTIONS, *EXCHANGES),
        combines=_combines,
        uneven=("all_gather", "reduce_scatter", *EXCHANGES),
    ),
    Nccl.build,
    Needs(
        description='backend="nccl", NCCL on every rank, and a GPU for each',
        missing_reason=lambda own: "" if own.nccl else "NCCL",
    ),
    Policy(on_request=True, host_waits_for=""),
    negotiate=Nccl,
)
