"""Aliases: names of torch's own backends that mean mpicoll, for scripts that use those names.

One function of torch.distributed makes every group, from the name of its backend. A wrapper around
it passes "mpicoll" for an alias, and enters the name that the script used in torch's table of
groups, because libraries compare it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch.distributed import distributed_c10d

from mpicoll import launch
from mpicoll.output import write_lines
from mpicoll.torch import NAME
from mpicoll.torch.caller_frames import find_variable

__all__ = ["explain_missing_variable", "install", "resolve_backend", "warn_if_unused"]

#: The names that mean mpicoll besides its own.
_aliases: set[str] = set()
#: Whether torch itself was built with MPI.
_has_own_mpi = distributed_c10d._MPI_AVAILABLE
#: Whether the program has made a group, of any backend.
_is_used = False


def install(names: set[str]) -> None:
    """Make these names, in lower case, mean mpicoll in every group made from now on."""
    if not _aliases:
        distributed_c10d._new_process_group_helper = _wrap(
            distributed_c10d._new_process_group_helper
        )
    _aliases.update(names)
    # Accelerate prefers "mpi" to "gloo" if it is available. With "mpi" torch prints a warning, and
    # Accelerate calls functions that torch has deprecated.
    if "mpi" in _aliases:
        distributed_c10d._MPI_AVAILABLE = _has_own_mpi or "gloo" not in _aliases


def resolve_backend(requested: str) -> str:
    """Return the backend, or backends by device, that a group is made of.

    "gloo" and "cpu:gloo,cuda:nccl" become "mpicoll" if those names are aliases, and so does an
    unspecified backend if torch would choose one of them. Any other name is returned unchanged. So
    are all names in processes that ranks of mpirun start, such as those of asynchronous
    checkpoints.
    """
    if not _aliases or launch.is_child_of_rank():
        return requested
    if requested == c10d.Backend.UNDEFINED:
        parts = str(distributed_c10d.BackendConfig(requested)).split(",")
    else:
        parts = requested.lower().split(",")
    pairs = [part.rpartition(":") for part in parts]
    if not any(name in _aliases for *_, name in pairs):
        return requested
    names = [NAME if name in _aliases else name for *_, name in pairs]
    if set(names) == {NAME}:
        return NAME
    return ",".join("".join((*pair[:2], name)) for pair, name in zip(pairs, names, strict=True))


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        global _is_used
        _is_used = True
        arguments = signature.bind(*args, **kwargs).arguments
        requested = arguments["backend"]
        backend = resolve_backend(requested)
        if backend == requested:
            return original(*args, **kwargs)
        arguments["backend"] = backend
        if arguments["group_size"] < 0:  # torch leaves it to its own MPI backend to find the ranks
            store, rank, size = _rendezvous(arguments["timeout"])
            arguments |= {"store": store, "group_rank": rank, "group_size": size}
        group, store = original(**arguments)
        if store is not None:  # a member
            world = distributed_c10d._world
            world.pg_map[group] = requested, store
            world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(requested))
        return group, store

    return make_group


def _rendezvous(timeout: timedelta) -> tuple[c10d.Store, int, int]:
    """Return a store, this rank and size as init_process_group does for all backends but "mpi"."""
    store, init_method, rank, size = (
        find_variable("init_process_group", name)
        for name in ("store", "init_method", "rank", "world_size")
    )
    if store is None:
        store, rank, size = next(
            c10d.rendezvous(init_method or "env://", rank, size, timeout=timeout)
        )
        store.set_timeout(timeout)
    return c10d.PrefixStore("default_pg", store), rank, size


def explain_missing_variable() -> None:
    """Explain a KeyError for a variable of torchrun: print at exit, on rank 0, why it is unset."""
    error = getattr(sys, "last_value", None)
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if name not in launch.TORCH_VARIABLES or name in os.environ:
        return
    if launch.find_rank() not in ("", "0"):
        return
    launcher = launch.find_launcher()
    if launcher is None:
        why = "no launcher started this process. Start it with mpirun or torchrun, or"
    else:
        why = f"{launcher.name} does not provide it before init_process_group:"
    write_lines(f"python -m mpicoll run: {name} is not set: {why} set it for all ranks")


def warn_if_unused() -> None:
    """Warn at exit, on rank 0, if every rank of a launcher ran the whole script by itself.

    Libraries that were not told to look for other ranks do so without a message.
    """
    rank, size, _ = launch.announced()
    failed = hasattr(sys, "last_type")  # the interpreter has printed the exception
    if rank != "0" or size == "1" or _is_used or failed or "mpi4py.MPI" in sys.modules:
        return
    write_lines(
        f"python -m mpicoll run: warning: {size} ranks were started, and the script made no "
        "process group: each ran it alone. Where a library is to make it, tell it so"
    )
