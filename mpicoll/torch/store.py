"""A store of torch's for ranks that MPI's launcher started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as c10d

from mpicoll import control_messages, launch
from mpicoll.errors import LaunchError

__all__ = ["Rendezvous", "open_store"]

#: A store, this rank and the number of ranks.
Rendezvous = tuple[c10d.Store, int, int]

#: The store of this process, once it is open, and the number of calls of ``open_store`` so far.
_store: c10d.TCPStore | None = None
_opened = 0


def open_store(timeout: timedelta, expected: Mapping[str, list[str]] | None = None) -> Rendezvous:
    """Start MPI; return a store on rank 0, this rank and the number of ranks.

    expected: rank and world_size, if a URL has them; raises LaunchError if they differ from MPI's.

    The store is torch's own: parts of torch.distributed need one, mpicoll does not. It is kept
    until the process ends, because other ranks may still read it after rank 0 has destroyed its
    groups. Each call uses keys of its own.
    """
    global _store, _opened
    with launch.start(limit=timeout.total_seconds()) as world:
        rank, size = world.Get_rank(), world.Get_size()
        for name, own in (("rank", rank), ("world_size", size)):
            value = (expected or {}).get(name, [str(own)])[-1]
            if value != str(own):
                raise LaunchError(
                    f"init_process_group: {name}={value} disagrees with MPI's own, {own}; leave it "
                    "out"
                )
        launch.check_world(size)
        if _store is None:
            host, port = launch.master_address(world), 0
            if rank == 0:
                # The port that the user has set, else any free one.
                if not launch.was_filled("MASTER_PORT"):
                    port = int(os.environ.get("MASTER_PORT", "0"))
                _store = _connect(host, port, size, True, timeout)
                port = _store.port
            port = control_messages.bcast(world, port, 0, int)
            if rank != 0:
                _store = _connect(host, port, size, False, timeout)
            world.Barrier()  # a rank that fails from here on leaves no other one connecting
    _opened += 1
    return c10d.PrefixStore(f"mpi/{_opened}", _store), rank, size


def _connect(host: str, port: int, size: int, serves: bool, timeout: timedelta) -> c10d.TCPStore:
    return c10d.TCPStore(
        host, port, size, serves, timeout, wait_for_workers=False, multi_tenant=serves
    )
