"""Resources that routes keep for a group, and close with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Kept(NamedTuple):
    value: Any
    close: Callable[[Any, float], object] | None
    abandon: Callable[[Any], object] | None
    leave: Callable[[Any, bool], object] | None


class Resources:
    """Memory, streams and communicators that routes keep for one group, by key.

    Each resource is created on first use, together with functions that end it.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}

    def find(self, key: Hashable) -> Any:
        """Return the resource of a key, or None."""
        kept = self._kept.get(key)
        return None if kept is None else kept.value

    def get_or_create(
        self,
        key: Hashable,
        create: Callable[[], T],
        close: Callable[[Any, float], object] | None = None,
        abandon: Callable[[T], object] | None = None,
        leave: Callable[[Any, bool], object] | None = None,
    ) -> T:
        """Return the resource of a key. Creates it on first use.

        close:   ends it with the group, on all ranks; takes the seconds to wait for other ranks.
        abandon: releases it while calls may be blocked in it. Without one, it is kept.
        leave:   makes calls that wait in it return, once the group has failed; its argument is
            ``alone`` of the method ``leave``.
        """
        kept = self._kept.get(key)
        if kept is None:
            self._kept[key] = kept = _Kept(create(), close, abandon, leave)
        found: T = kept.value
        return found

    def replace(self, key: Hashable, value: T) -> T:
        """Set the resource of a key; return it. Neither it nor the old one is ever closed."""
        self._kept[key] = _Kept(value, None, None, None)
        return value

    def close(self, limit: float) -> None:
        """Close all resources, the latest first. All ranks call it."""
        while self._kept:
            _, kept = self._kept.popitem()
            if kept.close is not None and kept.value is not None:
                kept.close(kept.value, limit)

    def leave(self, alone: bool = False) -> None:
        """Make all calls that wait for other ranks return, if possible.

        alone: only calls of this rank. Other ranks learn of the failure themselves.
        """
        for kept in list(self._kept.values()):
            if kept.leave is not None and kept.value is not None:
                kept.leave(kept.value, alone)

    def abandon(self) -> None:
        """Release resources without waiting for other ranks or for blocked calls."""
        for key, kept in list(self._kept.items()):
            if kept.abandon is not None:
                del self._kept[key]
                kept.abandon(kept.value)
