"""Runs PyTorch's own tests of a backend with mpicoll, beside Gloo; ``make test-torch-suite``.

    python tests/torch_suite/run.py [options]

by a Python that has torch, expecttest and an MPI of MPICH's family: the ranks are started without
mpiexec. The tests are those of ``torch.testing._internal.distributed.distributed_test``, on a CPU.

- ``gloo``: as PyTorch runs them with BACKEND=gloo. The outcomes are kept in gloo.txt.
- ``mpicoll``: with BACKEND=mpicoll. Every test that passes with Gloo has to pass.
- ``mpi``: with BACKEND=mpi, a name that mpicoll takes over, those that do not pass with Gloo. None
  may fail, and those that PyTorch runs for this name alone have to pass. With ``--all`` the others
  too, of which PyTorch asks more for this name than for a plug-in's: events of its profilers.

exceptions.txt names those that do not, and why. The exit code is 1 if another one does not, or if
one of those does. What a test printed is in .cache/torch_suite/BACKEND/WORLD_SIZE/TEST.log.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LOGS = ROOT / ".cache" / "torch_suite"
RECORD = HERE / "gloo.txt"
EXCEPTIONS = HERE / "exceptions.txt"

#: Seconds that a test may take beyond PyTorch's own limit, which can fail to end it.
BEYOND = 60

#: The outcome of a test that is run with BACKEND=mpi alone, and what PyTorch says of it.
ONLY_MPI = "only-mpi"
SAYS_ONLY_MPI = "Only MPI supports"

TORCH = metadata.version("torch").partition("+")[0]


@dataclass
class Pass:
    """The tests with one backend and number of ranks, and how they went."""

    backend: str
    ranks: int
    outcomes: dict[str, str] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0

    def those(self, outcome: str) -> set[str]:
        return {name for name, each in self.outcomes.items() if each == outcome}

    @property
    def logs(self) -> Path:
        return LOGS / self.backend / str(self.ranks)

    def __str__(self) -> str:
        counts = Counter(self.outcomes.values())
        counts["skipped"] += counts[ONLY_MPI]
        cells = "".join(f"{counts[each]:6} {each}" for each in ("passed", "failed", "skipped"))
        head = f"{self.backend:<8} {self.ranks} ranks"
        return f"{head}{cells}{self.seconds:8.0f} s  {self.note}".rstrip()

    def run(self, arguments: argparse.Namespace, left_out: set[str]) -> None:
        """Run the tests, by several workers at once."""
        start = time.perf_counter()
        self.logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="torch-suite-") as scratch:
            environment = self._environment(arguments, scratch)
            first = Worker(environment, self.logs)
            names: queue.Queue[str] = queue.Queue()
            for name in first.names:
                if arguments.k.search(name) and name not in left_out:
                    names.put(name)

            def work(worker: Worker | None = None) -> None:
                while True:
                    try:
                        name = names.get_nowait()
                    except queue.Empty:
                        break
                    worker = worker or Worker(environment, self.logs)
                    answer = worker.run(name, arguments.timeout + BEYOND)
                    if answer is None:
                        worker.end()
                        worker = None
                        answer = {"outcome": "failed", "reason": "No answer.", "seconds": 0.0}
                    if answer["reason"].startswith(SAYS_ONLY_MPI):
                        answer["outcome"] = ONLY_MPI
                    self.outcomes[name] = answer["outcome"]
                    self._print(name, answer, arguments.verbose)
                if worker:
                    worker.end()

            others = [threading.Thread(target=work, daemon=True) for _ in range(arguments.jobs - 1)]
            for thread in others:
                thread.start()
            work(first)
            for thread in others:
                thread.join()
        self.outcomes = dict(sorted(self.outcomes.items()))
        self.seconds = time.perf_counter() - start

    def _environment(self, arguments: argparse.Namespace, scratch: str) -> dict[str, str]:
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "BACKEND": self.backend,
            "WORLD_SIZE": str(self.ranks),
            # Each test gets a file of its own. With env:// PyTorch leaves one test out.
            "INIT_METHOD": f"file://{scratch}/init",
            "SUITE_START": arguments.start,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(arguments.timeout),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": scratch,
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if self.backend == "mpi":
            environment["MPICOLL_INSTALL_AS"] = "mpi"
        return environment

    def _print(self, name: str, answer: dict[str, Any], verbose: bool) -> None:
        if answer["outcome"] == "failed" or verbose:
            took = f"{answer['seconds']:.1f} s"
            why = answer["reason"].strip().splitlines()[-1:]
            print(self.backend, self.ranks, name, answer["outcome"], took, *why, flush=True)


class Worker:
    """A process that runs tests, see worker.py."""

    def __init__(self, environment: dict[str, str], logs: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(logs)], env=environment, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.names: list[str] = self._answer(120) or []
        if not self.names:
            self.end()
            sys.exit("PyTorch's suite could not be loaded")

    def run(self, name: str, timeout: float) -> dict[str, Any] | None:
        """Return a test's answer, or None if there is none in time."""
        assert self._process.stdin
        try:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        """End it and the ranks that it started."""
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def read_record() -> dict[int, Pass] | None:
    """Return Gloo's outcomes, by number of ranks, if they are those of this torch."""
    if not RECORD.exists():
        return None
    lines = RECORD.read_text().splitlines()
    version, *sizes = lines[1].removeprefix("# torch ").replace(",", "").split()
    if version != TORCH:
        print(f"{RECORD.name} is of torch {version}, this is {TORCH}: Gloo is run")
        return None
    passes = {
        int(size): Pass("gloo", int(size), note="recorded") for size in sizes if size.isdigit()
    }
    for line in lines[2:]:
        name, *outcomes = line.split()
        for each, outcome in zip(passes.values(), outcomes, strict=True):
            each.outcomes[name] = outcome
    return passes


def write_record(passes: list[Pass], start: str) -> None:
    """Keep Gloo's outcomes."""
    sizes = " ".join(str(each.ranks) for each in passes)
    lines = [
        "# Written by run.py --write-record: how PyTorch's suite goes with Gloo on a CPU.",
        f"# torch {TORCH}, {sizes} ranks, {start}",
    ]
    for name in passes[0].outcomes:
        lines.append(
            " ".join([f"{name:<72}", *(f"{each.outcomes[name]:<8}" for each in passes)]).rstrip()
        )
    RECORD.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Excuse:
    """A test that need not pass."""

    backend: str
    name: str
    sizes: tuple[int, ...]
    reason: str


def read_exceptions() -> Iterator[Excuse]:
    """Yield what exceptions.txt holds; its head says how it is written."""
    text = re.sub(r"\n[ \t]+", " ", EXCEPTIONS.read_text())
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, _, reason = line.partition(": ")
            backend, name, *limits = head.split()
            before = [each.removeprefix("torch<") for each in limits if each.startswith("torch<")]
            sizes = tuple(int(each) for each in limits if each.isdecimal())
            if all(numbers(TORCH) < numbers(each) for each in before):
                yield Excuse(backend, name, sizes, reason.strip())


def numbers(version: str) -> list[int]:
    """A version to compare with others."""
    return [int(number) for number in re.findall(r"\d+", version)]


@dataclass
class Verdict:
    """What a pass comes to: tests that should have passed, and exceptions that hold no more."""

    excused: dict[str, str] = field(default_factory=dict)  # and why
    unexcused: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, run: Pass, gloo: Pass, exceptions: list[Excuse], whole: bool) -> Verdict:
        """Judge a pass; a `whole` one ran each test that there is."""
        reasons = {
            each.name: each.reason
            for each in exceptions
            if each.backend == run.backend and run.ranks in (each.sizes or [run.ranks])
        }
        wanted = gloo.those(ONLY_MPI if run.backend == "mpi" else "passed")
        bad = {
            name
            for name, outcome in run.outcomes.items()
            if outcome == "failed" or (outcome != "passed" and name in wanted)
        }
        if whole:
            bad |= wanted - set(run.outcomes)  # which this PyTorch does not have, or did not run
        stale = {name for name in reasons if name not in bad and (whole or name in run.outcomes)}
        return cls({name: reasons[name] for name in bad & set(reasons)}, bad - set(reasons), stale)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    backends = ["gloo", "mpicoll", "mpi"]
    parser.add_argument("--backend", nargs="+", choices=backends, default=backends)
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 3, 4], metavar="RANKS")
    parser.add_argument(
        "--start", choices=["spawn", "forkserver"], default="forkserver",
        help="spawn: as PyTorch does, each rank imports torch anew (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("-k", type=re.compile, default=re.compile(""), metavar="PATTERN")
    parser.add_argument("--jobs", type=int, default=4, help="tests at a time (%(default)s)")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a test (%(default)s)")
    parser.add_argument("--record", action="store_true", help="take Gloo's outcomes from gloo.txt")
    parser.add_argument("--write-record", action="store_true", help="write gloo.txt")
    parser.add_argument("--all", action="store_true", help="mpi: also what passes with Gloo")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each test")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    whole = not arguments.k.pattern
    recorded = read_record() if arguments.record else None
    gloo = recorded or {}
    exceptions = list(read_exceptions())
    passes: list[Pass] = []
    verdicts: list[tuple[Pass, Verdict]] = []
    print(f"torch {TORCH}, ranks by {arguments.start}", flush=True)
    for ranks in arguments.world_size:
        if ranks not in gloo:
            gloo[ranks] = Pass("gloo", ranks)
            gloo[ranks].run(arguments, set())
        passes.append(gloo[ranks])
        print(gloo[ranks], flush=True)
        for backend in arguments.backend:
            if backend != "gloo":
                run = Pass(backend, ranks)
                others = backend == "mpi" and not arguments.all
                run.run(arguments, gloo[ranks].those("passed") if others else set())
                passes.append(run)
                verdicts.append((run, Verdict.of(run, gloo[ranks], exceptions, whole)))
                print(run, flush=True)
    if arguments.write_record and whole:
        write_record([each for each in passes if each.backend == "gloo"], arguments.start)

    print("\n---- summary")
    for each in passes:
        print(each)
    for run, verdict in verdicts:
        where = f"{run.backend} {run.ranks} ranks"
        for name, reason in sorted(verdict.excused.items()):
            print(f"EXCEPTION {where}: {name}: {reason}")
        for name in sorted(verdict.unexcused):
            outcome = run.outcomes.get(name, "not run")
            print(
                f"WRONG     {where}: {name}: {outcome}, {(run.logs / name).relative_to(ROOT)}.log"
            )
        for name in sorted(verdict.stale):
            print(f"STALE     {where}: {name}: it needs no exception")
    return int(any(verdict.unexcused or verdict.stale for _, verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
