"""Rank, size and the world communicator under any launcher."""

from __future__ import annotations

from mpicoll.launch.environment import (
    RUN_OPTION,
    TORCH_VARIABLES,
    check_world,
    fill_environment,
    find_torch_variables,
    has_own_gpus,
    is_child_of_rank,
    is_started_by_mpi,
    was_filled,
)
from mpicoll.launch.launchers import (
    announced,
    find_launcher,
    find_local_rank,
    find_rank,
    is_launcher_variable,
)
from mpicoll.launch.rendezvous import (
    GivenRank,
    Rendezvous,
    find_rendezvous,
    loopback,
    read_rank,
)
from mpicoll.launch.roll_call import run_on_each
from mpicoll.launch.session import current
from mpicoll.launch.spawned_ranks import has_grown, join
from mpicoll.launch.world import (
    call_before_finalize,
    finalize_within,
    is_serialized,
    master_address,
    notify_failure,
    skip_finalize,
    start,
    warn_if_serialized,
)

__all__ = [
    "RUN_OPTION", "TORCH_VARIABLES", "GivenRank", "Rendezvous", "announced",
    "call_before_finalize", "check_world", "current", "fill_environment", "finalize_within",
    "find_launcher", "find_local_rank", "find_rank", "find_rendezvous", "find_torch_variables",
    "has_grown", "has_own_gpus", "is_child_of_rank", "is_launcher_variable", "is_serialized",
    "is_started_by_mpi", "join", "loopback", "master_address", "notify_failure", "read_rank",
    "run_on_each", "skip_finalize", "start", "warn_if_serialized", "was_filled",
]  # fmt: skip
