"""The choice of a route for device memory, the same on every rank: the ranks of a group tell each
other what they can do, with its first such call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpicoll.arrays.views import DeviceView, View, address
from mpicoll.core.calls import Blocks, Route, Way, reads, writes
from mpicoll.cuda import binding, capabilities
from mpicoll.cuda.device import Lane
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import MismatchError, UnsupportedError
from mpicoll.kernels.reduction import find_loop
from mpicoll.primitives import Layout, Primitive
from mpicoll.routes import algorithms
from mpicoll.routes.device import direct, nccl, peer, staged
from mpicoll.routes.host import composed, hosts, native

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["choose"]


class Devices:
    """What a group has agreed on.

    names: its routes, the best first.
    peers: the workspaces of all ranks, where they are mapped.
    nccl:  NCCL's communicator, where it was asked for and can be had.
    space: this rank's device memory.
    warn:  warns of ranks that share a GPU while others are idle.
    """

    def __init__(self, group: ProcessGroup, lane: Lane) -> None:
        self.space = Space(lane)
        found = capabilities.exchange(group.inner)
        forced = capabilities.forced_route(found)
        peers = forced == "peer" or (forced is None and "peer" in capabilities.routes(found))
        if not peers and forced not in ("staged", "nccl"):
            found = capabilities.exchange(group.inner, tries=True)
        self.names = capabilities.routes(found, forced)
        mine = (lane.index, nccl.asked_for(group.backend))
        said = group.inner.allgather(mine)
        if len({asked for _, asked in said}) > 1:
            raise MismatchError(
                f"group {group.group_name}: backend 'nccl' has to be asked for by all ranks, or by "
                f"none; this rank's is {group.backend!r}"
            )
        self.warn = partial(binding.warn, found, [index for index, _ in said], group.rank())
        self.nccl = None
        if "nccl" in self.names or mine[1]:
            self.nccl = nccl.meet(group, lane)
        if self.nccl is not None and forced is None:
            self.names = ("nccl", *self.names)
        self.peers = peer.meet(group, lane) if "peer" in self.names else None
        if forced is None and "peer" in self.names and self.peers is None:
            # What MPI says that it can do counts now, and has to be tried.
            found = capabilities.exchange(group.inner, tries=True)
            others = (name for name in capabilities.routes(found) if name != "peer")
            self.names = (*(("nccl",) if self.nccl is not None else ()), *others)
        for name, found_to_be in (("peer", self.peers), ("nccl", self.nccl)):
            if forced == name and found_to_be is None:
                raise UnsupportedError(f"MPICOLL_DEVICE_ROUTE={name}: {_MISSING[name]}")

    def close(self, limit: float) -> None:
        """The end of the group; all ranks call. limit: seconds to wait for them."""
        if self.nccl is not None:
            self.nccl.close()
        if self.peers is not None:
            self.peers.close(limit)


_MISSING = {
    "peer": "a rank cannot map another's device memory (CUDA IPC)",
    "nccl": "a rank has no NCCL, or two ranks share a GPU",
}


class Space(algorithms.Space):
    """A device's memory, as algorithms see it.

    lane: where the current call happens.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def serves(self, op: ReduceOp, dtype: DType) -> bool:
        """A kernel does it."""
        return find_loop(op, dtype) is not None

    def blank(self, dtype: DType, count: int) -> DeviceView:
        """Scratch of the lane."""
        memory = self.lane.scratch(count * dtype.itemsize)
        made = DeviceView(memory, dtype, self.lane.index, memory.address, (count,), None, 0)
        made.lane = self.lane
        return made

    def combine(self, op: ReduceOp, sources: Sequence[View], out: View, divisor: int) -> None:
        """Enqueues a kernel."""
        by = find_loop(op, out.dtype)
        assert by is not None
        lane = self.lane
        addresses = [address(source) for source in sources]
        lane.runtime.combine(lane.index, by, addresses, address(out), out.count, divisor, lane.work)

    def scale(self, source: View, factor: Any, out: View) -> None:
        """Enqueues a kernel."""
        lane = self.lane
        lane.runtime.scale(
            lane.index, source.dtype, address(source), factor, address(out), out.count, lane.work
        )

    def narrow(self, source: View, out: View) -> None:
        """Enqueues a kernel."""
        lane = self.lane
        lane.runtime.narrow(
            lane.index, out.dtype, address(source), address(out), out.count, lane.work
        )

    def settle(self) -> None:
        """Waits for the lane's stream."""
        self.lane.settle(self.lane.work)


def choose(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType | None
) -> Way:
    """What carries out calls of this kind on device memory in this group."""
    assert dtype is not None
    chosen: Route | None = None

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        nonlocal chosen
        made = None
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        agreed: Devices | None = group.devices
        if agreed is None:  # the first call, on every rank
            agreed = made = group.devices = Devices(group, first.working)
        agreed.space.lane = first.working
        if chosen is None:
            chosen = _first(agreed, primitive, group, op, dtype)
        chosen(send, recv, root, blocks)
        if made is not None:
            made.warn()  # when nobody waits for this rank: a program may make warnings errors

    return Way(route)


def _first(
    agreed: Devices, primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Route:
    for name in agreed.names:
        found = _ROUTES[name](agreed, primitive, group, op, dtype)
        if found is not None:
            return found
    raise UnsupportedError(
        f"{primitive.name}: MPICOLL_DEVICE_ROUTE={agreed.names[0]} does not serve "
        f"{'' if op is None else f'{op.name} of '}{dtype}; unset it"
    )


# --- the routes ---------------------------------------------------------------------------------


def _peer(
    agreed: Devices, primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Route | None:
    peers = agreed.peers
    if peers is None or (op is not None and not agreed.space.serves(op.op, dtype)):
        return None

    def on_home(combined: ReduceOp | None, moved: DType) -> Route:
        return _at_home(peers.lane, peer.route(peers, primitive, combined, moved))

    if op is None or op.factor is None:
        return on_home(op, dtype)
    everywhere = not primitive.root
    return composed.premultiplied(
        group,
        agreed.space,
        dtype,
        op.factor,
        everywhere,
        lambda wide: on_home(ReduceOp.SUM, wide),
    )


def _nccl(
    agreed: Devices, primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Route | None:
    if agreed.nccl is None:
        return None
    found = nccl.route(agreed.nccl, primitive, op, dtype)
    return None if found is None else _at_home(agreed.nccl.lane, found)


def _direct(
    agreed: Devices, primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Route | None:
    found = direct.choose(primitive, group, op, dtype, agreed.space)
    return None if found is None else _plain(agreed.space, primitive, group, found)


def _native(
    agreed: Devices, primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Route | None:
    if op is None and primitive.name in native.MOVES:
        uneven = hosts.uneven(primitive, group, op, dtype)
        found = hosts.on_views(native.MOVES[primitive.name](group, dtype), uneven)
    elif op is not None and op.factor is None and native.reducible(op, dtype):
        if primitive.layout is not Layout.IN_PLACE:
            return None
        summed = ReduceOp.SUM if op is ReduceOp.AVG else op
        found = hosts.on_views(native.REDUCTIONS[primitive.name](group, dtype, summed))
        if op is ReduceOp.AVG:
            found = _averaged(agreed.space, primitive, group, found)
    else:
        return None
    return _plain(agreed.space, primitive, group, found)


def _averaged(space: Space, primitive: Primitive, group: ProcessGroup, sums: Route) -> Route:
    """``sums``, divided by the number of ranks on the device: native routes divide by NumPy."""

    def averaged(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        sums(send, recv, root, blocks)
        if writes(primitive, group, root):
            space.combine(ReduceOp.AVG, [recv], recv, group.size())

    return averaged


def _staged(
    agreed: Devices, primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Route | None:
    return staged.route(primitive, group, hosts.choose(primitive, group, op, dtype).route)


_ROUTES: dict[str, Callable[..., Route | None]] = {
    "nccl": _nccl,
    "peer": _peer,
    "direct": _direct,
    "native": _native,
    "staged": _staged,
}


def _at_home(home: Lane, inner: Route) -> Route:
    """``inner`` works on one device of this process alone: arrays of others are copied there."""

    def at_home(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        lane = first.working
        if lane is home:
            inner(send, recv, root, blocks)
            return
        home.begin()
        home.follow(lane)
        out, into = (None if one is None else _moved(one, home) for one in (send, recv))
        try:
            inner(out, into, root, blocks)
            if recv is not None and into is not None:
                home.runtime.copy(home.index, address(recv), into.address, recv.nbytes, home.work)
        finally:
            lane.follow(home)

    return at_home


def _moved(view: View, home: Lane) -> DeviceView:
    """A copy on another device."""
    moved = Space(home).blank(view.dtype, view.count)
    home.runtime.copy(home.index, moved.address, address(view), view.nbytes, home.work)
    return moved


def _plain(space: Space, primitive: Primitive, group: ProcessGroup, inner: Route) -> Route:
    """``inner`` gets memory that every MPI can take, when what the streams hold is done.

    Managed memory, and memory of a pool (cudaMallocAsync), is copied: not all MPIs take it.
    """

    def plain(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        runtime = space.lane.runtime
        out, into = send, recv
        if send is not None and not runtime.plain(address(send)):
            out = send.packed()
        if recv is not None and not runtime.plain(address(recv)):
            filled = send is None and reads(primitive, group, root)
            into = recv.packed() if filled else recv.blank()
        space.settle()
        inner(out, into, root, blocks)
        if recv is not None and into is not None and into is not recv:
            recv.fill(into)

    return plain
