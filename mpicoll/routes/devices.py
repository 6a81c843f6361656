"""Which route device memory takes: agreed on by all ranks of a group, with its first such call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.calls import Way
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Primitive
from mpicoll.routes import hosts, staged

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["choose"]


def choose(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType | None
) -> Way:
    """What carries out calls of this kind on device memory in this group."""
    return Way(staged.route(primitive, group, hosts.choose(primitive, group, op, dtype).route))
