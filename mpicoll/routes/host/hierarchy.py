"""The nodes and rails of a group, and the common part of hierarchical calls."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import control_messages
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind
from mpicoll.core.reproducible import DEFAULTS
from mpicoll.core.signature import describe, encode_kind, with_root
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.errors import MismatchError
from mpicoll.failures import consistency, lost_ranks
from mpicoll.failures.report import describe_by_rank
from mpicoll.machine import ranks_by_value
from mpicoll.primitives import ALL_GATHER
from mpicoll.routes.host import shared
from mpicoll.routes.transfers import Get, Put, Transfer
from mpicoll.routes.wire import scratch
from mpicoll.serialized_mpi import create_group

#: Minimum size in bytes of a rail's share; short messages use fewer rails.
SHARE = 4 * 1024


class Place(NamedTuple):
    """The position of a rank: the number of its node or cluster, and its index in it."""

    node: int
    place: int


class Hierarchy:
    """The nodes and rails of a group.

    nodes:  the ranks of each node; nodes in the order of their first ranks.
    places: position of each rank.
    me:     position of this rank.
    rails:  number of rails.
    even:   all nodes have the same number of ranks, so every rank is on a rail.
    rail:   subgroup of this rank's rail; None if it is not on a rail.
    """

    def __init__(
        self,
        group: ProcessGroup,
        nodes: Sequence[Sequence[int]],
        node: ProcessGroup,
        memory: shared.Shared | None,
    ) -> None:
        self.group = group
        self.nodes = nodes
        self.places = places_of(nodes)
        self.me = self.places[group.rank()]
        self.rails = min(map(len, nodes))
        self.even = self.rails == max(map(len, nodes))
        self.rail: ProcessGroup | None = None
        if self.me.place < self.rails:
            self.rail = make_part(group, [ranks[self.me.place] for ranks in nodes])
            group.inner.Set_attr(_freed_with(), self.rail.inner)
        self._node = node
        self._memory: shared.Shared | None = memory

    @property
    def here(self) -> Sequence[int]:
        """Return the ranks of this node."""
        return self.nodes[self.me.node]

    def memory(self) -> shared.Shared | None:
        """Return the node's segment for the group's current call; None if the node has one rank."""
        self._node.sequence, self._node.worker = self.group.sequence, self.group.worker
        return self._memory

    def leave(self, alone: bool) -> None:
        """Make waiting calls of this rank (``alone``) or all ranks of a failed group return."""
        error = self.group.error
        assert error is not None
        for part in (self._node, self.rail):
            if part is not None:
                part.fail(error)
        if self._memory is not None:
            self._memory.leave(alone)
        if self.rail is not None:
            lost_ranks.revoke(self.rail)

    def scratch(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` bytes of scratch memory."""
        return scratch(self.group, nbytes).ctypes.data

    def shares(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        """Return first element and count of each rail's share of ``count`` elements."""
        share = max(-(-count // self.rails), SHARE // itemsize)
        starts = [min(count, rail * share) for rail in range(self.rails)]
        return [(start, min(share, count - start)) for start in starts]


def get_or_create(group: ProcessGroup) -> Hierarchy | None:
    """Return the hierarchy of a group, or None on all its ranks. All ranks call.

    None if the ranks are on one node, if every node has one rank, or if a node's ranks cannot share
    memory.
    """
    return group.resources.get_or_create(
        "hierarchical",
        lambda: _create(group),
        abandon=lambda _: None,
        leave=Hierarchy.leave,
    )


def _create(group: ProcessGroup) -> Hierarchy | None:
    names = control_messages.allgather(group.tested, node_of(), str)
    nodes = list(ranks_by_value(names).values())
    largest = max(map(len, nodes))
    if len(nodes) == 1 or not 1 < largest <= shared.MAX_RANKS:
        return None
    ranks = nodes[places_of(nodes)[group.rank()].node]
    node = make_part(group, ranks)
    memory = shared.create(node, copies=False) if len(ranks) > 1 else None
    node.inner.Free()  # ranks that share memory need no messages
    able = np.array([memory is not None or len(ranks) == 1], np.uint8)
    group.tested.Allreduce(MPI.IN_PLACE, able, MPI.MIN)
    return Hierarchy(group, nodes, node, memory) if able[0] else None


def node_of() -> str:
    """Return an identifier of the processes that may share memory: the kernel and the PID
    namespace, because ``shared_segment`` uses /proc. MPI_COMM_TYPE_SHARED does not tell containers
    of one node apart.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{kernel} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def places_of(nodes: Sequence[Sequence[int]]) -> list[Place]:
    """Return the position of each rank, given the ranks of each node."""
    found = {
        rank: Place(node, place)
        for node, ranks in enumerate(nodes)
        for place, rank in enumerate(ranks)
    }
    return [found[rank] for rank in range(len(found))]


def level_arithmetic(dtype: DType, op: ReduceOp) -> tuple[DType, ReduceOp]:
    """Return the dtype that both levels send, and the operation by which they combine it: sums and
    products of narrow floats are float32, and an average is a sum that is divided at the end.
    """
    exact = op in (ReduceOp.MIN, ReduceOp.MAX)
    wide = by_name["float32"] if dtype.kind is Kind.NARROW_FLOAT and not exact else dtype
    return wide, ReduceOp.SUM if op is ReduceOp.AVG else op


def make_part(group: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
    """Return an unregistered subgroup for use by routes. Only its ranks call
    (MPI_Comm_create_group, MPI-4.1 section 7.4.2).
    """
    comm = create_group(group.inner, ranks, 0)
    members = [group.ranks[rank] for rank in ranks]
    options = group.options._replace(reductions=DEFAULTS)
    part = ProcessGroup(comm, comm, members, options, group.group_name, group.group_desc)
    part.whole = group
    return part


@cache
def _freed_with() -> int:
    """Return the attribute key (MPI-4.1 section 7.7) of a communicator freed with another one."""

    def free(comm: MPI.Comm, key: int, other: MPI.Comm) -> None:
        other.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)


# --- one call -----------------------------------------------------------------------------------


class ApartError(Exception):
    """A collective mismatch that all ranks have detected."""


class HierarchyCall:
    """One call: its exchanges inside this node, and the comparison of the ranks' calls.

    count, root: number of elements and rank of the root, which all ranks must share.
    """

    def __init__(self, hierarchy: Hierarchy, kind: CallKind, count: int, root: int = 0) -> None:
        self.count, self.root = count, root
        self._signature = with_root(encode_kind(kind.primitive, kind.dtype, kind.op), root)
        words = f"{self._signature} {count}".encode()
        self._number = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")
        self._kind, self._hierarchy = kind, hierarchy
        # Exchanges of a primitive with a root would be compared later.
        self._moved = kind._replace(primitive=ALL_GATHER) if kind.primitive.root else kind
        self._memory = hierarchy.memory()
        self._agreed = False

    def exchange(
        self, dtype: DType, places: int = 1, most: int = 0, puts: Sequence[Put] = (),
        gets: Sequence[Get] = (), op: ReduceOp | None = None,
    ) -> None:  # fmt: skip
        """Run this rank's part of an exchange on its node; see Transfer. All its ranks call.

        op: combines the blocks of ``gets`` at the address of the first; None: they are copied.
        """
        if self._memory is None:  # alone: it gets its own blocks
            for _, place, to, count in gets:
                ctypes.memmove(to, puts[place].address, count * dtype.itemsize)
            return
        try:
            transfer = Transfer(places, most, self._number, puts, gets)
            self._memory.exchange(self._moved._replace(dtype=dtype, op=op), transfer, 0)
        except MismatchError:
            if not self._agreed:
                self._compare(0, 0)
            raise ApartError from None

    def agree(self, value: int = 0) -> bool:
        """Compare the nodes' calls, after the first exchange and before the first message between
        nodes. Raises ApartError; ranks that are on no rail raise it in the next exchange.

        Returns whether all nodes have the same value, which the ranks of a node share.
        """
        if self._agreed:
            return True
        same_calls, same_values = self._compare(self._number, value)
        if same_calls:
            return same_values
        if self._memory is not None and self._hierarchy.rails != len(self._hierarchy.here):
            self._number = 0
            with suppress(ApartError):
                self.exchange(by_name["float32"])
        raise ApartError

    def _compare(self, *numbers: int) -> tuple[bool, bool]:
        """Return whether all nodes have the same call number (0: calls here differ), and value."""
        self._agreed = True
        if self._hierarchy.rail is None:
            return True, True
        least = np.array([numbers, [-number for number in numbers]], np.int64)
        rail = self._hierarchy.rail
        rail.wait_for(rail.inner.Iallreduce(MPI.IN_PLACE, least, MPI.MIN))
        same_calls, same_values = least[0] == -least[1]
        return bool(same_calls), bool(same_values)

    def mismatch(self) -> MismatchError:
        """Return the error that lists the calls. All ranks call."""
        group, own = self._hierarchy.group, describe(self._signature, self.count)
        words = control_messages.allgather(group.tested, own, str)
        if not self._kind.primitive.even:  # it is in the record as if it were correct
            consistency.drop_last_call(group)
        return MismatchError(
            f"{self._kind.primitive} on rank {group.rank()} of group {group.group_name}: "
            f"collective mismatch: the ranks made different calls: {describe_by_rank(words)}"
        )
