"""The flight record: the last calls of each group, written to a file when something goes wrong.

Each group keeps a history of its calls (``kernels/calls.py``) and of its messages. A file has that
of one rank, in the format of PyTorch's flight recorder, version 2.10 (FlightRecorder.hpp of PyTorch
2.15), so that its ``torchfrtrace`` finds the culprit in a folder of such files. What that format
has no place for is under the key "mpicoll": the host, its clock, and all messages.

A rank that dumps its record asks the others to do the same, by a status message. A rank that is
asked for the first time in a while asks its own neighbours in turn.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Any

from mpicoll import __version__, private_files, settings
from mpicoll.core import observers
from mpicoll.core.groups import default_group, state
from mpicoll.core.observers import Observer
from mpicoll.core.signature import describe, read_call, with_root
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistBackendError,
    LostRankError,
    MismatchError,
)
from mpicoll.failures import rank_status
from mpicoll.kernels.calls import CallEntry
from mpicoll.launch.host_identity import machine
from mpicoll.output import format_count, write_lines

if TYPE_CHECKING:
    from mpicoll.arrays.views import View
    from mpicoll.core.groups import ProcessGroup
    from mpicoll.dtypes import DType

__all__ = [
    "RECORDS_TIMEOUT_S",
    "answer",
    "complete_message",
    "dump",
    "dump_after",
    "dump_flight_record",
    "dump_for",
    "enter_message",
    "file_prefix",
    "last_words",
    "write",
]

#: Of the format.
VERSION = "2.10"
#: Seconds that a rank whose call is late waits for the others to write their records, too: the job
#: may end right after it.
RECORDS_TIMEOUT_S = 3.0
#: Seconds after its own dump in which a rank that is asked for one has answered already, and the
#: longest time that a request takes from rank to rank.
_QUIET, _HOP = 10.0, 1.5

#: Primitives that torchfrtrace knows by no name, as it is to see them: one each that no other call
#: of mpicoll has, so that ranks in different calls show.
_OTHER_NAMES = {"scan": "_reduce_oop", "exscan": "_broadcast_oop"}
#: The same of lists of calls.
_LIST_NAMES = {
    "all_reduce": "allreduce_coalesced",
    "all_gather_single": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor_coalesced",
}
#: And of calls that are no primitives, by their names.
_TASK_NAMES = {
    "all_gather_object": "all_gather",
    "gather_object": "gather",
    "scatter_object_list": "scatter",
    "broadcast_object_list": "broadcast",
    "monitored_barrier": "barrier",
    "new_window": "new_window",
}
_ANY_TASK = "split"
#: torch's names of dtypes (c10::toString), where they are not the core's with a capital.
_DTYPE_NAMES = {
    "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "uint8": "Byte",
    "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64", "float16": "Half",
    "float32": "Float", "float64": "Double", "bfloat16": "BFloat16", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}  # fmt: skip
#: Frames that are not the program's.
_INSIDE = ("mpicoll.", "torch.", "threading")

#: Groups because of which the record was dumped: the first dump says it all; programs may go on.
_dumped: weakref.WeakKeyDictionary[ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
#: One dump at a time; and when the last was, by time.monotonic.
_lock = threading.RLock()
_last = float("-inf")
#: What ``last_words`` says.
_unsaid = ""


# --- messages -----------------------------------------------------------------------------------


def enter_message(
    group: ProcessGroup, peer: int, tag: int, receives: bool, view: View
) -> list[Any] | None:
    """Put a message that begins into the group's history, if it keeps one; return its entry."""
    history = group.message_history
    if not history.maxlen:
        return None
    begun = time.monotonic_ns()
    entry = [peer, tag, receives, view.count, view.dtype, begun, 0, threading.get_ident()]
    history.append(entry)
    return entry


def complete_message(entry: list[Any], group: ProcessGroup, source: int) -> None:
    """Note that a message is complete; ``source``: the global rank that it came from, if any."""
    entry[6] = time.monotonic_ns()
    if source >= 0:
        entry[0] = group.group_rank(source)


# --- dumping ------------------------------------------------------------------------------------


def dump_flight_record(path: str | None = None) -> str:
    """Write this rank's flight record: the last calls of each of its groups.

    path: the file; by default the rank behind what TORCH_FR_DUMP_TEMP_FILE says, else behind
        "~/.cache/torch/comm_lib_trace_rank_".

    PyTorch's torchfrtrace reads a folder of such files, as does ``python -m mpicoll trace``. The
    other ranks write theirs when they call this, too.

    Returns the path. Raises NotInitializedError (a ValueError) before init_process_group,
    ArgumentError (a ValueError) if no record is kept (TORCH_FR_BUFFER_SIZE is 0),
    ArgumentTypeError (a TypeError) for a path of another type, and what the system says if the
    file cannot be written.
    """
    if not isinstance(path, (str, os.PathLike, NoneType)):
        raise ArgumentTypeError(
            f"dump_flight_record: path: expected the path of a file, got {type(path).__name__}"
        )
    if not default_group().message_history.maxlen:
        raise ArgumentError(
            "dump_flight_record: no record is kept, because TORCH_FR_BUFFER_SIZE is 0; expected "
            "a number of calls, or leave it out"
        )
    return str(_write("dump_flight_record was called", path))


def dump_after(error: Exception, group: ProcessGroup) -> None:
    """Dump the record if it helps to see why a call has failed."""
    if isinstance(error, CollectiveTimeoutError):
        if group.error is None:  # such as monitored_barrier, after which the group goes on
            dump(str(error))
        else:
            dump_for(group, "closed", str(error))
    elif isinstance(error, LostRankError):
        dump_for(group, "lost", str(error), 0)
    elif isinstance(error, MismatchError):
        dump_for(group, "mismatch", str(error), among=group)  # all of its ranks are here


def dump_for(
    group: ProcessGroup,
    kind: str,
    why: str,
    wait_s: float = RECORDS_TIMEOUT_S,
    among: ProcessGroup | None = None,
) -> None:
    """Dump the record because of a group, once for each kind of reason: what comes later comes of
    the same.

    The rest is as in ``dump``.
    """
    if kind not in (known := _dumped.setdefault(group, set())):
        known.add(kind)
        dump(why, wait_s, among)


def dump(why: str, wait_s: float = RECORDS_TIMEOUT_S, among: ProcessGroup | None = None) -> None:
    """Write this rank's record and have the others write theirs.

    wait_s: seconds to wait for them; among: for those of this group alone.
    """
    written, default = write(why), state.default  # another thread may end it meanwhile
    if written and default is not None and default.size() > 1:
        _ask()
        _wait_for_others(default, wait_s, among or default)
        rank_status.dumping.clear()


def answer() -> None:
    """Write this rank's record if another has asked for it, as the watchdog has seen."""
    if rank_status.dumping and time.monotonic() > _last + _QUIET:
        asking = min(rank_status.dumping, default=-1)
        if write(f"rank {asking} has asked for it"):
            _ask()
    if time.monotonic() > _last + _QUIET:
        rank_status.dumping.clear()


def write(why: str) -> bool:
    """Write this rank's record, if one is kept; return whether it was. Never raises."""
    global _unsaid
    group = state.default
    if group is None or not group.message_history.maxlen:
        return False
    try:
        path = _write(why)
    except Exception as error:  # the program's own stack is looked at, too
        write_lines(f"mpicoll: rank {group.rank()}: the flight record cannot be written: {error}")
        return False
    _unsaid = (
        f"mpicoll: rank {group.rank()}: flight records: {file_prefix()}*; "
        f"torchfrtrace {path.parent} finds the culprit"
    )
    return True


def last_words() -> list[str]:
    """Return the line that says where the records are, once after each: when the job ends, or who
    has asked waits for it.
    """
    global _unsaid
    text, _unsaid = _unsaid, ""
    return [text] if text else []


def _ask() -> None:
    group = state.default
    if group is None or group.closed is not None:
        return
    with contextlib.suppress(Exception):  # MPI may have failed: then this is all there is
        rank_status.send(group, rank_status.DUMPING)


def _wait_for_others(group: ProcessGroup, wait_s: float, among: ProcessGroup) -> None:
    """Wait until the neighbours have written their records, and have had the time to pass it on."""
    expected = {group.ranks[rank] for rank in rank_status.neighbours(group)} & {*among.ranks}
    end = time.monotonic() + wait_s
    while not expected <= rank_status.dumping | _departed(group) and time.monotonic() < end:
        with contextlib.suppress(Exception):
            rank_status.receive(group)
        time.sleep(0.01)
    # Each hop is a power of two either way.
    hops = (group.size().bit_length() + 1) // 2
    if wait_s and among is group and len(expected) < group.size() - 1:
        time.sleep(min(_HOP * (hops - 1), wait_s))


def _departed(group: ProcessGroup) -> set[int]:
    """Return the global ranks that have ended, or have destroyed the group: they answer no more."""
    gone = rank_status.EXITING, rank_status.DESTROYING
    return {group.ranks[rank] for rank, one in list(group.statuses.items()) if one.state in gone}


def file_prefix() -> str:
    """Return what the paths of the files begin with, before the rank."""
    chosen = settings.RECORD_FILE.value() or settings.RECORD_FILE_BEFORE.value()
    if chosen:
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return f"{cache}/torch/comm_lib_trace_rank_"


def _write(why: str, given: str | None = None) -> Path:
    """Write the record to a file, which is there as a whole or not at all; return its path."""
    global _last
    with _lock:
        path = Path(given or f"{file_prefix()}{default_group().rank()}")
        private_files.write(path, pickle.dumps(_build(why), protocol=2))
        _last = time.monotonic()
        return path


class _Recorder(Observer):
    """Dumps the record when a group or a Work times out."""

    def group_failing(self, group: ProcessGroup, error: DistBackendError, wait_s: float) -> None:
        """Dump the record if a call has timed out. Other errors are dumped by the call."""
        if isinstance(error, CollectiveTimeoutError):
            dump_for(group, "closed", str(error), wait_s)

    def work_timed_out(self, why: str) -> None:
        """Dump the record, unless it was dumped just now: works time out one after another."""
        if time.monotonic() > _last + _QUIET:
            dump(why)


observers.add(_Recorder())


# --- the format ---------------------------------------------------------------------------------


def _build(why: str) -> dict[str, Any]:
    """Return the record of this rank in torch's format."""
    world = default_group()
    built = _Record(time.time_ns() - time.monotonic_ns())
    for number, group in enumerate(list(state.groups)):
        built.add_group(number, group)
    return {
        "version": VERSION,
        "comm_lib_version": f"mpicoll {__version__}",
        "pg_config": built.config,
        "pg_status": built.status,
        "entries": [
            {"record_id": number, **entry} for number, entry in enumerate(_in_order(built.entries))
        ],
        "mpicoll": {
            "why": why,
            "rank": world.rank(),
            "host": socket.gethostname(),
            "clock": machine().partition("/")[0],
            "time_ns": time.monotonic_ns() + built.offset,
            "offset_ns": built.offset,
            "messages": built.messages,
        },
    }


def _in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


class _Record:
    """What is built of all groups. offset: of the clock of the day to the monotonic one, in ns."""

    def __init__(self, offset: int) -> None:
        self.config: dict[str, dict[str, str]] = {}
        self.status: dict[str, dict[str, int]] = {}
        self.entries: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self._pending: dict[str, int] = {}
        self.offset = offset
        self._stacks = sys._current_frames()
        self._threads = {one.ident: one.name for one in threading.enumerate()}

    def add_group(self, number: int, group: ProcessGroup) -> None:
        """Add the calls and messages of a group, the ``number``-th that is alive here."""
        self._configure(group.group_name, group.group_desc, group.ranks)
        calls = [CallEntry(*entry) for entry in group.history()]
        begun = sorted((call for call in calls if call.place), key=lambda call: call.place)
        last = begun[-1].place if begun else 0
        # Those that are queued will begin in their order.
        queued = [call for call in calls if not call.place]
        queued = [call._replace(place=last + 1 + i) for i, call in enumerate(queued)]
        self.status[str(number)] = {
            "last_enqueued_collective": last + len(queued) if calls else -1,
            "last_started_collective": last if calls else -1,
            "last_completed_collective": max(
                (call.place for call in begun if call.completed), default=-1
            ),
        }
        first = _first_kept(last, group.message_history.maxlen or 0)
        inside = last if group.lock.locked() else 0
        for call in (*begun, *queued):
            if call.place >= first:
                self.entries.append(self._call(number, group, call, call.place == inside))
        for at, message in enumerate(list(group.message_history)):
            self._add_message(number, group, message, at)

    def _configure(self, name: str, desc: str, ranks: tuple[int, ...]) -> None:
        self.config[name] = {"name": name, "desc": desc, "ranks": str(list(ranks))}

    def _call(
        self, number: int, group: ProcessGroup, call: CallEntry, is_inside: bool
    ) -> dict[str, Any]:
        kind = with_root(call.kind, call.root)
        name, inputs, outputs, dtype = _as_torch_has_it(kind, call.sizes, group.size())
        return self._entry(
            number, group, call.thread, (call.created, call.started, call.completed),
            name=(group.group_name, group.group_desc),
            frames=[
                {
                    "name": describe(kind, call.sizes),
                    "filename": f"mpicoll, group {group.group_name}", "line": call.place,
                },
                *(self._program_frames(call.thread) if is_inside else ()),
            ],
            collective_seq_id=call.place, p2p_seq_id=0, op_id=call.place, profiling_name=name,
            input_sizes=[[inputs]], input_dtypes=[dtype], output_sizes=[[outputs]],
            output_dtypes=[dtype], is_p2p=False,
        )  # fmt: skip

    def _add_message(self, number: int, group: ProcessGroup, message: list[Any], at: int) -> None:
        peer, tag, receives, count, dtype, begun, completed, thread = message
        me = group.rank()
        known = 0 <= peer < group.size()
        source, target = (peer, me) if receives else (me, peer)
        text = (
            f"recv {target}<-{source if known else '?'}" if receives else f"send {source}->{target}"
        )
        entry = self._entry(
            number, group, thread, (begun, begun, completed),
            name=(group.group_name, group.group_desc),
            frames=[
                {
                    "name": f"{text}, {format_count(count, 'element')} of {dtype}, tag {tag}",
                    "filename": f"mpicoll, group {group.group_name}", "line": at,
                },
                *(self._program_frames(thread, message) if not completed else ()),
            ],
            collective_seq_id=0, p2p_seq_id=at, op_id=at, profiling_name=f"gloo:{text}",
            input_sizes=[] if receives else [[count]],
            input_dtypes=[] if receives else [_dtype_name(dtype)],
            output_sizes=[[count]] if receives else [],
            output_dtypes=[_dtype_name(dtype)] if receives else [], is_p2p=True,
        )  # fmt: skip
        self.messages.append(entry)
        if not completed and known:
            self.entries.append(self._between_two(entry, group, source, target, tag))

    def _between_two(
        self, entry: dict[str, Any], group: ProcessGroup, source: int, target: int, tag: int
    ) -> dict[str, Any]:
        """Return the entry of a message that is not complete as one of a group of two ranks.

        torchfrtrace expects a message of a group on all of its ranks. Of messages of one sender,
        receiver and tag the first that is sent is the first that is received (MPI-4.1 section 3.5),
        so that the first that is not complete on either side is the same.
        """
        name = f"{group.group_name}: messages {source}->{target}, tag {tag}"
        pair = group.ranks[source], group.ranks[target]
        desc = f"from rank {pair[0]} to rank {pair[1]}"
        self._configure(name, desc, tuple(sorted(set(pair))))
        place = self._pending[name] = self._pending.get(name, 0) + 1
        at, to = (sorted(set(pair)).index(rank) for rank in pair)
        text = f"recv {to}<-{at}" if "recv" in entry["profiling_name"] else f"send {at}->{to}"
        sides = {"input_sizes", "output_sizes", "input_dtypes", "output_dtypes"}
        filled = {side: entry[side] or [[] if "sizes" in side else ""] for side in sides}
        return (
            entry
            | filled
            | {
                "process_group": (name, desc),
                "collective_seq_id": place,
                "p2p_seq_id": place,
                "profiling_name": f"gloo:{text}",
            }
        )

    def _entry(
        self, number: int, group: ProcessGroup, thread: int, times: tuple[int, int, int],
        *, name: tuple[str, str], **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        created, started, completed = (each and each + self.offset for each in times)
        entry: dict[str, Any] = {
            "pg_id": number,
            "process_group": name,
            "thread_name": self._threads.get(thread, ""),
            "thread_id": str(thread),
            **more,
            "time_created_ns": created,
            "state": "completed" if completed else "started" if started else "scheduled",
            "time_discovered_started_ns": started or None,
            "time_discovered_completed_ns": completed or None,
            "retired": bool(completed),
            "timeout_ms": 0 if group.timeout is None else int(1000 * group.timeout),
        }
        if completed:
            entry["duration_ms"] = (completed - started) / 1e6
        return entry

    def _program_frames(
        self, thread: int, message: list[Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return the frames of a thread that are the program's, innermost first.

        message: an entry: nothing, if the thread does not wait for this message.
        """
        frames = list(_walk(self._stacks.get(thread)))
        if message is not None:
            waiting = (getattr(each.f_locals.get("self"), "entry", None) for each in frames)
            if not any(entry is message for entry in waiting):
                return []
        return [
            {
                "name": each.f_code.co_name,
                "filename": each.f_code.co_filename,
                "line": each.f_lineno,
            }
            for each in frames
            if not str(each.f_globals.get("__name__", "")).startswith(_INSIDE)
        ]


def _first_kept(last: int, length: int) -> int:
    """Return the place of the first call that is dumped of a history of some length.

    torchfrtrace takes a call that one rank has dumped and another has not for one that the latter
    has not made. Ranks are a few calls apart, so that their histories begin a few calls apart; cut
    at multiples of half their length they mostly begin at the same call.
    """
    if last <= length:
        return 1
    half = max(length // 2, 1)
    return ((last - length) // half + 1) * half + 1


def _as_torch_has_it(kind: int, sizes: int, n: int) -> tuple[str, int, int, str]:
    """Return the name of a call, the elements of its input and its output, and its dtype's name."""
    call = read_call(kind, sizes)
    library = "nccl" if call.on_device else "gloo"
    if call.primitive is None:
        return f"{library}:{_TASK_NAMES.get(call.task, _ANY_TASK)}", 0, 0, "Byte"
    row = call.primitive
    name = _OTHER_NAMES.get(row.name, row.name)
    if call.is_list:
        name = _LIST_NAMES.get(row.name, name)
    return (
        f"{library}:{name}",
        sizes * (n if row.many_in else 1),
        sizes * (n if row.many_out else 1),
        "Byte" if call.dtype is None else _dtype_name(call.dtype),
    )


def _dtype_name(dtype: DType) -> str:
    return _DTYPE_NAMES.get(dtype.name, dtype.name.capitalize())


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
