"""The choice of a route for device memory, the same on every rank: with a group's first such call
its ranks exchange what they can do.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import CallKind, Extent, Implementation, add_capturable, add_enqueuing
from mpicoll.cuda import between_nodes, binding, capabilities
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import direct, eligibility, ipc, nccl, peer
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
        self._found = self._with_used(self._found)
        self.nccl: nccl.Nccl | None = None
        self.peer: peer.Peers | None = None
        self.ipc: ipc.Peers | None = None
        if forced == "nccl" or mine[1]:
            self.nccl = self._had("nccl", nccl.meet(group, context))
        if group.size() == 1 and forced is None and self.nccl is None:
            # Messages to nobody need nothing of MPI, and nobody has to be met.
            self.space, self.names = Alone(context), ("direct", "staged")
            return
        wanted = (forced,) if forced else eligibility.eligible_routes(self._found)
        if "peer" in wanted:
            eligibility.eligible_routes(self._found, forced)  # raises
            self.peer = self._had("peer", peer.meet(group, context))
        if "ipc" in wanted:  # for the calls that "peer" does not serve, too
            eligibility.eligible_routes(self._found, forced)  # raises
            self.ipc = self._had("ipc", ipc.meet(group, context))
        if self.ipc is None and forced in (None, "direct", "mpi"):
            # What MPI claims counts now, and has to be tried.
            self._found = self._with_used(capabilities.exchange(group.inner, probes=True))
            tried = between_nodes.try_messages(
                group.inner, context.runtime, context.index, self._found
            )
            if tried != self._found:
                self.lost["direct"] = tried[0].problem
            self._found = tried
        eligible = eligibility.eligible_routes(self._found, forced)
        if forced in self.lost:
            raise UnsupportedError(f"{eligibility.FORCED}={forced}: {self.lost[forced]}; unset it")
        untried = () if self.ipc is None else ("direct", "mpi")
        self.names = tuple(name for name in eligible if name not in (*self.lost, *untried))
        if self.nccl is not None and forced is None:
            self.names = ("nccl", *self.names)

    def _with_used(self, found: Sequence[Capabilities]) -> tuple[Capabilities, ...]:
        """Return what the ranks can do, with the GPU that each one's arrays are on."""
        return tuple(
            replace(own, used=own.gpus[index]) if own.gpus else own
            for own, index in zip(found, self._used, strict=True)
        )

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

    def close(self, limit: float) -> None:
        """Free what the routes have; all ranks call. limit: seconds to wait for them."""
        for route in (self.nccl, self.peer, self.ipc):
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
    only_enqueues = captures = False

    def carry_out(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        nonlocal chosen, only_enqueues, captures
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        is_first = group.resources.find("devices") is None  # on every rank
        agreed = agree(group, first.context)
        agreed.space.context = first.context
        if chosen is None:
            chosen, route = _build(agreed, kind)
            only_enqueues = route.blocks == "" or (agreed.space.alone and route is direct.ROUTE)
            captures = route.captures
        chosen(send, recv, extent, root)
        if is_first:
            agreed.warn()  # when no rank waits for this one: a program may make warnings errors

    return add_capturable(add_enqueuing(carry_out, lambda: only_enqueues), lambda: captures)


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
