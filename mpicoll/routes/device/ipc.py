"""Collectives through device memory that the ranks of a node map by CUDA IPC. The hosts synchronize
by MPI. Several ranks may share a device.

Each rank has a workspace with SLOTS slots for its input and SLOTS second slots for its results. A
call has rounds of at most one slot. Each round has two or three steps:

  1. Each rank copies elements of its array to its slot k.
  2. It copies or combines all ranks' slots k into its array. In a large all_reduce it combines only
     its share, into its second slot k.
  3. In a large all_reduce it copies all ranks' second slots k into its array.

In turn t a rank enqueues step 1 of round t, step 2 of round t - LAG and step 3 of round t - 2 LAG.
Then each host waits for turn t - LAG + 1 on its device, and for the other hosts. So data is read
LAG turns after it was written, and the devices work on the latest turn while the hosts wait. A call
of one round uses a lag of 1.

2 LAG slots are enough: slot k is read in turn k + LAG, which is complete on all ranks at the end of
turn k + 2 LAG - 1, and is written again in the next turn. The same holds for second slots. Rounds
are numbered across calls, so that no call waits for its last turn.

Elements are combined in rank order, once: the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import CallKind, Extent, Implementation, Run
from mpicoll.core.reproducible import ORDER
from mpicoll.core.signature import describe, encode_kind
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels.device_kernels import PIECE
from mpicoll.kernels.reduction import Loop, find_loop
from mpicoll.routes.device.state import RouteState, build_on_home_device, exception_of
from mpicoll.routes.device.workspaces import Workspaces, map_each_other
from mpicoll.routes.route import EXCHANGES, Needs, Policy, Route, Serves, has_loop
from mpicoll.routes.transfers import TRANSFER_PRIMITIVES, transfer_of

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]

#: Number of turns between the steps of a round; number of slots.
LAG = 2
SLOTS = 2 * LAG
#: Size of a slot in bytes.
SLOT = 8 * 1024 * 1024
#: Maximum size in bytes of a message for which every rank combines all elements, to save a turn.
WHOLE = 256 * 1024
_LINE = 256


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class Peers(RouteState):
    """A group's workspaces.

    room: size of a slot in bytes.
    """

    def __init__(self, agreement: Agreement, room: int, workspaces: Workspaces) -> None:
        super().__init__(agreement)
        self.room = room
        self._workspaces = workspaces
        self._turn = 0  # the number of the current call's first round
        self._met = -1  # call number of the latest comparison

    def slot(self, rank: int, k: int) -> int:
        """Return the address of a rank's slot in round ``k`` of this call."""
        return self._workspaces.all[rank].address + (self._turn + k) % SLOTS * self.room

    def second_slot(self, rank: int, k: int) -> int:
        size = _share_slot(self.room, self.n)
        start = self._workspaces.all[rank].address + SLOTS * self.room
        return start + (self._turn + k) % SLOTS * size

    def run(
        self,
        kind: int,
        count: int,
        rounds: int,
        steps: Sequence[Callable[[int], None]],
        load: Callable[[], None],
    ) -> None:
        """Run a call: ``steps[s](k)`` enqueues step s of round k.

        kind, count: raises MismatchError on all ranks if these differ.
        load: compiles the kernels.

        A rank that fails reports it when the hosts synchronize next: it raises its error, and all
        other ranks raise DistBackendError. After the last time no rank depends on another.
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

        failure = exception_of(load)
        for turn in range(turns):
            failure = failure or exception_of(partial(enqueue, turn))
            if turn - lag + 1 >= 0 and turn < turns - 1:
                if turn - lag + 1 == 0:
                    problem = self._compare(kind, count, failure)
                else:
                    problem = self._synchronize(kind, failure)
                if problem is not None:
                    self._reset()
                    raise failure or problem
        self._turn += rounds
        if failure is not None:
            raise failure

    def _compare(self, kind: int, count: int, failure: Exception | None) -> Exception | None:
        """Wait for all ranks; return the error if their calls differ or one of them failed."""
        mine = [kind, count, self.group.sequence, self._turn % SLOTS, failure is None]
        everybody = np.empty((self.n, len(mine)), np.int64)
        self._met = self.group.sequence
        self.group.inner.Allgather(np.array(mine, np.int64), everybody)
        if not everybody[:, -1].all():  # checked first: a failed rank may not know its call
            return self.failed_elsewhere(kind)
        if (everybody[:, :-1] != mine[:-1]).any():
            return self.mismatch(kind, (describe(*row[:2]) for row in everybody.tolist()))
        return None

    def enter(self, kind: int) -> None:
        """Compare the ranks' calls before they exchange block sizes; all ranks call.

        Raises DistBackendError if one has failed before, and MismatchError if they differ.
        """
        problem = self._compare(kind, 0, None)
        if problem is not None:
            self._reset()
            raise problem

    def notify_failure(self, kind: CallKind, error: Exception) -> None:
        if self._met != self.group.sequence:
            self._compare(encode_kind(kind.primitive, kind.dtype, kind.op, 0), 0, error)
            self._reset()

    def _synchronize(self, kind: int, failure: Exception | None) -> Exception | None:
        able = np.array([failure is None])
        self.group.inner.Allreduce(MPI.IN_PLACE, able, MPI.LAND)
        return None if able[0] else self.failed_elsewhere(kind)

    def _reset(self) -> None:
        """Wait for all devices and restart with the first slot."""
        with suppress(Exception):  # a failed device
            self.context.synchronize(self.context.work)
        self.group.inner.Barrier()
        self._turn = 0

    def load(self, by: Loop | None, n: int) -> None:
        """Compile a kernel that combines n arrays."""
        if by is not None and n:
            self.context.runtime.load(self.context.index, by, n + 1)

    def combine(
        self, by: Loop, sources: Sequence[int], out: int, nbytes: int, divisor: int
    ) -> None:
        context, size = self.context, by_name[by.format].itemsize * by.elements
        context.runtime.combine(
            context.index, by, sources, [out], nbytes // size, divisor, context.work
        )

    def close(self, limit: float) -> None:
        self.context.synchronize(self.context.work)
        self._workspaces.close(limit)


def _share_slot(room: int, n: int) -> int:
    """Return the size of a second slot in bytes: the largest share of a slot."""
    return _rounded(-(-room // n)) + _LINE


def _negotiate(agreement: Agreement) -> Peers | str:
    nbytes = SLOTS * (SLOT + _share_slot(SLOT, agreement.group.size()))
    made = map_each_other(agreement.group, agreement.context, nbytes, lambda own: 0)
    return made if isinstance(made, str) else Peers(agreement, SLOT, made)


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    make = _all_reduce if kind.primitive.name == "all_reduce" else _transfer
    return build_on_home_device(kind, agreement, agreement.state(Peers), make)


def _rounds(count: int, step: int) -> int:
    """Return the number of rounds of ``step`` elements; at least 1, to compare empty calls."""
    return max(1, -(-count // step))


def _all_reduce(peers: Peers, kind: CallKind) -> Run:
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

        def put(k: int) -> None:
            address, length = piece(k)
            start, mine = share(length, me)
            # No other rank reads this one's share.
            parts = [(0, length)] if whole or not aligned else [(0, start), (start + mine, length)]
            for begin, end in parts:
                into = peers.slot(me, k) + begin * size
                peers.context.copy(into, address + begin * size, (end - begin) * size)

        def combine(k: int) -> None:
            address, length = piece(k)
            start, mine = (0, length) if whole else share(length, me)
            at = start * size
            sources = [peers.slot(r, k) + at for r in range(n)]
            if aligned:
                sources[me] = address + at
            out = address if whole else peers.second_slot(me, k)
            peers.combine(by, sources, out, mine * size, divisor)

        def get(k: int) -> None:
            address, length = piece(k)
            for r in range(n):
                start, theirs = share(length, r)
                peers.context.copy(address + start * size, peers.second_slot(r, k), theirs * size)

        steps = [put, combine] if whole else [put, combine, get]
        rounds = _rounds(view.count, step)
        peers.run(signature, view.count, rounds, steps, partial(peers.load, by, n))

    return all_reduce


def _transfer(peers: Peers, kind: CallKind) -> Run:
    primitive, _, op, dtype = kind
    assert dtype is not None
    size = dtype.itemsize
    by = None if op is None else find_loop(op, dtype)
    divisor = max(1, len(kind.combined)) if op is ReduceOp.AVG else 1

    def run(send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int) -> None:
        out, into = (None if one is None else one.address for one in (send, recv))
        signature = encode_kind(primitive, dtype, op, root)
        if not primitive.even:
            peers.enter(signature)  # transfer_of exchanges the sizes
        transfer = transfer_of(kind, out, into, extent, root)
        room = peers.room // transfer.places // _LINE * _LINE
        step = room // size

        def length(count: int, k: int) -> int:
            return max(0, min(step, count - k * step))

        def put(k: int) -> None:
            for place, (address, count) in enumerate(transfer.puts):
                into = peers.slot(peers.me, k) + place * room
                peers.context.copy(into, address + k * step * size, length(count, k) * size)

        def get(k: int) -> None:
            sources = [peers.slot(rank, k) + place * room for rank, place, _, _ in transfer.gets]
            outs = [one.address + k * step * size for one in transfer.gets]
            if by is not None and transfer.gets:
                nbytes = length(transfer.gets[0].elements, k) * size
                peers.combine(by, sources, outs[0], nbytes, divisor)
                return
            for one, source, out in zip(transfer.gets, sources, outs, strict=True):
                peers.context.copy(out, source, length(one.elements, k) * size)

        load = partial(peers.load, by, len(transfer.gets))
        peers.run(signature, transfer.total, _rounds(transfer.most, step), [put, get], load)

    return run


ROUTE = Route(
    __name__,
    "device memory that the ranks of a node map",
    Serves(
        ("all_reduce", *TRANSFER_PRIMITIVES),
        combines=has_loop,
        reproducible=(ORDER,),
        premultiplies=True,
        uneven=("all_gather", "reduce_scatter", *EXCHANGES),
    ),
    _build,
    Needs("node", "all ranks on one node, and CUDA IPC between them", Capabilities.lacks_gpu),
    Policy(
        superseded_by=("shared_gpu",),
        host_waits_for=(
            "until the device has done all earlier work and all of the call but its last step; the "
            "hosts synchronize for each slot (8 MiB) of the message"
        ),
    ),
    negotiate=_negotiate,
)
