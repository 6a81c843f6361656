"""Options of a group for its reductions: level of reproducibility, and dtype between nodes (wire).

order: the same bits for every route, message size and placement of a given number of
    ranks. Every element is combined in rank order.
exact: also, sums and averages give the same bits for any order of the ranks, and with additional
    ranks that contribute zeros. The exact sum is rounded once.

Levels do not affect integers and bool, which are never rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpicoll import control_messages, settings
from mpicoll.errors import ArgumentError, MismatchError
from mpicoll.machine import ranks_by_value

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.dtypes import DType, ReduceOp

ORDER, EXACT = "order", "exact"
LEVELS = (ORDER, EXACT)
BFLOAT16 = "bfloat16"
_SETTINGS = {"reproducible": settings.REPRODUCIBLE, "wire": settings.WIRE}


class Reductions(NamedTuple):
    """The options, by the names of their arguments; None is the default."""

    reproducible: str | None = None
    wire: str | None = None


DEFAULTS = Reductions()


def needed(level: str | None, op: ReduceOp, dtype: DType, ranks: int) -> str | None:
    """Return the level to use for a reduction, or None if its bits do not depend on the order."""
    if dtype.kind.value in ("bool", "integer"):
        return None
    if level == ORDER and ranks <= 2 and op.mpi == "SUM":
        return None  # a + b is b + a. ("exact" also defines the sign of zero and NaN payloads.)
    return level


def parse(reproducible: object, wire: object, default: Reductions, where: str) -> Reductions:
    """Return the options for two arguments, in lower or upper case, or None for the default.

    Raises ArgumentError (a ValueError) for anything else, and for bfloat16 with a level.
    """
    found = []
    for name, given, usual in zip(_SETTINGS, (reproducible, wire), default, strict=True):
        value = given.lower() if isinstance(given, str) else given
        if value is not None and value not in _SETTINGS[name].values:
            raise ArgumentError(
                f"{where}: {name}: expected {' or '.join(map(repr, _SETTINGS[name].values))}, or "
                f"None for the default, got {given!r}"
            )
        found.append(usual if value is None else str(value))
    level, chosen = found
    if level is not None and chosen == BFLOAT16:
        raise ArgumentError(
            f"{where}: wire: expected 'float32' together with reproducible={level!r}, got "
            f"{chosen!r}; pass wire='float32', or do not set reproducible"
        )
    return Reductions(level, chosen)


def agree(comm: MPI.Intracomm, options: Reductions, where: str) -> None:
    """Raise MismatchError on all ranks if options differ. All ranks call it.

    Different options would select different routes, and the ranks would hang.
    """
    everyone = control_messages.allgather(comm, options, Reductions)
    for name, values in zip(_SETTINGS, zip(*everyone, strict=True), strict=True):
        by_value = ranks_by_value(values)
        if len(by_value) > 1:
            listed = (
                f"{each!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for each, ranks in by_value.items()
            )
            raise MismatchError(
                f"{where}: {name} (or {_SETTINGS[name].name}): expected the same on all ranks, got "
                f"{', '.join(listed)}; pass the same on every rank"
            )
