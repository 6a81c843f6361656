"""The declaration of a route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.kernels.reduction import find_loop
from mpicoll.primitives import Primitive

#: Names of operations that several routes serve.
MOVES = ("broadcast", "all_gather", "all_gather_single", "gather", "scatter")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
PREFIXES = ("scan", "exscan")
EXCHANGES = ("all_to_all", "all_to_all_single")


def has_loop(op: ReduceOp, dtype: DType) -> bool:
    """Return whether the C library and the device kernels combine elements of a dtype by ``op``."""
    return find_loop(op, dtype) is not None


class Serves(NamedTuple):
    """The calls that a route can run."""

    primitives: tuple[str, ...]  # names of the operations
    #: Whether it combines elements of a dtype by a reduce operation.
    combines: Callable[[ReduceOp, DType], bool] = lambda op, dtype: True
    #: Levels of reproducibility (core/reproducible.py) that its reductions keep.
    reproducible: tuple[str, ...] = ()
    premultiplies: bool = False  # it applies the factor of PREMUL_SUM itself
    #: Names of the operations that it serves for blocks of different sizes.
    uneven: tuple[str, ...] = ()
    buffer_lists: bool = False  # it takes lists of buffers for operations with one array per rank


class Needs(NamedTuple):
    """The requirements of a route."""

    #: Required placement of the ranks: see routes/tuning.py and (device)
    #: routes/device/eligibility.py; "" for any.
    placement: str = ""
    description: str = ""  # the requirements, for messages
    #: (device) returns the missing capability of a rank; "" if it has all.
    missing_reason: Callable[[Capabilities], str] = lambda own: ""


class Policy(NamedTuple):
    """When a route is chosen, and how its calls run."""

    #: Its protocol compares the ranks' calls where the group compares every call.
    compares_calls: bool = False
    on_request: bool = False  # (device) it is used only if the program requests it
    #: (device) minimum size in bytes of a rank's larger array, by operation. Smaller calls use the
    #: next route.
    min_bytes: Mapping[str, int] = MappingProxyType({})
    #: (device) description of the host's waits in a call. "" if a call only enqueues work on
    #: streams: then async calls run inline, and the ranks' calls are compared only from time to
    #: time.
    host_waits_for: str | None = None
    #: (device) calls may be captured into a CUDA graph after the group's first call of the kind.
    capturable: bool = False


class Route(NamedTuple):
    """The declaration of a route."""

    module: str  # ``__name__`` of the module in routes/host or routes/device
    description: str  # the route, for messages
    serves: Serves
    #: Returns the implementation for a kind of call; None if it is not available in the group.
    #: Takes the CallKind and (device) the group's Agreement. All ranks call.
    build: Callable[..., Implementation | None]
    needs: Needs = Needs()
    policy: Policy = Policy()
    negotiate: Callable[..., Any] | None = None  # (device) the class of the group's RouteState

    @property
    def name(self) -> str:
        """Return the name in tuning tables, settings and messages: the last part of ``module``."""
        return self.module.rpartition(".")[2]

    def can_run(
        self,
        primitive: Primitive,
        op: ReduceOp | None,
        dtype: DType | None,
        level: str | None = None,
    ) -> bool:
        """Return whether the route can run calls with these properties.

        level: level of reproducibility; see CallKind.
        """
        serves = self.serves
        if primitive.name not in serves.primitives:
            return False
        if op is None or dtype is None:
            return True
        if op.op is ReduceOp.PREMUL_SUM and not serves.premultiplies:
            return False
        return (level is None or level in serves.reproducible) and serves.combines(op, dtype)

    def can_run_kind(self, kind: CallKind) -> bool:
        """Return whether the route can run calls of a kind."""
        return self.can_run(kind.primitive, kind.op, kind.dtype, kind.level)
