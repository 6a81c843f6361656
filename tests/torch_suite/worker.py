"""Runs tests of PyTorch's suite one after another, for run.py, which starts it.

Reads a test's name from each line of standard input and answers with its outcome, in JSON, on
standard output. What the test and its ranks print goes to NAME.log in the folder given.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import unittest
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

#: Seconds that the processes of a test may take to end after it.
GRACE = 5.0


def main() -> None:
    import suite  # here: a rank that is spawned imports this file, but needs no second torch

    logs = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    if suite.START == "forkserver":
        multiprocessing.set_forkserver_preload(["suite"])
    # The processes that a rank leaves behind become children of this one.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    names = unittest.TestLoader().getTestCaseNames(suite.TestDistributed)
    print(json.dumps(names), file=answers, flush=True)
    for line in sys.stdin:
        answer = run(suite.TestDistributed, line.strip(), logs)
        print(json.dumps(answer), file=answers, flush=True)


def run(kind: type[unittest.TestCase], name: str, logs: Path) -> dict[str, object]:
    """Run a test; return its outcome, the reason, and the seconds that it took."""
    log = logs / f"{name}.log"
    log.unlink(missing_ok=True)
    with log.open("a") as output:  # as its ranks do, or one writes over the other
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    case = kind(name)
    case.log = str(log)  # type: ignore[attr-defined]
    result = unittest.TestResult()
    start = time.perf_counter()
    unittest.TestSuite([case]).run(result)
    seconds = time.perf_counter() - start

    if problems := result.failures + result.errors:
        outcome, reason = "failed", "\n".join(text for _, text in problems)
    elif result.unexpectedSuccesses:
        outcome, reason = "failed", "was expected to fail"
    elif result.skipped:
        outcome, reason = "skipped", result.skipped[0][1]
    else:
        outcome, reason = "passed", ""
    reason += "".join(f"\nA process was left: {each}" for each in end_others())
    print(reason, flush=True)
    return {"name": name, "outcome": outcome, "reason": reason, "seconds": seconds}


def end_others() -> list[str]:
    """Wait for the processes that a test started; end those that stay and return what they were."""
    deadline = time.monotonic() + GRACE
    while others := descendants():
        if time.monotonic() > deadline:
            commands = [command(pid) for pid in others]
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return commands
        time.sleep(0.05)
    return []


def descendants() -> list[int]:
    """Return the processes below this one, without those that multiprocessing keeps."""
    # Waits for those of its own that have ended.
    own = {process.pid for process in multiprocessing.active_children()}
    kept = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, state, parent = parse(stat.read_text())
            if state == "Z" and parent == os.getpid() and pid not in own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            elif state != "Z":
                children.setdefault(parent, []).append(pid)
    below = [os.getpid()]
    for pid in below:
        below += children.get(pid, [])
    return [pid for pid in below[1:] if pid not in kept]


def parse(stat: str) -> tuple[int, str, int]:
    """Return the process, its state and its parent, of a line of /proc/PID/stat."""
    # The name between may itself have brackets and spaces.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return int(stat.split()[0]), state, int(parent)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return f"{pid}, which has ended"


if __name__ == "__main__":
    main()
