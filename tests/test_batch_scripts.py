"""The batch scripts in jobs/ start the ranks that their directives request.

Each script runs in the environment of its batch system, with mocks of mpirun, srun and flux that
log their arguments. tests/slurm/ runs the scripts for Slurm, PBS and LSF with real ranks.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from whole_jobs import run_program

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "jobs"


#: The prefix of directives by batch system.
SENTINELS = {".sbatch": "#SBATCH ", ".pbs": "#PBS ", ".lsf": "#BSUB ", ".flux": "# flux: "}
SCRIPTS = sorted(path.name for path in JOBS.iterdir() if path.suffix in SENTINELS)


class Request(NamedTuple):
    """The resources that a script requests."""

    nodes: int
    ranks_per_node: int
    cores_per_rank: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def directives(script: str) -> list[str]:
    """Return the words of a script's directives, which must precede its commands."""
    sentinel = SENTINELS[Path(script).suffix]
    lines = (JOBS / script).read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith(sentinel) for line in lines[end:])
    found = [line.removeprefix(sentinel) for line in lines[:end] if line.startswith(sentinel)]
    return [word for line in found for word in shlex.split(line, comments=True)]


def request(script: str) -> Request:
    """Return the resources in a script's directives."""
    text = " ".join(directives(script))

    def number(name: str) -> int:
        found = re.search(rf"(?:^|\W){name}[= ](\d+)", text)
        assert found, name
        return int(found[1])

    suffix = Path(script).suffix
    if suffix == ".sbatch":
        return Request(number("nodes"), number("ntasks-per-node"), number("cpus-per-task"))
    if suffix == ".pbs":
        ranks = number("mpiprocs")
        return Request(number("select"), ranks, number("ncpus") // ranks)
    if suffix == ".lsf":
        ranks = number("ptile")
        return Request(number("n") // ranks, ranks, 1)
    nodes = number("nodes")
    return Request(nodes, number("nslots") // nodes, number("cores-per-slot"))


class Start(NamedTuple):
    """One command of a launcher: its name, its options, the program and the program's arguments."""

    launcher: str
    options: list[str]
    program: list[str]

    def option(self, *names: str) -> str:
        """Return the value of an option with one of these names."""
        for i, word in enumerate(self.options):
            name, equals, value = word.partition("=")
            if name in names:
                return value if equals else self.options[i + 1]
        raise AssertionError(f"none of {names} in {self}")


def environment_of(script: str, folder: Path) -> dict[str, str]:
    """Return the variables that the batch system sets for a script."""
    asked = request(script)
    hosts = [f"node{i + 1}" for i in range(asked.nodes)]
    file = folder / "hosts"
    file.write_text("".join(f"{host}\n" * asked.ranks_per_node for host in hosts))
    return {
        ".sbatch": {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": str(asked.ranks),
            "SLURM_CPUS_PER_TASK": str(asked.cores_per_rank),
            "SLURM_JOB_NUM_NODES": str(asked.nodes),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "3",
        },
        ".pbs": {"PBS_O_WORKDIR": str(ROOT), "PBS_JOBID": "7.host", "PBS_NODEFILE": str(file)},
        ".lsf": {"LS_SUBCWD": str(ROOT), "LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(file)},
        ".flux": {},
    }[Path(script).suffix]


def run(script: str, folder: Path, *words: str, **variables: str) -> list[Start]:
    """Run a script with mock commands, and return their logged calls."""
    bin = folder / "bin"
    bin.mkdir()
    log = folder / "log"
    answers = {
        "flux": "[ $1 != getattr ] || { echo f7; exit; }",
        "srun": "${STOPS:+touch $STOPS}\n"
        '[ -z "$FAILS" ] || trap "kill -TERM $PPID; exit $FAILS" EXIT',
        "scontrol": "[ \"$1 $2\" != 'show job' ] || { echo JobState=$STATE; exit; }\n"
        "[ $1 != show ] || { echo node1; echo node2; exit; }",
    }
    for name in ("srun", "mpirun", "mpiexec", "flux", "scontrol"):
        path = bin / name
        path.write_text(
            f'#!/bin/bash\n{answers.get(name, "")}\nprintf "%s\\0" {name} "$@" "" >> {log}\n'
        )
        path.chmod(0o755)
    environment: Mapping[str, str] = {
        "PATH": f"{bin}:{os.environ['PATH']}", "VENV": "/venv", "HOME": str(folder),
        **environment_of(script, folder), **variables,
    }  # fmt: skip
    done = run_program("bash", JOBS / script, *words, env=environment, cwd=ROOT)
    code = int(variables.get("FAILS", 0))
    assert done.returncode == code and not done.stderr, done.stdout + done.stderr
    starts = []
    for call in log.read_text().removesuffix("\0\0").split("\0\0"):
        launcher, *rest = call.split("\0")
        begin = next(
            (i for i, word in enumerate(rest) if word.startswith("/venv/bin/python")), len(rest)
        )
        starts.append(Start(launcher, rest[:begin], rest[begin:]))
    return starts


#: Options with the number of ranks.
RANKS = {"mpirun": ("-n",), "mpiexec": ("-n",), "flux": ("--ntasks",)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_starts_the_requested_ranks(script: str, tmp_path: Path) -> None:
    asked, options = request(script), ["--epochs", "2"]
    takes_words = Path(script).suffix in (".sbatch", ".flux")
    starts = run(script, tmp_path, *options) if takes_words else run(
        script, tmp_path, OPTIONS=shlex.join(options)
    )  # fmt: skip
    for start in starts:
        if start.launcher in RANKS:
            assert start.option(*RANKS[start.launcher]) == str(asked.ranks)
        else:  # srun gets the number of ranks, but not of cores, from sbatch
            assert start.launcher == "srun" and start.option("--mpi") == "pmi2"
            assert start.option("--cpus-per-task") == str(asked.cores_per_rank)
            assert start.option("--kill-on-bad-exit") == "1"
    *shown, job = starts
    assert all(start.program[1:] == ["-m", "mpicoll", "hello"] for start in shown)
    assert len(shown) == (script not in ("digits_array.sbatch", "digits_requeue.sbatch"))
    assert job.program[-2:] == options
    program = ROOT / job.program[1]
    known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', program.read_text()))
    assert {word for word in job.program[2:] if word.startswith("--")} <= known


def test_script_in_clusters_page_binds_ranks_to_cores(tmp_path: Path) -> None:
    """The script has at most ten lines."""
    page = (ROOT / "docs/clusters.md").read_text()
    (text,) = re.findall(r"^```sh\n(#!/bin/bash\n#SBATCH .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 10
    script = tmp_path / "train.sbatch"
    script.write_text(text)
    assert request(str(script)) == Request(2, 4, 1)
    (start,) = run(str(script), tmp_path)
    assert start.launcher == "srun" and start.option("--mpi") == "pmi2"
    assert start.option("--cpu-bind") == "cores" and start.option("--cpus-per-task") == "1"
    assert start.options[-2:] == [".venv/bin/python", "train.py"]


REQUEUE = Start("scontrol", ["requeue", "7"], [])


@pytest.mark.parametrize(
    ("stops", "state", "requeues"),
    [
        ("digits-7.stopped", "RUNNING", True),
        ("digits-7.stopped", "COMPLETING", False),  # Slurm requeues it, or it was cancelled
        ("", "RUNNING", False),  # it is complete
    ],
)
def test_stopped_job_is_requeued(stops: str, state: str, requeues: bool, tmp_path: Path) -> None:
    options = {"--requeue", "--open-mode=append", "--signal=B:USR2@120"}
    assert options <= set(directives("digits_requeue.sbatch"))
    (tmp_path / "digits-7.stopped").touch()  # of the run before
    own = {"SLURM_SUBMIT_DIR": str(tmp_path), "STOPS": stops, "STATE": state}
    step, *more = run("digits_requeue.sbatch", tmp_path, **own)
    assert step.launcher == "srun"
    assert more == ([REQUEUE] if requeues else [])
