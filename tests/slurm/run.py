"""Run the tests of this folder on a Slurm cluster of this machine's own, with each MPI.

    python tests/slurm/run.py NAME=ENVIRONMENT ... [--nodes 2] [-k EXPRESSION]

``make test-slurm`` does so with MPICH and Open MPI. Needs root, which may make namespaces (else
there is one node), and Debian's packages of Slurm: with apt-get they are installed if they are
missing, otherwise this says which are. Each MPI gets a cluster of its own, in a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def main() -> int:
    """Run, and return 0 if all has passed."""
    parser = argparse.ArgumentParser(description="Tests on a Slurm cluster of its own.")
    parser.add_argument("environments", nargs="+", metavar="NAME=ENVIRONMENT")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("-k", metavar="EXPRESSION", help="choose tests, as pytest does")
    options = parser.parse_args()

    install(missing())
    lacking = missing()
    if os.getuid() != 0 or lacking:
        wants = f"these Debian packages: {' '.join(lacking)}" if lacking else "root"
        print(f"tests/slurm/run.py: no Slurm can be started here: that needs {wants}")
        return 1

    failed = []
    for each in options.environments:
        name, _, environment = each.partition("=")
        bin = Path(environment).absolute() / "bin"
        print(f"--- {name}", flush=True)
        command = [
            HERE / "cluster.sh", str(options.nodes), str(CPUS),
            bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE,
            *(["-k", options.k] if options.k else []),
        ]  # fmt: skip
        variables = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        if subprocess.run(command, env=variables, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print("failed:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
