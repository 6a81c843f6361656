"""The declaration of a route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Primitive

__all__ = ["EXCHANGES", "MOVES", "PREFIXES", "REDUCTIONS", "MemoryKind", "Route"]


class MemoryKind(Enum):
    """The kind of memory of a call's buffers."""

    HOST = "host"
    DEVICE = "device"


#: Primitives that several routes serve, by name.
MOVES = ("broadcast", "all_gather", "all_gather_single", "gather", "scatter")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
PREFIXES = ("scan", "exscan")
EXCHANGES = ("all_to_all", "all_to_all_single")


@dataclass(frozen=True, slots=True)
class Route:
    """The declaration of a route.

    name:       in tuning tables, settings and messages.
    words:      its description in messages.
    memory:     the kind of memory it serves.
    primitives: the names of those it serves.
    combines:   whether it combines elements of a dtype by an operation, for primitives that reduce.
    build:      makes the implementation for a kind of call; None if the group cannot have it. Gets
                the CallKind, and for device memory what the group has agreed on (see
                routes/device/state.py). All ranks call it.
    meet:       of a device route, makes what a group has for it, a RouteState, or returns, on all
                ranks, why there is none. Gets what the group has agreed on so far. All ranks call.
    unless:     of a device route, the names of others that serve all its calls better: where the
                group has one of them, nobody meets for it.
    reproducible: the levels of reproducibility (core/reproducible.py) that its reductions keep.
    scales:     it applies the factor of PREMUL_SUM itself.
    uneven:     the names of the primitives of which it serves blocks of different sizes.
    place:      where the ranks have to be, see routes/tuning.py and, of device routes,
                routes/device/eligibility.py; "" anywhere.
    needs:      what it requires, in words.
    lacks:      of a device route, what a rank lacks for it, in words; "" for nothing.
    on_demand:  it is taken only on request.
    compares:   its calls are compared between the ranks where each call of the group is.
    lists:      it takes lists of buffers where a primitive has one array for each rank.
    blocks:     of a device route, for what the host waits in a call, in words; "" if for nothing:
                it only puts work into streams, so that asynchronous calls are made at once, on the
                caller's thread, and compared with the other ranks' only now and then.
    captures:   of a device route: its calls may be captured into a CUDA graph, once the group has
                made one of the kind.
    load:       builds, as ``build`` does, what only loads what a call needs that is captured later:
                calls of the kind may go by another route, which captures do not.
    least:      of a device route, by the name of the primitive: the bytes of a call, of the larger
                array of a rank, from which on it is taken. Smaller calls go by the next one that
                serves them, if there is one.
    instead:    the name of the route that serves in its place where a group cannot have it, "" for
                what the tables say of smaller messages.
    """

    name: str
    words: str
    memory: MemoryKind
    primitives: tuple[str, ...]
    build: Callable[..., Implementation | None]
    meet: Callable[..., Any] | None = None
    unless: tuple[str, ...] = ()
    combines: Callable[[ReduceOp, DType], bool] = lambda op, dtype: True
    reproducible: tuple[str, ...] = ()
    scales: bool = False
    uneven: tuple[str, ...] = ()
    place: str = ""
    needs: str = ""
    lacks: Callable[[Capabilities], str] = lambda own: ""
    on_demand: bool = False
    compares: bool = False
    lists: bool = False
    blocks: str | None = None
    captures: bool = False
    load: Callable[..., Implementation | None] | None = None
    least: Mapping[str, int] = field(default_factory=dict)
    instead: str = ""

    def serves(
        self,
        primitive: Primitive,
        op: ReduceOp | None,
        dtype: DType | None,
        level: str | None = None,
    ) -> bool:
        """Return whether it serves such calls, if the group can have it.

        level: of reproducibility; see CallKind.
        """
        if primitive.name not in self.primitives:
            return False
        if op is None or dtype is None:
            return True
        if op.op is ReduceOp.PREMUL_SUM and not self.scales:
            return False
        return (level is None or level in self.reproducible) and self.combines(op, dtype)

    def serves_kind(self, kind: CallKind) -> bool:
        """Return whether it serves calls of a kind, in their group, if that can have it."""
        return self.serves(kind.primitive, kind.op, kind.dtype, kind.level)
