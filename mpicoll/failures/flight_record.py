"""Flight record: the last calls of each group, written to a file after a failure.

Each group keeps a history of its calls (``kernels/calls.py``). A file has the history of one rank
in the format of PyTorch's flight recorder, version 2.10 (FlightRecorder.hpp of PyTorch 2.15), so
that ``torchfrtrace`` finds the culprit in a folder of such files. The key "mpicoll" has the rank,
its host and the reason, for which that format has no fields.

The record is written when a group fails, and when a call of an OPEN group times out or finds a
mismatch. The rank then notifies its neighbours by a status message, and they do the same.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
import weakref
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll import __version__, private_files, settings
from mpicoll.core.groups import default_group, on_fail, state
from mpicoll.core.signature import describe, read_call, with_root
from mpicoll.core.work import on_timeout
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    MismatchError,
    MPIError,
)
from mpicoll.failures import rank_status
from mpicoll.kernels.calls import CallEntry
from mpicoll.launch.error_output import find_stack
from mpicoll.output import write_lines

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

VERSION = "2.10"  # of the format
#: Time that other ranks have to write their records before this rank ends the job.
_RECORDS_TIMEOUT_S = 3.0
#: Time after a record in which notices of other ranks belong to the same failure.
_QUIET_S = 10.0

#: Errors after which other ranks can still write their records.
_WAITING = CollectiveTimeoutError, MismatchError, MPIError

#: Names of lists of calls.
_LIST_NAMES = {
    "all_reduce": "allreduce_coalesced",
    "all_gather_single": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor_coalesced",
}
#: Names of calls without a row in primitives.py.
_TASK_NAMES = {
    "all_gather_object": "all_gather", "gather_object": "gather",
    "scatter_object_list": "scatter", "broadcast_object_list": "broadcast",
    "monitored_barrier": "barrier", "new_window": "new_window",
}  # fmt: skip
_ANY_TASK = "split"
#: torch's names of dtypes (c10::toString).
_DTYPE_NAMES = {
    "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "uint8": "Byte",
    "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64", "float16": "Half",
    "float32": "Float", "float64": "Double", "bfloat16": "BFloat16", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}  # fmt: skip

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
    path = Path(given or f"{_file_prefix()}{default_group().rank()}")
    private_files.write(path, pickle.dumps(_build(why), protocol=2))
    return path


def _build(why: str) -> dict[str, Any]:
    """Return the contents of the file: the record of all groups. Each entry is a call."""
    offset = time.time_ns() - time.monotonic_ns()
    config: dict[str, dict[str, str]] = {}
    entries: list[dict[str, Any]] = []
    for number, group in enumerate(list(state.groups)):
        name = group.group_name
        config[name] = {"name": name, "desc": group.group_desc, "ranks": str(list(group.ranks))}
        calls, last = _find_calls(group)
        first = _first_kept(last, group.history_length)
        for call in calls:
            if call.place >= first:
                is_inside = call.place == last and group.lock.locked()
                entries.append(_build_entry(number, group, call, is_inside, offset))
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    return {
        "version": VERSION,
        "comm_lib_version": f"mpicoll {__version__}",
        "pg_config": config,
        "entries": [{"record_id": k, **entry} for k, entry in enumerate(entries)],
        "mpicoll": {
            "why": why, "rank": default_group().rank(), "host": socket.gethostname(),
            "time_ns": time.time_ns(),
        },
    }  # fmt: skip


def _find_calls(group: ProcessGroup) -> tuple[list[CallEntry], int]:
    """Return the calls of a group in order, and the number of the last one that has begun."""
    calls = [CallEntry(*entry) for entry in group.history()]
    begun = sorted((call for call in calls if call.place), key=lambda call: call.place)
    last = begun[-1].place if begun else 0
    # Queued calls will begin in this order.
    queued = [call for call in calls if not call.place]
    return [*begun, *(call._replace(place=last + 1 + i) for i, call in enumerate(queued))], last


def _build_entry(
    number: int, group: ProcessGroup, call: CallEntry, is_inside: bool, offset: int
) -> dict[str, Any]:
    """Return the entry of a call. number: of its group in the file. offset: added to its times."""
    kind = with_root(call.kind, call.root)
    name, inputs, outputs, dtypes = _as_torch_has_it(kind, call.sizes, group.size())
    created, started, completed = (
        each and each + offset for each in (call.created, call.started, call.completed)
    )
    description = describe(kind, call.sizes)
    where = f"mpicoll, group {group.group_name}"
    frames = [{"name": description, "filename": where, "line": call.place}]
    threads = (one.name for one in threading.enumerate() if one.ident == call.thread)
    return {
        "pg_id": number,
        "process_group": (group.group_name, group.group_desc),
        "thread_name": next(threads, ""),
        "thread_id": str(call.thread),
        "frames": frames + (_find_program_frames(call.thread) if is_inside else []),
        "op_id": call.place,
        "collective_seq_id": call.place,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "is_p2p": False,
        "input_sizes": inputs, "input_dtypes": dtypes,
        "output_sizes": outputs, "output_dtypes": dtypes,
        "time_created_ns": created,
        "time_discovered_started_ns": started or None,
        "time_discovered_completed_ns": completed or None,
        "state": "completed" if completed else "started" if started else "scheduled",
        "retired": bool(completed),
        "timeout_ms": 0 if group.timeout is None else int(1000 * group.timeout),
        **({"duration_ms": (completed - started) / 1e6} if completed else {}),
    }  # fmt: skip


def _find_program_frames(thread: int) -> list[dict[str, Any]]:
    """Return the program's frames of a thread, innermost first."""
    return [
        {"name": frame.name, "filename": frame.filename, "line": frame.lineno}
        for frame in reversed(find_stack(thread))
    ]


def _first_kept(last: int, length: int) -> int:
    """Return the number of the first call to dump. length: maximum calls in the history.

    torchfrtrace reports a call as missing on a rank that has not dumped it. Ranks are a few calls
    apart, and so are the beginnings of their histories. Cut at multiples of half their length,
    they mostly begin at the same call.
    """
    if last <= length:
        return 1
    half = max(length // 2, 1)
    return ((last - length) // half + 1) * half + 1


def _as_torch_has_it(
    kind: int, sizes: int, n: int
) -> tuple[str, list[list[int]], list[list[int]], list[str]]:
    """Return the name of a call, the shapes of its input and its output, and their dtype."""
    call = read_call(kind, sizes)
    library = "nccl" if call.on_device else "gloo"
    row = call.primitive
    if row is None:
        return f"{library}:{_TASK_NAMES.get(call.task, _ANY_TASK)}", [[0]], [[0]], ["Byte"]
    name = _LIST_NAMES.get(row.name) if call.is_list else None
    dtype = "uint8" if call.dtype is None else call.dtype.name
    inputs, outputs = (sizes * (n if many else 1) for many in (row.many_in, row.many_out))
    return (
        f"{library}:{name or row.recorded_as or row.name}", [[inputs]], [[outputs]],
        [_DTYPE_NAMES.get(dtype, dtype.capitalize())],
    )  # fmt: skip
