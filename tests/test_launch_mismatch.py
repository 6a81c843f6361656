"""The launcher of one MPI with the library of another."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpicoll.launch.launchers import (
    LAUNCHERS,
    PmiProtocol,
    is_bootstrap_variable,
    is_launcher_variable,
)
from mpicoll.launch.mismatch import LIBRARIES, find_foreign, find_mpi, find_stale

MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))

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
        (INTEL, OMPI_MPIRUN, "Open MPI's mpirun"),
        (OPENMPI, HYDRA, "MPICH's mpirun"),
        (OPENMPI, INTEL_MPIRUN, "Intel MPI's mpirun"),
        (MPICH, PMIX, "srun --mpi=pmix"),
        (INTEL, PRTERUN, "prterun"),
        (OPENMPI, PMI2, "srun --mpi=pmi2"),
        (MPICH, PRTERUN, "prterun"),
        (MPICH, OMPI_MPIRUN | SRUN, "Open MPI's mpirun"),
        (INTEL, OMPI_MPIRUN | SRUN, "Open MPI's mpirun"),  # its daemons are started by srun
        # What works.
        (MPICH, HYDRA, None),
        (MPICH, INTEL_MPIRUN, None),
        (INTEL, HYDRA, None),
        (INTEL, INTEL_MPIRUN, None),
        (OPENMPI, OMPI_MPIRUN, None),
        (OPENMPI, PRTERUN, None),
        (MPICH, PMI2, None),
        (OPENMPI, PMIX, None),
        (MPICH, HYDRA | PMIX, None),  # mpirun where MpiDefault=pmix
        (OPENMPI, OMPI_MPIRUN | PMI2, None),  # mpirun in a step of --mpi=pmi2
        (MPICH, {}, None),
        (OPENMPI, SRUN, None),  # --mpi=none: the number of ranks shows it later
        (MPICH, OMPI_MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (OPENMPI, HYDRA | {"PMI_SIZE": "1"}, None),
        (MPICH, PRTERUN | {"PMIX_RANK": "0"}, None),  # the others' errors end the job
        (MPICH, PMIX | {"PMIX_RANK": "0"}, "srun --mpi=pmix"),  # which says how many there are
        (MPICH, OMPI_MPIRUN | TORCHRUN, None),
        (MPICH, OMPI_MPIRUN | {"MPICOLL_ALLOW_SINGLETON": "1"}, None),
        (OPENMPI, HYDRA | {"PMI_FD": "987"}, None),  # the variables were a parent's
    ],
)
def test_what_is_refused(version: str, environment: dict[str, str], launcher: str | None) -> None:
    library = find_mpi(version, environment, has=lambda name: False)
    assert library is not None
    foreign, found = find_foreign(library, environment)
    assert (None if found is None else found.name) == launcher
    spoken = {PmiProtocol.PMI} if "PMI_RANK" in environment else set()
    spoken |= {PmiProtocol.PMIX} if "PMIX_RANK" in environment else set()
    assert foreign == spoken - {library.protocol}


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("version", "environment", "functions"),
    [
        ("Open MPI v4.1.6, package: Debian OpenMPI", {}, ()),  # may be built with PMI-2
        (MPICH, {}, ("PMIx_Init",)),
        (MPICH, {}, ("PMI2_Init",)),  # Slurm's, or PMIx's own
        (INTEL, {"I_MPI_PMI": "pmix"}, ()),
        (INTEL, {"I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi2.so"}, ()),
        (INTEL, PMIX, ()),
        (INTEL, INTEL_MPIRUN | PMIX, ()),
        (INTEL, PRTERUN | {"PALS_RANKID": "1"}, ()),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", {}, ()),
        ("MVAPICH2 Version      :\t2.3.7", {}, ()),
        ("IBM Spectrum MPI v10.4", {}, ()),
    ],
)
def test_what_may_understand_more(
    version: str, environment: dict[str, str], functions: tuple[str, ...]
) -> None:
    assert find_mpi(version, environment, has=functions.__contains__) is None


def run(announced: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these variables instead of those of a launcher."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not is_launcher_variable(name) and not is_bootstrap_variable(name)
    }
    return subprocess.run(
        [sys.executable, *words],
        env=kept | announced,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def foreign() -> dict[str, str]:
    """What the launcher of the other kind of MPI sets."""
    script = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI\n"
        "from mpicoll.launch.mismatch import find_mpi\n"
        "found = find_mpi(MPI.Get_library_version()); print(found and found.protocol.name)"
    )
    spoken = run({}, "-c", script).stdout.strip()
    if spoken not in PmiProtocol.__members__:
        pytest.skip("this library may understand both")
    pmix = OMPI_MPIRUN | {"PMIX_NAMESPACE": "prterun-there-1@1"}
    return pmix if PmiProtocol[spoken] is PmiProtocol.PMI else INTEL_MPIRUN


def test_this_library(foreign: dict[str, str]) -> None:
    """It neither aborts nor starts alone. What `doctor` prints is this text."""
    done = run(foreign, "-c", "from mpicoll import cli; print(cli.start_group())")
    assert done.returncode == 0, done
    assert "the launcher and the MPI library do not match" in done.stdout, done
    assert "as one of 2 ranks" in done.stdout and "mpi4py loads" in done.stdout, done


WORLD_SIZE = "import mpicoll as m; m.init_process_group(); print(m.get_world_size())"


def test_one_rank_needs_no_launcher(foreign: dict[str, str]) -> None:
    alone = {name: "1" if name.endswith("SIZE") else value for name, value in foreign.items()}
    done = run(alone, "-c", WORLD_SIZE)
    assert (done.returncode, done.stdout) == (0, "1\n"), done


def test_rank_0_of_a_launcher_that_gives_no_number(foreign: dict[str, str]) -> None:
    """It may be alone, and is told how to say so; any other rank is not."""
    if "PMIX_NAMESPACE" not in foreign:
        pytest.skip("this library understands PRRTE")
    done = run(PRTERUN | {"PMIX_RANK": "0"}, "-c", WORLD_SIZE)
    assert (done.returncode, done.stdout) == (0, "1\n"), done
    assert "does not announce the number of ranks" in done.stderr, done
    meant = {"PMIX_RANK": "0", "MPICOLL_ALLOW_SINGLETON": "1"}
    assert "does not say" not in run(PRTERUN | meant, "-c", WORLD_SIZE).stderr
    done = run(PRTERUN, "-c", WORLD_SIZE)
    assert done.returncode != 0 and "do not match" in done.stderr, done


GONE = (
    "import mpicoll as m\n"
    "try: m.init_process_group()\n"
    "except m.LaunchError as error: print(error)\n"
    "else: print(m.get_world_size())"
)


@pytest.fixture(scope="module")
def stale() -> dict[str, str]:
    """What this MPI's launcher has left in a process that it does not serve."""
    if not MPIEXEC:
        pytest.skip("TEST_MPICOLL_MPIEXEC names no mpiexec")
    tell = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        [*MPIEXEC, "-n", "1", sys.executable, "-c", tell],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return {name: value for name, value in found.items() if is_bootstrap_variable(name)}


def test_variables_of_a_launcher_that_is_gone(stale: dict[str, str]) -> None:
    """As in a notebook of `srun --pty`: MPI would abort, or crash."""
    done = run(stale, "-c", GONE)
    assert done.returncode == 0 and "a launcher that did not start it" in done.stdout, done
    unset = done.stdout.partition("unset ")[2].partition(";")[0].split()
    assert {"PMI_FD", "PMIX_NAMESPACE"} & set(unset), done
    left = {name: value for name, value in stale.items() if name not in unset}
    assert run(left, "-c", GONE).stdout == "1\n"
    assert run(stale | {"MPICOLL_ALLOW_SINGLETON": "1"}, "-c", GONE).stdout == "1\n"


@pytest.mark.any_mpi
def test_a_manager_counts_as_gone_if_its_descriptor_or_port_is(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        pmi = {"PMI_RANK": "0", "PMI_SIZE": "1"}
        pmix = {"PMIX_RANK": "0", "PMIX_SERVER_URI41": f"prte-1@0.0;tcp4://127.0.0.1:{port}"}
        there = [
            pmi,  # a manager that is found in another way
            pmi | {"PMI_FD": str(ours.fileno())},
            pmi | {"PMI_PORT": f"127.0.0.1:{port}"},
            pmi | {"PMI_PORT": "elsewhere:1"},
            pmix,
            {"PMIX_RANK": "0", "PMIX_SERVER_TMPDIR": str(tmp_path)},
        ]
        for environment in there:
            assert find_stale(list(PmiProtocol), environment) == {}, environment
        used = len([*Path("/proc/self/fd").iterdir()])
        with (tmp_path / "file").open("w") as file:
            for other in (str(server.fileno()), str(file.fileno()), "-1", "none"):
                assert [*find_stale(list(PmiProtocol), pmi | {"PMI_FD": other})] == ["PMI_FD"], (
                    other
                )
        assert len([*Path("/proc/self/fd").iterdir()]) == used
    gone = [
        (pmi | {"PMI_FD": "99999"}, "PMI_FD"),
        (pmi | {"PMI_PORT": f"127.0.0.1:{port}"}, "PMI_PORT"),
        (pmix, "PMIX_SERVER_URI41"),
        ({"PMIX_RANK": "0", "PMIX_SERVER_TMPDIR": str(tmp_path / "no")}, "PMIX_SERVER_TMPDIR"),
    ]
    for environment, name in gone:
        assert [*find_stale(list(PmiProtocol), environment)] == [name]
    assert find_stale([PmiProtocol.PMI], pmix) == {}  # which this library does not read


@pytest.mark.any_mpi
def test_each_family_is_there_once() -> None:
    for version in (MPICH, INTEL, OPENMPI):
        assert find_mpi(version, {}, has=lambda name: False) in LIBRARIES
    names = {each.name for each in LAUNCHERS}
    assert all(
        {*each.flexible_launchers, each.unsupported_launcher} <= names | {""} for each in LIBRARIES
    )
