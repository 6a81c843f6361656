"""torch's ``Backend.Options`` of a group: backend, ranks and the timeout, which can be set."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Backend

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import parse_timeout

__all__ = ["Options"]

#: A hundred years in seconds: C++ counts milliseconds, and cannot express an infinite timeout.
_MAX_TIMEOUT = 3e9


class Options(Backend.Options):  # type: ignore[misc]
    """torch's ``Backend.Options`` of a group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.backend, _get_timeout(group))
        self._group = group
        self.global_ranks_in_group = list(group.ranks)
        self.group_name = group.group_name

    @property
    def _timeout(self) -> timedelta:
        """The group's timeout; setting it applies to all later calls."""
        return _get_timeout(self._group)

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.timeout = parse_timeout(timeout, None, "options._timeout")


def _get_timeout(group: ProcessGroup) -> timedelta:
    """Return the timeout of a group as torch represents it."""
    limit = group.timeout
    return timedelta(seconds=_MAX_TIMEOUT if limit is None else min(limit, _MAX_TIMEOUT))
