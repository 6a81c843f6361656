"""Process groups: their ranks, their communicators, and the register of all live groups."""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from enum import Enum
from typing import TYPE_CHECKING, Any

from mpicoll import communicators, launch, settings
from mpicoll.core import reproducible as levels
from mpicoll.core.indices import check_index
from mpicoll.core.observers import observers
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
from mpicoll.launch.serialized_mpi import create_group, plain, tested

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "GroupMember",
    "GroupState",
    "ProcessGroup",
    "create",
    "default_group",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "register",
    "resolve",
    "state",
]


class GroupState(Enum):
    """The state of a group on this rank: OPEN, then FAILED after an error, then CLOSED."""

    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class ProcessGroup(Calls):
    """A group of ranks that call collectives together. Made by init_process_group and new_group.

    ranks: the global ranks, in the order of the ranks in the group.
    timeout: seconds after which an operation has failed; None never.
    reproducible: how far reductions give the same bits again: None, "order" or "exact".
    """

    # Of its calls, see Calls. Beside these:
    #
    # inner:    the communicator of the collectives and of the exchanges inside them.
    # tested:   the same, by calls that a rank can leave.
    # messages: the communicator of the user's own messages, so that no tags collide.
    # reproducible: see reproducible.py.
    # message_history: the latest of the user's messages; see failures/flight_record.py.
    # in_flight: the user's messages that are not complete.
    # held_back: those to be sent, in order, of which the first is not ready yet.
    # pending:  the asynchronous collectives that are not done.
    # statuses: the latest status message of each other rank; see failures/rank_status.py.
    # object_tag, leave_tag: the tags of messages with objects, and of ranks that end; the user's
    #           are below them.
    # plans:    the plan of each (primitive, dtype, operation) met so far.
    # resources: what routes and others keep for the group; see resources.py.
    # windows:  memory that ranks of the group put into; see windows.py.
    # formed:   number of the others: groups made of this one.
    # keeps_time: the collective inside MPI watches its own timeout.
    # unmet:    the calls that only put work into streams, since they were last compared, where
    #           each other call is compared by itself.
    # stride:   the number of calls that are compared together.
    # agree:    compares one call (kind, sizes) with the other ranks' calls in shared memory; None
    #           if the ranks share no memory. See ``compare_by``.
    # error:    why the group is FAILED; None while it is OPEN. See ``fail``.
    # closed:   the class of the error that calls raise on a CLOSED group; None before.
    # device_error: returns the error of device work that ended without its results, None if none
    #           is known; takes whether to wait for the devices. None if the group has no such work.
    # pending_error: an error of devices that no call has raised yet; None for none.
    # whole:    the group that this one is a part of, for routes alone; None for none.
    # doing, doing_on: what is under way that is on no record, "" for nothing; and on which thread.
    # monitored, splits: number of monitored barriers and of splits so far, to tell them apart.

    def __init__(
        self,
        inner: MPI.Intracomm,
        messages: MPI.Intracomm,
        ranks: Sequence[int],
        backend: str,
        timeout: float | None,
        name: str,
        description: str,
        given: MPI.Intracomm | None = None,
        reproducible: str | None = None,
    ) -> None:
        kept = _record_length()
        super().__init__(threading.Lock(), kept)
        for one in (inner, messages):
            return_errors(one)
        if launch.is_serialized() or settings.TESTED_CALLS.is_set_to("1"):
            inner = tested(inner, self.wait_for)
        self._given = given
        self._lent: MPI.Intracomm | None = None
        self.inner = inner
        self.messages = messages
        self.ranks = tuple(ranks)
        self.backend = backend
        self.timeout = timeout
        self.reproducible = reproducible
        self.group_name = name
        self.group_desc = description
        self._giving = threading.Lock()
        self.plans: dict[Any, Any] = {}
        self.resources = Resources()
        self.windows: list[Any] = []
        self.unmet: list[tuple[int, int, int]] = []
        self.stride = 1
        self.agree: Callable[[int, int], None] | None = None
        self.formed = 0
        self.keeps_time = False
        self.error: DistBackendError | None = None
        self._failing = threading.Lock()
        self.device_error: Callable[[bool], DistBackendError | None] | None = None
        self.pending_error: DistBackendError | None = None
        self.whole: ProcessGroup | None = None
        self.doing, self.doing_on = "", 0
        self.monitored = 0
        self.splits = 0
        self.closed: type[Exception] | None = None
        self.message_history: deque[list[Any]] = deque(maxlen=kept)
        self.in_flight: set[Any] = set()
        self.held_back: deque[Any] = deque()
        self.pending: set[Any] = set()
        self.statuses: dict[int, Any] = {}
        self.object_tag = greatest_tag()
        self.leave_tag = self.object_tag - 1
        self._rank = inner.Get_rank()
        self._size = inner.Get_size()
        self._group_ranks = {rank: i for i, rank in enumerate(self.ranks)}

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    def name(self) -> str:
        """Return the name of the backend that was asked for."""
        return self.backend

    def group_rank(self, global_rank: int) -> int | None:
        """Return the rank in the group of a global rank, None for one that is not a member.

        global_rank: the rank in the default group.
        """
        return self._group_ranks.get(global_rank)

    @property
    def comm(self) -> MPI.Intracomm:
        """Return the group as a communicator of mpi4py, for the program's own calls.

        For a group made of a communicator it is that one, for the default group of all ranks
        MPI.COMM_WORLD. For any other group it is made on first use: then every member asks, in the
        same order among the group's collectives; it is freed with the group. mpicoll sends nothing
        over it.
        """
        self.check_open()
        if self._given is not None:
            return self._given
        if self._lent is None:
            self._lent = state.run_in_order(
                self, "ProcessGroup.comm", lambda: communicators.create_private(self.inner), root=-1
            )
        return plain(self._lent)

    def free(self) -> None:
        """Free the group's communicators, but none that the program has handed in."""
        from mpi4py import MPI

        # The program may have freed the communicator that it lent.
        if self._lent is not None and plain(self._lent) != MPI.COMM_NULL:
            self._lent.Free()
        for one in (self.messages, self.inner):
            if plain(one) != MPI.COMM_NULL and _drain(one):
                one.Free()

    @property
    def begun(self) -> int:
        """Return the number of collectives begun."""
        return self.sequence + self.formed

    def busy(self) -> bool:
        """Return whether asynchronous collectives are pending; a caller has to queue behind."""
        return self.worker is not None and self.worker.is_busy

    def let_callbacks_end(self) -> None:
        """Wait a moment until callbacks of collectives that have ended are done.

        Returns at once if others are pending.
        """
        moment = time.monotonic() + _A_MOMENT
        while not self.pending and self.busy() and time.monotonic() < moment:
            time.sleep(10e-6)

    def give(self, task: Callable[[], None]) -> Worker:
        """Hand a task to the group's thread, and return that thread; see Worker."""
        with self._giving:
            if self.worker is None:
                launch.warn_if_serialized(self.ranks[self._rank])
                self.worker = Worker(f"mpicoll-{self.group_name}")
            self.worker.submit(task)
            return self.worker

    def finish(self, limit: float | None) -> bool:
        """End the group's thread after what is pending; return False if that takes longer."""
        return self.worker is None or self.worker.stop(limit)

    def check_open(self) -> None:
        """Raise ArgumentError for a group that was destroyed, ForkedError in a forked child and
        NotInitializedError once MPI was finalised.
        """
        if self.closed is not None:
            destroyed = (
                f"process group {self.group_name!r} was destroyed; make a new one with new_group"
            )
            raise self.closed(_WITHOUT_MPI.get(self.closed, destroyed))

    def check_outside(self, name: str) -> None:
        """Raise ArgumentError where this thread is in the middle of a call of the group.

        That is so in a signal's handler: another call would wait for that one for ever.

        name: of what the thread wants to do.
        """
        inside = self.doing_on if self.doing else self.thread if self.inside else 0
        if inside == threading.get_ident() and self.lock.locked():
            raise ArgumentError(
                f"{name}: this thread is in the middle of {self.doing or f'call {self.sequence}'} "
                f"of group {self.group_name}, as in a signal's handler; let the handler set a "
                "flag, and do this when the call has ended"
            )

    def check_whole(self) -> None:
        """Raise what ``check_open`` does, and the group's error if a call has timed out.

        One that has lost a rank is what survivors make groups of.
        """
        self.check_open()
        if isinstance(self.error, CollectiveTimeoutError):
            raise self.failure()

    @property
    def state(self) -> GroupState:
        """Return the group's state on this rank."""
        if self.closed is not None:
            return GroupState.CLOSED
        return GroupState.OPEN if self.error is None else GroupState.FAILED

    def fail(self, error: DistBackendError, pending: bool = False) -> bool:
        """Change the state from OPEN to FAILED: every later call raises a copy of ``error``.

        The first error counts, except that a LostRankError replaces any other one, because
        survivors can then shrink the group. ``failures.fail`` also notifies other ranks.

        pending: the error is of devices, and no call waits that would raise it.

        Returns False if nothing has changed: the group was FAILED or CLOSED before.
        """
        with self._failing:
            known = self.error
            if self.closed is not None or (
                known is not None
                and (isinstance(known, LostRankError) or not isinstance(error, LostRankError))
            ):
                return False
            if pending:
                self.pending_error = error  # first: calls raise the error as soon as it is set
            self.error = error
            self.next_check = 0  # each call then enters the comparison, which raises the error
            self.forget()
            return True

    def check_device_errors(self, wait: bool = False) -> None:
        """Fail the group if device work has ended without its results.

        wait: wait until the devices are done.
        """
        if self.device_error is not None and self.error is None:
            error = self.device_error(wait)
            if error is not None:
                self.fail(error, pending=True)

    def find_failure(self) -> DistBackendError | None:
        """Return the known error of device work that ended without its results, None for none."""
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
            for _ in range(_TESTS):
                if request.Test(status):
                    return
            soon = time.monotonic() + _SOON
            while not request.Test(status):
                if self.error is not None:
                    raise self.failure()
                os.sched_yield() if time.monotonic() < soon else time.sleep(_PAUSE)
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
        return tested(self.inner, self.wait_for)

    def failure(self) -> DistBackendError:
        """Return a copy of the group's error, without its traceback, to be raised."""
        assert self.error is not None
        self.pending_error = None
        return copy(self.error)

    def compare_by(self, agree: Callable[[int, int], None]) -> None:
        """Compare each call in shared memory from now on, and keep no record of calls."""
        self.agree = agree
        self.compare_each()

    def close(self, error: type[Exception] = ArgumentError) -> None:
        """Change the state to CLOSED: every later call raises ``error``."""
        self.closed = error
        self.plans = {}
        self.agree = None
        if self.device_error is not None:
            self.device_error = _no_device_error  # the old function holds device memory
        self.forget()
        for observer in observers:
            observer.group_closed(self)

    def __repr__(self) -> str:
        return (
            f"<mpicoll.ProcessGroup {self.group_name!r}: rank {self._rank} of {self._size}, "
            f"global ranks {list(self.ranks)}>"
        )


def _no_device_error(wait: bool) -> None:
    return None


def _record_length() -> int:
    """Return how many calls a group's history keeps, as torch does."""
    text = settings.RECORD_LENGTH.value() or settings.RECORD_LENGTH_BEFORE.value()
    return int(text or 2000)


#: Tests of a request before others get the core; seconds after which a rank sleeps between tests,
#: and how long.
_TESTS, _SOON, _PAUSE = 10, 0.01, 100e-6
#: Requests that a rank has stopped waiting for, and what was raised: the frames of its traceback
#: have the buffers and arrays that MPI may yet read or write.
_left_behind: list[tuple[MPI.Request, BaseException]] = []


#: Seconds to wait for a message that nobody has received, and those that did not come, for which
#: MPI keeps the memory.
_DRAIN = 0.2
#: Seconds to wait for callbacks of collectives that have ended.
_A_MOMENT = 0.5
_never_came: list[tuple[MPI.Request, bytearray]] = []


def _drain(comm: MPI.Intracomm) -> bool:
    """Receive what nobody has received, such as the words of a barrier that rank 0 never made.

    Of a freed communicator it would come to a later one that MPI gives the same context. Returns
    whether all of it came; if not, the communicator has to stay.
    """
    from mpi4py import MPI

    status, moment = MPI.Status(), time.monotonic() + _DRAIN
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        box = bytearray(status.Get_count(MPI.BYTE))
        request = comm.Irecv([box, MPI.BYTE], status.Get_source(), status.Get_tag())
        while not request.Test():
            if time.monotonic() > moment:
                _never_came.append((request, box))
                return False
            time.sleep(_PAUSE)
    return True


def return_errors(comm: MPI.Intracomm) -> None:
    """Turn errors of MPI into exceptions, whatever the program chose for its own communicators."""
    from mpi4py import MPI

    comm.Set_errhandler(MPI.ERRORS_RETURN)


def greatest_tag() -> int:
    """Return the greatest tag that MPI takes (MPI_TAG_UB), an attribute of MPI_COMM_WORLD."""
    from mpi4py import MPI

    found = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert isinstance(found, int)
    return found


_FORKED = (
    "this process was forked from a rank; MPI belongs to the parent. Start it with "
    "multiprocessing's 'spawn' method, or fork before init_process_group"
)


_FINALIZED = (
    "the program has finalised MPI, and with it all process groups have ended; call MPI.Finalize "
    "after the last use of mpicoll, or leave it to mpicoll, which does so when the process ends"
)
#: Why no call is possible any more, by the error that says so.
_WITHOUT_MPI: dict[type[Exception], str] = {
    ForkedError: _FORKED,
    NotInitializedError: _FINALIZED,
}


class _State:
    """The live groups of this process."""

    def __init__(self) -> None:
        self.default: ProcessGroup | None = None
        self.groups: list[ProcessGroup] = []
        self.local: dict[tuple[int, ...], int] = {}  # groups made by their members alone
        self.made = 0  # groups made since init_process_group, members or not
        self.forked = False
        self.finalized = False
        #: Runs a task in the order of a group's collectives: execute.run_in_order, of a room above,
        #: which registers itself here.
        self.run_in_order: Callable[..., Any]

    def set_default(self, group: ProcessGroup) -> None:
        """Set the default group, or replace it."""
        self.default = group

    def reset(self) -> None:
        """Forget all groups: the default group is closed."""
        self.default = None
        self.groups.clear()
        self.local.clear()
        self.made = 0

    def finalize(self) -> None:
        """Forget all groups because the program has finalized MPI."""
        self.reset()
        self.finalized = True

    def count_group(self) -> int:
        """Count a new group; return its number since init, from 1 on."""
        self.made += 1
        return self.made


state = _State()


#: Of a forked child: the groups of its parent. What they have of devices is not the child's to give
#: back.
_of_the_parent: list[ProcessGroup] = []


def _after_fork() -> None:
    state.forked = state.forked or bool(state.groups)
    _of_the_parent.extend(state.groups)
    for one in state.groups:
        one.close(ForkedError)
    state.default = None
    state.groups = []


os.register_at_fork(after_in_child=_after_fork)


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
    """The home of ``group.WORLD``, the default process group."""


class GroupMember(metaclass=_WorldMeta):
    """The home of ``GroupMember.WORLD``, the default process group, and of
    ``GroupMember.NON_GROUP_MEMBER``, which new_group returns on a rank outside the group.
    """

    NON_GROUP_MEMBER = -100


def resolve(candidate: object) -> ProcessGroup | None:
    """Return the group meant by a ``group`` argument; None on a rank outside of it.

    Raises NotInitializedError without a default group, ArgumentTypeError for anything but a group.
    """
    if candidate is None:
        return default_group()
    if isinstance(candidate, ProcessGroup):
        return candidate
    if isinstance(candidate, int) and candidate == GroupMember.NON_GROUP_MEMBER:
        return None
    raise ArgumentTypeError(
        f"group: expected a process group made by new_group, got {type(candidate).__name__}"
    )


def register(made: ProcessGroup) -> ProcessGroup:
    """Put a new group on the register."""
    state.groups.append(made)
    for observer in observers:
        observer.group_opened(made)
    return made


def create(
    parent: ProcessGroup,
    members: Sequence[int],
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: float | None,
    reproducible: str | None,
    name: str,
    description: str,
    given: MPI.Intracomm | None = None,
    inner: MPI.Intracomm | None = None,
) -> ProcessGroup:
    """Make and register the group of ``members``, ranks of ``parent``, in that order.

    ranks: the global ranks of the members. given: the program's communicator of the same. inner:
           the group's own, if it exists already. Only members call (MPI_Comm_create_group, MPI-4.1
           section 7.4.2), each with the same arguments.

    Raises MismatchError, on all members, if ``reproducible`` is not the same.
    """
    if inner is None:
        # The tag separates groups that two threads make at once out of the same parent. The wait
        # for all members raises the parent's error if the parent breaks.
        tag = zlib.crc32(name.encode()) & 0x3FFF
        inner = create_group(parent.inner, members, tag, parent.wait_for)
    try:
        levels.agree(inner, reproducible, f"group {name}")
        messages = inner.Dup()
    except (MismatchError, sys.modules["mpi4py.MPI"].Exception):
        inner.Free()
        raise
    made = ProcessGroup(
        inner, messages, ranks, backend, timeout, name, description, given, reproducible
    )
    return register(made)


def _registered(candidate: object, where: str) -> ProcessGroup:
    found = resolve(candidate)
    if found is None or found.closed is not None:
        raise ArgumentError(f"{where}: {candidate!r} is not a group that this rank is in")
    return found


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in a group.

    group: the process group, None for the default group.

    Returns the rank, 0 to the size less one, and -1 on a rank outside the group.

    Raises NotInitializedError (a ValueError) before init_process_group and ArgumentTypeError (a
    TypeError) for anything but a group.
    """
    found = default_group() and resolve(group)
    return -1 if found is None else found.rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in a group.

    group: the process group, None for the default group.

    Returns the number, and -1 on a rank outside the group.

    Raises NotInitializedError (a ValueError) before init_process_group and ArgumentTypeError (a
    TypeError) for anything but a group.
    """
    found = default_group() and resolve(group)
    return -1 if found is None else found.size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank in a group of a global rank.

    group: a process group that this rank is in.
    global_rank: the rank in the default group.

    Returns the rank in the group.

    Raises ArgumentError (a ValueError) if the group is not alive or the rank not in it, and
    ArgumentTypeError (a TypeError) for a rank that is not an int.
    """
    found = _registered(group, "get_group_rank")
    rank = found.group_rank(check_index(global_rank, "get_group_rank: global_rank"))
    if rank is None:
        raise ArgumentError(
            f"get_group_rank: global rank {global_rank} is not in the group, which holds "
            f"{list(found.ranks)}"
        )
    return rank


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a rank in a group.

    group: a process group that this rank is in.
    group_rank: the rank in the group.

    Returns the rank in the default group.

    Raises ArgumentError (a ValueError) if the group is not alive or the rank not in it, and
    ArgumentTypeError (a TypeError) for a rank that is not an int.
    """
    found = _registered(group, "get_global_rank")
    group_rank = check_index(group_rank, "get_global_rank: group_rank")
    if not 0 <= group_rank < found.size():
        raise ArgumentError(
            f"get_global_rank: group rank {group_rank} is not in the group; expected 0 to "
            f"{found.size() - 1}"
        )
    return found.ranks[group_rank]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """List the global ranks of a group.

    group: the process group, None for the default group.

    Returns them in the order of the ranks in the group.

    Raises ArgumentError (a ValueError) for a group that is not alive or that this rank is not in.
    """
    return list(_registered(group, "get_process_group_ranks").ranks)
