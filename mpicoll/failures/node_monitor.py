"""Node monitor: one process per node that reports the state of its ranks, also of dead ones.

It reads the ranks' status pages, prints their stacks by a signal handler that needs no lock of
Python, and notices their end by their pidfds. The monitor of rank 0's node, the head, queries the
monitors of the other nodes, reports calls that the ranks' watchdogs find late, decides which rank
caused the end of the job, and writes to the launcher's standard error. Each init_process_group
starts a monitor. It ends when all ranks of its node have ended or destroyed their groups.

The rank that starts the monitor opens the pidfds and pages of all ranks of the node, and an epoll
with their events, before ``init_process_group`` returns on any rank. So no event is lost while the
monitor starts. It runs as a file, without site-packages until a report needs NumPy.

**Cause of the end of a job.** A launcher that sees one rank end kills the remaining ranks within
milliseconds, often before the system has reported the end of the first rank. So the monitor uses
the first sign of each end: the closing of the rank's bell (a pipe). A launcher cannot react before
it, and the kernel reports such events in their order. A rank that ends the job itself, by an
exception or ``sys.exit``, first writes the time into its page. If a signal was sent to one rank,
the other ranks of the node are alive at the first sign; else it was sent to all ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent.parent)]

from mpicoll.failures import report
from mpicoll.failures.report import Snapshot
from mpicoll.failures.status_page import DONE, ENDING, map_page
from mpicoll.line_protocol import ANSWER_TIMEOUT_S, JsonConnection, LineServer, is_proof, mac
from mpicoll.processes import JOB_SIGNALS, is_dying, is_in_signal_set, read_end, state_of

_CHECK_INTERVAL_S = 1.0  # of the processes
_STACKS_TIMEOUT_S = 2.0  # to collect the stacks of all ranks of a node
_END_TIMEOUT_S = 0.1  # for the system to report how a process has ended
_KILL_GRACE_S = 10.0  # for a rank that was ordered to end
#: Times to wait for ranks that are ending, for nodes that have not connected, and for reports of
#: connected nodes, before the cause is decided.
_DYING_TIMEOUT_S, _NODES_TIMEOUT_S, _REPORTS_TIMEOUT_S = 2.0, 0.5, 3.0
#: Timeout of a connection to one address of the head, and time that the head may take to start.
_CONNECT_TIMEOUT_S, _START_TIMEOUT_S = 3.0, 30.0
#: Maximum number of connections without a handshake, in addition to those of all nodes.
_MAX_STRANGER_COUNT = 64
SOCKETS = ".watch"  # suffix of the name of a monitor's socket
_NEVER = float("inf")


def find_folder() -> Path:
    """Return the folder of this user's sockets on this host.

    Raises OSError if it belongs to another user.
    """
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"mpicoll-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} belongs to another user, or others may write to it; remove it"
        )
    return folder


class _Rank:
    """A rank of this node. given: its numbers and descriptors; see ``monitor_client``."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.rank: int = given["rank"]
        self.pid: int = given["pid"]
        self.pidfd: int = given["pidfd"]
        self.bell: int = given["bell"]
        self.page = map_page(given["page"])
        self.stacks: int = given["stacks"]
        self._signal: int = given["signal"]
        self.is_alive = True
        self.how = ""  # how the process has ended
        self.sign = 0.0  # time of the first sign of its end, on the monotonic clock
        self.was_alone = False  # no other rank of the node was ending at that time

    @property
    def is_quiet(self) -> bool:
        """Whether no other rank needs it, or it has reported its end."""
        return self.page.state in (ENDING, DONE)

    @property
    def needs_monitor(self) -> bool:
        """Whether it runs, and has not destroyed its groups."""
        return self.is_alive and self.page.state != DONE

    def ask_stacks(self) -> bool:
        """Make the process print its stacks; return whether it will.

        The signal goes to a thread of mpicoll, so that it interrupts no system call of the program.
        """
        if not self.is_alive or state_of(self.pid) != "running":
            return False
        with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
            if is_in_signal_set(self.pid, "SigCgt", self._signal):
                os.ftruncate(self.stacks, 0)
                libc = ctypes.CDLL(None)
                return bool(libc.tgkill(self.pid, self.page.listener, self._signal) == 0)
        return False

    def snapshot(self, host: str) -> Snapshot:
        """Return the state of the rank; see report.py."""
        state = state_of(self.pid) if self.is_alive else "gone"
        if state == "running":
            state = {ENDING: "ending", DONE: "done"}.get(self.page.state, state)
        return {
            "rank": self.rank, "host": host, "pid": self.pid, "state": state, "how": self.how,
            "main": self.page.main_thread, "stacks": {},
            "calls": [cell.as_dict() for cell in self.page.read_cells()],
        }  # fmt: skip


class NodeMonitor(LineServer[JsonConnection]):
    """The monitor of a node. given: the configuration that ``monitor_client`` has built."""

    def __init__(self, given: dict[str, Any]) -> None:
        # All nodes may connect at the same time.
        super().__init__(select.epoll.fromfd(given["epoll"]), _MAX_STRANGER_COUNT + given["size"])
        self.size: int = given["size"]
        self.host: str = given["host"]
        self._survives_losses: bool = given["survives_losses"]
        self._given = given
        self._ranks = [_Rank(each) for each in given["ranks"]]
        self._has_all_ranks = len(self._ranks) == self.size
        self._handlers: dict[int, Callable[[], None]] = {
            given["launcher_pidfd"]: self._lose_launcher
        }
        for one in self._ranks:
            self._handlers[one.pidfd] = partial(self._record_end, one)
            self._handlers[one.bell] = partial(self._read_bell, one)
        self._nodes: list[JsonConnection] = []  # on the head: monitors of other nodes
        self._behind: set[JsonConnection] = set()  # these that may have earlier events to report
        self._seen = len(self._ranks)  # number of ranks of this node and these nodes
        self._head: JsonConnection | None = None  # None: this monitor reports to the user
        self._hangs: list[dict[str, Any]] = []  # on the head: late calls to report
        self._reported: set[tuple[int, int]] = set()  # group and number of these and earlier ones
        self._dying: list[_Rank] = []  # ranks with a sign of their end, in order, not handled yet
        #: On the head: when ranks of a node have ended without a message, these in the order of the
        #: first signs, and whether the first one ended by itself.
        self._losses: list[tuple[float, list[Snapshot], bool]] = []
        self._ended_at = _NEVER  # when the first rank began to end the job itself
        self._ending: set[_Rank] = set()  # the ranks of this node that have done so
        self._is_decided = False  # the cause of the job's end was reported
        self._is_asked = False  # the head waits until this monitor has reported all events
        # Times to decide the cause, to kill the ranks, and to end them without their launcher.
        self._decide_at = self._kill_at = self._end_at = _NEVER

    def serve(self) -> None:
        """Run the monitor until no rank of this node needs it."""
        for one in self._ranks:
            one.page.monitor_pid = os.getpid()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # else `mpicoll watch` finds no monitor
                path = find_folder() / f"{os.getpid()}{SOCKETS}"
                sock = socket.socket(socket.AF_UNIX)
                sock.bind(str(path))
                stack.callback(path.unlink, missing_ok=True)
                sock.listen()
                self.listen(sock)
            if self._given["listener"] is not None:
                self.listen(socket.socket(fileno=self._given["listener"]))
            self._find_head()
            self._loop()

    def _loop(self) -> None:
        next_check = 0.0
        while (
            self._decide_at < _NEVER
            or (self._dying and not self._is_decided)
            or any(one.needs_monitor for one in self._ranks)
        ):
            wait = min(next_check, self._decide_at) - time.monotonic()
            ready = [descriptor for descriptor, _ in self.poll.poll(max(0.0, wait))]
            for descriptor in ready:
                if handler := self._handlers.get(descriptor):
                    handler()
            self._find_losses()
            for descriptor in ready:
                self.serve_descriptor(descriptor)
            if self._is_asked and not self._dying and self._head:
                self._is_asked = False
                self._send(self._head, {"reported": True})
            while self._hangs:
                self._report_hang(self._hangs.pop(0))
            self._decide()
            now = time.monotonic()
            if now >= next_check:
                next_check = now + _CHECK_INTERVAL_S
                self.drop_silent()
                if now > self._end_at:
                    self._end_with_launcher()
                self._kill(now)

    def _close(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self.poll.unregister(descriptor)
        os.close(descriptor)

    def _print(self, text: str) -> None:
        """Write a line to the launcher's standard error without buffering."""
        with contextlib.suppress(OSError):
            os.write(self._given["stderr"], text.encode() + b"\n")

    # --- snapshots -------------------------------------------------------------------------------

    def _report_hang(self, call: dict[str, Any]) -> None:
        """Print a report of a late call. This monitor is the head."""
        if self._is_decided or self._ended_at < _NEVER:
            return
        snapshots = self._gather({"ask": "snapshots", "stacks": call})
        if any(report.is_there(one, call) for one in snapshots):  # else it has ended meanwhile
            self._print(report.describe_hang(snapshots, call))

    def _gather(self, question: dict[str, Any]) -> list[Snapshot]:
        """Query all monitors; return the snapshots of all ranks."""
        lines = list(self._nodes)
        for line in lines:
            self._send(line, question)
        found = {one["rank"]: one for one in self._snapshots(question)}
        end = time.monotonic() + ANSWER_TIMEOUT_S
        for line in lines:
            with self.checked(line):
                while "ranks" not in (message := line.receive(end - time.monotonic())):
                    self._handle(line, message)
                found |= {one["rank"]: one for one in message["ranks"]}
                self.handle_all(line)
        silent = {"host": "", "pid": 0, "state": "silent", "how": "", "main": 0, "stacks": {},
                  "calls": []}  # fmt: skip
        return [found.get(rank, {"rank": rank, **silent}) for rank in range(self.size)]

    def _snapshots(self, question: dict[str, Any]) -> list[Snapshot]:
        """Return the snapshots of this node's ranks.

        question: if it has "stacks", add the stacks of the ranks that are not in that call.
        """
        found = {one: one.snapshot(self.host) for one in self._ranks}
        if "stacks" in question:
            asked = [
                one
                for one, snapshot in found.items()
                if not report.is_there(snapshot, question["stacks"]) and one.ask_stacks()
            ]
            texts, end = dict.fromkeys(asked, b""), time.monotonic() + _STACKS_TIMEOUT_S
            while asked and time.monotonic() < end:  # stacks are complete when they stop growing
                time.sleep(0.02)
                before = dict(texts)
                texts |= {one: os.pread(one.stacks, 1 << 20, 0) for one in asked}
                asked = [one for one in asked if not texts[one] or texts[one] != before[one]]
            for one, text in texts.items():
                found[one]["stacks"] = report.parse_stacks(text.decode("utf-8", "replace"))
        return list(found.values())

    # --- connections -----------------------------------------------------------------------------

    def _find_head(self) -> None:
        """Connect to the head at one of its addresses. Else this monitor is a head itself."""
        for address in self._given["addresses"] if self._given["listener"] is None else ():
            with contextlib.suppress(OSError, KeyError), contextlib.ExitStack() as stack:
                sock = socket.create_connection(tuple(address), _CONNECT_TIMEOUT_S)
                line = JsonConnection(stack.enter_context(sock))
                nonce = line.receive(_START_TIMEOUT_S)["nonce"]
                proof = mac(self._given["secret"], "node", nonce)
                line.send({"nonce": line.nonce, "proof": proof, "ranks": len(self._ranks)})
                self._check_proof(line, line.receive(_START_TIMEOUT_S), "head")
                self.add(line)
                self._head = line
                stack.pop_all()
                with self.checked(line):
                    self.handle_all(line)  # messages that came with the proof
                return

    def welcome(self, sock: socket.socket) -> None:
        """Add an accepted connection. A connection of another node gets a nonce."""
        line = JsonConnection(sock)
        self.add(line)
        if not line.is_local:
            self._send(line, {"nonce": line.nonce})

    def _send(self, line: JsonConnection, message: dict[str, Any]) -> None:
        self.send_to(line, json.dumps(message).encode())

    def dropped(self, line: JsonConnection) -> None:
        """Forget the connection of a monitor."""
        if line in self._nodes:
            self._nodes.remove(line)
            self._behind.discard(line)
        if line is self._head:
            self._head = None

    def handle_next(self, line: JsonConnection) -> bool:
        """Handle the next message; return False if there is none."""
        if (message := line.take()) is None:
            return False
        self._handle(line, message)
        return True

    def _handle(self, line: JsonConnection, message: dict[str, Any]) -> None:
        if (line.is_local or line.peer) and "ask" in message:
            self._answer(line, message)
        elif not line.peer:
            self._check_proof(line, message, "node")
            self._seen += int(message["ranks"])
            for sock in list(self.listeners.values()) if self._seen >= self.size else ():
                if sock.family != socket.AF_UNIX:
                    self.close_listener(sock)  # all nodes have connected
            self._send(line, {"proof": mac(self._given["secret"], "head", message["nonce"])})
            self._nodes.append(line)
            if self._decide_at < _NEVER:
                self._ask_for_reports([line])
        elif line is self._head and "report" in message:
            self._is_asked = True
        elif line is self._head:
            self._is_decided = True  # the head has reported the cause
            if message["end"]:
                self._end_ranks()
        elif "reported" in message:
            self._behind.discard(line)
        else:
            self._handle_news(message, time.monotonic() - float(message["age"]))

    def _check_proof(self, line: JsonConnection, message: dict[str, Any], role: str) -> None:
        if not is_proof(message.get("proof"), self._given["secret"], role, line.nonce):
            raise ConnectionRefusedError("the peer does not know the secret")
        line.accept_peer(role)

    def _answer(self, line: JsonConnection, question: dict[str, Any]) -> None:
        answer = {name: self._given[name] for name in ("job", "size", "host", "names", "command")}
        answer |= {"is_head": self._head is None, "pids": [one.pid for one in self._ranks]}
        if question["ask"] == "snapshots":
            asks_all = line.is_local and self._head is None
            answer["ranks"] = (self._gather if asks_all else self._snapshots)(question)
        self._send(line, answer)

    def _tell_head(self, news: dict[str, Any], when: float) -> None:
        """Report an event to the head. when: its time on the monotonic clock."""
        if self._head is None:
            self._handle_news(news, when)
        else:
            self._send(self._head, news | {"age": time.monotonic() - when})

    def _handle_news(self, news: dict[str, Any], when: float) -> None:
        """Handle a report of a node. This monitor is the head."""
        if "hang" in news:
            key = news["hang"]["group"], news["hang"]["number"]
            if key not in self._reported:
                self._reported.add(key)
                self._hangs.append(news["hang"])
            return
        if "lost" in news:
            self._losses.append((when, news["lost"], bool(news["alone"])))
        else:
            self._ended_at = min(self._ended_at, when)
        if self._decide_at == _NEVER and not self._is_decided:
            at_once = self._has_all_ranks or self._survives_losses
            self._decide_at = time.monotonic() + (0.0 if at_once else _NODES_TIMEOUT_S)
            self._ask_for_reports(list(self._nodes))

    def _ask_for_reports(self, lines: list[JsonConnection]) -> None:
        """Ask other nodes to report their earlier events before the cause is decided."""
        if lines and not self._survives_losses:
            self._decide_at = time.monotonic() + _REPORTS_TIMEOUT_S
            self._behind.update(lines)
            for line in lines:
                self._send(line, {"report": True})

    # --- how the job ends ------------------------------------------------------------------------

    def _read_bell(self, rank: _Rank) -> None:
        """Report late calls, or the first sign of the rank's end: its bell is closed."""
        with contextlib.suppress(BlockingIOError):
            if os.read(rank.bell, 512):
                for cell in rank.page.read_cells():
                    if cell.inside and cell.late == cell.number:
                        self._tell_head({"hang": cell.as_dict()}, time.monotonic())
            else:
                self._close(rank.bell)
                if is_dying(rank.pid):
                    self._record_sign(rank)

    def _record_sign(self, rank: _Rank) -> None:
        """Record the first sign of a rank's end, and whether other ranks were also ending."""
        if not rank.sign:
            rank.sign = time.monotonic()
            others = [one for one in self._ranks if one is not rank and not one.is_quiet]
            rank.was_alone = not any(one.sign or is_dying(one.pid) for one in others)
            self._dying.append(rank)

    def _record_end(self, rank: _Rank) -> None:
        """Record that a rank's process has ended, and how; wait up to _END_TIMEOUT_S for that."""
        self._record_sign(rank)
        until = 0.0 if rank.is_quiet else time.monotonic() + _END_TIMEOUT_S
        rank.how = read_end(rank.pidfd, rank.pid, until)
        rank.is_alive = False
        self._close(rank.pidfd)

    def _find_losses(self) -> None:
        """Report ranks that end the job themselves, and lost ranks once their end is known."""
        for one in self._ranks:
            if one.page.state == ENDING and one not in self._ending:
                self._ending.add(one)
                when = one.page.ending_ns / 1e9
                self._ended_at = min(self._ended_at, when)
                self._tell_head({"ending": one.rank}, when)
        if not self._dying or (
            time.monotonic() < self._dying[0].sign + _DYING_TIMEOUT_S
            and any(one.is_alive and is_dying(one.pid) for one in self._ranks if not one.is_quiet)
        ):
            return
        lost, self._dying = [one for one in self._dying if not one.is_quiet], []
        if not lost or self._is_decided:
            return
        if self._survives_losses:
            for one in lost:
                self._tell_head({"lost": [one.snapshot(self.host)], "alone": True}, one.sign)
            return
        first = lost[0]
        alike = [one for one in lost if one.how == first.how]
        # A launcher does not end processes by exit codes or crashes. The first fatal signal that is
        # sent to a process decides how it ends: if others have ended by another one, this one was
        # not sent to them before.
        is_sent = first.how == "SIGKILL" or first.how in JOB_SIGNALS
        alone = first.was_alone or not is_sent or len(alike) == 1 < len(lost)
        snapshots = [one.snapshot(self.host) for one in (alike[:1] if alone else alike)]
        self._tell_head({"lost": snapshots, "alone": alone}, first.sign)

    def _decide(self) -> None:
        """Report the first cause of the job's end if it is time to decide.

        A rank that ended alone counts before ranks of another node that ended together, because a
        launcher kills the ranks of the other nodes together.
        """
        is_complete = self._seen >= self.size and not self._behind and not self._dying
        if self._decide_at == _NEVER or (time.monotonic() < self._decide_at and not is_complete):
            return
        self._decide_at = _NEVER
        if self._is_decided:
            return
        losses = [one for one in self._losses if one[0] < self._ended_at]
        losses.sort(key=lambda one: (not one[2], one[0]))
        self._losses = []
        ends_ranks = bool(losses) and not self._survives_losses
        self._is_decided = ends_ranks or self._ended_at < _NEVER
        for _, lost, alone in losses if self._survives_losses else losses[:1]:
            self._report_loss(lost, alone)
        if self._is_decided:
            for line in list(self._nodes):
                self._send(line, {"end": ends_ranks})
        if ends_ranks:
            self._end_ranks()

    def _report_loss(self, lost: list[Snapshot], alone: bool) -> None:
        # The kernel's order of events is valid for one node.
        is_first_known = alone or (lost[0]["how"] == "SIGKILL" and self._has_all_ranks)
        text = report.describe_loss(lost, self.size, is_first_known)
        if report.is_ended_by_mpi(lost[0]):
            text += (
                "\nmpicoll: MPI ended the process after an error in a call, most likely a "
                f"collective mismatch. {report.DETAIL_HINT}. All ranks:\n"
                + report.describe_states(self._gather({"ask": "snapshots"}))
            )
        self._print(text)

    def _lose_launcher(self) -> None:
        """Record that the launcher has ended: ranks that end now end because of it."""
        self._close(self._given["launcher_pidfd"])
        now = time.monotonic()
        self._ended_at = min(self._ended_at, now)
        self._end_at = now + _CHECK_INTERVAL_S

    def _end_with_launcher(self) -> None:
        """End the ranks because their launcher, which would end them, has ended."""
        self._end_at = _NEVER
        if self._losses:
            self._decide_at = 0.0
            self._decide()
        if all(one.is_quiet for one in self._ranks if one.is_alive) or self._kill_at < _NEVER:
            return
        if not self._ending:
            self._is_decided = True
            self._print(
                f"mpicoll: the launcher of this job (process {self._given['launcher']} on "
                f"{self.host}) has ended; ending its ranks"
            )
        self._end_ranks()

    def _end_ranks(self) -> None:
        """Order the ranks of this node to end."""
        for one in self._ranks:
            if one.is_alive and not one.is_quiet:
                one.page.end_order = 1
        self._kill_at = time.monotonic() + _KILL_GRACE_S

    def _kill(self, now: float) -> None:
        """Kill ranks that do not end in time, and stopped ranks once a rank has ended the job.

        A launcher that sends them SIGTERM would wait for them.
        """
        has_ended = any(not one.is_alive and one.page.state == ENDING for one in self._ranks)
        for one in self._ranks:
            is_stopped = has_ended and not one.is_quiet and state_of(one.pid) == "stopped"
            if one.needs_monitor and (now > self._kill_at or is_stopped):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)


def main() -> None:
    """Read the configuration from a descriptor, and serve."""
    descriptor = int(sys.argv[1])
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        given = json.loads(memory[:])
    os.close(descriptor)
    sys.path[:] = [*sys.path, *given["path"]]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    NodeMonitor(given).serve()


if __name__ == "__main__":
    main()
