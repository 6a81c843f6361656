"""The registry of routes: each is a module of routes/host or routes/device, named once.

Host routes come in the order of tables and messages. Device routes come best first; the setting
MPICOLL_DEVICE_ROUTE names them, because it must know its values without loading MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mpicoll import settings
from mpicoll.routes.route import Route

__all__ = ["DEVICE", "HOST", "ROUTES"]


def _load(memory: str, names: Sequence[str]) -> dict[str, Route]:
    package = f"mpicoll.routes.{memory}"
    return {name: import_module(f"{package}.{name}").ROUTE for name in names}


#: Routes by name. A host route and a device route may have the same name.
HOST = _load(
    "host",
    ("mpi", "mpi_chunked", "exchange", "widened", "single_copy", "shared", "hierarchical"),
)
DEVICE = _load("device", settings.DEVICE_ROUTE.values)
ROUTES: tuple[Route, ...] = (*HOST.values(), *DEVICE.values())
