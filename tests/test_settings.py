"""The table of environment variables: accepted and rejected names and values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_scripts import Ended, job

from mpicoll import settings
from mpicoll.settings import SETTINGS

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parent.parent
NAMES = {setting.name for setting in SETTINGS}


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MPICOLL_DEUBG", "did you mean MPICOLL_DEBUG?"),
        ("MPICOLL_XXXXXXXXXXXXXXXXXXXX", "known are MPICOLL_DEBUG"),
    ],
)
def test_unknown_name_is_reported_with_a_hint(name: str, hint: str) -> None:
    (text,) = settings.find_problems({name: "1", "TEST_MPICOLL_X": "x"}).values()
    assert text.startswith(f"{name}: ") and f"; {hint}" in text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "1", "OFF, INFO or DETAIL"),
        ("MPICOLL_SHARED_MEMORY", "no", "0 or 1"),
        *(("MPICOLL_TIMEOUT_GRACE", text, "seconds, 10 by default") for text in ("-1", "1e3")),
        ("MPICOLL_INSTALL_AS", "gloo;mpi", "gloo, mpi, nccl or several, separated by commas"),
    ],
)
def test_invalid_value_is_reported(name: str, value: str, expected: str) -> None:
    found = settings.find_problems({name: value})
    assert found == {name: f"{name}: expected {expected}, got {value!r}"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_documented_value_is_accepted(setting: settings.Setting) -> None:
    for value in setting.values or ["64" if setting.form else "anything"]:
        for text in (value, value.upper()) if setting.values else [value]:
            assert setting.value({setting.name: text}) == value
            assert settings.find_problems({setting.name: text}) == {}
            assert setting.is_set_to(value, {setting.name: text})
    assert setting.value({}) == setting.value({setting.name: ""}) == ""


def test_several_values_are_normalized_and_a_secret_is_hidden() -> None:
    assert settings.INSTALL_AS.value({"MPICOLL_INSTALL_AS": "Gloo, mpi"}) == "gloo,mpi"
    environment = {"MPICOLL_SECRET": "hush", "MPICOLL_DEBUG": "INFO", "PATH": "x"}
    assert settings.list_set(environment) == {"MPICOLL_DEBUG": "INFO", "MPICOLL_SECRET": "(set)"}


# --- the rest of the project --------------------------------------------------------------------


def test_project_uses_only_names_of_the_table() -> None:
    folders = ["mpicoll", "docs", "jobs", "benchmarks"]
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    for path in [*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]:
        if path.suffix in (".py", ".md", ".c", ".sh", ".sbatch", ""):
            text = path.read_text() if path.is_file() else ""
            found = set(re.findall(r"(?<![\w#])MPICOLL_[A-Z_]+\b(?!\.h)", text))
            assert found <= NAMES, path


# --- whole jobs ---------------------------------------------------------------------------------


@job("""
    error = error_of(ValueError, dist.init_process_group)
    say(type(error).__name__, error)
""", environment={"MPICOLL_DEUBG": "DETAIL", "MPICOLL_SHARED_MEMORY": "off"})  # fmt: skip
def test_init_raises_on_every_rank(ended: Ended) -> None:
    line = (
        r"ArgumentError environment: MPICOLL_DEUBG: .*; did you mean MPICOLL_DEBUG\?; "
        "MPICOLL_SHARED_MEMORY: expected 0 or 1, got 'off'\n"
    )
    assert ended.code == 0 and len(re.findall(line, ended.out)) == 2, ended
