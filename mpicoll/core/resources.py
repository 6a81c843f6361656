"""What the library keeps for a group beside its communicators, and how that ends with the group."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

__all__ = ["Resources"]

T = TypeVar("T")


class _Kept(NamedTuple):
    value: Any
    close: Callable[[Any, float], object] | None
    abandon: Callable[[Any], object] | None
    leave: Callable[[Any, bool], object] | None


class Resources:
    """Memory, streams and communicators that routes and others keep for one group, by key.

    Each is created on first use, by code that also says how it ends.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}

    def find(self, key: Hashable) -> Any:
        """Return what is kept under a key; None if there is nothing."""
        kept = self._kept.get(key)
        return None if kept is None else kept.value

    def get_or_create(
        self,
        key: Hashable,
        create: Callable[[], T],
        close: Callable[[T, float], object] | None = None,
        abandon: Callable[[T], object] | None = None,
        leave: Callable[[Any, bool], object] | None = None,
    ) -> T:
        """Return what is kept under a key, and create it if there is nothing, once.

        close:   ends it with the group, on all ranks; takes the seconds to wait for them.
        abandon: leaves it behind, where calls may be stuck in it. Without one it stays as it is.
        leave:   lets the calls that wait in it end, once the group is broken; takes whether
                 those of this rank alone are meant.
        """
        kept = self._kept.get(key)
        if kept is None:
            self._kept[key] = kept = _Kept(create(), close, abandon, leave)
        found: T = kept.value
        return found

    def replace(self, key: Hashable, value: T) -> T:
        """Keep another value under a key, one that ends with its last reference; return it."""
        self._kept[key] = _Kept(value, None, None, None)
        return value

    def close(self, limit: float) -> None:
        """End everything, the latest first. All ranks call."""
        while self._kept:
            _, kept = self._kept.popitem()
            if kept.close is not None:
                kept.close(kept.value, limit)

    def leave(self, alone: bool = False) -> None:
        """Let all calls that wait for other ranks, where they can be reached, end.

        alone: this rank's calls; those of the others hear by themselves why the group is broken.
        """
        for kept in list(self._kept.values()):
            if kept.leave is not None and kept.value is not None:
                kept.leave(kept.value, alone)

    def abandon(self) -> None:
        """Leave behind what can be left, without waiting for other ranks or for what is stuck."""
        for key, kept in list(self._kept.items()):
            if kept.abandon is not None:
                del self._kept[key]
                kept.abandon(kept.value)
