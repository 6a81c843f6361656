"""How the bytes move: the choice of a route, the same on every rank."""

from __future__ import annotations

from mpicoll.routes.device import devices
from mpicoll.routes.host import hosts
from mpicoll.routes.wire import explained

__all__ = ["devices", "explained", "hosts"]
