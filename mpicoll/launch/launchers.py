"""The table of launchers and their environment variables."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class PmiProtocol(enum.Enum):
    """Protocol between a process manager and MPI libraries."""

    PMI = "PMI"  # MPICH family
    PMIX = "PMIx"  # Open MPI


class Launcher(NamedTuple):
    """One launcher or process manager.

    Most fields are names of environment variables, "" if the launcher has none. Patterns are
    regular expressions that match at the start of a name.
    """

    name: str  # in messages
    #: Set in every process that it starts. Empty for a batch system.
    detected_by: tuple[str, ...] = ()
    rank: str = ""
    size: str = ""  # the number of ranks
    local_rank: tuple[str, ...] = ()  # the first one that is set is used
    local_size: str = ""  # the number of ranks on the node
    local_sizes: str = ""  # the number of ranks of each node in Slurm's format: "4(x2),3"
    node_rank: str = ""  # the index of this node in local_sizes
    node_count: str = ""
    #: The names of the nodes in Slurm's format: "n[1-3],m7". Rank 0 runs on the first by default.
    hosts: str = ""
    #: The same values on all ranks, other values in another job. Unset variables are skipped.
    identity: tuple[str, ...] = ()
    is_batch: bool = False  # it starts a single process, not ranks
    remedy: str = ""  # advice if MPI does not see the ranks that it started
    #: Between its process manager and MPI; None: it has no process manager.
    protocol: PmiProtocol | None = None
    #: Pattern of the variables by which an MPI library finds its ranks. They are hidden while MPI
    #: starts in another way.
    bootstrap: str = ""
    owned: str = ""  # pattern of the variables that are hidden from processes outside this job
    own_gpus: str = ""  # set if each process has separate GPUs
    #: The ranks are children of its process on their node, a Python process, and end with it.
    is_parent: bool = False
    manager: str = ""  # set on all ranks by a process manager that supports MPI_Comm_spawn

    def is_present(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether it started this process."""
        return bool(self.detected_by) and all(name in environment for name in self.detected_by)


_PRINTS = "(python -m mpi4py --mpi-library prints the library)"
_SRUN_REMEDY = (
    "start srun with the process manager of the MPI library: --mpi=pmi2 for MPICH and its family, "
    "--mpi=pmix for Open MPI (srun --mpi=list prints the available ones)"
)
_FLUX_REMEDY = (
    "start flux run with the process manager of the MPI library: -o pmi=simple for MPICH and its "
    "family, -o pmi=pmix for Open MPI"
)
_PMI_REMEDY = (
    "start the job with the mpirun of the MPI library that mpi4py loads (for Open MPI also srun "
    f"--mpi=pmix), or configure mpi4py to load a library of the MPICH family {_PRINTS}"
)
_PMIX_REMEDY = (
    "use the launcher of the MPI library that mpi4py loads, or configure mpi4py to load Open MPI "
    f"{_PRINTS}"
)

#: Variables that identify a job of a batch system.
_BATCH_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")

# Launchers with several rows, which differ in the protocol.
_SRUN = Launcher(
    "srun", detected_by=("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS", local_rank=("SLURM_LOCALID",),
    local_sizes="SLURM_STEP_TASKS_PER_NODE", node_rank="SLURM_NODEID", hosts="SLURM_STEP_NODELIST",
    identity=("SLURM_JOB_ID", "SLURM_STEP_ID"), remedy=_SRUN_REMEDY, own_gpus="SLURM_GPUS_PER_TASK",
)  # fmt: skip
_FLUX = Launcher(
    "Flux", detected_by=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), rank="FLUX_TASK_RANK",
    size="FLUX_JOB_SIZE", local_rank=("FLUX_TASK_LOCAL_ID",), node_count="FLUX_JOB_NNODES",
    identity=("FLUX_JOB_ID",), remedy=_FLUX_REMEDY,
)  # fmt: skip
_PALS = Launcher(
    "PALS (HPE Cray's mpiexec)", detected_by=("PALS_RANKID",), rank="PALS_RANKID",
    local_rank=("PALS_LOCAL_RANKID",), local_size="PALS_LOCAL_SIZE", identity=("PALS_APID",),
)  # fmt: skip
_HYDRA = Launcher(
    "MPICH's mpirun", detected_by=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), rank="PMI_RANK",
    size="PMI_SIZE", local_rank=("MPI_LOCALRANKID",), local_size="MPI_LOCALNRANKS",
    remedy=_PMI_REMEDY, protocol=PmiProtocol.PMI,
)  # fmt: skip
_PMIX = Launcher(
    "a PMIx process manager", detected_by=("PMIX_RANK",), rank="PMIX_RANK",
    identity=("PMIX_NAMESPACE",), remedy=_PMIX_REMEDY, protocol=PmiProtocol.PMIX,
)  # fmt: skip

#: The innermost launcher first: an mpirun inside a Slurm job is an mpirun.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "torchrun", detected_by=("TORCHELASTIC_RUN_ID", "WORLD_SIZE"), rank="RANK",
        size="WORLD_SIZE", local_rank=("LOCAL_RANK",), local_size="LOCAL_WORLD_SIZE",
        remedy="call init_process_group with init_method='env://' or without init_method, before "
        "mpi4py.MPI is imported",
        owned=r"TORCHELASTIC_|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT))$",
        is_parent=True,
    ),
    Launcher(
        "Open MPI's mpirun", detected_by=("OMPI_COMM_WORLD_SIZE",), rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE", local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE", hosts="SLURM_JOB_NODELIST",
        identity=("PMIX_NAMESPACE",),
        remedy="use the mpirun of the MPI library that mpi4py loads, or configure mpi4py to load "
        f"Open MPI {_PRINTS}",
        protocol=PmiProtocol.PMIX, bootstrap="OMPI_COMM_WORLD_", manager="OMPI_COMM_WORLD_SIZE",
        owned=r"(OMPI|PRTE)_(?!MCA_|ALLOW_)|OMPI_MCA_(orte|ess|pmix|initial_wdir|num_procs)",
    ),
    _HYDRA._replace(
        name="Intel MPI's mpirun", detected_by=("PMI_RANK", "PMI_SIZE", "I_MPI_HYDRA_UUID"),
        identity=("I_MPI_HYDRA_UUID",),
    ),
    _HYDRA,
    _FLUX._replace(
        name="flux run -o pmi=simple",
        detected_by=("PMI_RANK", "PMI_SIZE", "FLUX_TASK_RANK"), rank="PMI_RANK", size="PMI_SIZE",
        protocol=PmiProtocol.PMI,
    ),
    _SRUN._replace(
        name="srun --mpi=pmi2", detected_by=("PMI_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
        rank="PMI_RANK", size="PMI_SIZE", protocol=PmiProtocol.PMI,
    ),
    Launcher(
        "a PMI process manager", detected_by=("PMI_RANK", "PMI_SIZE"), rank="PMI_RANK",
        size="PMI_SIZE", local_rank=("PMI_LOCAL_RANK",), local_size="PMI_LOCAL_SIZE",
        identity=("PALS_APID", *_BATCH_JOB), remedy=_PMI_REMEDY, protocol=PmiProtocol.PMI,
        bootstrap=r"PMI2?_|MPI_LOCALRANKID|MPI_LOCALNRANKS"
        r"|(I_MPI_PMI|I_MPI_PMI_LIBRARY|MPIR_CVAR_PMI_VERSION|MPICH_PMI_VERSION)$",
        manager="HYDI_CONTROL_FD",
        owned=r"PMI2?_|MPI_LOCAL|HYDI?_|HYDRA_|I_MPI_(HYDRA|INFO|PMI)",
    ),
    Launcher(
        "MVAPICH2's mpirun_rsh", detected_by=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank="MV2_COMM_WORLD_RANK", size="MV2_COMM_WORLD_SIZE",
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",), local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        hosts="SLURM_JOB_NODELIST", identity=_BATCH_JOB,
        remedy=f"configure mpi4py to load MVAPICH2 {_PRINTS}, or use the mpirun of the library "
        "that it loads",
        protocol=PmiProtocol.PMI, bootstrap="MV2_COMM_WORLD_", owned="MV2_COMM_WORLD_",
    ),
    _PMIX._replace(
        name="prterun", detected_by=("PMIX_RANK", "PRTE_LAUNCHED")),
    _FLUX._replace(
        name="flux run -o pmi=pmix", detected_by=("PMIX_RANK", "FLUX_TASK_RANK"),
        rank="PMIX_RANK", protocol=PmiProtocol.PMIX,
    ),
    _PALS._replace(
        name="PALS's mpiexec --pmi=pmix", detected_by=("PMIX_RANK", "PALS_RANKID"),
        rank="PMIX_RANK", remedy=_PMIX_REMEDY, protocol=PmiProtocol.PMIX,
    ),
    _SRUN._replace(
        name="srun --mpi=pmix", detected_by=("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
        rank="PMIX_RANK", protocol=PmiProtocol.PMIX,
    ),
    _PMIX._replace(bootstrap=r"PMIX_|PRTE_LAUNCHED$", owned=r"PMIX_(?!MCA_)"),
    _FLUX._replace(owned="FLUX_"),
    _SRUN._replace(
        name="srun --mpi=cray_shasta", detected_by=("PALS_RANKID", "SLURM_STEP_NUM_TASKS"),
        rank="PALS_RANKID",
    ),
    _PALS._replace(owned="PALS_"),
    _SRUN._replace(owned="SLURM"),
    Launcher(
        "Slurm", detected_by=("SLURM_JOB_ID", "SLURM_NTASKS"), rank="SLURM_PROCID",
        size="SLURM_NTASKS", local_rank=("SLURM_LOCALID",), is_batch=True,
        remedy="the batch script runs once: start the program in it with srun or mpirun",
    ),
    Launcher("PBS", owned="PBS_"),
    Launcher("LSF", owned="LSB_"),
)  # fmt: skip
#: The variables of a process without a launcher: none.
_NONE = Launcher("")


def find_launchers(environment: Mapping[str, str] = os.environ) -> Iterator[Launcher]:
    """Yield the launchers that started this process, the innermost first."""
    return (launcher for launcher in LAUNCHERS if launcher.is_present(environment))


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the innermost launcher, None without one."""
    return next(find_launchers(environment), None)


def announced(environment: Mapping[str, str] = os.environ) -> tuple[str, str, bool]:
    """Return this rank and the number of ranks from the launcher's variables, "?" if not set, and
    whether all ranks are on this node according to the launcher.
    """
    launcher = find_launcher(environment) or _NONE
    rank, size = environment.get(launcher.rank, "?"), environment.get(launcher.size, "?")
    return rank, size, size.isdigit() and find_local_size(environment) == int(size)


def find_local_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this node, None if the launcher does not set it."""
    launcher = find_launcher(environment) or _NONE
    found = environment.get(launcher.local_size, "")
    if not found and environment.get(launcher.node_count) == "1":
        found = environment.get(launcher.size, "")
    if not found:
        # "4(x2),3" is 4, 4, 3
        items = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(launcher.local_sizes, ""))
        sizes = [size for size, times in items for _ in range(int(times or 1))]
        node = environment.get(launcher.node_rank, "")
        found = sizes[int(node)] if node.isdigit() and int(node) < len(sizes) else ""
    return int(found) if found.isdigit() else None


def find_first_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the first host, "" if the launcher does not set a list of hosts."""
    hosts = environment.get((find_launcher(environment) or _NONE).hosts, "")
    first = re.match(r"([^\[,]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first[0]) if first else ""


def find_identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that identifies this job, the same on all ranks; "" if there is none."""
    names = (find_launcher(environment) or _NONE).identity
    return " ".join(f"{name}={environment[name]}" for name in names if name in environment)


def find_rank(environment: Mapping[str, str] = os.environ) -> str:
    """Return the first set rank variable of any launcher, "" if none is set."""
    names = (launcher.rank for launcher in LAUNCHERS)
    return next((environment[name] for name in names if environment.get(name)), "")


def find_local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the local rank from LOCAL_RANK or the launcher's variable; None if neither is set."""
    for name in ("LOCAL_RANK", *(find_launcher(environment) or _NONE).local_rank):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def is_bootstrap_variable(
    name: str, protocols: Collection[PmiProtocol] = tuple(PmiProtocol)
) -> bool:
    """Return whether MPI libraries with these protocols read the variable to find their ranks."""
    return any(
        each.protocol in protocols and each.bootstrap and re.match(each.bootstrap, name)
        for each in LAUNCHERS
    )


def is_launcher_variable(name: str) -> bool:
    """Return whether a launcher sets this variable only for the ranks of its job."""
    return any(each.owned and re.match(each.owned, name) for each in LAUNCHERS)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process outside the job, in which mpicoll can be imported."""
    kept = {name: value for name, value in environment.items() if not is_launcher_variable(name)}
    paths = filter(None, [kept.get("PYTHONPATH"), str(Path(__file__).parents[2])])
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}
