"""Monitor client: the side of a rank that publishes its state, and starts the node monitor.

A job runs without a node monitor if the system has no pidfds or memfds.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll import control_messages, line_protocol, settings
from mpicoll.core.observers import Observer, observers
from mpicoll.failures import lost_ranks, node_monitor, report
from mpicoll.failures.status_page import DONE, LEFT, RUNNING, StatusPage
from mpicoll.launch.host_identity import addresses, node
from mpicoll.launch.launchers import find_launcher
from mpicoll.signals import blocked_job_signals

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["ask_about", "is_ordered_to_end", "renew", "report_ending", "sign_off", "start"]

#: Default time after which a hang is reported: maximum in seconds, and fraction of the timeout.
_REPORT_AFTER_S, _TIMEOUT_FRACTION = 60.0, 0.5
#: Names of processes that start and end the ranks of a node.
_LAUNCHERS = {
    "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "orterun", "prte", "prted",
    "prterun", "slurmstepd",
}  # fmt: skip


class _Own:
    """The status page of this process, and the descriptors for its monitor."""

    def __init__(self) -> None:
        self.page = StatusPage()
        self.cells: dict[ProcessGroup, int] = {}
        self.stacks = os.memfd_create("mpicoll-stacks")
        fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)
        self.signal = _find_signal()
        faulthandler.register(self.signal, file=self.stacks, all_threads=True, chain=False)
        self.pid = os.getpid()
        #: A byte in this pipe wakes the monitor. The system closes it first when the rank ends.
        self.bell, self.rings = os.pipe()
        os.set_blocking(self.rings, False)
        #: The ranks for which the running monitor was started; addresses and secret of the head.
        self.monitored: object = None
        self.head: dict[str, Any] = {}
        #: Random number of this init_process_group: groups of another one have the same names.
        self.beginning = ""


_own: _Own | None = None


def _find_signal() -> int:
    """Return a real-time signal without a handler."""
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 2, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    raise OSError("node monitor: every real-time signal has a handler already")


def start(world: MPI.Intracomm, here: MPI.Comm, listener: int) -> None:
    """Connect this rank to the node monitor, and start it on the first rank. All ranks call.

    here: the ranks of ``world`` on this node. listener: system-wide number of the thread that
    prints stacks.
    """
    global _own
    given: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        if _own is None or _own.pid != os.getpid():
            _own = _Own()
        main = threading.main_thread().ident or 0
        _own.page.write(thread=main, listener=listener, ending_ns=0, end_order=0, state=RUNNING)
        given = {
            "rank": world.Get_rank(), "pid": os.getpid(), "node": node(),
            "page": _own.page.descriptor, "bell": _own.bell,
            "stacks": _own.stacks, "signal": _own.signal,
        }  # fmt: skip
    if not given:
        _own = None
    ranks = control_messages.allgather(here, given, dict[str, int | str])
    # Ranks in different containers of a node cannot see each other: each container has a monitor.
    seen = [one for one in ranks if one and one["node"] == given.get("node")]
    rank, size = world.Get_rank(), world.Get_size()
    key = [(one["rank"], one["pid"]) for one in seen], size
    listeners: list[socket.socket] = []
    if rank == 0 and _own is not None and _own.monitored != (key, _own.head):
        listeners = _make_head(size > len(seen))
    mine = _own.head if _own is not None else {}
    head, beginning = control_messages.bcast(
        world, (mine, os.urandom(8).hex()), 0, tuple[dict[str, Any], str]
    )
    if _own is not None:
        _own.beginning = beginning
        if head and seen[0]["rank"] == rank and _own.monitored != (key, head):
            _own.monitored = key, head
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _launch_monitor(seen, size, head, listeners)
    for sock in listeners:
        sock.close()
    here.Barrier()  # until now all ranks of the node are alive; their ends are seen from here on


def _make_head(several: bool) -> list[socket.socket]:
    """Choose the secret and addresses of the head monitor; return its sockets.

    It listens at the addresses of this host that other nodes may reach, or at the loopback address
    if there are none. The monitor closes these sockets once all nodes have connected.
    """
    assert _own is not None
    job = os.environ.get("SLURM_JOB_ID") or str([*_find_launchers(), os.getpid()][0])
    found: list[socket.socket] = []
    if several:
        *hosts, _ = addresses()  # the last one is a name
        for host in hosts or ["127.0.0.1"]:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with contextlib.suppress(OSError):  # one of an interface that is down
                found.append(socket.create_server((host, 0), family=family))
    _own.head = {
        "job": job, "secret": os.urandom(32).hex(),
        "addresses": [list(sock.getsockname()[:2]) for sock in found],
    }  # fmt: skip
    return found


class _Opened:
    """Descriptors for the monitor: of the ranks of this node, and an epoll with their events.

    The kernel keeps the events in order until the monitor starts.
    """

    def __init__(self, ranks: list[dict[str, Any]], launcher: int, prints: int) -> None:
        self.all: list[int] = []
        self._poll = select.epoll()
        self.epoll = self._poll.fileno()
        self.ranks: list[dict[str, Any]] = []
        for each in ranks:
            with contextlib.suppress(OSError):  # else the monitor does not see this rank
                self._open_rank(each)
        self.launcher, self.stderr = -1, 2
        with contextlib.suppress(OSError):
            if launcher:
                self.launcher = self._keep(os.pidfd_open(launcher))
                self._poll.register(self.launcher, select.EPOLLIN)
        with contextlib.suppress(OSError):
            if prints:
                self.stderr = self._keep(_open_stderr(prints))

    def _keep(self, descriptor: int) -> int:
        self.all.append(descriptor)
        return descriptor

    def _open_rank(self, given: dict[str, Any]) -> None:
        descriptors = Path(f"/proc/{given['pid']}/fd")
        page = self._keep(os.open(descriptors / str(given["page"]), os.O_RDWR))
        bell = self._keep(os.open(descriptors / str(given["bell"]), os.O_RDONLY | os.O_NONBLOCK))
        pidfd = self._keep(os.pidfd_open(given["pid"]))
        for each in (pidfd, bell):
            self._poll.register(each, select.EPOLLIN)
        self.ranks.append(given | {"pidfd": pidfd, "page": page, "bell": bell})

    def close(self) -> None:
        """Close the descriptors in this process."""
        self._poll.close()
        for descriptor in self.all:
            os.close(descriptor)


def _launch_monitor(
    ranks: list[dict[str, Any]], size: int, head: dict[str, Any], listeners: list[socket.socket]
) -> None:
    """Start the monitor, not as a child of this process, so that os.wait() does not return it."""
    step = os.environ.get("SLURM_STEP_ID")
    identity = f"{head['job']}.{step}" if step else head["job"]
    launchers = _find_launchers()
    starter = _find_starter(launchers)
    opened = _Opened(ranks, starter, launchers[-1] if launchers else 0)
    sockets = [sock.fileno() for sock in listeners]
    given = head | {
        "size": size, "ranks": opened.ranks, "node": f"{node()}-{os.getpid()}",
        "host": socket.gethostname(), "listeners": sockets,
        "survives_losses": lost_ranks.is_fault_tolerant(),
        "launcher": starter, "launcher_pidfd": opened.launcher,
        "epoll": opened.epoll, "stderr": opened.stderr,
        "names": [identity, head["job"], *map(str, launchers)],
        "command": " ".join(sys.orig_argv)[:200],
        "path": [entry for entry in sys.path if entry],
    }  # fmt: skip
    descriptor = os.memfd_create("mpicoll-monitor")
    try:
        os.write(descriptor, json.dumps(given).encode())
        with blocked_job_signals():
            subprocess.run(
                ["/bin/sh", "-c", 'exec "$@" &', "sh", sys.executable, "-I", "-S",
                 node_monitor.__file__, str(descriptor)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
                start_new_session=True, check=False,
                pass_fds=(descriptor, opened.epoll, *opened.all, *sockets),
            )  # fmt: skip
    finally:
        os.close(descriptor)
        opened.close()


#: pidfd_getfd, of Linux from 5.6 on, on x86-64 and aarch64 alike.
_PIDFD_GETFD = 438


def _open_stderr(pid: int) -> int:
    """Return a descriptor of a launcher's standard error, or of this process if that fails.

    A launcher whose rank has died ends within milliseconds, and no longer reads the ranks' pipes.
    """
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            found = int(ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, 2, 0))
        finally:
            os.close(pidfd)
        path = Path(f"/proc/{pid}/fd/2")
        # A second open of a file would have a separate offset, and overwrite other output.
        if found < 0 and not stat.S_ISREG(path.stat().st_mode):
            found = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        if found >= 0:
            # A daemon that starts the ranks of a node has /dev/null.
            if os.fstat(found).st_rdev != Path(os.devnull).stat().st_rdev:
                return found
            os.close(found)
    return os.dup(2)


def _find_starter(launchers: list[int]) -> int:
    """Return the process whose end also ends the ranks of this node, 0 if there is none."""
    launched = find_launcher()
    if launched is None:
        return 0
    if launched.is_parent:
        # A process that a rank starts inherits its variables, and may outlive it.
        return 0 if launched.is_present(_read_environment(os.getppid())) else os.getppid()
    return launchers[0] if launchers and launched.protocol else 0


def _read_environment(process: int) -> dict[str, str]:
    """Return the environment of a process at its start, {} if it cannot be read."""
    try:
        text = os.fsdecode(Path(f"/proc/{process}/environ").read_bytes())
    except OSError:
        return {}
    return {name: value for name, _, value in (each.partition("=") for each in text.split("\0"))}


def _find_launchers() -> list[int]:
    """Return the ancestors of this process that belong to an MPI launcher, the nearest first."""
    found, process = [], os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            if Path(f"/proc/{process}/comm").read_text().strip() in _LAUNCHERS:
                found.append(process)
            process = int(node_monitor.read_stat(process)[1])
    return found


# --- while the monitor runs -----------------------------------------------------------------------


def _live() -> _Own | None:
    """Return this process's own state, None without one and in a forked child."""
    return _own if _own is not None and _own.pid == os.getpid() else None


class _Publisher(Observer):
    """Publishes the last call of each OPEN or FAILED group on the status page."""

    def group_opened(self, group: ProcessGroup) -> None:
        """Take a cell of the page for the group."""
        if (own := _live()) is None:
            return
        text = f"{own.beginning} {group.group_name} {group.ranks}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        address = own.page.take_cell(
            number | 1, _limit(group.timeout), group.size(), group.rank(), group.group_name
        )
        if address:
            own.cells[group] = address
            group.publish(address)

    def group_closed(self, group: ProcessGroup) -> None:
        """Free the group's cell."""
        if _own is not None and (address := _own.cells.pop(group, 0)):
            group.publish(0)
            if _live():
                _own.page.free_cell(address)


observers.append(_Publisher())


def _limit(timeout: float | None) -> int:
    """Return the milliseconds after which a hang is reported, 0 for never."""
    chosen = settings.REPORT_AFTER.value()
    if chosen:
        return int(1000 * float(chosen))
    after = _REPORT_AFTER_S if timeout is None else _TIMEOUT_FRACTION * timeout
    return int(1000 * min(_REPORT_AFTER_S, after))


def report_ending() -> None:
    """Report that this rank ends the job, and prints the reason itself."""
    if own := _live():
        own.page.set_ending()
        with contextlib.suppress(OSError):  # wake the monitor
            os.write(own.rings, b"\0")


def _after_fork() -> None:
    """Close the pipe in a forked child: the monitor takes its closing for the end of this rank."""
    if _own is not None and _own.rings >= 0:
        os.close(_own.rings)
        _own.rings = -1


os.register_at_fork(after_in_child=_after_fork)


def sign_off() -> None:
    """Report that no other rank needs this one any more."""
    if own := _live():
        own.page.set_state(DONE)


def renew() -> None:
    """Disconnect from the monitor: ``start`` connects to another one. All groups are closed."""
    global _own
    if (old := _live()) is None:
        return
    _own = None
    old.page.set_state(LEFT)
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        _own = _Own()
    # A new handler replaces the old one for the same signal, which may arrive at any time.
    if _own is None or _own.signal != old.signal:
        faulthandler.unregister(old.signal)
    for descriptor in (old.page.descriptor, old.stacks, old.bell, old.rings):
        os.close(descriptor)


def ask_about(group: ProcessGroup) -> dict[int, str]:
    """Describe each rank of the group on this node, by global rank, as a hang report does.

    This rank waits in the group's last call. Returns {} if the monitor does not answer.
    """
    own = _live()
    address = own.cells.get(group, 0) if own else 0
    if own is None or not address or not (pid := own.page.header().monitor_pid):
        return {}
    call = own.page.cell(address)._asdict()
    try:
        path = node_monitor.find_folder() / f"{pid}{node_monitor.SOCKETS}"
        answer = line_protocol.ask(path, {"ask": "snapshots"})
        return {
            one["rank"]: report.describe_rank(one, call)
            for one in answer["ranks"]
            if one["rank"] in group.ranks and one["state"] != "silent"
        }
    except (OSError, KeyError, TypeError):  # the monitor has exited
        return {}


def is_ordered_to_end() -> bool:
    """Return whether the monitor orders this rank to end. The monitor has printed the reason."""
    own = _live()
    return own is not None and own.page.header().end_order != 0
