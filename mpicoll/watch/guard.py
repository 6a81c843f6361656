"""The guard: a process on each node that knows what its ranks do when they cannot say so.

It reads the ranks' boards (``board.py``), has their stacks printed by a signal handler that needs
no lock of Python, and notices their end by their pidfds. The guard of rank 0's node, the head, asks
those of the other nodes and speaks, on rank 0's standard error. It ends with its ranks.

It runs by its path, with nothing imported that is not needed while all is well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import mmap
import os
import secrets
import select
import signal
import socket
import stat
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent.parent)]

from mpicoll.signals import FROM_OUTSIDE
from mpicoll.watch.board import DONE, ENDING, LEFT, Board, Cell, parse

if TYPE_CHECKING:
    from mpicoll.watch.report import Snapshot

__all__ = ["SOCKETS", "Line", "ask", "find_folder", "main", "prove"]

#: Seconds between looks at the boards: at most, and as a share of the shortest limit.
_TICK, _SHARE = 1.0, 0.2
#: Seconds for the stacks of all ranks of a node, and for the answers of all nodes.
_STACKS, _ANSWERS = 2.0, 5.0
#: Seconds in which the ranks that a signal from outside ends are gathered, at least and at most;
#: seconds after which a rank that was to end is killed.
_TOGETHER, _LATEST, _GRACE = 0.1, 2.0, 10.0
#: Most bytes of a line.
_LONGEST = 1 << 28
#: Asks Linux how the process of a pidfd has ended (since 6.15), and where the answer has that.
_PIDFD_GET_INFO, _INFO_EXIT, _INFO = 0xC040FF0B, 8, struct.Struct("=Q52xi")


def find_folder() -> Path:
    """Return the folder of this user's sockets and reports on this host.

    Raises OSError where somebody else has made it.
    """
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"mpicoll-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to somebody else, or others may write to it")
    return folder


#: The ending of the name of a guard's socket.
SOCKETS = ".watch"


def prove(secret: str, nonce: str) -> str:
    """Return the proof that the sender knows the secret."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()


class Line:
    """A connection on which each line is an object of JSON."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.nonce = secrets.token_hex(16)
        self.node = ""  # of a guard that has shown that it is one
        self.is_local = sock.family == socket.AF_UNIX
        self._inbox = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; OSError if nobody reads it."""
        self.sock.settimeout(_ANSWERS)
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next message; OSError if none comes in time or the other is gone."""
        end = time.monotonic() + seconds
        while b"\n" not in self._inbox:
            self.sock.settimeout(max(1e-3, end - time.monotonic()))
            data = self.sock.recv(1 << 16)
            if not data or len(self._inbox) > _LONGEST:
                raise ConnectionResetError("the other has gone")
            self._inbox += data
        line, _, self._inbox = self._inbox.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            raise ConnectionResetError("no guard speaks like this") from None
        return found if isinstance(found, dict) else {}

    def has_more(self) -> bool:
        """Return whether a message has been received that was not asked for yet."""
        return b"\n" in self._inbox


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Ask the guard whose socket this is; OSError if there is none."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_ANSWERS)
        sock.connect(str(path))
        line = Line(sock)
        line.send(question)
        return line.receive(2 * _ANSWERS)


class _Rank:
    """A rank of this node."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.rank: int = given["rank"]
        self.pid: int = given["pid"]
        self._signal: int = given["signal"]
        self._stacks = -1
        self.board: Board | None = None
        self.pidfd = -1
        self.bell = -1
        self.how: str | None = None  # it has ended so
        self.seen: list[bytes] = []
        self.since: list[float] = []
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(self.pid)
            if read_start(self.pid) != given["start"]:
                os.close(self.pidfd)
                self.pidfd = -1
                return
            descriptors = Path(f"/proc/{self.pid}/fd")
            self.board = Board(os.open(descriptors / str(given["board"]), os.O_RDWR))
            self._stacks = os.open(descriptors / str(given["stacks"]), os.O_RDWR)
            bell = descriptors / str(given["bell"])
            self.bell = os.open(bell, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def is_quiet(self) -> bool:
        """Whether its end, if it ends, is its own affair, or was told already."""
        return self.board is None or self.board.header().state in (ENDING, DONE, LEFT)

    @property
    def is_here(self) -> bool:
        """Whether it runs, and has no other guard."""
        return self.pidfd >= 0 and (self.board is None or self.board.header().state != LEFT)

    def look(self, now: float) -> None:
        """Note since when each call has not changed."""
        if self.board is None:
            return
        cells = self.board.raw_cells()
        self.since = [
            self.since[k] if k < len(self.seen) and self.seen[k] == raw else now
            for k, raw in enumerate(cells)
        ]
        self.seen = cells

    def calls(self) -> list[tuple[Cell, float]]:
        """Return the cells of groups as they were at the last look, each with since when."""
        parsed = [(parse(raw), since) for raw, since in zip(self.seen, self.since, strict=True)]
        return [(cell, since) for cell, since in parsed if cell.group]

    def end(self, until: float) -> None:
        """Note that the process has ended, and how.

        until: by the monotonic clock, until when that is asked for.
        """
        self.look(time.monotonic())
        self.how = _read_end(self.pidfd, self.pid, 0.0 if self.is_quiet else until)
        os.close(self.pidfd)
        self.pidfd = -1

    def ask_stacks(self) -> bool:
        """Have the process print its stacks; return whether it will.

        The signal goes to a thread of mpicoll's own: a call of the system that the program is in
        is not interrupted.
        """
        if self.board is None or self.pidfd < 0 or _state_of(self.pid) != "running":
            return False
        with contextlib.suppress(OSError, ValueError, IndexError):
            if _catches(self.pid, self._signal):
                os.ftruncate(self._stacks, 0)
                return _tgkill(self.pid, self.board.header().listener, self._signal)
        return False

    def read_stacks(self) -> str:
        """Return what has been printed so far."""
        return os.pread(self._stacks, 1 << 20, 0).decode("utf-8", "replace")

    def snapshot(self, host: str, now: float, stacks: dict[str, list[str]]) -> Snapshot:
        """Return what is known of the rank; see report.py."""
        state = "gone" if self.pidfd < 0 else _state_of(self.pid)
        header = None if self.board is None else self.board.header()
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
    """Return when a process was started, which tells it from a later one of the same number."""
    return _stat(pid)[19]


def _stat(pid: int) -> list[str]:
    """Return what /proc says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return "stopped" if _stat(pid)[0] in "Tt" else "running"
    return "gone"


def _catches(pid: int, number: int) -> bool:
    """Return whether a process, alive, has a handler for a signal."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)
    return False


def _read_end(pidfd: int, pid: int, until: float) -> str:
    """Return how a process has ended: the name of a signal, "code N", "" if it cannot be known."""
    while True:  # while it is waited for, neither may know
        answer = bytearray(struct.pack("=Q", _INFO_EXIT) + bytes(56))
        with contextlib.suppress(OSError):  # once it was waited for
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
            mask, code = _INFO.unpack_from(answer)
            if mask & _INFO_EXIT:
                return _name_end(code)
        with contextlib.suppress(OSError, ValueError, IndexError):  # until it is waited for
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


class Guard:
    """The guard of a node.

    given: what its first rank has found out, see guarding.py.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.job: str = given["job"]
        self.size: int = given["size"]
        self.host: str = given["host"]
        self._secret: str = given["secret"]
        self._goes_on: bool = given["goes_on"]
        self._given = given
        self._ranks = [_Rank(each) for each in given["ranks"]]
        self._last_words = _open_stderr(given["prints"]) if given["prints"] else 2
        self._launcher = -1
        with contextlib.suppress(OSError):
            if given["launcher"]:
                self._launcher = os.pidfd_open(given["launcher"])
        self._poll = select.epoll()  # which reports what comes in the order in which it came
        self._lines: dict[int, Line] = {}
        self._nodes: dict[str, Line] = {}  # the other guards, on the head
        self._head: Line | None = None
        self._listeners: dict[int, socket.socket] = {}
        self._reported: set[tuple[int, int]] = set()
        self._reports = 0
        self._told = self._signalled = False  # what ends the job; what may
        self._end_by = float("inf")
        self._path: Path | None = None

    def serve(self) -> None:
        """Serve until all ranks of this node have ended, or have another guard."""
        for one in self._ranks:
            if one.pidfd >= 0:
                self._poll.register(one.pidfd, select.EPOLLIN)
            if one.bell >= 0:
                self._poll.register(one.bell, select.EPOLLIN)
        if self._launcher >= 0:
            self._poll.register(self._launcher, select.EPOLLIN)
        try:
            self._listen()
            if self._given["listener"] < 0 and self._given["addresses"]:
                self._connect()
            self._loop()
        finally:
            if self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # else nobody can ask
            path = find_folder() / f"{os.getpid()}{SOCKETS}"
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(str(path))
            self._path = path
            sock.listen()
            self._add_listener(sock)
        if self._given["listener"] >= 0:
            self._add_listener(socket.socket(fileno=self._given["listener"]))

    def _add_listener(self, sock: socket.socket) -> None:
        self._listeners[sock.fileno()] = sock
        self._poll.register(sock, select.EPOLLIN)

    def _connect(self) -> None:
        """Connect to the head, at the first of its addresses that answers."""
        host_ports = [(host, self._given["port"]) for host in self._given["addresses"]]
        for address in host_ports:
            with contextlib.suppress(OSError):
                line = Line(socket.create_connection(address, 3.0))
                nonce = line.receive(_ANSWERS)["nonce"]
                line.send({"node": self._given["node"], "nonce": line.nonce,
                           "proof": prove(self._secret, f"node {nonce}")})  # fmt: skip
                if line.receive(_ANSWERS).get("proof") == prove(self._secret, f"head {line.nonce}"):
                    self._head = line
                    self._lines[line.fileno()] = line
                    self._poll.register(line, select.EPOLLIN)
                    return

    def _loop(self) -> None:
        next_look = 0.0
        while any(one.is_here for one in self._ranks):
            pause = self._pause()
            wait = max(0.0, next_look - time.monotonic())
            ranks = {one.pidfd: one for one in self._ranks if one.pidfd >= 0}
            ready = [descriptor for descriptor, _ in self._poll.poll(wait)]
            if ended := [ranks[descriptor] for descriptor in ready if descriptor in ranks]:
                self._lose(ended)
            for descriptor in ready:
                if descriptor in self._listeners:
                    self._accept(self._listeners[descriptor])
                elif descriptor in self._lines:
                    self._serve_line(self._lines[descriptor])
                elif descriptor == self._launcher:
                    self._lose_launcher()
                elif bells := [one for one in self._ranks if one.bell == descriptor]:
                    self._hear_bell(bells[0])
            now = time.monotonic()
            if now >= next_look:
                next_look = now + pause
                self._look(now)
                if now > self._end_by:
                    self._kill()
                self._kill_stopped()

    def _pause(self) -> float:
        limits = [cell.limit for one in self._ranks for cell, _ in one.calls() if cell.limit]
        return max(0.1, min(_TICK, _SHARE * min(limits, default=1 << 20) / 1000))

    # --- hangs -----------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Look whether a call has lasted too long."""
        for one in self._ranks:
            one.look(now)
        self._tell_signals()
        for one in self._ranks:
            if one.pidfd < 0:
                continue
            for cell, since in one.calls():
                if cell.inside and cell.limit and 1000 * (now - since) > cell.limit:
                    self._report_once(cell, now - since)

    def _hear_bell(self, rank: _Rank) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(rank.bell, 512):
                self._tell_signals()
                return
        self._poll.unregister(rank.bell)
        os.close(rank.bell)
        rank.bell = -1

    def _tell_signals(self) -> None:
        """Say, once for the job, that a signal has come that the program handles."""
        boards = {one.rank: one.board for one in self._ranks if one.board is not None}
        came = {rank: number for rank, one in boards.items() if (number := one.header().signal)}
        if came and not self._signalled:
            self._signalled = True
            from mpicoll.watch import report

            name = signal.Signals(next(iter(came.values()))).name
            text = report.describe_signal(name, list(came), self.size, self.host)
            if self._head is None:
                _say(text, self._last_words)
            else:
                self._tell_head({"signal": text})
        for rank in came:  # which may wait for this
            boards[rank].say_signal(0)

    def _report_once(self, cell: Cell, seconds: float) -> None:
        if (cell.group, cell.number) in self._reported or self._told:
            return
        self._reported.add((cell.group, cell.number))
        call = cell._asdict()
        if self._head is not None:
            self._tell_head({"hang": call, "seconds": seconds})
        elif not self._is_ending():
            self._report(call, seconds)

    def _report(self, call: dict[str, Any], seconds: float) -> None:
        from mpicoll import private_files
        from mpicoll.watch import report

        snapshots = self._gather({"ask": "snapshots", "stacks": "missing", "call": call})
        if not any(report.is_there(one, call) for one in snapshots):
            return  # it has ended meanwhile
        self._reports += 1
        path, last = Path(self._given["reports"]), ""
        try:
            path = (path if path.parts else find_folder()) / f"hang-{self.job}-{self._reports}.json"
            whole = {"job": self.job, "time": time.time(), "seconds": seconds, "call": call,
                     "words": report.describe_call(call), "ranks": snapshots}  # fmt: skip
            private_files.write(path, json.dumps(whole, indent=1).encode())
            last = f"  in full: {path} on {self.host}"
        except OSError as error:
            last = f"  not written: {error}"
        _say(report.describe_hang(snapshots, call, seconds, last))

    # --- questions -------------------------------------------------------------------------------

    def _gather(self, question: dict[str, Any]) -> list[Snapshot]:
        """Ask all guards; return the snapshots of all ranks."""
        for line in list(self._nodes.values()):
            try:
                line.send(question)
            except OSError:
                self._drop(line)
        found = self._snapshots(question)
        end = time.monotonic() + _ANSWERS
        for line in list(self._nodes.values()):
            try:
                while "ranks" not in (answer := line.receive(end - time.monotonic())):
                    self._handle(line, answer)
                found += answer["ranks"]
            except OSError:
                self._drop(line)
        known = {one["rank"] for one in found}
        found += [
            {"rank": rank, "host": "", "pid": 0, "state": "silent", "how": "", "main": 0,
             "stacks": {}, "calls": []}
            for rank in range(self.size) if rank not in known
        ]  # fmt: skip
        return sorted(found, key=lambda one: int(one["rank"]))

    def _snapshots(self, question: dict[str, Any]) -> list[Snapshot]:
        from mpicoll.watch import report

        now = time.monotonic()
        for one in self._ranks:
            one.look(now)
        call = question.get("call")
        wanted = [one for one in self._ranks if question.get("stacks")]
        if call:
            wanted = [
                one for one in wanted if not report.is_there(one.snapshot(self.host, now, {}), call)
            ]
        stacks = _read_all_stacks([one for one in wanted if one.ask_stacks()])
        return [
            one.snapshot(self.host, now, report.parse_stacks(stacks.get(one, "")))
            for one in self._ranks
        ]

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        line = Line(sock)
        if line.is_local:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("=3i", credentials)[1] not in (0, os.getuid()):
                sock.close()
                return
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._lines[line.fileno()] = line
        self._poll.register(line, select.EPOLLIN)
        if not line.is_local:
            self._send(line, {"nonce": line.nonce})

    def _send(self, line: Line, message: dict[str, Any]) -> None:
        try:
            line.send(message)
        except OSError:
            self._drop(line)

    def _drop(self, line: Line) -> None:
        if self._lines.pop(line.fileno(), None) is None:
            return
        self._poll.unregister(line)
        self._nodes = {node: one for node, one in self._nodes.items() if one is not line}
        if line is self._head:
            self._head = None
        line.sock.close()

    def _serve_line(self, line: Line) -> None:
        try:
            self._handle(line, line.receive(_ANSWERS))
            while line.sock.fileno() >= 0 and line.has_more():
                self._handle(line, line.receive(0))
        except OSError:
            self._drop(line)

    def _handle(self, line: Line, message: dict[str, Any]) -> None:
        if not (line.is_local or line.node or line is self._head):
            proof = prove(self._secret, f"node {line.nonce}")
            if not hmac.compare_digest(str(message.get("proof")), proof):
                raise ConnectionRefusedError("it does not know the secret")
            line.node = str(message["node"])
            self._nodes[line.node] = line
            self._send(line, {"proof": prove(self._secret, f"head {message['nonce']}")})
        elif message.get("ask") == "job":
            self._send(line, self._describe())
        elif message.get("ask") == "snapshots":
            asks_all = line.is_local and self._head is None
            found = (self._gather if asks_all else self._snapshots)(message)
            self._send(line, {"ranks": found} | self._describe())
        elif "hang" in message and line.node:
            call = message["hang"]
            if not self._told and (call["group"], call["number"]) not in self._reported:
                self._reported.add((call["group"], call["number"]))
                if not self._is_ending():
                    self._report(call, message["seconds"])
        elif "lost" in message and line.node:
            self._tell_loss(message["lost"])
        elif "signal" in message and line.node:
            if not self._signalled:
                self._signalled = True
                _say(message["signal"], self._last_words)
        elif "end" in message and line is self._head:
            self._told = True
            self._end_ranks(str(message["end"]))

    def _describe(self) -> dict[str, Any]:
        return {
            "job": self.job, "size": self.size, "host": self.host, "is_head": self._head is None,
            "pids": [one.pid for one in self._ranks],
            "names": self._given["names"], "command": self._given["command"],
        }  # fmt: skip

    # --- ranks that are lost ---------------------------------------------------------------------

    def _lose(self, ended: list[_Rank]) -> None:
        """Note that ranks have ended, the first one first, and say so if nobody else does."""
        lost = self._note_end(ended)
        if not lost or self._told or self._is_ending():
            return
        first = lost[0].how
        if first == "SIGKILL" or first in FROM_OUTSIDE:
            lost += self._gather_ends(signal.Signals[first])
        # A launcher may have noticed sooner than this process that a rank ended by itself, and have
        # killed the others. It sends a signal from outside to all ranks.
        own = [one for one in lost if one.how != "SIGKILL" and one.how not in FROM_OUTSIDE]
        killed = [one for one in lost if one.how == "SIGKILL"]
        if culprits := own or killed:
            lost = culprits[:1]
        lost = [one for one in lost if one.how == lost[0].how]
        now = time.monotonic()
        snapshots = [one.snapshot(self.host, now, {}) for one in lost]
        if self._head is None:
            self._tell_loss(snapshots)
        else:
            self._tell_head({"lost": snapshots})

    def _gather_ends(self, number: int) -> list[_Rank]:
        """Note the ends of the next moment; return the ranks that others need.

        number: the signal that has ended the first.
        """
        lost: list[_Rank] = []
        now = time.monotonic()
        until, latest = now + _TOGETHER, now + _LATEST
        while alive := {one.pidfd: one for one in self._ranks if one.pidfd >= 0}:
            # One that the signal will end, too, may be the first that was lost: the system takes
            # its time, and a launcher that has noticed kills the others, which may be gone sooner.
            ending = number != signal.SIGKILL and not all(
                _catches(one.pid, number) for one in alive.values()
            )
            left = (latest if ending else until) - time.monotonic()
            if left <= 0:
                break
            poll = select.poll()
            for descriptor in alive:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(1000 * min(left, _TOGETHER))
            lost += self._note_end([alive[descriptor] for descriptor, _ in ready])
        return lost

    def _note_end(self, ended: list[_Rank]) -> list[_Rank]:
        """Note the end of ranks; return those that others need."""
        until = time.monotonic() + _TOGETHER
        for one in ended:
            self._poll.unregister(one.pidfd)
            one.end(until)
        self._tell_signals()
        return [one for one in ended if not one.is_quiet]

    def _is_ending(self) -> bool:
        """Return whether a rank of this node ends the job, and has said why."""
        return any(
            one.board is not None and one.board.header().state == ENDING for one in self._ranks
        )

    def _tell_loss(self, lost: list[Snapshot]) -> None:
        if self._told or self._is_ending():
            return
        from mpicoll.watch import report

        self._told = not self._goes_on
        why = report.describe_loss(lost, self.size)
        hint = "" if self._goes_on else report.describe_survival(lost, self._given["survival"])
        _say("\n".join(filter(None, [why, hint])), self._last_words)
        if self._goes_on:
            return
        for line in list(self._nodes.values()):
            self._send(line, {"end": why})
        self._end_ranks(why)

    def _tell_head(self, message: dict[str, Any]) -> None:
        if self._head is not None:
            self._send(self._head, message)

    def _lose_launcher(self) -> None:
        """End the ranks whose launcher has gone: it cannot end them any more."""
        self._poll.unregister(self._launcher)
        os.close(self._launcher)
        self._launcher = -1
        deadline = time.monotonic() + _TICK
        while alive := {one.pidfd: one for one in self._ranks if one.pidfd >= 0}:
            poll = select.poll()
            for descriptor in alive:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            self._note_end([alive[descriptor] for descriptor, _ in ready])  # taken along with it
        if all(one.is_quiet for one in self._ranks if one.pidfd >= 0) or self._told:
            return
        why = (
            f"mpicoll: the launcher of this job (process {self._given['launcher']} on "
            f"{self.host}) has gone; its ranks end"
        )
        if not self._is_ending():
            self._told = True
            _say(why, self._last_words)
        self._end_ranks(why)

    def _end_ranks(self, why: str) -> None:
        """Have the ranks of this node end; those that do not are killed."""
        for one in self._ranks:
            if one.pidfd >= 0 and one.board is not None and not one.is_quiet:
                one.board.give_order(why)
        self._end_by = time.monotonic() + _GRACE

    def _kill(self) -> None:
        for one in self._ranks:
            if one.is_here and one.board is not None and one.board.header().state != DONE:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        self._end_by = float("inf")

    def _kill_stopped(self) -> None:
        """Kill ranks that are stopped once another has ended the job: a launcher that asks them to
        end, by SIGTERM, would wait for them.
        """
        if not any(one.pidfd < 0 and one.board and one.board.header().state == ENDING
                   for one in self._ranks):  # fmt: skip
            return
        for one in self._ranks:
            if one.pidfd >= 0 and not one.is_quiet and _state_of(one.pid) == "stopped":
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)


#: Of Linux from 5.6 on, on x86-64 and aarch64 alike.
_PIDFD_GETFD = 438


def _read_all_stacks(asked: list[_Rank]) -> dict[_Rank, str]:
    """Return what each of them prints, which is whole when it does not grow any more."""
    found = dict.fromkeys(asked, "")
    growing, end = list(asked), time.monotonic() + _STACKS
    while growing and time.monotonic() < end:
        time.sleep(0.02)
        for one in list(growing):
            text = one.read_stacks()
            if text and text == found[one]:
                growing.remove(one)
            found[one] = text
    return found


def _say(text: str, descriptor: int = 2) -> None:
    """Write to standard error, that of the rank which has started this process, at once."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode() + b"\n")


def _open_stderr(pid: int) -> int:
    """Return a descriptor of the standard error of the job's launcher, this process's own if that
    is not to be had.

    A launcher whose rank has died ends within milliseconds, and does not read any more what comes
    through the ranks' pipes.
    """
    import ctypes

    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            found = int(ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, 2, 0))
        finally:
            os.close(pidfd)
        if found >= 0:
            return 2 if _is_null(found) else found
        # Not a file: another opening would have a place of its own, and others write over it.
        path = Path(f"/proc/{pid}/fd/2")
        if not stat.S_ISREG(path.stat().st_mode) and path.readlink() != Path(os.devnull):
            return os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    return 2


def _is_null(descriptor: int) -> bool:
    """Return whether this is /dev/null, as of a daemon that starts the ranks of a node."""
    return os.fstat(descriptor).st_rdev == Path(os.devnull).stat().st_rdev


def main() -> None:
    """Read what the rank gives, at a descriptor, and serve."""
    descriptor = int(sys.argv[1])
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        given = json.loads(memory[:])
    os.close(descriptor)
    sys.path[:] = [*sys.path, *given["path"]]
    Guard(given).serve()


if __name__ == "__main__":
    main()
