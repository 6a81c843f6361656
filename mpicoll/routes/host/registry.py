"""The host routes, in the order of tables and messages."""

from __future__ import annotations

from mpicoll.routes.host import exchange, hierarchical, measured, mpi, shared, widened
from mpicoll.routes.route import Route

#: Host routes by name.
HOST: dict[str, Route] = {
    module.ROUTE.name: module.ROUTE
    for module in (mpi, exchange, widened, shared, measured, hierarchical)
}
