"""torch's rendezvous of ranks that MPI's launcher started: where rank, size and store come from.

``mpi://`` serves any backend, including Gloo and NCCL. ``env://``, torch's default, does the same
for ``init_process_group("mpicoll")`` and its aliases if RANK and WORLD_SIZE are not set. For other
backends, and if they are set, it does what it did before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as c10d

from mpicoll import launch
from mpicoll.torch import NAME
from mpicoll.torch.aliases import resolve_backend
from mpicoll.torch.caller_frames import find_variable
from mpicoll.torch.store import Rendezvous, open_store

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
