"""A client of PMI-1: requests to the process manager before MPI starts.

PMI-1 is a protocol of lines on a socket that the ranks inherit (PMI_FD). The MPI library sends
"init" again on that socket when it starts, which process managers accept.
"""

from __future__ import annotations

import os
import select
import socket
import stat

#: Seconds to wait for an answer that needs no other rank.
ANSWER_TIMEOUT_S = 10.0
#: Maximum length of an answer in bytes.
_MAX_LINE_BYTES = 4096


def open_manager(descriptor: str) -> socket.socket:
    """Return a duplicate of the connection to the process manager.

    descriptor: the value of PMI_FD.

    Raises OSError if it is not the number of a connected socket of this process.
    """
    if not descriptor.isdecimal() or not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
        raise OSError(f"PMI_FD={descriptor}: expected the number of a socket of this process")
    manager = socket.socket(fileno=os.dup(int(descriptor)))
    try:
        manager.getpeername()  # a program may have another socket with the same number
    except OSError:
        manager.close()
        raise
    return manager


class PmiClient:
    """A connection to the process manager.

    descriptor: the socket, PMI_FD.

    Attribute ``job``: the name of the key-value space, the same on all ranks and unique to the job.

    Every method raises OSError if the process manager does not answer in PMI-1.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self.job = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Publish a value without whitespace, of at most 255 characters."""
        self._ask(f"put kvsname={self.job} key={key} value={value}", "put_result")

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all ranks have called."""
        self._ask("barrier_in", "barrier_out", timeout)

    def get(self, key: str) -> str:
        """Return a value that a rank has put before the barrier."""
        return self._ask(f"get kvsname={self.job} key={key}", "get_result")["value"]

    def _ask(
        self, command: str, answer: str, timeout: float | None = ANSWER_TIMEOUT_S
    ) -> dict[str, str]:
        """Send a command; return the words of the answer by name."""
        os.write(self._descriptor, f"cmd={command}\n".encode())
        line = read_line(self._descriptor, timeout)
        words = _Words(word.partition("=")[::2] for word in line.split())
        if words["cmd"] != answer or words.get("rc", "0") != "0":
            raise OSError(f"PMI: {command}: expected {answer}, got {line!r}")
        return words


class _Words(dict[str, str]):
    """Words of an answer by name."""

    def __missing__(self, name: str) -> str:
        raise OSError(f"PMI: expected {name}= in the answer, got {dict(self)}")


def read_line(descriptor: int, timeout: float | None) -> str:
    """Read one line byte by byte, because another reader needs the bytes after it.

    Raises OSError if the peer has closed the connection, sends more than a line of 4096 bytes, or
    does not answer within ``timeout`` seconds.
    """
    line = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(None if timeout is None else 1000 * timeout):
            raise TimeoutError(f"the peer did not answer within {timeout:g} s")
        byte = os.read(descriptor, 1)
        if not byte or len(line) > _MAX_LINE_BYTES:
            raise ConnectionResetError("the peer has closed the connection")
        line += byte
    return line.decode("ascii", "replace").rstrip("\n")
