"""Through device memory that the ranks of a node map: CUDA IPC, and nothing of MPI's but messages
between hosts. Several ranks may share a device.

Each rank has a workspace: SLOTS slots for what it gives to the others, and as many for what it has
combined for them. A call goes through in rounds of at most one slot, each in two steps or three:

  1. every rank copies elements of its array into slot k;
  2. it copies or combines what the others have given, into its array, or, where each combines a
     share for all, into its second slot k;
  3. in the latter case it copies the others' shares into its array.

In turn t a rank enqueues step 1 of round t, step 2 of round t - LAG and step 3 of round t - 2 LAG.
Then the hosts wait until their devices have done turn t - LAG + 1, and for each other. So what is
read in a turn was written LAG turns before, when all had done that, and while the hosts wait the
devices have the latest turn to work on. (A call of one round has nothing to work on meanwhile; its
lag is 1.)

Why 2 LAG slots are enough: slot k is read in turn k + LAG, which all are known to have done at the
end of turn k + 2 LAG - 1, and written again in the next; so are the second slots. Rounds are
numbered on from call to call, so that the last turn of a call need not be waited for.

All ranks combine in the order of the ranks, and share the result: the same bits everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.arrays.views import DeviceView, View
from mpicoll.core.calls import Blocks, Route
from mpicoll.core.signature import kind_of, told
from mpicoll.core.work import deadline
from mpicoll.cuda.device import Lane, Memory
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import MismatchError
from mpicoll.kernels.reduction import Loop, find_loop
from mpicoll.primitives import PRIMITIVES, Primitive
from mpicoll.routes.parcels import parcel_of
from mpicoll.routes.wire import all_gather_bytes
from mpicoll.watch.consistency import listed

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Peers", "meet", "route"]

#: Turns between the steps of a round, and slots.
LAG = 2
SLOTS = 2 * LAG
#: Bytes of a slot.
SLOT = 8 * 1024 * 1024
#: Bytes of a message up to which every rank combines everything: a turn less.
WHOLE = 256 * 1024
_LINE = 256


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class Peers:
    """A group's workspaces, as one rank sees them.

    lane: what this rank has of its device.
    room: bytes of a slot.
    """

    def __init__(
        self, group: ProcessGroup, lane: Lane, room: int, own: Memory, others: list[Memory]
    ) -> None:
        self.group = group
        self.n, self.me = group.size(), group.rank()
        self.lane = lane
        self.room = room
        self._own = own
        self._workspaces = others  # by rank; this rank's is its own
        self._turn = 0  # the number of the current call's first round

    def slot(self, rank: int, k: int) -> int:
        """The address of a rank's slot in round ``k`` of this call."""
        return self._workspaces[rank].address + (self._turn + k) % SLOTS * self.room

    def second_slot(self, rank: int, k: int) -> int:
        """The address of what a rank has combined in round ``k``: a slot's n-th part and a line."""
        size = _share_slot(self.room, self.n)
        start = self._workspaces[rank].address + SLOTS * self.room
        return start + (self._turn + k) % SLOTS * size

    def go(
        self, kind: int, count: int, rounds: int, steps: Sequence[Callable[[int], None]]
    ) -> None:
        """Carries a call out: ``steps[s](k)`` enqueues step s of round k.

        kind, count: what all ranks must have alike. Raises MismatchError on all ranks otherwise.
        """
        lane, lag = self.lane, LAG if rounds > 1 else 1
        turns, done = rounds + lag * (len(steps) - 1), []
        try:
            for turn in range(turns):
                for s, step in enumerate(steps):
                    if 0 <= turn - lag * s < rounds:
                        step(turn - lag * s)
                done.append(lane.runtime.record(lane.index, lane.work))
                known = turn - lag + 1
                if known < 0 or turn == turns - 1:
                    continue
                lane.runtime.synchronize(done[known])
                if known > 0:
                    self.group.inner.Barrier()
                elif differences := self._compare(kind, count):
                    self._turn = -rounds  # all raise, and begin anew: nobody has read anything
                    raise MismatchError(differences)
        finally:  # after an error of this rank's, too, for the others go on
            self._turn += rounds

    def _compare(self, kind: int, count: int) -> str:
        """Waits for all ranks; how their calls differ, if they do, "" if not."""
        mine = np.array([kind, count, self.group.sequence, self._turn % SLOTS], np.int64)
        everybody = np.empty((self.n, len(mine)), np.int64)
        self.group.inner.Allgather(mine, everybody)
        if (everybody == mine).all():
            return ""
        return (
            f"{PRIMITIVES[kind >> 16 & 0xFF]} on rank {self.me} of group {self.group.group_name}: "
            f"the ranks' calls do not belong together: "
            f"{listed(told(*row[:2]) for row in everybody.tolist())}"
        )

    def copy(self, into: int, source: int, nbytes: int) -> None:
        """Enqueues a copy."""
        self.lane.runtime.copy(self.lane.index, into, source, nbytes, self.lane.work)

    def combine(self, by: Loop, sources: Sequence[int], out: int, count: int, divisor: int) -> None:
        """Enqueues a reduction, which may read other ranks' memory."""
        lane = self.lane
        if count:
            lane.runtime.combine(lane.index, by, sources, out, count, divisor, lane.work)

    def close(self, limit: float) -> None:
        """Lets go of the workspaces; all ranks call. The own is given back once no other rank maps
        it any more, or never, where that takes longer than ``limit`` seconds.
        """
        self.lane.settle(self.lane.work)
        self._workspaces = []
        request, moment = self.group.inner.Ibarrier(), deadline(limit)
        while not request.Test():
            if time.monotonic() > moment:
                return
            time.sleep(1e-4)
        _mapped.remove(self._own)


#: Workspaces that other ranks may map: freeing such memory would pull it away under them.
_mapped: list[Memory] = []


def _share_slot(room: int, n: int) -> int:
    """Bytes of a second slot: of the largest share of a slot."""
    return _rounded(-(-room // n)) + _LINE


def meet(group: ProcessGroup, lane: Lane) -> Peers | None:
    """The workspaces of all ranks; None on all of them if one cannot see another's. All call."""
    runtime, me, room = lane.runtime, group.rank(), SLOT
    own, handle = None, b""
    try:
        own = runtime.allocate(lane.index, SLOTS * (room + _share_slot(room, group.size())))
        handle = runtime.exported(lane.index, own)
        _mapped.append(own)
    except Exception:  # whatever the driver says: all ranks take another route then
        own = None
    handles = [bytes(one) for one in all_gather_bytes(group.inner, np.frombuffer(handle, np.uint8))]
    found: list[Memory] = []
    if own is not None and all(handles):
        try:
            found = [
                own if rank == me else runtime.opened(lane.index, one)
                for rank, one in enumerate(handles)
            ]
        except Exception:
            found = []
    able = np.array([len(found) == group.size()])
    everybody = np.empty(group.size(), bool)
    group.inner.Allgather(able, everybody)
    if own is None or not everybody.all():
        found.clear()
        group.inner.Barrier()  # nobody maps anything any more
        if own is not None:
            _mapped.remove(own)
        return None
    return Peers(group, lane, room, own, found)


def route(peers: Peers, primitive: Primitive, op: ReduceOp | None, dtype: DType) -> Route:
    """What carries out calls of this kind, for operations that ``reduction.loop`` knows."""
    make = _all_reduce if primitive.name == "all_reduce" else _in_two_steps
    return make(peers, primitive, op, dtype)


def _on(view: View | None) -> DeviceView:
    assert isinstance(view, DeviceView)
    return view


def _rounds(count: int, step: int) -> int:
    """How many rounds of ``step`` elements; a call without elements meets the others as well."""
    return max(1, -(-count // step))


def _all_reduce(peers: Peers, primitive: Primitive, op: Any, dtype: DType) -> Route:
    by, n, me, size = find_loop(op, dtype), peers.n, peers.me, dtype.itemsize
    assert by is not None
    divisor = n if op is ReduceOp.AVG else 1
    kind = kind_of(primitive, dtype, op, 0)

    def all_reduce(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        view = _on(recv)
        step = peers.room // size
        whole = view.nbytes <= WHOLE or n == 1

        def piece(k: int) -> tuple[int, int]:
            return view.address + k * step * size, min(step, view.count - k * step)

        def share(length: int, rank: int) -> tuple[int, int]:
            """First element and count of a rank's share: whole lines."""
            each = _rounded(-(-length // n) * size) // size
            start = min(length, rank * each)
            return start, min(length, start + each) - start

        def give(k: int) -> None:
            address, length = piece(k)
            if whole:
                peers.copy(peers.slot(me, k), address, length * size)
                return
            for r in range(n):
                start, theirs = share(length, r)
                if r != me:  # nobody else reads that
                    into = peers.slot(me, k) + start * size
                    peers.copy(into, address + start * size, theirs * size)

        def take(k: int) -> None:
            address, length = piece(k)
            start, mine = (0, length) if whole else share(length, me)
            at = start * size
            sources = [peers.slot(r, k) + at if r != me else address + at for r in range(n)]
            out = address if whole else peers.second_slot(me, k)
            peers.combine(by, sources, out, mine, divisor)

        def spread(k: int) -> None:
            address, length = piece(k)
            for r in range(n):
                start, theirs = share(length, r)
                peers.copy(address + start * size, peers.second_slot(r, k), theirs * size)

        steps = [give, take] if whole else [give, take, spread]
        peers.go(kind, view.count, _rounds(view.count, step), steps)

    return all_reduce


def _in_two_steps(peers: Peers, primitive: Primitive, op: Any, dtype: DType) -> Route:
    """Every primitive in which all that is taken has been given: copies, or one reduction."""
    size = dtype.itemsize
    by = None if op is None else find_loop(op, dtype)
    divisor = peers.n if op is ReduceOp.AVG else 1

    def in_two_steps(
        send: View | None, recv: View | None, root: int, blocks: Blocks | None
    ) -> None:
        parcel = parcel_of(primitive, peers.group, send, recv, root, blocks)
        room = peers.room // parcel.places // _LINE * _LINE
        step = room // size

        def length(count: int, k: int) -> int:
            return max(0, min(step, count - k * step))

        def give(k: int) -> None:
            for place, (address, count) in enumerate(parcel.gives):
                into = peers.slot(peers.me, k) + place * room
                peers.copy(into, address + k * step * size, length(count, k) * size)

        def take(k: int) -> None:
            sources = [peers.slot(rank, k) + place * room for rank, place, _, _ in parcel.takes]
            outs = [one.address + k * step * size for one in parcel.takes]
            if by is not None and parcel.takes:
                peers.combine(by, sources, outs[0], length(parcel.takes[0].elements, k), divisor)
                return
            for one, source, out in zip(parcel.takes, sources, outs, strict=True):
                peers.copy(out, source, length(one.elements, k) * size)

        kind = kind_of(primitive, dtype, op, root)
        peers.go(kind, parcel.total, _rounds(parcel.most, step), [give, take])

    return in_two_steps
