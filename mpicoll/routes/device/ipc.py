"""Device memory that the ranks of a node map, by CUDA IPC; MPI carries only messages between the
hosts. Several ranks may share a device.

Each rank has a workspace: SLOTS slots for its data for the others, and as many for results that it
has combined for them. A call takes rounds of at most one slot, each of two steps or three:

  1. every rank copies elements of its array into slot k;
  2. it copies or combines the others' slots, into its array, or, where each combines a
     share for all, into its second slot k;
  3. in the latter case it copies the others' shares into its array.

In turn t a rank enqueues step 1 of round t, step 2 of round t - LAG and step 3 of round t - 2 LAG.
Then the hosts wait until their devices have done turn t - LAG + 1, and for each other. So what is
read in a turn was written LAG turns before and is complete, and while the hosts wait the devices
work on the latest turn. (A call of one round has nothing to work on meanwhile; its lag is 1.)

Why 2 LAG slots are enough: slot k is read in turn k + LAG, which all are known to have done at the
end of turn k + 2 LAG - 1, and written again in the next; so are the second slots. Rounds are
numbered on from call to call, so that no call has to wait for its last turn.

All ranks combine in the order of the ranks, and share the result: the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import NoneType

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.core.reproducible import ORDER
from mpicoll.core.signature import decode_primitive, describe, encode_kind
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.runtime import Memory
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.failures.consistency import describe_by_rank
from mpicoll.kernels.device_kernels import PIECE
from mpicoll.kernels.reduction import Loop, find_loop
from mpicoll.routes.device.state import Agreed, RouteState, build_at_home, failure_of
from mpicoll.routes.device.workspaces import Workspaces, map_each_other
from mpicoll.routes.route import MemoryKind, Route
from mpicoll.routes.transfers import CARRIED, Get, transfer_of

__all__ = ["ROUTE", "Peers"]

#: Turns between the steps of a round, and slots.
LAG = 2
SLOTS = 2 * LAG
#: Bytes of a slot.
SLOT = 8 * 1024 * 1024
#: Bytes of a message up to which every rank combines everything, to save a turn.
WHOLE = 256 * 1024
_LINE = 256


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class Peers(RouteState):
    """A group's workspaces.

    room: bytes of a slot.
    """

    def __init__(self, agreed: Agreed, room: int, workspaces: Workspaces[None]) -> None:
        super().__init__(agreed.group, agreed.context)
        self.room = room
        self._workspaces = workspaces
        self._turn = 0  # the number of the current call's first round
        self._met = -1  # the number of the call that the latest comparison was of
        self._between: Memory | None = None  # where results are made that go elsewhere

    def slot(self, rank: int, k: int) -> int:
        """Return the address of a rank's slot in round ``k`` of this call."""
        return self._workspaces.all[rank].address + (self._turn + k) % SLOTS * self.room

    def second_slot(self, rank: int, k: int) -> int:
        """Return the address of a rank's results of round ``k``: an n-th of a slot and a line."""
        size = _share_slot(self.room, self.n)
        start = self._workspaces.all[rank].address + SLOTS * self.room
        return start + (self._turn + k) % SLOTS * size

    def go(
        self,
        kind: int,
        count: int,
        rounds: int,
        steps: Sequence[Callable[[int], None]],
        prepare: Callable[[], None],
    ) -> None:
        """Carry a call out: ``steps[s](k)`` enqueues step s of round k.

        kind, count: what all ranks must have alike. Raises MismatchError on all ranks otherwise.
        prepare: compiles and allocates all that the steps need.

        A rank that fails goes on to the next meeting, and all leave the call there: it with its
        error, the others with DistBackendError. After the last meeting no rank depends on another.
        """
        context, lag = self.context, LAG if rounds > 1 else 1
        turns, done = rounds + lag * (len(steps) - 1), []

        def enqueue(turn: int) -> None:
            for s, step in enumerate(steps):
                if 0 <= turn - lag * s < rounds:
                    step(turn - lag * s)
            done.append(context.runtime.record(context.index, context.work))
            if turn - lag + 1 >= 0 and turn < turns - 1:
                context.runtime.synchronize(done[turn - lag + 1])

        failure = failure_of(prepare)
        for turn in range(turns):
            failure = failure or failure_of(partial(enqueue, turn))
            if turn - lag + 1 >= 0 and turn < turns - 1:
                if turn - lag + 1 == 0:
                    problem = self._compare(kind, count, failure)
                else:
                    problem = self._meet(kind, failure)
                if problem is not None:
                    self._begin_anew()
                    raise failure or problem
        self._turn += rounds
        if failure is not None:
            raise failure

    def _compare(self, kind: int, count: int, failure: Exception | None) -> Exception | None:
        """Wait for all ranks; return what is wrong: their calls differ, or one has failed."""
        mine = [kind, count, self.group.sequence, self._turn % SLOTS, failure is None]
        everybody = np.empty((self.n, len(mine)), np.int64)
        self._met = self.group.sequence
        self.group.inner.Allgather(np.array(mine, np.int64), everybody)
        if not everybody[:, -1].all():  # one that has failed may not know what the call is
            return self._failed(kind)
        if (everybody[:, :-1] != mine[:-1]).any():
            return MismatchError(
                f"{self._name(kind)}: collective mismatch: the ranks made different calls: "
                f"{describe_by_rank(describe(*row[:2]) for row in everybody.tolist())}"
            )
        return None

    def enter(self, kind: int) -> None:
        """Begin a call in which the ranks meet elsewhere before ``go``; all ranks call.

        Raises DistBackendError if one has failed on its way here, and MismatchError.
        """
        problem = self._compare(kind, 0, None)
        if problem is not None:
            self._begin_anew()
            raise problem

    def take_leave(self, kind: CallKind, error: Exception) -> None:
        """Tell the others, unless they know, that this rank has failed on its way to a call."""
        if self._met != self.group.sequence:
            self._compare(encode_kind(kind.primitive, kind.dtype, kind.op, 0), 0, error)
            self._begin_anew()

    def _meet(self, kind: int, failure: Exception | None) -> Exception | None:
        """Wait for all ranks; return what is wrong if one has failed."""
        able = np.array([failure is None])
        self.group.inner.Allreduce(MPI.IN_PLACE, able, MPI.LAND)
        return None if able[0] else self._failed(kind)

    def _failed(self, kind: int) -> DistBackendError:
        return DistBackendError(
            f"{self._name(kind)}: another rank failed in this call, and says why; its result is "
            "incomplete on all ranks"
        )

    def _name(self, kind: int) -> str:
        return f"{decode_primitive(kind)} on rank {self.me} of group {self.group.group_name}"

    def _begin_anew(self) -> None:
        """Begin with the first slot again, once no device reads or writes any more."""
        with suppress(Exception):  # a device that has failed does nothing more
            self.context.synchronize(self.context.work)
        self.group.inner.Barrier()
        self._turn = 0

    def copy(self, into: int, source: int, nbytes: int) -> None:
        """Enqueue a copy."""
        self.context.runtime.copy(self.context.index, into, source, nbytes, self.context.work)

    def prepare(self, by: Loop | None, n: int, out: int, nbytes: int) -> None:
        """Compile and allocate what combines n arrays into one of some bytes, if there is one."""
        if by is None or not n:
            return
        self.context.runtime.load(self.context.index, by, n)
        self._between = None if out % PIECE == 0 else self.context.scratch(nbytes)

    def combine(
        self, by: Loop, sources: Sequence[int], out: int, nbytes: int, divisor: int
    ) -> None:
        """Enqueue a reduction of slots, as prepared; a result that does not lie as the slots do is
        made beside and copied.
        """
        context, size = self.context, by_name[by.format].itemsize * by.elements
        if not nbytes:
            return
        into = out if self._between is None else self._between.address
        context.runtime.combine(
            context.index, by, sources, into, nbytes // size, divisor, context.work
        )
        if into != out:
            self.copy(out, into, nbytes)

    def close(self, limit: float) -> None:
        """Let go of the workspaces, waiting for others for so many seconds; all ranks call."""
        self.context.synchronize(self.context.work)
        self._workspaces.close(limit)


def _share_slot(room: int, n: int) -> int:
    """Return the bytes of a second slot: of the largest share of a slot."""
    return _rounded(-(-room // n)) + _LINE


def _meet(agreed: Agreed) -> Peers | str:
    nbytes = SLOTS * (SLOT + _share_slot(SLOT, agreed.group.size()))
    made = map_each_other(agreed.group, agreed.context, nbytes, lambda own: None, NoneType)
    return made if isinstance(made, str) else Peers(agreed, SLOT, made)


def _build(kind: CallKind, agreed: Agreed) -> Implementation:
    make = _all_reduce if kind.primitive.name == "all_reduce" else _transfer
    return build_at_home(kind, agreed, agreed.state(Peers), make)


def _rounds(count: int, step: int) -> int:
    """Return the number of rounds of ``step`` elements; an empty call meets the others as well."""
    return max(1, -(-count // step))


def _all_reduce(peers: Peers, kind: CallKind) -> Implementation:
    primitive, _, op, dtype = kind
    assert op is not None and dtype is not None
    by, n, me, size = find_loop(op, dtype), peers.n, peers.me, dtype.itemsize
    assert by is not None
    divisor = n if op is ReduceOp.AVG else 1
    signature = encode_kind(primitive, dtype, op, 0)

    def all_reduce(send: None, view: DeviceView, extent: Extent, root: int) -> None:
        step = peers.room // size
        whole = view.nbytes <= WHOLE or n == 1

        def piece(k: int) -> tuple[int, int]:
            return view.address + k * step * size, min(step, view.count - k * step)

        def share(length: int, rank: int) -> tuple[int, int]:
            """Return first element and count of a rank's share: whole lines."""
            each = _rounded(-(-length // n) * size) // size
            start = min(length, rank * each)
            return start, min(length, start + each) - start

        aligned = view.address % PIECE == 0

        def give(k: int) -> None:
            address, length = piece(k)
            start, mine = share(length, me)
            # No other rank reads this one's share.
            parts = [(0, length)] if whole or not aligned else [(0, start), (start + mine, length)]
            for begin, end in parts:
                into = peers.slot(me, k) + begin * size
                peers.copy(into, address + begin * size, (end - begin) * size)

        def take(k: int) -> None:
            address, length = piece(k)
            start, mine = (0, length) if whole else share(length, me)
            at = start * size
            sources = [peers.slot(r, k) + at for r in range(n)]
            if aligned:
                sources[me] = address + at
            out = address if whole else peers.second_slot(me, k)
            peers.combine(by, sources, out, mine * size, divisor)

        def spread(k: int) -> None:
            address, length = piece(k)
            for r in range(n):
                start, theirs = share(length, r)
                peers.copy(address + start * size, peers.second_slot(r, k), theirs * size)

        steps = [give, take] if whole else [give, take, spread]
        rounds = _rounds(view.count, step)
        out, nbytes = (view.address, min(view.nbytes, peers.room)) if whole else (0, 0)
        peers.go(signature, view.count, rounds, steps, lambda: peers.prepare(by, n, out, nbytes))

    return all_reduce


def _transfer(peers: Peers, kind: CallKind) -> Implementation:
    """Return the implementation by gets of other ranks' puts alone: copies, or one reduction."""
    primitive, _, op, dtype = kind
    assert dtype is not None
    size = dtype.itemsize
    by = None if op is None else find_loop(op, dtype)
    divisor = max(1, len(kind.combined)) if op is ReduceOp.AVG else 1

    def carry_out(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        out, into = (None if one is None else one.address for one in (send, recv))
        signature = encode_kind(primitive, dtype, op, root)
        if not primitive.even:
            peers.enter(signature)  # as the ranks now tell each other the sizes
        transfer = transfer_of(kind, out, into, extent, root)
        room = peers.room // transfer.places // _LINE * _LINE
        step = room // size

        def length(count: int, k: int) -> int:
            return max(0, min(step, count - k * step))

        def give(k: int) -> None:
            for place, (address, count) in enumerate(transfer.puts):
                into = peers.slot(peers.me, k) + place * room
                peers.copy(into, address + k * step * size, length(count, k) * size)

        def take(k: int) -> None:
            sources = [peers.slot(rank, k) + place * room for rank, place, _, _ in transfer.gets]
            outs = [one.address + k * step * size for one in transfer.gets]
            if by is not None and transfer.gets:
                nbytes = length(transfer.gets[0].elements, k) * size
                peers.combine(by, sources, outs[0], nbytes, divisor)
                return
            for one, source, out in zip(transfer.gets, sources, outs, strict=True):
                peers.copy(out, source, length(one.elements, k) * size)

        def prepare() -> None:
            first = transfer.gets[0] if transfer.gets else Get(0, 0, 0, 0)
            nbytes = length(first.elements, 0) * size
            peers.prepare(by, len(transfer.gets), first.address, nbytes)

        rounds = _rounds(transfer.most, step)
        peers.go(signature, transfer.total, rounds, [give, take], prepare)

    return carry_out


ROUTE = Route(
    "ipc",
    "device memory that the ranks of a node map",
    MemoryKind.DEVICE,
    ("all_reduce", *CARRIED),
    _build,
    _meet,
    unless=("shared_gpu",),
    combines=lambda op, dtype: find_loop(op, dtype) is not None,
    reproducible=(ORDER,),
    scales=True,
    uneven=("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"),
    place="node",
    needs="all ranks on one node, and CUDA IPC between them",
    blocks=(
        "until the device has done what the call comes after, and all of the call but its last "
        "step; the hosts meet for each slot (8 MiB) of the message"
    ),
    lacks=Capabilities.lacks_gpu,
)
