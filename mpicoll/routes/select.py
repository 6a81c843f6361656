"""The choice of a route, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.routes.device import select as device
from mpicoll.routes.host import select as host

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["choose", "share_memory"]


def choose(kind: CallKind, on_device: bool) -> Implementation:
    """Return the implementation of a kind of call on host or device memory."""
    return device.choose(kind) if on_device else host.choose(kind)


def share_memory(group: ProcessGroup) -> None:
    """Let the ranks of a group share memory, if they can. All ranks call."""
    host.place(group)
