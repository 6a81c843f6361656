"""Groups whose members change: torch's ``enable_reconfigure``.

The job's MPI world is all that can ever take part. There is one group at a time; each
reconfigure makes the next one, of the processes that its handles name, and only they call. They
meet first, by messages and within the timeout, and then make the communicator
(MPI_Comm_create_group): a member that never comes costs the others the timeout, and not the job.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpicoll import communicators, control_messages, launch
from mpicoll.api import lifecycle
from mpicoll.core import groups
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.indices import check_index
from mpicoll.core.work import deadline, parse_timeout
from mpicoll.dispatch import execute
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    MismatchError,
    MPIError,
    UnsupportedError,
)
from mpicoll.failures import lost_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Reconfigurable"]

_WHERE = "reconfigure"
#: What members tell the first of them, and what it answers.
_HERE, _AWAY, _GO, _DIFFERENT = range(1, 5)
_TAG = 0
#: Seconds that a rank whose time is over has for the answer of the first member, which may have
#: said "go" just then, and the first member to say so.
_LAST_WORD = 1.0
_PAUSE = 200e-6


class Reconfigurable:
    """Makes one group after the other out of the processes of a job.

    base: the group of all ranks of the job, used for nothing else. Every rank creates this at the
          same point; from then on only members call.

    group: the current group; None before the first reconfigure.
    """

    def __init__(self, base: ProcessGroup) -> None:
        if launch.has_grown() and lost_ranks.is_fault_tolerant():
            raise UnsupportedError(
                f"{_WHERE}: a job that has grown and outlives lost ranks makes its groups by "
                "new_group and shrink_group"
            )
        self.base = base
        self.group: ProcessGroup | None = None
        self._comm: MPI.Intracomm = execute.run_in_order(base, _WHERE, base.inner.Dup)
        groups.return_errors(self._comm)
        self._job = execute.run_in_order(
            base,
            _WHERE,
            lambda: control_messages.bcast(base.inner, secrets.token_hex(8), 0, str),
        )
        self._used: set[int] = set()
        self._uuid = -1  # of the current group
        self._mail: dict[tuple[int, int], tuple[int, int]] = {}
        self._sent: list[tuple[MPI.Request, npt.NDArray[np.int64]]] = []

    def handle(self) -> str:
        """Return this process's name in a reconfigure, the same as long as it lives."""
        return self._handle(self.base.rank())

    def _handle(self, rank: int) -> str:
        return f"mpicoll:{self._job}:{rank}"

    def reconfigure(
        self, uuid: int, handles: Collection[str], timeout: timedelta | float | None = None
    ) -> ProcessGroup:
        """Make the group of the processes that are named; they alone call, with the same arguments.

        uuid: a number that no reconfigure here has had, one that failed included.
        handles: the members' handles: a list in the order of their ranks, or a set, which ranks
            them as they are in the job.
        timeout: seconds or a timedelta; None is the job's.

        Returns the group, whose ranks count from 0. The previous one has ended then, and
        what was pending in it has failed, unless all its members are in the new one.

        Raises ArgumentError (a ValueError) for a uuid that was used and for handles that are no
        list of different processes of this job with this one among them, CollectiveTimeoutError
        where members do not come in time (it names them), MismatchError where they come with other
        handles, and MPIError; after any of them the previous group is as it was.
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
            self._meet(uuid, members, limit)
            # As a call of the base, so that the watchdog sees to its timeout.
            made: ProcessGroup = execute.run_in_order(
                self.base, _WHERE, lambda: self._make(uuid, members), everybody=False
            )
            self._retire(made)
        except MPI.Exception as error:
            raise MPIError(
                f"{_WHERE} of {len(members)} ranks: MPI: {error.Get_error_string()}; where a rank "
                "was lost, name only those that live",
                error.Get_error_class(),
            ) from error
        self.group, self._uuid = made, uuid
        return made

    def _members(self, handles: Collection[str]) -> list[int]:
        """Return the ranks in the job that the handles name, in the order of the new group."""
        if isinstance(handles, str) or not isinstance(handles, Collection):
            raise ArgumentTypeError(
                f"{_WHERE}: handles: expected a list or a set of handles, got "
                f"{type(handles).__name__}"
            )
        known = {self._handle(rank): rank for rank in range(self.base.size())}
        for one in handles:
            if one not in known:
                raise ArgumentError(
                    f"{_WHERE}: handles: {one!r} names no process of this job; processes that were "
                    "started later or by another launcher cannot join an MPI world"
                )
        members = [known[one] for one in handles]
        if len(set(members)) != len(members):
            raise ArgumentError(f"{_WHERE}: handles: each process once, got {list(handles)}")
        if self.base.rank() not in members:
            raise ArgumentError(
                f"{_WHERE}: handles: this process, {self.handle()!r}, is not among them; only "
                "those that are named call"
            )
        return members if isinstance(handles, Sequence) else sorted(members)

    # --- the meeting ------------------------------------------------------------------------------

    def _meet(self, uuid: int, members: list[int], limit: float | None) -> None:
        """Return once all members are here and know it; raise on all of them if they are not.

        Each member tells the first one, which tells them all to go. A rank whose time is over
        withdraws, and has to wait for the answer, which may be "go".
        """
        mark = zlib.crc32(repr(members).encode())
        me, first = self.base.rank(), members[0]
        end = deadline(limit)
        others = [rank for rank in members if rank != me]
        if me == first:
            self._gather(uuid, mark, others, limit, end)
            return
        self._tell(first, uuid, _HERE, mark)
        left = False
        while True:
            self._look(others)
            answer = self._mail.pop((first, uuid), (0, 0))[0]
            if answer == _GO:
                return
            if answer == _DIFFERENT:
                raise MismatchError(
                    f"{_WHERE}: the ranks give other handles, or in another order, with uuid {uuid}"
                )
            if answer == _AWAY or time.monotonic() > end:
                if answer == _AWAY or left:
                    raise CollectiveTimeoutError(
                        f"{_WHERE}: not all of ranks {members} came within {limit:g} s"
                        + ("" if answer == _AWAY else f"; rank {first} is one that did not")
                    )
                left, end = True, time.monotonic() + _LAST_WORD
                self._tell(first, uuid, _AWAY, mark)
            time.sleep(_PAUSE)

    def _gather(
        self, uuid: int, mark: int, others: list[int], limit: float | None, end: float
    ) -> None:
        while True:
            self._look(others)
            said = {rank: self._mail.get((rank, uuid), (0, 0)) for rank in others}
            different = [rank for rank, (word, theirs) in said.items() if word and theirs != mark]
            missing = [rank for rank, (word, _) in said.items() if word != _HERE]
            # A rank that has withdrawn does not come again with this uuid.
            hopeless = different or any(word == _AWAY for word, _ in said.values())
            if missing and not hopeless and time.monotonic() < end:
                time.sleep(_PAUSE)
                continue
            answer = _DIFFERENT if different else _AWAY if missing else _GO
            for rank in others:
                self._mail.pop((rank, uuid), None)
                self._tell(rank, uuid, answer, mark)
            if different:
                raise MismatchError(
                    f"{_WHERE}: ranks {different} of the job give other handles than rank "
                    f"{self.base.rank()}, or in another order, with uuid {uuid}"
                )
            if missing:
                raise CollectiveTimeoutError(
                    f"{_WHERE}: ranks {missing} of the job did not come within {limit:g} s, or "
                    "did not wait so long"
                )
            return

    def _tell(self, rank: int, *words: int) -> None:
        box = np.array(words, np.int64)
        self._sent = [one for one in self._sent if not one[0].Test()]
        self._sent.append((self._comm.Isend(box, rank, _TAG), box))

    def _look(self, sources: list[int]) -> None:
        """Receive what they have sent; from each separately, as a lost rank sends nothing more."""
        for source in sources:
            while self._comm.Iprobe(source, _TAG):
                box = np.zeros(3, np.int64)
                self._comm.Irecv(box, source, _TAG).Wait()
                uuid, word, mark = box.tolist()
                self._mail[source, uuid] = word, mark

    # --- the groups -------------------------------------------------------------------------------

    def _make(self, uuid: int, members: list[int]) -> ProcessGroup:
        name = f"{self.base.group_name}:{uuid}"
        return groups.create(
            self.base,
            members,
            range(len(members)),
            inner=self._without_parent(members, name) if lost_ranks.is_fault_tolerant() else None,
            backend=self.base.backend,
            timeout=self.base.timeout,
            reproducible=self.base.reproducible,
            name=name,
            description=self.base.group_desc,
        )

    def _without_parent(self, members: list[int], name: str) -> MPI.Intracomm:
        """Create a communicator of the members alone (MPI_Comm_create_from_group, MPI-4).

        A lost rank breaks every communicator that it was in, and which ranks know of the loss
        already is chance: a communicator of survivors must not be derived from one of those.
        """
        from mpi4py import MPI

        with communicators.subset(self.base.inner, members) as chosen:
            return MPI.Intracomm.Create_from_group(chosen, f"mpicoll:{self._job}:{name}")

    def _retire(self, made: ProcessGroup) -> None:
        """End the previous group: together if all its members are in the new one and nothing is
        pending, else alone, and then its communicators are not freed.
        """
        old = self.group
        calm = (
            old is not None
            and old.closed is None
            and not (old.busy() or old.in_flight or old.error)
        )
        mine = [self._uuid if calm else -1, old.size() if calm and old is not None else 0]
        everybody = np.empty((made.size(), 2), np.int64)
        made.inner.Allgather(np.array(mine, np.int64), everybody)
        if old is None or old.closed is not None:
            return
        if calm and everybody[:, 0].tolist().count(self._uuid) == old.size():
            lifecycle.close_group(old)
        else:
            lifecycle.abort(old)
