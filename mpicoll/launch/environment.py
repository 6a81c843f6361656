"""What launchers say in environment variables, as data."""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from mpicoll.errors import LaunchError
from mpicoll.settings import ALLOW_SINGLETON

__all__ = [
    "LAUNCHERS",
    "SINGLETON",
    "Launcher",
    "Way",
    "beside_ranks",
    "by_mpi",
    "by_torchrun",
    "check_world",
    "choose",
    "fill_environment",
    "filled",
    "inherited",
    "instead_of_managers",
    "local_rank",
    "said",
]


@dataclass(frozen=True, slots=True)
class Launcher:
    """One launcher's variables.

    name:   how messages call it.
    marks:  variables that are all set in every process that it starts.
    rank, size: the variables with the rank and the number of ranks.
    local, here: those with the rank on the node and the number of ranks there.
    remedy: what to do when MPI does not see the ranks that it started.
    """

    name: str
    marks: tuple[str, ...]
    rank: str
    size: str
    local: str
    here: str
    remedy: str


#: The innermost launcher first: an mpirun inside a Slurm job is an mpirun.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "torchrun",
        ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "let init_process_group find the ranks (init_method='env://' or nothing), and call it "
        "before mpi4py.MPI is imported",
    ),
    Launcher(
        "Open MPI's mpirun",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "use the mpirun of the MPI library that mpi4py loads, or let mpi4py load Open MPI "
        "(python -m mpi4py --mpi-library shows which it is)",
    ),
    Launcher(
        "a PMI process manager (MPICH's mpiexec, srun --mpi=pmi2)",
        ("PMI_RANK", "PMI_SIZE"),
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "the MPI library that mpi4py loads does not speak PMI: start it with its own mpirun (or "
        "srun --mpi=pmix for Open MPI), or let mpi4py load one of the MPICH family "
        "(python -m mpi4py --mpi-library shows which it is)",
    ),
    Launcher(
        "srun",
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "",
        "give srun the process manager of the MPI library: --mpi=pmi2 for MPICH and its family, "
        "--mpi=pmix for Open MPI (srun --mpi=list shows what the site has)",
    ),
    Launcher(
        "Slurm",
        ("SLURM_JOB_ID", "SLURM_NTASKS"),
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "",
        "the batch script runs once: start the program in it with srun or mpirun",
    ),
)

#: Set to 1 to run a single rank on purpose where a launcher has announced more.
SINGLETON = ALLOW_SINGLETON.name


def _launcher(environment: Mapping[str, str]) -> Launcher | None:
    for launcher in LAUNCHERS:
        if all(mark in environment for mark in launcher.marks):
            return launcher
    return None


#: What process managers of MPI set in the processes that they start.
_MANAGERS = (("OMPI_COMM_WORLD_SIZE",), ("PMIX_RANK",), ("PMI_RANK", "PMI_SIZE"))
#: What they, and sites for them, set to be read by MPI libraries.
_MANAGERS_OWN = ("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SITES_OWN = ("I_MPI_PMI", "I_MPI_PMI_LIBRARY", "MPIR_CVAR_PMI_VERSION", "MPICH_PMI_VERSION")


def by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """True where torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def by_mpi(environment: Mapping[str, str] = os.environ) -> bool:
    """True where a process manager of MPI started this process: not torchrun inside its job, nor a
    process that it started.
    """
    return (
        not by_torchrun(environment)
        and not inherited(environment)
        and any(all(mark in environment for mark in marks) for marks in _MANAGERS)
    )


def inherited(environment: Mapping[str, str] = os.environ) -> bool:
    """True where what a process manager says was meant for a parent of this process."""
    if multiprocessing.parent_process() is not None:
        return True
    descriptor = environment.get("PMI_FD", "")
    if not descriptor.isdigit():
        return False
    try:  # the connection to a manager is seldom passed on to what a rank starts
        return not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except OSError:
        return True


def beside_ranks(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a process of multiprocessing that one of several ranks of MPI's launcher started: it
    is no rank of that job, and only a library of the MPICH family could give it a world.
    """
    return (
        multiprocessing.parent_process() is not None
        and not by_torchrun(environment)
        and any(_announced(openmpi, environment) not in (None, 1) for openmpi in (False, True))
    )


class Way(enum.Enum):
    """How the ranks of a job become one MPI world."""

    OWN = "MPI finds them itself, through the process manager that started them"
    MEETING = "they meet, and a server of ours is their process manager"
    ALONE = "there is one"


def choose(
    world_size: int,
    openmpi: bool,
    environment: Mapping[str, str] = os.environ,
    meant_for_parent: bool = False,
) -> Way:
    """How ranks that have been told their rank and the size of their world come together.

    openmpi:   the MPI library is Open MPI; else it is one of the MPICH family.
    meant_for_parent: whatever a process manager says, see ``inherited``.

    A manager that announces another number of ranks is believed: MPI then says that it disagrees.
    One that announces a single rank was only used to start something on a node.
    """
    announced = None if meant_for_parent else _announced(openmpi, environment)
    if world_size == 1:
        return Way.OWN if announced == 1 else Way.ALONE
    if by_torchrun(environment) or announced in (None, 1):
        return Way.MEETING
    return Way.OWN


def _announced(openmpi: bool, environment: Mapping[str, str]) -> int | None:
    """The size of the world as a process manager tells it that this MPI library understands."""
    if not openmpi:
        found = environment.get("PMI_SIZE") if "PMI_RANK" in environment else None
    elif "OMPI_COMM_WORLD_SIZE" in environment:
        found = environment["OMPI_COMM_WORLD_SIZE"]
    else:
        found = environment.get("SLURM_STEP_NUM_TASKS") if "PMIX_RANK" in environment else None
    return int(found) if found is not None and found.isdigit() else None


@contextlib.contextmanager
def instead_of_managers(values: Mapping[str, str]) -> Iterator[None]:
    """While MPI starts: these variables, and none of any process manager that is not meant.

    Afterwards everything is as before, for processes that this one starts.
    """
    names = [name for name in os.environ if name.startswith(_MANAGERS_OWN) or name in _SITES_OWN]
    removed = {name: os.environ.pop(name) for name in names}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(removed)


def fill_environment(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    master_addr: str,
    master_port: int | str,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which many
    libraries read, where they are missing.
    """
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
    }
    for name, value in values.items():
        if name not in environment:
            environment[name] = _filled[name] = str(value)


#: What fill_environment has set.
_filled: dict[str, str] = {}


def filled(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """The variable has the value that fill_environment gave it, and says nothing of a launcher."""
    return name in _filled and environment.get(name) == _filled[name]


def check_world(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raises LaunchError where a launcher started several ranks and MPI sees only this one."""
    if size != 1 or environment.get(SINGLETON) == "1":
        return
    launcher = _launcher(environment)
    if launcher is None:
        return
    announced = environment.get(launcher.size, "1")
    if announced.isdigit() and int(announced) > 1:
        raise LaunchError(
            f"init_process_group: {launcher.name} announces {announced} ranks ({launcher.size}="
            f"{announced}), but MPI sees this process alone: {launcher.remedy}. "
            f"{SINGLETON}=1 runs a single rank all the same"
        )


def said(environment: Mapping[str, str] = os.environ) -> tuple[str, str, bool]:
    """This rank and the number of ranks, "?" where nobody says, and whether all are on this node,
    as the launcher says.
    """
    launcher = _launcher(environment)
    if launcher is None:
        return "?", "?", False
    rank, size = environment.get(launcher.rank, "?"), environment.get(launcher.size, "?")
    return rank, size, size.isdigit() and environment.get(launcher.here) == size


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank on its node, as LOCAL_RANK or the launcher says; None if nobody does."""
    launcher = _launcher(environment)
    for variable in ("LOCAL_RANK", launcher.local if launcher is not None else ""):
        if environment.get(variable, "").isdigit():
            return int(environment[variable])
    return None
