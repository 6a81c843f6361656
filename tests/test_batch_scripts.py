"""The batch scripts in jobs/: their directives, and the commands that they start.

Directives are parsed by the rules of each batch system and compared with DESCRIPTION. Then each
script runs in the environment of its batch system, with mocks of mpirun, srun and flux that log
their arguments. tests/slurm/ runs the scripts for Slurm, PBS and LSF with real ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "jobs"


class Request(NamedTuple):
    """The resources that a script requests. minutes: the time limit. more: other options."""

    nodes: int
    ranks_per_node: int
    cores_per_rank: int
    minutes: int
    more: frozenset[str] = frozenset()

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


DESCRIPTION = {
    "digits.sbatch": Request(1, 4, 1, 5),
    "digits_nodes.sbatch": Request(2, 4, 1, 5, frozenset({"exclusive", "distribution=block"})),
    "digits_array.sbatch": Request(1, 2, 1, 5, frozenset({"array=0-3"})),
    "digits_requeue.sbatch": Request(
        2, 4, 1, 60, frozenset({"requeue", "open-mode=append", "signal=B:USR2@120"})
    ),
    "digits.pbs": Request(2, 4, 1, 5, frozenset({"j=oe", "place=scatter", "r=n"})),
    "digits_pals.pbs": Request(2, 4, 1, 5, frozenset({"j=oe", "place=scatter", "r=n"})),
    "digits.lsf": Request(2, 4, 1, 5),
    "digits.flux": Request(2, 4, 1, 5),
}


def directives(script: str, sentinel: str) -> list[str]:
    """Return the words of a script's directives, which must precede its commands."""
    lines = (JOBS / script).read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith(sentinel) for line in lines[end:])
    words = [line.removeprefix(sentinel) for line in lines[:end] if line.startswith(sentinel)]
    return [word for line in words for word in shlex.split(line, comments=True)]


def minutes(text: str) -> int:
    """Return the minutes of [hours:]minutes:seconds."""
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds // 60


def named(options: argparse.Namespace, *known: str) -> frozenset[str]:
    """Return the remaining options, as name or name=value."""
    given = {name: value for name, value in vars(options).items() if name not in known and value}
    return frozenset(
        name.replace("_", "-") + ("" if value is True else f"={value}")
        for name, value in given.items()
    )


def of_slurm(script: str) -> Request:
    parser = argparse.ArgumentParser(exit_on_error=True)
    for name in ("nodes", "ntasks-per-node", "cpus-per-task"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--time", type=minutes, required=True)
    for name in ("job-name", "output"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("array", "signal", "open-mode", "distribution"):
        parser.add_argument(f"--{name}")
    for name in ("requeue", "exclusive"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(directives(script, "#SBATCH "))
    assert options.job_name == "digits"
    assert options.output == ("digits-%A_%a.out" if options.array else "digits-%j.out")
    more = named(options, "nodes", "ntasks_per_node", "cpus_per_task", "time", "job_name", "output")
    return Request(
        options.nodes, options.ntasks_per_node, options.cpus_per_task, options.time, more
    )


def of_pbs(script: str) -> Request:
    parser = argparse.ArgumentParser()
    parser.add_argument("-N", required=True)
    parser.add_argument("-l", action="append", required=True)
    parser.add_argument("-j")
    parser.add_argument("-r")
    options = parser.parse_args(directives(script, "#PBS "))
    assert options.N == "digits"
    resources = dict(each.split("=", 1) for each in options.l)
    count, *chunk = resources.pop("select").split(":")
    each = {name: int(value) for name, value in (part.split("=") for part in chunk)}
    time = minutes(resources.pop("walltime"))
    more = named(options, "N", "l") | {f"{name}={value}" for name, value in resources.items()}
    cores = each["ncpus"] // each["mpiprocs"]
    return Request(int(count), each["mpiprocs"], cores, time, more)


def of_lsf(script: str) -> Request:
    parser = argparse.ArgumentParser()
    for letter in "JRWo":
        parser.add_argument(f"-{letter}", required=True)
    parser.add_argument("-n", type=int, required=True)
    options = parser.parse_args(directives(script, "#BSUB "))
    assert (options.J, options.o) == ("digits", "digits-%J.out")
    span = re.fullmatch(r"span\[ptile=(\d+)\]", options.R)
    assert span and options.n % int(span[1]) == 0
    hours, minute = options.W.split(":")
    return Request(options.n // int(span[1]), int(span[1]), 1, int(hours) * 60 + int(minute))


def of_flux(script: str) -> Request:
    parser = argparse.ArgumentParser()
    for name in ("nodes", "nslots", "cores-per-slot"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("job-name", "time-limit", "output"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(directives(script, "# flux: "))
    assert (options.job_name, options.output) == ("digits", "digits-{{id}}.out")
    assert options.nslots % options.nodes == 0 and options.time_limit.endswith("m")
    return Request(
        options.nodes, options.nslots // options.nodes, options.cores_per_slot,
        int(options.time_limit[:-1]),
    )  # fmt: skip


PARSERS: dict[str, Callable[[str], Request]] = {
    ".sbatch": of_slurm, ".pbs": of_pbs, ".lsf": of_lsf, ".flux": of_flux,
}  # fmt: skip


def test_description_lists_every_batch_script() -> None:
    assert {path.name for path in JOBS.iterdir() if path.suffix in PARSERS} == set(DESCRIPTION)


@pytest.mark.parametrize("script", DESCRIPTION)
def test_directives_match_the_description(script: str) -> None:
    assert PARSERS[Path(script).suffix](script) == DESCRIPTION[script]


# --- commands -----------------------------------------------------------------------------------


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
    asked = DESCRIPTION[script]
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
    done = subprocess.run(
        ["bash", JOBS / script, *words], env=environment, cwd=ROOT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
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


@pytest.mark.parametrize("script", DESCRIPTION)
def test_script_starts_the_requested_ranks(script: str, tmp_path: Path) -> None:
    asked, options = DESCRIPTION[script], ["--epochs", "2"]
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
    assert all(start.program[1:] == ["-m", "mpicoll", "hello", "--binding"] for start in shown)
    assert len(shown) == (script not in ("digits_array.sbatch", "digits_requeue.sbatch"))
    assert job.program[-2:] == options
    program = ROOT / job.program[1]
    known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', program.read_text()))
    assert {word for word in job.program[2:] if word.startswith("--")} <= known


def test_script_in_clusters_page_binds_ranks_to_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script has at most ten lines."""
    page = (ROOT / "docs/clusters.md").read_text()
    (text,) = re.findall(r"^```sh\n(#!/bin/bash\n#SBATCH .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 10
    script = tmp_path / "train.sbatch"
    script.write_text(text)
    asked = ["--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=1", "--time=00:10:00"]
    assert directives(str(script), "#SBATCH ") == asked
    monkeypatch.setitem(DESCRIPTION, str(script), Request(2, 4, 1, 10))
    (start,) = run(str(script), tmp_path)
    assert start.launcher == "srun" and start.option("--mpi") == "pmi2"
    assert start.option("--cpu-bind") == "cores" and start.option("--cpus-per-task") == "1"
    assert start.options[-2:] == [".venv/bin/python", "train.py"]


def test_torchrun_starts_once_per_node(tmp_path: Path) -> None:
    """The rendezvous is on the first node."""
    variables = {"SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2", "LAUNCH": "torchrun"}
    *_, start = run("digits.sbatch", tmp_path, **variables)
    assert start.option("--ntasks") == "2" and start.option("--ntasks-per-node") == "1"
    assert start.option("--nnodes") == "2" and start.option("--nproc-per-node") == "4"
    assert start.option("--rdzv-endpoint") == "node1:20007"


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
    (tmp_path / "digits-7.stopped").touch()  # of the run before
    own = {"SLURM_SUBMIT_DIR": str(tmp_path), "STOPS": stops, "STATE": state}
    step, *more = run("digits_requeue.sbatch", tmp_path, **own)
    assert step.launcher == "srun"
    assert more == ([REQUEUE] if requeues else [])


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_job_without_state_is_requeued_after_sigterm(state: str, tmp_path: Path) -> None:
    """The script also received SIGTERM. Without it a failed job is not requeued."""
    own = {"SLURM_SUBMIT_DIR": str(tmp_path), "STATE": state, "FAILS": "143"}
    _, *more = run("digits_requeue.sbatch", tmp_path, **own)
    assert more == ([REQUEUE] if state == "RUNNING" else [])


def test_pals_script_passes_ranks_per_node(tmp_path: Path) -> None:
    *_, start = run("digits_pals.pbs", tmp_path)
    assert start.option("--ppn") == "4" and start.option("--depth") == "1"
