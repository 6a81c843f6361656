"""Rank, size and the world communicator, whoever started the job."""

from __future__ import annotations

from mpicoll.launch.environment import (
    beside_ranks,
    by_mpi,
    by_torchrun,
    check_world,
    fill_environment,
    filled,
    local_rank,
    said,
)
from mpicoll.launch.meeting import Meeting, loopback
from mpicoll.launch.methods import meeting, told
from mpicoll.launch.session import addresses, current
from mpicoll.launch.world import (
    in_turns,
    leave_running,
    master,
    start,
    tell_at_finalize,
    warn_of_turns,
)

__all__ = [
    "Meeting",
    "addresses",
    "beside_ranks",
    "by_mpi",
    "by_torchrun",
    "check_world",
    "current",
    "fill_environment",
    "filled",
    "in_turns",
    "leave_running",
    "local_rank",
    "loopback",
    "master",
    "meeting",
    "said",
    "start",
    "tell_at_finalize",
    "told",
    "warn_of_turns",
]
