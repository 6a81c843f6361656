"""Run the tests of this folder on a Slurm cluster on this machine, with each MPI.

    python tests/slurm/run.py NAME=ENVIRONMENT ... [--quick] [OPTION OF PYTEST ...]

``make test-slurm`` runs MPICH and Open MPI. Needs root and Debian's Slurm packages. With apt-get,
missing packages are installed; otherwise this prints their names. Nodes are namespaces. If these
are not permitted, as in an unprivileged container, this fails. --quick skips the tests marked slow.
Each MPI has a separate cluster. Clusters run at the same time, because tests mostly wait. They end
if this is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
#: Required commands and libraries, and their Debian packages.
NEEDED = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "/usr/lib/*/pmix2/lib/libpmix.so.2": "libpmix2",
    "ip": "iproute2",
    "unshare": "util-linux",
    "ps": "procps",
}
#: Nodes; and processors per node in Slurm's configuration, for two jobs with two ranks on each.
NODES, CPUS = 2, 4

#: Open MPI's issue 12495: under srun, a rank in MPI_Init rarely crashes when a message of a faster
#: rank arrives. A test is repeated once if its output has both functions.
CRASH_IN_INIT = r"(?s)ob1_recv_frag_callback_match.*ompi_mpi_init"


def is_installed(name: str) -> bool:
    """Return whether a command is on the path or in /usr/sbin, or files match a pattern."""
    if name.startswith("/"):
        return any(Path("/").glob(name[1:]))
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def missing() -> list[str]:
    """Return the missing packages."""
    return [package for name, package in NEEDED.items() if not is_installed(name)]


def install(packages: list[str]) -> None:
    """Install packages with apt-get if this is root."""
    if not packages or os.getuid() != 0 or not shutil.which("apt-get"):
        return
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(
            ["apt-get", "-q", *command], env=quiet, stdout=subprocess.DEVNULL, check=False
        )


def run(clusters: Sequence[tuple[str, list[str | Path], str]]) -> list[str]:
    """Run a command on a cluster for each MPI, and print its output; return the failed names.

    clusters: name, command, and the bin folder of the MPI.
    """
    failed = []
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(start(*each[1:])) for each in clusters]
        for (name, *_), (process, out) in zip(clusters, runs, strict=True):
            try:
                if process.wait() != 0:
                    failed.append(name)
            finally:  # also after an interrupt
                out.seek(0)
                print(f"--- {name}\n{out.read().decode(errors='replace')}", end="", flush=True)
    return failed


@contextlib.contextmanager
def start(
    command: list[str | Path], bin: str
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start a cluster; end it with the block."""
    variables = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}:/usr/sbin:/sbin"}
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process, out
        finally:
            # The command on the head ends, then the head removes the cluster.
            for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(seconds)


def end(number: int, frame: object) -> None:
    """Exit as after Ctrl-C."""
    sys.exit(128 + number)


def main() -> int:
    """Run the tests; return 0 if all have passed."""
    parser = argparse.ArgumentParser(description="Run tests on a Slurm cluster.")
    parser.add_argument("environments", nargs="+", metavar="NAME=ENVIRONMENT")
    parser.add_argument("--quick", action="store_true", help="skip tests marked slow")
    options, pytests = parser.parse_known_args()
    signal.signal(signal.SIGTERM, end)

    install(missing())
    still_missing = missing()
    if os.getuid() != 0 or still_missing:
        needs = f"these Debian packages: {' '.join(still_missing)}" if still_missing else "root"
        print(f"tests/slurm/run.py: cannot start Slurm, which needs {needs}")
        return 1

    clusters = []
    for each in options.environments:
        name, _, environment = each.partition("=")
        bin = Path(environment).absolute() / "bin"
        command = [
            HERE / "cluster.sh", str(NODES), str(CPUS),
            bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE, *pytests,
            "--reruns=1", f"--only-rerun={CRASH_IN_INIT}",
            *(["-m", "not slow"] if options.quick else []),
        ]  # fmt: skip
        clusters.append((name, command, str(bin)))
    failed = run(clusters)
    if failed:
        print("failed:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
