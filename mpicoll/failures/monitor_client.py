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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll import control_messages, line_protocol, settings
from mpicoll.core.groups import on_close, on_open, state
from mpicoll.failures import lost_ranks, node_monitor, report
from mpicoll.failures.status_page import RUNNING, Cell, map_page
from mpicoll.launch.host_identity import addresses, node
from mpicoll.launch.launchers import find_launcher
from mpicoll.signals import blocked_job_signals

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

#: Default time after which a hang is reported: maximum in seconds, and fraction of the timeout.
_REPORT_AFTER_S, _TIMEOUT_FRACTION = 60.0, 0.5
#: Names of processes that start and end the ranks of a node.
_LAUNCHERS = {
    "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "orterun", "prte", "prted",
    "prterun", "slurmstepd",
}  # fmt: skip
#: The descriptors of a rank that the monitor opens.
_OPENED = {"page": os.O_RDWR, "stacks": os.O_RDWR, "bell": os.O_RDONLY | os.O_NONBLOCK}
#: pidfd_getfd, of Linux from 5.6 on, on x86-64 and aarch64 alike.
_PIDFD_GETFD = 438


class _Own:
    """The status page of this process, and the descriptors for its monitor."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("mpicoll-status-page")
        self.page = map_page(descriptor)
        self.cells: dict[ProcessGroup, Cell] = {}
        stacks = os.memfd_create("mpicoll-stacks")
        fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
        signals = range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 2, -1)
        number = next(one for one in signals if signal.getsignal(one) is signal.SIG_DFL)
        faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        #: A byte in this pipe wakes the monitor. The system closes it first when the rank ends.
        bell, self.rings = os.pipe()
        for end in (bell, self.rings):
            os.set_blocking(end, False)
        self.given = {"page": descriptor, "stacks": stacks, "signal": number, "bell": bell}
        #: The secret of the monitors. It also distinguishes groups of the same name: those of
        #: another init_process_group.
        self.secret = ""

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.rings, b"\0")


#: None before the first init_process_group, without a node monitor, and in a forked child.
_own: _Own | None = None


def start(world: MPI.Intracomm, here: MPI.Comm, listener: int) -> None:
    """Start the node monitor on the first rank of the node. All ranks call.

    here: the ranks of ``world`` on this node. listener: system-wide number of the thread that
    prints stacks.
    """
    global _own
    rank, size = world.Get_rank(), world.Get_size()
    given: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError, StopIteration):
        _own = _own or _Own()
        page = _own.page
        with contextlib.suppress(BlockingIOError):  # else it would signal before the rank ends
            os.read(_own.given["bell"], 512)
        page.generation += 1
        page.monitor_pid = page.ending_ns = page.end_order = 0
        page.main_thread, page.listener = threading.main_thread().ident or 0, listener
        page.state = RUNNING
        given = _own.given | {"rank": rank, "pid": os.getpid(), "node": node()}
        given["generation"] = page.generation
    ranks = control_messages.allgather(here, given, dict[str, int | str])
    # Ranks in different containers of a node cannot see each other: each container has a monitor.
    seen = [one for one in ranks if one and one["node"] == given.get("node")]
    head: dict[str, Any] = {}
    listeners: list[socket.socket] = []
    if rank == 0 and seen:
        head, listeners = _make_head(size > len(seen))
    head = control_messages.bcast(world, head, 0, dict[str, Any])
    if head and seen and _own is not None:
        _own.secret = head["secret"]
        if seen[0]["rank"] == rank:
            with contextlib.suppress(OSError, subprocess.SubprocessError, AttributeError):
                _launch_monitor(seen, size, head, listeners)
    for sock in listeners:
        sock.close()
    here.Barrier()  # until now all ranks of the node are alive; their ends are seen from here on


def _make_head(several: bool) -> tuple[dict[str, Any], list[socket.socket]]:
    """Choose the secret and addresses of the head monitor; return them and its sockets.

    It listens at the addresses of this host that other nodes may reach, or at the loopback address
    if there are none. The monitor closes these sockets once all nodes have connected.
    """
    job = os.environ.get("SLURM_JOB_ID") or str([*_find_launchers(), os.getpid()][0])
    found: list[socket.socket] = []
    *hosts, _ = addresses() if several else [""]  # the last one is a name
    for host in hosts or ["127.0.0.1"] * several:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError):  # one of an interface that is down
            found.append(socket.create_server((host, 0), family=family))
    names = [list(sock.getsockname()[:2]) for sock in found]
    return {"job": job, "secret": os.urandom(32).hex(), "addresses": names}, found


def open_ranks(
    ranks: Iterable[dict[str, Any]], poll: select.epoll, keep: Callable[[int], int]
) -> list[dict[str, Any]]:
    """Open the descriptors of ranks of this node for the monitor; register their events.

    The kernel keeps the events in order until the monitor starts. keep: called for each descriptor.
    """
    opened = []
    for each in ranks:
        with contextlib.suppress(OSError):  # else the monitor does not see this rank
            found = {"pidfd": keep(os.pidfd_open(each["pid"]))} | {
                name: keep(os.open(f"/proc/{each['pid']}/fd/{each[name]}", flags))
                for name, flags in _OPENED.items()
            }
            for name in ("pidfd", "bell"):
                poll.register(found[name], select.EPOLLIN)
            opened.append(each | found)
    return opened


def _launch_monitor(
    ranks: list[dict[str, Any]], size: int, head: dict[str, Any], listeners: list[socket.socket]
) -> None:
    """Start the monitor, not as a child of this process, so that os.wait() does not return it."""
    launchers = _find_launchers()
    starter, pidfd, stderr = _find_starter(launchers), -1, 2
    with contextlib.ExitStack() as stack:
        kept: list[int] = []

        def keep(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            kept.append(descriptor)
            return descriptor

        poll = stack.enter_context(select.epoll())
        opened = open_ranks(ranks, poll, keep)
        with contextlib.suppress(OSError):
            if starter:
                pidfd = keep(os.pidfd_open(starter))
                poll.register(pidfd, select.EPOLLIN)
        with contextlib.suppress(OSError):
            if launchers:
                stderr = keep(_open_stderr(launchers[-1]))
        sockets = [sock.fileno() for sock in listeners]
        given = head | {
            "size": size, "ranks": opened, "node": f"{node()}-{os.getpid()}",
            "host": socket.gethostname(), "listeners": sockets,
            "survives_losses": lost_ranks.is_fault_tolerant(),
            "launcher": starter, "launcher_pidfd": pidfd,
            "epoll": poll.fileno(), "stderr": stderr,
            "names": [head["job"], *map(str, launchers)],
            "command": " ".join(sys.orig_argv)[:200],
            "path": [entry for entry in sys.path if entry],
        }  # fmt: skip
        descriptor = keep(os.memfd_create("mpicoll-monitor"))
        os.write(descriptor, json.dumps(given).encode())
        with blocked_job_signals():
            subprocess.run(
                ["/bin/sh", "-c", 'exec "$@" &', "sh", sys.executable, "-I", "-S",
                 node_monitor.__file__, str(descriptor)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
                start_new_session=True, check=False,
                pass_fds=(poll.fileno(), *kept, *sockets),
            )  # fmt: skip


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
    if not launched.is_parent:
        return launchers[0] if launchers and launched.protocol else 0
    # A process that a rank starts inherits its variables, and may outlive it.
    parent, text = os.getppid(), b""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{parent}/environ").read_bytes()
    names = [os.fsdecode(each.partition(b"=")[0]) for each in text.split(b"\0")]
    return 0 if launched.is_present(dict.fromkeys(names, "")) else parent


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


def _take_cell(group: ProcessGroup) -> None:
    """Publish the last call of an open group in a cell of the status page."""
    if _own is None:
        return
    text = f"{_own.secret} {group.group_name} {group.ranks}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    timeout = _REPORT_AFTER_S if group.timeout is None else _TIMEOUT_FRACTION * group.timeout
    after = float(settings.REPORT_AFTER.value() or min(_REPORT_AFTER_S, timeout))
    cell = _own.page.take_cell(
        number | 1, int(1000 * after), group.size(), group.rank(), group.group_name
    )
    if cell is not None:
        _own.cells[group] = cell
        group.publish(ctypes.addressof(cell))


def _free_cell(group: ProcessGroup) -> None:
    if _own is not None and (cell := _own.cells.pop(group, None)) is not None:
        group.publish(0)
        if not state.forked:  # else it is the parent's
            cell.group = 0


on_open.append(_take_cell)
on_close.append(_free_cell)


def report_ending() -> None:
    """Report that this rank ends the job, and prints the reason itself."""
    if _own is not None:
        _own.page.set_ending()
        _own.ring()


def sign_off() -> None:
    """Report that no other rank needs this one. The last one of a node ends the monitor."""
    if _own is not None:
        _own.page.set_done()
        _own.ring()


def is_ordered_to_end() -> bool:
    """Return whether the monitor orders this rank to end."""
    return _own is not None and _own.page.end_order != 0


def _after_fork() -> None:
    """Leave the page and the pipe, whose closing means the end of the rank, to the parent."""
    global _own
    if _own is not None:
        os.close(_own.rings)
        for group in _own.cells:
            group.publish(0)
        _own = None


os.register_at_fork(after_in_child=_after_fork)


def ask_about(group: ProcessGroup) -> dict[int, str]:
    """Describe each rank of the group on this node, by global rank, as a hang report does.

    This rank waits in the group's last call. Returns {} if the monitor does not answer.
    """
    cell = None if _own is None else _own.cells.get(group)
    if _own is None or cell is None or not (pid := _own.page.monitor_pid):
        return {}
    call = cell.as_dict()
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
