"""Main module of the process of one rank, started by an engine's worker (``workers.py``).

It reads a pickle from standard input and writes a pickle to the descriptor in its argument:

    worker  (PID, ADDRESS, limit, path, call)   the worker's process ID, the address of the server
                                                ("" for a single rank), and sys.path
    rank    ("value", VALUE) or ("error", ERROR or None, TRACEBACK); VALUE and ERROR are pickles
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from mpicoll.launch import session, world
from mpicoll.launch.joining import send_failure
from mpicoll.launch.rendezvous import Rendezvous, ServerAddress

#: prctl's number for the signal that this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Seconds between checks for the end of the job.
_CHECK_INTERVAL_S = 1.0
#: Seconds from the end of the job to the end of this process.
_EXIT_DELAY_S = 3.0
#: Seconds for which a rank that cannot start MPI notifies the other ranks.
_NOTIFY_TIMEOUT_S = 5.0


def main() -> None:
    """Start MPI and run the function."""
    writer = int(sys.argv[1])
    os.set_inheritable(writer, False)
    parent, address, limit, sys.path[:], call = pickle.load(sys.stdin.buffer)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = ServerAddress.parse(address.encode()) if address else None
    rendezvous = Rendezvous(None, rank, size, server=server)
    try:
        with world.start_mpi(rendezvous, limit):
            pass
        joined = session.current_session()
        if joined is not None:
            joined.send("busy")
            threading.Thread(target=_exit_with_job, args=(joined,), daemon=True).start()
        dumps, function = pickle.loads(call)
        function, arguments, named = pickle.loads(function)
        value = _dump(function(*arguments, **named), dumps)
    except BaseException as error:
        _write(writer, "error", _pickled(error), traceback.format_exc())
        sys.excepthook(*sys.exc_info())  # ends the job if there is a process group
        joined = session.current_session()
        if joined is not None:
            joined.abort(1)
        elif server is not None:
            with contextlib.suppress(Exception):
                send_failure(rendezvous, f"{type(error).__name__}: {error}", _NOTIFY_TIMEOUT_S)
        sys.exit(1)
    _write(writer, "value", value)


def _write(descriptor: int, *message: object) -> None:
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        pickle.dump(message, file)


def _exit_with_job(joined: session.Session) -> None:
    """End this process when the job ends, also if the function has no process group."""
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
