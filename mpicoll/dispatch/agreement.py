"""Check at initialization that all ranks run the same version with the same constants.

Otherwise ranks would choose different routes or chunks for a call, and hang or return wrong
results. All constants of the modules that move data are compared. Of the environment variables only
one is compared here: the tuning table is broadcast by rank 0, and the remaining variables are
agreed on where they are used (docs/launching.md lists them).
"""

from __future__ import annotations

import hashlib
import pkgutil
from array import array
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import mpicoll
from mpicoll import control_messages, settings
from mpicoll.dtypes import DTYPES, OPERATIONS
from mpicoll.errors import LaunchError
from mpicoll.failures.report import describe_by_rank
from mpicoll.primitives import PRIMITIVES

if TYPE_CHECKING:
    from mpi4py import MPI

#: Modules outside routes/ whose constants determine the bytes that ranks send.
_MODULES = (
    "control_messages", "core.array_pickles", "core.pickles", "core.signature", "dispatch.fusing",
    "dispatch.packing", "dtypes", "primitives",
)  # fmt: skip
_WATCHING = ("failures.consistency", "failures.rank_status", "api.handshakes")


def agree(comm: MPI.Intracomm, mine: Mapping[str, str]) -> None:
    """Raise LaunchError on all ranks if their facts differ. All ranks call.

    mine: result of ``find_facts`` on this rank.

    If the facts are equal, the ranks exchange only 16 bytes. This exchange must not change in later
    versions, because different versions detect each other by it.
    """
    from mpi4py import MPI

    words = repr(sorted(mine.items())).encode()
    digest = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")
    both = array("q", (digest, -digest))
    comm.Allreduce(MPI.IN_PLACE, [both, MPI.INT64_T], MPI.MAX)
    if both[0] == -both[1]:
        return
    everybody = control_messages.allgather(comm, mine, dict[str, str])
    names = sorted({name for facts in everybody for name in facts})
    told = [
        f"{name} is {describe_by_rank(facts.get(name, 'not there') for facts in everybody)}"
        for name in names
        if len({facts.get(name) for facts in everybody}) > 1
    ]
    raise LaunchError(
        "init_process_group: the ranks do not run the same mpicoll: "
        f"{' | '.join(told[:_FEW])}{' ...' if len(told) > _FEW else ''}. Install the same version "
        f"on every node, and set {settings.TESTED_CALLS.name} alike on every rank"
    )


#: Differences that a message names.
_FEW = 5


def find_facts() -> dict[str, str]:
    """Return the version and all constants as text, by name."""
    from mpicoll import routes

    below = [module.name for module in pkgutil.walk_packages(routes.__path__, "mpicoll.routes.")]
    found = {
        "the version of mpicoll": mpicoll.__version__,
        settings.TESTED_CALLS.name: repr(settings.TESTED_CALLS.value()),
        **{table: " ".join(row.name for row in rows) for table, rows in _TABLES.items()},
    }
    for path in (*below, *(f"mpicoll.{name}" for name in (*_MODULES, *_WATCHING))):
        module, name = import_module(path), path.removeprefix("mpicoll.")
        for constant, value in vars(module).items():
            if constant.isupper() and _is_plain(value):
                found[f"{name}.{constant}"] = repr(value)
    return found


#: Other ranks know their rows by position.
_TABLES: dict[str, Sequence[Any]] = {
    "primitives": PRIMITIVES, "dtypes": DTYPES, "operations": OPERATIONS,
}  # fmt: skip


def _is_plain(value: object) -> bool:
    """Return whether a value has only numbers and strings, so that equal values have one repr."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    return value is None or isinstance(value, (bool, int, float, str, bytes))
