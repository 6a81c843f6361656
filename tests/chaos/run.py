"""Inject faults into jobs, and check how each job ends.

    python tests/chaos/run.py --mpiexec COMMAND [--launcher mpirun|torchrun|srun] [--ranks 3]
        [--faults NAME ...] [--calls NAME ...]

Each job runs ``program.py``, which makes calls of one kind until a fault is injected into one rank.
FAULTS lists the expected results: whether the job continues, the maximum time until it ends in
seconds, and patterns on standard error. No other rank may be reported as the cause. A job must
leave no process and no shared memory behind.
``make chaos`` runs every fault with every kind of call. With --chosen, as in continuous
integration, it uses one or two kinds. --launcher is the launcher that COMMAND runs; torchrun needs
no COMMAND.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

PROGRAM = Path(__file__).resolve().parent / "program.py"
#: Timeouts until the job has started, until it has ended after the fault, and until its remaining
#: processes have exited.
START_TIMEOUT_S, END_TIMEOUT_S, EXIT_TIMEOUT_S = 80.0, 40.0, 5.0
#: Environment variable of all processes of a job.
JOB = "TEST_MPICOLL_CHAOS"

#: Launchers, and the time in seconds that they may add to the limits of FAULTS.
LAUNCHERS = {"mpirun": 0.0, "torchrun": 6.0, "srun": 2.0}

#: Kinds of calls, and their environment variables. The word before the comma is program.py's CALL.
CALLS: dict[str, dict[str, str]] = {
    "small": {}, "small,python": {"MPICOLL_CALLS": "python"},
    "small,mpi": {"MPICOLL_SHARED_MEMORY": "0"}, "large": {}, "asynchronous": {}, "message": {},
    "objects": {}, "broadcast": {}, "barrier": {},
}  # fmt: skip


class Fault(NamedTuple):
    """A fault and its expected result."""

    continues: bool  # the job succeeds
    within_s: float  # maximum time from the fault to the end of all processes
    #: Patterns in the standard error before MPI's messages. {rank} is the faulty rank. Unless one
    #: contains "rank {rank} of", no rank may be reported.
    patterns: Sequence[str] = ()
    calls: Sequence[str] = ("small",)  # the kinds of calls that --chosen runs


#: Maximum times without a timeout, and after a timeout: the timeout of program.py, the exchange of
#: flight records, MPI's grace, and the end of the job.
SOON_S, TIMEOUT_S = 5.0, 4.0 + 3.0 + 2.0 + 5.0

KILLED = ("lost: rank {rank} of .* killed by SIGKILL .*, (after call|before its first call)",)
RAISED = ("ValueError: the program's own",)

FAULTS = {
    "SIGKILL": Fault(False, SOON_S, KILLED, ("small", "message")),
    "SIGKILL after init": Fault(False, SOON_S, KILLED),
    "SIGSEGV": Fault(False, SOON_S, ("lost: rank {rank} of .* killed by SIGSEGV",)),
    # On a busy machine the monitor cannot always distinguish the launcher's signals from this one.
    "SIGTERM": Fault(False, SOON_S, (
        "lost: rank {rank} of .* by SIGTERM|lost together: .* rank {rank} first",)),
    "exit": Fault(False, SOON_S, ("lost: rank {rank} of .* exited with code 3",)),
    "sys.exit": Fault(False, SOON_S, ("mpicoll: rank {rank} exited with code 3",)),
    "SIGSTOP": Fault(False, TIMEOUT_S, ("rank {rank}: stopped", "timeout of 4 s"),
                     ("small", "small,mpi")),
    "a pause": Fault(True, SOON_S, (), ("asynchronous",)),
    "an exception before": Fault(False, SOON_S, RAISED),
    "an exception after": Fault(False, SOON_S, RAISED),
    "an exception in a hook": Fault(True, SOON_S),
    "an exception in a thread": Fault(True, SOON_S, RAISED),
    "a bad argument": Fault(False, SOON_S, ("ArgumentTypeError: all_reduce",)),
    "late": Fault(True, SOON_S, (), ("objects",)),
    "never": Fault(False, TIMEOUT_S, ("(timeout of|not complete within) 4 s",),
                   ("small", "small,mpi", "asynchronous", "message")),
    "another call": Fault(False, TIMEOUT_S, ("all_gather_object",), ("small", "small,mpi")),
    "another root": Fault(False, TIMEOUT_S, ("src 1",)),
    "another order of groups": Fault(False, TIMEOUT_S, ("ranks? .* waits? for 2 s",),
                                     ("barrier",)),
    "destroyed early": Fault(False, TIMEOUT_S, ("rank {rank} ended",)),
    "the launcher killed": Fault(False, TIMEOUT_S),
    "few open files": Fault(True, SOON_S, (), ("objects",)),
    "no shared memory": Fault(True, SOON_S, (), ("large",)),
}  # fmt: skip


class Outcome(NamedTuple):
    """The end of a job."""

    code: int | None  # the launcher's exit code; None if it had not ended after END_TIMEOUT_S
    seconds: float  # time from the fault to the end of the launcher
    completed: int  # number of ranks that ended successfully
    words: str  # output
    left: list[str]  # remaining processes and shared memory of the job


def find_command(launcher: str, mpiexec: str, ranks: int) -> list[str]:
    """Return the command that starts a Python script on ranks, without the script."""
    if launcher == "torchrun":
        own = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*own, "--nproc-per-node", str(ranks)]
    return [*shlex.split(mpiexec), "-n", str(ranks), sys.executable]


def watch(command: Sequence[str], fault: str, call: str) -> Outcome:
    """Run a job with a command of find_command, and return its outcome."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "MPICOLL_TIMEOUT_GRACE": "2",
            "TORCH_FR_DUMP_TEMP_FILE": str(folder / "record-"), JOB: name, **CALLS[call],
        }  # fmt: skip
        before = set(Path("/dev/shm").iterdir())
        process = subprocess.Popen(
            [*command, str(PROGRAM), fault, call, name], env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(folder / "fault", process)
            if fault == "the launcher killed":
                process.kill()
            words, _ = process.communicate(timeout=END_TIMEOUT_S)
            code: int | None = process.returncode
            over = time.time()
            left = processes_left(name)
        except subprocess.TimeoutExpired:
            code, over, left = None, time.time(), []
            kill(name)
            words, _ = process.communicate()
        finally:
            kill(name)
            process.wait()
        fault_time = folder / "fault"
        start = float(fault_time.read_text()) if fault_time.exists() else over
        new = set(Path("/dev/shm").iterdir()) - before
        left += sorted(str(path) for path in new if "mpicoll" in path.name)
        return Outcome(code, over - start, len([*folder.glob("end-*")]), words, left)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def processes_of(name: str) -> Iterator[int]:
    """Yield the running processes of a job."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{JOB}={name}".encode() in (path / "environ").read_bytes():
                yield int(path.name)


def processes_left(name: str) -> list[str]:
    """Return the command lines of a job's processes that do not exit."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while (alive := [*processes_of(name)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    for pid in alive:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            found.append(f"process {pid}: {line}")
    return found


def kill(name: str) -> None:
    """Kill the processes of a job."""
    for pid in processes_of(name):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


#: The ranks that a message reports as the cause of a job's end.
REPORTED = re.compile(
    r"mpicoll: (?:lost: )?(ranks? [\d, -]*\d) of \d+ \(.*\) (?:was|were|exited|ha)"
)


def judge(fault: str, ranks: int, found: Outcome, launcher: str = "mpirun") -> list[str]:
    """Return the differences from FAULTS."""
    expected, wrong = FAULTS[fault], []
    if found.code is None:
        return [f"it hung for {END_TIMEOUT_S:g} s"]
    if expected.continues and (found.code != 0 or found.completed < ranks):
        counts = f"{found.completed} of {ranks} came through"
        wrong.append(f"it ended with exit code {found.code}; {counts}")
    if not expected.continues and found.code == 0:
        wrong.append("it ended with exit code 0")
    within_s = expected.within_s + LAUNCHERS[launcher]
    if found.seconds > within_s:
        wrong.append(f"it took {found.seconds:.1f} s, more than {within_s:g}")
    before_abort = re.split("(?i)MPI_Abort", found.words, maxsplit=1)[0]
    for pattern in expected.patterns:
        if not re.search(pattern.format(rank=ranks - 1), before_abort):
            wrong.append(f"{pattern!r} is missing")
    reports = any("rank {rank} of" in pattern for pattern in expected.patterns)
    allowed = f"rank {ranks - 1}" if reports else ""
    for named in REPORTED.findall(found.words):
        if named != allowed:
            wrong.append(f"{named} was reported")
    if "silent wrong result" in found.words:
        wrong.append("there was a wrong result")
    return wrong + [f"left behind: {each}" for each in found.left]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--mpiexec", default="mpirun", help="the launcher, and its options")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun", help="its name")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--chosen", action="store_true", help="one or two kinds of calls per fault")
    parser.add_argument("--at-a-time", type=int, default=2, help="jobs (%(default)s)")
    arguments = parser.parse_args()
    cases = [
        (fault, call)
        for fault, call in itertools.product(arguments.faults, arguments.calls)
        if not arguments.chosen or call in FAULTS[fault].calls
    ]
    command = find_command(arguments.launcher, arguments.mpiexec, arguments.ranks)
    failed = 0
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        outcomes = pool.map(lambda case: watch(command, *case), cases)
        for (fault, call), found in zip(cases, outcomes, strict=True):
            wrong = judge(fault, arguments.ranks, found, arguments.launcher)
            failed += bool(wrong)
            end = "continues" if found.code == 0 else f"ends with {found.code}"
            print(f"{fault:26} {call:14} {end:14} {found.seconds:5.1f} s  {'; '.join(wrong)}",
                  flush=True)  # fmt: skip
            if wrong:
                print("    " + found.words[-6000:].replace("\n", "\n    "), flush=True)
    print(f"{len(cases)} jobs, {failed} not as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
