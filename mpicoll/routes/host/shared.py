"""Through memory that the ranks share: groups whose ranks are all on one node.

The algorithm, in pieces that stay in the processors' caches, is in ``kernels/src/shared.c``. It
needs the C library, on every rank.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll import settings
from mpicoll.core.calls import Direct
from mpicoll.core.signature import is_compared, is_list, kind_of, parts_of, told
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.kernels.library import kernels
from mpicoll.kernels.reduction import find_loop
from mpicoll.primitives import Primitive, by_name
from mpicoll.routes.host.segment import Segment, share
from mpicoll.routes.parcels import Parcel
from mpicoll.watch.consistency import listed

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Shared", "made", "of"]

#: Bytes of a slot, the most that goes through in a round, and of the slots of all ranks together.
SLOT, TOGETHER = 256 * 1024, 48 * 1024 * 1024
#: Ranks that share memory at most: each looks at what each other does.
MOST = 128
#: Bytes of the others' messages, together, up to which every rank combines everything: one wait
#: instead of two.
WHOLE = 16 * 1024

#: How often a rank looks whether another has come as far before it sleeps; each look takes some 40
#: to 140 cycles. And where threads that compute, or other ranks, want the processor.
LOOKS, LOOKS_IN_A_CROWD = 2000, 50
#: Seconds that a rank waits for the others before it leaves an asynchronous call to the group's
#: thread: what it costs if that thread and the one that goes on computing take turns.
PATIENCE = 1e-3

_SLOTS = 4  # as in shared.c


class _Hold(ctypes.Structure):
    """struct mpicoll_shared of shared.c."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("slot", ctypes.c_size_t),
        ("n", ctypes.c_uint32),
        ("me", ctypes.c_uint32),
        ("round", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("looks", ctypes.c_uint32),
        ("left", ctypes.c_uint32),
    )


class _Kind(ctypes.Structure):
    """struct mpicoll_kind of shared.c."""

    _fields_ = (
        ("shared", ctypes.c_void_p),
        ("what", ctypes.c_uint64),
        ("divisor", ctypes.c_double),
        ("size", ctypes.c_size_t),
        ("parts", ctypes.c_size_t),
        ("whole", ctypes.c_size_t),
        ("format", ctypes.c_int32),
        ("operation", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("giver", ctypes.c_int32),
        ("taker", ctypes.c_int32),
    )


class Shared:
    """A group's hold on the memory that its ranks share."""

    def __init__(self, group: ProcessGroup, segment: Segment, slot: int) -> None:
        assert kernels is not None
        self._group = group
        self._kernels = kernels
        self._memory = np.frombuffer(segment.memory, np.uint8)  # as long as anybody may be inside
        n = group.size()
        self._hold = _Hold(self._memory.ctypes.data, slot, n, group.rank())
        self._pointer = ctypes.addressof(self._hold)
        self._kinds: dict[Any, _Kind] = {}  # the C library has their addresses
        self._crowded = segment.processors < n
        self._crowded_beside = segment.processors < 2 * n
        self._look_as_often_as_is_good()

    def serves(self, primitive: Primitive, dtype: DType, op: ReduceOp | None) -> bool:
        """The C library has the loop that combines, if elements are combined."""
        return op is None or find_loop(op, dtype) is not None

    def call(self, primitive: Primitive, dtype: DType, op: ReduceOp | None) -> Direct:
        """What carries calls of one kind out.

        It raises MismatchError, on all ranks, where they do not agree on primitive, count, dtype,
        operation and root.
        """
        at, group, address = self._kind(primitive, dtype, op), self._group, MPI.Get_address
        all_reduce, blocks = self._kernels.shared_all_reduce, self._kernels.shared_blocks

        def in_place(send: Any, recv: Any, count: int, root: int) -> None:
            if group.worker is not None:
                self._look_as_often_as_is_good()
            if not all_reduce(at, address(recv), count, group.sequence):
                raise self._failure()

        def direct(send: Any, recv: Any, count: int, root: int) -> None:
            if group.worker is not None:
                self._look_as_often_as_is_good()
            here = None if recv is None else address(recv)
            there = here if send is None else address(send)
            if not blocks(at, there, here, count, root, group.sequence):
                raise self._failure()

        return in_place if primitive is _ALL_REDUCE else direct

    def exchange(
        self,
        primitive: Primitive,
        parcel: Parcel,
        dtype: DType,
        op: ReduceOp | None,
        root: int,
    ) -> None:
        """Carries this rank's part of a call out whose blocks may differ in size; see ``call``."""
        group, at = self._group, self._kind(primitive, dtype, op)
        self._look_as_often_as_is_good()
        parts = self._kinds[primitive, dtype, op].parts
        gives = np.array([(at, count * parts) for at, count in parcel.gives], _GIVEN)
        takes = np.array(
            [(rank, place, at, count * parts) for rank, place, at, count in parcel.takes], _TAKEN
        )
        done = self._kernels.shared_exchange(
            at, parcel.places, parcel.most * parts, gives.ctypes.data, len(gives),
            takes.ctypes.data, len(takes), root, group.sequence, parcel.total * parts,
        )  # fmt: skip
        if not done:
            raise self._failure()

    def _kind(self, primitive: Primitive, dtype: DType, op: ReduceOp | None) -> int:
        """The address of the description of a kind of call."""
        kind = self._kinds.get((primitive, dtype, op))
        if kind is None:
            kind = self._kinds[primitive, dtype, op] = self._described(primitive, dtype, op)
        return ctypes.addressof(kind)

    def _described(self, primitive: Primitive, dtype: DType, op: ReduceOp | None) -> _Kind:
        by = None if op is None else find_loop(op, dtype)
        parts = 1 if by is None else by.elements
        return _Kind(
            shared=self._pointer,
            what=kind_of(primitive, dtype, op, 0),
            divisor=self._hold.n if op is ReduceOp.AVG else 1,
            size=dtype.itemsize // parts,
            parts=parts,
            whole=WHOLE // max(1, self._hold.n - 1) * parts // dtype.itemsize,
            format=-1 if by is None else self._kernels.format(by.format.encode()),
            operation=0 if by is None else by.operation,
            blocks=primitive.many_in,
            giver=primitive.root == "src",
            taker=primitive.root == "dst",
        )

    def _look_as_often_as_is_good(self) -> None:
        """Where threads that compute, or other ranks, want the processor, a rank soon sleeps."""
        worker = self._group.worker
        beside = worker is not None and worker.current
        crowded = self._crowded_beside if beside else self._crowded
        self._hold.looks = LOOKS_IN_A_CROWD if crowded else LOOKS

    def prompt(self, kind: int, count: int) -> bool:
        """An asynchronous call is best carried out at once: all ranks are there, with the same, and
        no processor is free for a thread that would do it.

        kind: as ``kind_of`` has it; count: of elements, or whatever else the ranks have alike.
        """
        if not self._crowded_beside:
            return False
        self._hold.looks = LOOKS_IN_A_CROWD if self._crowded else LOOKS
        number = (self._group.sequence + 1) & 0xFFFFFFFF
        count *= 1 if is_list(kind) else parts_of(kind)
        patience = round(1e9 * PATIENCE)
        return bool(self._kernels.shared_ask(self._pointer, number, kind, count, patience))

    def compare(self, kind: int, number: int) -> bool:
        """All ranks compare the same two numbers here; see ``signature.compared``.

        False on all of them where they compare others. Raises MismatchError, on all ranks, where
        some make a call that goes by this memory instead.
        """
        self._look_as_often_as_is_good()
        if self._kernels.shared_agree(self._pointer, self._group.sequence, kind, number):
            return True
        if not self._hold.left and all(is_compared(each) for each, _ in self._calls()):
            return False
        raise self._failure()

    def _calls(self) -> list[tuple[int, int]]:
        """Kind and numbers of each rank's call, after one that was not agreed on."""
        what, count = ctypes.c_uint64(), ctypes.c_uint64()
        found = []
        for rank in range(self._hold.n):
            self._kernels.shared_call(
                self._pointer, rank, ctypes.addressof(what), ctypes.addressof(count)
            )
            found.append((what.value, count.value))
        return found

    def leave(self) -> None:
        """This rank waits for no other here any more: the call at hand, and all that come, raise
        what the group is ``broken`` with.
        """
        self._hold.left = 1

    def _failure(self) -> DistBackendError:
        if self._hold.left:
            return self._group.failure()
        texts = [told(kind, count // parts_of(kind)) for kind, count in self._calls()]
        name = texts[self._hold.me].partition(" ")[0]
        return MismatchError(
            f"{name} on rank {self._hold.me} of group {self._group.group_name}: the ranks' calls "
            f"do not belong together: {listed(texts)}"
        )


#: struct mpicoll_put and struct mpicoll_get.
_GIVEN = np.dtype([("data", np.uintp), ("count", np.uintp)])
_TAKEN = np.dtype([(name, np.uintp) for name in ("rank", "place", "data", "count")])

_ALL_REDUCE = by_name["all_reduce"]


def of(group: ProcessGroup) -> Shared | None:
    """The memory that the ranks of a group share, or None on all of them. All ranks call."""
    if group.shared is None:
        group.shared = (_look(group) if 1 < group.size() <= MOST else None) or False
    return group.shared or None


def made(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Direct | None:
    """What carries such calls out.

    None where no memory is shared, and where the C library does not combine ``dtype`` by ``op``.
    """
    shared = of(group)
    if shared is None or not shared.serves(primitive, dtype, op):
        return None
    return shared.call(primitive, dtype, op)


def _look(group: ProcessGroup) -> Shared | None:
    """The memory that the ranks share, or None on all of them."""
    n = group.size()
    slot = min(SLOT, TOGETHER // (_SLOTS * n)) // 64 * 64
    able = kernels is not None and not settings.SHARED_MEMORY.is_set_to("0")
    region = 0 if kernels is None else kernels.shared_region(slot, n)
    segment = share(group.inner, region, able)
    return None if segment is None else Shared(group, segment, slot)
