"""torch's ``Backend.Options``: what groups are made with, and those of a group."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Backend

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.reproducible import parse as parse_reproducible
from mpicoll.core.work import parse_timeout
from mpicoll.torch import NAME

__all__ = ["MAX_TIMEOUT_S", "GroupOptions", "Options", "get_seconds"]

#: A hundred years in seconds: C++ counts milliseconds, and cannot express an infinite timeout.
MAX_TIMEOUT_S = 3e9


class Options(Backend.Options):  # type: ignore[misc]
    """The ``pg_options`` of ``init_process_group`` and ``new_group``, the same on all ranks.

    reproducible: how far reductions give the same bits again.
        "order": whatever the size, the route and the nodes.
        "exact": sums and averages also for any order and number of ranks.
        None: as the default group has it, which has it from MPICOLL_REPRODUCIBLE.

    Raises ArgumentError (a ValueError) for another value.
    """

    def __init__(self, reproducible: str | None = None) -> None:
        super().__init__(NAME)
        self.reproducible = parse_reproducible(reproducible, None, "Options")


class GroupOptions(Backend.Options):  # type: ignore[misc]
    """The options of a group: backend, ranks, how far reductions give the same bits again, and the
    timeout, which can be set.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.backend, _get_timeout(group))
        self._group = group
        self.reproducible = group.reproducible
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
    return timedelta(seconds=MAX_TIMEOUT_S if limit is None else min(limit, MAX_TIMEOUT_S))


def get_seconds(options: Backend.Options) -> float:
    """Return the timeout that torch's C++ has set in the options of a new group, in seconds."""
    # Not options._timeout: GroupOptions returns the timeout of the parent group.
    timeout: timedelta = Backend.Options._timeout.__get__(options)
    return timeout.total_seconds()
