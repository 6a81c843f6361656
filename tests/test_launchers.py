"""The table of launchers: every function works for every row."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from whole_jobs import run_program

import mpicoll
from mpicoll import cli
from mpicoll.cuda import probe
from mpicoll.errors import LaunchError
from mpicoll.launch import launchers
from mpicoll.launch.environment import (
    SINGLETON,
    check_world,
    choose_bootstrap,
    find_torch_variables,
    is_started_by_mpi,
    replace_bootstrap_variables,
)
from mpicoll.launch.launchers import (
    LAUNCHERS,
    Launcher,
    PmiProtocol,
    announced,
    find_launcher,
    find_local_rank,
    is_launcher_variable,
)

#: A row that no other code knows: its tests pass, so one row is enough for a new launcher.
MADE_UP = Launcher(
    "the made-up launcher",
    detected_by=("MADEUP_JOB",),
    rank="MADEUP_RANK",
    size="MADEUP_SIZE",
    local_rank=("MADEUP_LOCAL_RANK",),
    local_size="MADEUP_LOCAL_SIZE",
    remedy="make up another",
    protocol=PmiProtocol.PMI,
    bootstrap="MADEUP_(RANK|SIZE)",
    owned="MADEUP_",
    own_gpus="MADEUP_GPUS",
)
STARTERS = [*(each for each in LAUNCHERS if each.detected_by), MADE_UP]
Environment = dict[str, str]

every_launcher = pytest.mark.parametrize("launcher", STARTERS, ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def table(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a row to the table."""
    monkeypatch.setattr(launchers, "LAUNCHERS", (*LAUNCHERS, MADE_UP))


def simulate(launcher: Launcher, rank: int = 1, size: int = 4) -> Environment:
    """Return the launcher's variables on a rank of a job on one node."""
    found = dict.fromkeys(launcher.detected_by, "7") | {
        launcher.rank: str(rank),
        launcher.size: str(size),
        **dict.fromkeys(launcher.local_rank[:1], str(rank)),
        launcher.local_size: str(size),
    }
    return {name: value for name, value in found.items() if name}


@every_launcher
def test_find_launcher(launcher: Launcher) -> None:
    environment = simulate(launcher)
    assert find_launcher(environment) is launcher
    assert any(name.endswith(mpicoll._RANK_VARIABLES) for name in environment)
    for missing in launcher.detected_by:
        rest = {name: value for name, value in environment.items() if name != missing}
        assert find_launcher(rest) is not launcher
    assert not cli.is_first_rank(environment) and cli.is_first_rank(simulate(launcher, 0))
    on_one_node = bool(launcher.size and launcher.local_size)
    assert announced(environment) == ("1", "4" if launcher.size else "?", on_one_node)


#: Variables that each launcher documents, on rank 3 of 5, which is local rank 1 of 3 on the second
#: of two nodes; and the variables that torchrun sets on that rank. "job": any port of this job.
STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_STEP_NODELIST": "n[08-09]", "SLURM_NTASKS": "5",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
PMI_3 = {"PMI_RANK": "3", "PMI_SIZE": "5"}
FLUX_3 = {
    "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "5", "FLUX_JOB_ID": "f1",
    "FLUX_JOB_NNODES": "2",
}  # fmt: skip
PALS_3 = {
    "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "3", "PALS_APID": "a",
}  # fmt: skip
PMIX_3 = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "job@1"}
ALL = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
NO_LOCAL_SIZE = {name: ALL[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
NO_SIZE = {name: ALL[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
PORT = {"MASTER_PORT": "job"}
EXPECTED: dict[str, tuple[Environment, Environment]] = {
    "torchrun": (
        ALL | {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "n8", "MASTER_PORT": "29500"}, ALL
    ),
    "Open MPI's mpirun": (
        PMIX_3 | {
            "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "5",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
        },
        ALL | PORT,
    ),
    "Intel MPI's mpirun": (
        HYDRA | {"I_MPI_HYDRA_UUID": "u"},
        ALL | PORT,
    ),
    "MPICH's mpirun": (HYDRA, ALL),
    "flux run -o pmi=simple": (FLUX_3 | PMI_3, NO_LOCAL_SIZE | PORT),
    "srun --mpi=pmi2": (STEP | PMI_3, ALL | PORT | {"MASTER_ADDR": "n08"}),
    "a PMI process manager": (
        PALS_3 | PMI_3 | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "3"}, ALL | PORT
    ),
    "MVAPICH2's mpirun_rsh": (
        {
            "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "5",
            "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "3",
            "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "a1,a[2-3]",
        },
        ALL | PORT | {"MASTER_ADDR": "a1"},
    ),
    "prterun": (PMIX_3 | {"PRTE_LAUNCHED": "1"}, {"RANK": "3"} | PORT),
    "flux run -o pmi=pmix": (FLUX_3 | PMIX_3, NO_LOCAL_SIZE | PORT),
    "PALS's mpiexec --pmi=pmix": (PALS_3 | PMIX_3, NO_SIZE | PORT),
    "srun --mpi=pmix": (STEP | PMIX_3, ALL | PORT | {"MASTER_ADDR": "n08"}),
    "a PMIx process manager": (PMIX_3, {"RANK": "3"} | PORT),
    "Flux": (FLUX_3, NO_LOCAL_SIZE | PORT),
    "srun --mpi=cray_shasta": (STEP | PALS_3, ALL | PORT | {"MASTER_ADDR": "n08"}),
    "PALS (HPE Cray's mpiexec)": (PALS_3, NO_SIZE | PORT),
    "srun": (STEP, ALL | PORT | {"MASTER_ADDR": "n08"}),
    # A batch script is one process.
    "Slurm": ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "5", "SLURM_PROCID": "0"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", [each.name for each in LAUNCHERS if each.detected_by])
def test_find_torch_variables(name: str) -> None:
    environment, expected = EXPECTED[name]
    launcher = find_launcher(environment)
    assert launcher is not None and launcher.name == name
    found = find_torch_variables(environment)
    if name == "torchrun":  # sets all six itself
        found = {key: value for key, value in found.items() if key not in environment} | ALL
    if "MASTER_PORT" in found:
        assert 1 << 14 <= int(found["MASTER_PORT"]) < 1 << 15
        assert found == find_torch_variables(environment)
        found["MASTER_PORT"] = "job"
    assert found == expected


def test_master_port_depends_only_on_the_job() -> None:
    ports = {
        (job, find_torch_variables(STEP | {"SLURM_PROCID": rank, "SLURM_STEP_ID": job})[
            "MASTER_PORT"
        ])
        for rank in "01234" for job in "0123"
    }  # fmt: skip
    assert len(ports) == len({port for _, port in ports}) == 4


@pytest.mark.parametrize(
    ("hosts", "sizes", "node", "address", "local_size"),
    [
        ("n1", "5", "0", "127.0.0.1", "5"),
        ("n[007-012],m", "4(x2),3", "1", "n007", "4"),
        ("r[0-1]n[2-3]-ib", "4(x2),3", "2", "r0n2-ib", "3"),
        ("a,b[1-2]", "4(x2),3", "3", "a", None),
        ("", "", "0", None, None),
    ],
)
def test_lists_of_slurm(
    hosts: str, sizes: str, node: str, address: str | None, local_size: str | None
) -> None:
    found = find_torch_variables(
        STEP | {"SLURM_STEP_NODELIST": hosts, "SLURM_STEP_TASKS_PER_NODE": sizes,
                "SLURM_NODEID": node}
    )  # fmt: skip
    assert (found.get("MASTER_ADDR"), found.get("LOCAL_WORLD_SIZE")) == (address, local_size)


def test_master_addr_on_one_node_is_loopback() -> None:
    hydra = HYDRA | {"MPI_LOCALNRANKS": "5"}
    for environment in (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"},
        FLUX_3 | {"FLUX_JOB_NNODES": "1"},
        hydra,
    ):
        found = find_torch_variables(environment)
        assert found["MASTER_ADDR"] == "127.0.0.1" and found["LOCAL_WORLD_SIZE"] == "5"
    rank, manager = socket.socketpair()
    with rank, manager:  # the job's name is derived from the process ID of the manager
        found = find_torch_variables(hydra | {"PMI_FD": str(rank.fileno())})
    assert "MASTER_PORT" in found


def test_no_torch_variables_in_a_child_or_without_a_launcher() -> None:
    assert find_torch_variables(HYDRA | {"PMI_FD": "987"}) == {}  # inherited
    assert find_torch_variables({}) == {}


HOOKED = "import sys, mpicoll; print(sys.excepthook is not sys.__excepthook__)"


@pytest.mark.parametrize(
    ("name", "size", "command", "is_hooked"),
    [
        ("Open MPI's mpirun", 4, ["-c", HOOKED], True),
        ("Open MPI's mpirun", 1, ["-c", HOOKED], False),
        ("torchrun", 4, ["-c", HOOKED], False),
        ("srun", 4, ["-c", f"import _pytest; {HOOKED}"], False),
        ("srun", 4, ["-ic", HOOKED], False),
        ("", 4, ["-c", HOOKED], False),
    ],
)
def test_import_installs_exit_hooks_in_a_rank(
    name: str, size: int, command: list[str], is_hooked: bool
) -> None:
    found = next((simulate(each, 1, size) for each in LAUNCHERS if each.name == name), {})
    done = run_program(sys.executable, *command, env=os.environ | found)
    assert (done.returncode, done.stdout.split()) == (0, [str(is_hooked)]), done


@every_launcher
def test_check_world_rejects_separate_single_ranks(launcher: Launcher) -> None:
    environment = simulate(launcher)
    check_world(4, environment)
    check_world(1, simulate(launcher, 0, 1))
    if launcher.size:
        with pytest.raises(LaunchError) as caught:
            check_world(1, environment)
        announces = f"{launcher.name} announces 4 ranks"
        for words in (announces, f"{launcher.size}=4", launcher.remedy, f"{SINGLETON}=1"):
            assert words and words in str(caught.value)
        check_world(1, environment | {SINGLETON: "1"})
    else:
        check_world(1, environment)


@every_launcher
@pytest.mark.parametrize("protocol", PmiProtocol)
def test_bootstrap_by_protocol(launcher: Launcher, protocol: PmiProtocol) -> None:
    environment = simulate(launcher)
    assert is_started_by_mpi(environment) == (launcher.protocol is not None)
    is_supported = launcher.protocol is protocol and launcher.size
    expected = "manager" if is_supported else "server"
    assert choose_bootstrap(4, protocol is PmiProtocol.PMIX, environment) == expected


@every_launcher
def test_replace_bootstrap_variables(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in simulate(launcher).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with replace_bootstrap_variables({"PMI_FD": "9"}):
        assert (launcher.rank in os.environ) == (launcher.protocol is None)
        assert os.environ["PMI_FD"] == "9"
    assert dict(os.environ) == before


@every_launcher
def test_probes_do_not_inherit_launcher_variables(launcher: Launcher) -> None:
    environment = simulate(launcher) | dict.fromkeys(launcher.local_rank, "1")
    environment |= {launcher.own_gpus: "1"} if launcher.own_gpus else {}
    others = {"LANG": "C", "UCX_TLS": "all", "OMPI_MCA_pml": "ob1", "PMIX_MCA_psec": "x"}
    kept = probe._without_launcher(environment | others)
    assert kept.items() >= others.items() and not kept.keys() & environment.keys()


@pytest.mark.parametrize("name", ["PBS_JOBID", "LSB_JOBID"])
def test_batch_systems_are_not_launchers(name: str) -> None:
    assert find_launcher({name: "7"}) is None
    assert is_launcher_variable(name)


@pytest.mark.parametrize("outer", [FLUX_3, PALS_3, STEP | PALS_3])
def test_prterun_inside_a_step_of_another_launcher(outer: Environment) -> None:
    """The step has one process per node, so its local rank is not the local rank of prterun's."""
    environment = outer | {"PMIX_RANK": "4", "PRTE_LAUNCHED": "1"}
    launcher = find_launcher(environment)
    assert launcher is not None and launcher.name == "prterun"
    assert announced(environment)[:2] == ("4", "?")
    assert find_local_rank(environment) is None


def test_launcher_without_a_size_inside_slurm() -> None:
    environment = {"PMIX_RANK": "1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert announced(environment) == ("1", "?", False)
    assert not cli.is_first_rank(environment)
    with pytest.raises(LaunchError, match="Slurm announces 4 ranks"):
        check_world(1, environment)
