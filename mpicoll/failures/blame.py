"""Find the first cause of the end of a job. Ranks that end after it are its victims.

A launcher that sees one rank end kills the remaining ranks within milliseconds, often before the
system has reported the end of the first rank. So the monitor uses the first sign of each end: the
closing of the rank's bell (a pipe). A launcher cannot react before it, and the kernel reports such
events in their order. A rank that ends the job itself, by an exception or ``sys.exit``, first
writes the time into its page.

The monitor has to distinguish a signal to one rank from a signal to all ranks, as by a launcher or
a scheduler. In the first case the other ranks of the node are still alive at the first sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpicoll.signals import JOB_SIGNALS

__all__ = ["Loss", "build_loss", "find_cause"]

Snapshot = dict[str, Any]


class Loss(NamedTuple):
    """Ranks of a node have ended without a message."""

    when: float  # the first sign of it, in seconds on the monotonic clock of this node
    ranks: list[Snapshot]  # in the order of the first signs
    alone: bool  # the first one ended by itself: no signal had reached other ranks of the node


def build_loss(when: float, ranks: Sequence[Snapshot], alone: bool) -> Loss:
    """Build the loss of ranks of a node that have ended without a message, in their order.

    alone: when the first sign came, no other rank of the node was ending.
    """
    how = ranks[0]["how"]
    alike = [one for one in ranks if one["how"] == how]
    # A launcher does not end processes by exit codes or crashes. The first fatal signal that is
    # sent to a process decides how it ends: if others have ended by another one, this one was not
    # sent to them before.
    sent = how == "SIGKILL" or how in JOB_SIGNALS
    alone = alone or not sent or (len(alike) == 1 and len(ranks) > 1)
    return Loss(when, [ranks[0]] if alone else alike, alone)


def find_cause(losses: Sequence[Loss], ended_at: float) -> Loss | None:
    """Return the loss that is the first cause, as far as it is known; None if there is none.

    ended_at: when the first rank began to end the job itself, or the launcher has ended.

    A rank that ended alone counts before ranks of another node that ended together, because a
    launcher kills the ranks of the other nodes together.
    """
    before = [one for one in losses if one.when < ended_at]
    return min(before, key=lambda one: (not one.alone, one.when), default=None)
