"""torch's rendezvous of ranks that MPI's launcher started: where rank, size and store come from.

``mpi://`` serves any backend, including Gloo and NCCL. ``env://``, torch's default, does the same
for ``init_process_group("mpicoll")`` and its aliases if RANK and WORLD_SIZE are not set. For other
backends, and if they are set, it does what it did before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as c10d

from mpicoll import launch
from mpicoll.errors import LaunchError
from mpicoll.torch import NAME
from mpicoll.torch.aliases import resolve_backend
from mpicoll.torch.caller_frames import find_variable

__all__ = ["open_store", "register"]

#: A store, this rank and the number of ranks.
Rendezvous = tuple[c10d.Store, int, int]

_original_env: Callable[..., Iterator[Rendezvous]] | None = None


def register() -> None:
    """Register ``mpi://``, and ``env://`` for ranks that MPI's launcher started."""
    global _original_env
    # torch.distributed.rendezvous is also a function; there is no public access to the handlers.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    if "mpi" not in handlers:
        c10d.register_rendezvous_handler("mpi", _handle_mpi)
        _original_env, handlers["env"] = handlers["env"], _handle_env


def _handle_mpi(
    url: str, timeout: timedelta = c10d.default_pg_timeout, **_: object
) -> Iterator[Rendezvous]:
    """Handle ``mpi://``: rank and size are MPI's own."""
    yield open_store(timeout, parse_qs(urlsplit(url).query))
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _handle_env(url: str, **settings: Any) -> Iterator[Rendezvous]:
    """Handle ``env://`` as torch does, unless only MPI knows the ranks."""
    has_ranks = "?" in url or any(
        name in os.environ and not launch.was_filled(name) for name in ("RANK", "WORLD_SIZE")
    )
    backend = resolve_backend(str(find_variable("init_process_group", "backend")))
    if has_ranks or NAME not in {part.rpartition(":")[2] for part in backend.split(",")}:
        return _original_env(url, **settings)  # type: ignore[misc]
    return _handle_mpi("mpi://", **settings)


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
            port = world.bcast(port, 0)
            if rank != 0:
                _store = _connect(host, port, size, False, timeout)
            world.Barrier()  # a rank that fails from here on leaves no other one connecting
    _opened += 1
    return c10d.PrefixStore(f"mpi/{_opened}", _store), rank, size


def _connect(host: str, port: int, size: int, serves: bool, timeout: timedelta) -> c10d.TCPStore:
    return c10d.TCPStore(
        host, port, size, serves, timeout, wait_for_workers=False, multi_tenant=serves
    )
