"""The process of one rank that an engine's worker has started, see ``workers.py``.

It reads pickles on standard input, and answers with pickles on the descriptor that it is given:

    worker  (process, rank, size, limit, path)   its own number, and sys.path
    rank    ("ready", ADDRESS)                   of the server, from rank 0; "" from others
    worker  (variables, ADDRESS, call)
    rank    ("value", VALUE) or ("error", ERROR or None, TRACEBACK), pickled once more
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
#: Seconds between looks for the end of the job, and then until this process ends.
_PAUSE, _GRACE = 1.0, 3.0


class _Channel:
    """The pipes to the worker; for ``join`` a store with one key."""

    def __init__(self, answers: int) -> None:
        # What the function starts, or reads, must not meet what the worker says.
        own = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._orders: BinaryIO = open(own, "rb")  # noqa: PTH123, SIM115
        self._answers = answers
        os.set_inheritable(answers, False)
        self._told: Any = None

    def hear(self) -> Any:
        return pickle.load(self._orders)

    def say(self, *message: object) -> None:
        data = memoryview(pickle.dumps(message))
        while data:
            data = data[os.write(self._answers, data) :]

    def told(self) -> Any:
        """Return what this rank is told of the others, once it is."""
        if self._told is None:
            self._told = self.hear()
        return self._told

    def set(self, key: str, value: str) -> None:
        self.say("ready", value)

    def get(self, key: str) -> bytes:
        address: str = self.told()[1]
        return address.encode()


def main() -> None:
    """Join the world, and run the function."""
    channel = _Channel(int(sys.argv[1]))
    parent, rank, size, limit, sys.path[:] = channel.hear()
    _end_with(parent)
    try:
        if rank != 0:
            world.load()  # what is missing here is known before others wait for this rank
            channel.say("ready", "")
        with world.start(Rendezvous(channel, rank, size), limit):
            pass
        joined = session.current()
        if joined is not None:  # one rank alone needs no server
            joined.send("busy")
            threading.Thread(target=_listen, args=(joined,), daemon=True).start()
        elif rank == 0:
            channel.say("ready", "")
        variables, _, call = channel.told()
        os.environ.update(variables)
        dumps, function = pickle.loads(call)
        function, arguments, named = pickle.loads(function)
        value = _dump(function(*arguments, **named), dumps)
    except BaseException as error:
        channel.say("error", _pickled(error), traceback.format_exc())
        sys.excepthook(*sys.exc_info())  # with a process group it ends the job
        joined = session.current()
        if joined is not None:
            joined.abort(1)
        sys.exit(1)
    channel.say("value", value)


def _end_with(parent: int) -> None:
    """End this process when its worker ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _listen(joined: session.Session) -> None:
    """End this process when the job ends. With a process group its watchdog does that sooner; the
    function may have none, or wait for something else for ever.
    """
    while not joined.has_bad_news():
        time.sleep(_PAUSE)
    time.sleep(_GRACE)
    os._exit(1)


def _dump(value: object, dumps: Callable[[object], bytes]) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # a class of the caller's script, for example
        return dumps(value)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception, if it survives that."""
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
    except Exception:
        return None
    return text


if __name__ == "__main__":
    main()
