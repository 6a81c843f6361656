"""Aliases: names of torch's own backends that select mpicoll, for scripts that use these names.

One function of torch.distributed creates every group from the name of its backend. A wrapper
replaces an alias by "mpicoll", and puts the original name into torch's table of groups, because
libraries compare it.
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

from mpicoll.launch.environment import TORCH_VARIABLES, is_child_of_rank
from mpicoll.launch.launchers import announced, find_launcher, find_rank
from mpicoll.output import write_lines
from mpicoll.torch import NAME
from mpicoll.torch.internals import find_variable

#: Names that select mpicoll.
_aliases: set[str] = set()
#: Whether torch itself was built with MPI.
_has_own_mpi = distributed_c10d._MPI_AVAILABLE
#: Whether the program has created a group of any backend.
_is_used = False


def install(names: set[str]) -> None:
    """Make these names, in lower case, select mpicoll in all groups created later."""
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
    """Return the backend, or backends by device, of a group.

    "gloo" and "cpu:gloo,cuda:nccl" become "mpicoll" if these names are aliases. So does an
    unspecified backend if torch would choose an alias. Other names are returned unchanged. In a
    process that a rank of mpirun has started, such as an async checkpoint, all names are returned
    unchanged.
    """
    if not _aliases or is_child_of_rank():
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
        if arguments["group_size"] < 0:  # for torch's own MPI backend, which gets them from MPI
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
    """Return a store, rank and size, as init_process_group does for backends other than "mpi"."""
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
    """At exit on rank 0, after a KeyError for a variable of torchrun, print why it is not set."""
    error = getattr(sys, "last_value", None)
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if name not in TORCH_VARIABLES or name in os.environ:
        return
    if find_rank() not in ("", "0"):
        return
    launcher = find_launcher()
    if launcher is None:
        why = "no launcher started this process. Start it with mpirun or torchrun, or"
    else:
        why = f"{launcher.name} does not provide it before init_process_group:"
    write_lines(f"python -m mpicoll run: {name} is not set: {why} set it for all ranks")


def warn_if_unused() -> None:
    """Warn at exit, on rank 0, if ranks were started but the script created no group.

    Libraries that were not configured for several ranks do this without a message.
    """
    rank, size, _ = announced()
    failed = hasattr(sys, "last_type")  # the interpreter has printed the exception
    if rank != "0" or size == "1" or _is_used or failed or "mpi4py.MPI" in sys.modules:
        return
    write_lines(
        f"python -m mpicoll run: warning: {size} ranks were started, but the script created no "
        "process group, so each rank ran it alone. If a library creates it, configure the library"
    )
