"""Histories of calls in the format of PyTorch's flight recorder, which ``torchfrtrace`` reads.

This is version 2.10 of the format: FlightRecorder.hpp of PyTorch 2.15.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from mpicoll import __version__
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.signature import describe, read_call, with_root
from mpicoll.kernels.calls import CallEntry
from mpicoll.launch.error_output import find_stack

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


def build_record(groups: Iterable[ProcessGroup]) -> dict[str, Any]:
    """Return the record of the latest calls of groups. Each entry is a call."""
    offset = time.time_ns() - time.monotonic_ns()
    config: dict[str, dict[str, str]] = {}
    entries: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
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
        "version": "2.10",
        "comm_lib_version": f"mpicoll {__version__}",
        "pg_config": config,
        "entries": [{"record_id": k, **entry} for k, entry in enumerate(entries)],
    }


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
    where = f"mpicoll, group {group.group_name}"
    frames = [{"name": describe(kind, call.sizes), "filename": where, "line": call.place}]
    if is_inside:  # the frames of the program, innermost first
        frames += [
            {"name": frame.name, "filename": frame.filename, "line": frame.lineno or 0}
            for frame in reversed(find_stack(call.thread))
        ]
    threads = (one.name for one in threading.enumerate() if one.ident == call.thread)
    return {
        "pg_id": number,
        "process_group": (group.group_name, group.group_desc),
        "thread_name": next(threads, ""),
        "thread_id": str(call.thread),
        "frames": frames,
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
