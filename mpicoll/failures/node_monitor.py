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

from mpicoll.failures.blame import Ending, Loss, build_loss, find_cause
from mpicoll.failures.status_page import CALL_BYTES, DONE, ENDING, LEFT, Cell, StatusPage, parse
from mpicoll.line_protocol import ANSWER_TIMEOUT_S, JsonConnection, is_proof, mac

if TYPE_CHECKING:
    from mpicoll.failures.report import Snapshot

__all__ = ["SOCKETS", "find_folder", "main", "read_start"]

#: Maximum time between two checks of the pages, in seconds and as a fraction of the shortest limit.
_CHECK_INTERVAL_S, _CHECK_FRACTION = 1.0, 0.2
#: Time to collect the stacks of all ranks of a node.
_STACKS_TIMEOUT_S = 2.0
#: Time for the system to report how a process has ended; times to wait for processes that are
#: ending, and for reports of other nodes, before the cause is decided; time after which a rank that
#: was ordered to end is killed.
_END_TIMEOUT_S, _DYING_TIMEOUT_S, _NODES_TIMEOUT_S, _KILL_GRACE_S = 0.1, 2.0, 0.5, 10.0
#: Maximum number of connections of each kind that have not identified themselves: the oldest one
#: makes room for another.
_MAX_STRANGER_COUNT = 64
#: Seconds that the head may take to start, before another monitor stops trying to connect.
_CONNECT_TIMEOUT_S = 30.0
#: Flag of a process that is exiting, in /proc/PID/stat.
_PF_EXITING = 4
#: Asks Linux how the process of a pidfd has ended (since 6.15), and where the answer has that.
_PIDFD_GET_INFO, _INFO_EXIT, _INFO = 0xC040FF0B, 8, struct.Struct("=Q52xi")


def find_folder() -> Path:
    """Return the folder of this user's sockets and reports on this host.

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


#: Suffix of the name of a monitor's socket.
SOCKETS = ".watch"


class _Rank:
    """A rank of this node."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.rank: int = given["rank"]
        self.pid: int = given["pid"]
        self.pidfd: int = given["pidfd"]
        self.bell: int = given["bell"]
        self.page = None if given["page"] < 0 else StatusPage(given["page"])
        self._signal: int = given["signal"]
        self._stacks_path = f"/proc/{self.pid}/fd/{given['stacks']}"
        self._stacks = -1
        self.how: str | None = None  # how the process has ended
        self.sign = 0.0  # time of the first sign of its end, on the monotonic clock
        self.was_alone = False  # no other rank of the node was ending at that time
        self.printed, self.printed_at = "", float("-inf")  # its stacks, and when it was asked
        self.seen: list[bytes] = []  # cells at the last check, and since when they are unchanged
        self.since: list[float] = []

    @property
    def is_quiet(self) -> bool:
        """Whether no other rank needs this one, or it has reported its end itself."""
        return self.page is None or self.page.header().state in (ENDING, DONE, LEFT)

    @property
    def is_here(self) -> bool:
        """Whether it runs and this monitor is responsible for it."""
        return self.pidfd >= 0 and (self.page is None or self.page.header().state != LEFT)

    def update(self, now: float) -> None:
        """Read the page, and record since when each call is unchanged."""
        if self.page is None:
            return
        cells = self.page.raw_cells()
        self.since = [
            self.since[k]
            if k < len(self.seen) and self.seen[k][:CALL_BYTES] == raw[:CALL_BYTES]
            else now
            for k, raw in enumerate(cells)
        ]
        self.seen = cells

    def calls(self) -> list[tuple[Cell, float]]:
        """Return each group's cell at the last update, and since when its call is unchanged."""
        parsed = [(parse(raw), since) for raw, since in zip(self.seen, self.since, strict=True)]
        return [(cell, since) for cell, since in parsed if cell.group]

    def end(self, until: float) -> None:
        """Record that the process has ended, and how.

        until: time on the monotonic clock until which the system is asked how.
        """
        self.update(time.monotonic())
        self.how = _read_end(self.pidfd, self.pid, 0.0 if self.is_quiet else until)
        os.close(self.pidfd)
        self.pidfd = -1

    def ask_stacks(self) -> bool:
        """Make the process print its stacks; return whether it will.

        The signal goes to a thread of mpicoll, so that it interrupts no system call of the program.
        """
        if self.page is None or self.pidfd < 0 or _state_of(self.pid) != "running":
            return False
        with contextlib.suppress(OSError, ValueError, IndexError):
            if self._stacks < 0:
                self._stacks = os.open(self._stacks_path, os.O_RDWR)
            if _catches(self.pid, self._signal):
                os.ftruncate(self._stacks, 0)
                return _tgkill(self.pid, self.page.header().listener, self._signal)
        return False

    def read_stacks(self) -> str:
        """Return the stacks printed so far."""
        return os.pread(self._stacks, 1 << 20, 0).decode("utf-8", "replace")

    def snapshot(self, host: str, now: float, stacks: dict[str, list[str]]) -> Snapshot:
        """Return the state of the rank; see report.py."""
        state = "gone" if self.pidfd < 0 else _state_of(self.pid)
        header = None if self.page is None else self.page.header()
        if header is not None and state == "running":
            state = {ENDING: "ending", DONE: "done"}.get(header.state, state)
        return {
            "rank": self.rank, "host": host, "pid": self.pid, "state": state, "how": self.how or "",
            "main": 0 if header is None else header.thread, "stacks": stacks,
            "calls": [
                cell._asdict() | {"since": now - since if cell.inside else 0.0}
                for cell, since in self.calls()
            ],
        }  # fmt: skip


def read_start(pid: int) -> str:
    """Return the start time of a process, which identifies it if its pid is reused."""
    return _stat(pid)[19]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return "stopped" if _stat(pid)[0] in "Tt" else "running"
    return "gone"


def _is_dying(pid: int) -> bool:
    """Return whether a process has ended, is exiting, or was sent a fatal signal.

    If any fatal signal ends a process, the kernel has SIGKILL pending for each of its threads.
    """
    try:
        state = _stat(pid)
        if state[0] in "ZX" or int(state[6]) & _PF_EXITING:
            return True
        status = Path(f"/proc/{pid}/status").read_text()
        pending = [int(status.split(f"{name}:")[1].split()[0], 16) for name in ("SigPnd", "ShdPnd")]
        return any(one >> (signal.SIGKILL - 1) & 1 for one in pending)
    except OSError:
        return True
    except (ValueError, IndexError):
        return False


def _catches(pid: int, number: int) -> bool:
    """Return whether a live process has a handler for a signal."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)
    return False


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
            fields = _stat(pid)
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


class NodeMonitor:
    """The monitor of a node.

    given: the configuration that ``monitor_client`` has built.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.job: str = given["job"]
        self.size: int = given["size"]
        self.host: str = given["host"]
        self._secret: str = given["secret"]
        self._survives_losses: bool = given["survives_losses"]
        self._given = given
        self._ranks = [_Rank(each) for each in given["ranks"]]
        self._stderr: int = given["stderr"]
        self._launcher: int = given["launcher_pidfd"]
        self._poll = select.epoll.fromfd(given["epoll"])
        self._lines: dict[int, JsonConnection] = {}
        self._nodes: dict[str, JsonConnection] = {}  # on the head: monitors of other nodes
        self._far_ranks: dict[str, int] = {}  # number of ranks of each of these nodes
        self._head: JsonConnection | None = None
        # Connections that may reach the head, with the nonce received on each ("" before), and the
        # connection on which this monitor has introduced itself.
        self._dialing: dict[JsonConnection, str] = {}
        self._introduced: JsonConnection | None = None
        self._held: list[dict[str, Any]] = []  # messages for the head until it is connected
        self._listeners: dict[int, socket.socket] = {}
        self._reported: set[tuple[int, int]] = set()
        self._reports = 0
        self._signalled = False  # a signal that may end the job was reported
        self._dying: list[_Rank] = []  # ranks with a sign of their end, in order, not handled yet
        self._losses: list[Loss] = []
        self._endings: list[Ending] = []
        self._known_endings: set[int] = set()  # the ranks of this node among them
        self._is_decided = False  # the cause of the job's end was reported
        self._decide_at = self._end_by = self._launcher_by = float("inf")
        self._path: Path | None = None

    def serve(self) -> None:
        """Run the monitor until each rank of this node has ended or has a newer monitor."""
        for one in self._ranks:
            if one.page is not None:
                one.page.set_monitor_pid(os.getpid())
        try:
            self._listen()
            if not self._given["listeners"] and self._given["addresses"]:
                self._dial()
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
            self._add_listener(sock)
        for descriptor in self._given["listeners"]:
            self._add_listener(socket.socket(fileno=descriptor))

    def _add_listener(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._listeners[sock.fileno()] = sock
        self._poll.register(sock, select.EPOLLIN)

    def _loop(self) -> None:
        next_check = 0.0
        while self._is_needed():
            pause = self._pause()
            wait = min(next_check, self._decide_at) - time.monotonic()
            ready = [descriptor for descriptor, _ in self._poll.poll(max(0.0, wait))]
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
                if descriptor in self._listeners:
                    self._accept(self._listeners[descriptor])
                elif descriptor in self._lines:
                    self._serve_line(self._lines[descriptor])
            self._decide()
            now = time.monotonic()
            if now >= next_check:
                next_check = now + pause
                self._check_hangs(now)
                self._drop_silent(now)
                if now > self._launcher_by:
                    self._end_with_launcher()
                if now > self._end_by:
                    self._kill()
                self._kill_stopped()

    def _is_needed(self) -> bool:
        """Return whether a rank runs, or a report is pending."""
        undecided = self._decide_at < float("inf") or (self._dying and not self._is_decided)
        return bool(
            any(one.is_here for one in self._ranks) or undecided or (self._held and self._dialing)
        )

    def _pause(self) -> float:
        limits = [cell.limit for one in self._ranks for cell, _ in one.calls() if cell.limit]
        return max(
            0.1, min(_CHECK_INTERVAL_S, _CHECK_FRACTION * min(limits, default=1 << 20) / 1000)
        )

    # --- hangs -----------------------------------------------------------------------------------

    def _check_hangs(self, now: float) -> None:
        """Report calls that have lasted too long."""
        for one in self._ranks:
            one.update(now)
        self._report_signals()
        for one in self._ranks:
            if one.pidfd < 0:
                continue
            for cell, since in one.calls():
                if cell.inside and cell.limit and 1000 * (now - since) > cell.limit:
                    self._report_once(cell, now - since)

    def _report_signals(self) -> None:
        """Report, once per job, that ranks have received a signal that the program handles."""
        pages = {one.rank: one.page for one in self._ranks if one.page is not None}
        came = {rank: number for rank, one in pages.items() if (number := one.header().signal)}
        if came and not self._signalled:
            self._signalled = True
            from mpicoll.failures import report

            name = signal.Signals(next(iter(came.values()))).name
            text = report.describe_signal(name, list(came), self.size, self.host)
            if self._is_head:
                _print(text, self._stderr)
            else:
                self._send_to_head({"signal": text})
        for rank in came:  # the rank may wait for this
            pages[rank].set_signal(0)

    def _report_once(self, cell: Cell, seconds: float) -> None:
        if (cell.group, cell.number) in self._reported or self._is_decided:
            return
        self._reported.add((cell.group, cell.number))
        call = cell._asdict()
        if not self._is_head:
            self._send_to_head({"hang": call, "seconds": seconds})
        elif not self._endings:
            self._report(call, seconds)

    def _report(self, call: dict[str, Any], seconds: float) -> None:
        from mpicoll import private_files
        from mpicoll.failures import report

        snapshots = self._gather({"ask": "snapshots", "stacks": "missing", "call": call})
        if not any(report.is_there(one, call) for one in snapshots):
            return  # the call has ended meanwhile
        self._reports += 1
        path, last = Path(self._given["reports"]), ""
        try:
            path = (path if path.parts else find_folder()) / f"hang-{self.job}-{self._reports}.json"
            whole = {"job": self.job, "time": time.time(), "seconds": seconds, "call": call,
                     "words": report.describe_call(call), "ranks": snapshots}  # fmt: skip
            private_files.write(path, json.dumps(whole, indent=1).encode())
            last = f"  full report: {path} on {self.host}"
        except OSError as error:
            last = f"  the full report cannot be written: {error}"
        _print(report.describe_hang(snapshots, call, seconds, last))

    # --- questions -------------------------------------------------------------------------------

    def _gather(self, question: dict[str, Any]) -> list[Snapshot]:
        """Query all monitors; return the snapshots of all ranks."""
        for line in list(self._nodes.values()):
            self._send(line, question)
        found = self._snapshots(question)
        waiting = {line.fileno(): line for line in self._nodes.values()}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        end = time.monotonic() + ANSWER_TIMEOUT_S
        others: list[tuple[JsonConnection, dict[str, Any]]] = []
        while waiting and (ready := poll.poll(1000 * max(0.0, end - time.monotonic()))):
            for descriptor, _ in ready:
                line = waiting[descriptor]
                try:
                    line.fill()
                    while (message := line.take()) is not None and "ranks" not in message:
                        others.append((line, message))
                except OSError:
                    self._drop(line)
                    message = {"ranks": []}
                if message is not None:
                    found += message["ranks"]
                    poll.unregister(descriptor)
                    del waiting[descriptor]
        for line in waiting.values():
            self._drop(line)
        for line, message in others:
            self._handle_safely(line, message)
        for line in list(self._nodes.values()):  # messages that follow the answers
            self._handle_all(line)
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
        wanted = [one for one in self._ranks if question.get("stacks")]
        if call:
            wanted = [
                one for one in wanted if not report.is_there(one.snapshot(self.host, now, {}), call)
            ]
        asked = [one for one in wanted if question["stacks"] != "known" and one.ask_stacks()]
        for one, text in _read_all_stacks(asked).items():
            one.printed, one.printed_at = text, now
        known = [
            one for one in wanted if one in asked or one.printed_at > max(one.since, default=0)
        ]
        return [
            one.snapshot(self.host, now, report.parse_stacks(one.printed) if one in known else {})
            for one in self._ranks
        ]

    # --- connections -----------------------------------------------------------------------------

    @property
    def _is_head(self) -> bool:
        """Whether this monitor reports to the user instead of to another monitor."""
        return self._head is None and not self._dialing

    def _dial(self) -> None:
        """Connect to all addresses of the head. The first to complete the handshake is used."""
        for host, port in self._given["addresses"]:
            with contextlib.suppress(OSError):
                sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                sock.setblocking(False)
                sock.connect_ex((host, port))
                self._dialing[self._add_line(sock)] = ""

    def _add_line(self, sock: socket.socket) -> JsonConnection:
        line = JsonConnection(sock)
        if not line.is_local:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._lines[line.fileno()] = line
        self._poll.register(line, select.EPOLLIN)
        return line

    def _is_stranger(self, line: JsonConnection) -> bool:
        return not line.peer and line not in self._dialing

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("=3i", credentials)[1] not in (0, os.getuid()):
                sock.close()
                return
        line = self._add_line(sock)
        strangers = [one for one in self._lines.values()
                     if self._is_stranger(one) and one.is_local == line.is_local]  # fmt: skip
        if len(strangers) > _MAX_STRANGER_COUNT:
            self._drop(min(strangers, key=lambda one: one.since))
        if not line.is_local:
            self._send(line, {"nonce": line.nonce})

    def _drop_silent(self, now: float) -> None:
        """Drop connections without a handshake or a question in time."""
        for line in list(self._lines.values()):
            limit = _CONNECT_TIMEOUT_S if line in self._dialing else ANSWER_TIMEOUT_S
            if not line.peer and now - line.since > limit:
                self._drop(line)

    def _send(self, line: JsonConnection, message: dict[str, Any]) -> None:
        try:
            line.send(message)
            self._watch_output(line)
        except OSError:
            self._drop(line)

    def _watch_output(self, line: JsonConnection) -> None:
        self._poll.modify(line, select.EPOLLIN | (select.EPOLLOUT if line.has_unsent else 0))

    def _drop(self, line: JsonConnection) -> None:
        if self._lines.get(line.fileno()) is not line:
            return
        del self._lines[line.fileno()]
        self._poll.unregister(line)
        self._nodes = {node: one for node, one in self._nodes.items() if one is not line}
        if line is self._head:
            self._head = None
        line.sock.close()
        if line in self._dialing:
            del self._dialing[line]
            if line is self._introduced:
                self._introduced = None
                self._introduce()
            self._send_held()

    def _serve_line(self, line: JsonConnection) -> None:
        try:
            line.flush()
            line.fill()
            self._watch_output(line)
        except OSError:
            self._drop(line)
        self._handle_all(line)

    def _handle_all(self, line: JsonConnection) -> None:
        """Handle the complete messages."""
        try:
            while line.sock.fileno() >= 0 and (message := line.take()) is not None:
                self._handle_safely(line, message)
        except OSError:
            self._drop(line)

    def _handle_safely(self, line: JsonConnection, message: dict[str, Any]) -> None:
        """Handle a message. An invalid one closes this connection only."""
        try:
            self._handle(line, message)
        except Exception:
            self._drop(line)

    def _handle(self, line: JsonConnection, message: dict[str, Any]) -> None:
        if line in self._dialing:
            self._identify_head(line, message)
        elif line.is_local:
            self._answer(line, message)
            line.since = time.monotonic()
        elif not line.peer:
            self._identify_node(line, message)
        elif message.get("ask"):
            self._answer(line, message)
        elif line is self._head:
            self._is_decided = True  # the head has reported the cause
            if "end" in message:
                self._end_ranks(str(message["end"]))
        else:
            self._handle_news(message)

    def _identify_node(self, line: JsonConnection, message: dict[str, Any]) -> None:
        self._check_proof(line, message, "node")
        line.accept_peer(str(message["node"]))
        self._nodes[line.peer] = line
        self._send(line, {"proof": mac(self._secret, "head", message["nonce"])})
        self._far_ranks[line.peer] = int(message["ranks"])
        if sum(self._far_ranks.values()) + len(self._ranks) >= self.size:
            self._stop_listening()

    def _check_proof(self, line: JsonConnection, message: dict[str, Any], role: str) -> None:
        if not is_proof(message.get("proof"), self._secret, role, line.nonce):
            raise ConnectionRefusedError("the peer does not know the secret")

    def _stop_listening(self) -> None:
        """Close the sockets for other nodes, because all have connected."""
        for descriptor, sock in list(self._listeners.items()):
            if sock.family != socket.AF_UNIX:
                self._poll.unregister(descriptor)
                del self._listeners[descriptor]
                sock.close()

    def _introduce(self) -> None:
        """Send the proof and the name of this node on one of the connections to the head."""
        line = next((one for one, nonce in self._dialing.items() if nonce), None)
        if self._introduced is None and line is not None and self._head is None:
            self._introduced = line
            proof = mac(self._secret, "node", self._dialing[line])
            self._send(line, {"node": self._given["node"], "nonce": line.nonce, "proof": proof,
                              "ranks": len(self._ranks)})  # fmt: skip

    def _identify_head(self, line: JsonConnection, message: dict[str, Any]) -> None:
        if "proof" not in message:
            self._dialing[line] = str(message["nonce"])
            self._introduce()
            return
        self._check_proof(line, message, "head")
        del self._dialing[line]
        self._head = line
        line.accept_peer("head")
        for other in list(self._dialing):
            self._drop(other)
        self._send_held()

    def _answer(self, line: JsonConnection, message: dict[str, Any]) -> None:
        if message.get("ask") == "job":
            self._send(line, self._describe())
        elif message.get("ask") == "snapshots":
            asks_all = line.is_local and self._is_head
            found = (self._gather if asks_all else self._snapshots)(message)
            self._send(line, {"ranks": found} | self._describe())

    def _handle_news(self, message: dict[str, Any]) -> None:
        """Handle a report of another node. This monitor is the head."""
        when = time.monotonic() - float(message.get("age", 0.0))
        if "hang" in message:
            call = message["hang"]
            if not self._is_decided and (call["group"], call["number"]) not in self._reported:
                self._reported.add((call["group"], call["number"]))
                if not self._endings:
                    self._report(call, message["seconds"])
        elif "lost" in message:
            self._add_loss(Loss(when, message["lost"], bool(message["alone"])))
        elif "ending" in message:
            self._add_ending(Ending(when, message["ending"], int(message["code"])))
        elif "signal" in message and not self._signalled:
            self._signalled = True
            _print(message["signal"], self._stderr)

    def _send_to_head(self, message: dict[str, Any]) -> None:
        """Send a message to the head once it is connected. Without one, this monitor is the head.

        ``age`` in the message is a time on the monotonic clock, sent as seconds before now.
        """
        self._held.append(message)
        if not self._dialing:
            self._send_held()

    def _send_held(self) -> None:
        """Send the held messages unless connections to the head are still being tried."""
        if self._dialing:
            return
        held, self._held = self._held, []
        for message in held:
            if "age" in message:
                message["age"] = time.monotonic() - message["age"]
            if self._head is None:
                self._handle_news(message)
            else:
                self._send(self._head, message)

    def _describe(self) -> dict[str, Any]:
        return {
            "job": self.job, "size": self.size, "host": self.host, "is_head": self._is_head,
            "pids": [one.pid for one in self._ranks],
            "names": self._given["names"], "command": self._given["command"],
        }  # fmt: skip

    # --- how the job ends ------------------------------------------------------------------------

    def _read_bell(self, rank: _Rank) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(rank.bell, 512):
                self._report_signals()
                return
            # The rank has closed the pipe: the first sign of its end.
            self._poll.unregister(rank.bell)
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
        self._poll.unregister(rank.pidfd)
        rank.end(time.monotonic() + _END_TIMEOUT_S)
        self._report_signals()

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
        snapshots = [one.snapshot(self.host, now, {}) for one in lost]
        if not lost or self._is_decided:
            return
        if self._survives_losses:  # each of them is reported
            parts = [
                Loss(one.sign, [each], True) for one, each in zip(lost, snapshots, strict=True)
            ]
        else:
            parts = [build_loss(lost[0].sign, snapshots, lost[0].was_alone)]
        for loss in parts:
            if self._is_head:
                self._add_loss(loss)
            else:
                self._send_to_head({"lost": loss.ranks, "alone": loss.alone, "age": loss.when})

    def _find_endings(self) -> None:
        """Record the ranks of this node that end the job themselves."""
        for one in self._ranks:
            if one.page is None or one.rank in self._known_endings:
                continue
            header = one.page.header()
            if header.state != ENDING:
                continue
            self._known_endings.add(one.rank)
            when = header.ending_ns / 1e9
            code = header.code if header.unexplained else -1
            found = one.snapshot(self.host, time.monotonic(), {})
            if self._is_head:
                self._add_ending(Ending(when, found, code))
            else:
                self._send_to_head({"ending": found, "code": code, "age": when})
                self._endings.append(Ending(when, found, code))
                one.page.set_explained()

    def _add_loss(self, loss: Loss) -> None:
        self._losses.append(loss)
        self._decide_soon()

    def _add_ending(self, ending: Ending) -> None:
        rank = ending.snapshot["rank"]
        if all(one.snapshot["rank"] != rank for one in self._endings):
            self._endings.append(ending)
        self._decide_soon()

    def _decide_soon(self) -> None:
        """Decide the cause after other nodes have had time to report."""
        several = self.size > len(self._ranks) and not self._survives_losses
        wait = _NODES_TIMEOUT_S if several else 0.0
        self._decide_at = min(self._decide_at, time.monotonic() + wait)

    def _decide(self) -> None:
        """Report the first cause of the job's end if it is time to decide."""
        if time.monotonic() < self._decide_at:
            return
        self._decide_at = float("inf")
        from mpicoll.failures import report

        losses, self._losses = self._losses, []
        while not self._is_decided and (cause := find_cause(losses, self._endings)) is not None:
            if isinstance(cause, Loss):
                losses.remove(cause)
                self._report_loss(cause)
                continue
            self._is_decided = True
            for line in list(self._nodes.values()):
                self._send(line, {"decided": True})
            if cause.code >= 0:
                alike = [one.snapshot for one in self._endings if one.code == cause.code]
                _print(report.describe_exit(alike, self.size, cause.code), self._stderr)
        if self._is_decided:
            for one in self._ranks:
                if one.page is not None:
                    one.page.set_explained()

    def _report_loss(self, loss: Loss) -> None:
        from mpicoll.failures import report

        self._is_decided = not self._survives_losses
        several = self.size > len(self._ranks)
        # The kernel's order of events is valid for one node.
        known = loss.alone or (loss.ranks[0]["how"] == "SIGKILL" and not several)
        why = report.describe_loss(loss.ranks, self.size, known)
        hint = (
            ""
            if self._survives_losses
            else report.describe_survival(loss.ranks, self._given["survival"])
        )
        if report.is_ended_by_mpi(loss.ranks[0]):
            hint = report.describe_mismatch(loss.ranks[0], self._gather({}))
        _print("\n".join(filter(None, [why, hint])), self._stderr)
        if self._survives_losses:
            return
        for line in list(self._nodes.values()):
            self._send(line, {"end": why})
        self._end_ranks(why)

    def _lose_launcher(self) -> None:
        """Record that the launcher has ended: ranks that end now end because of it."""
        self._poll.unregister(self._launcher)
        os.close(self._launcher)
        self._launcher = -1
        now = time.monotonic()
        self._endings.append(Ending(now, {}, -1))
        self._launcher_by = now + _CHECK_INTERVAL_S

    def _end_with_launcher(self) -> None:
        """End the ranks because their launcher, which would end them, has ended."""
        self._launcher_by = float("inf")
        alive = [one for one in self._ranks if one.pidfd >= 0]
        if all(one.is_quiet for one in alive) or self._end_by < float("inf"):
            return
        why = (
            f"mpicoll: the launcher of this job (process {self._given['launcher']} on "
            f"{self.host}) has ended; ending its ranks"
        )
        if not self._known_endings:
            self._is_decided = True
            _print(why, self._stderr)
        self._end_ranks(why)

    def _end_ranks(self, why: str) -> None:
        """Order the ranks of this node to end; kill them after a grace period."""
        for one in self._ranks:
            if one.pidfd >= 0 and one.page is not None and not one.is_quiet:
                one.page.order_end(why)
        self._end_by = time.monotonic() + _KILL_GRACE_S

    def _kill(self) -> None:
        for one in self._ranks:
            if one.is_here and one.page is not None and one.page.header().state != DONE:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        self._end_by = float("inf")

    def _kill_stopped(self) -> None:
        """Kill stopped ranks once another rank has ended the job.

        A launcher that sends them SIGTERM would wait for them.
        """
        if not any(one.pidfd < 0 and one.page and one.page.header().state == ENDING
                   for one in self._ranks):  # fmt: skip
            return
        for one in self._ranks:
            if one.pidfd >= 0 and not one.is_quiet and _state_of(one.pid) == "stopped":
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)


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
