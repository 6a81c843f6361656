"""``python -m mpicoll trace FOLDER``: convert flight records of all ranks to one timeline.

The output is JSON in Chrome's trace format (specification: "Trace Event Format", 2016), for
https://ui.perfetto.dev and chrome://tracing. Each rank is a process, and each group is a row.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll import cli, private_files
from mpicoll.output import write_lines

__all__ = ["add_arguments", "align", "read_folder", "run", "trace_events"]

#: Calls that no rank completes before all ranks have started them, by their names in records.
_SYNCHRONIZING = (
    "all_reduce", "allreduce_coalesced", "all_gather", "all_gather_single",
    "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "barrier",
)  # fmt: skip

_TIMES = "time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add FOLDER, --prefix and --output."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the flight records")
    parser.add_argument("-p", "--prefix", default="", help="file names without the rank")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="the timeline, for https://ui.perfetto.dev (default: FOLDER/trace.json)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Write the timeline; return 0, or 1 without records."""
    output = options.output or options.folder / "trace.json"
    try:
        records = read_folder(options.folder, options.prefix)
        offsets = align(records)
        whole = {"traceEvents": list(trace_events(records, offsets)), "displayTimeUnit": "ns"}
        private_files.write(output, json.dumps(whole).encode())
    except (OSError, ValueError) as error:
        return cli.refuse("trace", str(error), cli.is_first_rank(), 1)
    hosts = {record.clock for record in records.values()}
    apart = sorted(record.host for record in records.values() if record.clock not in offsets)
    print(f"{output}: {len(records)} ranks on {len(hosts)} hosts; open it in ui.perfetto.dev")
    if apart:
        write_lines(
            f"cannot align the clocks of {', '.join(dict.fromkeys(apart))}, which have no common "
            "call with the first host; their time of day is used"
        )
    return 0


class Record(NamedTuple):
    """The flight record of one rank.

    clock: name of its clock; ranks on a host share one.
    offset: nanoseconds that were added to the clock to get the time of day.
    written: time of day of the record, in nanoseconds.
    calls, messages: entries in the format of torch.
    """

    host: str
    clock: str
    offset: int
    written: int
    calls: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class _Plain(pickle.Unpickler):
    """Unpickles numbers, strings, lists and dicts only, and runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains a {module}.{name}")


def read_folder(folder: Path, prefix: str = "") -> dict[int, Record]:
    """Read the records in a folder, by rank; ``prefix``: start of their file names.

    Raises ValueError if there are none, or records with several prefixes, and OSError.
    """
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(r"(.*?)(\d+)", path.name)
        if match and not path.name.startswith(".") and match[1].startswith(prefix):
            found[match[1]][int(match[2])] = path
    if len(found) != 1:
        got = f"prefixes {', '.join(map(repr, found))}" if found else "no file"
        raise ValueError(
            f"{folder}: expected flight records of one job, files whose names end with the rank, "
            f"got {got}; pass another folder or a --prefix"
        )
    (ranks,) = found.values()
    records = {rank: _read(path, rank) for rank, path in sorted(ranks.items())}
    # Each rank has read the time of day when it wrote its record: use one offset per clock.
    offsets: dict[str, int] = {}
    for record in records.values():
        ahead = record.offset - offsets.setdefault(record.clock, record.offset)
        for entry in (*record.calls, *record.messages):
            for name in _TIMES:
                if entry[name] is not None:
                    entry[name] -= ahead
    return records


def _read(path: Path, rank: int) -> Record:
    try:
        with path.open("rb") as file:
            whole = _Plain(file).load()
        entries = whole["entries"]
        own = whole.get("mpicoll", {})
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a flight record: {error}") from error
    times = [each["time_discovered_completed_ns"] or each["time_created_ns"] for each in entries]
    return Record(
        own.get("host", ""),
        own.get("clock", f"rank {rank}"),  # records of another library have no clock
        own.get("offset_ns", 0),
        own.get("time_ns", max(times, default=0)),
        [each for each in entries if not each["is_p2p"]],
        own.get("messages", [each for each in entries if each["is_p2p"]]),
    )


# --- clocks -------------------------------------------------------------------------------------


def align(records: Mapping[int, Record]) -> dict[str, int]:
    """Return the offset of each clock to the clock of the first rank, in nanoseconds.

    No rank completes an all_reduce before all ranks have started it. Each all_reduce therefore
    bounds the offset of two clocks from both sides, as an exchange of two messages does (F.
    Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989). The offset is the
    middle of the narrowest bounds. Clocks without a common call with the first one are omitted.
    """
    first = records[min(records)].clock
    bounds: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for spans in _find_synchronizing(records):
        if first in spans:
            begun, ended = spans[first]
            for clock, (their_begun, their_ended) in spans.items():
                bounds[clock].append((their_begun - ended, their_ended - begun))
    offsets = {
        clock: (max(least for least, _ in own) + min(most for _, most in own)) // 2
        for clock, own in bounds.items()
    }
    return offsets | {first: 0}


def _find_synchronizing(records: Mapping[int, Record]) -> list[dict[str, tuple[int, int]]]:
    """Return, for each synchronizing call and each clock, the last start and the first end."""
    found: dict[tuple[str, int], dict[str, tuple[int, int]]] = defaultdict(dict)
    for record in records.values():
        for call in record.calls:
            name = _name(call)
            moves = name == "barrier" or any(map(any, call["input_sizes"]))
            if name not in _SYNCHRONIZING or not moves or call["state"] != "completed":
                continue
            begun = call["time_discovered_started_ns"] or call["time_created_ns"]
            ended = call["time_discovered_completed_ns"]
            spans = found[call["process_group"][0], call["collective_seq_id"]]
            known = spans.get(record.clock, (begun, ended))
            spans[record.clock] = max(known[0], begun), min(known[1], ended)
    return list(found.values())


# --- events -------------------------------------------------------------------------------------


def trace_events(
    records: Mapping[int, Record], offsets: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Return the events of each rank: its calls by group, and its messages.

    offsets: of the clocks, in nanoseconds. Event times are in microseconds since the first call, on
        the clock of the first rank.
    """
    first = min(
        (each["time_created_ns"] - offsets.get(record.clock, 0)
         for record in records.values() for each in (*record.calls, *record.messages)), default=0,
    )  # fmt: skip
    for rank, record in records.items():
        yield _named("process_name", f"rank {rank} {record.host}".strip(), rank)
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        begin = first + offsets.get(record.clock, 0)
        rows: dict[str, int] = {}
        for call in record.calls:
            group, desc = call["process_group"]
            if group not in rows:
                rows[group] = len(rows)
                yield _named("thread_name", f"group {group} {desc}", rank, rows[group])
            event = _event(call, "collective", rank, rows[group])
            started = call["time_discovered_started_ns"]
            if started:
                ended = call["time_discovered_completed_ns"] or max(record.written, started)
                span = {"ph": "X", "dur": (ended - started) / 1000}
            else:  # queued: the row shows the running call
                span = {"ph": "i", "s": "t"}
            yield event | span | {"ts": ((started or call["time_created_ns"]) - begin) / 1000}
        for number, message in enumerate(record.messages):  # they may overlap
            event = _event(message, "message", rank, 0) | {"id": f"{rank}.{number}"}
            created = message["time_created_ns"]
            ended = message["time_discovered_completed_ns"] or max(record.written, created)
            yield event | {"ph": "b", "ts": (created - begin) / 1000}
            yield event | {"ph": "e", "ts": (ended - begin) / 1000}


def _named(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _name(entry: Mapping[str, Any]) -> str:
    name: str = entry["profiling_name"].rpartition(":")[2]
    return name


def _event(entry: Mapping[str, Any], category: str, rank: int, row: int) -> dict[str, Any]:
    """Return an event without its times."""
    shown: dict[str, Any] = {
        "number": entry["collective_seq_id"],
        "state": entry["state"],
        "input_sizes": str(entry["input_sizes"]),
        "input_dtypes": str(entry["input_dtypes"]),
        "thread": entry.get("thread_name", ""),
    }
    if started := entry["time_discovered_started_ns"]:
        shown["queued_us"] = (started - entry["time_created_ns"]) / 1000
    for number, frame in enumerate(entry.get("frames") or []):
        shown[f"frame {number}"] = f"{frame['name']} at {frame['filename']}:{frame['line']}"
    name = _name(entry) + ("" if entry["state"] == "completed" else f" ({entry['state']})")
    return {"name": name, "cat": category, "pid": rank, "tid": row, "args": shown}
