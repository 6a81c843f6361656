"""Tests of whole jobs: fixtures, which conftest.py imports, and functions. (PYTEST_DONT_REWRITE)

A test declares its job by a decorator (``made_by``) and checks the result through the fixture
``ended``. All jobs of a module start together, a few at a time, because most of their time is spent
waiting.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mpicoll.kernels.library import kernels
from mpicoll.launch.launchers import is_bootstrap_variable, is_launcher_variable

#: The environment of all jobs. Jobs start in threads, so they must not read ``os.environ``, which
#: tests of the module change.
ENVIRONMENT = dict(os.environ)
#: Maximum number of jobs that run at the same time.
PARALLEL_JOBS = 3

MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))
needs_mpiexec = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")
compiled = pytest.mark.skipif(kernels is None, reason="the limit is the C library's")
#: Printed by a rank that hangs.
HUNG = "(most recent call first)"


def run_program(
    *command: str | Path, timeout: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program without standard input. Return its exit code and its output."""
    return subprocess.run(
        [*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=timeout, check=False, **options,
    )  # fmt: skip


def assert_processes_end(text: str, timeout_s: float = 10) -> None:
    """Wait until no process has a text in its environment variables."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                left += [path] if text.encode() in path.read_bytes() else []
        if not left:
            return
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.1)


def without_launcher() -> dict[str, str]:
    """Return the environment without the variables of launchers."""
    return {
        name: value
        for name, value in os.environ.items()
        if not is_launcher_variable(name) and not is_bootstrap_variable(name)
    }


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python process without the environment variables of launchers."""
    return run_program(sys.executable, "-c", code, env=without_launcher() | variables)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers from the environment."""
    for name in os.environ.keys() - without_launcher().keys():
        monkeypatch.delenv(name)


#: Defines a function that returns the error of a call.
ERROR_OF = """
def error_of(kind, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
"""


def preamble(limit: int) -> str:
    """Return the beginning of a script. After ``limit`` seconds it prints all stacks and dies."""
    return f"""
import faulthandler, os, signal, sys, threading, time
faulthandler.register(signal.SIGALRM, chain=True)
signal.alarm({limit})
import numpy as np
import mpicoll as dist

def say(*words):  # one write, so that lines of ranks do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
{ERROR_OF}"""


def made_by(
    kind: Callable[..., Any], run: Callable[..., Any], *marks: pytest.MarkDecorator
) -> Callable[..., Callable[[Any], Any]]:
    """Return the decorator that gives a test its job: ``kind(script, ...)``.

    $name in the script is a parameter of the test, or of ``values``. run(job, parameters, folder):
    runs a job and returns the result. marks: of all tests.
    """

    def job(script: str, values: Any = None, **options: Any) -> Callable[[Any], Any]:
        def decorate(test: Any) -> Any:
            test.job, test.run = kind(textwrap.dedent(script), **options), run
            test.values = values or {}
            for mark in marks:
                test = mark(test)
            return test

        return decorate

    return job


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with a job as slow, before pytest selects tests by their markers."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.function, "job"):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """Start the jobs of all selected tests of this module that are not skipped."""
    chosen = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item.function, "job")
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    pool = ThreadPoolExecutor(PARALLEL_JOBS)
    try:
        yield {
            item.nodeid: pool.submit(
                item.function.run,
                item.function.job,
                item.function.values | (item.callspec.params if hasattr(item, "callspec") else {}),
                tmp_path_factory.mktemp("job"),
            )
            for item in chosen
        }
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ended(request: pytest.FixtureRequest, jobs: dict[str, Future[Any]]) -> Any:
    """The result of the test's job."""
    return jobs[request.node.nodeid].result()
