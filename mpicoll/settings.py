"""The table of mpicoll's environment variables, checked when a process group is created.

A variable that begins with MPICOLL_ and is not in the table is an error, so that misspelt names do
not go unnoticed. docs/settings.md and ``python -m mpicoll doctor`` use the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpicoll.errors import ArgumentError

_PREFIX = "MPICOLL_"


class Setting(NamedTuple):
    """One variable."""

    name: str  # of the variable
    values: Sequence[str]  # the allowed values, in lower case; empty: any text
    expected: str  # description of the allowed values
    effect: str  # description of the effect
    is_list: bool = False  # several of ``values`` may be given, separated by commas
    #: A regular expression of the allowed text; "": any. init_process_group checks it.
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
    "MPICOLL_DEBUG", _LEVELS,
    "how often the ranks' calls are compared, see api.md; the highest level of any rank applies",
)  # fmt: skip
TORCH_DEBUG = _one_of(
    "TORCH_DISTRIBUTED_DEBUG", _LEVELS, "the same; ignored if MPICOLL_DEBUG is set"
)
TABLE = Setting(
    "MPICOLL_TABLE", (), "a file, or 0",
    "on rank 0: the tuning table that `python -m mpicoll tune` wrote, see tune.md; 0: the "
    "default routes, without durations of earlier jobs, see performance.md",
)  # fmt: skip
#: The ways of a call through shared memory, by bit of ``kernels/src/choice.h``.
WAYS = (
    "one-shot", "slots-past-caches", "result-past-caches", "copy-by-the-kernel", "threads", "MPI",
)  # fmt: skip
CHOOSE = _one_of(
    "MPICOLL_CHOOSE", ("0", "1", "random", *WAYS),
    "on rank 0: 0: calls use the default ways and routes; 1: the fastest, which mpicoll "
    "measures while it runs; random, or one way: for tests; see performance.md",
)  # fmt: skip
SHARED_MEMORY = _one_of(
    "MPICOLL_SHARED_MEMORY", ("0", "1"),
    "0 on any rank: no shared memory between the ranks of a node, only MPI messages",
)  # fmt: skip
SINGLE_COPY = _one_of(
    "MPICOLL_SINGLE_COPY", ("0", "1"),
    "0 on any rank: no rank reads or writes the memory of another rank, see performance.md",
)  # fmt: skip
KERNELS = _one_of(
    "MPICOLL_KERNELS", ("compiled", "numpy"),
    "numpy: NumPy reduces instead of the C library, and ranks share no memory",
)  # fmt: skip
CALLS = _one_of(
    "MPICOLL_CALLS",
    ("compiled", "python"),
    "python: no native fast path; every call runs in Python",
)
REPRODUCIBLE = _one_of(
    "MPICOLL_REPRODUCIBLE", ("order", "exact"),
    "on all ranks: the level of the default group, see reproducibility.md",
)  # fmt: skip
WIRE = _one_of(
    "MPICOLL_WIRE", ("float32", "bfloat16"),
    "on all ranks: the dtype in which sums of float32 cross the network, see performance.md",
)  # fmt: skip
#: The values name the device routes of routes/registry.py, best first.
DEVICE_ROUTE = _one_of(
    "MPICOLL_DEVICE_ROUTE", (
        "peer", "hierarchical", "ipc", "direct", "staged", "nccl",
    ),
    "on all ranks: the route for device memory, see gpu.md",
)  # fmt: skip
CUDA_AWARE = _one_of(
    "MPICOLL_CUDA_AWARE", ("0", "1"),
    "whether the MPI library sends and receives device memory; mpicoll then does not probe it, see "
    "gpu.md",
)  # fmt: skip
SECRET = Setting(
    "MPICOLL_SECRET", (), "any text, the same on all ranks",
    "the secret that ranks need to connect by `env://` or `tcp://`, see launching.md",
)  # fmt: skip
TESTED_CALLS = _one_of(
    "MPICOLL_TESTED_CALLS", ("0", "1"),
    "1 on all ranks: a collective inside MPI that times out raises instead of ending the job; "
    "slower; see timeouts.md",
)  # fmt: skip
TIMEOUT_GRACE = Setting(
    "MPICOLL_TIMEOUT_GRACE", (), "seconds, 10 by default",
    "time from a timeout to the end of the job if a call is blocked inside MPI, or if the program "
    "does not check a failed device call; see timeouts.md", form=r"\d+(\.\d*)?",
)  # fmt: skip
ALLOW_SINGLETON = _one_of(
    "MPICOLL_ALLOW_SINGLETON", ("0", "1"),
    "1: run as a single rank although the launcher started several",
)  # fmt: skip
INSTALL_AS = Setting(
    "MPICOLL_INSTALL_AS", ("gloo", "mpi", "nccl"),
    "gloo, mpi, nccl or several, separated by commas",
    "run PyTorch scripts that name these backends, see pytorch.md", is_list=True,
)  # fmt: skip

RECORD_LENGTH = Setting(
    "TORCH_FR_BUFFER_SIZE", (), "a number of calls, 2000 by default",
    "number of calls that the flight record keeps of each group; 0: no record; "
    "see flight_record.md", form=r"\d+",
)  # fmt: skip
RECORD_FILE = Setting(
    "TORCH_FR_DUMP_TEMP_FILE", (), "a path prefix",
    "path of the flight record without the rank, by default "
    "`~/.cache/torch/comm_lib_trace_rank_`",
)  # fmt: skip

REPORT_AFTER = Setting(
    "MPICOLL_REPORT_AFTER", (), "seconds, or 0; by default 60, or half the timeout if less",
    "waiting time in a call after which a hang report is printed; 0: no reports; see "
    "reliability.md",
    form=r"\d+(\.\d+)?",
)  # fmt: skip

SETTINGS: tuple[Setting, ...] = (
    DEBUG, TORCH_DEBUG, TABLE, CHOOSE, SHARED_MEMORY, SINGLE_COPY, KERNELS, CALLS, REPRODUCIBLE,
    WIRE, DEVICE_ROUTE, CUDA_AWARE, SECRET, TESTED_CALLS, TIMEOUT_GRACE, ALLOW_SINGLETON,
    INSTALL_AS, RECORD_LENGTH, RECORD_FILE, REPORT_AFTER,
)  # fmt: skip


def find_problems(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the errors in the variables that are set, by name."""
    known = [setting.name for setting in SETTINGS]
    found = {}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known:
            import difflib

            close = difflib.get_close_matches(name.upper(), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            found[name] = f"{name}: unknown setting; {hint}"
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
