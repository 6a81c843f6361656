"""Inject faults into jobs, and check how each job ends.

    python tests/chaos/run.py --mpiexec COMMAND [--launcher mpirun|torchrun|srun] [--ranks 3]
        [--faults NAME ...] [--ways NAME ...]

Each job runs ``program.py``, which makes calls of one kind until a fault is injected into one rank.
FAULTS lists the expected results: whether the job continues, the maximum time until it ends in
seconds, and patterns on standard error. No other rank may be reported as the cause. A job must
leave no process and no shared memory behind.
``make chaos`` runs every fault with every kind of call; with --chosen, as in continuous
integration, with one or two kinds. --launcher names the launcher that COMMAND runs; torchrun is the
one of this Python.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

PROGRAM = Path(__file__).resolve().parent / "program.py"
#: Timeouts in seconds: until the job has started, until it has ended after the fault, and until its
#: remaining processes have exited.
BEGINNING, HANGS, GRACE = 80.0, 40.0, 5.0
#: By which the processes of a job are known.
MARK = "TEST_MPICOLL_CHAOS"


#: What starts the ranks, and the seconds that it has beyond FAULTS' to begin to act and to end.
LAUNCHERS = {"mpirun": 0.0, "torchrun": 6.0, "srun": 2.0}


class Way(NamedTuple):
    """How the calls go: by the program's way before the comma, with environment variables."""

    environment: Mapping[str, str] = MappingProxyType({})


WAYS = {
    "small": Way(),
    "small,python": Way(MappingProxyType({"MPICOLL_CALLS": "python"})),
    "small,mpi": Way(MappingProxyType({"MPICOLL_SHARED_MEMORY": "0"})),
    "large": Way(),
    "asynchronous": Way(),
    "message": Way(),
    "objects": Way(),
    "broadcast": Way(),
    "barrier": Way(),
}


class Fault(NamedTuple):
    """A fault and its expected result.

    goes_on: the job ends well. within: seconds from the fault to the end of all processes.
    words:   patterns that standard error has to have, the job's own before MPI's; {rank} is the
             rank that it happened to. Where none has "rank {rank} of", no rank may be reported.
    ways:    the kinds of calls that --chosen runs.
    """

    goes_on: bool
    within: float
    words: Sequence[str] = ()
    ways: Sequence[str] = ("small",)


#: Seconds: what ends at once; what ends by the timeout of program.py, after flight records were
#: asked for and MPI was given its grace.
SOON, TIMEOUT = 5.0, 4.0 + 3.0 + 2.0 + 5.0

FAULTS = {
    "SIGKILL": Fault(
        False, SOON, ("lost: rank {rank} of .* killed by SIGKILL",), ("small", "message")
    ),
    "SIGKILL after init": Fault(False, SOON, ("lost: rank {rank} of .* killed by SIGKILL",)),
    "SIGSEGV": Fault(False, SOON, ("lost: rank {rank} of .* killed by SIGSEGV",)),
    # On a busy machine the launcher's signals cannot always be told from the sender's.
    "SIGTERM": Fault(
        False, SOON, ("lost: rank {rank} of .* by SIGTERM|lost together: .* rank {rank} first",)
    ),
    "exit": Fault(False, SOON, ("lost: rank {rank} of .* exited with code 3",)),
    "sys.exit": Fault(False, SOON, ("mpicoll: rank {rank} of .* exited with code 3",)),
    "SIGSTOP": Fault(
        False, TIMEOUT, ("rank {rank}: stopped", "timeout of 4 s"), ("small", "small,mpi")
    ),
    "a pause": Fault(True, SOON, (), ("asynchronous",)),
    "an exception before": Fault(False, SOON, ("ValueError: the program's own",)),
    "an exception after": Fault(False, SOON, ("ValueError: the program's own",)),
    "an exception in a hook": Fault(True, SOON),
    "an exception in a thread": Fault(True, SOON, ("ValueError: the program's own",)),
    "a bad argument": Fault(False, SOON, ("ArgumentTypeError: all_reduce",)),
    "late": Fault(True, SOON, (), ("objects",)),
    "never": Fault(
        False,
        TIMEOUT,
        ("(timeout of|not complete within) 4 s",),
        ("small", "small,mpi", "asynchronous", "message"),
    ),
    "another call": Fault(False, TIMEOUT, ("all_gather_object",), ("small", "small,mpi")),
    "another root": Fault(False, TIMEOUT, ("src 1",)),
    "another order of groups": Fault(False, TIMEOUT, ("ranks? .* waits? for 2 s",), ("barrier",)),
    "destroyed early": Fault(False, TIMEOUT, ("rank {rank} ended",)),
    "the launcher killed": Fault(False, TIMEOUT),
    "few open files": Fault(True, SOON, (), ("objects",)),
    "no shared memory": Fault(True, SOON, (), ("large",)),
}


class Outcome(NamedTuple):
    """The end of a job.

    code:    the launcher's exit code; None if it was still there after HANGS seconds.
    seconds: from what happened to the end of the launcher.
    ended:   ranks that came to their good end.
    words:   standard error.
    left:    remains of the job: processes, shared memory.
    """

    code: int | None
    seconds: float
    ended: int
    words: str
    left: list[str]


def find_command(launcher: str, mpiexec: str, ranks: int) -> list[str]:
    """Return what starts the ranks of a job, followed by a script of Python and its arguments."""
    if launcher == "torchrun":
        own = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*own, "--nproc-per-node", str(ranks)]
    return [*shlex.split(mpiexec), "-n", str(ranks), sys.executable]


def watch(command: Sequence[str], fault: str, way: str) -> Outcome:
    """Run a job and return how it ends.

    command: as find_command returns it.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "MPICOLL_TIMEOUT_GRACE": "2",
            "TORCH_FR_DUMP_TEMP_FILE": str(folder / "record-"), MARK: name,
            **WAYS[way].environment,
        }  # fmt: skip
        before = set(Path("/dev/shm").iterdir())
        process = subprocess.Popen(
            [*command, str(PROGRAM), fault, way, name], env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(folder / "fault", process)
            if fault == "the launcher killed":
                process.kill()
            words, _ = process.communicate(timeout=HANGS)
            code: int | None = process.returncode
            over = time.time()
            left = processes_left(name)
        except subprocess.TimeoutExpired:
            code, over, left = None, time.time(), []
            end(name)
            words, _ = process.communicate()
        finally:
            end(name)
            process.wait()
        began = folder / "fault"
        start = float(began.read_text()) if began.exists() else over
        new = set(Path("/dev/shm").iterdir()) - before
        left += sorted(str(path) for path in new if "mpicoll" in path.name)
        return Outcome(code, over - start, len([*folder.glob("end-*")]), words, left)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    moment = time.monotonic() + BEGINNING
    while not path.exists() and process.poll() is None and time.monotonic() < moment:
        time.sleep(0.01)


def processes_of(name: str) -> Iterator[int]:
    """Yield the processes of a job that are alive."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={name}".encode() in (path / "environ").read_bytes():
                yield int(path.name)


def processes_left(name: str) -> list[str]:
    """Return the command lines of a job's processes that do not end by themselves."""
    moment = time.monotonic() + GRACE
    while (alive := [*processes_of(name)]) and time.monotonic() < moment:
        time.sleep(0.05)
    found = []
    for pid in alive:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            found.append(f"process {pid}: {line}")
    return found


def end(name: str) -> None:
    """Kill the remaining processes of a job."""
    for pid in processes_of(name):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


#: Who is reported as the cause of a job's end.
REPORTED = re.compile(
    r"mpicoll: (?:lost: )?(ranks? [\d, -]*\d) of \d+ \(.*\) (?:was|were|exited|ha)"
)


def judge(fault: str, ranks: int, found: Outcome, launcher: str = "mpirun") -> list[str]:
    """Return the differences from FAULTS."""
    expected, wrong = FAULTS[fault], []
    if found.code is None:
        return [f"it hung for {HANGS:g} s"]
    if expected.goes_on and (found.code != 0 or found.ended < ranks):
        wrong.append(f"it ended with exit code {found.code}; {found.ended} of {ranks} came through")
    if not expected.goes_on and found.code == 0:
        wrong.append("it ended with exit code 0")
    within = expected.within + LAUNCHERS[launcher]
    if found.seconds > within:
        wrong.append(f"it took {found.seconds:.1f} s, more than {within:g}")
    own = re.split("(?i)MPI_Abort", found.words, maxsplit=1)[0]
    for pattern in expected.words:
        if not re.search(pattern.format(rank=ranks - 1), own):
            wrong.append(f"{pattern!r} is missing")
    allowed = f"rank {ranks - 1}" if any("rank {rank} of" in one for one in expected.words) else ""
    for named in REPORTED.findall(found.words):
        if named != allowed:
            wrong.append(f"{named} was reported")
    if "silent wrong result" in found.words:
        wrong.append("there was a wrong result")
    return wrong + [f"left behind: {each}" for each in found.left]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--mpiexec", default="mpirun", help="the launcher, and its options")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun", help="which one that is")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--chosen", action="store_true", help="one or two ways a fault")
    parser.add_argument("--at-a-time", type=int, default=2, help="jobs (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="all that the jobs print")
    arguments = parser.parse_args()
    cases = [
        (fault, way)
        for fault, way in itertools.product(arguments.faults, arguments.ways)
        if not arguments.chosen or way in FAULTS[fault].ways
    ]
    command = find_command(arguments.launcher, arguments.mpiexec, arguments.ranks)
    failed = 0
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        outcomes = pool.map(lambda case: watch(command, *case), cases)
        for (fault, way), found in zip(cases, outcomes, strict=True):
            wrong = judge(fault, arguments.ranks, found, arguments.launcher)
            failed += bool(wrong)
            end_of_it = "goes on" if found.code == 0 else f"ends with {found.code}"
            print(f"{fault:26} {way:14} {end_of_it:14} {found.seconds:5.1f} s  {'; '.join(wrong)}",
                  flush=True)  # fmt: skip
            if wrong or arguments.verbose:
                print("    " + found.words[-6000:].replace("\n", "\n    "), flush=True)
    print(f"{len(cases)} jobs, {failed} not as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
