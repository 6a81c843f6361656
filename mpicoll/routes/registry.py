"""All routes: each is a module of routes/host or routes/device."""

from __future__ import annotations

from mpicoll import settings
from mpicoll.routes.device import direct, hierarchical, ipc, nccl, peer, staged
from mpicoll.routes.host.registry import HOST as HOST
from mpicoll.routes.route import Route

_DEVICE = {each.ROUTE.name: each.ROUTE for each in (direct, hierarchical, ipc, nccl, peer, staged)}
#: Device routes by name, best first: in the order of the setting, which must know its values
#: without loading MPI. A host route may have the same name.
DEVICE: dict[str, Route] = {name: _DEVICE[name] for name in settings.DEVICE_ROUTE.values}
ROUTES: tuple[Route, ...] = (*HOST.values(), *DEVICE.values())
