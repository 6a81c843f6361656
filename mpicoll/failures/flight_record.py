"""Flight record: the last calls of each group, written to a file after a failure.

Each group keeps a history of its calls (``kernels/calls.py``). A file has the histories of one rank
(``core/recorder_format.py``), so that PyTorch's ``torchfrtrace`` finds the culprit in a folder of
such files. The key "mpicoll" has the rank, its host and the reason, for which that format has no
fields.

The record is written when a group fails, and when a call of an OPEN group times out or finds a
mismatch. The rank then notifies its neighbours by a status message, and they do the same.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
import weakref
from operator import itemgetter
from pathlib import Path

from mpicoll import private_files, settings
from mpicoll.core.groups import ProcessGroup, default_group, on_fail, state
from mpicoll.core.recorder_format import build_record
from mpicoll.core.work import on_timeout
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    MismatchError,
    MPIError,
)
from mpicoll.failures import rank_status
from mpicoll.output import write_lines

#: Time that other ranks have to write their records before this rank ends the job.
_RECORDS_TIMEOUT_S = 3.0
#: Time after a record in which notices of other ranks belong to the same failure.
_QUIET_S = 10.0

#: Errors after which other ranks can still write their records.
_WAITING = CollectiveTimeoutError, MismatchError, MPIError

#: OPEN groups of which an error was recorded.
_recorded: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
#: When this rank recorded the latest failure; until when the job must not end; and whether the
#: neighbours are to be notified. Times are of time.monotonic.
_last = _wait_end = float("-inf")
_must_notify = False
#: The line that ``last_words`` returns.
_location: list[str] = []


def dump_flight_record(path: str | None = None) -> str:
    """Write this rank's flight record: the last calls of each of its groups.

    path: the file. None: the value of TORCH_FR_DUMP_TEMP_FILE, by default
        "~/.cache/torch/comm_lib_trace_rank_", with the rank appended.

    PyTorch's torchfrtrace reads a folder of such files. Other ranks write their files only if they
    also call this.

    Returns the path. Raises NotInitializedError (a ValueError) before init_process_group,
    ArgumentError (a ValueError) if no record is kept (TORCH_FR_BUFFER_SIZE is 0),
    ArgumentTypeError (a TypeError) for a path of another type, and the error of the system if the
    file cannot be written.
    """
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(
            f"dump_flight_record: path: expected the path of a file, got {type(path).__name__}"
        )
    if not default_group().history_length:
        raise ArgumentError(
            "dump_flight_record: no record is kept, because TORCH_FR_BUFFER_SIZE is 0; expected "
            "a number of calls, or leave it out"
        )
    return str(_write("dump_flight_record was called", path))


def _record(why: str, waits: bool = True) -> None:
    """Write this rank's record because of a failure.

    waits: ``wait_for_others`` waits for the records of the other ranks.
    """
    global _last, _wait_end, _must_notify
    _last = time.monotonic()
    _must_notify = write(why)
    _wait_end = _last + _RECORDS_TIMEOUT_S if waits and _must_notify else _wait_end


def _record_failure(group: ProcessGroup, error: Exception) -> None:
    """Write the record when a group fails. Does not wait for other threads, which may be stuck."""
    if group in state.groups:  # not an internal group of a route
        _record(str(error), isinstance(error, _WAITING))


def _record_timeout(why: str) -> None:
    if time.monotonic() > _last + _QUIET_S:  # works time out one after another
        _record(why)


on_fail.append(_record_failure)
on_timeout.append(_record_timeout)


def record_error(error: Exception, group: ProcessGroup) -> None:
    """Record an error that a call raises while its group stays OPEN, once for each group."""
    is_recorded = group.error is not None or group in _recorded
    if isinstance(error, _WAITING) and not is_recorded:
        _recorded.add(group)
        _record(str(error))
    notify()


def notify() -> None:
    """Notify the neighbours if this rank has recorded a failure."""
    global _must_notify
    default = state.default
    if _must_notify and default is not None:
        _must_notify = False
        with contextlib.suppress(Exception):  # MPI may have failed
            rank_status.send(default, rank_status.RECORDED)


def answer() -> None:
    """Write this rank's record if another rank has recorded a failure."""
    rank, when = max([*rank_status.recorded.items()], key=itemgetter(1), default=(0, _last))
    if when > _last + _QUIET_S:
        _record(f"requested by rank {rank}", waits=False)
    notify()


def wait_for_others() -> bool:
    """Wait until all other ranks have written their records or departed, before this rank ends the
    job. Return False after _RECORDS_TIMEOUT_S.

    Only neighbours send notices, so a job with other ranks than these waits until the timeout.
    """
    while time.monotonic() < _wait_end:
        default = state.default  # another thread may close it meanwhile
        with contextlib.suppress(Exception, KeyboardInterrupt):  # the process is ending already
            time.sleep(0.01)
            if default is None:
                continue
            notify()
            rank_status.receive(default)
            times = [*rank_status.recorded.items()]
            found = {rank for rank, when in times if when > _last - _QUIET_S}
            if len(found | rank_status.find_departed(default)) == default.size() - 1:
                return True
    return False


def write(why: str) -> bool:
    """Write this rank's record if one is kept; return whether it was written. Never raises."""
    group = state.default
    if group is None or not group.history_length:
        return False
    name = f"mpicoll: rank {group.rank()}"
    try:
        path = _write(why)
    except Exception as error:  # includes errors from inspecting the program's stack
        write_lines(f"{name}: cannot write the flight record: {error}")
        return False
    records = f"{name}: flight records: {_file_prefix()}*"
    _location[:] = [f"{records}; torchfrtrace {path.parent} finds the culprit"]
    return True


def last_words() -> list[str]:
    """Return the line with the path of the records, once after each dump."""
    return [_location.pop()] if _location else []


def _file_prefix() -> str:
    """Return the path of the files without the rank at the end."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return settings.RECORD_FILE.value() or f"{cache}/torch/comm_lib_trace_rank_"


def _write(why: str, given: str | None = None) -> Path:
    """Write the record to a file, atomically; return its path."""
    rank = default_group().rank()
    path = Path(given or f"{_file_prefix()}{rank}")
    about = {"why": why, "rank": rank, "host": socket.gethostname(), "time_ns": time.time_ns()}
    record = build_record(list(state.groups)) | {"mpicoll": about}
    private_files.write(path, pickle.dumps(record, protocol=2))
    return path
