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
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mpicoll import control_messages, line_protocol
from mpicoll.core.groups import ProcessGroup, on_close, on_open, state
from mpicoll.failures import lost_ranks, node_monitor, report
from mpicoll.failures.status_page import Cell, map_page
from mpicoll.launch.host_identity import addresses, node
from mpicoll.launch.launcher_processes import find_ancestors, find_starter, open_stderr
from mpicoll.launch.server import listen
from mpicoll.processes import blocked_job_signals

if TYPE_CHECKING:
    from mpi4py import MPI

#: The descriptors of a rank that the monitor opens.
_OPENED = {"page": os.O_RDWR, "stacks": os.O_RDWR, "bell": os.O_RDONLY | os.O_NONBLOCK}


class _Own:
    """The status page of this process, and the descriptors for its monitor. listener: system-wide
    number of the thread that prints stacks.
    """

    def __init__(self, listener: int) -> None:
        page = os.memfd_create("mpicoll-status-page")
        self.page = map_page(page)
        self.page.main_thread, self.page.listener = threading.main_thread().ident or 0, listener
        self.cells: dict[ProcessGroup, Cell] = {}
        stacks = os.memfd_create("mpicoll-stacks")
        fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
        signals = range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 2, -1)
        number = next(one for one in signals if signal.getsignal(one) is signal.SIG_DFL)
        faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        #: A byte in this pipe wakes the monitor. The system closes it first when the rank ends.
        bell, self.rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.given = {"page": page, "stacks": stacks, "signal": number, "bell": bell}
        #: The secret of the monitors. It also distinguishes groups of the same name of another
        #: init_process_group.
        self.secret = ""

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.rings, b"\0")

    def close(self) -> None:
        """Close the descriptors. The page stays mapped until no call writes to it."""
        for group in self.cells:
            group.publish(0)
        for descriptor in (*(self.given[name] for name in _OPENED), self.rings):
            os.close(descriptor)


#: None before the first init_process_group, without a node monitor, and in a forked child.
_own: _Own | None = None


def start(world: MPI.Intracomm, here: MPI.Comm, listener: int) -> None:
    """Start the node monitor on the first rank of the node. All ranks call.

    here: the ranks of ``world`` on this node. listener: see ``_Own``. The caller's next step must
        wait for all ranks: then all are alive when the monitor opens their descriptors.
    """
    global _own
    rank, size = world.Get_rank(), world.Get_size()
    given: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError, StopIteration):
        earlier, _own = _own, _Own(listener)
        if earlier is not None:  # its monitor ends
            earlier.page.set_done()
            earlier.close()
        given = _own.given | {"rank": rank, "pid": os.getpid(), "node": node()}
    ranks = control_messages.allgather(here, given, dict[str, int | str])
    # Ranks in different containers of a node cannot see each other: each container has a monitor.
    seen = [one for one in ranks if one and one["node"] == given.get("node")]
    head: dict[str, Any] = {}
    listener_socket = None
    if rank == 0 and seen:
        head, listener_socket = _make_head(size > len(seen))
    head = control_messages.bcast(world, head, 0, dict[str, Any])
    if head and seen and _own is not None:
        _own.secret = head["secret"]
        if seen[0]["rank"] == rank:
            import subprocess

            with contextlib.suppress(OSError, subprocess.SubprocessError, AttributeError):
                _launch_monitor(seen, size, head, listener_socket)
    if listener_socket is not None:
        listener_socket.close()


def _make_head(several: bool) -> tuple[dict[str, Any], socket.socket | None]:
    """Choose the secret and addresses of the head monitor; return them and its socket."""
    job = os.environ.get("SLURM_JOB_ID") or str([*find_ancestors(), os.getpid()][0])
    names: list[list[str | int]] = []
    sock = None
    with contextlib.suppress(OSError):
        if several:
            sock = listen("", 0)
            *hosts, _ = addresses()  # the last one is a name
            names = [[host, sock.getsockname()[1]] for host in hosts or ["127.0.0.1"]]
    return {"job": job, "secret": os.urandom(32).hex(), "addresses": names}, sock


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
    ranks: list[dict[str, Any]], size: int, head: dict[str, Any], sock: socket.socket | None
) -> None:
    """Start the monitor, not as a child of this process, so that os.wait() does not return it."""
    import subprocess

    launchers = find_ancestors()
    starter, pidfd = find_starter(launchers), -1
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
        given = head | {
            "size": size, "ranks": opened, "host": socket.gethostname(),
            "listener": None if sock is None else keep(os.dup(sock.fileno())),
            "survives_losses": lost_ranks.is_fault_tolerant(),
            "launcher": starter, "launcher_pidfd": pidfd, "epoll": poll.fileno(),
            "stderr": keep(open_stderr(launchers)),
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
                start_new_session=True, check=False, pass_fds=(poll.fileno(), *kept),
            )  # fmt: skip


# --- while the monitor runs -----------------------------------------------------------------------


def _take_cell(group: ProcessGroup) -> None:
    """Publish the last call of an open group in a cell of the status page."""
    if _own is not None:
        text = f"{_own.secret} {group.group_name} {group.ranks}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        cell = _own.page.take_cell(number | 1, group.size(), group.group_name)
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


def report_late(group: ProcessGroup, number: int, seconds: float) -> None:
    """Report that a call of a group, by its number, has lasted too long, if it still runs."""
    if _own is not None and (cell := _own.cells.get(group)) is not None:
        cell.late_ms, cell.late = int(1000 * seconds), number
        _own.ring()


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
    """In a forked child, close the page and the pipe, which belong to the parent."""
    global _own
    if _own is not None:
        _own.close()
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
