"""Run tests of PyTorch's suite one after another. run.py starts this program.

Each line of standard input has the name of a test. The answer on standard output is its outcome in
JSON. The output of the test and its ranks goes to FOLDER/NAME.log.
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

#: Time for the processes of a test to end after the test.
EXIT_TIMEOUT_S = 5.0


def main() -> None:
    import suite  # not at module level: a spawned rank imports this file without torch

    logs = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    multiprocessing.set_forkserver_preload(["suite"])
    # Orphaned processes of a rank become children of this process.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    names = unittest.TestLoader().getTestCaseNames(suite.TestDistributed)
    print(json.dumps(names), file=answers, flush=True)
    for line in sys.stdin:
        answer = run(suite.TestDistributed, line.strip(), logs)
        print(json.dumps(answer), file=answers, flush=True)


def run(kind: type[unittest.TestCase], name: str, logs: Path) -> dict[str, object]:
    """Run a test. Return its outcome, the reason, and the duration in seconds."""
    log = logs / f"{name}.log"
    log.unlink(missing_ok=True)
    with log.open("a") as output:  # the ranks append to the same file
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
    reason += "".join(f"\nA process did not end: {each}" for each in kill_remaining())
    print(reason, flush=True)
    return {"name": name, "outcome": outcome, "reason": reason, "seconds": seconds}


def kill_remaining() -> list[str]:
    """Wait for the processes of a test. Kill the remaining ones and return their command lines."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while remaining := descendants():
        if time.monotonic() > deadline:
            commands = []
            for pid in remaining:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    commands.append(words.strip())
                    os.kill(pid, signal.SIGKILL)
            return commands
        time.sleep(0.05)
    return []


def descendants() -> list[int]:
    """Return the descendants of this process, except multiprocessing's permanent processes."""
    own = {process.pid for process in multiprocessing.active_children()}  # collects exit codes
    kept = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name of the program, before the last bracket, may have brackets and spaces.
            state, number = stat.read_text().rpartition(")")[2].split()[:2]
            pid, parent = int(stat.parent.name), int(number)
            if state == "Z" and parent == os.getpid() and pid not in own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            elif state != "Z":
                children.setdefault(parent, []).append(pid)
    below = [os.getpid()]
    for pid in below:
        below += children.get(pid, [])
    return [pid for pid in below[1:] if pid not in kept]


if __name__ == "__main__":
    main()
