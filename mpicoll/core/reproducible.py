"""Levels of reproducible reductions, and the level of a group.

order: the same bits for every route, message size and placement of a given number of
    ranks. Every element is combined in rank order.
exact: also, sums and averages give the same bits for any order of the ranks, and with additional
    ranks that contribute zeros. The exact sum is rounded once.

Levels do not affect integers and bool, which are never rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll import control_messages, settings
from mpicoll.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.dtypes import DType, ReduceOp

ORDER, EXACT = "order", "exact"
LEVELS = (ORDER, EXACT)


def needed(level: str | None, op: ReduceOp, dtype: DType, ranks: int) -> str | None:
    """Return the level to use for a reduction, or None if its bits do not depend on the order."""
    if dtype.kind.value in ("bool", "integer"):
        return None
    if level == ORDER and ranks <= 2 and op.mpi == "SUM":
        return None  # a + b is b + a. ("exact" also defines the sign of zero and NaN payloads.)
    return level


def parse(given: object, default: str | None, where: str) -> str | None:
    """Return the level for an argument.

    given: a level in lower or upper case, or None for the default.

    Raises ArgumentError (a ValueError) for anything else.
    """
    if given is None:
        return default
    level = given.lower() if isinstance(given, str) else given
    if level not in LEVELS:
        raise ArgumentError(
            f"{where}: reproducible: expected {' or '.join(map(repr, LEVELS))}, or None for the "
            f"default, got {given!r}"
        )
    return str(level)


def agree(comm: MPI.Intracomm, level: str | None, where: str) -> None:
    """Raise MismatchError on all ranks if levels differ. All ranks call it.

    Different levels would select different routes, and the ranks would hang.
    """
    levels = control_messages.allgather(comm, level, str | None)
    by_level = {each: [r for r, one in enumerate(levels) if one == each] for each in levels}
    if len(by_level) > 1:
        listed = (
            f"{each!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for each, ranks in by_level.items()
        )
        raise MismatchError(
            f"{where}: reproducible (or {settings.REPRODUCIBLE.name}): expected the same on all "
            f"ranks, got {', '.join(listed)}; pass the same on every rank"
        )
