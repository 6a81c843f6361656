"""Assignment of GPUs to ranks: in Python, and by jobs/bind_gpu.sh before Python starts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from whole_jobs import run_program

from mpicoll.cuda import binding, runtime
from mpicoll.cuda.binding import bind, describe_far_gpu, describe_idle_gpus, device_for
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.errors import MpicollError, UnsupportedError
from mpicoll.launch.launchers import LAUNCHERS

pytestmark = pytest.mark.any_mpi

SCRIPT = Path(__file__).parent.parent / "jobs" / "bind_gpu.sh"


SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3"}


@pytest.mark.parametrize(
    ("local_rank", "count", "environment", "expected"),
    [
        (0, 0, {}, None),
        (3, 4, {}, 3),
        (5, 4, {}, 1),
        (3, 4, SRUN | {"SLURM_GPUS_PER_TASK": "4"}, 0),
        (3, 0, SRUN | {"SLURM_GPUS_PER_TASK": "4"}, None),
        # srun assigns the GPUs to one torchrun or mpirun per node, whose ranks share them.
        (3, 4, SRUN | TORCHRUN | {"SLURM_GPUS_PER_TASK": "4"}, 3),
        (3, 4, SRUN | HYDRA | {"SLURM_GPUS_PER_TASK": "4"}, 3),
    ],
)
def test_device_for(local_rank, count, environment, expected):
    assert device_for(local_rank, count, environment) == expected


def test_bind(no_launcher, monkeypatch):
    used = []
    gpus = SimpleNamespace(count=lambda: 4, use=used.append)
    monkeypatch.setattr(runtime, "get_runtime", lambda: gpus)
    with pytest.raises(MpicollError, match="init_process_group first"):
        bind()
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert bind() == 2
    monkeypatch.delenv("LOCAL_RANK")
    for name, value in (SRUN | {"SLURM_LOCALID": "1", "SLURM_GPUS_PER_TASK": "4"}).items():
        monkeypatch.setenv(name, value)
    assert bind() == 0
    assert used == [2, 0]


def test_bind_without_a_gpu(no_launcher, monkeypatch):
    def absent():
        raise UnsupportedError("none here")

    monkeypatch.setattr(runtime, "get_runtime", absent)
    assert bind() is None


def rank(gpus: Sequence[str], node: str = "a") -> Capabilities:
    return Capabilities("M", "1", "", False, "", node, gpus=tuple(gpus))


@pytest.mark.parametrize(
    ("ranks", "used", "expected"),
    [
        ([rank("xy"), rank("xy")], [0, 1], {}),
        ([rank("xy"), rank("yx")], [0, 1], {"a": "ranks 0, 1 share GPU x, while .* idle: y"}),
        ([rank("xy"), rank("yx")], [0, 0], {}),
        ([rank("xyz")] * 3, [0, 1, 1], {"a": "ranks 1, 2 share GPU y, while .* idle: z"}),
        ([rank("x"), rank("")], [0, None], {}),
        ([rank("xy"), *[rank("xy", "b")] * 2], [0, 1, 1], {"b": "ranks 1, 2 share GPU y, .*: x"}),
    ],
)
def test_idle_gpus_are_reported(ranks, used, expected):
    found = describe_idle_gpus(ranks, used)
    assert list(found) == list(expected)
    assert all(re.match(text, found[node]) for node, text in expected.items())


A, B = "0000:03:00.0", "0000:83:00.0"


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([8], ""),
        ([9], "on (9): bind the rank to processors near it (0-3,8)"),
        ([5, 6], f"on (5-6): bind the rank to processors near it (0-3,8), or work on GPU {B}"),
    ],
)
def test_far_gpus_are_reported(tmp_path, monkeypatch, allowed, expected):
    monkeypatch.setattr(binding, "_DEVICES", tmp_path)
    for address, processors in (A, "0-3,8\n"), (B, "4-7\n"):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(processors)
        (tmp_path / address / "class").write_text("0x030200")
    own = rank([f"{A} u", f"{B} v", "0000:84:00.0 w"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    found = describe_far_gpu(own, 0)
    assert len(found) == bool(expected) and all(text.endswith(expected) for text in found)
    assert not describe_far_gpu(own, 2), "the kernel does not know the GPU"
    assert not describe_far_gpu(own, None)


# --- bind_gpu.sh --------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """Run the script with only the given variables, and an nvidia-smi that lists ``gpus``."""

    def start(environment, gpus=None, command=("sh", "-c", 'echo "${CUDA_VISIBLE_DEVICES-unset}"')):
        tool = tmp_path / "nvidia-smi"
        text = "exit 9" if gpus is None else f"printf '{gpus}'"
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.defpath}"
        return run_program(SCRIPT, *command, env={"PATH": path, **environment})

    return start


@pytest.mark.parametrize(
    ("environment", "gpus", "expected"),
    [
        ({"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "4, 5,6"}, None, "6"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, None, "GPU-bb"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}, r"0\n1\n", ""),
        ({"LOCAL_RANK": "1"}, r"0\n1\n", "1"),
        ({"LOCAL_RANK": "2"}, r"0\n1\n", "0"),
        ({"LOCAL_RANK": "1"}, "", "unset"),
        ({"LOCAL_RANK": "1"}, None, "unset"),
        ({"LOCAL_RANK": "x", "SLURM_LOCALID": "1"}, r"0\n1\n", "1"),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "1"}, r"0\n1\n", "0"),
    ],
)
def test_script_selects_a_gpu(run, environment, gpus, expected):
    done = run(environment, gpus)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


@pytest.mark.parametrize("name", sorted({name for row in LAUNCHERS for name in row.local_rank}))
def test_script_reads_every_local_rank_variable(run, name):
    assert run({name: "2", "CUDA_VISIBLE_DEVICES": "a,b,c"}).stdout == "c\n"


def test_script_and_python_select_the_same_gpu(run):
    for local_rank in range(5):
        done = run({"LOCAL_RANK": str(local_rank), "CUDA_VISIBLE_DEVICES": "0,1,2"})
        assert int(done.stdout) == device_for(local_rank, 3, {})
    for launcher in LAUNCHERS:
        if launcher.own_gpus:
            given = dict.fromkeys(
                [*launcher.detected_by, *launcher.local_rank, launcher.own_gpus], "1"
            )
            assert run(given, r"0\n1\n").stdout == "unset\n" and device_for(1, 2, given) == 0
            # Another launcher inside it has started the ranks.
            given["LOCAL_RANK"] = "1"
            assert run(given, r"0\n1\n").stdout == "1\n" and device_for(1, 2, given) == 1


def test_script_passes_arguments_and_exit_code(run):
    done = run(
        {"LOCAL_RANK": "0"}, command=("sh", "-c", 'printf "%s|" "$@"; exit 7', "x", "a b", "*")
    )
    assert (done.returncode, done.stdout) == (7, "a b|*|")


def test_script_fails_without_a_local_rank_or_command(run):
    done = run({}, r"0\n1\n")
    assert done.returncode == 1 and "set LOCAL_RANK" in done.stderr and not done.stdout
    assert run({"LOCAL_RANK": "0"}, command=()).returncode == 2
