"""The choice of a route, the same on every rank."""

from __future__ import annotations

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind, Implementation
from mpicoll.core.reproducible import EXACT, ORDER
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import UnsupportedError
from mpicoll.kernels import library
from mpicoll.kernels.reduction import rounds_sums
from mpicoll.routes.device import select as device
from mpicoll.routes.host import select as host
from mpicoll.routes.host import shared


def choose(kind: CallKind, on_device: bool) -> Implementation:
    """Return the implementation of a kind of call on host or device memory.

    In a group with reproducible="exact", raises UnsupportedError for a reduction that depends on
    the order, and without the C library.
    """
    if kind.exact:
        op, dtype = kind.op, kind.dtype
        assert op is not None
        if op not in (ReduceOp.MIN, ReduceOp.MAX) and not rounds_sums(op, dtype):
            raise UnsupportedError(
                f"{kind.primitive.name}: {op} of {dtype} is rounded once for each rank, and group "
                f"{kind.group.group_name} has reproducible={EXACT!r}; use a group with "
                f"reproducible={ORDER!r}"
            )
        if library.kernels is None:
            raise UnsupportedError(
                f"{kind.primitive.name}: reproducible={EXACT!r} needs the C library, but this rank "
                f"uses {library.describe()}; see python -m mpicoll doctor"
            )
    if on_device:
        return device.DeviceImplementation(kind)
    return host.choose(kind, kind.primitive.listed)


def share_memory(group: ProcessGroup) -> None:
    """Create the shared memory of a group, if possible. All ranks call."""
    if 1 < group.size() <= shared.MAX_RANKS:
        host.place(group)
