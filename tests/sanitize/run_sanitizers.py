"""Run the C sources under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

    python tests/sanitize/run_sanitizers.py VENV [--mpiexec COMMAND] [--only address|thread]

VENV is an environment with the requirements of the tests. ``make sanitize`` calls this program.

- ``kernels_test.c``, whose threads are the ranks of a group, runs under all three sanitizers.
- ``device_peers_test.cpp`` runs kernels of route ``peer`` as host threads under all three, with
  ``$CXX`` or c++.
- Python tests of the C library run on processes, with a library built for AddressSanitizer and
  UndefinedBehaviorSanitizer.

A sanitizer without a runtime library for the compiler (``$CC``, or cc) is skipped and listed at the
end. The first error ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / "mpicoll" / "kernels" / "src"
#: The extension module. All other sources form one library.
MODULE = SOURCES / "calls.c"
BUILD = ROOT / ".cache" / "sanitize"

COMPILER = shlex.split(os.environ.get("CC", "cc"))
CXX = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = ["-std=gnu11", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-trapping-math"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-fsanitize=thread"]

#: Tests of the C library without ranks, except tests of NumPy and tests with 65 threads or more,
#: which take minutes here; and tests on two ranks.
PLAIN = [f"tests/test_{name}.py" for name in ("reduction", "shared_memory", "launch_timeout")]
PLAIN_CHOSEN = "not numpy and not (threads and (65 or 256))"
ON_RANKS = [
    f"tests/mpi/test_{name}.py" for name in ("shared", "short_calls", "coalesced", "mpi_calls")
]
#: AddressSanitizer crashes at C++ exceptions of a library that is loaded late, such as torch.
ON_RANKS_CHOSEN = "not tensor and not coalesced_results and not (each_way and complex128)"

#: Timeout of one command.
TIMEOUT_S = 600

OPTIONS = {
    # The interpreter does not free all its memory.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1 atexit_sleep_ms=0",
    "MPICOLL_TABLE": "0",
    "OMP_NUM_THREADS": "1",
}


def run(command: list[str], **options: object) -> None:
    """Run a command and print its duration. If it fails, print its output and exit."""
    start = time.perf_counter()
    shown = shlex.join(command).replace(f"{ROOT}/", "")
    print(shown, flush=True)
    with (BUILD / "output").open("w+", errors="replace") as output:
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S, check=False, **options,
            ).returncode  # type: ignore[call-overload]  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "none: timed out"
        if code:
            output.seek(0)
            print(output.read())
            sys.exit(f"FAILED, exit code {code}: {shown}")
    print(f"    {time.perf_counter() - start:.1f} s", flush=True)


def keep_addresses() -> None:
    """Disable address space randomization: ThreadSanitizer supports few memory layouts."""
    no_randomize = 0x0040000
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).personality(no_randomize)


def missing_runtime(flags: list[str]) -> str:
    """Return the compiler's error if it lacks the runtime library for these flags, else ""."""
    BUILD.mkdir(parents=True, exist_ok=True)

    def complaint(*flags: str) -> str:
        done = subprocess.run(
            [*COMPILER, *flags, "-x", "c", "-", "-o", str(BUILD / "probe")],
            input="int main(void) { return 0; }\n", stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[0] if done.returncode else ""

    if broken := complaint():
        sys.exit(f"FAILED: {shlex.join(COMPILER)} compiles nothing at all: {broken}")
    return complaint(*flags)


def run_threads(name: str, flags: list[str]) -> None:
    """Build kernels_test.c with a sanitizer and run it."""
    program = BUILD / f"kernels_test-{name}"
    sources = [Path(__file__).parent / "kernels_test.c"]
    included = ("choice.c", "mpi_calls.c", "shared.c", "calls.c")
    sources += sorted({*SOURCES.glob("*.c")} - {SOURCES / name for name in included})
    warnings = ["-Wall", "-Wextra", "-Werror"]
    run([*COMPILER, *FLAGS, "-O1", *warnings, *flags, "-pthread", f"-I{SOURCES}",
         *map(str, sources), "-o", str(program)])  # fmt: skip
    run([str(program)], env=os.environ | OPTIONS, preexec_fn=keep_addresses)


def run_device_threads(name: str, flags: list[str]) -> None:
    """Build device_peers_test.cpp with a sanitizer and run it."""
    program = BUILD / f"device_peers_test-{name}"
    source = Path(__file__).parent / "device_peers_test.cpp"
    options = ["-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    run([*CXX, *options, *flags, "-pthread", f"-I{SOURCES}", str(source), "-o", str(program)])
    run([str(program)], env=os.environ | OPTIONS, preexec_fn=keep_addresses)


def run_tests(python: Path, mpiexec: list[str]) -> None:
    """Run tests in Python with a copy of the package whose C library is built with sanitizers."""
    package = BUILD / "package" / "mpicoll"
    shutil.rmtree(package.parent, ignore_errors=True)
    shutil.copytree(ROOT / "mpicoll", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    ask = "import sysconfig; print(sysconfig.get_paths()['include'])"
    include = subprocess.check_output([python, "-c", ask], text=True).strip()
    library = package / "kernels" / "_kernels.abi3.so"
    sources = sorted({*SOURCES.glob("*.c")} - {MODULE})
    build = [*COMPILER, *FLAGS, "-O2", *ADDRESS, "-shared", "-fPIC", f"-I{include}"]
    run([*build, *map(str, sources), "-o", str(library)])
    run([*build, str(MODULE), "-o", str(package / "kernels" / "_calls.abi3.so")])

    runtime = subprocess.check_output([*COMPILER, "-print-file-name=libasan.so"], text=True).strip()
    environment = os.environ | OPTIONS
    environment |= {"PYTHONPATH": str(package.parent), "PYTHONMALLOC": "malloc"}
    sanitized = ["env", f"LD_PRELOAD={runtime}", str(python)]
    # In another folder, because Python would import the package of the checkout.
    options = {"cwd": package.parent, "env": environment}
    ask = f"from mpicoll.kernels.library import describe as d; assert {str(library)!r} in d(), d()"
    run([*sanitized, "-c", ask], **options)

    # pytest must not capture the output of a sanitizer.
    pytest = ["pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    pytest += ["-c", str(ROOT / "pyproject.toml"), "--capture=sys"]
    run([*sanitized, "-m", *pytest, "-k", PLAIN_CHOSEN, *(str(ROOT / each) for each in PLAIN)],
        **options)  # fmt: skip
    run([*mpiexec, "-n", "2", *sanitized, "-m", "mpi4py", "-m", *pytest, "--with-mpi",
         "-k", ON_RANKS_CHOSEN, *(str(ROOT / each) for each in ON_RANKS)], **options)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--mpiexec", help="the launcher (default: mpiexec of VENV)")
    parser.add_argument("--only", choices=["address", "thread"])
    arguments = parser.parse_args()
    bin = Path(os.path.abspath(arguments.venv)) / "bin"  # noqa: PTH100  # its links stay links
    skipped = []
    for name, flags in {"thread": THREAD, "address": ADDRESS}.items():
        if arguments.only not in (None, name):
            continue
        missing = missing_runtime(flags)
        if missing:
            skipped.append(f"SKIPPED {flags[0]}: {shlex.join(COMPILER)} has no runtime: {missing}")
            continue
        run_threads(name, flags)
        run_device_threads(name, flags)
        if name == "address":
            first, *options = shlex.split(arguments.mpiexec or str(bin / "mpiexec"))
            if "/" in first:  # the tests run in another folder
                first = str(ROOT / first)
            run_tests(bin / "python", [first, *options])
    print(
        *skipped,
        "nothing found" if not skipped else "nothing found by the available sanitizers",
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
