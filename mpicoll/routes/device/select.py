"""The choice of a route for device memory, the same on all ranks of a group.

In the group's first call on device memory the ranks exchange their capabilities (``Agreement``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import CallKind, Extent, Implementation, agreed_sizes
from mpicoll.cuda import binding, capabilities
from mpicoll.cuda.capabilities import Capabilities, CudaSupport
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import direct, eligibility, hierarchical, ipc, nccl, peer, shared_gpu
from mpicoll.routes.device.space import Alone, DeviceSpace
from mpicoll.routes.device.state import RouteState
from mpicoll.routes.route import Route

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Agreement", "DeviceImplementation", "agree"]

S = TypeVar("S", bound=RouteState)


class Agreement:
    """The device routes that the ranks of a group have agreed on.

    names:   the routes of the group, best first.
    missing: the routes that should be among them, with the reason why they are not.
    states:  RouteState by the name of its route.
    capabilities: capabilities of each rank, as probed; subgroups do not probe again.
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
            self.capabilities = self._found = tuple(known)
            self._negotiate(eligibility.eligible_routes(self._found), in_part=True)
            self._set_names()
            return
        self._found = capabilities.exchange(group.inner)
        self._forced = forced = eligibility.forced_route(self._found)
        mine = (context.index, nccl.asked_for(group.backend))
        said = control_messages.allgather(group.inner, mine, tuple[int, bool])
        if len({asked for _, asked in said}) > 1:
            raise MismatchError(
                f"group {group.group_name}: backend 'nccl' must be requested by all ranks or by "
                f"none; this rank's backend is {group.backend!r}"
            )
        self._used = [index for index, _ in said]
        self._found = eligibility.with_used(self._found, self._used)
        if forced == nccl.ROUTE.name or mine[1]:
            self._negotiate_route(nccl.ROUTE)
        if group.size() == 1 and forced is None and not self.states:
            # A group of one rank needs no MPI messages and no negotiation.
            self.space, self.names = Alone(context), ("direct", "staged")
            return
        self._negotiate((forced,) if forced else eligibility.eligible_routes(self._found))
        self.capabilities = self._probe_messages()
        self._set_names()

    def _negotiate(self, wanted: Sequence[str], in_part: bool = False) -> None:
        """Negotiate the wanted routes, except routes that need agreements of subgroups. All ranks
        call.

        in_part: this is a part of another group, which needs ``ipc`` only without ``peer``.
        """
        routes = [route for name, route in registry.DEVICE.items() if name in wanted]
        routes = [route for route in routes if route.negotiate and not route.policy.on_request]
        routes = [route for route in routes if route.needs.placement != "levels"]
        if routes:
            eligibility.eligible_routes(self._found, self._forced)  # raises
        for route in routes:
            better = route.policy.superseded_by
            if in_part and route is ipc.ROUTE:
                better = *better, peer.ROUTE.name
            if not any(name in self.states for name in better):
                self._negotiate_route(route)

    def _negotiate_route(self, route: Route) -> None:
        """Make the group's state for a route, or note why there is none. All ranks call."""
        assert route.negotiate is not None
        made = route.negotiate(self)
        if isinstance(made, str):
            self.missing[route.name] = made
        else:
            self.states[route.name] = made

    def _probe_messages(self) -> Sequence[Capabilities]:
        """Probe what MPI does with device memory, if a route needs it. Return the capabilities of
        the ranks. All ranks call.
        """
        apart = len({own.node for own in self._found}) > 1
        if self._mapping_serves_all or not (
            self._forced in (None, "direct", "mpi") or (self._forced == "hierarchical" and apart)
        ):
            return [replace(own, cuda=CudaSupport.NONE, why="not tried") for own in self._found]
        context, inner = self.context, self.group.inner
        found = capabilities.exchange(inner, probes=True)
        self._found = eligibility.with_used(found, self._used)
        tried = capabilities.try_messages(inner, context.runtime, context.index, self._found)
        if tried != self._found:
            self.missing["direct"] = tried[0].problem
        self._found = tried
        return list(tried)

    @property
    def _mapping_serves_all(self) -> bool:
        """Return whether routes over mapped memory serve all calls."""
        return shared_gpu.ROUTE.name in self.states or ipc.ROUTE.name in self.states

    def _set_names(self) -> None:
        """Set the routes of the group. All ranks call."""
        forced = self._forced
        eligible = eligibility.eligible_routes(self._found, forced)
        if hierarchical.ROUTE.name in eligible:
            self._negotiate_route(hierarchical.ROUTE)
        if forced in self.missing:
            raise UnsupportedError(
                f"{eligibility.FORCED}={forced}: {self.missing[forced]}; unset it"
            )
        unprobed = ("direct", "mpi") if self._mapping_serves_all else ()
        requested = [name for name in self.states if registry.DEVICE[name].policy.on_request]
        self.names = tuple(
            name
            for name in (*(() if forced else requested), *eligible)
            if name not in self.missing
            and name not in unprobed
            and (not registry.DEVICE[name].negotiate or name in self.states)
        )
        if any(state.can_fail_on_device for state in self.states.values()):
            self.group.device_error = self.find_failure

    @property
    def context(self) -> DeviceContext:
        """Return the device context of the current call."""
        return self.space.context

    def state(self, kind: type[S]) -> S:
        """Return the group's state of this type."""
        return next(state for state in self.states.values() if isinstance(state, kind))

    @property
    def maps_memory(self) -> bool:
        """Return whether the ranks map memory of each other."""
        return any(state.maps_memory for state in self.states.values())

    @property
    def missing_in_parts(self) -> Sequence[tuple[str, str]]:
        """Return the routes that parts of the group should have and lack: names and reasons."""
        return [each for state in self.states.values() for each in state.missing_in_parts]

    def warn(self) -> None:
        """Warn of ranks that share a GPU while other GPUs are idle, of a GPU that is far from the
        rank's processors, and of missing routes.
        """
        me, own = self._me, self._found[self._me]
        far = binding.describe_far_gpu(own, self._used[me])
        texts = [f"rank {me}: {text}" for text in far]
        first = next(rank for rank, one in enumerate(self._found) if one.node == own.node)
        if me == first:
            idle = binding.describe_idle_gpus(self._found, self._used).get(own.node)
            texts = [*filter(None, [idle]), *texts]
        if me == 0:
            texts += [
                f"arrays on GPUs use {', '.join(self.names)}, because {name} is off: {why}"
                for name, why in self.missing.items()
                if not registry.DEVICE[name].policy.on_request
            ]
            texts += [f"arrays on GPUs: {words}" for _, words in self.missing_in_parts]
        for text in texts:
            warnings.warn(f"mpicoll: {text}", RuntimeWarning, stacklevel=3)

    def describe(self) -> dict[str, str]:
        """Return for each route why the group, or a part of it in ``hierarchical``, does not use
        it; "" for a route in use.
        """
        found = eligibility.describe_routes(self.names, self._found, self._forced, self.missing)
        for name, words in self.missing_in_parts:
            found[name] = "; ".join(filter(None, (found[name], f"in hierarchical {words}")))
        return found

    def agree_in(self, part: ProcessGroup, known: Sequence[Capabilities]) -> Agreement:
        """Return the agreement of a part of the group. All ranks of the part call."""
        return agree(part, self.context, known)

    def build_in_part(self, kind: CallKind) -> Implementation:
        """Return the implementation for calls of a kind. All ranks call."""
        return DeviceImplementation(kind)

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """See RouteState."""
        failures = (state.find_failure(wait) for state in self.states.values())
        return next((failure for failure in failures if failure is not None), None)

    def abort_states(self, alone: bool) -> None:
        """End calls on devices and in parts of the group after it has failed; see RouteState."""
        error = self.group.error
        if error is None:
            return
        for state in reversed(self.states.values()):  # NCCL is first, and its abort may take long
            state.abort(error, alone)

    def abandon(self) -> None:
        """End calls on devices without waiting for other ranks."""
        _abandoned.append(self)  # other ranks may map memory of this one
        self.group.error = self.group.error or DistBackendError(
            f"process group {self.group.group_name!r} was aborted"
        )
        self.abort_states(alone=True)

    def close(self, limit: float) -> None:
        """Close the routes' states; wait at most ``limit`` seconds for other ranks. All ranks
        call.
        """
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
    """An implementation and its route.

    preload:   loads the kernels that a captured call needs, if calls may be captured.
    min_bytes: minimum size of a call in bytes.
    """

    implementation: Implementation
    route: Route
    preload: Implementation | None
    min_bytes: int


class DeviceImplementation(Implementation):
    """The implementation of a kind of call, by the route for the size of each call. The first call
    makes the group's agreement and the implementations.
    """

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
        for other in self._candidates:
            if other.preload is not None and other is not candidate:
                other.preload.run(send, recv, extent, root)
        candidate.implementation.run(send, recv, extent, root)
        if is_first:
            agreement.warn()  # while no rank waits for this one: warnings may be errors

    def _prepare(self, context: DeviceContext, extent: Extent) -> tuple[Agreement, _Candidate]:
        self._prepared_call = self._kind.group.sequence
        agreement = agree(self._kind.group, context)
        agreement.space.context = context
        if not self._candidates:
            self._candidates.extend(_build_candidates(agreement, self._kind))
        return agreement, self._candidate_for(extent, context.captured)

    def _candidate_for(self, extent: Extent, captured: bool = False) -> _Candidate:
        """Return the first candidate that serves a call of this size, else the last.

        The size is one that all ranks know. captured: all ranks capture the call into a CUDA graph.
        """
        primitive, group, _, dtype = self._kind
        candidates = [
            each for each in self._candidates if not captured or each.route.policy.capturable
        ]
        if len(candidates) == 1:
            return candidates[0]
        assert dtype is not None
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
            candidate = self._candidate_for(extent, context.captured)
            state = agreement.states.get(candidate.route.name)
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
            preload = None if route.preload is None else route.preload(kind, agreement)
            candidates.append(_Candidate(found, route, preload, min_bytes))
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
