"""Main module of the process of one rank, started by an engine's worker (``workers.py``).

It reads pickles from standard input and writes pickles to the descriptor in its argument:

    worker  (PID, rank, size, limit, path)   the worker's process ID, and sys.path
    rank    ("ready", ADDRESS)               rank 0: the address of the server; other ranks: ""
    worker  (variables, ADDRESS, call)
    rank    ("value", VALUE) or ("error", ERROR or None, TRACEBACK); VALUE and ERROR are pickles
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from mpicoll.launch import session, world
from mpicoll.launch.rendezvous import Rendezvous

__all__ = ["main"]

#: prctl's number for the signal that this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Seconds between checks for the end of the job.
_CHECK_INTERVAL_S = 1.0
#: Seconds from the end of the job to the end of this process.
_EXIT_DELAY_S = 3.0


class _Channel:
    """The pipes to the worker, with the interface of ``Store`` for ``join``."""

    def __init__(self, answers: int) -> None:
        # The function and its child processes must not read messages of the worker.
        own = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._orders: BinaryIO = open(own, "rb")  # noqa: PTH123, SIM115
        self._answers = answers
        os.set_inheritable(answers, False)
        self._assignment: Any = None

    def read(self) -> Any:
        return pickle.load(self._orders)

    def write(self, *message: object) -> None:
        data = memoryview(pickle.dumps(message))
        while data:
            data = data[os.write(self._answers, data) :]

    def assignment(self) -> Any:
        """Return this rank's assignment; wait for it on the first call."""
        if self._assignment is None:
            self._assignment = self.read()
        return self._assignment

    def set(self, key: str, value: str) -> None:
        self.write("ready", value)

    def get(self, key: str) -> bytes:
        address: str = self.assignment()[1]
        return address.encode()


def main() -> None:
    """Start MPI and run the function."""
    channel = _Channel(int(sys.argv[1]))
    parent, rank, size, limit, sys.path[:] = channel.read()
    _end_with(parent)
    try:
        if rank != 0:
            world.load()  # a missing MPI library raises before other ranks wait for this one
            channel.write("ready", "")
        with world.start(Rendezvous(channel, rank, size), limit):
            pass
        joined = session.current()
        if joined is not None:
            joined.send("busy")
            threading.Thread(target=_exit_with_job, args=(joined,), daemon=True).start()
        elif rank == 0:  # one rank alone has no server
            channel.write("ready", "")
        variables, _, call = channel.assignment()
        os.environ.update(variables)
        dumps, function = pickle.loads(call)
        function, arguments, named = pickle.loads(function)
        value = _dump(function(*arguments, **named), dumps)
    except BaseException as error:
        channel.write("error", _pickled(error), traceback.format_exc())
        sys.excepthook(*sys.exc_info())  # ends the job if there is a process group
        joined = session.current()
        if joined is not None:
            joined.abort(1)
        sys.exit(1)
    channel.write("value", value)


def _end_with(parent: int) -> None:
    """End this process when its worker ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _exit_with_job(joined: session.Session) -> None:
    """End this process when the job ends. The watchdog thread of a process group is faster, but the
    function may have no process group.
    """
    while not joined.has_ended_badly():
        time.sleep(_CHECK_INTERVAL_S)
    time.sleep(_EXIT_DELAY_S)
    os._exit(1)


def _dump(value: object, dumps: Callable[[object], bytes]) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # for example a class of the caller's script
        return dumps(value)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception; return None if it cannot be pickled or unpickled."""
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
    except Exception:
        return None
    return text


if __name__ == "__main__":
    main()
