"""The choice of a route for device memory, the same on every rank: with a group's first such call
its ranks exchange what they can do.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import (
    CallKind,
    Extent,
    Implementation,
    add_capturable,
    add_enqueuing,
    add_leave,
)
from mpicoll.cuda import between_nodes, binding, capabilities
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import direct, eligibility, ipc, nccl, peer, shared_gpu
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
    peer:  what ranks with a GPU each have of each other, if they are all on one node.
    ipc:   the workspaces of all ranks, if they are mapped.
    nccl:  NCCL's communicator, if it was requested and is available.
    space: this rank's device memory.
    """

    def __init__(self, group: ProcessGroup, context: DeviceContext) -> None:
        self.space = DeviceSpace(context)
        self.lost: dict[str, str] = {}
        self.names: tuple[str, ...]
        self._found = capabilities.exchange(group.inner)
        self._forced = forced = eligibility.forced_route(self._found)
        mine = (context.index, nccl.asked_for(group.backend))
        said = group.inner.allgather(mine)
        if len({asked for _, asked in said}) > 1:
            raise MismatchError(
                f"group {group.group_name}: backend 'nccl' has to be asked for by all ranks, or by "
                f"none; this rank's is {group.backend!r}"
            )
        self._me, self._used = group.rank(), [index for index, _ in said]
        self._found = eligibility.with_used(self._found, self._used)
        self.nccl: nccl.Nccl | None = None
        self.shared_gpu: shared_gpu.Sharers | None = None
        self.peer: peer.Peers | None = None
        self.ipc: ipc.Peers | None = None
        if forced == "nccl" or mine[1]:
            self.nccl = self._had("nccl", nccl.meet(group, context))
        if group.size() == 1 and forced is None and self.nccl is None:
            # Messages to nobody need nothing of MPI, and nobody has to be met.
            self.space, self.names = Alone(context), ("direct", "staged")
            return
        wanted = (forced,) if forced else eligibility.eligible_routes(self._found)
        if "shared_gpu" in wanted:
            eligibility.eligible_routes(self._found, forced)  # raises
            self.shared_gpu = self._had("shared_gpu", shared_gpu.meet(group, context))
        if "peer" in wanted:
            eligibility.eligible_routes(self._found, forced)  # raises
            self.peer = self._had("peer", peer.meet(group, context))
        if "ipc" in wanted and self.shared_gpu is None:  # for what "peer" does not serve, too
            eligibility.eligible_routes(self._found, forced)  # raises
            self.ipc = self._had("ipc", ipc.meet(group, context))
        mapped = self.shared_gpu or self.ipc
        if mapped is None and forced in (None, "direct", "mpi"):
            # What MPI claims counts now, and has to be tried.
            found = capabilities.exchange(group.inner, probes=True)
            self._found = eligibility.with_used(found, self._used)
            tried = between_nodes.try_messages(
                group.inner, context.runtime, context.index, self._found
            )
            if tried != self._found:
                self.lost["direct"] = tried[0].problem
            self._found = tried
        eligible = eligibility.eligible_routes(self._found, forced)
        if forced in self.lost:
            raise UnsupportedError(f"{eligibility.FORCED}={forced}: {self.lost[forced]}; unset it")
        without = {*self.lost, *(("direct", "mpi") if mapped else ())}  # which nobody has tried
        if self.ipc is None:
            without.add("ipc")
        self.names = tuple(name for name in eligible if name not in without)
        if self.nccl is not None and forced is None:
            self.names = ("nccl", *self.names)

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
                    f"mpicoll: arrays on GPUs go by {self.names[0]}, because {name} is off: {why}",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def describe(self) -> dict[str, str]:
        """Return of each route why the group does not take it, "" for those it takes."""
        return eligibility.describe_routes(self.names, self._found, self._forced, self.lost)

    def on_host(self, kind: CallKind) -> Implementation:
        """Return the implementation of such calls on host memory."""
        return select.choose(kind)

    def leave(self, name: str, kind: CallKind, error: Exception) -> None:
        """Tell the ranks that wait for this one in a call by a route that it has failed."""
        for route, part in ((shared_gpu.ROUTE, self.shared_gpu), (ipc.ROUTE, self.ipc)):
            if route.name == name and part is not None:
                part.take_leave(kind, error)

    def close(self, limit: float) -> None:
        """Free what the routes have; all ranks call. limit: seconds to wait for them."""
        for route in (self.nccl, self.shared_gpu, self.peer, self.ipc):
            if route is not None:
                route.close(limit)


def agree(group: ProcessGroup, context: DeviceContext) -> Agreed:
    """Return the agreement of a group's ranks, made when all call for the first time."""
    return group.resources.get_or_create(
        "devices", lambda: Agreed(group, context), close=Agreed.close
    )


def choose(kind: CallKind) -> Implementation:
    """Return the implementation for calls of this kind on device memory in this group."""
    group = kind.group
    chosen: Implementation | None = None
    route: Route | None = None
    begun = -1  # the number of the latest call that has come here

    def prepare(context: DeviceContext) -> tuple[Agreed, Implementation]:
        nonlocal chosen, route, begun
        begun = group.sequence
        agreed = agree(group, context)
        agreed.space.context = context
        if chosen is None:
            chosen, route = _build(agreed, kind)
        return agreed, chosen

    def carry_out(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        is_first = group.resources.find("devices") is None  # on every rank
        agreed, run = prepare(first.context)
        run(send, recv, extent, root)
        if is_first:
            agreed.warn()  # when no rank waits for this one: a program may make warnings errors

    def leave(error: Exception, context: DeviceContext) -> None:
        if begun != group.sequence:  # the others agree on routes if this is the first call
            prepare(context)
        found = group.resources.find("devices")
        if found is not None and route is not None:
            found.leave(route.name, kind, error)

    def only_enqueues() -> bool:
        if route is None:
            return False
        found = group.resources.find("devices")
        return route.blocks == "" or (found.space.alone and route is direct.ROUTE)

    add_capturable(carry_out, lambda: route is not None and route.captures)
    return add_enqueuing(add_leave(carry_out, leave), only_enqueues)


def _build(agreed: Agreed, kind: CallKind) -> tuple[Implementation, Route]:
    """Return the implementation by the best route that serves it, and that route."""
    primitive, group, op, dtype = kind
    for name in agreed.names:
        route = registry.DEVICE[name]
        found = route.build(kind, agreed) if route.serves_kind(kind) else None
        if found is not None:
            return found, route
    raise UnsupportedError(
        f"{primitive.name}: MPICOLL_DEVICE_ROUTE={agreed.names[0]} does not serve "
        f"{'' if op is None else f'{op.name} of '}{dtype}"
        f"{'' if group.reproducible is None else f' with reproducible={group.reproducible!r}'}"
        "; unset it"
    )
