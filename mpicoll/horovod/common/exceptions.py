"""The exceptions of Horovod's API."""

from __future__ import annotations

from mpicoll.errors import DistBackendError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(DistBackendError):
    """An operation failed: a collective mismatch, a lost rank, or the shutdown of the engine."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed; ``elastic.run`` restarts. ``skip_sync``: without
    synchronizing the state, because ranks were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
