"""The choice of a route for device memory, the same on every rank: with a group's first such call
its ranks exchange what they can do.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import (
    CallKind,
    Extent,
    Implementation,
    add_capturable,
    add_enqueuing,
    add_leave,
    agreed_sizes,
)
from mpicoll.cuda import between_nodes, binding, capabilities
from mpicoll.cuda.capabilities import Capabilities, CudaSupport
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import direct, eligibility, hierarchical, ipc, nccl, peer, shared_gpu
from mpicoll.routes.device.space import Alone
from mpicoll.routes.device.state import Agreed
from mpicoll.routes.host import select
from mpicoll.routes.route import Route

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Agreement", "agree", "choose"]


class Agreement(Agreed):
    """The agreement of a group's ranks, made by all of them."""

    def __init__(
        self,
        group: ProcessGroup,
        context: DeviceContext,
        known: Sequence[Capabilities] | None = None,
    ) -> None:
        """All ranks call. known: of a part of another group, what its ranks can do, as tried."""
        super().__init__(group, context)
        self._me = group.rank()
        self._forced: str | None = None
        self._used: list[int] = []
        if known is not None:
            self._found = self.known = tuple(known)
            self._meet(eligibility.eligible_routes(self._found), in_part=True)
            self._settle()
            return
        self._found = capabilities.exchange(group.inner)
        self._forced = forced = eligibility.forced_route(self._found)
        mine = (context.index, nccl.asked_for(group.backend))
        said = control_messages.allgather(group.inner, mine, tuple[int, bool])
        if len({asked for _, asked in said}) > 1:
            raise MismatchError(
                f"group {group.group_name}: backend 'nccl' has to be asked for by all ranks, or by "
                f"none; this rank's is {group.backend!r}"
            )
        self._used = [index for index, _ in said]
        self._found = eligibility.with_used(self._found, self._used)
        if forced == nccl.ROUTE.name or mine[1]:
            self._meet_for(nccl.ROUTE)
        if group.size() == 1 and forced is None and not self.states:
            # Messages to nobody need nothing of MPI, and nobody has to be met.
            self.space, self.names = Alone(context), ("direct", "staged")
            return
        self._meet((forced,) if forced else eligibility.eligible_routes(self._found))
        self.known = self._try_messages()
        self._settle()

    def _meet(self, wanted: Sequence[str], in_part: bool = False) -> None:
        """Make what routes among those wanted need of other ranks, but for those that need the
        agreements of parts. All ranks call.

        in_part: of another group, which asks for what "peer" serves alone.
        """
        routes = [route for name, route in registry.DEVICE.items() if name in wanted]
        routes = [route for route in routes if route.meet and not route.on_demand]
        routes = [route for route in routes if route.place != "levels"]
        if routes:
            eligibility.eligible_routes(self._found, self._forced)  # raises
        for route in routes:
            spare = (*route.unless, *((peer.ROUTE.name,) if in_part and route is ipc.ROUTE else ()))
            if not any(name in self.states for name in spare):
                self._meet_for(route)

    def _meet_for(self, route: Route) -> None:
        """Make what a route needs, or note why the ranks could not. All ranks call."""
        assert route.meet is not None
        made = route.meet(self)
        if isinstance(made, str):
            self.lost[route.name] = made
        else:
            self.states[route.name] = made

    def _try_messages(self) -> Sequence[Capabilities]:
        """Try what MPI claims to do with device memory, if it counts now. Return what each rank can
        do, as tried. All ranks call.
        """
        apart = len({own.node for own in self._found}) > 1
        if self._map_all or not (
            self._forced in (None, "direct", "mpi") or (self._forced == "hierarchical" and apart)
        ):
            return [replace(own, cuda=CudaSupport.NONE, why="not tried") for own in self._found]
        context, inner = self.context, self.group.inner
        found = capabilities.exchange(inner, probes=True)
        self._found = eligibility.with_used(found, self._used)
        tried = between_nodes.try_messages(inner, context.runtime, context.index, self._found)
        if tried != self._found:
            self.lost["direct"] = tried[0].problem
        self._found = tried
        return list(tried)

    @property
    def _map_all(self) -> bool:
        """Return whether memory that the ranks map serves all calls."""
        return shared_gpu.ROUTE.name in self.states or ipc.ROUTE.name in self.states

    def _settle(self) -> None:
        """Settle which routes the group takes. All ranks call."""
        forced = self._forced
        eligible = eligibility.eligible_routes(self._found, forced)
        if hierarchical.ROUTE.name in eligible:
            self._meet_for(hierarchical.ROUTE)
        if forced in self.lost:
            raise UnsupportedError(f"{eligibility.FORCED}={forced}: {self.lost[forced]}; unset it")
        without = {*self.lost, *(("direct", "mpi") if self._map_all else ())}  # which nobody tried
        names = (*(() if forced else self._on_demand), *eligible)
        self.names = tuple(
            name
            for name in names
            if name not in without and (not registry.DEVICE[name].meet or name in self.states)
        )
        if any(state.ends_on_devices for state in self.states.values()):
            self.group.device_error = self.find_failure

    @property
    def _on_demand(self) -> Sequence[str]:
        """Return the routes that the program has asked for, and has."""
        return [name for name in self.states if registry.DEVICE[name].on_demand]

    def warn(self) -> None:
        """Warn of ranks that share a GPU while others are idle, of a GPU that is far from the
        rank's processors, and of routes that are lost.
        """
        binding.warn_of_idle_gpus(self._found, self._used, self._me)
        binding.warn_of_far_gpu(self._found[self._me], self._used[self._me], self._me)
        for name, why in self.lost.items():
            if self._me == 0 and not registry.DEVICE[name].on_demand:
                warnings.warn(
                    f"mpicoll: arrays on GPUs go by {', '.join(self.names)}, because {name} is "
                    f"off: {why}",
                    RuntimeWarning,
                    stacklevel=3,
                )
        for _, words in self.lost_in_parts if self._me == 0 else ():
            warnings.warn(f"mpicoll: arrays on GPUs: {words}", RuntimeWarning, stacklevel=3)

    def describe(self) -> dict[str, str]:
        """Return of each route why the group does not take it, "" for those it takes; and why a
        part of the group, for `hierarchical`, does not.
        """
        found = eligibility.describe_routes(self.names, self._found, self._forced, self.lost)
        for name, words in self.lost_in_parts:
            found[name] = "; ".join(filter(None, (found[name], f"in hierarchical {words}")))
        return found

    def on_host(self, kind: CallKind) -> Implementation:
        """See there."""
        return select.choose(kind)

    def on_device(self, kind: CallKind) -> Implementation:
        """See there."""
        return choose(kind)

    def agree_in(self, part: ProcessGroup, known: Sequence[Capabilities]) -> Agreement:
        """See there."""
        return agree(part, self.context, known)

    def leave(self, name: str, kind: CallKind, error: Exception) -> None:
        """Tell the ranks that wait for this one in a call by a route that it has failed."""
        state = self.states.get(name)
        if state is not None:
            state.take_leave(kind, error)

    def break_states(self, alone: bool) -> None:
        """Make calls in parts of the group and on devices end, this rank's alone or all: the group
        is broken.
        """
        error = self.group.error
        if error is None:
            return
        for state in reversed(self.states.values()):  # NCCL's abort, the first, may take a while
            state.break_with(error, alone)

    def abandon(self) -> None:
        """Leave the group, without waiting for other ranks: calls on devices end."""
        _abandoned.append(self)  # other ranks may map what this one has
        self.group.error = self.group.error or DistBackendError(
            f"process group {self.group.group_name!r} was aborted"
        )
        self.break_states(alone=True)

    def close(self, limit: float) -> None:
        """Free what the routes have; all ranks call. limit: seconds to wait for them."""
        for state in self.states.values():
            state.close(limit)


def agree(
    group: ProcessGroup, context: DeviceContext, known: Sequence[Capabilities] | None = None
) -> Agreement:
    """Return the agreement of a group's ranks, made when all call for the first time.

    known: see Agreement.
    """
    return group.resources.get_or_create(
        "devices",
        lambda: Agreement(group, context, known),
        close=Agreement.close,
        abandon=Agreement.abandon,
        leave=Agreement.break_states,
    )


#: Of groups that were left, and whose memory others may use.
_abandoned: list[Agreement] = []


def choose(kind: CallKind) -> Implementation:
    """Return the implementation for calls of this kind on device memory in this group."""
    group = kind.group
    candidates: list[Candidate] = []  # those for the largest calls first
    begun = -1  # the number of the latest call that has come here

    def prepare(context: DeviceContext, extent: Extent) -> tuple[Agreement, Candidate]:
        nonlocal begun
        begun = group.sequence
        agreed = agree(group, context)
        agreed.space.context = context
        if not candidates:
            candidates.extend(_build(agreed, kind))
        return agreed, _candidate_for(candidates, kind, extent, context.captured)

    def carry_out(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        is_first = group.resources.find("devices") is None  # on every rank
        agreed, candidate = prepare(first.context, extent)
        for other in candidates:
            if other.load is not None and other is not candidate:
                other.load(send, recv, extent, root)
        candidate.run(send, recv, extent, root)
        if is_first:
            agreed.warn()  # when no rank waits for this one: a program may make warnings errors

    def leave(error: Exception, context: DeviceContext, extent: Extent) -> None:
        if begun != group.sequence:  # the others agree on routes if this is the first call
            prepare(context, extent)
        found = group.resources.find("devices")
        if found is not None and candidates:
            candidate = _candidate_for(candidates, kind, extent, context.captured)
            found.leave(candidate.route.name, kind, error)

    def only_enqueues(extent: Extent | None) -> bool:
        found, meant = group.resources.find("devices"), candidates
        if extent is not None and candidates:
            meant = [_candidate_for(candidates, kind, extent)]
        return bool(meant) and all(
            candidate.route.blocks == "" or (found.space.alone and candidate.route is direct.ROUTE)
            for candidate in meant
        )

    add_capturable(carry_out, lambda: any(each.route.captures for each in candidates))
    return add_enqueuing(add_leave(carry_out, leave), only_enqueues)


class Candidate(NamedTuple):
    """An implementation, and the route that it goes by.

    load:  loads what it needs in a capture, if it may be captured.
    least: bytes from which on it is taken.
    """

    run: Implementation
    route: Route
    load: Implementation | None
    least: int


def _build(agreed: Agreement, kind: CallKind) -> list[Candidate]:
    """Return the candidates for such calls: of the routes that serve them the first that takes
    calls of any size, and those that take large ones, the largest first.
    """
    primitive, group, op, dtype = kind
    candidates: list[Candidate] = []
    anything = False  # one takes calls of any size
    for name in agreed.names:
        route = registry.DEVICE[name]
        least = route.least.get(primitive.name, 0)
        if (anything and not least) or not route.serves_kind(kind):
            continue
        found = route.build(kind, agreed)
        if found is not None:
            load = None if route.load is None else route.load(kind, agreed)
            candidates.append(Candidate(found, route, load, least))
            anything = anything or not least
            if route.on_demand:
                break  # the program has asked for it
    candidates.sort(key=lambda candidate: -candidate.least)
    if candidates:
        return candidates
    raise UnsupportedError(
        f"{primitive.name}: MPICOLL_DEVICE_ROUTE={agreed.names[0]} does not serve "
        f"{'' if op is None else f'{op.name} of '}{dtype}"
        f"{'' if group.reproducible is None else f' with reproducible={group.reproducible!r}'}"
        "; unset it"
    )


def _candidate_for(
    candidates: Sequence[Candidate], kind: CallKind, extent: Extent, captured: bool = False
) -> Candidate:
    """Return the candidate for a call: the first that takes its bytes, else the last.

    Bytes are those that all ranks know of. captured: by all ranks, into a CUDA graph, which some
    candidates take; the others cannot be it.
    """
    if captured:
        candidates = [candidate for candidate in candidates if candidate.route.captures]
    if len(candidates) == 1:
        return candidates[0]
    primitive, _, _, dtype = kind
    assert dtype is not None
    sizes, n = agreed_sizes(primitive, extent), kind.group.size()
    blocks = n if primitive.many_in or primitive.many_out else 1
    nbytes = (sizes * blocks if isinstance(sizes, int) else sum(sizes)) * dtype.itemsize
    for candidate in candidates:
        even = isinstance(extent, int) or primitive.name in candidate.route.uneven
        if even and nbytes >= candidate.least:
            return candidate
    return candidates[-1]
