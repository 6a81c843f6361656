"""Where torch.distributed gets rank, size and store from when MPI's launcher started the ranks.

``mpi://`` serves any backend, Gloo and NCCL included. ``env://``, which is torch's default, does
the same for ``init_process_group("mpicoll")``, and for the names that mpicoll stands in for, where
RANK and WORLD_SIZE are not set; for other backends, and where they are set, it stays what it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as c10d

from mpicoll import launch
from mpicoll.errors import LaunchError
from mpicoll.torch import NAME
from mpicoll.torch.callers import variable
from mpicoll.torch.names import served

__all__ = ["meet", "register"]

Found = tuple[c10d.Store, int, int]

_original_env: Any = None


def register() -> None:
    """Registers ``mpi://``, and ``env://`` for ranks that MPI's launcher started."""
    global _original_env
    # The name torch.distributed.rendezvous is a function's; handlers have no public access.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    if "mpi" not in handlers:
        c10d.register_rendezvous_handler("mpi", _mpi)
        _original_env, handlers["env"] = handlers["env"], _env


def _mpi(url: str, timeout: timedelta = c10d.default_pg_timeout, **_: Any) -> Iterator[Found]:
    """The handler of ``mpi://``: rank and size are MPI's own."""
    yield meet(timeout, parse_qs(urlsplit(url).query))
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _env(url: str, **settings: Any) -> Iterator[Found]:
    """The handler of ``env://``: torch's own, unless only MPI knows the ranks."""
    told = "?" in url or any(
        name in os.environ and not launch.was_filled(name) for name in ("RANK", "WORLD_SIZE")
    )
    asked = served(str(variable("init_process_group", "backend")))
    if told or NAME not in {part.rpartition(":")[2] for part in asked.split(",")}:
        return _original_env(url, **settings)  # type: ignore[no-any-return]
    return _mpi("mpi://", **settings)


#: The store of this process, from its first meeting on, and the number of meetings so far.
_kept: Any = None
_meetings = 0


def meet(timeout: timedelta, expected: Mapping[str, list[str]] | None = None) -> Found:
    """Starts MPI; a store on rank 0, and this rank and size.

    expected: rank and world_size as a URL says, where it does; raises LaunchError where they are
    not MPI's own.

    The store is torch's own, for those in torch.distributed that need one; mpicoll does not. It is
    kept until the process ends: other ranks may still be asking it when rank 0 has destroyed its
    groups. Each meeting has keys of its own.
    """
    global _kept, _meetings
    with launch.start(limit=timeout.total_seconds()) as world:
        rank, size = world.Get_rank(), world.Get_size()
        for name, own in (("rank", rank), ("world_size", size)):
            given = (expected or {}).get(name, [str(own)])[-1]
            if given != str(own):
                raise LaunchError(
                    f"init_process_group: {name}={given} disagrees with MPI's own, {own}; leave it "
                    "out"
                )
        launch.check_world(size)
        if _kept is None:
            host, port = launch.master_address(world), 0
            if rank == 0:
                # Where somebody has said a port, the store is there; else where one is free.
                if not launch.was_filled("MASTER_PORT"):
                    port = int(os.environ.get("MASTER_PORT", "0"))
                _kept = _store(host, port, size, True, timeout)
                port = _kept.port
            port = world.bcast(port, 0)
            if rank != 0:
                _kept = _store(host, port, size, False, timeout)
            world.Barrier()  # whoever fails from here on does not leave others connecting
    _meetings += 1
    return c10d.PrefixStore(f"mpi/{_meetings}", _kept), rank, size


def _store(host: str, port: int, size: int, serves: bool, timeout: timedelta) -> c10d.TCPStore:
    return c10d.TCPStore(
        host, port, size, serves, timeout, wait_for_workers=False, multi_tenant=serves
    )
