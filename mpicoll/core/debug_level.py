"""The debug level: how often the ranks' calls are compared; see ``failures/consistency.py``."""

from __future__ import annotations

from enum import IntEnum

from mpicoll import settings
from mpicoll.errors import ArgumentError


class DebugLevel(IntEnum):
    """How often the ranks' calls are compared.

    OFF and INFO: in each of a group's first calls, and in a sample of the later ones. DETAIL: in
    every call.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Return the debug level: how often the ranks' calls are compared.

    Returns the level that set_debug_level has set, else the value of MPICOLL_DEBUG, else of
    TORCH_DISTRIBUTED_DEBUG, else OFF.

    Raises ArgumentError (a ValueError) if the variable has no valid value.
    """
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level: how often the ranks' calls are compared.

    level: a DebugLevel, or its number. The highest level of all ranks is used. A group adopts it in
           the next call that it compares, so the ranks need not set it at the same call.

    Raises ArgumentError (a ValueError) for anything else.
    """
    global _level
    try:
        _level = DebugLevel(level)
    except ValueError:
        raise ArgumentError(
            f"set_debug_level: level: expected a mpicoll.DebugLevel, got {level!r}"
        ) from None


def set_debug_level_from_env() -> None:
    """Set the debug level from MPICOLL_DEBUG or TORCH_DISTRIBUTED_DEBUG.

    Raises ArgumentError (a ValueError) if the variable has no valid value.
    """
    name = settings.DEBUG.value() or settings.TORCH_DEBUG.value() or DebugLevel.OFF.name
    set_debug_level(DebugLevel[name.upper()])
