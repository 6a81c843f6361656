"""Run the tests of this folder on a Slurm cluster of this machine's own, with each MPI.

    python tests/slurm/run.py NAME=ENVIRONMENT ... [--nodes 2] [--quick] [OPTION OF PYTEST ...]

``make test-slurm`` does so with MPICH and Open MPI. Needs root, and Debian's packages of Slurm:
with apt-get they are installed if they are missing, otherwise this says which are. Nodes are
namespaces; where these are forbidden, as in a container without privileges, this says so and
fails, and ``--nodes 1`` runs what one node can show. --quick leaves out the tests marked slow.
Each MPI gets a cluster of its own, in a second; clusters of namespaces run at the same time, for
tests mostly wait. If this is interrupted, they end.
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
#: The commands and libraries that are used, and the Debian packages that have them.
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
#: Two ranks on each node, and as many again for a job beside; the machine need not have them.
CPUS = 4


def is_there(what: str) -> bool:
    """Tell whether a command is on the path or in /usr/sbin, or files match a pattern."""
    if what.startswith("/"):
        return any(Path("/").glob(what[1:]))
    return shutil.which(what, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def missing() -> list[str]:
    """The packages of which something is not there."""
    return [package for what, package in NEEDED.items() if not is_there(what)]


def install(packages: list[str]) -> None:
    """Install them if that can be done here."""
    if not packages or os.getuid() != 0 or not shutil.which("apt-get"):
        return
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(
            ["apt-get", "-q", *command], env=quiet, stdout=subprocess.DEVNULL, check=False
        )


def run(clusters: Sequence[tuple[str, list[str | Path], str]], at_once: bool) -> list[str]:
    """Run a command on a cluster for each MPI, and print its output; return who has failed.

    clusters: name, command, and the folder of the commands of its MPI.
    """
    failed = []
    with contextlib.ExitStack() as stack:
        started = (stack.enter_context(start(*each[1:])) for each in clusters)
        runs = list(started) if at_once else started
        for (name, *_), (process, out) in zip(clusters, runs, strict=True):
            try:
                if process.wait() != 0:
                    failed.append(name)
            finally:  # or interrupted
                out.seek(0)
                print(f"--- {name}\n{out.read().decode(errors='replace')}", end="", flush=True)
    return failed


@contextlib.contextmanager
def start(
    command: list[str | Path], bin: str
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start a cluster, which has ended when this is left."""
    variables = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}:/usr/sbin:/sbin"}
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process, out
        finally:
            # All of it at once: the command on the head ends, and then the head removes the rest.
            for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(seconds)


def end(number: int, frame: object) -> None:
    """End as by Ctrl-C."""
    sys.exit(128 + number)


def main() -> int:
    """Run, and return 0 if all has passed."""
    parser = argparse.ArgumentParser(description="Tests on a Slurm cluster of its own.")
    parser.add_argument("environments", nargs="+", metavar="NAME=ENVIRONMENT")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="no tests marked slow")
    options, pytests = parser.parse_known_args()
    signal.signal(signal.SIGTERM, end)

    install(missing())
    lacking = missing()
    if os.getuid() != 0 or lacking:
        wants = f"these Debian packages: {' '.join(lacking)}" if lacking else "root"
        print(f"tests/slurm/run.py: no Slurm can be started here: that needs {wants}")
        return 1

    clusters = []
    for each in options.environments:
        name, _, environment = each.partition("=")
        bin = Path(environment).absolute() / "bin"
        command = [
            HERE / "cluster.sh", str(options.nodes), str(CPUS),
            bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE, *pytests,
            *(["-m", "not slow"] if options.quick else []),
        ]  # fmt: skip
        clusters.append((name, command, str(bin)))
    # On one node they may be the machine itself, with one munged and one set of ports.
    failed = run(clusters, at_once=options.nodes > 1)
    if failed:
        print("failed:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
