"""A store of torch's for ranks that MPI's launcher started."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as c10d

from mpicoll import control_messages, launch
from mpicoll.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Rendezvous", "keep_store", "open_store"]

#: A store, this rank and the number of ranks.
Rendezvous = tuple[c10d.Store, int, int]

#: The store of this process, once it is open, and the number of calls of ``open_store`` so far.
_store: c10d.TCPStore | None = None
_opened = 0


def open_store(
    timeout: timedelta, given: launch.GivenRank | None = None, renumbers: bool = True
) -> Rendezvous:
    """Start MPI; return a store, this rank and the number of ranks. All of MPI's ranks call.

    given: the rank and size that this process was given; None for MPI's own.
    renumbers: number the ranks as they were given; else they have to agree with MPI's.

    The store is torch's own: parts of torch.distributed need one, mpicoll does not. It is kept
    until the process ends, because other ranks may still read it after its server has destroyed its
    groups. Each call uses keys of its own.

    Raises LaunchError on all ranks if what one was given cannot be.
    """
    global _store, _opened
    rank, world_size = (None, None) if given is None else (given.rank, given.world_size)

    def check(world: MPI.Intracomm) -> None:
        own = None if renumbers else world.Get_rank()
        for name, value, found in (("rank", rank, own), ("world_size", world_size, world.size)):
            if None not in (value, found) and value != found:
                raise LaunchError(
                    f"init_process_group: {name}={value} disagrees with MPI's own, {found}; leave "
                    "it out"
                )
        launch.check_world(world.size)

    requested = rank if renumbers else None
    with launch.start(limit=timeout.total_seconds(), prepare=check, rank=requested) as world:
        own, size = world.Get_rank(), world.Get_size()
        if _store is None:
            host = launch.master_address(world)
            served = launch.run_on_each(
                world, lambda: _serve(host, size, timeout) if own == 0 else None
            )
            port = control_messages.bcast(world, served and served.port, 0, int)
            # A rank that fails afterwards leaves none behind that still connects.
            _store = launch.run_on_each(
                world, lambda: served or _connect(host, port, size, False, timeout)
            )
    _opened += 1
    return c10d.PrefixStore(f"mpi/{_opened}", _store), own, size


#: The store of the latest default group, if this process was its rank 0 and served it.
_kept: c10d.Store | None = None


def keep_store(store: c10d.Store | None) -> None:
    """Keep the store of a default group on its rank 0 until the next one begins, with its port.

    A rank that destroys its groups before rank 0 may call init_process_group again at the same
    port, and then has the previous store.
    """
    global _kept
    _kept = store


def _serve(host: str, size: int, timeout: timedelta) -> c10d.TCPStore:
    """Start the store at MASTER_PORT if the user has set it and it is free, else at a free port.

    The ranks learn the port from MPI, so any will do.
    """
    text = "0" if launch.was_filled("MASTER_PORT") else os.environ.get("MASTER_PORT", "0")
    if not text.isdigit() or int(text) >= 1 << 16:
        raise LaunchError(
            f"init_process_group: MASTER_PORT: expected a port from 0 to 65535, got {text!r}"
        )
    if text != "0":
        with contextlib.suppress(c10d.DistNetworkError):
            return _connect(host, int(text), size, True, timeout)
    return _connect(host, 0, size, True, timeout)


def _connect(host: str, port: int, size: int, serves: bool, timeout: timedelta) -> c10d.TCPStore:
    return c10d.TCPStore(
        host, port, size, serves, timeout, wait_for_workers=False, multi_tenant=serves
    )
