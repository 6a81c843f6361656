"""The choice of a route for device memory, the same on every rank: with a group's first such call
its ranks exchange what they can do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.cuda import between_nodes, binding, capabilities
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import eligibility, ipc, nccl
from mpicoll.routes.device.space import DeviceSpace
from mpicoll.routes.host import select

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["choose"]


class Agreed:
    """The agreement of a group's ranks.

    names: its routes, the best first.
    ipc:   the workspaces of all ranks, if they are mapped.
    nccl:  NCCL's communicator, if it was requested and is available.
    space: this rank's device memory.
    warn:  warns of ranks that share a GPU while others are idle.
    """

    def __init__(self, group: ProcessGroup, context: DeviceContext) -> None:
        self.space = DeviceSpace(context)
        found = capabilities.exchange(group.inner)
        forced = eligibility.forced_route(found)
        mine = (context.index, nccl.asked_for(group.backend))
        said = group.inner.allgather(mine)
        if len({asked for _, asked in said}) > 1:
            raise MismatchError(
                f"group {group.group_name}: backend 'nccl' has to be asked for by all ranks, or by "
                f"none; this rank's is {group.backend!r}"
            )
        self.nccl = nccl.meet(group, context) if forced == "nccl" or mine[1] else None
        self.ipc = None
        if forced == "ipc" or (forced is None and "ipc" in eligibility.eligible_routes(found)):
            self.names = eligibility.eligible_routes(found, forced)
            self.ipc = ipc.meet(group, context)
        if self.ipc is None and forced in (None, "direct", "mpi"):
            # What MPI claims counts now, and has to be tried.
            found = capabilities.exchange(group.inner, probes=True)
            found = between_nodes.try_messages(group.inner, context.runtime, context.index, found)
        eligible = eligibility.eligible_routes(found, forced)
        if self.ipc is not None:
            eligible = tuple(name for name in eligible if name in ("ipc", "staged"))
        lost = {"ipc": self.ipc is None, "nccl": self.nccl is None}
        self.names = tuple(name for name in eligible if not lost.get(name))
        if not self.names:
            raise UnsupportedError(f"MPICOLL_DEVICE_ROUTE={forced}: {_MISSING[eligible[0]]}")
        if self.nccl is not None and forced is None:
            self.names = ("nccl", *self.names)
        used = [index for index, _ in said]
        self.warn = partial(binding.warn_of_idle_gpus, found, used, group.rank())

    def on_host(self, kind: CallKind) -> Implementation:
        """Return the implementation of such calls on host memory."""
        return select.choose(kind)

    def close(self, limit: float) -> None:
        """Free what the routes have; all ranks call. limit: seconds to wait for them."""
        for route in (self.nccl, self.ipc):
            if route is not None:
                route.close(limit)


_MISSING = {
    "ipc": "a rank cannot map another's device memory (CUDA IPC)",
    "nccl": "a rank has no NCCL, or two ranks share a GPU",
}


def choose(kind: CallKind) -> Implementation:
    """Return the implementation for calls of this kind on device memory in this group."""
    group = kind.group
    chosen: Implementation | None = None

    def carry_out(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        nonlocal chosen
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        is_first = group.resources.find("devices") is None  # on every rank
        agreed = group.resources.get_or_create(
            "devices", lambda: Agreed(group, first.context), close=Agreed.close
        )
        agreed.space.context = first.context
        if chosen is None:
            chosen = _build(agreed, kind)
        chosen(send, recv, extent, root)
        if is_first:
            agreed.warn()  # when no rank waits for this one: a program may make warnings errors

    return carry_out


def _build(agreed: Agreed, kind: CallKind) -> Implementation:
    """Return the implementation by the best route that serves it."""
    primitive, group, op, dtype = kind
    for name in agreed.names:
        route = registry.DEVICE[name]
        found = route.build(kind, agreed) if route.serves_kind(kind) else None
        if found is not None:
            return found
    raise UnsupportedError(
        f"{primitive.name}: MPICOLL_DEVICE_ROUTE={agreed.names[0]} does not serve "
        f"{'' if op is None else f'{op.name} of '}{dtype}"
        f"{'' if group.reproducible is None else f' with reproducible={group.reproducible!r}'}"
        "; unset it"
    )
