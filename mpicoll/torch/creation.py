"""Making the groups that torch.distributed asks for."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d

from mpicoll import backends, execute, groups, launch, runtime
from mpicoll.errors import UnsupportedError
from mpicoll.groups import ProcessGroup, state
from mpicoll.torch import NAME, versions
from mpicoll.torch.callers import variable
from mpicoll.torch.group import TorchGroup
from mpicoll.work import seconds

__all__ = ["create"]


def create(options: Any, pg_options: Any) -> TorchGroup:
    """The group that torch's ``_DistributedBackendOptions`` describe; only its members call.

    pg_options have no effect, as on torch's Gloo. Raises UnsupportedError for a mix of backends
    that one Python object cannot serve and for a part of the ranks where the default group is of
    another backend.
    """
    global _base
    asked = str(variable("_new_process_group_helper", "backend") or NAME)
    _refuse_mixed(asked)
    backends.warn_of_options(pg_options, "mpicoll")
    limit = seconds(options.timeout, None, "timeout")
    ranks = list(options.global_ranks_in_group)
    rank, size, name = options.group_rank, options.group_size, options.group_id
    if state.default is None:
        if ranks and len(ranks) != c10d.get_world_size():
            raise UnsupportedError(
                f"new_group: backend 'mpicoll' over a default group of backend "
                f"{c10d.get_backend()!r}: the first such group starts MPI and must hold all "
                f"{c10d.get_world_size()} ranks, got {ranks}; make one with ranks=None first, or "
                "begin with init_process_group('mpicoll')"
            )
        core = _world(options.store, rank, size, limit)
        if ranks:
            _base = core
            core = _group(ranks, limit, name)
    else:
        core = _group(ranks or list(range(size)), limit, name)
    return TorchGroup(core, options.store, NAME if ":" in asked else asked, _ended)


#: The core's default group where torch's is of another backend: nobody is given it, so that every
#: group can end alone.
_base: ProcessGroup | None = None


def _ended() -> None:
    """Called when a group has ended: with the last one that stands on it ends ``_base``."""
    if _base is not None and state.groups == [_base]:
        runtime.destroy_process_group()


def _world(store: Any, rank: int, size: int, limit: float | None) -> ProcessGroup:
    """Starts MPI and makes the group of all ranks."""
    if rank == 0:
        versions.warn_if_newer()  # once a job
        _stores.append(store)
    expected = {"rank": ("rank=", rank), "world_size": ("world_size=", size)}
    meeting = launch.Meeting(store, rank, size, host=launch.loopback(_host(store)))
    return runtime.begin(NAME, limit, "0", meeting=meeting, expected=expected)


def _host(store: Any) -> str:
    """Where all ranks reach a store of torch's, "" where it does not say."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


#: The stores of rank 0, kept until the process ends: a rank that is through with its destroy before
#: rank 0 may begin anew at the same port, with the store of before.
_stores: list[Any] = []


def _group(ranks: list[int], limit: float | None, name: str) -> ProcessGroup:
    """The group of some global ranks, made by them alone."""
    default = groups.default_group()
    return execute.in_order(  # type: ignore[no-any-return]
        default,
        "new_group",
        lambda: groups.create(
            default,
            ranks,
            ranks,
            backend=NAME,
            timeout=limit,
            name=f"torch:{name}",
            description="undefined",
        ),
        everybody=False,
    )


def _refuse_mixed(asked: str) -> None:
    """One Python object serves all devices of its group, or none."""
    backends = {part.rpartition(":")[2] for part in asked.split(",")}
    if len(backends) > 1:
        raise UnsupportedError(
            f"mpicoll: backend {asked!r}: torch lets a backend written in Python serve all devices "
            f"of a group, not some of them; use backend={NAME!r} for all, or make a second group "
            "with new_group(backend=...) for the other device"
        )
