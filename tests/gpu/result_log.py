"""pytest plugin of run.py: record each result when the test ends, and bound the time of a test.

A launch that crashes, hangs or stops at a failed test keeps its results, and the next launch
continues with the other tests. Environment variables:

    TEST_MPICOLL_RESULTS  folder for one file per process. Lines: event, test, message, by tabs
    TEST_MPICOLL_DONE     file with the tests to leave out, one per line
    TEST_MPICOLL_SECONDS  seconds after which a test's process prints its stacks and exits
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

#: Copy of the error stream, which pytest redirects later.
STDERR = os.dup(2)
faulthandler.enable(file=STDERR)
DONE = set(Path(os.environ["TEST_MPICOLL_DONE"]).read_text().splitlines())


def write(event, test, message=""):
    line = f"{event}\t{test}\t{' '.join(message.split())[:500]}\n"
    with Path(os.environ["TEST_MPICOLL_RESULTS"], f"{os.getpid()}.tsv").open("a") as file:
        file.write(line)


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.nodeid not in DONE]


def pytest_runtest_logstart(nodeid):
    write("began", nodeid)
    seconds = float(os.environ["TEST_MPICOLL_SECONDS"])
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def pytest_runtest_logreport(report):
    if report.outcome == "passed" and report.when != "call":
        return
    message = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)[-500:]
    elif report.skipped:
        message = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected"
    write(report.outcome, report.nodeid, message)


def pytest_runtest_logfinish(nodeid):
    faulthandler.cancel_dump_traceback_later()
    write("ended", nodeid)
