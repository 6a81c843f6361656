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
import hmac
import json
import secrets
import select
import socket
import time
from pathlib import Path
from typing import Any

#: Seconds that a peer has to answer a question, or to identify itself.
ANSWER_TIMEOUT_S = 5.0
#: Maximum timeout of poll, which takes milliseconds as an int.
_MAX_POLL_S = 1e6


def nonce() -> str:
    """Return a random nonce."""
    return secrets.token_hex(16)


def mac(secret: str, *words: object) -> str:
    """Return the proof that the sender of these words knows the secret."""
    message = " ".join(map(str, words)).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def is_proof(proof: object, secret: str, *words: object) -> bool:
    """Return whether a peer has proved that it knows the secret."""
    text = str(proof).encode("utf-8", "replace")
    return hmac.compare_digest(text, mac(secret, *words).encode())


class LineConnection:
    """A non-blocking connection that carries lines.

    max_line_bytes: maximum size of a line that the peer may send.
    max_unread_bytes: maximum size of the data that the peer has not read.
    """

    def __init__(self, sock: socket.socket, max_line_bytes: int, max_unread_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.nonce = nonce()
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
    """A connection on which each line is a JSON object.

    peer: name of the peer, "" before the handshake.
    """

    #: Maximum size of a line before and after the handshake.
    STRANGER_BYTES, PEER_BYTES = 4096, 1 << 28

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, self.STRANGER_BYTES, self.PEER_BYTES)
        self.peer = ""
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
