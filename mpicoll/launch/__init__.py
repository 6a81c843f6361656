"""Rank, size and the world communicator, whoever started the job."""

from __future__ import annotations

from mpicoll.launch.environment import by_mpi, check_world, fill_environment, local_rank
from mpicoll.launch.meeting import Meeting
from mpicoll.launch.world import start

__all__ = ["Meeting", "by_mpi", "check_world", "fill_environment", "local_rank", "start"]
