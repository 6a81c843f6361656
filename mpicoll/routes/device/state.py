"""State of one device route in a group, and helpers of the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpicoll.core.plan import CallKind, Extent, Implementation, Run, agreed_sizes
from mpicoll.core.signature import decode_primitive, encode_kind, encode_sizes, with_root
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.failures.consistency import describe_by_rank
from mpicoll.routes.algorithms import premultiplied
from mpicoll.routes.device.space import on_home_device

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["RouteState", "build_on_home_device", "exception_of", "first_problem", "signature_of"]


class RouteState:
    """State of one route in a group on one rank, such as mapped memory or a communicator. A route's
    ``negotiate`` creates it.

    group:   its ranks.
    n, me:   number of ranks, and this rank.
    context: this rank's device context.
    can_fail_on_device: calls wait for other ranks on devices, so that they can end there without a
             result; ``find_failure`` returns the reason.
    """

    can_fail_on_device = False

    def __init__(self, agreement: Agreement) -> None:
        self.group, self.context = agreement.group, agreement.context
        self.n, self.me = self.group.size(), self.group.rank()

    @property
    def parts(self) -> Sequence[Agreement]:
        """Return the agreements of this rank's subgroups."""
        return ()

    def notify_failure(self, kind: CallKind, error: Exception) -> None:
        """Notify the other ranks, unless they know, that this rank failed before a call."""
        raise NotImplementedError

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return why calls ended on devices without a result; None if none did, as far as is known.

        wait: first wait until the calls are done.
        """
        return None

    def abort(self, error: DistBackendError, alone: bool) -> None:
        """End calls that wait on devices after the group has failed: this rank's (``alone``) or all
        ranks'.
        """

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


S = TypeVar("S", bound=RouteState)


def build_on_home_device(
    kind: CallKind, agreement: Agreement, state: S, make: Callable[[S, CallKind], Run]
) -> Implementation:
    """Return the implementation by ``make(state, kind)``, on the device of the state. The factor of
    PREMUL_SUM is applied before.
    """

    def build(kind: CallKind) -> Run:
        return on_home_device(state.context, make(state, kind))

    if kind.op is not None and kind.op.factor is not None:
        return Implementation(premultiplied(kind, agreement.space, build))
    return Implementation(build(kind))


def signature_of(kind: CallKind, extent: Extent, root: int) -> tuple[int, int]:
    """Return the signature of a call, which must be the same on all ranks."""
    primitive, _, op, dtype = kind
    number = encode_sizes(agreed_sizes(primitive, extent))
    return with_root(encode_kind(primitive, dtype, op, 0, True), root), number


def exception_of(task: Callable[[], object]) -> Exception | None:
    """Run a task; return the exception that it raises, or None."""
    try:
        task()
    except Exception as error:
        return error
    return None


def first_problem(problems: Sequence[str]) -> str:
    """Return the first problem with its rank; "" if all are empty."""
    return next((f"rank {rank}: {words}" for rank, words in enumerate(problems) if words), "")
