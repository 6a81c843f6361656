"""Detect a launcher and an MPI library that do not match, before MPI_Init.

An MPI library that does not support the launcher's protocol aborts inside MPI_Init (MPICH 5:
"unsupported PMI version PMIx"), or every rank becomes a separate MPI_COMM_WORLD. This module
compares the launcher's variables with the library's version text, which needs no MPI_Init. It
accepts libraries whose protocols are unknown.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

from mpicoll.errors import LaunchError
from mpicoll.launch import launchers
from mpicoll.launch.environment import SINGLETON, is_started_by_mpi, replace_bootstrap_variables
from mpicoll.launch.host_identity import open_manager
from mpicoll.launch.launchers import Launcher, PmiProtocol
from mpicoll.launch.mpi_library import find_function, find_library, find_mpiexec


class Library(NamedTuple):
    """A family of MPI libraries and its built-in protocol."""

    pattern: str  # of MPI_Get_library_version's text
    protocol: PmiProtocol  # the only one that it supports by itself
    #: Functions that it exports if it was linked with another PMI client library, and variables
    #: that select one. It then supports other protocols.
    client_functions: tuple[str, ...] = ()
    client_variables: tuple[str, ...] = ()
    flexible_launchers: tuple[str, ...] = ()  # under which it detects the protocol
    unsupported_launcher: str = ""  # not supported, even inside these


LIBRARIES: tuple[Library, ...] = (
    # Before 5, Open MPI could be built with PMI-1 and PMI-2.
    Library(r"Open MPI v([5-9]|\d\d)", PmiProtocol.PMIX),
    Library(r"MPICH Version:", PmiProtocol.PMI, ("PMIx_Init", "PMI_Init", "PMI2_Init")),
    # Under Slurm and PALS it detects PMI-1, PMI-2 or PMIx (2021.18's libmpi.so).
    Library(
        r"Intel\(R\) MPI Library",
        PmiProtocol.PMI,
        client_variables=("I_MPI_PMI", "I_MPI_PMI_LIBRARY"),
        flexible_launchers=("srun", "PALS (HPE Cray's mpiexec)"),
        unsupported_launcher="Open MPI's mpirun",
    ),
)


def find_mpi(
    version: str,
    environment: Mapping[str, str] = os.environ,
    has: Callable[[str], bool] = lambda name: find_function(name) is not None,
) -> Library | None:
    """Return the family of a library; None if it is unknown or may support more protocols.

    version: MPI_Get_library_version's text. has: returns whether the library exports a function.
    """
    present = {each.name for each in launchers.find_launchers(environment)}
    for each in LIBRARIES:
        if re.match(each.pattern, version):
            is_flexible = not present.isdisjoint(each.flexible_launchers)
            has_more = (
                any(map(has, each.client_functions))
                or any(map(environment.get, each.client_variables))
                or (is_flexible and each.unsupported_launcher not in present)
            )
            return None if has_more else each
    return None


def find_foreign(
    library: Library, environment: Mapping[str, str] = os.environ
) -> tuple[frozenset[PmiProtocol], Launcher | None]:
    """Return the launchers' protocols that the library does not support, and the launcher whose
    ranks it would not find, or None.

    A launcher with a supported protocol takes precedence (Slurm's MpiDefault=pmix starts the
    proxies of MPICH's mpirun), and a single rank needs none.
    """
    present = [each for each in launchers.find_launchers(environment) if each.protocol]
    foreign = frozenset(each.protocol for each in present if each.protocol) - {library.protocol}
    if (
        not foreign
        or any(each.protocol is library.protocol for each in present)
        or not is_started_by_mpi(environment)
        or environment.get(SINGLETON) == "1"
    ):
        return foreign, None
    size = next((environment.get(each.size) for each in present if each.size), None)
    return foreign, None if size == "1" else present[0]


def match_launcher(mpi: ModuleType) -> contextlib.AbstractContextManager[None]:
    """Return the context in which MPI_Init finds the launcher whose protocol this library supports.

    mpi: mpi4py.MPI, before MPI_Init.

    Raises LaunchError if each rank would be alone in MPI_COMM_WORLD, or abort.
    """
    library = find_mpi(mpi.Get_library_version())
    if (library is None or library.protocol is PmiProtocol.PMI) and is_stale():
        if os.environ.get(SINGLETON) == "1":
            return replace_bootstrap_variables({})
        raise LaunchError(_explain_stale())
    if library is None:
        return contextlib.nullcontext()
    foreign, launcher = find_foreign(library)
    if launcher is not None:
        raise LaunchError(_explain(mpi, library, launcher))
    # MPICH would try PMIx, which it does not have, even if it has got its rank by PMI.
    return replace_bootstrap_variables({}, foreign) if foreign else contextlib.nullcontext()


def is_stale(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process inherited the variables of a PMI manager without its connection,
    for example in a notebook of ``srun --pty``. MPI would abort.
    """
    protocols = [each.protocol for each in launchers.find_launchers(environment)]
    if "PMI_FD" not in environment or PmiProtocol.PMI not in protocols:
        return False
    with contextlib.suppress(OSError), open_manager(environment["PMI_FD"]):
        return False
    return True


def _explain_stale() -> str:
    names = sorted(filter(launchers.is_bootstrap_variable, os.environ))
    return (
        "init_process_group: this process has variables of a launcher that did not start it: file "
        f"descriptor PMI_FD={os.environ['PMI_FD']} is not a connected socket of this process. It "
        "probably inherited them from a process under mpirun or srun, for example a notebook in "
        f"`srun --pty`. Unset them: unset {' '.join(names)}; or start the job with mpirun or srun; "
        f"or set {SINGLETON}=1 to run as a single rank"
    )


def _explain(mpi: ModuleType, library: Library, launcher: Launcher) -> str:
    assert launcher.protocol is not None
    vendor, version = mpi.get_vendor()
    own = find_mpiexec()
    size = os.environ.get(launcher.size, "")
    name, value = (launcher.size, size) if size else (launcher.rank, os.environ[launcher.rank])
    return (
        f"init_process_group: the launcher and the MPI library do not match. {launcher.name} "
        f"started this process{f' as one of {size} ranks' if size else ''} ({name}={value}) with "
        f"the protocol {launcher.protocol.value}; mpi4py loads {vendor} "
        f"{'.'.join(map(str, version))} ({find_library()}), which supports only "
        f"{library.protocol.value}{f'. Its launcher is {own}' if own else ''}. "
        f"Remedy: {launcher.remedy}. Set {SINGLETON}=1 to run each process as a single rank"
    )
