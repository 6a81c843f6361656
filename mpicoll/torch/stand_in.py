"""mpicoll in the place of backends of torch's own, for scripts that name those.

Every group of torch.distributed is made by one function of it, which is told the name of the
backend. What stands in its place says "mpicoll" to it where the name is installed, and enters the
name that was asked for in torch's table of groups: libraries compare it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as c10d
from torch.distributed import distributed_c10d

from mpicoll import launch
from mpicoll.output import write_lines
from mpicoll.torch.names import installed, served
from mpicoll.torch.rendezvous import meet

__all__ = ["install", "tell_if_unused"]

#: A group was asked for, of whatever backend.
_used = False


def install(names: set[str]) -> None:
    """Has these backends, in lower case, mean mpicoll in every group made from now on."""
    if not installed:
        distributed_c10d._new_process_group_helper = _standing_in(
            distributed_c10d._new_process_group_helper
        )
    installed.update(names)
    if "mpi" in installed:
        distributed_c10d._MPI_AVAILABLE = True  # scripts ask, and so does init_process_group


def _standing_in(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*positional: Any, **named: Any) -> Any:
        global _used
        _used = True
        given = signature.bind(*positional, **named).arguments
        asked = given["backend"]
        if served(asked) == asked:
            return original(*positional, **named)
        given["backend"] = served(asked)
        if given["group_size"] < 0:  # torch leaves its own MPI backend to find the ranks
            given["store"], given["group_rank"], given["group_size"] = _meet(given["timeout"])
        group, store = original(**given)
        if store is not None:  # a member
            world = distributed_c10d._world
            world.pg_map[group] = asked, store
            world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(asked))
        return group, store

    return make


#: What env:// needs.
_ENVIRONMENT = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _meet(timeout: Any) -> Any:
    """A store, this rank and size: MPI's own, unless a launcher of another kind told them."""
    if not launch.is_started_by_mpi() and os.environ.keys() >= _ENVIRONMENT:
        store, rank, size = next(c10d.rendezvous("env://", timeout=timeout))
    else:
        store, rank, size = meet(timeout)
    return c10d.PrefixStore("default_pg", store), rank, size


def tell_if_unused() -> None:
    """At the end: says on rank 0 that all ranks of a launcher ran the script each for itself.

    That is what libraries do, and do not say, that were not told to look for other ranks.
    """
    rank, size, _ = launch.announced()
    failed = hasattr(sys, "last_type")  # which the interpreter has said
    if rank != "0" or size in ("1", "?") or _used or failed or "mpi4py.MPI" in sys.modules:
        return
    write_lines(
        f"python -m mpicoll run: warning: {size} ranks were started, and the script made no "
        "process group: each ran it alone. Where a library is to make it, tell it so (Accelerate "
        "on the CPU: Accelerator(cpu=True) or ACCELERATE_USE_CPU=1)"
    )
