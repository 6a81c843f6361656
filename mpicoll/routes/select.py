"""The choice of a route, the same on every rank."""

from __future__ import annotations

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.routes.device import select as device
from mpicoll.routes.host import select as host

__all__ = ["choose"]


def choose(kind: CallKind, on_device: bool) -> Implementation:
    """Return the implementation of a kind of call on host or device memory."""
    return device.choose(kind) if on_device else host.choose(kind)
