"""The processes of the launcher on this node: the ancestors of a rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from mpicoll.launch.launchers import find_launcher
from mpicoll.processes import read_stat

#: Names of processes that start and end the ranks of a node.
_LAUNCHERS = {
    "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "orterun", "prte", "prted",
    "prterun", "slurmstepd",
}  # fmt: skip
#: pidfd_getfd, of Linux from 5.6 on, on x86-64 and aarch64 alike.
_PIDFD_GETFD = 438


def open_stderr(launchers: list[int]) -> int:
    """Return a descriptor of the launcher's standard error, or of this process if that fails.

    A launcher whose rank has died ends within milliseconds, and no longer reads the ranks' pipes.
    """
    with contextlib.suppress(OSError, IndexError):
        path, pidfd = Path(f"/proc/{launchers[-1]}/fd/2"), os.pidfd_open(launchers[-1])
        found = int(ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, 2, 0))
        os.close(pidfd)
        # A second open of a file would have a separate offset, and overwrite other output.
        if found < 0 and not path.is_file():
            found = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        if found >= 0:
            # A daemon that starts the ranks of a node has /dev/null.
            if os.fstat(found).st_rdev != Path(os.devnull).stat().st_rdev:
                return found
            os.close(found)
    return os.dup(2)


def find_starter(launchers: list[int]) -> int:
    """Return the process whose end also ends the ranks of this node, 0 if there is none."""
    launched = find_launcher()
    if launched is None:
        return 0
    if not launched.is_parent:
        return launchers[0] if launchers and launched.protocol else 0
    # A process that a rank starts inherits its variables, and may outlive it.
    parent = os.getppid()
    with contextlib.suppress(OSError):
        entries = os.fsdecode(Path(f"/proc/{parent}/environ").read_bytes()).split("\0")
        if launched.is_present({entry.partition("=")[0]: "" for entry in entries}):
            return 0
    return parent


def find_ancestors() -> list[int]:
    """Return the ancestors of this process that belong to an MPI launcher, the nearest first."""
    found, process = [], os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            if Path(f"/proc/{process}/comm").read_text().strip() in _LAUNCHERS:
                found.append(process)
            process = int(read_stat(process)[1])
    return found
