"""Process groups: ranks, communicators, and the list of all open groups.

group: the process group; None is the default group.
global_rank: rank in the default group.
group_rank: rank in the group.

Raises NotInitializedError (a ValueError) before init_process_group, and ArgumentTypeError (a
TypeError) for a group or a rank of another type.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll import communicators, settings
from mpicoll.core import reproducible as levels
from mpicoll.core.indices import check_index
from mpicoll.core.progress import Worker
from mpicoll.core.resources import Resources
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistBackendError,
    ForkedError,
    LostRankError,
    MismatchError,
    NotInitializedError,
)
from mpicoll.kernels.calls import Calls
from mpicoll.launch.world import is_serialized, warn_if_serialized
from mpicoll.output import format_count
from mpicoll.serialized_mpi import create_group, unwrap, with_wait

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "GroupMember", "ProcessGroup", "get_global_rank", "get_group_rank", "get_process_group_ranks",
    "get_rank", "get_world_size", "group",
]  # fmt: skip


class RunningTask(NamedTuple):
    """A call without a call record: its name, its thread, and whether it checks its own timeout."""

    name: str
    thread: int
    keeps_time: bool


NO_TASK = RunningTask("", 0, False)


#: Functions of higher packages. Called with a group when it is OPEN, before its first call; with a
#: group and an error before the group fails, while no call can raise the error yet; and with a
#: group when it is CLOSED, maybe in a forked child.
on_open: list[Callable[[ProcessGroup], None]] = []
on_fail: list[Callable[[ProcessGroup, DistBackendError], None]] = []
on_close: list[Callable[[ProcessGroup], None]] = []


class Options(NamedTuple):
    """Options of a group: name of the backend, timeout in seconds, options of reductions."""

    backend: str
    timeout: float | None
    reductions: levels.Reductions


class ProcessGroup(Calls):
    """A group of ranks that call collectives together. Created by init_process_group and new_group.

    ranks: global ranks, in the order of the ranks in the group.
    timeout: seconds after which an operation fails; None for never.
    reproducible: level of reproducible reductions: None, "order" or "exact".
    wire: dtype in which sums of float32 cross the network: "float32" or "bfloat16".
    """

    def __init__(
        self,
        inner: MPI.Intracomm,
        messages: MPI.Intracomm,
        ranks: Sequence[int],
        options: Options,
        name: str,
        description: str,
        given: MPI.Intracomm | None = None,
    ) -> None:
        from mpi4py import MPI

        self.history_length = int(settings.RECORD_LENGTH.value() or 2000)  # as in torch
        super().__init__(threading.Lock(), self.history_length)
        for one in (inner, messages):
            return_errors(one)
        if is_serialized() or settings.TESTED_CALLS.is_set_to("1"):
            inner = with_wait(inner, self.wait_for)
        self._given = given  # see comm
        self.inner = inner  # communicator of collectives and of their internal exchanges
        self.messages = messages  # of the user's messages, so that tags do not collide
        self.ranks = tuple(ranks)
        self.backend, self.timeout, self.reductions = options
        self.reproducible, self.wire = self.reductions
        self.group_name = name
        self.group_desc = description
        self._rank = inner.Get_rank()
        self._size = inner.Get_size()
        self.place = f"on rank {self._rank} of group {name}"  # for descriptions of calls
        self.group_ranks = {rank: i for i, rank in enumerate(self.ranks)}
        self.whole: ProcessGroup | None = None  # user's group of an internal group of a route
        self.plans: dict[Any, Any] = {}  # by primitive, dtype and operation
        self.resources = Resources()
        self.formed = self.splits = 0  # numbers of groups created from this one, and of splits
        #: A call has raised an error that other ranks may still send messages about.
        self.expects_messages = False

        #: Why the group is FAILED, and the class of the errors of a CLOSED group.
        self.error: DistBackendError | None = None
        self.closed: type[Exception] | None = None
        self._changing = threading.RLock()  # held while the group fails or gets a progress thread
        #: Returns the error of device work that ended without its results, if it is known; takes
        #: whether to wait for the devices. None if the group has no such work.
        self.device_error: Callable[[bool], DistBackendError | None] | None = None
        self.pending_error: DistBackendError | None = None  # of devices, not raised by a call yet
        self.statuses: dict[int, Any] = {}  # of other ranks; see failures/rank_status.py

        self.pending: set[Any] = set()  # incomplete async collectives
        self.task = NO_TASK  # running call without a call record
        #: Compares one call (kind, sizes) in memory that the ranks share; else None.
        self.agree: Callable[[int, int], None] | None = None
        #: Calls that only enqueue work in streams, and how many of them are compared together.
        self.unmet: list[tuple[int, int, int]] = []
        self.stride = 1

        self.in_flight: set[Any] = set()  # incomplete messages of the user
        self.held_back: deque[Any] = deque()  # messages to send, in order, until the first is due
        #: Tag of status messages. Object messages have the next one, the user's have lower ones.
        self.status_tag: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - 1  # type: ignore[operator]

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    def name(self) -> str:
        """Return the name of the backend that was requested."""
        return self.backend

    @property
    def options(self) -> Options:
        """The options of the group."""
        return Options(self.backend, self.timeout, self.reductions)

    def group_rank(self, global_rank: int) -> int | None:
        """Return the rank in the group for a global rank, or None if it is not a member."""
        return self.group_ranks.get(global_rank)

    @property
    def comm(self) -> MPI.Intracomm:
        """Return a communicator of mpi4py for the program's own calls.

        A group that was created from a communicator returns that one. The default group of all
        ranks returns MPI.COMM_WORLD. Any other group creates its communicator on first use: every
        member must access it, in the same order among the group's collectives. It is freed with the
        group. mpicoll sends no messages over it.
        """
        self.check_open()
        if self._given is not None:
            return self._given

        def create() -> MPI.Intracomm:
            return communicators.create_private(self.inner)

        def free(comm: MPI.Intracomm, limit: float) -> None:
            # The program may have freed it. After an error it may receive a late message.
            if self.error is None and unwrap(comm) != sys.modules["mpi4py.MPI"].COMM_NULL:
                comm.Free()

        run = partial(state.run_task, self, "ProcessGroup.comm", create, root=-1)
        return unwrap(self.resources.get_or_create("comm", run, close=free))

    def free(self) -> None:
        """Free the group's own communicators, except one with a message that did not arrive."""
        from mpi4py import MPI

        for one in (self.messages, self.inner):
            if unwrap(one) != MPI.COMM_NULL and _drain(one):
                one.Free()

    @property
    def begun(self) -> int:
        """Return the number of collectives started, including the creation of groups."""
        return self.sequence + self.formed

    def busy(self) -> bool:
        """Return whether async collectives are pending, so that a caller must queue behind them."""
        return self.worker is not None and self.worker.is_busy

    def let_callbacks_end(self) -> None:
        """Wait briefly for callbacks of collectives that have ended.

        Returns immediately if other collectives are pending.
        """
        moment = time.monotonic() + _CALLBACK_TIMEOUT_S
        while not self.pending and self.busy() and time.monotonic() < moment:
            time.sleep(10e-6)

    def give(self, task: Callable[[], None]) -> Worker:
        """Submit a task to the group's progress thread. Return its Worker."""
        with self._changing:
            if self.worker is None:
                warn_if_serialized(self.ranks[self._rank])
                self.worker = Worker(f"mpicoll-{self.group_name}")
            self.worker.submit(task)
            return self.worker

    def finish(self, limit: float | None) -> bool:
        """End the progress thread after pending tasks. Returns False if that exceeds ``limit``."""
        return self.worker is None or self.worker.stop(limit)

    def check_open(self) -> None:
        """Raise if the group cannot be used any longer.

        Raises ArgumentError if it was destroyed, ForkedError in a forked child, and
        NotInitializedError if MPI was finalized.
        """
        if self.closed is not None:
            destroyed = (
                f"process group {self.group_name!r} was destroyed; create one with new_group"
            )
            raise self.closed(_WITHOUT_MPI.get(self.closed, destroyed))

    def check_outside(self, name: str) -> None:
        """Raise ArgumentError if this thread is inside a call of the group, as in a signal handler.

        Another call would wait for the interrupted call forever.

        name: of the call to make.
        """
        inside = self.task.thread if self.task.name else self.thread if self.inside else 0
        if inside == threading.get_ident() and self.lock.locked():
            raise ArgumentError(
                f"{name}: this thread is inside {self.task.name or f'call {self.sequence}'} of "
                f"group {self.group_name}, as in a signal handler; set a flag in the handler, and "
                f"call {name} after the call has returned"
            )

    def check_whole(self) -> None:
        """Raise what ``check_open`` does, and the group's error if a call has timed out.

        Accepts a group that has lost a rank, because survivors create new groups from it.
        """
        self.check_open()
        if isinstance(self.error, CollectiveTimeoutError):
            raise self.failure()

    def fail(self, error: DistBackendError, pending: bool = False) -> bool:
        """Change the state from OPEN to FAILED: every later call raises a copy of ``error``.

        The first error counts, except that a LostRankError replaces any other one, because
        survivors can then shrink the group. ``failures.fail`` also notifies other ranks.

        pending: ``error`` is a device error that no waiting call will raise.

        Returns False if nothing has changed: the group was FAILED or CLOSED before.
        """
        if not self._can_fail(error):
            return False
        for observe in on_fail:  # without the lock, because a destructor of the program may block
            observe(self, error)
        with self._changing:
            if not self._can_fail(error):
                return False
            if pending:
                self.pending_error = error  # first: calls raise the error as soon as it is set
            self.error = error
            self.next_check = 0  # each call then enters the comparison, which raises the error
            self.forget_fast_paths()
            return True

    def _can_fail(self, error: DistBackendError) -> bool:
        if self.closed is not None:
            return False
        replaces = isinstance(error, LostRankError) and not isinstance(self.error, LostRankError)
        return self.error is None or replaces

    def check_device_errors(self, wait: bool = False) -> None:
        """Fail the group if device work has ended without its results.

        wait: wait until the devices are done.
        """
        if self.device_error is not None and self.error is None:
            error = self.device_error(wait)
            if error is not None:
                self.fail(error, pending=True)

    def find_failure(self) -> DistBackendError | None:
        """Call ``check_device_errors``; return the error of a failed group with device work."""
        self.check_device_errors()
        return self.failure() if self.error is not None and self.device_error is not None else None

    def fail_after_signal(self, interruption: BaseException) -> None:
        """Fail the group: a signal handler raised an exception in a call, which this rank has left.

        interruption: the exception.
        """
        whole = self.whole or self
        error = DistBackendError(
            f"group {whole.group_name}: a signal handler raised {type(interruption).__name__} in "
            f"call {whole.sequence}, which this rank has left; the group has failed. Create a new "
            "group with new_group"
        )
        for one in {whole, self}:
            one.fail(error)

    def wait_for(self, request: MPI.Request, status: MPI.Status | None = None) -> None:
        """Wait for an MPI request while the group is OPEN.

        request: of one of the group's communicators.
        status: receives the message's status; None if it is not needed.

        Raises the group's error if it fails meanwhile. The request then stays active, and the
        objects in the callers' frames, such as its buffers, are kept for the life of the process.
        """
        try:
            for _ in range(_TEST_COUNT):
                if request.Test(status):
                    return
            sleep_after = time.monotonic() + _YIELD_S
            while not request.Test(status):
                if self.error is not None:
                    raise self.failure()
                if time.monotonic() < sleep_after:
                    os.sched_yield()
                else:
                    time.sleep(_TEST_INTERVAL_S)
        except sys.modules["mpi4py.MPI"].Exception:
            raise
        except BaseException as error:
            _left_behind.append((request, error))
            if self.error is None:
                self.fail_after_signal(error)
            raise

    @property
    def tested(self) -> MPI.Intracomm:
        """Return ``inner`` with calls that raise the group's error if it fails while they wait.

        Each call takes about 1 µs longer.
        """
        return with_wait(self.inner, self.wait_for)

    def failure(self) -> DistBackendError:
        """Return a copy of the group's error for the caller to raise. Clears ``pending_error``."""
        assert self.error is not None
        self.pending_error = None
        return copy(self.error)

    def close(self, error: type[Exception] = ArgumentError) -> None:
        """Change the state to CLOSED: every later call raises ``error``."""
        self.closed = error
        self.plans = {}
        self.agree = None
        if self.device_error is not None:
            self.device_error = lambda wait: None  # the old function holds device memory
        self.forget_fast_paths()
        for call in on_close:
            call(self)

    def __repr__(self) -> str:
        return (
            f"<mpicoll.ProcessGroup {self.group_name!r}: rank {self._rank} of {self._size}, "
            f"global ranks {list(self.ranks)}>"
        )


#: Number of tests of a request before the rank yields its core, time after which it sleeps between
#: tests, and time of one sleep.
_TEST_COUNT, _YIELD_S, _TEST_INTERVAL_S = 10, 0.01, 100e-6
#: Requests that a rank no longer waits for, with the exception. The frames of its traceback hold
#: buffers and arrays that MPI may still read or write.
_left_behind: list[tuple[MPI.Request, BaseException]] = []


#: Time to wait for an undelivered message when a communicator is freed.
_DRAIN_TIMEOUT_S = 0.2
#: Receives of messages that did not arrive: MPI still uses their memory.
_undrained_receives: list[tuple[MPI.Request, bytearray]] = []
#: Time to wait for callbacks of collectives that have ended.
_CALLBACK_TIMEOUT_S = 0.5


def _drain(comm: MPI.Intracomm) -> bool:
    """Receive undelivered messages, as of a barrier that rank 0 never called.

    Otherwise they could arrive in a later communicator with the same context. Returns whether all
    messages arrived; if not, the communicator must not be freed.
    """
    from mpi4py import MPI

    status, moment = MPI.Status(), time.monotonic() + _DRAIN_TIMEOUT_S
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        box = bytearray(status.Get_count(MPI.BYTE))
        request = comm.Irecv([box, MPI.BYTE], status.Get_source(), status.Get_tag())
        while not request.Test():
            if time.monotonic() > moment:
                _undrained_receives.append((request, box))
                return False
            time.sleep(_TEST_INTERVAL_S)
    return True


def return_errors(comm: MPI.Intracomm) -> None:
    """Make a communicator raise MPI errors as exceptions."""
    from mpi4py import MPI

    comm.Set_errhandler(MPI.ERRORS_RETURN)


_FORKED = (
    "this process was forked from a rank, and MPI belongs to the parent. Start it with the 'spawn' "
    "method of multiprocessing, or fork before init_process_group"
)
_FINALIZED = (
    "the program has finalized MPI, which has ended all process groups; call MPI.Finalize after "
    "the last use of mpicoll, or leave it to mpicoll"
)
#: Messages of errors that end all groups.
_WITHOUT_MPI: dict[type[Exception], str] = {
    ForkedError: _FORKED,
    NotInitializedError: _FINALIZED,
}


class _State:
    """The open groups of this process."""

    def __init__(self) -> None:
        self.default: ProcessGroup | None = None
        self.groups: list[ProcessGroup] = []
        #: Number of groups by members if only these have called; else by (), also those without
        #: this rank.
        self._made: Counter[tuple[int, ...]] = Counter()
        self.forked = False
        self.finalized = False
        self.run_task: Callable[..., Any]  # see set_task_runner

    def set_default(self, group: ProcessGroup) -> None:
        """Set the default group, or replace it."""
        self.default = group

    def reset(self) -> None:
        """Forget all groups: the default group is closed."""
        self.default = None
        self.groups.clear()
        self._made.clear()

    def finalize(self) -> None:
        """Forget all groups because the program has finalized MPI."""
        self.reset()
        self.finalized = True

    def count_group(self, members: tuple[int, ...] = ()) -> int:
        """Count a new group; return its number since init, from 1 on.

        members: given if only they call new_group. Each set of members has its own count.
        """
        self._made[members] += 1
        return self._made[members]


state = _State()
#: All windows in the order of their creation. Other ranks may write into their memory.
windows: list[Any] = []


#: In a forked child, the groups of the parent, kept because the child must not free their device
#: memory.
_parent_groups: list[ProcessGroup] = []


def _after_fork() -> None:
    state.forked = state.forked or bool(state.groups)
    _parent_groups.extend(state.groups)
    for one in state.groups:
        one.close(ForkedError)
    state.default = None
    state.groups = []


os.register_at_fork(after_in_child=_after_fork)


def set_task_runner(run: Callable[..., Any]) -> None:
    """Set the function that runs tasks in the order of calls, as ``execute.run_in_order`` does."""
    state.run_task = run


def default_group() -> ProcessGroup:
    """Return the group of all ranks. Raises NotInitializedError if there is none."""
    if state.default is None:
        if state.forked:
            raise ForkedError(_FORKED)
        if state.finalized:
            raise NotInitializedError(_FINALIZED)
        raise NotInitializedError(
            "there is no default process group; call init_process_group() first"
        )
    return state.default


class _WorldMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """Return the default process group, None before init_process_group."""
        return state.default


class group(metaclass=_WorldMeta):
    """Namespace of ``group.WORLD``, the default process group."""


class GroupMember(metaclass=_WorldMeta):
    """Namespace of ``GroupMember.WORLD``, the default process group, and ``NON_GROUP_MEMBER``.

    new_group returns ``NON_GROUP_MEMBER`` on a rank outside the group.
    """

    NON_GROUP_MEMBER = -100


def resolve(candidate: object) -> ProcessGroup | None:
    """Return the group for a ``group`` argument, or None on a rank outside the group.

    Raises NotInitializedError without a default group, and ArgumentTypeError if it is not a group.
    """
    if candidate is None:
        return default_group()
    if isinstance(candidate, ProcessGroup):
        return candidate
    if isinstance(candidate, int) and candidate == GroupMember.NON_GROUP_MEMBER:
        return None
    raise ArgumentTypeError(f"group: expected a process group, got {type(candidate).__name__}")


def register(made: ProcessGroup) -> ProcessGroup:
    """Add a new group to the list of open groups."""
    state.groups.append(made)
    for call in on_open:
        call(made)
    return made


def create(
    parent: ProcessGroup,
    members: Sequence[int],
    ranks: Sequence[int],
    options: Options,
    name: str,
    description: str,
    given: MPI.Intracomm | None = None,
    inner: MPI.Intracomm | None = None,
) -> ProcessGroup:
    """Create and register the group of ``members``, ranks of ``parent``, in that order.

    ranks: global ranks of the members. given: communicator of the program with the same members.
        inner: communicator of the group, if it already exists. Only members call it, with the same
        arguments (MPI_Comm_create_group, MPI-4.1 section 7.4.2).

    Raises MismatchError on all members if reproducible or wire differs.
    """
    if inner is None:
        # The tag separates groups that two threads create from the same parent. The wait for all
        # members raises the error of the parent if it fails.
        tag = zlib.crc32(name.encode()) & 0x3FFF
        inner = create_group(parent.inner, members, tag, parent.wait_for)
    try:
        levels.agree(inner, options.reductions, f"group {name}")
        messages = inner.Dup()
    except (MismatchError, sys.modules["mpi4py.MPI"].Exception):
        inner.Free()
        raise
    return register(ProcessGroup(inner, messages, ranks, options, name, description, given))


def find_open(candidate: object, where: str) -> ProcessGroup:
    """Return the group of an argument. Raises ArgumentError if it has ended or lacks this rank."""
    default_group()
    found = resolve(candidate)
    if found is None or found.closed is not None:
        raise ArgumentError(f"{where}: {candidate!r} is not a group that this rank is in")
    return found


def check_group_rank(group: ProcessGroup, rank: object, where: str) -> int:
    """Convert a rank in a group to an int. Raises ArgumentError if the group has no such rank."""
    number = check_index(rank, where)
    if not 0 <= number < group.size():
        raise ArgumentError(
            f"{where}: rank {number} is not in the group of {format_count(group.size(), 'rank')}"
        )
    return number


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return the rank of this process in a group, or -1 on a rank outside the group."""
    found = default_group() and resolve(group)
    return -1 if found is None else found.rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in a group, or -1 on a rank outside the group."""
    found = default_group() and resolve(group)
    return -1 if found is None else found.size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Convert a global rank to a rank in a group, which contains this rank.

    Raises ArgumentError (a ValueError) if the group has ended or does not contain both ranks.
    """
    found = find_open(group, "get_group_rank")
    rank = found.group_rank(check_index(global_rank, "get_group_rank: global_rank"))
    if rank is None:
        raise ArgumentError(
            f"get_group_rank: global rank {global_rank} is not in the group of ranks "
            f"{list(found.ranks)}"
        )
    return rank


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Convert a rank in a group, which contains this rank, to a global rank.

    Raises ArgumentError (a ValueError) if the group has ended or does not contain both ranks.
    """
    found = find_open(group, "get_global_rank")
    return found.ranks[check_group_rank(found, group_rank, "get_global_rank: group_rank")]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in the order of the ranks in the group.

    Raises ArgumentError (a ValueError) for a group that has ended or does not contain this rank.
    """
    return list(find_open(group, "get_process_group_ranks").ranks)
