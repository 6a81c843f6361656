"""How closely calls are watched: DebugLevel, as in torch.distributed."""

from __future__ import annotations

from enum import IntEnum

from mpicoll import settings

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]


class DebugLevel(IntEnum):
    """How closely calls are watched.

    OFF and INFO: the ranks' calls are compared in a group's first calls and in a sample of the
    later ones. DETAIL: in every call.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


def _from_env() -> DebugLevel:
    name = settings.DEBUG.value() or settings.TORCH_DEBUG.value() or DebugLevel.OFF.name
    return DebugLevel[name.upper()]


_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Tell how closely calls are watched.

    Returns the DebugLevel: what was set, else MPICOLL_DEBUG, else TORCH_DISTRIBUTED_DEBUG, else
    OFF.

    Raises ArgumentError (a ValueError) where the variable has another value.
    """
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set how closely calls are watched.

    level: a DebugLevel, or its number. The highest that any rank has set holds on all ranks. A
           group takes a new one on in the next call that it compares, so the ranks need not set it
           at the same place in their programs.

    Raises ValueError for another number.
    """
    global _level
    _level = DebugLevel(level)


def set_debug_level_from_env() -> None:
    """Set how closely calls are watched from MPICOLL_DEBUG or TORCH_DISTRIBUTED_DEBUG.

    Raises ArgumentError (a ValueError) where the variable has another value.
    """
    set_debug_level(_from_env())
