"""The environment variables of mpicoll: one row each, checked when a process group is created.

A misspelt variable would have no effect and go unnoticed, so every name that begins with MPICOLL_
has to be here. The table of variables in docs/api.md and the report of ``python -m mpicoll doctor``
come from these rows.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpicoll.errors import ArgumentError

__all__ = [
    "ALLOW_SINGLETON",
    "CALLS",
    "CLUSTERS",
    "CUDA_AWARE",
    "DEBUG",
    "DEVICE_ROUTE",
    "INSTALL_AS",
    "KERNELS",
    "RECORD_FILE",
    "RECORD_FILE_BEFORE",
    "RECORD_LENGTH",
    "RECORD_LENGTH_BEFORE",
    "REPORTS",
    "REPORT_AFTER",
    "REPRODUCIBLE",
    "SECRET",
    "SETTINGS",
    "SHARED_MEMORY",
    "SINGLE_COPY",
    "SURVIVE",
    "TABLE",
    "TESTED_CALLS",
    "TIMEOUT_GRACE",
    "TORCH_DEBUG",
    "Setting",
    "check",
    "find_problems",
    "list_set",
]

_PREFIX = "MPICOLL_"


class Setting(NamedTuple):
    """One variable.

    name:     of the variable.
    values:   the allowed values, in lower case; empty: any text.
    expected: the allowed values, in words.
    effect:   what it does.
    is_list:  it may have several of ``values``, separated by commas.
    form:     a pattern of the text, if any text is not allowed; init_process_group checks it.
    """

    name: str
    values: Sequence[str]
    expected: str
    effect: str
    is_list: bool = False
    form: str = ""

    def value(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the value in lower case if there are ``values``; "" if it is not set.

        Raises ArgumentError (a ValueError) for a value that is not allowed.
        """
        found = environment.get(self.name, "")
        if not self.values:
            return found
        parts = found.split(",") if self.is_list else [found]
        chosen = [part.strip().lower() for part in parts]
        if found and not set(chosen) <= set(self.values):
            raise ArgumentError(f"{self.name}: expected {self.expected}, got {found!r}")
        return ",".join(chosen)

    def is_set_to(self, value: str, environment: Mapping[str, str] = os.environ) -> bool:
        """Return whether it has this value, in any case; never raises, for use before ``check``."""
        return environment.get(self.name, "").lower() == value


def _one_of(name: str, values: Sequence[str], effect: str) -> Setting:
    *others, last = values
    expected = f"{', '.join(others)} or {last}" if others else last
    return Setting(name, [value.lower() for value in values], expected, effect)


_LEVELS = ("OFF", "INFO", "DETAIL")

DEBUG = _one_of(
    "MPICOLL_DEBUG", _LEVELS, "how often the ranks' calls are compared, see Errors; the highest "
    "level that any rank asks for holds on all",
)  # fmt: skip
TORCH_DEBUG = _one_of(
    "TORCH_DISTRIBUTED_DEBUG", _LEVELS, "the same, where MPICOLL_DEBUG is not set"
)
TABLE = Setting(
    "MPICOLL_TABLE", (), "a file, or 0",
    "rank 0's table of routes, written by `python -m mpicoll tune`; 0: the defaults",
)  # fmt: skip
SHARED_MEMORY = _one_of(
    "MPICOLL_SHARED_MEMORY", ("0", "1"),
    "0, on any rank: no shared memory between the ranks of a node, only MPI messages",
)  # fmt: skip
SINGLE_COPY = _one_of(
    "MPICOLL_SINGLE_COPY", ("0", "1"),
    "0, on any rank: no rank of a node reads or writes another's memory; see performance.md",
)  # fmt: skip
CLUSTERS = Setting(
    "MPICOLL_CLUSTERS", (), "0, or numbers of ranks with commas between",
    "rank 0's: how many ranks in a row are near each other on a node, as 64, or 2,1,3, over and "
    "over again; 0: as if all were; see performance.md", form=r"0|[1-9]\d*(,[1-9]\d*)*",
)  # fmt: skip
KERNELS = _one_of(
    "MPICOLL_KERNELS", ("compiled", "numpy"),
    "numpy: reduces with NumPy instead of the C library, and shares no memory",
)  # fmt: skip
CALLS = _one_of(
    "MPICOLL_CALLS", ("compiled", "python"),
    "python: calls go their way in Python, not in the compiled module",
)  # fmt: skip
REPRODUCIBLE = _one_of(
    "MPICOLL_REPRODUCIBLE", ("order", "exact"),
    "reductions that give the same bits again, on all ranks alike; see Reproducible reductions",
)  # fmt: skip
#: The values name the modules of routes/device, best first: routes/registry.py loads them.
DEVICE_ROUTE = _one_of(
    "MPICOLL_DEVICE_ROUTE", (
        "shared_gpu", "peer", "hierarchical", "copy_engine", "ipc", "direct", "mpi", "staged",
        "nccl",
    ),
    "the route of device memory, the same on all ranks; see gpu.md",
)  # fmt: skip
CUDA_AWARE = _one_of(
    "MPICOLL_CUDA_AWARE", ("none", "transfer", "full"),
    "what the MPI library does with device memory, where that is known; see gpu.md",
)  # fmt: skip
SURVIVE = _one_of(
    "MPICOLL_SURVIVE", ("0", "1"),
    "1, on rank 0: MPICH's ranks of one node go on when one is lost, under "
    "`mpiexec -disable-auto-cleanup`; see reliability.md",
)  # fmt: skip
SECRET = Setting(
    "MPICOLL_SECRET", (), "any text, the same on all ranks",
    "the secret of a job whose ranks meet by `env://` or `tcp://`",
)  # fmt: skip
TESTED_CALLS = _one_of(
    "MPICOLL_TESTED_CALLS", ("0", "1"),
    "1, on all ranks: MPI's collectives are tested for until they end, which takes longer, so that "
    "one that outlasts its timeout raises and does not end the job; see Timeouts",
)  # fmt: skip
TIMEOUT_GRACE = Setting(
    "MPICOLL_TIMEOUT_GRACE", (), "seconds, 10 where it is not set",
    "how long a call inside MPI, which cannot take it back, may go on after its timeout has closed "
    "the group, before the job ends; and a program that has not looked at a call of devices that "
    "ended without its result; see Timeouts", form=r"\d+(\.\d*)?",
)  # fmt: skip
ALLOW_SINGLETON = _one_of(
    "MPICOLL_ALLOW_SINGLETON", ("0", "1"),
    "1: runs a single rank where a launcher announced several",
)  # fmt: skip
INSTALL_AS = Setting(
    "MPICOLL_INSTALL_AS", ("gloo", "mpi", "nccl"),
    "gloo, mpi, nccl or several, with commas between",
    "serves PyTorch scripts that name these backends; see pytorch.md", is_list=True,
)  # fmt: skip

RECORD_LENGTH = Setting(
    "TORCH_FR_BUFFER_SIZE", (), "a number of calls",
    "how many of its last calls and messages the flight record keeps for each group, 2000 if not "
    "set; 0: none; see flight_record.md", form=r"\d+",
)  # fmt: skip
RECORD_LENGTH_BEFORE = Setting(
    "TORCH_NCCL_TRACE_BUFFER_SIZE", (), "a number of calls",
    "the same, where TORCH_FR_BUFFER_SIZE is not set", form=r"\d+",
)  # fmt: skip
RECORD_FILE = Setting(
    "TORCH_FR_DUMP_TEMP_FILE", (), "the beginning of a file's path",
    "where the flight record is written to, with the rank behind it; "
    "`~/.cache/torch/comm_lib_trace_rank_` if not set",
)  # fmt: skip
RECORD_FILE_BEFORE = Setting(
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (), "the beginning of a file's path",
    "the same, where TORCH_FR_DUMP_TEMP_FILE is not set",
)  # fmt: skip

REPORT_AFTER = Setting(
    "MPICOLL_REPORT_AFTER", (), "seconds, or 0",
    "seconds of waiting in a call after which a report says who is not there; 0: none; 60, or half "
    "the timeout if that is less, where it is not set; see reliability.md",
    form=r"\d+(\.\d+)?",
)  # fmt: skip
REPORTS = Setting(
    "MPICOLL_REPORTS", (), "a folder",
    "where these reports are written in full, on rank 0's node; see reliability.md",
)  # fmt: skip

SETTINGS: tuple[Setting, ...] = (
    DEBUG, TORCH_DEBUG, TABLE, SHARED_MEMORY, SINGLE_COPY, CLUSTERS, KERNELS, CALLS, REPRODUCIBLE,
    DEVICE_ROUTE, CUDA_AWARE, SURVIVE, SECRET, TESTED_CALLS, TIMEOUT_GRACE, ALLOW_SINGLETON,
    INSTALL_AS, RECORD_LENGTH, RECORD_LENGTH_BEFORE, RECORD_FILE, RECORD_FILE_BEFORE,
    REPORT_AFTER, REPORTS,
)  # fmt: skip


def find_problems(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what is wrong with the variables that are set, by name."""
    known = [setting.name for setting in SETTINGS]
    found = {}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known:
            close = difflib.get_close_matches(name.upper(), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            found[name] = f"{name}: there is no such setting; {hint}"
    for setting in SETTINGS:
        try:
            text = setting.value(environment)
            if text and setting.form and not re.fullmatch(setting.form, text, re.ASCII):
                raise ArgumentError(f"{setting.name}: expected {setting.expected}, got {text!r}")
        except ArgumentError as error:
            found[setting.name] = str(error)
    return found


def check() -> None:
    """Raise ArgumentError (a ValueError) for a misspelt name or value."""
    wrong = find_problems()
    if wrong:
        raise ArgumentError(f"environment: {'; '.join(wrong.values())}")


def list_set(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that are set with their values, but not the secret's."""
    return {
        setting.name: "(set)" if setting is SECRET else environment[setting.name]
        for setting in SETTINGS
        if environment.get(setting.name)
    }
