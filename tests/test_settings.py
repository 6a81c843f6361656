"""The table of environment variables: what is refused, and that nothing beside it is read."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpicoll import settings
from mpicoll.cuda import capabilities
from mpicoll.errors import ArgumentError
from mpicoll.settings import SETTINGS

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parent.parent
MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))
needs_mpiexec = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")
NAMES = {setting.name for setting in SETTINGS}


# --- the table ----------------------------------------------------------------------------------


def test_nothing_is_wrong_with_nothing() -> None:
    assert settings.find_problems({}) == {} and settings.list_set({}) == {}
    assert (
        settings.find_problems({"PATH": "x", "TEST_MPICOLL_MPIEXEC": "x", "MPICOLL_TABLE": "x"})
        == {}
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MPICOLL_DEUBG", "did you mean MPICOLL_DEBUG?"),
        ("MPICOLL_SHAREDMEMORY", "did you mean MPICOLL_SHARED_MEMORY?"),
        ("MPICOLL_debug", "did you mean MPICOLL_DEBUG?"),
        ("MPICOLL_XXXXXXXXXXXXXXXXXXXX", "known are MPICOLL_DEBUG"),
    ],
)
def test_a_misspelt_name(name: str, hint: str) -> None:
    (text,) = settings.find_problems({name: "1"}).values()
    assert text.startswith(f"{name}: unknown setting; {hint}")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MPICOLL_DEBUG", "VERBOSE", "OFF, INFO or DETAIL"),
        ("TORCH_DISTRIBUTED_DEBUG", "1", "OFF, INFO or DETAIL"),
        ("MPICOLL_SHARED_MEMORY", "no", "0 or 1"),
        *(
            ("MPICOLL_CLUSTERS", text, "0, or numbers of ranks separated by commas")
            for text in ("x", "2,", "-1", "2,0", "1.5", "0,2", " 2", "\uff12")
        ),
        *(
            ("MPICOLL_TIMEOUT_GRACE", text, "seconds, 10 by default")
            for text in ("x", "-1", ".5", "1e3", "inf")
        ),
        ("MPICOLL_INSTALL_AS", "ucc", "gloo, mpi, nccl or several, separated by commas"),
        ("MPICOLL_INSTALL_AS", "gloo;mpi", "gloo, mpi, nccl or several, separated by commas"),
    ],
)
def test_a_wrong_value(name: str, value: str, expected: str) -> None:
    found = settings.find_problems({name: value})
    assert found == {name: f"{name}: expected {expected}, got {value!r}"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_value_is_taken(setting: settings.Setting) -> None:
    free = {
        "MPICOLL_CLUSTERS": ["0", "64", "2,1,13"],
        "MPICOLL_TIMEOUT_GRACE": ["0", "30", "2.5"],
        "MPICOLL_REPORT_AFTER": ["0", "60", "2.5"],
        "TORCH_FR_BUFFER_SIZE": ["0", "64"],
        "TORCH_NCCL_TRACE_BUFFER_SIZE": ["0", "64"],
    }
    assert not setting.form or setting.name in free
    for value in setting.values or free.get(setting.name, ["anything"]):
        for text in (value, value.upper()) if setting.values else [value]:
            assert setting.value({setting.name: text}) == value
            assert settings.find_problems({setting.name: text}) == {}
            assert setting.is_set_to(value, {setting.name: text})
    assert setting.value({}) == setting.value({setting.name: ""}) == ""


def test_several_values() -> None:
    assert settings.INSTALL_AS.value({"MPICOLL_INSTALL_AS": "Gloo, mpi"}) == "gloo,mpi"


def test_the_secret_is_not_told() -> None:
    environment = {"MPICOLL_SECRET": "hush", "MPICOLL_DEBUG": "INFO"}
    assert settings.list_set(environment) == {"MPICOLL_DEBUG": "INFO", "MPICOLL_SECRET": "(set)"}


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_DEUBG", "1")
    monkeypatch.setenv("MPICOLL_KERNELS", "rust")
    with pytest.raises(ArgumentError, match=r"environment: MPICOLL_DEUBG: .*; MPICOLL_KERNELS: "):
        settings.check()


# --- the rest of the project --------------------------------------------------------------------


def test_every_name_in_the_project_is_in_the_table() -> None:
    places = ["mpicoll", "docs", "jobs", "benchmarks"]
    paths = [path for place in places for path in (ROOT / place).rglob("*")]
    for path in [*paths, ROOT / "README.md", ROOT / "Makefile"]:
        if path.suffix in (".py", ".md", ".c", ".sh", ".sbatch", ""):
            text = path.read_text() if path.is_file() else ""
            found = set(re.findall(r"(?<![\w#])MPICOLL_[A-Z_]+\b(?!\.h)", text))
            assert found <= NAMES, path


def test_values_of_cuda_aware_are_the_levels() -> None:
    levels = [level.name.lower() for level in capabilities.CudaSupport]
    assert sorted(settings.CUDA_AWARE.values) == sorted(levels)


# --- whole jobs ---------------------------------------------------------------------------------


def refused(program: str, **environment: str) -> str:
    """What two ranks print, together; their lines may run into each other."""
    done = subprocess.run(
        [*MPIEXEC, "-n", "2", sys.executable, "-c", program], env=os.environ | environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout


@needs_mpiexec
def test_every_rank_refuses() -> None:
    told = refused(
        "import os\n"
        "import mpicoll as dist\n"
        "try:\n    dist.init_process_group()\n"
        "except ValueError as error:\n"
        "    os.write(1, f'{type(error).__name__} {error}\\n'.encode())\n",  # one write a line
        MPICOLL_DEUBG="DETAIL", MPICOLL_SHARED_MEMORY="off",
    )  # fmt: skip
    line = (
        "ArgumentError environment: MPICOLL_DEUBG: unknown setting; did you mean "
        "MPICOLL_DEBUG?; MPICOLL_SHARED_MEMORY: expected 0 or 1, got 'off'"
    )
    assert told.count(line) == 2, told


@needs_mpiexec
def test_the_torch_backend_refuses_too() -> None:
    pytest.importorskip("torch")
    told = refused(
        "import os\n"
        "import torch.distributed as dist\n"
        "try:\n    dist.init_process_group('mpicoll', init_method='mpi://')\n"
        "except ValueError as error:\n    os.write(1, f'{error}\\n'.encode())\n",
        MPICOLL_KERNEL="numpy",
    )  # fmt: skip
    line = "environment: MPICOLL_KERNEL: unknown setting; did you mean MPICOLL_KERNELS?"
    assert told.count(line) == 2, told
