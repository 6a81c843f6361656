"""The choice of a route for device memory, the same on all ranks of a group.

In the group's first call on device memory the ranks exchange their capabilities (``Agreement``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import CallKind, Extent, Implementation, agreed_sizes
from mpicoll.cuda import binding, capabilities
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.failures.watchdog import watch_devices
from mpicoll.routes import registry
from mpicoll.routes.device import direct, eligibility, hierarchical, ipc, nccl
from mpicoll.routes.device.space import Alone, DeviceSpace
from mpicoll.routes.device.state import RouteState, Unavailable
from mpicoll.routes.route import Route

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup


class Agreement:
    """The device routes that the ranks of a group have agreed on.

    names:   the routes of the group, best first.
    missing: the routes that should be among them, with the reason why they are not.
    states:  RouteState by the name of its route.
    capabilities: capabilities of each rank; subgroups do not probe again.
    space:   this rank's device memory.
    """

    def __init__(
        self,
        group: ProcessGroup,
        context: DeviceContext,
        known: Sequence[Capabilities] | None = None,
    ) -> None:
        """All ranks call. known: capabilities of the ranks, if this is a subgroup of a group."""
        self.group = group
        self.space = DeviceSpace(context)
        self.names: tuple[str, ...] = ()
        self.missing: dict[str, str] = {}
        self.states: dict[str, RouteState] = {}
        self.capabilities: Sequence[Capabilities] = ()
        self._me = group.rank()
        self._forced: str | None = None
        self._used: list[int] = []
        if known is not None:
            self.capabilities = tuple(known)
            self._negotiate()
            self._set_names()
            return
        found = capabilities.exchange(group.inner)
        self._forced = forced = eligibility.forced_route(found)
        mine = (context.index, nccl.asked_for(group.backend))
        said = control_messages.allgather(group.inner, mine, tuple[int, bool])
        if len({asked for _, asked in said}) > 1:
            raise MismatchError(
                f"group {group.group_name}: backend 'nccl' must be requested by all ranks or by "
                f"none; this rank's backend is {group.backend!r}"
            )
        self._used = [index for index, _ in said]
        self.capabilities = eligibility.with_used(found, self._used)
        if forced == nccl.ROUTE.name or mine[1]:
            self._negotiate_route(nccl.ROUTE)
        if group.size() == 1 and forced is None and not self.states:
            # A group of one rank needs no MPI messages and no negotiation.
            self.space, self.names = Alone(context), ("direct", "staged")
            return
        self._negotiate()
        self._probe_messages()
        self._set_names()

    def _negotiate(self) -> None:
        """Negotiate the routes that need no request, MPI probe or subgroups. All ranks call."""
        for name, route in registry.DEVICE.items():
            tried = route.negotiate and not route.policy.on_request
            if not tried or route.needs.placement == "nodes" or self._forced not in (None, name):
                continue
            if name in eligibility.eligible_routes(self.capabilities, self._forced):
                self._negotiate_route(route)

    def _negotiate_route(self, route: Route) -> None:
        """Make the group's state for a route, or note why there is none. All ranks call."""
        assert route.negotiate is not None
        try:
            self.states[route.name] = route.negotiate(self)
        except Unavailable as reason:
            self.missing[route.name] = str(reason)

    def _probe_messages(self) -> None:
        """Probe what MPI does with device memory, if a route needs it. All ranks call."""
        why = f"not tried, because {self._forced or ipc.ROUTE.name} serves all calls"
        if ipc.ROUTE.name in self.states or self._forced not in (None, "direct", "hierarchical"):
            self.capabilities = [own._replace(cuda=False, why=why) for own in self.capabilities]
            return
        context, inner = self.context, self.group.inner
        found = eligibility.with_used(capabilities.exchange(inner, probes=True), self._used)
        self.capabilities = capabilities.try_messages(inner, context.runtime, context.index, found)
        if self.capabilities != found:
            self.missing["direct"] = self.capabilities[0].problem

    def _set_names(self) -> None:
        """Set the routes of the group. All ranks call."""
        forced = self._forced
        eligible = eligibility.eligible_routes(self.capabilities, forced)
        if hierarchical.ROUTE.name in eligible:
            self._negotiate_route(hierarchical.ROUTE)
        if forced in self.missing:
            raise UnsupportedError(
                f"{eligibility.FORCED}={forced}: {self.missing[forced]}; unset it, or "
                "choose another route"
            )
        requested = [name for name in self.states if registry.DEVICE[name].policy.on_request]
        best_first = (*(() if forced else requested), *eligible)
        self.names = tuple(name for name in best_first if name not in self.missing)
        if any(state.can_fail_on_device for state in self.states.values()):
            watch_devices()
            self.group.device_error = self.find_failure
            if not self.group.compared:
                self.group.forget_fast_paths()  # native calls of MPI do not check the devices

    @property
    def context(self) -> DeviceContext:
        """Return the device context of the current call."""
        return self.space.context

    def warn(self) -> None:
        """Warn of ranks that share a GPU while others are idle, far GPUs, and missing routes."""
        me, found, own = self._me, self.capabilities, self.capabilities[self._me]
        far = binding.describe_far_gpu(own, self._used[me])
        texts = [f"rank {me}: {text}" for text in far]
        first = next(rank for rank, one in enumerate(found) if one.node == own.node)
        if me == first:
            idle = binding.describe_idle_gpus(found, self._used).get(own.node)
            texts = [*filter(None, [idle]), *texts]
        for text in (*texts, *self._describe_missing()):
            warnings.warn(f"mpicoll: {text}", RuntimeWarning, stacklevel=3)

    def _describe_missing(self) -> Iterator[str]:
        """Describe the missing routes on the first rank of the group and of each of its parts."""
        whole, ranks = self.group.whole, ", ".join(map(str, self.group.ranks))
        arrays = "arrays on GPUs" if whole is None else f"arrays on the GPUs of ranks {ranks}"
        for name, why in self.missing.items():
            if self._me == 0 and not registry.DEVICE[name].policy.on_request:
                yield f"{arrays} use {', '.join(self.names)}, because {name} is off: {why}"
        for state in self.states.values():
            for part in state.parts:
                yield from part._describe_missing()

    def describe(self) -> dict[str, str]:
        """Return for each route why the group does not use it; "" for a route in use."""
        return eligibility.describe_routes(
            self.names, self.capabilities, self._forced, self.missing
        )

    def agree_in(self, part: ProcessGroup, known: Sequence[Capabilities]) -> Agreement:
        """Return the agreement of a part of the group. All ranks of the part call."""
        return agree(part, self.context, known)

    def build_in_part(self, kind: CallKind) -> Implementation:
        """Return the implementation for calls of a kind. All ranks call."""
        return DeviceImplementation(kind)

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """See RouteState."""
        failures = (state.find_failure(wait) for state in self.states.values())
        return next(filter(None, failures), None)

    def abort_states(self, alone: bool) -> None:
        """End calls on devices and in parts of the group after it has failed; see RouteState."""
        error = self.group.error
        if error is None:
            return
        for state in reversed(self.states.values()):  # NCCL is first, and its abort may take long
            state.abort(error, alone)

    def abandon(self) -> None:
        """Fail the group, and end its calls on devices without waiting for other ranks."""
        _abandoned.append(self)  # other ranks may map memory of this one
        self.group.error = self.group.error or DistBackendError(
            f"process group {self.group.group_name!r} was aborted"
        )
        self.abort_states(alone=True)

    def close(self, limit: float) -> None:
        """Close the routes' states; see RouteState. All ranks call."""
        for state in self.states.values():
            state.close(limit)


def agree(
    group: ProcessGroup, context: DeviceContext, known: Sequence[Capabilities] | None = None
) -> Agreement:
    """Return the group's agreement; the first call of all ranks makes it. known: see Agreement."""
    return group.resources.get_or_create(
        "devices",
        lambda: Agreement(group, context, known),
        close=Agreement.close,
        abandon=Agreement.abandon,
        leave=Agreement.abort_states,
    )


#: Agreements of aborted groups, whose memory other ranks may use.
_abandoned: list[Agreement] = []


class _Candidate(NamedTuple):
    implementation: Implementation
    route: Route
    min_bytes: int  # minimum size of a call


class DeviceImplementation(Implementation):
    """Calls of a kind, each by the route for its size. The first call makes the agreement."""

    def __init__(self, kind: CallKind) -> None:
        self._kind = kind
        self._candidates: list[_Candidate] = []  # those for the largest calls first
        self._prepared_call = -1  # the latest call number

    def run(
        self, send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        """Run one call."""
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        is_first = self._kind.group.resources.find("devices") is None  # on every rank
        agreement, candidate = self._prepare(first.context, extent)
        candidate.implementation.run(send, recv, extent, root)
        if is_first:
            agreement.warn()  # while no rank waits for this one: warnings may be errors

    def _prepare(self, context: DeviceContext, extent: Extent) -> tuple[Agreement, _Candidate]:
        self._prepared_call = self._kind.group.sequence
        agreement = agree(self._kind.group, context)
        agreement.space.context = context
        if not self._candidates:
            self._candidates.extend(_build_candidates(agreement, self._kind))
        return agreement, self._candidate_for(extent)

    def _candidate_for(self, extent: Extent) -> _Candidate:
        """Return the first candidate that serves a call of this size, else the last.

        The size is one that all ranks know.
        """
        primitive, group, _, dtype = self._kind
        candidates = self._candidates
        if len(candidates) == 1:
            return candidates[0]
        sizes = agreed_sizes(primitive, extent)
        blocks = group.size() if primitive.many_in or primitive.many_out else 1
        nbytes = (sizes * blocks if isinstance(sizes, int) else sum(sizes)) * dtype.itemsize
        for candidate in candidates:
            even = isinstance(extent, int) or primitive.name in candidate.route.serves.uneven
            if even and nbytes >= candidate.min_bytes:
                return candidate
        return candidates[-1]

    def notify_failure(self, error: Exception, context: DeviceContext, extent: Extent) -> None:
        """See Implementation."""
        if self._prepared_call != self._kind.group.sequence:
            self._prepare(context, extent)  # in a first call, the other ranks make the agreement
        agreement = self._kind.group.resources.find("devices")
        if agreement is not None and self._candidates:
            state = agreement.states.get(self._candidate_for(extent).route.name)
            if state is not None:
                state.notify_failure(self._kind, error)

    def only_enqueues(self, extent: Extent | None = None) -> bool:
        """See Implementation; False before the first call."""
        agreement, candidates = self._kind.group.resources.find("devices"), self._candidates
        if extent is not None and candidates:
            candidates = [self._candidate_for(extent)]
        return bool(candidates) and all(
            each.route.policy.host_waits_for == ""
            or (agreement.space.alone and each.route is direct.ROUTE)
            for each in candidates
        )

    @property
    def capturable(self) -> bool:
        """Whether a route of the group may be captured; False before the first call."""
        return any(each.route.policy.capturable for each in self._candidates)


def _build_candidates(agreement: Agreement, kind: CallKind) -> list[_Candidate]:
    """Return the routes for a kind of call by descending minimum size: the first route that serves
    any size, and all routes for large calls.
    """
    primitive, group, op, dtype = kind
    candidates: list[_Candidate] = []
    serves_any_size = False
    for name in agreement.names:
        route = registry.DEVICE[name]
        min_bytes = route.policy.min_bytes.get(primitive.name, 0)
        if (serves_any_size and not min_bytes) or not route.can_run_kind(kind):
            continue
        found = route.build(kind, agreement)
        if found is not None:
            candidates.append(_Candidate(found, route, min_bytes))
            serves_any_size = serves_any_size or not min_bytes
            if route.policy.on_request:
                break
    candidates.sort(key=lambda candidate: -candidate.min_bytes)
    if candidates:
        return candidates
    raise UnsupportedError(
        f"{primitive.name}: MPICOLL_DEVICE_ROUTE={agreement.names[0]} does not serve "
        f"{'' if op is None else f'{op.name} of '}{dtype}"
        f"{'' if group.reproducible is None else f' with reproducible={group.reproducible!r}'}"
        "; unset it"
    )
