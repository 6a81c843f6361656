"""All routes, one line each.

Those of host memory in the order of tables and messages, those of device memory the best first.
"""

from __future__ import annotations

from mpicoll.routes.device import copy_engine, direct, ipc, nccl, peer, shared_gpu, staged
from mpicoll.routes.device import hierarchical as device_hierarchical
from mpicoll.routes.device import mpi as device_mpi
from mpicoll.routes.host import exchange, hierarchical, mpi, shared, single_copy, widened
from mpicoll.routes.route import MemoryKind, Route

__all__ = ["DEVICE", "HOST", "ROUTES"]

ROUTES: tuple[Route, ...] = (
    mpi.ROUTE,
    mpi.CHUNKED,
    exchange.ROUTE,
    widened.ROUTE,
    single_copy.ROUTE,
    shared.ROUTE,
    hierarchical.ROUTE,
    shared_gpu.ROUTE,
    peer.ROUTE,
    device_hierarchical.ROUTE,
    copy_engine.ROUTE,
    ipc.ROUTE,
    direct.ROUTE,
    device_mpi.ROUTE,
    staged.ROUTE,
    nccl.ROUTE,
)

#: By name: one name may mean a route of each kind of memory.
HOST = {route.name: route for route in ROUTES if route.memory is MemoryKind.HOST}
DEVICE = {route.name: route for route in ROUTES if route.memory is MemoryKind.DEVICE}
