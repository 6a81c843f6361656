"""torch's rendezvous of ranks that MPI's launcher started: where rank, size and store come from.

``mpi://`` serves any backend, including Gloo and NCCL. ``env://``, torch's default, does the same
for ``init_process_group("mpicoll")`` and its aliases if RANK and WORLD_SIZE are not set, or
WORLD_SIZE is the number of ranks that MPI's launcher has started. For other backends and sizes it
does what torch does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from mpicoll import launch
from mpicoll.torch import NAME
from mpicoll.torch.aliases import resolve_backend
from mpicoll.torch.caller_frames import find_variable
from mpicoll.torch.store import Rendezvous, keep_store, open_store

__all__ = ["register"]

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
    """Handle ``mpi://``: rank and size are MPI's own, and those of the URL have to agree."""
    yield open_store(timeout, _read_rank(url), renumbers=False)
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _handle_env(
    url: str, timeout: timedelta = c10d.default_pg_timeout, **settings: Any
) -> Iterator[Rendezvous]:
    """Handle ``env://`` as torch does, unless MPI knows the ranks of mpicoll's groups.

    It does if no rank is given, and if the group is of all ranks that MPI's launcher has started.
    These are numbered as they were given. So no rank depends on MASTER_PORT, which may be busy.
    """
    backend = resolve_backend(str(find_variable("init_process_group", "backend")))
    if NAME in {part.rpartition(":")[2] for part in backend.split(",")}:
        given = _read_rank(url)
        if (given.rank is None and given.world_size is None) or _is_whole(given.world_size):
            yield open_store(timeout, given)
            raise RuntimeError("Unable to perform re-rendezvous using env:// method")
        if given.rank != 0:
            keep_store(None)  # another process becomes rank 0, perhaps at the same port
        yield _open_at_port(url, timeout, settings)
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")
    yield from _original_env(url, timeout=timeout, **settings)  # type: ignore[misc]


#: Seconds in which the previous rank 0 of these processes has to release the port.
_RELEASE_TIMEOUT_S = 5.0


def _open_at_port(url: str, timeout: timedelta, settings: dict[str, Any]) -> Rendezvous:
    """Return what torch's env:// does, once the port is free."""
    end = time.monotonic() + _RELEASE_TIMEOUT_S
    while True:
        try:
            return next(_original_env(url, timeout=timeout, **settings))  # type: ignore[misc]
        except c10d.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.1)


def _is_whole(world_size: int | None) -> bool:
    """Return whether MPI's launcher has started as many ranks. If fewer, open_store refuses."""
    size = launch.announced()[1]
    return (
        world_size is not None
        and launch.is_started_by_mpi()
        and size.isdigit()
        and world_size >= int(size)
    )


def _read_rank(url: str) -> launch.GivenRank:
    """Return rank and size of the URL, else of RANK and WORLD_SIZE."""
    try:
        return launch.read_rank(url, None, None)
    except Exception as error:
        launch.tell_failure(error)
        raise
