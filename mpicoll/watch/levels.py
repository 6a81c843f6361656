"""How closely calls are watched: DebugLevel, as in torch.distributed."""

from __future__ import annotations

import os
from enum import IntEnum

from mpicoll.errors import ArgumentError
from mpicoll.groups import state

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]


class DebugLevel(IntEnum):
    """How closely calls are watched.

    OFF and INFO: the ranks' calls are compared in a group's first calls and in a sample of the
    later ones. DETAIL: in every call.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


_VARIABLES = ("MPICOLL_DEBUG", "TORCH_DISTRIBUTED_DEBUG")


def _from_env() -> DebugLevel:
    for variable in _VARIABLES:
        name = os.environ.get(variable)
        if name:
            try:
                return DebugLevel[name.upper()]
            except KeyError:
                raise ArgumentError(
                    f"{variable}: expected OFF, INFO or DETAIL, got {name!r}"
                ) from None
    return DebugLevel.OFF


_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """The level in force: what was set, else MPICOLL_DEBUG or TORCH_DISTRIBUTED_DEBUG, else OFF."""
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Sets the level; every rank must set the same one at the same place in its program."""
    global _level
    _level = DebugLevel(level)
    for group in state.groups:
        group.next_check = 0  # the next call is looked at with the new level


def set_debug_level_from_env() -> None:
    """Sets the level from MPICOLL_DEBUG or TORCH_DISTRIBUTED_DEBUG."""
    set_debug_level(_from_env())
