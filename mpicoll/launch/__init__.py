"""Rank, size and the world communicator, whoever started the job."""

from __future__ import annotations

from mpicoll.launch.environment import check_world, local_rank
from mpicoll.launch.meeting import Meeting
from mpicoll.launch.world import start

__all__ = ["Meeting", "check_world", "local_rank", "start"]
