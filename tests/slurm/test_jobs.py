"""The batch scripts and srun on one or two nodes of a Slurm cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import (
    LIMIT,
    MPI,
    NODES,
    RANKS,
    ROOT,
    VENDOR,
    cancel,
    command,
    environment,
    output,
    srun,
    start,
    submit,
    wait,
    wait_until,
)
from mpicoll.machine import format_ranges

OPENMPI = VENDOR == "Open MPI"
SCRIPTS = sorted(path.name for path in (ROOT / "jobs").glob("*.sbatch"))
SHORT = ("--epochs", "1", "--target", "0")
HELLO = (sys.executable, "-m", "mpicoll", "hello")
ALL = (f"--nodes={NODES}", "--ntasks-per-node=2", "--kill-on-bad-exit=1")

not_openmpi = pytest.mark.skipif(OPENMPI, reason="Open MPI needs its own launcher")
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Cancel the jobs of a failed test."""
    yield
    command("scancel", f"--user={os.getuid()}")
    wait_until(lambda: not command("squeue", "-h"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The working directory of jobs, with a link to jobs/. Prints the output after a failure."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    yield tmp_path
    for path in sorted(tmp_path.glob("*.out")):
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")


def completed(job: str, folder: Path) -> str:
    """Wait for a job, assert that it completed, and return its output."""
    ended = wait(job, folder)
    assert ended.state == "COMPLETED", f"{ended.state}: {ended.out}"
    return ended.out


def assert_one_world(out: str) -> None:
    """Assert that the job trained with all ranks, two on each node."""
    assert f"digits on {RANKS} ranks" in out, out
    hosts = re.findall(r"^rank \d+ on (\S+):", out, re.MULTILINE)
    assert len(hosts) == RANKS and len(set(hosts)) == NODES, out
    assert "is reached" in out, out


@pytest.mark.parametrize("script", SCRIPTS)
def test_sbatch_accepts_the_script(script: str) -> None:
    words = ["sbatch", "--test-only", f"--nodes={NODES}", ROOT / "jobs" / script]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("launch", "variables"),
    [
        ("mpirun", {}),
        (f"srun:{MPI}", {}),
        # MPICH's mpirun starts its proxies by srun, here with PMIx by default.
        ("mpirun", {"SLURM_MPI_TYPE": "pmix"}),
        pytest.param(
            "torchrun",
            {"JOB": "train_digits_ddp"},
            marks=[needs_torch, not_openmpi, pytest.mark.slow],
        ),
    ],
)
def test_launchers(launch: str, variables: dict[str, str], folder: Path) -> None:
    out = completed(submit("digits.sbatch", folder, *SHORT, LAUNCH=launch, **variables), folder)
    assert_one_world(out)
    assert "Sorry" not in out, out  # Open MPI's PMIx, without psec
    assert ("DDP over mpicoll" in out) == (launch == "torchrun")


#: A script for torchrun: reads torchrun's variables and creates a store at MASTER_ADDR.
TORCHRUN_SCRIPT = """
import os
import torch
import torch.distributed as dist
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
rank, local_rank, size, local_size = (int(os.environ[name]) for name in names)
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(host, port, size, rank == 0, multi_tenant=True)
dist.init_process_group("gloo")
assert rank == dist.get_rank() and size == dist.get_world_size()
total = torch.tensor(rank)
dist.all_reduce(total)
line = f"{rank} {local_rank} {size} {local_size} {total} {dist.group.WORLD.name()}\\n"
os.write(1, line.encode())
dist.destroy_process_group()
"""


@needs_torch
@pytest.mark.parametrize("launch", ["mpirun", "srun"])
def test_run_executes_a_script_for_torchrun(launch: str, tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(TORCHRUN_SCRIPT)
    words: list[str | Path] = [f"--mpi={MPI}"]
    if launch == "mpirun":
        words = [Path(sys.executable).with_name("mpirun"), "-n", str(RANKS)]
        if not OPENMPI:  # MPICH's ranks of several nodes share no port before MPI starts
            words += ["-genv", "MASTER_ADDR", "node1", "-genv", "MASTER_PORT", "29411"]
    words += [sys.executable, "-m", "mpicoll", "run", tmp_path / "reads.py"]
    if launch == "srun":
        code, out = srun(*ALL, *words)
    else:
        done = subprocess.run(
            ["salloc", *ALL[:2], *words], env=environment(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        code, out = done.returncode, done.stdout
    assert code == 0, out
    lines = sorted(line for line in out.splitlines() if line.endswith(" mpicoll"))
    total = RANKS * (RANKS - 1) // 2
    assert lines == [f"{rank} {rank % 2} {RANKS} 2 {total} mpicoll" for rank in range(RANKS)], out


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize(
    ("job", "words"),
    [("train_digits_ddp", "DDP over mpicoll"), ("train_digits_horovod", "Horovod's API")],
)
def test_torch_jobs(job: str, words: str, folder: Path) -> None:
    variables = {"LAUNCH": f"srun:{MPI}", "JOB": job}
    out = completed(submit("digits.sbatch", folder, *SHORT, **variables), folder)
    assert f"on {RANKS} ranks, {words}" in out


def test_placement_of_ranks_is_printed(folder: Path) -> None:
    out = completed(submit("digits_nodes.sbatch", folder, *SHORT), folder)
    assert_one_world(out)
    line = r"^rank \d of \d on (\S+), local rank (\d) of 2, on processors (\S+) of (\d+), "
    shown = re.findall(line, out, re.M)
    assert len({each[:2] for each in shown}) == len(shown) == RANKS, out
    # Without a task plug-in, Slurm does not bind ranks.
    every = format_ranges(os.sched_getaffinity(0))
    assert {each[2:] for each in shown} == {(every, str(os.cpu_count()))}, out


def test_array_elements_are_separate_worlds(folder: Path) -> None:
    """Each element has a different seed."""
    job = submit("digits_array.sbatch", folder, *SHORT, options=("--array=1-2",))
    out = completed(job, folder)
    losses = re.findall(r"^epoch +1 +loss (\S+)", out, re.M)
    assert len(losses) == 2 and losses[0] != losses[1], out
    assert out.count(f"digits on {RANKS} ranks") == 2, out


@pytest.mark.parametrize("script", ["digits.pbs", "digits.lsf"])
def test_pbs_and_lsf_scripts_start_ranks_on_other_nodes(script: str, folder: Path) -> None:
    """Their remote commands are simulated by srun."""
    bin = folder / "bin"
    bin.mkdir()
    remote = 'while [[ $1 = -* ]]; do shift; done\nhost=$1; shift\necho "$host" >> "$LOG"\n'
    remote += 'exec srun --mpi=none --overlap --nodes=1 --ntasks=1 -w "$host" bash -c "$*"\n'
    for name in ("pbs_tmrsh", "blaunch"):
        (bin / name).write_text(f"#!/bin/bash\n{remote}")
        (bin / name).chmod(0o755)
    hosts, log = folder / "hosts", folder / "log"
    hosts.write_text("".join(f"node{i + 1}\n" * 2 for i in range(NODES)))
    job = folder / "job.sh"
    # mpirun under PBS or LSF does not see Slurm's variables. srun needs two of them.
    job.write_text(
        "#!/bin/bash\n"
        "for name in ${!SLURM_*}; do [ $name = SLURM_CONF ] || [ $name = SLURM_JOB_ID ] || "
        "unset $name; done\n"
        "export PRTE_MCA_ras=^slurm PRTE_MCA_plm=ssh HYDRA_RMK=user\n"
        f"exec bash jobs/{script}\n"
    )
    variables = {
        "PATH": f"{bin}:{os.environ['PATH']}", "LOG": str(log), "OPTIONS": " ".join(SHORT),
        "PBS_O_WORKDIR": str(folder), "PBS_JOBID": "7.pbs", "PBS_NODEFILE": str(hosts),
        "LS_SUBCWD": str(folder), "LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(hosts),
    }  # fmt: skip
    assert_one_world(completed(submit(job, folder, **variables), folder))
    assert f"node{NODES}" in log.read_text().split()


def test_bind_gpu_uses_the_local_rank() -> None:
    code, out = srun(
        *ALL, "--mpi=none", ROOT / "jobs" / "bind_gpu.sh", "sh", "-c",
        "echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES="4,7",
    )  # fmt: skip
    assert code == 0 and sorted(out.splitlines()) == sorted(["0 4", "1 7"] * NODES), out


@pytest.mark.skipif(OPENMPI, reason="Open MPI has as many slots as the step has tasks: one")
def test_mpirun_inside_a_step() -> None:
    """With --overlap, the inner srun of MPICH's mpirun may share the processors of the step."""
    mpirun = Path(sys.executable).with_name("mpirun")
    code, out = srun(
        "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--mpi=none", mpirun, "-n", "2", *HELLO,
        SLURM_OVERLAP="1",
    )  # fmt: skip
    assert code == 0 and "rank 1 of 2" in out, out


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["hello", "doctor"])
@pytest.mark.parametrize("wrong", sorted({"none", "pmi2", "pmix"} - {MPI}))
def test_wrong_mpi_option_is_reported_with_the_right_one(wrong: str, command: str) -> None:
    code, out = srun(*ALL, f"--mpi={wrong}", sys.executable, "-m", "mpicoll", command)
    assert code != 0 or command == "doctor", out
    assert f"--mpi={MPI}" in out and "unsupported PMI version" not in out, out


@pytest.mark.parametrize("offered", ["none", "pmi2", "pmix"])
def test_single_rank_works_with_any_mpi_option(offered: str) -> None:
    code, out = srun("--nodes=1", "--ntasks=1", f"--mpi={offered}", *HELLO)
    assert code == 0 and "rank 0 of 1 on" in out, out


@pytest.mark.parametrize("fault", ["SIGKILL", "an exception after"])
def test_fault_of_a_rank_on_another_node(fault: str) -> None:
    """Runs a case of ``make chaos``: the last of three ranks is alone on its node."""
    step = f"srun --mpi={MPI} --nodes=2 --distribution=block --kill-on-bad-exit=1"
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "chaos" / "run.py", "--launcher=srun",
         f"--mpiexec={step}", "--calls=small", "--faults", fault],
        env=environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_failed_rank_ends_the_step() -> None:
    program = (
        "import mpicoll as dist; dist.init_process_group(); dist.barrier()\n"
        "if dist.get_rank() == 1: raise SystemExit('enough')\n"
        "dist.barrier()"
    )
    code, out = srun(*ALL, f"--mpi={MPI}", sys.executable, "-c", program)
    assert code != 0 and "enough" in out, out


CALLS = """
import sys, numpy as np, mpicoll as dist
dist.init_process_group()
if dist.get_rank() == 0:
    print("begins", flush=True)
while True:
    dist.all_reduce(np.ones(1000))
"""


def processes(word: str) -> list[str]:
    """Return the Python processes on all nodes with this word in their command line."""
    lines = command("ps", "-eww", "-o", "args").splitlines()
    return [line for line in lines if word in line and line.startswith(sys.executable)]


def test_cancelled_step_leaves_no_process(tmp_path: Path) -> None:
    job = tmp_path / "calls_of_a_step.py"
    job.write_text(CALLS)
    step = start(*ALL, f"--mpi={MPI}", "--job-name=calls", sys.executable, job)
    assert step.stdout is not None
    while "begins" not in (line := step.stdout.readline()):
        assert line, "it ended"
    assert len(processes(job.name)) >= RANKS
    number = command("squeue", "--noheader", "--name=calls", "--format=%i").strip()
    command("scancel", f"{number}.0")
    out, _ = step.communicate(timeout=60)
    assert step.returncode != 0 and "CANCELLED" in out, out
    wait_until(lambda: not processes(job.name), 20)


# --- jobs that are requeued ---------------------------------------------------------------------


def losses(out: str) -> list[tuple[int, str]]:
    """Return the printed loss after each epoch."""
    return [
        (int(epoch), loss) for epoch, loss in re.findall(r"^epoch +(\d+)  loss (\S+)", out, re.M)
    ]


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """The losses of an uninterrupted job on one rank."""
    job = ROOT / "jobs" / "train_digits_elastic.py"
    return dict(losses(command(sys.executable, job, "--epochs", "60")))


def assert_resumed(out: str, undisturbed: dict[int, str]) -> None:
    """Assert that a job resumed, ran each epoch once, and printed the losses of ``undisturbed``."""
    stops = re.findall(r"^stops after step (\d+)", out, re.M)
    resumed = re.findall(r"^goes on after step (\d+)", out, re.M)
    assert resumed and resumed == stops[: len(resumed)], out
    found = losses(out)
    assert [epoch for epoch, _ in found] == list(range(1, len(found) + 1)), out
    assert all(undisturbed[epoch] == loss for epoch, loss in found if epoch in undisturbed), out


@pytest.mark.slow
def test_signal_before_the_time_limit_requeues_the_job(
    folder: Path, undisturbed: dict[int, str]
) -> None:
    """The ranks save a checkpoint, the job is requeued and resumes."""
    options = ("--signal=B:USR2@10",)
    job = submit("digits_requeue.sbatch", folder, "--epochs", "100000", options=options)
    wait_until(lambda: losses(output(job, folder)))
    # Slurm checks the time limits of jobs twice a minute.
    command("scontrol", "update", f"JobId={job}", "EndTime=now+40seconds")
    wait_until(lambda: "goes on after" in output(job, folder))
    before = len(losses(output(job, folder)))
    wait_until(lambda: len(losses(output(job, folder))) > before + 1)
    cancel(job)
    assert_resumed(output(job, folder), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["main", "graced"])
def test_preempted_job_resumes(partition: str, folder: Path, undisturbed: dict[int, str]) -> None:
    """Slurm sends SIGTERM and requeues the job. With GraceTime, the job requeues itself."""
    options = ("--exclusive", f"--partition={partition}")
    job = submit("digits_requeue.sbatch", folder, "--epochs", "60", options=options)
    wait_until(lambda: len(losses(output(job, folder))) > 3)
    urgent = ("--partition=urgent", "--exclusive", f"--nodes={NODES}")
    code, out = srun(*urgent, "--ntasks-per-node=1", "--mpi=none", "true")
    assert code == 0, out
    ended = wait(job, folder)
    assert ended.state == "COMPLETED" and "is reached" in ended.out, ended
    assert_resumed(ended.out, undisturbed)
    assert len(losses(ended.out)) == 60
