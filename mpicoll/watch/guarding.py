"""A rank's side of the guard: its board, the handler that prints its stacks, and how it starts.

Nothing here is needed for a job to run: where the system refuses any of it, there is no guard.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll import control_messages, launch, settings
from mpicoll.core.groups import state
from mpicoll.launch.host_identity import addresses, node
from mpicoll.signals import blocked_from_outside
from mpicoll.watch import guard, lost_ranks
from mpicoll.watch.board import DONE, ENDING, LEFT, Board

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["find_order", "leave", "renew", "say_ending", "say_signal", "start"]

#: Seconds of waiting after which a hang is reported, unless a setting says otherwise: at most, and
#: as a share of the group's timeout.
_AFTER, _SHARE = 60.0, 0.5
#: Seconds that the guard has to say what it knows before this rank ends the job.
_LAST_WORDS = 0.5
#: Processes that start the ranks of a node and end them, by the names that the system knows.
_LAUNCHERS = {
    "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "orterun", "prte", "prted",
    "prterun", "slurmstepd",
}  # fmt: skip


class _Own:
    """This process's board, and what it has told the guard."""

    def __init__(self) -> None:
        self.board = Board()
        self.cells: dict[ProcessGroup, int] = {}
        self.stacks = os.memfd_create("mpicoll-stacks")
        fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)
        self.signal = _find_signal()
        faulthandler.register(self.signal, file=self.stacks, all_threads=True, chain=False)
        self.pid = os.getpid()
        #: A byte in this pipe has the guard look at once.
        self.bell, self.rings = os.pipe()
        os.set_blocking(self.rings, False)
        #: What the running guard was started for, and how other nodes find that of rank 0's.
        self.guarded: object = None
        self.head: dict[str, Any] = {}
        #: Tells this beginning of the job from others, whose groups have the same names.
        self.beginning = 0


_own: _Own | None = None


def _find_signal() -> int:
    """Return a signal that nobody listens to, one of those that have no meaning."""
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 2, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    raise OSError("all signals are in use")


def start(world: MPI.Intracomm, here: MPI.Comm, listener: int) -> None:
    """Have this node's guard watch this rank. All ranks call.

    here: the ranks of ``world`` on this node. listener: the thread that is asked for stacks, as the
    system numbers it.
    """
    global _own
    given: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        if _own is None or _own.pid != os.getpid():
            _own = _Own()
        _own.board.begin(threading.main_thread().ident or 0, listener)
        given = {
            "rank": world.Get_rank(), "pid": os.getpid(), "start": guard.read_start(os.getpid()),
            "board": _own.board.descriptor, "stacks": _own.stacks, "signal": _own.signal,
            "bell": _own.bell,
            "node": node(),
        }  # fmt: skip
    if not given:
        _own = None
    ranks = control_messages.allgather(here, given, dict[str, int | str])
    # What sees each other's processes has the same guard: a part of a node, if in containers.
    seen = [one for one in ranks if one and one["node"] == given.get("node")]
    first = bool(seen) and seen[0]["rank"] == world.Get_rank()
    key = [(one["rank"], one["pid"]) for one in seen]
    is_head = world.Get_rank() == 0
    sock = None
    if is_head and _own is not None and _own.guarded != (key, world.Get_size(), _own.head):
        sock = _make_head(world.Get_size() > len(seen))
    heads = _own.head if is_head and _own is not None else {}
    head, beginning = control_messages.bcast(
        world, (heads, secrets.randbits(64)), 0, tuple[dict[str, Any], int]
    )
    if _own is not None:
        _own.beginning = beginning
    if not first or _own is None or not head:
        return
    if _own.guarded != (key, world.Get_size(), head):
        _own.guarded = key, world.Get_size(), head
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _launch_guard(seen, world.Get_size(), head, sock)
    if sock is not None:
        sock.close()


def _make_head(several: bool) -> socket.socket | None:
    """Decide how the guards of other nodes find that of rank 0's; return its socket, if any."""
    assert _own is not None
    job = launch.find_job()[0] or str([*_find_launchers(), os.getpid()][0])
    _own.head = {"job": job, "secret": secrets.token_hex(32), "addresses": [], "port": 0}
    if not several:
        return None
    sock = socket.create_server(("", 0))
    _own.head |= {"addresses": addresses(), "port": sock.getsockname()[1]}
    return sock


def _launch_guard(
    ranks: list[dict[str, Any]], size: int, head: dict[str, Any], sock: socket.socket | None
) -> None:
    """Start the guard: no child of this process, which would be found by os.wait()."""
    step = launch.find_job()[1]
    identity = f"{head['job']}.{step}" if step else head["job"]
    launchers = _find_launchers()
    given = head | {
        "size": size, "ranks": ranks, "node": f"{node()}-{os.getpid()}",
        "host": socket.gethostname(), "listener": -1 if sock is None else sock.fileno(),
        "goes_on": lost_ranks.is_fault_tolerant(), "survival": launch.find_survival(),
        "reports": settings.REPORTS.value(), "launcher": _find_starter(launchers),
        "prints": launchers[-1] if launchers else 0,
        "names": [identity, head["job"], *map(str, launchers)],
        "command": " ".join(sys.orig_argv)[:200],
        "path": [entry for entry in sys.path if entry],
    }  # fmt: skip
    descriptor = os.memfd_create("mpicoll-guard")
    try:
        os.write(descriptor, json.dumps(given).encode())
        with blocked_from_outside():
            subprocess.run(
                ["/bin/sh", "-c", 'exec "$@" &', "sh", sys.executable, "-I", "-S",
                 guard.__file__, str(descriptor)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/",
                start_new_session=True, check=False,
                pass_fds=(descriptor, *([] if sock is None else [sock.fileno()])),
            )  # fmt: skip
    finally:
        os.close(descriptor)


def _find_starter(launchers: list[int]) -> int:
    """Return the process with which the ranks of this node end, 0 if there is none.

    launchers: as _find_launchers returns them.
    """
    launched = launch.find_launcher()
    if launched is None:
        return 0
    if launched.is_parent:
        # What a rank starts has the rank's variables, too, and may outlive it.
        return 0 if launched.is_present(_read_environment(os.getppid())) else os.getppid()
    return launchers[0] if launchers and launched.dialect else 0


def _read_environment(process: int) -> dict[str, str]:
    """Return the variables that a process was started with, none where they cannot be read."""
    try:
        text = os.fsdecode(Path(f"/proc/{process}/environ").read_bytes())
    except OSError:
        return {}
    return {name: value for name, _, value in (each.partition("=") for each in text.split("\0"))}


def _find_launchers() -> list[int]:
    """Return the processes that have started this one for a launcher of MPI, the nearest first."""
    found, process = [], os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            if Path(f"/proc/{process}/comm").read_text().strip() in _LAUNCHERS:
                found.append(process)
            stat = Path(f"/proc/{process}/stat").read_text()
            process = int(stat.rpartition(")")[2].split()[1])
    return found


# --- while it runs --------------------------------------------------------------------------------


def _is_own() -> bool:
    return _own is not None and _own.pid == os.getpid()


def _publish(group: ProcessGroup) -> None:
    """Let the guard see a group's calls."""
    if _own is None or not _is_own():
        return
    text = f"{_own.beginning} {group.group_name} {group.ranks}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    address = _own.board.take_cell(
        number | 1, _limit(group.timeout), group.size(), group.rank(), group.group_name
    )
    if address:
        _own.cells[group] = address
        group.publish(address)


def _limit(timeout: float | None) -> int:
    """Return the milliseconds after which waiting is reported, 0 for never."""
    chosen = settings.REPORT_AFTER.value()
    if chosen:
        return int(1000 * float(chosen))
    return int(1000 * min(_AFTER, _AFTER if timeout is None else _SHARE * timeout))


def _withdraw(group: ProcessGroup) -> None:
    """Give a group's cell back."""
    address = _own.cells.pop(group, 0) if _own is not None else 0
    if address and _own is not None:
        group.publish(0)
        if _is_own():
            _own.board.free_cell(address)


state.publish, state.withdraw = _publish, _withdraw


def say_ending(code: int) -> None:
    """Say that this rank ends the job, and has said why."""
    if _own is not None and _is_own():
        _own.board.say(ENDING, code)
        # What the guard has to say of a signal may be lost when the job has ended.
        end = time.monotonic() + _LAST_WORDS
        while _own.board.header().signal and time.monotonic() < end:
            time.sleep(0.01)


def say_signal(number: int) -> None:
    """Say that a signal has come that may end this rank, and that the program handles."""
    if _own is not None and _is_own():
        _own.board.say_signal(number)
        with contextlib.suppress(OSError):
            os.write(_own.rings, b"\0")


def leave() -> None:
    """Say that no other rank needs this one any more."""
    if _own is not None and _is_own():
        _own.board.say(DONE)


def renew() -> None:
    """Leave the guard of this rank: ``start`` gets it one of other ranks. No group is alive."""
    global _own
    old = _own
    if old is None or not _is_own():
        return
    _own = None
    old.board.say(LEFT)
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        _own = _Own()
    # It takes the place of the old handler of the same signal, which may come at any time.
    if _own is None or _own.signal != old.signal:
        faulthandler.unregister(old.signal)
    for descriptor in (old.board.descriptor, old.stacks, old.bell, old.rings):
        os.close(descriptor)


def find_order() -> str:
    """Return why the guard wants this rank to end, "" if it does not."""
    return _own.board.order() if _own is not None and _is_own() else ""
