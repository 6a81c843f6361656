"""Connections of the node monitor: each line is a JSON object.

A connection never blocks the monitor: it reads the bytes that have arrived, and buffers the bytes
that the peer has not read. Any invalid input raises OSError, and the monitor then drops this
connection only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from pathlib import Path
from typing import Any

__all__ = ["ANSWER_TIMEOUT_S", "LONG_LINE_BYTES", "SHORT_LINE_BYTES", "JsonLines", "ask", "prove"]

#: Seconds that a peer has to answer a question, or to identify itself.
ANSWER_TIMEOUT_S = 5.0
#: Maximum size of a line: from a peer that has not identified itself, and from one that has.
SHORT_LINE_BYTES, LONG_LINE_BYTES = 4096, 1 << 28


def prove(secret: str, nonce: str) -> bytes:
    """Return the proof that the sender knows the secret."""
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest().encode()


class JsonLines:
    """A non-blocking connection on which each line is a JSON object.

    max_line_bytes: maximum size of a line that the peer may send.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.nonce = secrets.token_hex(16)
        self.peer = ""  # name of a monitor that has proved that it is one
        self.is_local = sock.family == socket.AF_UNIX
        self.since = time.monotonic()
        self.max_line_bytes = SHORT_LINE_BYTES
        self._inbox = bytearray()
        self._scanned = 0  # bytes of the inbox without a newline
        self._outbox = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self.sock.fileno()

    def proves(self, message: dict[str, Any], secret: str, who: str) -> bool:
        """Return whether a message proves that the peer knows the secret and has our nonce."""
        proof = str(message.get("proof")).encode("utf-8", "replace")
        return hmac.compare_digest(proof, prove(secret, f"{who} {self.nonce}"))

    # --- sending ---------------------------------------------------------------------------------

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, now or when the peer reads. Raises OSError if it has gone or never reads.
        """  # fmt: skip
        self._outbox += json.dumps(message).encode() + b"\n"
        self.flush()
        if len(self._outbox) > LONG_LINE_BYTES:
            raise ConnectionResetError("the peer does not read")

    def flush(self) -> None:
        """Send as much of the outbox as the peer reads now."""
        try:
            while self._outbox:
                del self._outbox[: self.sock.send(self._outbox)]
        except BlockingIOError:
            pass

    @property
    def has_unsent(self) -> bool:
        """Whether the peer has not read everything."""
        return bool(self._outbox)

    # --- receiving -------------------------------------------------------------------------------

    def fill(self) -> None:
        """Receive the available bytes. Raises OSError if the peer has closed the connection."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the peer has closed the connection")
        self._inbox += data

    def take(self) -> dict[str, Any] | None:
        """Return the next message that has arrived as a whole, None if there is none.

        Raises OSError for a line that is too long, or is not a JSON object.
        """
        end = self._inbox.find(b"\n", self._scanned)
        if (len(self._inbox) if end < 0 else end) > self.max_line_bytes:
            raise ConnectionResetError(f"invalid message: over {self.max_line_bytes} bytes")
        if end < 0:
            self._scanned = len(self._inbox)
            return None
        line = bytes(self._inbox[:end])
        del self._inbox[: end + 1]
        self._scanned = 0
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise ConnectionResetError("invalid message: not JSON") from None
        if not isinstance(found, dict):
            raise ConnectionResetError("invalid message: not a JSON object")
        return found

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for the next message. Raises OSError if none comes in time or the peer has gone."""
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while (message := self.take()) is None:
            if not poll.poll(1000 * max(0.0, end - time.monotonic())):
                raise TimeoutError(f"no answer within {seconds:g} s")
            self.fill()
        return message


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Ask the monitor whose socket this is. Raises OSError if there is none, or no answer comes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_TIMEOUT_S)
        sock.connect(str(path))
        line = JsonLines(sock)
        line.max_line_bytes = LONG_LINE_BYTES
        line.send(question)
        return line.receive(2 * ANSWER_TIMEOUT_S)
