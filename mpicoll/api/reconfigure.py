"""Groups whose members change: torch's ``enable_reconfigure``.

Members come from the MPI world of the job. One group exists at a time. Each reconfigure creates the
next one from the processes that its handles name; only these call. Members first exchange messages,
within the timeout, and then create the communicator (MPI_Comm_create_group). A member that does not
arrive costs the other members the timeout, but does not end the job.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from mpicoll import communicators, control_messages
from mpicoll.api import lifecycle
from mpicoll.api.handshakes import DIFFERENT, INCOMPLETE, Handshakes
from mpicoll.core import groups
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.indices import check_index
from mpicoll.core.work import parse_timeout
from mpicoll.dispatch import execute
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    MismatchError,
    MPIError,
    UnsupportedError,
)
from mpicoll.failures import lost_ranks, rank_status
from mpicoll.launch.spawned_ranks import has_grown

if TYPE_CHECKING:
    from mpi4py import MPI

_WHERE = "reconfigure"


class Reconfigurable:
    """Creates one group after the other from the processes of a job.

    base: group of all ranks of the job, used for nothing else. Every rank creates this object at
        the same point. Later, only members call.

    group: the current group; None before the first reconfigure.
    """

    def __init__(self, base: ProcessGroup) -> None:
        if has_grown() and lost_ranks.is_fault_tolerant():
            raise UnsupportedError(
                f"{_WHERE}: not supported in a fault-tolerant job that has grown; use new_group "
                "and shrink_group"
            )
        self.base = base
        self.group: ProcessGroup | None = None
        comm: MPI.Intracomm = execute.run_in_order(base, _WHERE, base.inner.Dup)
        groups.return_errors(comm)
        self._handshakes = Handshakes(comm)
        token = secrets.token_hex(8)
        self._job = execute.run_in_order(
            base, _WHERE, lambda: control_messages.bcast(base.inner, token, 0, str)
        )
        self._used: set[int] = set()
        self._uuid = -1  # of the current group

    def handle(self, rank: int | None = None) -> str:
        """Return the handle of a process, by default of this one, constant during its lifetime."""
        return f"mpicoll:{self._job}:{self.base.rank() if rank is None else rank}"

    def reconfigure(
        self, uuid: int, handles: Collection[str], timeout: timedelta | float | None = None
    ) -> ProcessGroup:
        """Create a group of the given processes. Only they call it, with the same arguments.

        uuid: a number that no earlier reconfigure here has used, including failed ones.
        handles: handles of the members: a list in rank order, or a set, which keeps the order of
            the job.
        timeout: seconds or a timedelta; None is the timeout of the job.

        Returns the group, with ranks from 0. The previous group has ended, and its pending work has
        failed unless all its members are in the new one.

        Raises ArgumentError (a ValueError) for a used uuid, and for handles that are duplicate,
        unknown or without this process; CollectiveTimeoutError, with the ranks, if members are
        missing; MismatchError if members pass different handles; MPIError. After an error, the
        previous group is unchanged.
        """
        self.base.check_open()
        members = self._members(handles)
        uuid = check_index(uuid, f"{_WHERE}: uuid")
        if uuid in self._used:
            raise ArgumentError(f"{_WHERE}: uuid {uuid} was already used here; give a new one")
        limit = parse_timeout(timeout, self.base.timeout, _WHERE)
        self._used.add(uuid)
        from mpi4py import MPI

        try:
            self._wait_for_members(uuid, members, limit)
            # As a call of the base group, so that the watchdog enforces its timeout.
            made: ProcessGroup = execute.run_in_order(
                self.base, _WHERE, lambda: self._create(uuid, members), everybody=False
            )
            self._end_previous(made)
        except MPI.Exception as error:
            raise MPIError(
                f"{_WHERE} of {len(members)} ranks: MPI: {error.Get_error_string()}; if a rank "
                "was lost, pass the handles of live processes only",
                error.Get_error_class(),
            ) from error
        self.group, self._uuid = made, uuid
        return made

    def _members(self, handles: Collection[str]) -> list[int]:
        """Return the ranks in the job for the handles, in the order of the new group."""
        if isinstance(handles, str) or not isinstance(handles, Collection):
            raise ArgumentTypeError(
                f"{_WHERE}: handles: expected a list or a set of handles, got "
                f"{type(handles).__name__}"
            )
        known = {self.handle(rank): rank for rank in range(self.base.size())}
        for one in handles:
            if one not in known:
                raise ArgumentError(
                    f"{_WHERE}: handles: {one!r} is not a process of this job; processes that were "
                    "started later or by another launcher cannot join an MPI world"
                )
        members = [known[one] for one in handles]
        if len(set(members)) != len(members):
            raise ArgumentError(
                f"{_WHERE}: handles: expected each process once, got {list(handles)}"
            )
        if self.base.rank() not in members:
            raise ArgumentError(
                f"{_WHERE}: handles: this process, {self.handle()!r}, is not among them; only "
                "members may call"
            )
        return members if isinstance(handles, Sequence) else sorted(members)

    def _wait_for_members(self, uuid: int, members: list[int], limit: float | None) -> None:
        """Return once all members have called. If one is missing, raise on all of them."""
        mark = zlib.crc32(repr(members).encode())
        outcome, ranks = self._handshakes.join(uuid, members, mark, limit)
        if outcome == DIFFERENT:
            raise MismatchError(
                f"{_WHERE}: ranks passed different handles, or another order, for uuid {uuid}"
                + (f"; ranks {ranks} and {members[0]} of the job differ" if ranks else "")
            )
        if outcome == INCOMPLETE:
            within = "in time" if limit is None else f"within {limit:g} s"
            raise CollectiveTimeoutError(
                f"{_WHERE}: timed out: not all of ranks {members} called {within}"
                + (f"; ranks {ranks} of the job did not, or have withdrawn" if ranks else "")
            )

    def _create(self, uuid: int, members: list[int]) -> ProcessGroup:
        name, inner = f"{self.base.group_name}:{uuid}", None
        if lost_ranks.is_fault_tolerant():
            # A lost rank breaks every communicator that contains it, and survivors notice at
            # different times, so this one is not derived from a communicator (MPI-4).
            from mpi4py import MPI

            with communicators.subset(self.base.inner, members) as chosen, rank_status.suspended():
                inner = MPI.Intracomm.Create_from_group(chosen, f"mpicoll:{self._job}:{name}")
        base, ranks = self.base, range(len(members))
        return groups.create(base, members, ranks, base.options, name, base.group_desc, inner=inner)

    def _end_previous(self, made: ProcessGroup) -> None:
        """End the previous group.

        If all its members are in the new group and nothing is pending, they end it together.
        Otherwise each rank ends it alone, without freeing its communicators.
        """
        old = self.group
        is_idle = (
            old is not None
            and old.closed is None
            and not (old.busy() or old.in_flight or old.error)
        )
        own = [self._uuid if is_idle else -1, old.size() if is_idle and old is not None else 0]
        gathered = np.empty((made.size(), 2), np.int64)
        made.inner.Allgather(np.array(own, np.int64), gathered)
        if old is None or old.closed is not None:
            return
        if is_idle and gathered[:, 0].tolist().count(self._uuid) == old.size():
            lifecycle.close_group(old)
        else:
            lifecycle.abort(old)
