"""The launcher of one MPI with the library of another, found before MPI_Init.

A library that is not told its rank in words that it understands aborts inside MPI_Init (MPICH 5:
"unsupported PMI version PMIx"), or starts as a world of its own on every rank. What the launcher
has set is compared with what the library says of itself, which needs no MPI_Init. A library that
may understand more than is known here is never refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mpicoll.errors import LaunchError
from mpicoll.launch import launchers
from mpicoll.launch.environment import (
    SINGLETON,
    is_started_by_mpi,
    replace_bootstrap_variables,
)
from mpicoll.launch.launchers import Dialect, Launcher
from mpicoll.launch.mpi_library import find_function, find_library, find_mpiexec
from mpicoll.launch.pmi import manager_socket
from mpicoll.launch.rendezvous import loopback
from mpicoll.output import warn

__all__ = ["LIBRARIES", "Library", "find_foreign", "find_mpi", "find_stale", "understand_manager"]


@dataclass(frozen=True, slots=True)
class Library:
    """A family of MPI libraries, and the one dialect in which it learns its ranks.

    pattern: of MPI_Get_library_version's text.
    dialect: the only one that it understands by itself.
    linked:  functions that it has where it was linked with another's client of process managers,
             and understands whatever that does.
    settings: variables by which users give it one.
    asks:    names of launchers that it asks which dialect they speak.
    deaf:    the name of one that it does not understand, even inside those; "" without one.
    """

    pattern: str
    dialect: Dialect
    linked: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    deaf: str = ""


LIBRARIES: tuple[Library, ...] = (
    # Before 5, Open MPI could be built with PMI-1 and PMI-2.
    Library(r"Open MPI v([5-9]|\d\d)", Dialect.PMIX),
    Library(
        r"MPICH Version:", Dialect.PMI, linked=("PMIx_Init", "PMI_Init", "PMI2_Init")
    ),
    # Under Slurm and PALS it takes PMI-1, PMI-2 or PMIx, as it finds them (2021.18's libmpi.so).
    Library(
        r"Intel\(R\) MPI Library",
        Dialect.PMI,
        settings=("I_MPI_PMI", "I_MPI_PMI_LIBRARY"),
        asks=("srun", "PALS (HPE Cray's mpiexec)"),
        deaf="Open MPI's mpirun",
    ),
)  # fmt: skip


def find_mpi(
    version: str,
    environment: Mapping[str, str] = os.environ,
    has: Callable[[str], bool] = lambda name: find_function(name) is not None,
) -> Library | None:
    """Return the family of a library; None where it may understand more than one dialect.

    version: MPI_Get_library_version's text. has: tells whether the library has a function.
    """
    present = {each.name for each in launchers.find_launchers(environment)}
    for each in LIBRARIES:
        if re.match(each.pattern, version):
            has_more = (
                any(map(has, each.linked))
                or any(map(environment.get, each.settings))
                or (each.deaf not in present and not present.isdisjoint(each.asks))
            )
            return None if has_more else each
    return None


def find_foreign(
    library: Library, environment: Mapping[str, str] = os.environ
) -> tuple[frozenset[Dialect], Launcher | None]:
    """Return the dialects in which launchers speak to this process and the library does not listen,
    and the launcher whose several ranks it would never see, None where there is no such launcher.

    Where a launcher that it understands is there too, as where Slurm's MpiDefault=pmix starts the
    proxies of MPICH's mpirun, that is the one that counts. A launcher of a single rank needs no
    library that understands it. Where one does not say how many there are, as PRRTE's prterun, rank
    0 may be alone: the error of the others ends a job that has them.
    """
    present = [each for each in launchers.find_launchers(environment) if each.dialect]
    foreign = frozenset(each.dialect for each in present if each.dialect) - {library.dialect}
    if (
        not foreign
        or any(each.dialect is library.dialect for each in present)
        or not is_started_by_mpi(environment)
        or environment.get(SINGLETON) == "1"
    ):
        return foreign, None
    first = present[0]
    size = next((environment.get(each.size) for each in present if each.size), None)
    is_alone = size == "1" if size is not None else environment.get(first.rank) == "0"
    return foreign, None if is_alone else first


def understand_manager(mpi: ModuleType) -> contextlib.AbstractContextManager[None]:
    """Return the context in which MPI_Init finds the launcher that this library understands.

    mpi: mpi4py.MPI, before MPI_Init.

    Raises LaunchError where the launcher's ranks would each be alone, or abort.
    """
    library = find_mpi(mpi.Get_library_version())
    understood = tuple(Dialect) if library is None else (library.dialect,)
    if stale := find_stale(understood):
        if os.environ.get(SINGLETON) == "1":
            return replace_bootstrap_variables({})
        raise LaunchError(_explain_stale(stale))
    if library is None:
        return contextlib.nullcontext()
    foreign, launcher = find_foreign(library)
    if launcher is not None:
        raise LaunchError(_explain(mpi, library, launcher))
    if foreign and launchers.announced()[1] == "?" and os.environ.get(SINGLETON) != "1":
        warn(
            f"the launcher does not say how many ranks there are, and {mpi.get_vendor()[0]} does "
            f"not understand it: rank 0 runs as a world of its own. {SINGLETON}=1 says that this "
            "is meant"
        )
    # MPICH would ask a PMIx that it does not have, where it has been told its rank by PMI as well.
    return replace_bootstrap_variables({}, foreign) if foreign else contextlib.nullcontext()


# --- stale variables of a launcher ---------------------------------------------------------------


def find_stale(
    understood: Collection[Dialect], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that lead to a process manager that does not exist, and the reasons;
    none if a manager exists, or if this cannot be known.

    understood: the dialects of the MPI library. One that finds no manager aborts or crashes.

    Programs that a rank has started have such variables, as a notebook does in ``srun --pty``.
    """
    stale: dict[str, str] = {}
    for dialect in {each.dialect for each in launchers.find_launchers(environment)}:
        if dialect not in understood:
            continue
        for pattern, check in _MANAGERS[dialect].items():
            names = [name for name in environment if re.fullmatch(pattern, name)]
            found = {name: check(environment[name]) for name in names}
            if found:  # MPI uses the first
                break
        if not found or "" in found.values():
            return {}
        stale |= found
    return stale


def _check_descriptor(value: str) -> str:
    with contextlib.suppress(OSError), manager_socket(value):
        return ""
    return f"file descriptor {value} is not a connection of this process"


def _check_port(value: str) -> str:
    """Check ``...HOST:PORT`` of this machine without connecting, which looks like a rank."""
    port = value.rpartition(":")[2]
    listening = set[str]()
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTENS:
                    listening.add(str(int(local.rpartition(":")[2], 16)))
    if not port.isdigit() or not listening or port in listening:
        return ""
    return f"no process listens at port {port}"


def _check_local_port(value: str) -> str:
    host = value.rpartition(":")[0]
    return _check_port(value) if loopback(host) or host == socket.gethostname() else ""


def _check_folder(value: str) -> str:
    return "" if Path(value).exists() else f"{value} does not exist"


#: The state of a socket that listens, in /proc/net/tcp.
_LISTENS = "0A"
#: Variables that lead to a process manager, in the order in which libraries use them: a pattern of
#: the names, and a function of the value that returns the fault, "" if there is none or unknown.
_MANAGERS: dict[Dialect | None, dict[str, Callable[[str], str]]] = {
    Dialect.PMI: {r"PMI_FD": _check_descriptor, r"PMI_PORT": _check_local_port},
    Dialect.PMIX: {r"PMIX_SERVER_URI\d*": _check_port, r"PMIX_SERVER_TMPDIR": _check_folder},
}


def _explain_stale(stale: Mapping[str, str]) -> str:
    names = sorted(filter(launchers.is_bootstrap_variable, os.environ))
    reasons = {missing: name for name, missing in sorted(stale.items(), reverse=True)}
    told = ", ".join(f"{name} ({missing})" for missing, name in reasons.items())
    return (
        "init_process_group: this process has variables of a launcher that does not serve it: "
        f"{told}. It was probably started by a process that mpirun or srun had started, as a "
        f"notebook in `srun --pty`. Unset them: unset {' '.join(names)}; or start the job with "
        f"mpirun or srun. {SINGLETON}=1 runs this process as a world of one rank"
    )


def _explain(mpi: ModuleType, library: Library, launcher: Launcher) -> str:
    assert launcher.dialect is not None
    vendor, version = mpi.get_vendor()
    own = find_mpiexec()
    size = os.environ.get(launcher.size, "")
    name, value = (launcher.size, size) if size else (launcher.rank, os.environ[launcher.rank])
    return (
        f"init_process_group: the launcher and the MPI library do not match. {launcher.name} "
        f"started this process{f' as one of {size} ranks' if size else ''} ({name}={value}) and "
        f"tells it so by {launcher.dialect.value}; mpi4py loads {vendor} "
        f"{'.'.join(map(str, version))} ({find_library()}), which understands "
        f"{library.dialect.value} alone{f', and comes with {own}' if own else ''}. "
        f"To do: {launcher.remedy}. {SINGLETON}=1 runs each process as a world of its own"
    )
