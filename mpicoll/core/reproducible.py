"""How far a group's reductions give the same bits again: the levels, and which one a group has.

order: for a given number of ranks, whatever the route, the size of a message, and where the ranks
       are: every element is combined in the order of the ranks.
exact: sums and averages in any order of the ranks, and with any number of ranks more that add
       zeros: the exact sum is rounded once.

Neither matters to what is never rounded and has one result in any order: integers and bool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpicoll import settings
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["EXACT", "LEVELS", "ORDER", "agree", "from_environment", "needed", "parse"]

ORDER, EXACT = "order", "exact"
LEVELS = (ORDER, EXACT)


def needed(level: str | None, op: ReduceOp, dtype: DType, ranks: int) -> str | None:
    """Return the level that reductions of so many ranks have to keep in a group of a level: None if
    their bits are the same in any order.
    """
    if dtype.kind in (Kind.BOOL, Kind.INTEGER):
        return None
    if level == ORDER and ranks <= 2 and op.ufunc is np.add:
        return None  # a + b is b + a. (Exact sums settle more: the sign of zero, what NaN is.)
    return level


def parse(given: object, default: str | None, where: str) -> str | None:
    """Return the level that an argument means.

    given: None for the default; a level in lower or upper case.

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


def from_environment() -> str | None:
    """Return the level that MPICOLL_REPRODUCIBLE asks for, None if it is not set."""
    return settings.REPRODUCIBLE.value() or None


def agree(comm: MPI.Intracomm, level: str | None, where: str) -> None:
    """Raise MismatchError, on all ranks, if they have not all asked for the same level. All call.

    It would hang otherwise, as the level decides about routes.
    """
    mine = np.array([0 if level is None else 1 + LEVELS.index(level)], np.int64)
    everybody = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(mine, everybody)
    if (everybody == mine[0]).all():
        return
    said = [(None, *LEVELS)[number] for number in everybody.tolist()]
    by_level = {each: [r for r, one in enumerate(said) if one == each] for each in said}
    raise MismatchError(
        f"{where}: reproducible (or {settings.REPRODUCIBLE.name}): expected the same on all ranks, "
        "got "
        + ", ".join(
            f"{each!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for each, ranks in by_level.items()
        )
        + "; give the same on every rank"
    )
