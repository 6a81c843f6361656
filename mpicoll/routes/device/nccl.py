"""NVIDIA's NCCL, for programs that request it by ``backend="nccl"``, with a GPU for each rank.

NCCL rounds half types at each addition, in an unspecified order: its sums are not those of the
other routes to the last bit, and ranks do not compare their calls.

NCCL's kernels wait for other ranks for ever. So the calls that the device has not done are kept,
with the time when they were put into the stream. The watchdog, and whoever looks for a result, asks
NCCL for errors, and whether a call has outlasted the group's timeout. Then the communicator is
aborted (ncclCommAbort), which ends its kernels, and the group is broken, as torch's
ProcessGroupNCCL does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation
from mpicoll.core.signature import describe
from mpicoll.cuda.runtime import Event, NcclCommunicator
from mpicoll.cuda.streams import look_until
from mpicoll.cuda.threads import attend
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.errors import CollectiveTimeoutError, DistBackendError, UsageError
from mpicoll.failures.group_failure import fail_all_ranks
from mpicoll.launch.host_identity import node
from mpicoll.routes.device.state import Agreed, RouteState, build_at_home
from mpicoll.routes.device.user_buffers import signature_of
from mpicoll.routes.route import EXCHANGES, MOVES, REDUCTIONS, MemoryKind, Route
from mpicoll.routes.wire import all_gather_bytes

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["ROUTE", "Nccl", "asked_for"]

#: NCCL's operations (ncclRedOp_t) and the dtypes that it computes with (ncclDataType_t).
_OPERATIONS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_BYTE = _DTYPES["uint8"]


def asked_for(backend: str) -> bool:
    """Return whether a backend asks for NCCL: "nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"."""
    return any(part in ("nccl", "cuda:nccl") for part in backend.split(","))


#: Seconds after which NCCL and the device are asked again, by who does not wait and by who does;
#: and in which an abort ends.
_INTERVAL, _PAUSE, _ABORT = 0.1, 1e-3, 10.0
#: Seconds in which NCCL lets go of all ranks that make a communicator; bytes of a rank's words of
#: why it has not; and exchanges of these to which some ranks have not come.
_TOGETHER, _WORDS = 60.0, 512
_left_behind: list[object] = []
#: Calls that the device has not done, from which on a call looks whether it has done some.
_MANY = 64


class _Pending(NamedTuple):
    """A call that was put into the stream, as number ``number`` of the group, and when."""

    number: int
    signature: tuple[int, int]
    since: float
    done: Event


class Nccl(RouteState):
    """A group's NCCL communicator."""

    maps = False
    ends_on_devices = True

    def __init__(self, agreed: Agreed, comm: NcclCommunicator) -> None:
        super().__init__(agreed.group, agreed.context)
        self.comm = comm
        self._pending: deque[_Pending] = deque()
        self._failure: DistBackendError | None = None
        self._next_look = time.monotonic() + _INTERVAL
        self._lock = threading.Lock()  # the watchdog looks, too

    def enter(self, kind: CallKind, extent: Extent, root: int) -> None:
        """Note a call that was put into the stream."""
        number, signature = self.group.sequence, signature_of(kind, extent, root)
        self._pending.append(_Pending(number, signature, time.monotonic(), self.context.record()))
        if len(self._pending) > _MANY:
            with self._lock:
                self._forget_done()

    def _forget_done(self) -> None:
        """Forget the calls that are done."""
        while self._pending and self.context.runtime.is_done(self._pending[0].done):
            self._pending.popleft()

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return why NCCL's calls have ended without results; None if none has, as far as is known.
        Aborts the communicator if NCCL says that something is wrong, or a call lasts too long.

        wait: until the calls are done, or the first has outlasted the group's timeout.
        """
        if self._failure is not None or not (wait or time.monotonic() > self._next_look):
            return self._failure
        self._look()
        while wait and self._failure is None and self._pending:
            time.sleep(_PAUSE)
            self._look()
        return self._failure

    def _look(self) -> None:
        """Ask NCCL and the device, and abort the communicator if something is wrong."""
        self._next_look = time.monotonic() + _INTERVAL
        name, limit = f"rank {self.me} of group {self.group.group_name}", self.group.timeout
        failure: DistBackendError | None = None
        with self._lock:
            if self._failure is not None:
                return
            try:
                self.comm.check_async_error()
                self._forget_done()
                for number, signature, since, _ in list(self._pending)[:1]:
                    if limit is not None and time.monotonic() > since + limit:
                        failure = CollectiveTimeoutError(
                            f"{describe(*signature)}, on {name}, call {number}: NCCL has not done "
                            f"it within the group's timeout of {limit:g} s; another rank has not "
                            "made this call, or is still on its way"
                        )
            except Exception as error:  # whatever NCCL or the device says
                failure = DistBackendError(f"{name}: NCCL has failed: {error}")
            if failure is not None:
                (words,) = failure.args
                self._failure = type(failure)(
                    f"{words}. NCCL's communicator is aborted, and what that and later calls gave "
                    "is incomplete; destroy the group, and make another"
                )
                self._abort()

    def _abort(self) -> None:
        """End NCCL's kernels, which may take its threads a while."""

        def abort() -> None:
            attend()
            self.comm.abort()

        thread = threading.Thread(target=abort, name="mpicoll-nccl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT)

    def take_leave(self, kind: CallKind, error: Exception) -> None:
        """Have the others abort their communicators: this rank has failed on its way to a call."""
        if not isinstance(error, UsageError):
            fail_all_ranks(self.group, error)

    def break_with(self, error: DistBackendError, alone: bool) -> None:
        """Abort the communicator of a group that is broken."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                self._abort()

    def close(self, limit: float) -> None:
        """End the communicator, when what was enqueued is done; see find_failure."""
        if self.find_failure(wait=True) is None:
            self.comm.destroy()


def _meet(agreed: Agreed) -> Nccl | str:
    """Return the communicator of all ranks, or, on all, why there is none.

    Where NCCL fails on some ranks, and keeps others, which cannot be taken out of it, those on
    which it has failed raise a DistBackendError after a while.
    """
    group, context = agreed.group, agreed.context
    runtime = context.runtime
    able = runtime.has_nccl()
    mine = f"{node()} {runtime.pci_bus_id(context.index)}" if able else ""
    everybody = [
        bytes(one) for one in all_gather_bytes(group.inner, np.frombuffer(mine.encode(), np.uint8))
    ]
    if not all(everybody):
        return f"rank {everybody.index(b'')} has no NCCL"
    if len(set(everybody)) < len(everybody):
        return "two ranks share a GPU"
    identity, problem = b"", ""
    if group.rank() == 0:
        try:
            identity = runtime.nccl_unique_id()
        except Exception as error:  # whatever NCCL says: all ranks take another route then
            problem = f"rank 0: {error}"
    identity, problem = control_messages.bcast(
        group.inner, (identity, problem), 0, tuple[bytes, str]
    )
    if problem:
        return problem
    made = None
    try:
        made = runtime.create_nccl(context.index, group.size(), identity, group.rank())
    except Exception as error:  # whatever NCCL says
        problem = f"rank {group.rank()}: {error}"
    why = _first_problem(group, problem)
    if made is None or why:
        if made is not None:
            made.abort()  # which meets nobody
        return why
    return Nccl(agreed, made)


def _first_problem(group: ProcessGroup, problem: str) -> str:
    """Return the first problem of a rank, "" for none. All ranks call that NCCL lets go.

    Raises DistBackendError if the others do not, within _TOGETHER seconds.
    """
    mine, said = np.zeros(_WORDS, np.uint8), np.zeros((group.size(), _WORDS), np.uint8)
    words = problem.encode()[:_WORDS]
    mine[: len(words)] = np.frombuffer(words, np.uint8)
    request = group.inner.Iallgather(mine, said)
    if not look_until(request.Test, time.monotonic() + _TOGETHER):
        _left_behind.append((request, mine, said))
        raise DistBackendError(
            f"group {group.group_name}: {problem or 'NCCL has made a communicator'}; other ranks "
            f"are still in ncclCommInitRank after {_TOGETHER:g} s, and nothing takes them out of it"
        )
    found = (one.tobytes().rstrip(b"\0").decode(errors="replace") for one in said)
    return next(filter(None, found), "")


def _make(nccl: Nccl, kind: CallKind) -> Implementation:
    inner = _FUNCTIONS[kind.primitive.name](nccl, kind)

    def carry_out(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        with nccl.context.runtime.on(nccl.context.index):
            inner(send, recv, extent, root)
        nccl.enter(kind, extent, root)

    return carry_out


def _build(kind: CallKind, agreed: Agreed) -> Implementation:
    return build_at_home(kind, agreed, agreed.state(Nccl), _make)


def _combines(op: ReduceOp, dtype: DType) -> bool:
    """Return whether NCCL computes with such elements; it does not average integers."""
    if dtype.name not in _DTYPES or op.name not in _OPERATIONS:
        return False
    return op is not ReduceOp.AVG or dtype.kind is not Kind.INTEGER


# --- moves --------------------------------------------------------------------------------------


def _unit(nbytes: int) -> tuple[int, int]:
    """Return NCCL's dtype for moving ``nbytes`` bytes, and its size: CuPy counts in C's int."""
    return (_BYTE, 1) if nbytes % 8 else (_DTYPES["uint64"], 8)


#: A message: the rank, the address, and the bytes.
_Message = tuple[int, int, int]


def _exchange(nccl: Nccl, sends: Sequence[_Message], receives: Sequence[_Message]) -> None:
    """Send and receive all messages of a call at once; empty ones are none."""
    stream = nccl.context.work
    with nccl.context.runtime.nccl_group():
        for rank, address, nbytes in sends:
            kind, unit = _unit(nbytes)
            if nbytes:
                nccl.comm.send(address, nbytes // unit, kind, rank, stream)
        for rank, address, nbytes in receives:
            kind, unit = _unit(nbytes)
            if nbytes:
                nccl.comm.recv(address, nbytes // unit, kind, rank, stream)


def _cut(view: DeviceView, counts: Sequence[int]) -> list[_Message]:
    """Return the blocks of a buffer, one for each rank."""
    size = view.dtype.itemsize
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    return [
        (rank, view.address + start * size, count * size)
        for rank, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def _broadcast(nccl: Nccl, kind: CallKind) -> Implementation:
    def broadcast(send: None, recv: DeviceView, extent: Extent, root: int) -> None:
        moved, unit = _unit(recv.nbytes)
        count, at = recv.nbytes // unit, recv.address
        nccl.comm.broadcast(at, at, count, moved, root, nccl.context.work)

    return broadcast


def _all_gather(nccl: Nccl, kind: CallKind) -> Implementation:
    """Build all_gather; blocks that differ go by messages."""

    def all_gather(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        if isinstance(extent, Blocks):
            out = [(rank, send.address, send.nbytes) for rank in range(nccl.n)]
            _exchange(nccl, out, _cut(recv, extent.receives))
            return
        moved, unit = _unit(send.nbytes)
        count = send.nbytes // unit
        nccl.comm.allGather(send.address, recv.address, count, moved, nccl.context.work)

    return all_gather


def _gather(nccl: Nccl, kind: CallKind) -> Implementation:
    def gather(send: DeviceView, recv: DeviceView | None, count: int, root: int) -> None:
        into = [] if recv is None else _cut(recv, [count] * nccl.n)
        _exchange(nccl, [(root, send.address, send.nbytes)], into)

    return gather


def _scatter(nccl: Nccl, kind: CallKind) -> Implementation:
    def scatter(send: DeviceView | None, recv: DeviceView, count: int, root: int) -> None:
        out = [] if send is None else _cut(send, [count] * nccl.n)
        _exchange(nccl, out, [(root, recv.address, recv.nbytes)])

    return scatter


def _all_to_all(nccl: Nccl, kind: CallKind) -> Implementation:
    def all_to_all(send: DeviceView, recv: DeviceView, extent: Blocks, root: int) -> None:
        _exchange(nccl, _cut(send, extent.sends), _cut(recv, extent.receives))

    return all_to_all


# --- reductions ---------------------------------------------------------------------------------


def _constants(kind: CallKind) -> tuple[int, int]:
    """Return NCCL's numbers of the dtype and the operation."""
    assert kind.op is not None and kind.dtype is not None
    return _DTYPES[kind.dtype.name], _OPERATIONS[kind.op.name]


def _all_reduce(nccl: Nccl, kind: CallKind) -> Implementation:
    dtype, op = _constants(kind)

    def all_reduce(send: None, recv: DeviceView, count: int, root: int) -> None:
        nccl.comm.allReduce(recv.address, recv.address, count, dtype, op, nccl.context.work)

    return all_reduce


def _reduce(nccl: Nccl, kind: CallKind) -> Implementation:
    dtype, op = _constants(kind)

    def reduce(send: None, recv: DeviceView, count: int, root: int) -> None:
        nccl.comm.reduce(recv.address, recv.address, count, dtype, op, root, nccl.context.work)

    return reduce


def _reduce_scatter(nccl: Nccl, kind: CallKind) -> Implementation:
    """Build reduce_scatter; blocks that differ are reduced one after another."""
    dtype, op = _constants(kind)

    def reduce_scatter(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        stream = nccl.context.work
        if not isinstance(extent, Blocks):
            nccl.comm.reduceScatter(send.address, recv.address, extent, dtype, op, stream)
            return
        for (rank, address, _), count in zip(_cut(send, extent.sends), extent.sends, strict=True):
            if count:
                nccl.comm.reduce(address, recv.address, count, dtype, op, rank, stream)

    return reduce_scatter


#: By the name of the primitive.
_FUNCTIONS: dict[str, Callable[[Nccl, CallKind], Implementation]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
}

ROUTE = Route(
    "nccl",
    "NCCL",
    MemoryKind.DEVICE,
    (*MOVES, *REDUCTIONS, *EXCHANGES),
    _build,
    _meet,
    combines=_combines,
    uneven=("all_gather", "reduce_scatter", *EXCHANGES),
    needs='backend="nccl", NCCL on every rank, and a GPU for each',
    lacks=lambda own: "" if own.nccl else "NCCL",
    blocks="",
    on_demand=True,
)
