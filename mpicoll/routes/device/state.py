"""State of one device route in a group, and helpers of the routes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpicoll import control_messages
from mpicoll.core.plan import CallKind, Extent, Implementation, Run, agreed_sizes
from mpicoll.core.signature import decode_primitive, encode_kind, encode_sizes, with_root
from mpicoll.core.work import deadline
from mpicoll.cuda.streams import poll_until
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.failures.report import describe_by_rank
from mpicoll.routes.algorithms import premultiplied
from mpicoll.routes.device.space import DeviceSpace, on_home_device
from mpicoll.routes.host.shared_segment import share
from mpicoll.serialized_mpi import dissemination_barrier

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup
    from mpicoll.routes.device.select import Agreement

#: Seconds to wait for the other ranks to close their mappings when negotiation fails.
RELEASE_TIMEOUT_S = 60.0
#: Tag of the barrier's messages: above the tags of routes, below those of new groups.
_TAG = (1 << 14) - 1

T = TypeVar("T")


class Unavailable(Exception):
    """The reason, the same on all ranks, why a group cannot have a route."""


class RouteState:
    """State of one route in a group on one rank, such as mapped memory or a communicator.

    The constructor negotiates it with the other ranks: all ranks call. If the group cannot have the
    route, it frees everything and raises Unavailable on all ranks.

    n, me:   number of ranks in ``group``, and this rank.
    context: this rank's device context.
    can_fail_on_device: calls wait for other ranks on devices, so that they can end there without a
             result; ``find_failure`` returns the reason.
    """

    can_fail_on_device = False

    def __init__(self, agreement: Agreement) -> None:
        self.group, self.context = agreement.group, agreement.context
        self.n, self.me = self.group.size(), self.group.rank()
        self.met = -1

    @classmethod
    def build(cls, kind: CallKind, agreement: Agreement) -> Implementation | None:
        """Return the implementation for calls of a kind, without the factor of PREMUL_SUM."""
        state = next(state for state in agreement.states.values() if isinstance(state, cls))
        space = agreement.space

        def build(kind: CallKind) -> Run:
            return on_home_device(state.context, state.bind(kind, space))

        if not state.serves(kind):
            return None
        if kind.op is not None and kind.op.factor is not None:
            return Implementation(premultiplied(kind, space, build))
        return Implementation(build(kind))

    def serves(self, kind: CallKind) -> bool:
        """Return whether this group can run calls of a kind that the route declares."""
        return True

    def bind(self, kind: CallKind, space: DeviceSpace) -> Run:
        """Return the function that runs calls of a kind on the state's device. All ranks call."""
        raise NotImplementedError

    @property
    def parts(self) -> Sequence[Agreement]:
        """Return the agreements of this rank's subgroups."""
        return ()

    def compare(self, signature: int, number: int, failure: Exception | None) -> None:
        """Compare the calls of all ranks. Raises on all if they differ or one of them has failed.

        Sets ``met``, the call number of the latest comparison.
        """
        raise NotImplementedError

    def notify_failure(self, kind: CallKind, error: Exception) -> None:
        """Notify the other ranks, unless they know, that this rank failed before a call."""
        if self.met != self.group.sequence:
            with suppress(type(error)):
                self.compare(signature_of(kind, 0, 0)[0], 0, error)

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return why calls ended on devices without a result; None if none did, as far as is known.

        wait: first wait until the calls are done.
        """
        return next(filter(None, (part.find_failure(wait) for part in self.parts)), None)

    def abort(self, error: DistBackendError, alone: bool) -> None:
        """End calls on devices of a failed group: this rank's (``alone``) or all ranks'."""

    def close(self, limit: float) -> None:
        """Free everything; wait at most ``limit`` seconds for other ranks. All ranks call."""
        raise NotImplementedError

    def name_of(self, signature: int) -> str:
        """Return the name of a call, for messages."""
        return f"{decode_primitive(signature)} on rank {self.me} of group {self.group.group_name}"

    def failed_elsewhere(self, signature: int) -> DistBackendError:
        """Return the error of a call in which another rank has failed."""
        return DistBackendError(
            f"{self.name_of(signature)}: another rank failed in this call, see its error; the "
            "result is incomplete on all ranks"
        )

    def mismatch(self, signature: int, calls: Iterable[str]) -> MismatchError:
        """Return the error of a call that differs between ranks.

        calls: description of each rank's call.
        """
        return MismatchError(
            f"{self.name_of(signature)}: collective mismatch: the ranks made different calls: "
            f"{describe_by_rank(calls)}"
        )


def signature_of(kind: CallKind, extent: Extent, root: int) -> tuple[int, int]:
    """Return the signature of a call, which must be the same on all ranks."""
    primitive, _, op, dtype = kind
    number = encode_sizes(agreed_sizes(primitive, extent))
    return with_root(encode_kind(primitive, dtype, op, True), root), number


def exception_of(task: Callable[[], object]) -> Exception | None:
    """Run a task; return the exception that it raises, or None."""
    try:
        task()
    except Exception as error:
        return error
    return None


def on_all_ranks(group: ProcessGroup, what: str, step: Callable[[], T]) -> T:
    """Run a step of a negotiation. If it fails on a rank, raise Unavailable on all ranks, with the
    error of the first such rank after ``what``. All ranks call.
    """
    problem, done = "", []
    try:
        done.append(step())
    except Exception as error:
        problem = f"{what}{error}"
    for rank, words in enumerate(control_messages.allgather(group.inner, problem, str)):
        if words:
            raise Unavailable(f"rank {rank}: {words}")
    return done[0]


def share_pages(group: ProcessGroup, nbytes: int) -> Any:
    """Return shared host memory by rank; None without shared memory. All ranks call."""
    segment = share(group.inner, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, True)
    if segment is None:
        return None
    return np.frombuffer(segment.memory, np.uint8).reshape(group.size(), -1)[:, :nbytes]


def timed_barrier(group: ProcessGroup, limit: float) -> bool:
    """Run a barrier; return False if it timed out after ``limit`` seconds.

    It uses messages, because ranks of a failed group may have left MPI collectives that MPI_Barrier
    would be matched with.
    """
    moment = deadline(limit)

    def wait(request: MPI.Request, status: MPI.Status | None) -> None:
        if not poll_until(request.Test, moment):
            raise TimeoutError

    try:
        dissemination_barrier(group.inner, range(group.size()), _TAG, wait)
    except TimeoutError:
        return False
    return True
