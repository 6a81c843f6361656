"""What the library keeps for a group beside its communicators, and how that ends with the group."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

__all__ = ["Resources"]

T = TypeVar("T")


class _Kept(NamedTuple):
    value: object
    close: Callable[[float], object] | None
    abandon: Callable[[], object] | None


class Resources:
    """Memory, streams and communicators that routes and others keep for one group, by key.

    Each is created on first use, by code that also says how it ends.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}

    def find(self, key: Hashable) -> Any:
        """Return what is kept under a key; None if there is nothing yet."""
        kept = self._kept.get(key)
        return None if kept is None else kept.value

    def keep(
        self,
        key: Hashable,
        value: T,
        close: Callable[[float], object] | None = None,
        abandon: Callable[[], object] | None = None,
    ) -> T:
        """Keep a value under a key, in place of what was there, and return it.

        close:   ends it with the group, on all ranks; takes the seconds to wait for them.
        abandon: leaves it behind, where calls may be stuck in it. Without one it stays as it is.
        """
        self._kept[key] = _Kept(value, close, abandon)
        return value

    def close(self, limit: float) -> None:
        """End everything, the latest first. All ranks call."""
        while self._kept:
            _, kept = self._kept.popitem()
            if kept.close is not None:
                kept.close(limit)

    def abandon(self) -> None:
        """Leave behind what can be left, without waiting for other ranks or for what is stuck."""
        for key, kept in list(self._kept.items()):
            if kept.abandon is not None:
                del self._kept[key]
                kept.abandon()
