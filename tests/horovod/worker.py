"""Run Horovod's tests over mpicoll on one rank. run.py starts this program.

    python -m mpi4py tests/horovod/worker.py LOG LEFT_OUT.json PYTEST_ARGUMENT...

The output goes to LOG-RANK.log, and the outcome and reason of each test to LOG-RANK.json.
LEFT_OUT.json has patterns of the tests to skip, with reasons. ``import horovod`` imports
``mpicoll.horovod``.
The exit code is 0 also if tests fail, because a launcher ends all ranks after another exit code.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import os
import sys
import time
import types
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

#: Horovod's modules, and the modules that replace them.
MODULES = {
    "horovod": "mpicoll.horovod",
    "horovod.common": "mpicoll.horovod.common",
    "horovod.common.exceptions": "mpicoll.horovod.common.exceptions",
    "horovod.torch": "mpicoll.horovod.torch",
    "horovod.torch.elastic": "mpicoll.horovod.torch.elastic",
    "horovod.torch.mpi_ops": "mpicoll.horovod.torch.mpi_ops",
}


def install() -> None:
    """Install the modules with Horovod's names, and empty modules that its tests only import."""
    for name, ours in MODULES.items():
        sys.modules[name] = importlib.import_module(ours)
    for name in "horovod.runner", "horovod.runner.util", "horovod.runner.util.threads":
        sys.modules[name] = types.ModuleType(name)
    sys.modules["horovod.runner.util.threads"].in_thread = None  # type: ignore[attr-defined]
    sys.modules["horovod.common.util"] = types.ModuleType("horovod.common.util")
    sys.modules["horovod.common.util"].env = environment  # type: ignore[attr-defined]
    sys.modules["mock"] = unittest.mock
    # A test expects that a barrier takes the 5 s that one rank sleeps, but ranks start to measure
    # at different times.
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(1.2 * seconds)
    # The tests use every optimizer of torch.optim. Muon is newer, and supports only matrices.
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "later"


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables in a context."""
    with unittest.mock.patch.dict(os.environ, variables):
        yield


class Outcomes:
    """A pytest plugin that skips the excluded tests and writes the outcome after each test."""

    def __init__(self, left_out: dict[str, str], file: Path) -> None:
        self.left_out, self.file = left_out, file
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for pattern, reason in self.left_out.items():
                if fnmatch.fnmatch(item.name, pattern):
                    item.add_marker(pytest.mark.skip(reason=f"excluded: {reason}"))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = str(report.longrepr[2] if report.skipped else report.longrepr or "")
            self.outcomes[report.nodeid.rpartition("::")[2]] = (report.outcome, reason)
            draft = self.file.with_suffix(".draft")
            draft.write_text(json.dumps(self.outcomes))
            draft.replace(self.file)


def main() -> int:
    log, left_out, *arguments = sys.argv[1:]
    world = MPI.COMM_WORLD
    log += f"-{world.rank}"
    with Path(f"{log}.log").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    install()
    plugin = Outcomes(json.loads(Path(left_out).read_text()), Path(f"{log}.json"))
    code = int(pytest.main(["-v", "-p", "no:cacheprovider", *arguments], [plugin]))
    ran = 0, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if code in ran else code


if __name__ == "__main__":
    sys.exit(main())
