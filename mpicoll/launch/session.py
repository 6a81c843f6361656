"""A rank's connection to the server, from the start of MPI to its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import NoReturn

from mpicoll.errors import LaunchError
from mpicoll.output import write_lines

__all__ = ["Session", "current", "set_current"]

#: While this rank waits for others at the end: seconds between tests of MPI's progress, between
#: questions whether the server runs, and until one without an answer shows that it does not.
_BETWEEN_TESTS, _BETWEEN_QUESTIONS, _SILENCE = 0.02, 2.0, 10.0
#: Seconds that poll can wait, which counts milliseconds in an int.
_LONGEST_POLL = 1e6


class Session:
    """The connection on which this rank reports its end and receives the ends of other ranks.

    pmi:  the descriptor of the second connection, which the MPI library uses for PMI-1.
    rank, size: this rank, and the number of ranks.
    job:  identifies the job.
    """

    def __init__(self, watch: socket.socket, pmi: int, rank: int, size: int, job: str) -> None:
        self._sock = watch
        self._inbox = bytearray()
        self._pid = os.getpid()
        self.pmi = pmi
        self.rank = rank
        self.size = size
        self.job = job

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self._sock.fileno()

    def send(self, line: str) -> None:
        """Send a line, if the server is there and reads."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.send(line.encode() + b"\n", socket.MSG_DONTWAIT)

    def receive(self, limit: float) -> str | None:
        """Return the server's next line, "" when it is gone, None if none comes in time."""
        deadline = time.monotonic() + limit
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while b"\n" not in self._inbox:
            left = max(0, deadline - time.monotonic())
            if not poll.poll(1000 * min(left, _LONGEST_POLL)):
                if left > _LONGEST_POLL:
                    continue
                return None
            try:
                data = self._sock.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                return ""
            self._inbox += data
        line, _, self._inbox = self._inbox.partition(b"\n")
        return line.decode("ascii", "replace")

    def has_bad_news(self) -> bool:
        """Tell whether the server has said that the job ends, and nobody has read it yet."""
        with contextlib.suppress(OSError):
            line = self._sock.recv(5, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return line.startswith((b"abort", b"lost ", b"stuck"))
        return False

    def ending(self) -> tuple[str, int] | None:
        """Return why the job ends, and its exit code; None if it goes on.

        The reason is "" where this rank ends the job itself.
        """
        line = self.receive(0)
        if line is None:
            return None
        word, _, rest = line.partition(" ")
        if word == "lost":
            return f"rank {rest} of {self.size} was lost: it ended while others needed it", 1
        if word == "abort":
            rank, code = rest.split(" ")
            mine = int(rank) == self.rank
            why = "" if mine else f"rank {rank} of {self.size} ended the job with exit code {code}"
            return why, _exit_status(int(code))
        if word == "stuck":
            return f"ranks {rest} do not come out of MPI_Init", 1
        return "the server that rank 0 started, or its host, is gone", 1

    def check(self) -> None:
        """Raise LaunchError where the job has ended already."""
        found = self.ending()
        if found is not None:
            raise LaunchError(f"init_process_group: rank {self.rank} of {self.size}: {found[0]}")

    @contextlib.contextmanager
    def die_on_ending(self) -> Iterator[None]:
        """Have any line from the server end this process, by SIGIO, while MPI starts.

        Nothing else can: MPI_Init lets no other thread run, and waits for ranks that may be lost.
        Raises LaunchError where the job has ended already.
        """
        flags = fcntl.fcntl(self._sock, fcntl.F_GETFL)
        fcntl.fcntl(self._sock, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._sock, fcntl.F_SETFL, flags | os.O_ASYNC)
        try:
            self.check()
            yield
        finally:
            fcntl.fcntl(self._sock, fcntl.F_SETFL, flags)

    def abort(self, code: int) -> NoReturn:
        """End this process with an exit code, and the others with the same."""
        code = _exit_status(code)
        self.send(f"abort {code}")
        os._exit(code)

    def finalize(self) -> bool:
        """Wait until all ranks are ready to finalise MPI.

        Returns False where some never will be, and where the server has stopped. MPI_Finalize would
        wait for such a rank for ever.
        """
        from mpi4py import MPI

        self.send("end")
        asked, answered = time.monotonic(), True
        while (line := self.receive(_BETWEEN_TESTS)) in (None, "here"):
            now, answered = time.monotonic(), answered or line == "here"
            if answered and now - asked > _BETWEEN_QUESTIONS:
                asked, answered = now, False
                self.send("there")
            elif not answered and now - asked > _SILENCE:
                write_lines(
                    f"mpicoll: rank {self.rank} of {self.size}: the server that rank 0 started has "
                    f"not answered for {_SILENCE:g} s; MPI is not finalized"
                )
                return False
            MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # lets MPI move pending messages
        return line == "end all"

    def detach(self) -> None:
        """Give up the connections in a forked child: they are the parent's, and end with it."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (self.fileno(), self.pmi):
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


_session: Session | None = None


def current() -> Session | None:
    """Return the session of this process, if there is one."""
    return _session


def set_current(session: Session) -> None:
    """Make this the session of this process."""
    global _session
    _session = session


def _detach_after_fork() -> None:
    if _session is not None:
        _session.detach()


os.register_at_fork(after_in_child=_detach_after_fork)


def _exit_status(code: int) -> int:
    """Return the 8 bits of an exit code that count, and 1 for 0, which would mean success."""
    return code & 255 or 1
