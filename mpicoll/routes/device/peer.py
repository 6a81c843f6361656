"""GPUs of a node that reach each other's memory, one for each rank: a call is one kernel on each.

The kernels (``kernels/src/device_peers.cu``) push data into each other's workspaces and wait for
each other by flags there. The hosts do not meet. A call only puts work into streams, and may be
captured into a CUDA graph. Ranks that share a GPU take another route: their kernels would wait for
each other in turns.

A kernel that waits for a rank for longer than the group's timeout gives up, with those of all
ranks. The next call says so; what was waiting in the streams has gone on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation
from mpicoll.core.reproducible import ORDER
from mpicoll.core.signature import encode_kind
from mpicoll.cuda.runtime import CUDA, Memory, allocate
from mpicoll.cuda.streams import DeviceContext
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import DistBackendError, UnsupportedError
from mpicoll.kernels import peers
from mpicoll.kernels.peers import HEADER, RANKS, Collective
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.algorithms import premultiplied
from mpicoll.routes.device.space import at_home
from mpicoll.routes.device.workspaces import BLOCK, free_when_unmapped, mapped
from mpicoll.routes.route import MemoryKind, Route

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup
    from mpicoll.routes.device.select import Agreed

__all__ = ["ROUTE", "Peers", "meet"]

#: Bytes of a workspace beside its header.
WORKSPACE = 32 * 1024 * 1024
#: Seconds to wait for a rank in the try that comes before the first call.
TRY_LIMIT = 20.0
#: Bytes of each rank that are tried.
_TRIED = 4096


class Peers:
    """The workspaces of a group's ranks, as one rank sees them.

    context: this rank's device context.
    """

    def __init__(
        self,
        group: ProcessGroup,
        context: DeviceContext,
        own: Memory,
        workspaces: list[Memory],
        blocks: int,
    ) -> None:
        self.group = group
        self.n, self.me = group.size(), group.rank()
        self.context = context
        self._own, self._workspaces = own, workspaces
        self._report = context.runtime.allocate_pinned(context.index, 8)
        self._reported = self._report.on_host()[:8].view(np.uint64)
        self._reported[:] = 0
        self.limit = group.timeout
        self._peers = peers.Peers(
            tuple(memory.address for memory in workspaces), self.me, self._report.address,
            _nanoseconds(self.limit), peers.room_of(WORKSPACE, self.n, blocks), blocks,
        )  # fmt: skip

    def carry_out(self, call: Collective) -> None:
        """Enqueue this rank's part of a call.

        Raises DistBackendError if the ranks have given up in an earlier one, and UnsupportedError
        in a capture for a kernel that is not there yet.
        """
        self.check()
        context = self.context
        if context.captured and not context.runtime.has_collective(context.index, call):
            raise UnsupportedError(
                f"{call.name}: the current stream is being captured into a CUDA graph, and the "
                "kernel is not there yet; make such a call, with arrays that lie alike, before"
            )
        context.runtime.load_collective(context.index, call)
        context.runtime.collective(context.index, self._peers, call, context.work)

    def check(self) -> None:
        """Raise DistBackendError if the ranks have given up."""
        failure = int(self._reported[0])
        if not failure:
            return
        why, rank, other = failure >> 32, failure >> 16 & 0xFFFF, failure & 0xFFFF
        words = (
            f"rank {rank}'s GPU has waited {self.limit} s for rank {other}'s"
            if why == peers.LATE
            else f"ranks {other} and {rank} made calls that do not belong together"
        )
        raise DistBackendError(
            f"group {self.group.group_name}: {words} in an earlier call on device memory. What "
            "that and later calls gave is incomplete on any rank; destroy the group, and make "
            "another"
        )

    def try_once(self) -> str:
        """Carry out an all-gather in a short time; return why it failed, "" if it did not."""
        context, n, me, found = self.context, self.n, self.me, self._peers
        send, recv = context.scratch(_TRIED), context.scratch(n * _TRIED)
        pinned = context.runtime.allocate_pinned(context.index, (n + 1) * _TRIED)
        host = pinned.on_host()[: (n + 1) * _TRIED].reshape(n + 1, _TRIED)
        host[0], host[1:] = _pattern(me), 0
        runtime, index, stream = context.runtime, context.index, context.to_device
        call = _tried(send.address, recv.address, n)
        self._peers = found._replace(limit=_nanoseconds(TRY_LIMIT))
        runtime.copy(index, send.address, pinned.address, _TRIED, stream)
        runtime.collective(index, self._peers, call, stream)
        runtime.copy(index, pinned.address + _TRIED, recv.address, n * _TRIED, stream)
        context.synchronize(stream)
        self._peers = found
        if self._reported[0]:
            return f"what a rank writes to another's memory does not arrive within {TRY_LIMIT} s"
        wrong = [rank for rank in range(n) if (host[1 + rank] != _pattern(rank)).any()]
        return f"what rank {wrong[0]} writes to this rank's memory is wrong there" if wrong else ""

    def close(self, limit: float) -> None:
        """Let go of the workspaces; all ranks call. This rank's is freed once no other rank maps it
        any more, or never, if that takes longer than ``limit`` seconds.
        """
        self.context.synchronize(self.context.work)
        self._workspaces = []
        free_when_unmapped(self.group, self._own, limit)


def _nanoseconds(seconds: float | None) -> int:
    return 1 << 62 if seconds is None else int(seconds * 1e9)


def _pattern(rank: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(rank).integers(0, 256, _TRIED, np.uint8)


def _tried(send: int, recv: int, n: int) -> Collective:
    starts = range(0, (n + 1) * _TRIED // 8, _TRIED // 8)
    return Collective("all_gather", None, 8, send, recv, starts=list(starts))


def meet(group: ProcessGroup, context: DeviceContext) -> Peers | str:
    """Return what the ranks have of each other, once a try has shown that it works, or, on all, why
    there is none. All ranks call.
    """
    runtime, index, n, me = context.runtime, context.index, group.size(), group.rank()
    if n > RANKS:
        return f"the kernels serve {RANKS} ranks at most, and the group has {n}"
    own, handle, found, problem, blocks = None, b"", [], "", peers.BLOCKS
    try:
        if runtime.kind() != CUDA:
            raise UnsupportedError(
                f"the kernels are CUDA's, and the devices are {runtime.kind()}'s"
            )
        own = allocate(runtime, index, -(-(HEADER.itemsize + WORKSPACE) // BLOCK) * BLOCK)
        zeros = runtime.allocate_pinned(index, HEADER.itemsize)
        zeros.on_host()[: HEADER.itemsize] = 0
        # In a stream of its own: the host does not wait for what the call comes after.
        runtime.copy(index, own.address, zeros.address, HEADER.itemsize, context.to_device)
        context.synchronize(context.to_device)
        runtime.load_collective(index, _tried(0, 0, n))
        blocks = min(blocks, runtime.multiprocessors(index))
        handle = runtime.export(index, own)
        mapped.append(own)
    except Exception as error:  # whatever the driver says: all ranks take another route then
        own, problem = None, f"no workspace: {error}"
    said: list[tuple[bytes, int, str]] = group.inner.allgather((handle, blocks, problem))
    made, why = None, _first([words for _, _, words in said])
    if own is not None and not why:
        try:
            found = [
                own if rank == me else runtime.open(index, theirs)
                for rank, (theirs, _, _) in enumerate(said)
            ]
            made = Peers(group, context, own, found, min(most for _, most, _ in said))
        except Exception as error:
            problem = f"cannot map another rank's device memory (CUDA IPC): {error}"
        why = _first(group.inner.allgather(problem))
    if made is not None and not why:
        try:
            problem = made.try_once()
        except Exception as error:
            problem = str(error)
        why = _first(group.inner.allgather(problem))
    if made is not None and not why:
        return made
    found.clear()
    made = None
    group.inner.Barrier()  # no rank maps anything any more
    if own is not None:
        mapped.remove(own)
    return why


def _first(problems: Sequence[str]) -> str:
    """Return the first problem of a rank; "" for none."""
    return next((f"rank {rank}: {words}" for rank, words in enumerate(problems) if words), "")


# --- calls --------------------------------------------------------------------------------------


def _build(kind: CallKind, agreed: Agreed) -> Implementation | None:
    """Return the implementation for calls of this kind; None if the ranks have no workspaces."""
    found = agreed.peer
    if found is None:
        return None

    def build(kind: CallKind) -> Implementation:
        return at_home(found.context, _FUNCTIONS[kind.primitive.name](found, kind))

    if kind.op is not None and kind.op.factor is not None:
        return premultiplied(kind, agreed.space, build)
    return build(kind)


def _reduction(found: Peers, kind: CallKind) -> Callable[[Collective, int], None]:
    """Return what carries out a reduction of some elements, given its name, addresses and blocks:
    of elements.
    """
    primitive, _, op, dtype = kind
    assert op is not None and dtype is not None
    by = find_loop(op, dtype)
    assert by is not None
    numbers, width = by.elements, by_name[by.format].itemsize
    divisor = found.n if op is ReduceOp.AVG else 1
    signature = encode_kind(primitive, dtype, op, 0)

    def carry_out(call: Collective, root: int) -> None:
        count, starts = call.count * numbers, [start * numbers for start in call.starts]
        found.carry_out(
            replace(
                call, by=by, width=width, divisor=divisor, count=count, starts=starts,
                call=_digest(signature, root, count, starts),
            )
        )  # fmt: skip

    return carry_out


def _reduce(found: Peers, kind: CallKind) -> Implementation:
    """Build reduce, and all_reduce, which has no root."""
    carry_out, rooted = _reduction(found, kind), kind.primitive.name == "reduce"

    def reduce(send: None, view: DeviceView, count: int, root: int) -> None:
        call = Collective("all_reduce", None, 0, 0, view.address, view.count)
        carry_out(replace(call, root=root) if rooted else call, root)

    return reduce


def _reduce_scatter(found: Peers, kind: CallKind) -> Implementation:
    carry_out = _reduction(found, kind)

    def reduce_scatter(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        counts = extent.sends if isinstance(extent, Blocks) else [extent] * found.n
        starts = list(accumulate(counts, initial=0))
        carry_out(
            Collective("reduce_scatter", None, 0, send.address, recv.address, starts=starts), 0
        )

    return reduce_scatter


def _all_gather(found: Peers, kind: CallKind) -> Implementation:
    signature = encode_kind(kind.primitive, kind.dtype, None, 0)

    def all_gather(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        counts = extent.receives if isinstance(extent, Blocks) else [extent] * found.n
        starts = [each * recv.dtype.itemsize for each in accumulate(counts, initial=0)]
        width = gcd(8, send.address, recv.address, *starts)
        found.carry_out(
            Collective(
                "all_gather", None, width, send.address, recv.address,
                starts=[start // width for start in starts],
                call=_digest(signature, 0, 0, starts),
            )
        )  # fmt: skip

    return all_gather


def _broadcast(found: Peers, kind: CallKind) -> Implementation:
    signature = encode_kind(kind.primitive, kind.dtype, None, 0)

    def broadcast(send: None, view: DeviceView, count: int, root: int) -> None:
        width = gcd(8, view.address, view.nbytes)
        found.carry_out(
            Collective(
                "broadcast", None, width, 0, view.address, view.nbytes // width, root=root,
                call=_digest(signature, root, view.nbytes, ()),
            )
        )  # fmt: skip

    return broadcast


def _digest(signature: int, root: int, count: int, starts: Sequence[int]) -> int:
    """Return what the kernels compare of a call: 16 bits."""
    return zlib.crc32(repr((signature, root, count, list(starts))).encode()) & 0xFFFF


#: By the name of the primitive.
_FUNCTIONS: dict[str, Callable[[Peers, CallKind], Implementation]] = {
    "all_reduce": _reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "broadcast": _broadcast,
}


class _Loader(Peers):
    """Compiles the kernels of calls, and carries out none."""

    def __init__(self, found: Peers) -> None:
        vars(self).update(vars(found))

    def carry_out(self, call: Collective) -> None:
        """Compile what the call needs."""
        self.context.runtime.load_collective(self.context.index, call)


def _build_loader(kind: CallKind, agreed: Agreed) -> Implementation | None:
    """Return what compiles the kernels of such calls."""
    found = agreed.peer
    return None if found is None else _FUNCTIONS[kind.primitive.name](_Loader(found), kind)


ROUTE = Route(
    "peer",
    "one kernel on each GPU, which writes to the others' memory",
    MemoryKind.DEVICE,
    tuple(_FUNCTIONS),
    _build,
    combines=lambda op, dtype: find_loop(op, dtype) is not None,
    reproducible=(ORDER,),
    scales=True,
    uneven=("all_gather", "reduce_scatter"),
    place="gpus",
    needs="all ranks on one node, each with a GPU of its own, and CUDA IPC between them",
    lacks=lambda own: "" if own.gpus else f"a GPU ({own.no_gpu})",
    blocks="",
    captures=True,
    load=_build_loader,
)
