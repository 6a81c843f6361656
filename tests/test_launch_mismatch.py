"""A launcher and an MPI library that do not match are detected before MPI_Init."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from whole_jobs import MPIEXEC, run_program, run_python

from mpicoll.launch.launchers import PmiProtocol, is_bootstrap_variable
from mpicoll.launch.mismatch import find_foreign, find_mpi, is_stale

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
INTEL = "Intel(R) MPI Library 2021.18.1 for Linux* OS\n"
OPENMPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0"

OMPI_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
INTEL_MPIRUN = HYDRA | {"I_MPI_HYDRA_UUID": "b551"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
PMI2 = SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2"}
PMIX = SRUN | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
PRTERUN = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun", "PRTE_LAUNCHED": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1"}


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("version", "environment", "launcher"),
    [
        (MPICH, OMPI_MPIRUN, "Open MPI's mpirun"),
        (OPENMPI, HYDRA, "MPICH's mpirun"),
        (OPENMPI, INTEL_MPIRUN, "Intel MPI's mpirun"),
        (MPICH, PMIX, "srun --mpi=pmix"),
        (OPENMPI, PMI2, "srun --mpi=pmi2"),
        (MPICH, PRTERUN, "prterun"),
        (INTEL, OMPI_MPIRUN | SRUN, "Open MPI's mpirun"),  # its daemons are started by srun
        # Supported pairs:
        (MPICH, HYDRA, None),
        (INTEL, INTEL_MPIRUN, None),
        (OPENMPI, OMPI_MPIRUN, None),
        (OPENMPI, PRTERUN, None),
        (MPICH, PMI2, None),
        (OPENMPI, PMIX, None),
        (MPICH, HYDRA | PMIX, None),  # mpirun where MpiDefault=pmix
        (OPENMPI, OMPI_MPIRUN | PMI2, None),  # mpirun in a step of --mpi=pmi2
        (MPICH, {}, None),
        (OPENMPI, SRUN, None),  # --mpi=none: check_world detects it later
        (MPICH, OMPI_MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (MPICH, PMIX | {"PMIX_RANK": "0"}, "srun --mpi=pmix"),
        (MPICH, OMPI_MPIRUN | TORCHRUN, None),
        (MPICH, OMPI_MPIRUN | {"MPICOLL_ALLOW_SINGLETON": "1"}, None),
        (OPENMPI, HYDRA | {"PMI_FD": "987"}, None),  # inherited from a parent process
    ],
)
def test_find_foreign(version: str, environment: dict[str, str], launcher: str | None) -> None:
    library = find_mpi(version, environment, has=lambda name: False)
    assert library is not None
    foreign, found = find_foreign(library, environment)
    assert (None if found is None else found.name) == launcher
    offered = {PmiProtocol.PMI} if "PMI_RANK" in environment else set()
    offered |= {PmiProtocol.PMIX} if "PMIX_RANK" in environment else set()
    assert foreign == offered - {library.protocol}


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("version", "environment", "functions"),
    [
        ("Open MPI v4.1.6, package: Debian OpenMPI", {}, ()),  # may be built with PMI-2
        (MPICH, {}, ("PMIx_Init",)),
        (MPICH, {}, ("PMI2_Init",)),  # of Slurm or PMIx
        (INTEL, {"I_MPI_PMI": "pmix"}, ()),
        (INTEL, {"I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi2.so"}, ()),
        (INTEL, INTEL_MPIRUN | PMIX, ()),
        (INTEL, PRTERUN | {"PALS_RANKID": "1"}, ()),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", {}, ()),
        ("IBM Spectrum MPI v10.4", {}, ()),
    ],
)
def test_find_mpi_returns_none_for_unknown_protocols(
    version: str, environment: dict[str, str], functions: tuple[str, ...]
) -> None:
    assert find_mpi(version, environment, has=functions.__contains__) is None


@pytest.fixture(scope="module")
def foreign() -> dict[str, str]:
    """Variables of a launcher whose protocol this MPI does not support."""
    script = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI\n"
        "from mpicoll.launch.mismatch import find_mpi\n"
        "found = find_mpi(MPI.Get_library_version()); print(found and found.protocol.name)"
    )
    supported = run_python(script).stdout.strip()
    if supported not in PmiProtocol.__members__:
        pytest.skip("this library may support both protocols")
    pmix = OMPI_MPIRUN | {"PMIX_NAMESPACE": "prterun-there-1@1"}
    return pmix if PmiProtocol[supported] is PmiProtocol.PMI else INTEL_MPIRUN


def test_foreign_launcher_raises(foreign: dict[str, str]) -> None:
    """`doctor` prints the same text."""
    done = run_python("from mpicoll import cli; print(cli.start_group())", **foreign)
    assert done.returncode == 0, done
    assert "the launcher and the MPI library do not match" in done.stdout, done
    assert "as one of 2 ranks" in done.stdout and "mpi4py loads" in done.stdout, done


PRINT_SIZE_OR_ERROR = (
    "import mpicoll as m\n"
    "try: m.init_process_group()\n"
    "except m.LaunchError as error: print(error)\n"
    "else: print(m.get_world_size())"
)


def test_single_rank_of_a_foreign_launcher_works(foreign: dict[str, str]) -> None:
    alone = {name: "1" if name.endswith("SIZE") else value for name, value in foreign.items()}
    done = run_python(PRINT_SIZE_OR_ERROR, **alone)
    assert (done.returncode, done.stdout) == (0, "1\n"), done


def test_foreign_launcher_without_a_size_raises(foreign: dict[str, str]) -> None:
    if "PMIX_NAMESPACE" not in foreign:
        pytest.skip("this library supports PRRTE")
    rank_0 = PRTERUN | {"PMIX_RANK": "0"}
    assert "do not match" in run_python(PRINT_SIZE_OR_ERROR, **rank_0).stdout
    allowed = rank_0 | {"MPICOLL_ALLOW_SINGLETON": "1"}
    assert run_python(PRINT_SIZE_OR_ERROR, **allowed).stdout == "1\n"


@pytest.fixture(scope="module")
def stale() -> dict[str, str]:
    """Variables of this MPI's launcher after it has ended."""
    if not MPIEXEC:
        pytest.skip("TEST_MPICOLL_MPIEXEC names no mpiexec")
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    done = run_program(*MPIEXEC, "-n", "1", sys.executable, "-c", script)
    found = json.loads(done.stdout)
    if "PMI_FD" not in found:
        pytest.skip("this launcher does not use PMI_FD")
    return {name: value for name, value in found.items() if is_bootstrap_variable(name)}


def test_stale_launcher_variables_raise(stale: dict[str, str]) -> None:
    """For example in a notebook of `srun --pty`. MPI would abort or crash."""
    done = run_python(PRINT_SIZE_OR_ERROR, **stale)
    assert done.returncode == 0 and "a launcher that did not start it" in done.stdout, done
    unset = done.stdout.partition("unset ")[2].partition(";")[0].split()
    assert "PMI_FD" in unset, done
    left = {name: value for name, value in stale.items() if name not in unset}
    assert run_python(PRINT_SIZE_OR_ERROR, **left).stdout == "1\n"
    assert run_python(PRINT_SIZE_OR_ERROR, **stale, MPICOLL_ALLOW_SINGLETON="1").stdout == "1\n"


@pytest.mark.any_mpi
def test_is_stale_checks_the_descriptor() -> None:
    rank, manager = socket.socketpair()
    pmi = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    with rank, manager, socket.socket() as unconnected:
        assert not is_stale(pmi)  # a manager that MPI finds in another way
        assert not is_stale(pmi | {"PMI_FD": str(rank.fileno())})
        for other in (unconnected.fileno(), 1, "none", 99999):
            assert is_stale(pmi | {"PMI_FD": str(other)}), other
