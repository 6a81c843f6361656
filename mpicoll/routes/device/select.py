"""The choice of a route for device memory, the same on every rank: with a group's first such call
its ranks exchange what they can do.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
from mpicoll.routes.device import (
    copy_engine,
    direct,
    eligibility,
    hierarchical,
    ipc,
    nccl,
    peer,
    shared_gpu,
)
from mpicoll.routes.device.space import Alone, DeviceSpace
from mpicoll.routes.host import select
from mpicoll.routes.route import Route

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Agreed", "agree", "choose"]

T = TypeVar("T")


class Agreed:
    """The agreement of a group's ranks.

    names: its routes, the best first.
    lost:  the routes that should have been among them, and why they are not.
    shared_gpu: what ranks that share a GPU have of each other.
    copy_engine: what the ranks of a node have of each other's arrays.
    peer:  what ranks with a GPU each have of each other, if they are all on one node.
    hierarchical: the ranks that are near each other, and what joins these clusters.
    ipc:   the workspaces of all ranks, if they are mapped.
    nccl:  NCCL's communicator, if it was requested and is available.
    space: this rank's device memory.
    """

    def __init__(
        self,
        group: ProcessGroup,
        context: DeviceContext,
        known: Sequence[Capabilities] | None = None,
    ) -> None:
        """All ranks call. known: of a part of another group, what its ranks can do, as tried."""
        self.space = DeviceSpace(context)
        self.lost: dict[str, str] = {}
        self.names: tuple[str, ...]
        self.nccl: nccl.Nccl | None = None
        self.shared_gpu: shared_gpu.Sharers | None = None
        self.copy_engine: copy_engine.Copiers | None = None
        self.peer: peer.Peers | None = None
        self.hierarchical: hierarchical.Levels | None = None
        self.ipc: ipc.Peers | None = None
        self._group, self._me = group, group.rank()
        self._forced: str | None = None
        self._used: list[int] = []
        if known is not None:
            self._found = tuple(known)
            self._meet(group, context, eligibility.eligible_routes(self._found), part=True)
            self._take(group, context, self._found)
            return
        self._found = capabilities.exchange(group.inner)
        self._forced = forced = eligibility.forced_route(self._found)
        mine = (context.index, nccl.asked_for(group.backend))
        said = group.inner.allgather(mine)
        if len({asked for _, asked in said}) > 1:
            raise MismatchError(
                f"group {group.group_name}: backend 'nccl' has to be asked for by all ranks, or by "
                f"none; this rank's is {group.backend!r}"
            )
        self._used = [index for index, _ in said]
        self._found = eligibility.with_used(self._found, self._used)
        if forced == "nccl" or mine[1]:
            self.nccl = self._had("nccl", nccl.meet(group, context))
        if group.size() == 1 and forced is None and self.nccl is None:
            # Messages to nobody need nothing of MPI, and nobody has to be met.
            self.space, self.names = Alone(context), ("direct", "staged")
            return
        wanted = (forced,) if forced else eligibility.eligible_routes(self._found)
        self._meet(group, context, wanted)
        apart = len({own.node for own in self._found}) > 1
        mapped = self.shared_gpu or self.ipc
        known = [replace(own, cuda=CudaSupport.NONE, why="not tried") for own in self._found]
        if mapped is None and (
            forced in (None, "direct", "mpi") or (forced == "hierarchical" and apart)
        ):
            # What MPI claims counts now, and has to be tried.
            found = capabilities.exchange(group.inner, probes=True)
            self._found = eligibility.with_used(found, self._used)
            tried = between_nodes.try_messages(
                group.inner, context.runtime, context.index, self._found
            )
            if tried != self._found:
                self.lost["direct"] = tried[0].problem
            self._found, known = tried, list(tried)
        self._take(group, context, known)

    def _meet(
        self, group: ProcessGroup, context: DeviceContext, wanted: Sequence[str], part: bool = False
    ) -> None:
        """Map what routes among those wanted need of other ranks' memory. All ranks call.

        part: of another group, which asks for what "peer" serves alone.
        """
        for name in ("shared_gpu", "copy_engine", "peer", "ipc"):
            if name in wanted:
                eligibility.eligible_routes(self._found, self._forced)  # raises
        if "shared_gpu" in wanted:
            self.shared_gpu = self._had("shared_gpu", shared_gpu.meet(group, context))
        if "copy_engine" in wanted and not self.shared_gpu:
            self.copy_engine = self._had("copy_engine", copy_engine.meet(group, context))
        if "peer" in wanted:
            self.peer = self._had("peer", peer.meet(group, context))
        if "ipc" in wanted and not (self.shared_gpu or (part and self.peer)):
            self.ipc = self._had("ipc", ipc.meet(group, context))

    def _take(
        self, group: ProcessGroup, context: DeviceContext, known: Sequence[Capabilities]
    ) -> None:
        """Settle which routes the group takes. All ranks call.

        known: what each rank can do, as tried: its parts try nothing anew.
        """
        forced = self._forced
        eligible = eligibility.eligible_routes(self._found, forced)
        if "hierarchical" in eligible:
            made = hierarchical.meet(group, context, known, agree)
            self.hierarchical = self._had("hierarchical", made)
        if forced in self.lost:
            raise UnsupportedError(f"{eligibility.FORCED}={forced}: {self.lost[forced]}; unset it")
        mapped = self.shared_gpu or self.ipc
        without = {*self.lost, *(("direct", "mpi") if mapped else ())}  # which nobody has tried
        without |= {name for name in ("copy_engine", "ipc") if getattr(self, name) is None}
        self.names = tuple(name for name in eligible if name not in without)
        if self.nccl is not None and forced is None:
            self.names = ("nccl", *self.names)
        if self._only_enqueuing:
            group.ask_devices = self.find_failure

    @property
    def _only_enqueuing(self) -> list[peer.Peers | nccl.Nccl | hierarchical.Levels]:
        """Return what it has for calls whose hosts do not meet, so that devices may end them."""
        parts = (self.nccl, self.hierarchical, self.peer)
        return [part for part in parts if part is not None]

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return why devices have ended calls of the group without their results; None if they have
        not, as far as is known.

        wait: until they are done.
        """
        failures = (part.find_failure(wait) for part in self._only_enqueuing)
        return next((failure for failure in failures if failure is not None), None)

    @property
    def maps(self) -> bool:
        """Return whether the ranks map memory of each other."""
        parts = (self.shared_gpu, self.copy_engine, self.peer, self.hierarchical, self.ipc)
        return any(part is not None for part in parts)

    def _had(self, name: str, made: T | str) -> T | None:
        """Return what the ranks have made for a route; if it is why they could not, note that."""
        if not isinstance(made, str):
            return made
        self.lost[name] = made
        return None

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
        for _, words in self._lost_in_parts if self._me == 0 else ():
            warnings.warn(f"mpicoll: arrays on GPUs: {words}", RuntimeWarning, stacklevel=3)

    @property
    def _lost_in_parts(self) -> Sequence[tuple[str, str]]:
        return () if self.hierarchical is None else self.hierarchical.lost

    def describe(self) -> dict[str, str]:
        """Return of each route why the group does not take it, "" for those it takes; and why a
        part of the group, for `hierarchical`, does not.
        """
        found = eligibility.describe_routes(self.names, self._found, self._forced, self.lost)
        for name, words in self._lost_in_parts:
            found[name] = "; ".join(filter(None, (found[name], f"in hierarchical {words}")))
        return found

    def on_host(self, kind: CallKind) -> Implementation:
        """Return the implementation of such calls on host memory."""
        return select.choose(kind)

    def on_device(self, kind: CallKind) -> Implementation:
        """Return the implementation of such calls of this group on device memory."""
        return choose(kind)

    def leave(self, name: str, kind: CallKind, error: Exception) -> None:
        """Tell the ranks that wait for this one in a call by a route that it has failed."""
        parts = {
            shared_gpu.ROUTE.name: self.shared_gpu,
            copy_engine.ROUTE.name: self.copy_engine,
            hierarchical.ROUTE.name: self.hierarchical,
            ipc.ROUTE.name: self.ipc,
            peer.ROUTE.name: self.peer,
            nccl.ROUTE.name: self.nccl,
        }
        part = parts.get(name)
        if part is not None:
            part.take_leave(kind, error)

    def break_parts(self, alone: bool) -> None:
        """Make calls in parts of the group and on devices end, this rank's alone or all: the group
        is broken.
        """
        error = self._group.broken
        if error is None:
            return
        if self.hierarchical is not None:
            self.hierarchical.break_with(error, alone)
        for part in (self.peer, self.nccl):
            if part is not None:
                part.break_with(error)

    def abandon(self) -> None:
        """Leave the group, without waiting for other ranks: calls on devices end."""
        _abandoned.append(self)  # other ranks may map what this one has
        self._group.broken = self._group.broken or DistBackendError(
            f"process group {self._group.group_name!r} was aborted"
        )
        self.break_parts(alone=True)

    def close(self, limit: float) -> None:
        """Free what the routes have; all ranks call. limit: seconds to wait for them."""
        parts = (self.shared_gpu, self.copy_engine, self.peer, self.ipc)
        for route in (self.nccl, self.hierarchical, *parts):
            if route is not None:
                route.close(limit)


def agree(
    group: ProcessGroup, context: DeviceContext, known: Sequence[Capabilities] | None = None
) -> Agreed:
    """Return the agreement of a group's ranks, made when all call for the first time.

    known: see Agreed.
    """
    return group.resources.get_or_create(
        "devices",
        lambda: Agreed(group, context, known),
        close=Agreed.close,
        abandon=Agreed.abandon,
        leave=Agreed.break_parts,
    )


#: Of groups that were left, and whose memory others may use.
_abandoned: list[Agreed] = []


def choose(kind: CallKind) -> Implementation:
    """Return the implementation for calls of this kind on device memory in this group."""
    group = kind.group
    candidates: list[Candidate] = []  # those for the largest calls first
    begun = -1  # the number of the latest call that has come here

    def prepare(context: DeviceContext, extent: Extent) -> tuple[Agreed, Candidate]:
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


def _build(agreed: Agreed, kind: CallKind) -> list[Candidate]:
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
