"""Comparison of the ranks' calls, so that a collective mismatch is an error on every rank.

MPI does not check that ranks agree on operation, dtype, reduction, root and count. Some libraries
abort, some reduce integers as floats, some deliver the message of one call to another call. So
every rank keeps a record of its calls, and at intervals (``STRIDE``) all ranks compare a digest of
the calls since the last comparison.

Which calls begin with a comparison depends only on data that all ranks share: the call number and
the debug level that the previous comparison has agreed on. Comparisons use the communicator of
point-to-point messages, so that they cannot match the data of ranks in another call.

Ranks that share memory compare every call there before it begins, and keep no record: the route
does it if it uses this memory, else ``group.agree``. Calls that only enqueue device work do
not wait for other hosts: a stride of them is compared together.
"""

from __future__ import annotations

import sys
from array import array

from mpicoll import control_messages
from mpicoll.core.debug_level import DebugLevel, get_debug_level
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.signature import describe, encode_comparison, with_root
from mpicoll.errors import MismatchError
from mpicoll.failures.report import DETAIL_HINT, describe_by_rank
from mpicoll.kernels.calls import NO_CALL, RecordEntry
from mpicoll.output import format_count
from mpicoll.serialized_mpi import with_wait

#: Each of a group's first calls is compared, then the record of each stride of calls. The first
#: entry of a record is the last call before it, or the digest of all earlier calls.
FIRST, STRIDE = 64, 64


def digest(calls: tuple[tuple[int, ...], ...]) -> int:
    """Return a 62-bit hash of call records, the same on every rank.

    Python's hash of a tuple of ints depends neither on the process nor, from 3.8 on, the version.
    """
    return hash(calls) & (1 << 62) - 1


def check(group: ProcessGroup) -> None:
    """Compare the calls since the last comparison on all ranks.

    All ranks call this with the group's lock held, before the last call of their records runs.
    Raises MismatchError on all ranks if the calls differ.
    """
    if group.error is not None:
        raise group.failure()
    calls = tuple(group.recent)
    number = calls[-1][0]
    level = int(get_debug_level())
    agreed, mine, shared = True, digest(calls), group.resources.find("shared")
    last = encode_comparison(calls[-1][1], calls[-1][3], level)
    # Shared memory takes a third of the time of MPI.
    if group.size() > 1 and not (shared and shared.compare(last, mine)):
        MPI = sys.modules["mpi4py.MPI"]  # an import statement takes as long as the rest
        # One reduction: if all digests are equal, the greatest is also the least.
        both = array("q", (mine, -mine, level))  # NumPy takes three times as long
        group.wait_for(group.messages.Iallreduce(MPI.IN_PLACE, [both, 3, MPI.INT64_T], MPI.MAX))
        agreed, level = both[0] == -both[1], both[2]
    group.stride = 1 if level == DebugLevel.DETAIL else STRIDE
    group.next_check = number + (1 if number < FIRST else group.stride)
    group.recent = [calls[-1] if agreed else (number, -1, 0, 0)]
    if not agreed:
        raise MismatchError(_describe_difference(group, calls))
    if shared:
        group.agree = shared.agree
        group.compare_each()


def is_due(group: ProcessGroup) -> bool:
    """Return whether the group's next call, which only enqueues device work, compares calls."""
    if group.compared:
        return group.size() > 1 and len(group.unmet) + 1 >= group.stride
    return group.size() > 1 and group.sequence + 1 >= group.next_check


def agree_later(group: ProcessGroup, kind: int, sizes: int, root: int) -> None:
    """Add a call that only enqueues device work to the next comparison.

    All ranks call this with the group's lock held. If the calls differ, the group fails and all
    ranks raise MismatchError, because results may be wrong.
    """
    if group.error is not None:
        raise group.failure()
    group.unmet.append((kind, sizes, root))
    if len(group.unmet) < group.stride:
        return
    shared, calls = group.resources.find("shared"), digest(tuple(group.unmet))
    group.unmet = []
    if not shared.compare(encode_comparison(kind, root, 0), calls):
        error = MismatchError(
            f"rank {group.rank()} of group {group.group_name}: collective mismatch: the "
            f"ranks made different calls among the latest {group.stride} calls that only enqueue "
            "device work. Their results may be wrong on any rank; the group cannot be used any "
            f"more. {DETAIL_HINT}"
        )
        group.fail(error)
        shared.leave()
        raise group.failure()


def drop_last_call(group: ProcessGroup) -> None:
    """Remove the last call from the record, because all ranks have raised a mismatch for it."""
    if group.compared:
        group.drop_last()
        return
    *calls, (number, *_) = group.recent
    if calls:  # else the comparison has begun a new record
        group.recent = [(number, -1, digest(tuple(calls)), 0)]


def _describe_difference(group: ProcessGroup, calls: tuple[RecordEntry, ...]) -> str:
    """Describe the first call that differs between the ranks.

    Fails the group if more calls have followed: their results may be wrong.
    """
    comm = with_wait(group.messages, group.wait_for)
    own = [digest(calls[: n + 1]) for n in range(len(calls))]
    digests = control_messages.allgather(comm, own, list[int])
    longest, same = max(map(len, digests)), 0
    while same < longest and all(each[same : same + 1] == own[same : same + 1] for each in digests):
        same += 1
    mine = calls[same] if same < len(calls) else NO_CALL
    differing = control_messages.allgather(comm, (mine[0], describe_call(mine)), tuple[int, str])
    number = max(number for number, _ in differing)
    text = (
        f"rank {group.rank()} of group {group.group_name}: collective mismatch: the ranks made "
        f"different calls as call {number} of the group: "
        f"{describe_by_rank(text for _, text in differing)}"
    )
    later = longest - same - 1
    if later > 0:
        text += (
            f". It was found {format_count(later, 'call')} later: the results of the group's calls "
            "since then may be wrong on any rank, and the group cannot be used any more. "
            f"{DETAIL_HINT}"
        )
        group.fail(MismatchError(text))
    return text


def describe_call(call: RecordEntry) -> str:
    """Describe one entry of a call record."""
    number, kind, sizes, root = call
    if number == 0:
        return "no call"
    return "a call that differed" if kind < 0 else describe(with_root(kind, root), sizes)
