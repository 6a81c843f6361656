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
from mpicoll.launch.world import leave_running, master, start

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
    "leave_running",
    "local_rank",
    "loopback",
    "master",
    "meeting",
    "said",
    "start",
    "told",
]
