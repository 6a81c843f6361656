"""What torch asks of ``options``: the backend, the ranks and, to be set, the timeout of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import seconds

__all__ = ["Options"]

_Base: Any = Backend.Options
#: Seconds, a hundred years: C++ counts milliseconds, and has no word for never.
_LONGEST = 3e9


class Options(_Base):  # type: ignore[misc]
    """torch's ``Backend.Options`` of a group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.backend, _of(group))
        self._group = group
        self.global_ranks_in_group = list(group.ranks)
        self.group_name = group.group_name

    @property
    def _timeout(self) -> timedelta:
        """The group's timeout; setting it holds for all calls to come."""
        return _of(self._group)

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.timeout = seconds(timeout, None, "options._timeout")


def _of(group: ProcessGroup) -> timedelta:
    """The timeout of a group, as torch has it."""
    return timedelta(seconds=_LONGEST if group.timeout is None else min(group.timeout, _LONGEST))
