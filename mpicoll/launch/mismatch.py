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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from mpicoll.output import warn

__all__ = ["LIBRARIES", "Library", "find_foreign", "find_mpi", "understand_manager"]


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
