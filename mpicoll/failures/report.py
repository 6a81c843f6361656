"""The text of reports about hangs and lost ranks.

Reports are made from one snapshot per rank, a dict that node monitors exchange as JSON. Ranks in
the same state share a line, so a report is short for any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "LINES", "describe_call", "describe_end", "describe_exit", "describe_hang", "describe_job",
    "describe_loss", "describe_mismatch", "describe_rank", "describe_signal", "describe_survival",
    "format_ranks", "is_ended_by_mpi",
    "is_there", "parse_stacks",
]  # fmt: skip

#: State of a rank: rank, host, pid, main (its main thread), state (running, stopped, ending, done,
#: gone, silent), how (it has ended), calls (status_page.Cell of each group, with ``since``, seconds
#: inside), and stacks (frames of each thread, innermost first).
Snapshot = dict[str, Any]

#: Maximum number of lines of a report.
LINES = 40
#: Maximum number of frames of a stack, and of ranges of ranks in a line.
_FRAMES, _RUNS = 6, 8

#: Likely senders of signals.
_HINTS = {
    "SIGKILL": " (kill -9 or out of memory)",
    "SIGTERM": " (kill, a scheduler's time limit or a preemption)",
    "SIGHUP": " (its terminal was closed)",
    "SIGINT": " (Ctrl-C)",
}

#: Signals that are usually sent to a whole job.
_FOR_ALL = _HINTS.keys() - {"SIGKILL"}

#: Added to the class of the error in the exit code with which MPICH ends a process.
_MPI_ERROR = 128

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parse_stacks(text: str) -> dict[str, list[str]]:
    """Return the frames of each thread, by its number as text, from the output of faulthandler.

    Threads of mpicoll are omitted.
    """
    found: dict[str, list[str]] = {}
    frames: list[str] = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            frames = found.setdefault(str(int(begins[1], 16)), [])
        elif frame := _FRAME.match(line):
            frames.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    own = "/mpicoll/failures/watchdog.py:", "/mpicoll/core/progress.py:"
    return {
        thread: frames
        for thread, frames in found.items()
        if frames and not any(word in frame for frame in frames[-5:] for word in own)
    }


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as "rank 3" or "ranks 0-2, 5", shortened if there are many ranges."""
    runs: list[list[int]] = []
    ordered = sorted(ranks)
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_RUNS]]
    if left := sum(b - a + 1 for a, b in runs[_RUNS:]):
        texts.append(f"and {left} more")
    return f"rank{'s' * (len(ordered) != 1)} {', '.join(texts)}"


def describe_call(call: dict[str, Any]) -> str:
    """Describe a call: "call 3 of group 0: barrier"."""
    if not call["number"]:
        return f"no call of group {call['name']}"
    return f"call {call['number']} of group {call['name']}: {_words(call)}"


def _words(call: dict[str, Any]) -> str:
    from mpicoll.core.signature import (  # loads NumPy, which the monitor otherwise does not need
        describe,
        with_root,
    )

    return describe(with_root(call["kind"], call["root"]), call["sizes"])


def describe_end(how: str) -> str:
    """Describe the end of a process. how: name of a signal, "code N", or "" if it is unknown."""
    if not how:
        return "has ended; the system does not say how"
    if how.startswith("code "):
        return f"exited with code {how[5:]} and no message"
    return f"was killed by {how}{_HINTS.get(how, '')}"


def _last_call(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the call that a rank is in, else the last call of the group with the most calls.

    The number is 0 if the rank has only sent and received messages.
    """
    calls = [call for call in snapshot["calls"] if call["number"] or call["messages"]]
    return max(calls, key=lambda call: (call["inside"], call["number"]), default=None)


def _where(snapshot: Snapshot) -> str:
    call = _last_call(snapshot)
    if call is None:
        return "before its first call"
    return f"in {describe_call(call)}" if call["inside"] else _after(call)


def _after(call: dict[str, Any]) -> str:
    """Describe a group's last call and messages: "after call 3 of group 0: ..."."""
    parts = [describe_call(call)] if call["number"] or not call["messages"] else []
    if call["messages"]:
        rank, receives = divmod(call["last_message"], 2)
        many = f"{call['messages']} message{'s' * (call['messages'] > 1)}"
        which = f"{', the last one' if call['messages'] > 1 else ''} {'from' if receives else 'to'}"
        group = "" if parts else f" of group {call['name']}"
        parts.append(f"{many}{group}{which} {f'rank {rank - 1}' if rank else 'any rank'}")
    return f"after {' and '.join(parts)}"


def _who(ranks: Sequence[Snapshot], size: int) -> str:
    """Describe ranks of one node: "rank 1 of 3 (pid 77 on node)"."""
    pid = f"pid {ranks[0]['pid']} " if len(ranks) == 1 else ""
    return f"{format_ranks(one['rank'] for one in ranks)} of {size} ({pid}on {ranks[0]['host']})"


def describe_loss(lost: Sequence[Snapshot], size: int, is_first_known: bool = True) -> str:
    """Return the line that names the rank that was lost first, how, and in which call.

    lost: ranks of one node that have ended in the same way, in this order.
    is_first_known: the first one is the cause; else the line names all of them.
    """
    if is_first_known or len(lost) == 1:
        first = lost[0]
        return f"mpicoll: lost: {_who([first], size)} {describe_end(first['how'])}, {_where(first)}"
    how = _plural(describe_end(lost[0]["how"]))
    text = f"mpicoll: lost together: {_who(lost, size)} {how}, rank {lost[0]['rank']} first"
    calls: dict[str, list[int]] = {}
    for one in lost:
        calls.setdefault(_where(one), []).append(one["rank"])
    several = len(calls) > 1
    parts = [f"{format_ranks(those)} {call}" if several else call for call, those in calls.items()]
    return f"{text}, {'; '.join(parts[:_RUNS])}{'; ...' * (len(parts) > _RUNS)}"


def _plural(words: str) -> str:
    return re.sub("^has ", "have ", re.sub("^was ", "were ", words))


def describe_exit(ranks: Sequence[Snapshot], size: int, code: int) -> str:
    """Return the line that names the ranks of one node that end the job by ``sys.exit``."""
    return f"mpicoll: {_who(ranks, size)} exited with code {code} (sys.exit); the job ends"


def describe_survival(lost: Sequence[Snapshot], survival: str) -> str:
    """Return the line with the setting by which the job would have survived, "" if there is none.

    lost: as for describe_loss. survival: see launchers.py. A signal to the whole job has no remedy.
    """
    if not survival or lost[0]["how"] in _FOR_ALL:
        return ""
    return f"mpicoll: to survive a lost rank: {survival} (docs/reliability.md)"


def is_ended_by_mpi(lost: Snapshot) -> bool:
    """Return whether MPI has ended a rank after an error in a collective.

    MPICH does so for a truncated message, even if the communicator returns errors.
    """
    call, how = _last_call(lost), lost["how"]
    is_error = how.startswith("code ") and int(how[5:]) >= _MPI_ERROR
    return is_error and call is not None and bool(call["inside"])


def describe_mismatch(lost: Snapshot, snapshots: Iterable[Snapshot]) -> str:
    """Return the line that compares the ranks' calls after MPI has ended a rank in one of them.

    lost: that rank. snapshots: of all ranks.
    """
    call = _last_call(lost)
    assert call is not None
    found = {
        snapshot["rank"]: one
        for snapshot in snapshots
        for one in snapshot["calls"]
        if one["group"] == call["group"]
    }
    is_same_call = {each["number"] for each in found.values()} == {call["number"]}
    is_mismatch = is_same_call and len({_words(each) for each in found.values()}) > 1
    calls: dict[str, list[int]] = {}
    for rank, each in found.items():
        calls.setdefault(_words(each) if is_mismatch else describe_call(each), []).append(rank)
    texts = "; ".join(f"{format_ranks(ranks)}: {words}" for words, ranks in calls.items())
    detail = "MPICOLL_DEBUG=DETAIL compares every call before it runs"
    if is_mismatch:
        return (
            "mpicoll: collective mismatch: the ranks made different calls as "
            f"{describe_call(call).partition(':')[0]}: {texts}. MPI ended the job; {detail}"
        )
    return (
        "mpicoll: MPI ended the process after an error in a call, most likely a collective "
        f"mismatch in sizes. The last calls: {texts}. {detail}"
    )


def describe_signal(name: str, ranks: Sequence[int], size: int, host: str) -> str:
    """Return the line that reports a signal that the program handles."""
    return (
        f"mpicoll: {format_ranks(ranks)} of {size} (on {host}) received {name}"
        f"{_HINTS.get(name, '')}; the program's handler decides whether the job ends"
    )


def is_there(snapshot: Snapshot, call: dict[str, Any]) -> bool:
    """Return whether a rank is inside this call."""
    same = "group", "number", "kind", "root"
    return any(
        one["inside"] and all(one[key] == call[key] for key in same) for one in snapshot["calls"]
    )


def _describe_state(snapshot: Snapshot, call: dict[str, Any] | None, frames: int) -> list[str]:
    """Describe the state of a rank in lines. The first one follows the list of ranks."""
    mine = [one for one in snapshot["calls"] if call and one["group"] == call["group"]]
    last = _after(mine[0]) if mine else _where(snapshot)
    if snapshot["state"] == "gone":
        return [f"gone: {describe_end(snapshot['how'])}, {_where(snapshot)}"]
    if snapshot["state"] == "silent":
        return ["no answer: the host or its node monitor has ended"]
    state = {
        "stopped": "stopped, as by SIGSTOP, ", "done": "has destroyed its groups, ",
        "ending": "is about to end the job, ",
    }.get(snapshot["state"], "")  # fmt: skip
    inside = [one for one in snapshot["calls"] if one["inside"]]
    text = f"in {describe_call(inside[0])}" if inside else last
    lines = [f"{state}{text}"]
    stacks = dict(snapshot["stacks"])
    main = stacks.pop(str(snapshot["main"]), [])
    if main:
        if not inside:
            lines[0] = f"{state}in Python, {text}"
        lines += [f"    {frame}" for frame in main[:frames]]
    for others in list(stacks.values())[: 3 if frames == _FRAMES else None]:
        lines += [f"    another thread: {others[0]}"]
        lines += [f"      {frame}" for frame in others[1:frames]] if frames != _FRAMES else []
    return lines


def _group_by_description(
    snapshots: Iterable[Snapshot], call: dict[str, Any] | None, frames: int
) -> list[tuple[list[int], list[str]]]:
    """Group the ranks by their descriptions; the rarest come first."""
    found: dict[tuple[str, ...], list[int]] = {}
    for one in snapshots:
        found.setdefault(tuple(_describe_state(one, call, frames)), []).append(one["rank"])
    return sorted(((ranks, list(lines)) for lines, ranks in found.items()), key=_order)


def _order(entry: tuple[list[int], list[str]]) -> tuple[int, int]:
    return len(entry[0]), min(entry[0])


def _fit(entries: list[tuple[list[int], list[str]]], room: int) -> list[str]:
    """Return the descriptions in at most ``room`` lines."""
    lines: list[str] = []
    for k, (ranks, story) in enumerate(entries):
        left = room - len(lines) - (k + 1 < len(entries))
        if left < 1:
            rest = [rank for those, _ in entries[k:] for rank in those]
            lines.append(f"  {format_ranks(rest)}: {len(entries) - k} other descriptions")
            break
        head, *tail = story
        lines += [f"  {format_ranks(ranks)}: {head}", *(f"  {each}" for each in tail[: left - 1])]
    return lines


def describe_rank(snapshot: Snapshot, call: dict[str, Any]) -> str:
    """Describe the state of a rank in one line, while other ranks wait in a call."""
    return "in this call" if is_there(snapshot, call) else _describe_state(snapshot, call, 0)[0]


def describe_hang(
    snapshots: Sequence[Snapshot], call: dict[str, Any], seconds: float, last: str = ""
) -> str:
    """Return the report of a call in which ranks wait, in at most LINES lines.

    call: as in a snapshot. seconds: of waiting so far. last: the last line.
    """
    members = [
        one for one in snapshots if any(each["group"] == call["group"] for each in one["calls"])
    ]
    there = [one["rank"] for one in members if is_there(one, call)]
    missing = [one for one in members if not is_there(one, call)]
    missing += [one for one in snapshots if one["state"] == "silent"]
    lines = [
        f"mpicoll: {format_ranks(there)} of group {call['name']} ({call['size']} ranks) "
        f"wait{'s' * (len(there) == 1)} for {seconds:.0f} s in {describe_call(call)}"
    ]
    if not missing:
        lines.append("  all ranks are in this call")
    lines += _fit(_group_by_description(missing, call, _FRAMES), LINES - 1 - bool(last))
    return "\n".join([*lines, *([last] if last else [])])


def describe_job(snapshots: Sequence[Snapshot], has_stacks: bool) -> str:
    """Describe all ranks, for ``python -m mpicoll watch``."""
    entries = _group_by_description(snapshots, None, 1 << 30 if has_stacks else _FRAMES)
    return "\n".join(_fit(entries, 1 << 30 if has_stacks else LINES))
