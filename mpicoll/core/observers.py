"""Observers of process groups: callbacks for changes of a group's state.

Packages above ``core`` implement them, because ``core`` must not import these packages.

The flight recorder and the client of the node monitor are observers (``mpicoll/failures``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Observer", "observers"]


class Observer:
    """Base class of observers. A subclass overrides the events that it needs."""

    def group_opened(self, group: ProcessGroup) -> None:
        """Called when a group is OPEN, before its first call."""

    def group_closed(self, group: ProcessGroup) -> None:
        """Called when a group is CLOSED. It may be in a forked child."""

    def work_timed_out(self, why: str) -> None:
        """Called when the wait for a Work has exceeded its group's timeout."""


#: Observers of this process; they are never removed.
observers: list[Observer] = []
