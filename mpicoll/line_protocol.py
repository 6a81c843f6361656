"""Connections between processes of a job: lines of text, and a handshake with a secret.

The node monitors and the server that starts MPI for torchrun use them. A connection never blocks
its process: it buffers unread output up to a limit. Invalid input raises OSError, and
the process then closes this connection only.

Handshake: each side sends a random nonce, then proves that it knows the secret of the job by the
HMAC-SHA256 of words that include the nonce of the other side. The secret itself is never sent.

The standard library is enough, because both processes start without site-packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

#: Seconds that a peer has to answer a question, or to identify itself.
ANSWER_TIMEOUT_S = 5.0
#: Maximum timeout of poll, which takes milliseconds as an int.
_MAX_POLL_S = 1e6


def mac(secret: str, *words: object) -> str:
    """Return the proof that the sender of these words knows the secret."""
    import hmac  # most ranks do not need it

    message = " ".join(map(str, words)).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def is_proof(proof: object, secret: str, *words: object) -> bool:
    """Return whether a peer has proved that it knows the secret."""
    import hmac

    return hmac.compare_digest(str(proof).encode("utf-8", "replace"), mac(secret, *words).encode())


def tune(sock: socket.socket) -> None:
    """Send small messages of TCP immediately, and detect a peer whose host is down."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)  # seconds
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class LineConnection:
    """A non-blocking connection that carries lines.

    max_line_bytes: maximum size of a line that the peer may send.
    max_unread_bytes: maximum size of the data that the peer has not read.

    Attribute ``peer``: name of the peer, "" before the handshake.
    """

    def __init__(self, sock: socket.socket, max_line_bytes: int, max_unread_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = ""
        self.is_closing = False  # close after all data has been sent
        self.nonce = os.urandom(16).hex()
        self.since = time.monotonic()
        self.max_line_bytes = max_line_bytes
        self.max_unread_bytes = max_unread_bytes
        self.outbox = bytearray()
        self._inbox = bytearray()
        self._scanned = 0  # bytes of the inbox without a newline

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self.sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether the peer has not read everything."""
        return bool(self.outbox)

    def send_line(self, line: bytes) -> None:
        """Send a line, now or when the peer reads.

        Raises OSError if the peer has closed the connection, or leaves too much unread.
        """
        self.outbox += line + b"\n"
        self.flush()
        if len(self.outbox) > self.max_unread_bytes:
            raise ConnectionResetError("the peer does not read")

    def flush(self) -> None:
        """Send as much of the outbox as the peer reads now."""
        with contextlib.suppress(BlockingIOError):
            while self.outbox:
                del self.outbox[: self.sock.send(self.outbox)]

    def fill(self) -> None:
        """Receive the available bytes. Raises OSError if the peer has closed the connection."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the peer has closed the connection")
        self._inbox += data

    def take_line(self) -> bytes | None:
        """Return the next complete line, or None. Raises OSError if it is too long."""
        end = self._inbox.find(b"\n", self._scanned)
        if (len(self._inbox) if end < 0 else end) > self.max_line_bytes:
            raise ConnectionResetError(f"invalid message: over {self.max_line_bytes} bytes")
        if end < 0:
            self._scanned = len(self._inbox)
            return None
        line = bytes(self._inbox[:end])
        del self._inbox[: end + 1]
        self._scanned = 0
        return line

    def wait_line(self, seconds: float) -> bytes | None:
        """Wait for the next line; return None after the timeout. Raises the errors of ``fill``."""
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while (line := self.take_line()) is None:
            left = max(0.0, end - time.monotonic())
            if not poll.poll(1000 * min(left, _MAX_POLL_S)) and left <= _MAX_POLL_S:
                return None
            self.fill()
        return line


class JsonConnection(LineConnection):
    """A connection on which each line is a JSON object."""

    #: Maximum size of a line before and after the handshake.
    STRANGER_BYTES, PEER_BYTES = 4096, 1 << 28

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, self.STRANGER_BYTES, self.PEER_BYTES)
        self.is_local = sock.family == socket.AF_UNIX

    def accept_peer(self, name: str) -> None:
        """Record that the peer has proved that it belongs to the job."""
        self.peer, self.max_line_bytes = name, self.PEER_BYTES

    def send(self, message: dict[str, Any]) -> None:
        """Send a message as ``send_line`` does."""
        self.send_line(json.dumps(message).encode())

    def take(self) -> dict[str, Any] | None:
        """Return the next complete message, None if there is none.

        Raises OSError for a line that is too long, or is not a JSON object.
        """
        line = self.take_line()
        return None if line is None else _parse(line)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for the next message. Raises OSError if none comes in time or the peer has gone."""
        if (line := self.wait_line(seconds)) is None:
            raise TimeoutError(f"timed out: no message from the peer within {seconds:g} s")
        return _parse(line)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ConnectionResetError("invalid message: not JSON") from None
    if not isinstance(found, dict):
        raise ConnectionResetError("invalid message: not a JSON object")
    return found


Connection = TypeVar("Connection", bound=LineConnection)


class LineServer(Generic[Connection]):
    """Accepts connections and handles their lines. An error closes its connection only.

    poll: the epoll of the process.
    max_stranger_count: maximum number of connections without a handshake: a new one replaces the
        oldest.
    """

    #: Seconds within which a connection has to identify itself, or ask.
    stranger_timeout_s = 10.0

    def __init__(self, poll: select.epoll, max_stranger_count: int) -> None:
        self.poll, self._max_stranger_count = poll, max_stranger_count
        self.listeners: dict[int, socket.socket] = {}
        self.lines: dict[int, Connection] = {}  # by descriptor

    def welcome(self, sock: socket.socket) -> None:
        """Add an accepted connection, and greet the peer."""
        raise NotImplementedError

    def handle_next(self, line: Connection) -> bool:
        """Handle the next complete line; return False if there is none."""
        raise NotImplementedError

    def dropped(self, line: Connection) -> None:
        """Called when a connection was closed."""

    def listen(self, sock: socket.socket) -> None:
        """Accept connections of a listening socket."""
        sock.setblocking(False)
        self.listeners[sock.fileno()] = sock
        self.poll.register(sock, select.EPOLLIN)

    def close_listener(self, sock: socket.socket) -> None:
        """Accept no more connections of a listening socket."""
        self.poll.unregister(sock)
        del self.listeners[sock.fileno()]
        sock.close()

    def add(self, line: Connection) -> None:
        """Serve a connection."""
        tune(line.sock)
        self.lines[line.fileno()] = line
        self.poll.register(line, select.EPOLLIN)
        if len(self.lines) > self._max_stranger_count:
            strangers = [one for one in self.lines.values() if not one.peer]
            if len(strangers) > self._max_stranger_count:
                self.drop(min(strangers, key=lambda one: one.since))

    def serve_descriptor(self, descriptor: int) -> None:
        """Handle an event of a listener or connection."""
        if listener := self.listeners.get(descriptor):
            with contextlib.suppress(OSError):
                self.welcome(listener.accept()[0])
        elif line := self.lines.get(descriptor):
            with self.checked(line):
                line.flush()
                line.fill()
                self._watch(line)
                self.handle_all(line)

    def handle_all(self, line: Connection) -> None:
        """Handle the complete lines."""
        while self._is_open(line) and not line.is_closing and self.handle_next(line):
            pass

    @contextlib.contextmanager
    def checked(self, line: Connection) -> Iterator[None]:
        """Drop the connection after an exception, which is most likely of an invalid message."""
        try:
            yield
        except Exception:
            self.drop(line)

    def send_to(self, line: Connection, text: bytes) -> None:
        """Send a line. Drops the connection if that fails."""
        if self._is_open(line):
            with self.checked(line):
                line.send_line(text)
                self._watch(line)

    def drop(self, line: Connection) -> None:
        """Close a connection."""
        if self._is_open(line):
            del self.lines[line.fileno()]
            self.poll.unregister(line)
            line.sock.close()
            self.dropped(line)

    def drop_silent(self) -> None:
        """Drop connections that have not identified themselves in time."""
        last = time.monotonic() - self.stranger_timeout_s
        for line in [one for one in self.lines.values() if not one.peer and one.since < last]:
            self.drop(line)

    def _is_open(self, line: Connection) -> bool:
        return self.lines.get(line.fileno()) is line

    def _watch(self, line: Connection) -> None:
        """Wait for the peer to read if there is unsent data."""
        if line.is_closing and not line.has_unsent:
            self.drop(line)
        else:
            self.poll.modify(line, select.EPOLLIN | (select.EPOLLOUT if line.has_unsent else 0))


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Send a question to the node monitor with this socket; return its answer.

    Raises OSError if no monitor listens there, or it does not answer.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_TIMEOUT_S)
        sock.connect(str(path))
        line = JsonConnection(sock)
        line.accept_peer("monitor")
        line.send(question)
        return line.receive(2 * ANSWER_TIMEOUT_S)
