"""Check at initialization that all ranks run the same version with the same sources.

Otherwise ranks would choose different routes or chunks for a call, and hang or return wrong
results. The sources of all packages that decide what ranks send are compared. Of the environment
variables only one is compared here: the tuning table is broadcast by rank 0, and the remaining
variables are agreed on where they are used (docs/launching.md lists them).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import mpicoll
from mpicoll import control_messages, settings
from mpicoll.errors import LaunchError
from mpicoll.failures.report import describe_by_rank

if TYPE_CHECKING:
    from mpi4py import MPI

#: The modules whose sources are compared.
_COMPARED = (
    "api/handshakes.py", "control_messages.py", "core/*.py", "dispatch/*.py", "dtypes.py",
    "failures/consistency.py", "failures/rank_status.py", "kernels/*.py", "primitives.py",
    "routes/**/*.py",
)  # fmt: skip


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
    """Return the version and a digest of each source, without importing it."""
    home = Path(mpicoll.__file__).parent
    found = {
        "the version of mpicoll": mpicoll.__version__,
        settings.TESTED_CALLS.name: repr(settings.TESTED_CALLS.value()),
    }
    for path in (path for pattern in _COMPARED for path in home.glob(pattern)):
        digest = hashlib.blake2b(path.read_bytes(), digest_size=4)
        found[str(path.relative_to(home))] = f"source {digest.hexdigest()}"
    return found
