"""The exceptions of Horovod's API."""

from __future__ import annotations

from mpicoll.errors import DistBackendError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(DistBackendError):
    """An operation failed: the ranks' arguments disagree, a rank is lost, or the end has come."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed; ``elastic.run`` begins anew. ``skip_sync``: with the state
    that this rank has, since ranks have only gone.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
