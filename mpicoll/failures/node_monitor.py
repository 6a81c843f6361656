"""Node monitor: one process per node that reports the state of its ranks, also of dead ones.

It reads the ranks' status pages, prints their stacks by a signal handler that needs no lock of
Python, and notices their end by their pidfds. The monitor of rank 0's node, the head,
queries the monitors of the other nodes, decides which rank caused the end of the job
(``blame.py``), and writes to the launcher's standard error. It ends with its ranks.

The rank that starts the monitor opens the pidfds and pages of all ranks of the node, and an epoll
with their events, before ``init_process_group`` returns on any rank. So no event is lost while the
monitor starts. It runs as a file, and imports a module only when it needs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent.parent)]

from mpicoll.failures.blame import Loss, build_loss, find_cause
from mpicoll.failures.status_page import DONE, ENDING, LEFT, Cell, StatusPage, parse
from mpicoll.line_protocol import ANSWER_TIMEOUT_S, JsonConnection, LineServer, is_proof, mac

if TYPE_CHECKING:
    from mpicoll.failures.report import Snapshot

__all__ = ["SOCKETS", "find_folder", "main", "read_stat"]

#: Maximum time between two checks of the pages, and that time as a fraction of the shortest limit.
_CHECK_INTERVAL_S, _CHECK_FRACTION = 1.0, 0.2
#: Time to collect the stacks of all ranks of a node.
_STACKS_TIMEOUT_S = 2.0
#: Time for the system to report how a process has ended.
_END_TIMEOUT_S = 0.1
#: Times to wait for ranks that are ending, and for other nodes, before the cause is decided.
_DYING_TIMEOUT_S, _NODES_TIMEOUT_S = 2.0, 0.5
#: Time after which a rank that was ordered to end is killed.
_KILL_GRACE_S = 10.0
#: Timeout of a connection to one address of the head, and time that the head may take to start.
_CONNECT_TIMEOUT_S, _START_TIMEOUT_S = 3.0, 30.0
#: Maximum number of connections without a handshake, in addition to those of all nodes.
_MAX_STRANGER_COUNT = 64
#: Flag of a process that is exiting, in /proc/PID/stat.
_PF_EXITING = 4
#: Asks Linux how the process of a pidfd has ended (since 6.15), and where the answer has that.
_PIDFD_GET_INFO, _INFO_EXIT, _INFO = 0xC040FF0B, 8, struct.Struct("=Q52xi")
#: Suffix of the name of a monitor's socket.
SOCKETS = ".watch"


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
    """A rank of this node."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.rank: int = given["rank"]
        self.pid: int = given["pid"]
        self.pidfd: int = given["pidfd"]
        self.bell: int = given["bell"]
        self.page = StatusPage(given["page"])
        self._signal: int = given["signal"]
        self._stacks_path = f"/proc/{self.pid}/fd/{given['stacks']}"
        self._stacks = -1
        self.how = ""  # how the process has ended
        self.sign = 0.0  # time of the first sign of its end, on the monotonic clock
        self.was_alone = False  # no other rank of the node was ending at that time
        self._cells: list[tuple[bytes, float]] = []  # at the last check; unchanged since when

    @property
    def state(self) -> int:
        """The state on its page."""
        return self.page.header().state

    @property
    def is_quiet(self) -> bool:
        """Whether no other rank needs this one, or it has reported its end itself."""
        return self.state in (ENDING, DONE, LEFT)

    @property
    def is_here(self) -> bool:
        """Whether it runs and this monitor is responsible for it."""
        return self.pidfd >= 0 and self.state != LEFT

    def update(self, now: float) -> None:
        """Read the page, and record since when each call is unchanged."""
        known = dict(enumerate(self._cells))
        self._cells = [
            known[k] if k in known and known[k][0] == raw else (raw, now)
            for k, raw in enumerate(self.page.raw_cells())
        ]

    def calls(self) -> list[tuple[Cell, float]]:
        """Return each group's cell at the last update, and since when it is unchanged."""
        parsed = [(parse(raw), since) for raw, since in self._cells]
        return [(cell, since) for cell, since in parsed if cell.group]

    def end(self, until: float) -> None:
        """Record that the process has ended, and how, which the system may know a bit later."""
        self.update(time.monotonic())
        self.how = _read_end(self.pidfd, self.pid, 0.0 if self.is_quiet else until)
        os.close(self.pidfd)
        self.pidfd = -1

    def ask_stacks(self) -> bool:
        """Make the process print its stacks; return whether it will.

        The signal goes to a thread of mpicoll, so that it interrupts no system call of the program.
        """
        if self.pidfd < 0 or _state_of(self.pid) != "running":
            return False
        with contextlib.suppress(OSError, ValueError, IndexError):
            if self._stacks < 0:
                self._stacks = os.open(self._stacks_path, os.O_RDWR)
            if _is_in_set(self.pid, "SigCgt", self._signal):
                os.ftruncate(self._stacks, 0)
                return _tgkill(self.pid, self.page.header().listener, self._signal)
        return False

    def read_stacks(self) -> str:
        """Return the stacks printed so far."""
        return os.pread(self._stacks, 1 << 20, 0).decode("utf-8", "replace")

    def snapshot(self, host: str, now: float, stacks: dict[str, list[str]]) -> Snapshot:
        """Return the state of the rank; see report.py."""
        state = "gone" if self.pidfd < 0 else _state_of(self.pid)
        if state == "running":
            state = {ENDING: "ending", DONE: "done"}.get(self.state, state)
        return {
            "rank": self.rank, "host": host, "pid": self.pid, "state": state, "how": self.how,
            "main": self.page.header().thread, "stacks": stacks,
            "calls": [
                cell._asdict() | {"since": now - since if cell.inside else 0.0}
                for cell, since in self.calls()
            ],
        }  # fmt: skip


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. The next one is the parent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return "stopped" if read_stat(pid)[0] in "Tt" else "running"
    return "gone"


def _is_dying(pid: int) -> bool:
    """Return whether a process has ended, is exiting, or was sent a fatal signal.

    If any fatal signal ends a process, the kernel has SIGKILL pending for each of its threads.
    """
    try:
        state = read_stat(pid)
        if state[0] in "ZX" or int(state[6]) & _PF_EXITING:
            return True
        return any(_is_in_set(pid, name, signal.SIGKILL) for name in ("SigPnd", "ShdPnd"))
    except OSError:
        return True
    except (ValueError, IndexError):
        return False


def _is_in_set(pid: int, name: str, number: int) -> bool:
    """Return whether a signal is in a set of /proc/PID/status, such as SigCgt (handled)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split(f"{name}:")[1].split()[0], 16) >> (number - 1) & 1)


def _read_end(pidfd: int, pid: int, until: float) -> str:
    """Return how a process has ended: the name of a signal, "code N", or "" if it is unknown."""
    while True:  # while its parent waits for it, both sources may fail
        answer = bytearray(struct.pack("=Q", _INFO_EXIT) + bytes(56))
        with contextlib.suppress(OSError):  # after its parent has waited for it
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
            mask, code = _INFO.unpack_from(answer)
            if mask & _INFO_EXIT:
                return _name_end(code)
        with contextlib.suppress(OSError, ValueError, IndexError):  # before
            fields = read_stat(pid)
            if fields[0] in "ZX":
                return _name_end(int(fields[-1]))
        if time.monotonic() >= until:
            return ""
        time.sleep(0.002)


def _name_end(status: int) -> str:
    if number := status & 0x7F:
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"code {status >> 8 & 0xFF}"


def _tgkill(pid: int, thread: int, number: int) -> bool:
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):
        return bool(libc.tgkill(pid, thread, number) == 0)
    os.kill(pid, number)
    return True


class NodeMonitor(LineServer[JsonConnection]):
    """The monitor of a node.

    given: the configuration that ``monitor_client`` has built.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        # All nodes may connect at the same time.
        super().__init__(select.epoll.fromfd(given["epoll"]), _MAX_STRANGER_COUNT + given["size"])
        self.job: str = given["job"]
        self.size: int = given["size"]
        self.host: str = given["host"]
        self._secret: str = given["secret"]
        self._survives_losses: bool = given["survives_losses"]
        self._given = given
        self._ranks = [_Rank(each) for each in given["ranks"]]
        self._stderr: int = given["stderr"]
        self._launcher: int = given["launcher_pidfd"]
        self._nodes: dict[str, JsonConnection] = {}  # on the head: monitors of other nodes
        self._far_ranks: dict[str, int] = {}  # number of ranks of each of these nodes
        self._head: JsonConnection | None = None  # None: this monitor reports to the user
        self._reported: set[tuple[int, int]] = set()
        self._dying: list[_Rank] = []  # ranks with a sign of their end, in order, not handled yet
        self._losses: list[Loss] = []
        self._ended_at = float("inf")  # when the first rank began to end the job itself
        self._known_endings: set[int] = set()  # the ranks of this node that have done so
        self._is_decided = False  # the cause of the job's end was reported
        self._decide_at = self._end_by = self._launcher_by = float("inf")
        self._path: Path | None = None

    def serve(self) -> None:
        """Run the monitor until each rank of this node has ended or has a newer monitor."""
        for one in self._ranks:
            one.page.write(monitor_pid=os.getpid())
        try:
            self._listen()
            self._find_head()
            self._loop()
        finally:
            if self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # else `mpicoll watch` finds no monitor
            path = find_folder() / f"{os.getpid()}{SOCKETS}"
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(str(path))
            self._path = path
            sock.listen()
            self.listen(sock)
        for descriptor in self._given["listeners"]:
            self.listen(socket.socket(fileno=descriptor))

    def _loop(self) -> None:
        next_check = 0.0
        while self._is_needed():
            pause = self._pause()
            wait = min(next_check, self._decide_at) - time.monotonic()
            ready = [descriptor for descriptor, _ in self.poll.poll(max(0.0, wait))]
            ends = {one.pidfd: one for one in self._ranks if one.pidfd >= 0}
            bells = {one.bell: one for one in self._ranks if one.bell >= 0}
            for descriptor in ready:
                if descriptor in bells:
                    self._read_bell(bells[descriptor])
                elif descriptor in ends:
                    self._record_end(ends[descriptor])
                elif descriptor == self._launcher:
                    self._lose_launcher()
            self._find_losses()
            for descriptor in ready:
                self.serve_descriptor(descriptor)
            self._decide()
            now = time.monotonic()
            if now >= next_check:
                next_check = now + pause
                self._check_hangs(now)
                self.drop_silent()
                if now > self._launcher_by:
                    self._end_with_launcher()
                self._kill(now)

    def _is_needed(self) -> bool:
        """Return whether a rank runs, or a report is pending."""
        if self._decide_at < float("inf") or (self._dying and not self._is_decided):
            return True
        return any(one.is_here for one in self._ranks)

    def _pause(self) -> float:
        limits = [cell.limit for one in self._ranks for cell, _ in one.calls() if cell.limit]
        shortest_s = min(limits, default=1 << 20) / 1000
        return max(0.1, min(_CHECK_INTERVAL_S, _CHECK_FRACTION * shortest_s))

    # --- hangs -----------------------------------------------------------------------------------

    def _check_hangs(self, now: float) -> None:
        """Report calls that have lasted too long."""
        for one in self._ranks:
            one.update(now)
        for one in self._ranks:
            if one.pidfd < 0 or self._is_decided:
                continue
            for cell, since in one.calls():
                is_late = cell.inside and cell.limit and 1000 * (now - since) > cell.limit
                if is_late and (cell.group, cell.number) not in self._reported:
                    self._tell_head({"hang": cell._asdict(), "seconds": now - since}, now)
                    self._reported.add((cell.group, cell.number))

    def _report_hang(self, call: dict[str, Any], seconds: float) -> None:
        """Print a report of a call, once. This monitor is the head."""
        key = call["group"], call["number"]
        if key in self._reported or self._is_decided or self._ended_at < float("inf"):
            return
        self._reported.add(key)
        from mpicoll.failures import report

        snapshots = self._gather({"ask": "snapshots", "stacks": True, "call": call})
        if any(report.is_there(one, call) for one in snapshots):  # else it has ended meanwhile
            _print(report.describe_hang(snapshots, call, seconds))

    # --- questions -------------------------------------------------------------------------------

    def _gather(self, question: dict[str, Any]) -> list[Snapshot]:
        """Query all monitors; return the snapshots of all ranks."""
        lines = list(self._nodes.values())
        for line in lines:
            self._send(line, question)
        found = self._snapshots(question)
        end = time.monotonic() + ANSWER_TIMEOUT_S
        others: list[tuple[JsonConnection, dict[str, Any]]] = []
        for line in lines:
            with self.checked(line):
                while "ranks" not in (message := line.receive(end - time.monotonic())):
                    others.append((line, message))
                found += message["ranks"]
        for line, message in others:
            with self.checked(line):
                self._handle(line, message)
        for line in lines:  # messages that follow the answers
            with self.checked(line):
                self.handle_all(line)
        known = {one["rank"] for one in found}
        found += [
            {"rank": rank, "host": "", "pid": 0, "state": "silent", "how": "", "main": 0,
             "stacks": {}, "calls": []}
            for rank in range(self.size) if rank not in known
        ]  # fmt: skip
        return sorted(found, key=lambda one: int(one["rank"]))

    def _snapshots(self, question: dict[str, Any]) -> list[Snapshot]:
        from mpicoll.failures import report

        now = time.monotonic()
        for one in self._ranks:
            one.update(now)
        call = question.get("call")
        asked = [
            one
            for one in self._ranks
            if question.get("stacks")
            and not (call and report.is_there(one.snapshot(self.host, now, {}), call))
            and one.ask_stacks()
        ]
        stacks = _read_all_stacks(asked)
        return [
            one.snapshot(self.host, now, report.parse_stacks(stacks.get(one, "")))
            for one in self._ranks
        ]

    # --- connections -----------------------------------------------------------------------------

    def _find_head(self) -> None:
        """Connect to the head, at the first of its addresses that completes the handshake.

        Without it, this monitor reports to the user itself.
        """
        for address in [] if self._given["listeners"] else self._given["addresses"]:
            with contextlib.suppress(OSError, KeyError), contextlib.ExitStack() as stack:
                sock = socket.create_connection(tuple(address), _CONNECT_TIMEOUT_S)
                line = JsonConnection(stack.enter_context(sock))
                nonce = line.receive(_START_TIMEOUT_S)["nonce"]
                line.send({"node": self._given["node"], "nonce": line.nonce,
                           "ranks": len(self._ranks),
                           "proof": mac(self._secret, "node", nonce)})  # fmt: skip
                self._check_proof(line, line.receive(_START_TIMEOUT_S), "head")
                line.accept_peer("head")
                self.add(line)
                self._head = line
                stack.pop_all()
                return

    def welcome(self, sock: socket.socket) -> None:
        """Add an accepted connection. A connection of another node gets a nonce."""
        if sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("=3i", credentials)[1] not in (0, os.getuid()):
                sock.close()
                return
        line = JsonConnection(sock)
        self.add(line)
        if not line.is_local:
            self._send(line, {"nonce": line.nonce})

    def _send(self, line: JsonConnection, message: dict[str, Any]) -> None:
        self.send_to(line, json.dumps(message).encode())

    def dropped(self, line: JsonConnection) -> None:
        """Forget the connection of a monitor."""
        self._nodes = {node: one for node, one in self._nodes.items() if one is not line}
        if line is self._head:
            self._head = None

    def handle_next(self, line: JsonConnection) -> bool:
        """Handle the next message."""
        if (message := line.take()) is None:
            return False
        self._handle(line, message)
        return True

    def _handle(self, line: JsonConnection, message: dict[str, Any]) -> None:
        if (line.is_local or line.peer) and "ask" in message:
            self._answer(line, message)
            line.since = time.monotonic()
        elif not line.peer:
            self._identify_node(line, message)
        elif line is self._head:
            self._is_decided = True  # the head has reported the cause
            if "end" in message:
                self._end_ranks()
        else:
            self._handle_news(message, time.monotonic() - float(message["age"]))

    def _identify_node(self, line: JsonConnection, message: dict[str, Any]) -> None:
        self._check_proof(line, message, "node")
        line.accept_peer(str(message["node"]))
        self._nodes[line.peer] = line
        self._send(line, {"proof": mac(self._secret, "head", message["nonce"])})
        self._far_ranks[line.peer] = int(message["ranks"])
        if sum(self._far_ranks.values()) + len(self._ranks) < self.size:
            return
        for sock in list(self.listeners.values()):  # all nodes have connected
            if sock.family != socket.AF_UNIX:
                self.close_listener(sock)

    def _check_proof(self, line: JsonConnection, message: dict[str, Any], role: str) -> None:
        if not is_proof(message.get("proof"), self._secret, role, line.nonce):
            raise ConnectionRefusedError("the peer does not know the secret")

    def _answer(self, line: JsonConnection, question: dict[str, Any]) -> None:
        answer = {
            "job": self.job, "size": self.size, "host": self.host, "is_head": self._head is None,
            "pids": [one.pid for one in self._ranks],
            "names": self._given["names"], "command": self._given["command"],
        }  # fmt: skip
        if question["ask"] == "snapshots":
            asks_all = line.is_local and self._head is None
            answer["ranks"] = (self._gather if asks_all else self._snapshots)(question)
        self._send(line, answer)

    def _tell_head(self, news: dict[str, Any], when: float) -> None:
        """Report to the head an event of a time on the monotonic clock."""
        if self._head is None:
            self._handle_news(news, when)
        else:
            self._send(self._head, news | {"age": time.monotonic() - when})

    def _handle_news(self, news: dict[str, Any], when: float) -> None:
        """Handle a report of a node. This monitor is the head."""
        if "hang" in news:
            self._report_hang(news["hang"], news["seconds"])
            return
        if "lost" in news:
            self._losses.append(Loss(when, news["lost"], bool(news["alone"])))
        else:
            self._ended_at = min(self._ended_at, when)
        # Other nodes have time to report earlier events.
        several = self.size > len(self._ranks) and not self._survives_losses
        wait = _NODES_TIMEOUT_S if several else 0.0
        self._decide_at = min(self._decide_at, time.monotonic() + wait)

    # --- how the job ends ------------------------------------------------------------------------

    def _read_bell(self, rank: _Rank) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(rank.bell, 512):
                return
            # The rank has closed the pipe: the first sign of its end.
            self.poll.unregister(rank.bell)
            os.close(rank.bell)
            rank.bell = -1
            if _is_dying(rank.pid):
                self._record_sign(rank)

    def _record_sign(self, rank: _Rank) -> None:
        """Record the first sign of a rank's end, and whether other ranks were also ending."""
        if not rank.sign:
            rank.sign = time.monotonic()
            others = [one for one in self._ranks if one is not rank and not one.is_quiet]
            rank.was_alone = not any(one.sign or _is_dying(one.pid) for one in others)
            self._dying.append(rank)

    def _record_end(self, rank: _Rank) -> None:
        """Record that the process of a rank has ended."""
        self._record_sign(rank)
        self.poll.unregister(rank.pidfd)
        rank.end(time.monotonic() + _END_TIMEOUT_S)

    def _find_losses(self) -> None:
        """Report ranks that have ended while other ranks need them, once it is known how."""
        self._find_endings()
        if not self._dying:
            return
        now = time.monotonic()
        if now < self._dying[0].sign + _DYING_TIMEOUT_S and any(
            one.pidfd >= 0 and _is_dying(one.pid) for one in self._ranks if not one.is_quiet
        ):
            return
        dying, self._dying = self._dying, []
        lost = [one for one in dying if not one.is_quiet]
        if not lost or self._is_decided:
            return
        alone = self._survives_losses  # each of them is reported
        for ranks in [[one] for one in lost] if alone else [lost]:
            snapshots = [one.snapshot(self.host, now, {}) for one in ranks]
            loss = build_loss(ranks[0].sign, snapshots, alone or ranks[0].was_alone)
            self._tell_head({"lost": loss.ranks, "alone": loss.alone}, loss.when)

    def _find_endings(self) -> None:
        """Report the ranks of this node that end the job themselves."""
        for one in self._ranks:
            if one.state != ENDING or one.rank in self._known_endings:
                continue
            self._known_endings.add(one.rank)
            when = one.page.header().ending_ns / 1e9
            self._ended_at = min(self._ended_at, when)
            self._tell_head({"ending": one.rank}, when)

    def _decide(self) -> None:
        """Report the first cause of the job's end if it is time to decide."""
        if time.monotonic() < self._decide_at:
            return
        self._decide_at = float("inf")
        losses, self._losses = self._losses, []
        while not self._is_decided and (cause := find_cause(losses, self._ended_at)):
            losses.remove(cause)
            self._report_loss(cause)
        if self._ended_at < float("inf") and not self._is_decided:
            self._is_decided = True
            for line in list(self._nodes.values()):
                self._send(line, {"decided": True})

    def _report_loss(self, loss: Loss) -> None:
        from mpicoll.failures import report

        self._is_decided = not self._survives_losses
        several = self.size > len(self._ranks)
        # The kernel's order of events is valid for one node.
        known = loss.alone or (loss.ranks[0]["how"] == "SIGKILL" and not several)
        why = report.describe_loss(loss.ranks, self.size, known)
        if report.is_ended_by_mpi(loss.ranks[0]):
            why += "\n" + report.describe_mismatch(loss.ranks[0], self._gather({}))
        _print(why, self._stderr)
        if self._survives_losses:
            return
        for line in list(self._nodes.values()):
            self._send(line, {"end": True})
        self._end_ranks()

    def _lose_launcher(self) -> None:
        """Record that the launcher has ended: ranks that end now end because of it."""
        self.poll.unregister(self._launcher)
        os.close(self._launcher)
        self._launcher = -1
        now = time.monotonic()
        self._ended_at = min(self._ended_at, now)
        self._launcher_by = now + _CHECK_INTERVAL_S

    def _end_with_launcher(self) -> None:
        """End the ranks because their launcher, which would end them, has ended."""
        self._launcher_by = float("inf")
        alive = [one for one in self._ranks if one.pidfd >= 0]
        if all(one.is_quiet for one in alive) or self._end_by < float("inf"):
            return
        if not self._known_endings:
            self._is_decided = True
            _print(
                f"mpicoll: the launcher of this job (process {self._given['launcher']} on "
                f"{self.host}) has ended; ending its ranks",
                self._stderr,
            )
        self._end_ranks()

    def _end_ranks(self) -> None:
        """Order the ranks of this node to end."""
        for one in self._ranks:
            if one.pidfd >= 0 and not one.is_quiet:
                one.page.write(end_order=1)
        self._end_by = time.monotonic() + _KILL_GRACE_S

    def _kill(self, now: float) -> None:
        """Kill ranks that do not end in time, and stopped ranks once a rank has ended the job.

        A launcher that sends them SIGTERM would wait for them.
        """
        has_ended = any(one.pidfd < 0 and one.state == ENDING for one in self._ranks)
        for one in self._ranks:
            if not one.is_here or one.state == DONE:
                continue
            is_stopped = has_ended and not one.is_quiet and _state_of(one.pid) == "stopped"
            if now > self._end_by or is_stopped:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        if now > self._end_by:
            self._end_by = float("inf")


def _read_all_stacks(asked: list[_Rank]) -> dict[_Rank, str]:
    """Return the stacks that each rank prints. They are complete when they stop growing."""
    found = dict.fromkeys(asked, "")
    growing, end = list(asked), time.monotonic() + _STACKS_TIMEOUT_S
    while growing and time.monotonic() < end:
        time.sleep(0.02)
        for one in list(growing):
            text = one.read_stacks()
            if text and text == found[one]:
                growing.remove(one)
            found[one] = text
    return found


def _print(text: str, descriptor: int = 2) -> None:
    """Write a line to a descriptor without buffering."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode() + b"\n")


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
