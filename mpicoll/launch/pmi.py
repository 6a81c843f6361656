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
_ANSWER_TIMEOUT_S = 10.0
#: Maximum length of an answer in bytes.
_MAX_LINE_BYTES = 4096
#: The key under which rank 0 publishes a value.
_KEY = "mpicoll-run"


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


class PmiError(Exception):
    """The process manager does not answer, or sends an unexpected answer."""


class PmiClient:
    """A connection to the process manager.

    descriptor: the socket, PMI_FD.

    Attribute ``job``: the name of the key-value space, the same on all ranks and unique to the job.

    Raises PmiError if the process manager does not answer in PMI-1.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self.job = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def broadcast(self, value: str, is_root: bool) -> str:
        """Return the value of the root. Every rank calls, and waits until all ranks have called.

        value: without whitespace; ignored unless is_root. At most 255 characters.
        """
        if is_root:
            self._ask(f"put kvsname={self.job} key={_KEY} value={value}", "put_result")
        self._ask("barrier_in", "barrier_out", timeout=None)
        return self._ask(f"get kvsname={self.job} key={_KEY}", "get_result")["value"]

    def _ask(
        self, command: str, answer: str, timeout: float | None = _ANSWER_TIMEOUT_S
    ) -> dict[str, str]:
        """Send a command; return the words of the answer by name."""
        try:
            os.write(self._descriptor, f"cmd={command}\n".encode())
            line = self._read_line(timeout)
        except OSError as error:
            raise PmiError(f"PMI: {command}: {error}") from error
        words = _Words(word.partition("=")[::2] for word in line.split())
        if words["cmd"] != answer or words.get("rc", "0") != "0":
            raise PmiError(f"PMI: {command}: expected {answer}, got {line!r}")
        return words

    def _read_line(self, timeout: float | None) -> str:
        """Read byte by byte: bytes after the line belong to the MPI library."""
        line = bytearray()
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise PmiError(f"PMI: the process manager did not answer within {timeout:g} s")
            byte = os.read(self._descriptor, 1)
            if not byte or len(line) > _MAX_LINE_BYTES:
                raise PmiError("PMI: the process manager has closed the connection")
            line += byte
        return line.decode("ascii", "replace")


class _Words(dict[str, str]):
    """Words of an answer by name; a missing one raises PmiError."""

    def __missing__(self, name: str) -> str:
        raise PmiError(f"PMI: expected {name}= in the answer, got {dict(self)}")
