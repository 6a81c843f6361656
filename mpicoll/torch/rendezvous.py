"""torch's rendezvous for ranks that an MPI launcher started: rank, size and store.

``mpi://`` serves any backend, including Gloo and NCCL. ``env://``, torch's default, does the same
for ``init_process_group("mpicoll")`` and its aliases if RANK and WORLD_SIZE are not set, or if
WORLD_SIZE is the number of ranks that the MPI launcher has started. Otherwise, ``env://`` works as
in torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as c10d

from mpicoll import control_messages
from mpicoll.errors import LaunchError
from mpicoll.launch.environment import check_world, is_started_by_mpi, was_filled
from mpicoll.launch.launchers import announced
from mpicoll.launch.rendezvous import GivenRank, read_rank
from mpicoll.launch.roll_call import run_on_each
from mpicoll.launch.world import master_address, notify_failure, start_mpi
from mpicoll.torch import NAME
from mpicoll.torch.aliases import resolve_backend
from mpicoll.torch.internals import find_variable

if TYPE_CHECKING:
    from mpi4py import MPI

#: A store, this rank and the number of ranks.
Rendezvous = tuple[c10d.Store, int, int]

_original_env: Callable[..., Iterator[Rendezvous]] | None = None


def register() -> None:
    """Register ``mpi://``, and ``env://`` for ranks that an MPI launcher started."""
    global _original_env
    # torch.distributed.rendezvous is also a function. torch has no public API for the handlers.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    if "mpi" not in handlers:
        c10d.register_rendezvous_handler("mpi", _handle_mpi)
        _original_env, handlers["env"] = handlers["env"], _handle_env


def _handle_mpi(
    url: str, timeout: timedelta = c10d.default_pg_timeout, **_: object
) -> Iterator[Rendezvous]:
    """Handle ``mpi://``: rank and size come from MPI. Values in the URL must match."""
    yield open_store(timeout, _read_rank(url), renumbers=False)
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _handle_env(
    url: str, timeout: timedelta = c10d.default_pg_timeout, **settings: Any
) -> Iterator[Rendezvous]:
    """Handle ``env://`` as torch does, unless MPI has the ranks of mpicoll's groups.

    This is the case if no rank is given, and if the group has all ranks that the MPI launcher has
    started, which keep their given numbers. No rank then depends on MASTER_PORT, which may be busy.
    """
    backend = resolve_backend(str(find_variable("init_process_group", "backend")))
    if NAME in {part.rpartition(":")[2] for part in backend.split(",")}:
        given = _read_rank(url)
        if (given.rank is None and given.world_size is None) or _is_whole(given.world_size):
            yield open_store(timeout, given)
            raise RuntimeError("Unable to perform re-rendezvous using env:// method")
        if given.rank != 0:
            keep_store(None)  # another process becomes rank 0, possibly at the same port
        yield _open_at_port(url, timeout, settings)
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")
    yield from _original_env(url, timeout=timeout, **settings)  # type: ignore[misc]


#: Time that the previous rank 0 has to release the port.
_RELEASE_TIMEOUT_S = 5.0


def _open_at_port(url: str, timeout: timedelta, settings: dict[str, Any]) -> Rendezvous:
    """Return the store of torch's env://, once the port is free."""
    end = time.monotonic() + _RELEASE_TIMEOUT_S
    while True:
        try:
            return next(_original_env(url, timeout=timeout, **settings))  # type: ignore[misc]
        except c10d.DistNetworkError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.1)


def _is_whole(world_size: int | None) -> bool:
    """Return whether the world size is at least the number of ranks of the MPI launcher.

    If it is larger, open_store raises.
    """
    size = announced()[1]
    return (
        world_size is not None
        and is_started_by_mpi()
        and size.isdigit()
        and world_size >= int(size)
    )


def _read_rank(url: str) -> GivenRank:
    """Return rank and size of the URL, or of RANK and WORLD_SIZE. Notify other ranks of errors."""
    try:
        return read_rank(url, None, None)
    except Exception as error:
        notify_failure(error)
        raise


# --- the store -----------------------------------------------------------------------------------

#: The store of this process, once it is open, and the number of calls of ``open_store``.
_store: c10d.TCPStore | None = None
_opened = 0


def open_store(
    timeout: timedelta, given: GivenRank | None = None, renumbers: bool = True
) -> Rendezvous:
    """Start MPI. Return a store, the rank and the number of ranks. All ranks of MPI call it.

    given: rank and size that this process was given; None for those of MPI.
    renumbers: if True, number the ranks as given. If False, they must match MPI.

    The store is torch's own. Parts of torch.distributed need one, mpicoll does not. It is kept
    until the process ends, because other ranks may still read it after its server has destroyed its
    groups. Each call uses separate keys.

    Raises LaunchError on all ranks if rank or size of one rank are invalid.
    """
    global _store, _opened
    rank, world_size = (None, None) if given is None else (given.rank, given.world_size)

    def check(world: MPI.Intracomm) -> None:
        own = None if renumbers else world.Get_rank()
        for name, value, found in (("rank", rank, own), ("world_size", world_size, world.size)):
            if None not in (value, found) and value != found:
                raise LaunchError(
                    f"init_process_group: {name}={value} disagrees with MPI's own, {found}; omit "
                    f"{name}"
                )
        check_world(world.size)

    requested = rank if renumbers else None
    with start_mpi(limit=timeout.total_seconds(), prepare=check, rank=requested) as world:
        from mpi4py import MPI  # now, because it calls MPI_Init, which start_mpi limits

        own, size = world.Get_rank(), world.Get_size()
        if _store is None:
            node = world.Split_type(MPI.COMM_TYPE_SHARED)
            is_one_node = node.Get_size() == size
            node.Free()
            served = run_on_each(
                world,
                lambda: _serve(master_address(is_one_node), size, timeout) if own == 0 else None,
            )
            address = served and (served.host, served.port)
            host, port = control_messages.bcast(world, address, 0, tuple[str, int])
            # Once a rank can fail, no other rank is still connecting.
            _store = run_on_each(
                world, lambda: served or _connect(host, port, size, False, timeout)
            )
    _opened += 1
    return c10d.PrefixStore(f"mpi/{_opened}", _store), own, size


#: Store of the latest default group, if this process serves it as rank 0.
_kept: c10d.Store | None = None


def keep_store(store: c10d.Store | None) -> None:
    """Keep the store of a default group, with its port, on rank 0 until the next one begins.

    A rank that destroys its groups before rank 0 may call init_process_group again at the same
    port. It then gets the previous store.
    """
    global _kept
    _kept = store


def _serve(host: str, size: int, timeout: timedelta) -> c10d.TCPStore:
    """Start the store at MASTER_PORT if the user has set it and it is free, else at a free port.

    The ranks get the port through MPI, so any port works.
    """
    text = "0" if was_filled("MASTER_PORT") else os.environ.get("MASTER_PORT", "0")
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
