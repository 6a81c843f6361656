"""The text of reports about hangs and lost ranks.

Reports are made from one snapshot per rank, a dict that node monitors exchange as JSON. Ranks in
the same state share a line, so a report is short for any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mpicoll.machine import format_ranges, ranks_by_value

#: State of a rank: rank, host, pid, main (its main thread), state (running, stopped, ending, done,
#: gone, silent), how (it has ended), calls (status_page.Cell of each group), and stacks (frames of
#: each thread, innermost first).
Snapshot = dict[str, Any]

#: The end of messages about mismatches that were found late.
DETAIL_HINT = "MPICOLL_DEBUG=DETAIL compares every call before it runs"
#: Maximum number of descriptions in a report, of frames of a stack, and of ranges of ranks in a
#: line.
_DESCRIPTIONS, _FRAMES, _RUNS = 5, 6, 8

#: Likely senders of signals.
_HINTS = {
    "SIGKILL": " (kill -9 or out of memory)",
    "SIGTERM": " (kill, a scheduler's time limit or a preemption)",
    "SIGHUP": " (its terminal was closed)",
    "SIGINT": " (Ctrl-C)",
}

#: The main functions of mpicoll's own threads.
_OWN = "/mpicoll/failures/watchdog.py:", "/mpicoll/core/progress.py:"


def parse_stacks(text: str) -> dict[str, list[str]]:
    """Return the frames of the program's threads, by number as text, from faulthandler's output."""
    found = {}
    for thread in re.split("^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[1:]:
        frames = re.findall(r'^  File "(.*)", line (\S+) in (.*)$', thread, re.MULTILINE)
        lines = [f"{file}:{line} in {name}" for file, line, name in frames]
        if lines and not any(word in line for line in lines[-5:] for word in _OWN):
            found[str(int(thread.split()[0], 16))] = lines
    return found


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as "rank 3" or "ranks 0-2, 5", shortened if there are many ranges."""
    ordered = sorted(ranks)
    runs = format_ranges(ordered).split(",")
    shown = runs[:_RUNS]
    if len(runs) > _RUNS:
        last = int(shown[-1].rpartition("-")[2])
        shown.append(f"and {sum(rank > last for rank in ordered)} more")
    return f"rank{'s' * (len(ordered) != 1)} {', '.join(shown)}"


def describe_by_rank(texts: Iterable[str], ranks: Iterable[int] | None = None) -> str:
    """Join one text per rank as "ranks 0, 2: TEXT; rank 1: TEXT". ranks: by default 0, 1, ..."""
    found = ranks_by_value(texts, ranks)
    return "; ".join(f"{format_ranks(group)}: {text}" for text, group in found.items())


def _describe_call(call: dict[str, Any]) -> str:
    """Describe a call: "call 3 of group 0: barrier"."""
    if not call["number"]:
        return f"no call of group {call['name']}"
    # It loads NumPy, which the monitor otherwise does not need.
    from mpicoll.core.signature import describe, with_root

    words = describe(with_root(call["kind"], call["root"]), call["sizes"])
    return f"call {call['number']} of group {call['name']}: {words}"


def describe_end(how: str) -> str:
    """Describe the end of a process. how: name of a signal, "code N", or "" if it is unknown."""
    if not how:
        return "has ended; the system does not say how"
    if how.startswith("code "):
        return f"exited with code {how[5:]} and no message"
    return f"was killed by {how}{_HINTS.get(how, '')}"


def _last_call(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the call that a rank is in, else the last call of the group with the most calls."""
    calls = [call for call in snapshot["calls"] if call["number"]]
    return max(calls, key=lambda call: (call["inside"], call["number"]), default=None)


def _where(snapshot: Snapshot) -> str:
    call = _last_call(snapshot)
    if call is None:
        return "before its first call"
    return f"{'in' if call['inside'] else 'after'} {_describe_call(call)}"


def describe_loss(lost: Sequence[Snapshot], size: int, is_first_known: bool = True) -> str:
    """Return the line that names the lost rank, how it ended, and in which call.

    lost: ranks of one node that have ended in the same way, in this order. The line names all of
        them unless the first one is known to be the cause.
    """
    first, end = lost[0], describe_end(lost[0]["how"])
    if is_first_known or len(lost) == 1:
        who = f"rank {first['rank']} of {size} (pid {first['pid']} on {first['host']})"
        return f"mpicoll: lost: {who} {end}, {_where(first)}"
    who = f"{format_ranks(one['rank'] for one in lost)} of {size} (on {first['host']})"
    end = re.sub("^has ", "have ", re.sub("^was ", "were ", end))
    return f"mpicoll: lost together: {who} {end}, rank {first['rank']} first, {_where(first)}"


def is_ended_by_mpi(lost: Snapshot) -> bool:
    """Return whether a rank has exited inside a call.

    MPICH does so after a truncated message, even if the communicator returns errors.
    """
    call = _last_call(lost)
    return call is not None and bool(call["inside"]) and lost["how"].startswith("code ")


def is_there(snapshot: Snapshot, call: dict[str, Any] | None) -> bool:
    """Return whether a rank is inside this call. None: False."""
    same = "group", "number", "kind", "root"
    return call is not None and any(
        one["inside"] and all(one[key] == call[key] for key in same) for one in snapshot["calls"]
    )


def _describe_state(snapshot: Snapshot, call: dict[str, Any] | None, whole: bool) -> list[str]:
    """Describe the state of a rank in lines. The first one follows the list of ranks.

    call: other ranks wait in it. whole: with all frames of all threads.
    """
    if snapshot["state"] == "gone":
        return [f"gone: {describe_end(snapshot['how'])}, {_where(snapshot)}"]
    if snapshot["state"] == "silent":
        return ["no answer: the host or its node monitor has ended"]
    state = {
        "stopped": "stopped, as by SIGSTOP, ", "done": "has destroyed its groups, ",
        "ending": "is about to end the job, ",
    }.get(snapshot["state"], "")  # fmt: skip
    inside = [one for one in snapshot["calls"] if one["inside"]]
    mine = [one for one in snapshot["calls"] if call and one["group"] == call["group"]]
    if inside:
        text = f"in {_describe_call(inside[0])}"
    else:
        text = f"after {_describe_call(mine[0])}" if mine else _where(snapshot)
    stacks = dict(snapshot["stacks"])
    main = stacks.pop(str(snapshot["main"]), [])
    python = "in Python, " if main and not inside else ""
    lines = [f"{state}{python}{text}"]
    lines += [f"    {frame}" for frame in (main if whole else main[:_FRAMES])]
    for first, *rest in stacks.values() if whole else ():
        lines += [f"    another thread: {first}", *(f"      {frame}" for frame in rest)]
    return lines


def describe_states(
    snapshots: Sequence[Snapshot], call: dict[str, Any] | None = None, whole: bool = False
) -> str:
    """Describe the states of ranks; ranks in the same state share a description.

    The rarest come first. Lists at most ``_DESCRIPTIONS`` unless ``whole``.
    """
    texts = (tuple(_describe_state(one, call, whole)) for one in snapshots)
    found = ranks_by_value(texts, (one["rank"] for one in snapshots))
    entries = sorted(found.items(), key=lambda entry: (len(entry[1]), min(entry[1])))
    shown = entries if whole else entries[:_DESCRIPTIONS]
    lines = []
    for (head, *tail), ranks in shown:
        lines += [f"  {format_ranks(ranks)}: {head}", *(f"  {each}" for each in tail)]
    if rest := [rank for _, ranks in entries[len(shown) :] for rank in ranks]:
        lines.append(f"  {format_ranks(rest)}: {len(entries) - len(shown)} other descriptions")
    return "\n".join(lines)


def describe_rank(snapshot: Snapshot, call: dict[str, Any]) -> str:
    """Describe the state of a rank in one line, while other ranks wait in a call."""
    return "in this call" if is_there(snapshot, call) else _describe_state(snapshot, call, False)[0]


def describe_hang(snapshots: Sequence[Snapshot], call: dict[str, Any]) -> str:
    """Return the report of a late call."""
    members = [
        one for one in snapshots if any(each["group"] == call["group"] for each in one["calls"])
    ]
    there = [one["rank"] for one in members if is_there(one, call)]
    missing = [one for one in members if not is_there(one, call)]
    missing += [one for one in snapshots if one["state"] == "silent"]
    waits = "waits" if len(there) == 1 else "wait"
    return (
        f"mpicoll: {format_ranks(there)} of group {call['name']} ({call['size']} ranks) "
        f"{waits} for {call['late_ms'] / 1000:.0f} s in {_describe_call(call)}\n"
        + (describe_states(missing, call) or "  all ranks are in this call")
    )
