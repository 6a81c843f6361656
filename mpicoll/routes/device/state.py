"""What a group has for its routes of device memory, as these and the group see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import DistBackendError
from mpicoll.routes.algorithms import premultiplied
from mpicoll.routes.device.space import DeviceSpace, at_home

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Agreed", "RouteState", "build_at_home", "failure_of", "first_problem"]


class RouteState:
    """What a group has for one route, as one rank sees it: mapped memory, a communicator. Its ranks
    meet to make it (``meet`` of a Route).

    group:   its ranks.
    n, me:   their number, and this one.
    context: this rank's device context.

    maps:    the ranks map memory of each other.
    lost_in_parts: routes that parts of the group should have, and why they have not: names, words.
    ends_on_devices: calls wait for other ranks on the devices alone, which may end them without a
             result: ``find_failure`` tells.
    """

    maps = True
    lost_in_parts: Sequence[tuple[str, str]] = ()
    ends_on_devices = False

    def __init__(self, group: ProcessGroup, context: DeviceContext) -> None:
        self.group, self.context = group, context
        self.n, self.me = group.size(), group.rank()

    def take_leave(self, kind: CallKind, error: Exception) -> None:
        """Tell the other ranks, unless they know, that this one has failed on its way to a call."""
        raise NotImplementedError

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return why devices have ended calls without their results; None if they have not, as far
        as is known.

        wait: until they are done.
        """
        return None

    def break_with(self, error: DistBackendError, alone: bool) -> None:
        """Make calls that wait on devices end, this rank's alone or all: the group is broken."""

    def close(self, limit: float) -> None:
        """Give back all of it, waiting for other ranks for so many seconds. All ranks call."""
        raise NotImplementedError


S = TypeVar("S", bound=RouteState)


class Agreed:
    """What the ranks of a group have agreed on.

    names:  its routes, the best first.
    lost:   the routes that should have been among them, and why they are not.
    states: what it has for routes, by name.
    known:  what each rank can do, as tried: parts of the group try nothing anew.
    space:  this rank's device memory.
    """

    def __init__(self, group: ProcessGroup, context: DeviceContext) -> None:
        self.group = group
        self.space = DeviceSpace(context)
        self.names: tuple[str, ...] = ()
        self.lost: dict[str, str] = {}
        self.states: dict[str, RouteState] = {}
        self.known: Sequence[Capabilities] = ()

    @property
    def context(self) -> DeviceContext:
        """Return the device context of the current call."""
        return self.space.context

    def state(self, kind: type[S]) -> S:
        """Return the state of a kind; the group has one."""
        return next(state for state in self.states.values() if isinstance(state, kind))

    def on_host(self, kind: CallKind) -> Implementation:
        """Return the implementation of such calls on host memory."""
        raise NotImplementedError

    def on_device(self, kind: CallKind) -> Implementation:
        """Return the implementation of such calls of this group on device memory."""
        raise NotImplementedError

    def agree_in(self, part: ProcessGroup, known: Sequence[Capabilities]) -> Agreed:
        """Return the agreement of some of the group's ranks. All these call."""
        raise NotImplementedError

    @property
    def maps(self) -> bool:
        """Return whether the ranks map memory of each other."""
        return any(state.maps for state in self.states.values())

    @property
    def lost_in_parts(self) -> Sequence[tuple[str, str]]:
        """Return the routes that parts of the group should have, and why they have not."""
        return [lost for state in self.states.values() for lost in state.lost_in_parts]

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """See RouteState."""
        failures = (state.find_failure(wait) for state in self.states.values())
        return next((failure for failure in failures if failure is not None), None)


def build_at_home(
    kind: CallKind, agreed: Agreed, state: S, make: Callable[[S, CallKind], Implementation]
) -> Implementation:
    """Return what ``make`` returns for a state and a kind of call, on the state's device; a factor
    is applied before.
    """

    def build(kind: CallKind) -> Implementation:
        return at_home(state.context, make(state, kind))

    if kind.op is not None and kind.op.factor is not None:
        return premultiplied(kind, agreed.space, build)
    return build(kind)


def failure_of(task: Callable[[], None]) -> Exception | None:
    """Return the exception that a task raises; None if it does its work."""
    try:
        task()
    except Exception as error:
        return error
    return None


def first_problem(problems: Sequence[str]) -> str:
    """Return the first problem of a rank; "" for none."""
    return next((f"rank {rank}: {words}" for rank, words in enumerate(problems) if words), "")
