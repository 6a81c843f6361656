"""Options of a group for its reductions: the level of reproducibility and the wire format.

order: the same bits for every route, message size and placement of a given number of
    ranks. Every element is combined in rank order.
exact: also, sums and averages give the same bits for any order of the ranks, and with additional
    ranks that contribute zeros. The exact sum is rounded once.

Levels do not affect integers and bool, which are never rounded.

The wire format is the dtype in which sums of float32 cross the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpicoll import control_messages, settings
from mpicoll.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.dtypes import DType, ReduceOp

ORDER, EXACT = "order", "exact"
LEVELS = (ORDER, EXACT)
FLOAT32, BFLOAT16 = WIRES = ("float32", "bfloat16")


class Reductions(NamedTuple):
    """The arguments of this name of a group; None is a default."""

    reproducible: str | None = None
    wire: str | None = None

    @classmethod
    def of_environment(cls) -> Reductions:
        """Return the options that MPICOLL_REPRODUCIBLE and MPICOLL_WIRE set."""
        return cls(settings.REPRODUCIBLE.value() or None, settings.WIRE.value() or FLOAT32)


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
    for setting, given, usual in zip(_SETTINGS, (reproducible, wire), default, strict=True):
        value = given.lower() if isinstance(given, str) else given
        if value is not None and value not in setting.values:
            raise ArgumentError(
                f"{where}: {_name(setting)}: expected {' or '.join(map(repr, setting.values))}, or "
                f"None for the default, got {given!r}"
            )
        found.append(usual if value is None else str(value))
    options = Reductions(*found)
    if options.reproducible and options.wire == BFLOAT16:
        raise ArgumentError(
            f"{where}: wire: expected {FLOAT32!r} together with reproducible="
            f"{options.reproducible!r}, got {BFLOAT16!r}; pass wire={FLOAT32!r}, or do not set "
            "reproducible"
        )
    return options


def agree(comm: MPI.Intracomm, options: Reductions, where: str) -> None:
    """Raise MismatchError on all ranks if options differ. All ranks call it.

    Different options would select different routes, and the ranks would hang.
    """
    everyone = control_messages.allgather(comm, options, Reductions)
    for setting, values in zip(_SETTINGS, zip(*everyone, strict=True), strict=True):
        by_value = {each: [r for r, one in enumerate(values) if one == each] for each in values}
        if len(by_value) > 1:
            listed = (
                f"{each!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for each, ranks in by_value.items()
            )
            raise MismatchError(
                f"{where}: {_name(setting)} (or {setting.name}): expected the same on all ranks, "
                f"got {', '.join(listed)}; pass the same on every rank"
            )


def _name(setting: settings.Setting) -> str:
    return setting.name.removeprefix("MPICOLL_").lower()


_SETTINGS = settings.REPRODUCIBLE, settings.WIRE
