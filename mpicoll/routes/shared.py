"""Through memory that the ranks share: groups whose ranks are all on one node.

The algorithm, in pieces that stay in the processors' caches, is in ``mpicoll/_shared.c``. It needs
the C library, on every rank.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.calls import Blocks, Direct, Prompt, Route
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import MismatchError
from mpicoll.kernels import kernels
from mpicoll.primitives import Layout, Primitive, by_name
from mpicoll.reduction import Loop, loop
from mpicoll.routes.parcels import Parcel, kind_of, parcel_of, parts_of, told
from mpicoll.routes.segment import Segment, share
from mpicoll.views import View
from mpicoll.watch.consistency import listed

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["LEAST", "LEASTS", "all_reduce", "broadcast", "exchange"]

#: Bytes of a message from which on MPI's own reduction is not faster.
LEAST = 4 * 1024
#: The same for the other collectives that are served, of all blocks of a rank together.
LEASTS = {"broadcast": 32 << 20, "reduce_scatter": 32 << 10, "reduce_scatter_single": 32 << 10}
#: Bytes of a slot, the most that goes through in a round, and of the slots of all ranks together.
SLOT, TOGETHER = 256 * 1024, 48 * 1024 * 1024
#: Ranks that share memory at most: each looks at what each other does.
MOST = 128
#: Bytes of a message up to which every rank combines everything: one wait instead of two.
WHOLE = 16 * 1024

#: How often a rank looks whether another has come as far before it sleeps; each look takes some 40
#: to 140 cycles. And where threads that compute, or other ranks, want the processor.
LOOKS, LOOKS_IN_A_CROWD = 2000, 50
#: Seconds that a rank waits for the others before it leaves an asynchronous call to the group's
#: thread: what it costs if that thread and the one that goes on computing take turns.
PATIENCE = 1e-3

_SLOTS = 4  # as in _shared.c


class _Hold(ctypes.Structure):
    """struct mpicoll_shared of _shared.c."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("slot", ctypes.c_size_t),
        ("n", ctypes.c_uint32),
        ("me", ctypes.c_uint32),
        ("round", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("looks", ctypes.c_uint32),
    )


#: struct mpicoll_given and struct mpicoll_taken.
_GIVEN = np.dtype([("data", np.uintp), ("count", np.uintp)])
_TAKEN = np.dtype([(name, np.uintp) for name in ("rank", "place", "data", "count")])

_ALL_REDUCE, _BROADCAST = by_name["all_reduce"], by_name["broadcast"]


class Shared:
    """A group's hold on the memory that its ranks share."""

    def __init__(self, group: ProcessGroup, segment: Segment, slot: int) -> None:
        assert kernels is not None
        self._group = group
        self._kernels = kernels
        self._memory = np.frombuffer(segment.memory, np.uint8)  # as long as anybody may be inside
        n = group.size()
        self._hold = _Hold(self._memory.ctypes.data, slot, n, group.rank(), 0, 0, 0)
        self._pointer = ctypes.addressof(self._hold)
        self._crowded = segment.processors < n
        self._crowded_beside = segment.processors < 2 * n

    def all_reduce(
        self,
        buffer: Any,
        count: int,
        dtype: DType,
        op: ReduceOp,
        by: Loop,
        format: int,
        split: bool,
    ) -> None:
        """Combines ``count`` elements of all ranks, in place, by a loop of the C library.

        Raises MismatchError, on all ranks, where they do not agree on count, dtype and operation.
        """
        group, hold = self._group, self._hold
        self._look_as_often_as_is_good()
        divisor = hold.n if op is ReduceOp.AVG else 1
        done = self._kernels.shared_all_reduce(
            self._pointer, format, by.operation, MPI.Get_address(buffer), count * by.elements,
            divisor, split, group.sequence & 0xFFFFFFFF, kind_of(_ALL_REDUCE, dtype, op, 0),
        )  # fmt: skip
        if not done:
            raise MismatchError(self._differences(_ALL_REDUCE))

    def exchange(
        self,
        primitive: Primitive,
        parcel: Parcel,
        dtype: DType,
        op: ReduceOp | None,
        by: Loop | None,
        format: int,
        root: int,
    ) -> None:
        """Carries this rank's part of any other collective out.

        Raises MismatchError, on all ranks, where they do not agree on primitive, count, dtype,
        operation and root.
        """
        group, hold = self._group, self._hold
        self._look_as_often_as_is_good()
        parts = 1 if by is None else by.elements
        gives = np.array([(at, count * parts) for at, count in parcel.gives], _GIVEN)
        takes = np.array(
            [(rank, place, at, count * parts) for rank, place, at, count in parcel.takes], _TAKEN
        )
        done = self._kernels.shared_exchange(
            self._pointer, format, -1 if by is None else by.operation,
            hold.n if op is ReduceOp.AVG else 1, dtype.itemsize // parts, parcel.places,
            parcel.most * parts, gives.ctypes.data, len(gives), takes.ctypes.data, len(takes),
            group.sequence & 0xFFFFFFFF, kind_of(primitive, dtype, op, root), parcel.total * parts,
        )  # fmt: skip
        if not done:
            raise MismatchError(self._differences(primitive))

    def _look_as_often_as_is_good(self) -> None:
        """Where threads that compute, or other ranks, want the processor, a rank soon sleeps."""
        group = self._group
        beside = group.worker is not None and group.worker.current
        crowded = self._crowded_beside if beside else self._crowded
        self._hold.looks = LOOKS_IN_A_CROWD if crowded else LOOKS

    def prompt(self) -> bool:
        """An asynchronous call is best carried out at once: all ranks are there, and no processor
        is free for a thread that would do it.
        """
        if not self._crowded_beside:
            return False
        self._hold.looks = LOOKS_IN_A_CROWD if self._crowded else LOOKS
        number = (self._group.sequence + 1) & 0xFFFFFFFF
        return bool(self._kernels.shared_ask(self._pointer, number, round(1e9 * PATIENCE)))

    def _differences(self, primitive: Primitive) -> str:
        what, count = ctypes.c_uint64(), ctypes.c_uint64()
        texts = []
        for rank in range(self._hold.n):
            self._kernels.shared_call(
                self._pointer, rank, ctypes.addressof(what), ctypes.addressof(count)
            )
            parts = parts_of(what.value)
            texts.append(told(what.value, count.value // parts))
        return (
            f"{primitive} on rank {self._hold.me} of group {self._group.group_name}: the ranks' "
            f"calls do not belong together: {listed(texts)}"
        )


def all_reduce(
    group: ProcessGroup, dtype: DType, op: ReduceOp, otherwise: Direct, least: int
) -> tuple[Direct, Prompt | None]:
    """Copy in, combine, copy out; ``otherwise`` for less than ``least`` bytes, and where no memory
    is shared.
    """
    by, n = loop(op, dtype), group.size()
    if by is None or not 1 < n <= MOST:
        return otherwise, None
    fewest, whole = max(1, least // dtype.itemsize), WHOLE // dtype.itemsize
    format = -1 if kernels is None else kernels.format(by.format.encode())

    def direct(buffer: Any, count: int, root: int) -> None:
        if count < fewest:
            otherwise(buffer, count, root)
            return
        shared = group.shared
        if shared is None:  # the first call of this size, on every rank
            shared = group.shared = _look(group) or False
        if shared:
            shared.all_reduce(buffer, count, dtype, op, by, format, count > whole)
        else:
            otherwise(buffer, count, root)

    def prompt(count: int) -> bool:
        return count >= fewest and bool(group.shared) and group.shared.prompt()

    return direct, prompt


def broadcast(group: ProcessGroup, dtype: DType, otherwise: Direct) -> Direct:
    """As ``exchange``, for an array in place."""
    fewest = -(-LEASTS["broadcast"] // dtype.itemsize)

    def over_mpi(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        otherwise(recv.buffer, recv.count, root)

    route = exchange(_BROADCAST, group, dtype, None, over_mpi)

    def direct(buffer: Any, count: int, root: int) -> None:
        if count < fewest:
            otherwise(buffer, count, root)
        else:
            route(None, View(buffer, dtype, count, buffer), root, None)

    return direct


def exchange(
    primitive: Primitive,
    group: ProcessGroup,
    dtype: DType,
    op: ReduceOp | None,
    otherwise: Route,
) -> Route:
    """Any collective but all_reduce: what each rank puts up, and what it takes of the others.

    ``otherwise`` for less than LEASTS bytes, and where no memory is shared.
    """
    by = None if op is None else loop(op, dtype)
    n, least = group.size(), LEASTS[primitive.name]
    if (op is not None and by is None) or not 1 < n <= MOST:
        return otherwise
    format = -1 if kernels is None or by is None else kernels.format(by.format.encode())
    blocks_of_a_rank = n if primitive.layout is Layout.SCATTERED else 1

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        if blocks_of_a_rank * recv.nbytes < least:
            otherwise(send, recv, root, blocks)
            return
        shared = group.shared
        if shared is None:  # the first call of this size, on every rank
            shared = group.shared = _look(group) or False
        if not shared:
            otherwise(send, recv, root, blocks)
            return
        parcel = parcel_of(primitive, group, send, recv, root, blocks)
        shared.exchange(primitive, parcel, dtype, op, by, format, root)

    return route


def _look(group: ProcessGroup) -> Shared | None:
    """The memory that the ranks share, or None on all of them."""
    n = group.size()
    slot = min(SLOT, TOGETHER // (_SLOTS * n)) // 64 * 64
    able = kernels is not None and os.environ.get("MPICOLL_SHARED_MEMORY") != "0"
    region = 0 if kernels is None else kernels.shared_region(slot, n)
    segment = share(group.comm, region, able)
    return None if segment is None else Shared(group, segment, slot)
