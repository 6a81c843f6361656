"""A rank's watch connection to the PMI server, from the start of MPI to its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from typing import NoReturn

from mpicoll.errors import LaunchError
from mpicoll.line_protocol import LineConnection

#: Before MPI_Finalize: interval of MPI progress, in seconds.
_PROGRESS_INTERVAL_S = 0.02
#: Maximum size in bytes of a message of the server, and of messages that it has not read.
_MAX_BYTES = 1 << 20


class Session(LineConnection):
    """The connection on which this rank reports its state and is notified when the job ends.

    watch: the connected socket. pmi: the descriptor that the MPI library uses for PMI-1.
    job: identifies the job.
    """

    def __init__(self, watch: socket.socket, pmi: int, rank: int, size: int, job: str) -> None:
        super().__init__(watch, _MAX_BYTES, _MAX_BYTES)
        self._pid = os.getpid()
        self.pmi, self.rank, self.size, self.job = pmi, rank, size, job

    def send(self, line: str) -> None:
        """Send a line without waiting; ignore a lost connection."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self.send_line(line.encode())

    def receive(self, limit: float) -> str | None:
        """Return the server's next line, "" if the connection is lost, None after the timeout."""
        try:
            line = self.wait_line(limit)
        except OSError:
            return ""
        return line if line is None else line.decode("ascii", "replace")

    def has_ended_badly(self) -> bool:
        """Return whether an unread message reports the failure of the job."""
        with contextlib.suppress(OSError):
            line = self.sock.recv(5, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return line.startswith((b"abort", b"lost "))
        return False

    def end_reason(self) -> tuple[str, int] | None:
        """Return the reason and the exit code with which the job ends; None if it continues.

        The reason is "" if this rank ends the job itself.
        """
        line = self.receive(0)
        if line is None:
            return None
        word, _, rest = line.partition(" ")
        if word == "lost":
            return f"rank {rest} of {self.size} was lost: it ended while other ranks needed it", 1
        if word == "abort":
            rank, code = rest.split(" ")
            mine = int(rank) == self.rank
            why = "" if mine else f"rank {rank} of {self.size} ended the job with exit code {code}"
            return why, _exit_status(int(code))
        return "lost the connection to rank 0's server", 1

    def check(self) -> None:
        """Raise LaunchError if the job has ended already."""
        found = self.end_reason()
        if found is not None:
            raise LaunchError(f"init_process_group: rank {self.rank} of {self.size}: {found[0]}")

    @contextlib.contextmanager
    def exit_on_message(self) -> Iterator[None]:
        """End this process by SIGIO if the server sends a line while MPI starts.

        MPI_Init blocks all threads and waits for ranks that may be lost, so only a signal works.
        Raises LaunchError if the job has ended already.
        """
        flags = fcntl.fcntl(self.sock, fcntl.F_GETFL)
        fcntl.fcntl(self.sock, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.sock, fcntl.F_SETFL, flags | os.O_ASYNC)
        try:
            self.check()
            yield
        finally:
            fcntl.fcntl(self.sock, fcntl.F_SETFL, flags)

    def abort(self, code: int) -> NoReturn:
        """End this process and all other ranks with an exit code."""
        code = _exit_status(code)
        self.send(f"abort {code}")
        os._exit(code)

    def finalize(self) -> bool:
        """Wait until all ranks are ready to finalize MPI.

        Returns False if a rank or the server is lost: MPI_Finalize would hang.
        """
        from mpi4py import MPI

        self.send("end")
        while (line := self.receive(_PROGRESS_INTERVAL_S)) is None:
            MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # progresses pending messages
        return line == "end all"

    def detach(self) -> None:
        """Close the connections in a forked child, so that they end with the parent."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (self.fileno(), self.pmi):
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


_session: Session | None = None


def current_session() -> Session | None:
    """Return the session of this process, None without one."""
    return _session


def set_current(session: Session) -> None:
    """Make this the session of this process."""
    global _session
    _session = session


os.register_at_fork(after_in_child=lambda: _session.detach() if _session is not None else None)


def _exit_status(code: int) -> int:
    """Return the low 8 bits of an exit code, or 1 if they are 0, which would mean success."""
    return code & 255 or 1
