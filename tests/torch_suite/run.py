"""Run PyTorch's own tests of a backend with mpicoll and with Gloo; ``make test-torch-suite``.

    python tests/torch_suite/run.py [options]

This Python needs torch, expecttest and an MPI of the MPICH family, because the ranks are started
without mpiexec. The tests in ``torch.testing._internal.distributed.distributed_test`` run on a CPU:

- ``gloo``: all tests with BACKEND=gloo.
- ``mpicoll``: all tests with BACKEND=mpicoll. Each test that passes with Gloo must pass.
- ``mpi``: the tests that do not pass with Gloo, with BACKEND=mpi, a name that mpicoll replaces.
  None may fail, and each test that PyTorch runs only for this name must pass.

Some tests may fail (``allowed_failures``). The exit code is 1 if another test fails, or if one of
them passes. Output: .cache/torch_suite/BACKEND/WORLD_SIZE/TEST.log.
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
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LOGS = ROOT / ".cache" / "torch_suite"

#: PyTorch's timeout of a test, and, as it does not end every test, the one that ends the worker.
TIMEOUT_S, KILL_TIMEOUT_S = 120, 180

#: The outcome of a test that PyTorch runs only with BACKEND=mpi, and PyTorch's skip reason for it.
ONLY_MPI, ONLY_MPI_REASON = "only-mpi", "Only MPI supports"

TORCH = metadata.version("torch").partition("+")[0]


@dataclass
class Pass:
    """The outcomes of the tests with one backend and number of ranks."""

    backend: str
    ranks: int
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def with_outcome(self, outcome: str) -> set[str]:
        return {name for name, each in self.outcomes.items() if each == outcome}

    @property
    def logs(self) -> Path:
        return LOGS / self.backend / str(self.ranks)

    def __str__(self) -> str:
        counts = Counter(self.outcomes.values())
        counts["skipped"] += counts[ONLY_MPI]
        cells = "".join(f"{counts[each]:6} {each}" for each in ("passed", "failed", "skipped"))
        head = f"{self.backend:<8} {self.ranks} ranks"
        return f"{head}{cells}{self.seconds:8.0f} s"

    def run(self, arguments: argparse.Namespace, skipped: set[str]) -> None:
        """Run the tests, with several workers at the same time."""
        start = time.perf_counter()
        self.logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="torch-suite-") as scratch:
            environment = self._environment(scratch)
            first = Worker(environment, self.logs)
            idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
            idle.put(first)

            def run_test(name: str) -> None:
                try:
                    worker = idle.get_nowait()
                except queue.Empty:
                    worker = Worker(environment, self.logs)
                answer = worker.run(name, KILL_TIMEOUT_S)
                if answer is None:
                    worker.end()
                    answer = {"outcome": "failed", "reason": "No answer.", "seconds": 0.0}
                else:
                    idle.put(worker)
                if answer["reason"].startswith(ONLY_MPI_REASON):
                    answer["outcome"] = ONLY_MPI
                self.outcomes[name] = answer["outcome"]
                if answer["outcome"] == "failed":
                    took = f"{answer['seconds']:.1f} s"
                    why = answer["reason"].strip().splitlines()[-1:]
                    print(self.backend, self.ranks, name, "failed", took, *why, flush=True)

            chosen = [name for name in first.names if arguments.k.search(name)]
            with ThreadPoolExecutor(arguments.jobs) as pool:
                list(pool.map(run_test, [name for name in chosen if name not in skipped]))
            while not idle.empty():
                idle.get().end()
        self.outcomes = dict(sorted(self.outcomes.items()))
        self.seconds = time.perf_counter() - start

    def _environment(self, scratch: str) -> dict[str, str]:
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "BACKEND": self.backend,
            "WORLD_SIZE": str(self.ranks),
            # Each test gets its own file. With env://, PyTorch skips one test.
            "INIT_METHOD": f"file://{scratch}/init",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_S),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": scratch,
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if self.backend == "mpi":
            environment["MPICOLL_INSTALL_AS"] = "mpi"
        return environment


class Worker:
    """A process that runs tests (worker.py)."""

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
        """Run a test. Return the worker's answer, or None after the timeout."""
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
        """End the worker and the ranks that it started."""
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def allowed_failures(backend: str, ranks: int) -> dict[str, str]:
    """Return the tests that may fail, although they pass with Gloo or run only for the name mpi,
    with the reasons.
    """
    if backend == "mpi" and ranks == 2:
        kinds = "all_to_all", "all_to_all_single_equal_split", "all_to_all_single_unequal_split"
        return {f"test_{kind}_group": "the group has ranks 1 and 2" for kind in kinds}
    if backend == "mpicoll" and tuple(map(int, TORCH.split(".")[:2])) < (2, 14):
        # The group has the method, so these tests pass once the function calls it.
        reason = "torch.distributed.monitored_barrier rejects every backend except gloo"
        return {f"test_monitored_barrier_gloo{which}": reason for which in ("", "_subgroup")}
    return {}


def judge(run: Pass, gloo: Pass, whole: bool) -> bool:
    """Print the failures of a pass, and return whether it is as expected. whole: it ran all tests.

    An allowed failure that does not occur is also an error.
    """
    reasons = allowed_failures(run.backend, run.ranks)
    wanted = gloo.with_outcome(ONLY_MPI if run.backend == "mpi" else "passed")
    bad = {
        name
        for name, outcome in run.outcomes.items()
        if outcome == "failed" or (outcome != "passed" and name in wanted)
    }
    if whole:
        bad |= wanted - set(run.outcomes)  # this PyTorch does not have or did not run them
    stale = {name for name in reasons if name not in bad and (whole or name in run.outcomes)}
    where = f"{run.backend} {run.ranks} ranks"
    for name in sorted(bad & set(reasons)):
        print(f"EXCEPTION {where}: {name}: {reasons[name]}")
    for name in sorted(bad - set(reasons)):
        outcome, log = run.outcomes.get(name, "not run"), (run.logs / name).relative_to(ROOT)
        print(f"FAILED    {where}: {name}: {outcome}, {log}.log")
    for name in sorted(stale):
        print(f"STALE     {where}: {name}: remove its exception")
    return not (bad - set(reasons) or stale)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    backends = ["gloo", "mpicoll", "mpi"]
    parser.add_argument("--backend", nargs="+", choices=backends, default=backends)
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 3, 4], metavar="RANKS")
    parser.add_argument("-k", type=re.compile, default=re.compile(""), metavar="PATTERN")
    parser.add_argument("--jobs", type=int, default=4, help="tests at a time (%(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    whole = not arguments.k.pattern
    pairs: list[tuple[Pass, Pass]] = []
    print(f"torch {TORCH}", flush=True)
    for ranks in arguments.world_size:
        gloo = Pass("gloo", ranks)
        gloo.run(arguments, set())
        print(gloo, flush=True)
        for backend in arguments.backend:
            if backend != "gloo":
                run = Pass(backend, ranks)
                run.run(arguments, gloo.with_outcome("passed") if backend == "mpi" else set())
                print(run, flush=True)
                pairs.append((run, gloo))
    print("\n---- summary")
    for run, _ in pairs:
        print(run)
    results = [judge(run, gloo, whole) for run, gloo in pairs]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
