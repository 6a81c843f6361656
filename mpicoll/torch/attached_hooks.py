"""Hooks in C++, such as ``NanCheckHook``: torch attaches them to a group past its Python class."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch._C._distributed_c10d

__all__ = ["watch_attaching"]

C: Any = torch._C._distributed_c10d  # older versions lack the hooks, in their stubs as well


def watch_attaching() -> None:
    """Call ``note_hook`` of a group to which a hook is attached, and ``forget_hook`` at its end.

    For groups that have these methods: they bypass torch's dispatcher, which calls the hooks.
    """
    for name in "NanCheckHook", "FlightRecorderHook":
        if hasattr(C, name):  # from torch 2.15 on
            _wrap(getattr(C, name))


def _wrap(kind: Any) -> None:
    attach, remove = kind.attach, kind.remove
    # The group of each hook, and the key by which the group has noted it.
    noted: weakref.WeakKeyDictionary[Any, tuple[Callable[[], Any], object]]
    noted = weakref.WeakKeyDictionary()

    @functools.wraps(attach)
    def attach_noted(pg: Any, *args: Any, **kwargs: Any) -> Any:
        key = object()
        note = getattr(pg, "note_hook", None)
        if note is not None:
            note(key)
        try:
            hook = attach(pg, *args, **kwargs)
        except BaseException:
            if note is not None:
                pg.forget_hook(key)
            raise
        if note is not None:
            noted[hook] = weakref.ref(pg), key
        return hook

    @functools.wraps(remove)
    def remove_noted(self: Any) -> None:
        remove(self)
        find_group, key = noted.pop(self, (lambda: None, None))
        group = find_group()
        if group is not None:
            group.forget_hook(key)

    kind.attach, kind.remove = staticmethod(attach_noted), remove_noted
