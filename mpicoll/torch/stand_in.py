"""A stand-in for torch's own MPI backend, which its wheels do not have.

Where torch was built with MPI, it makes the groups of backend "mpi" by ``ProcessGroupMPI.create``,
without a store or a timeout. Stock wheels lack that class; here is one that makes mpicoll's groups.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch.distributed import distributed_c10d

from mpicoll import launch
from mpicoll.torch.callers import variable

__all__ = ["install"]


class _ProcessGroupMPI:
    """What torch.distributed calls for backend "mpi"."""

    @staticmethod
    def create(ranks: list[int]) -> Any:
        """The group of those global ranks, of all ranks where the list is empty."""
        from mpicoll.torch.creation import create

        options: Any = distributed_c10d._DistributedBackendOptions()
        options.timeout = variable("_new_process_group_helper", "timeout")
        options.group_id = variable("_new_process_group_helper", "group_name")
        options.global_ranks_in_group = list(ranks)
        if ranks:
            options.store = variable("_new_process_group_helper", "prefix_store")
            options.group_rank, options.group_size = ranks.index(c10d.get_rank()), len(ranks)
        else:
            options.store, options.group_rank, options.group_size = _met()
        return create(options, None)


_found: Any = None


#: What env:// needs.
_ENVIRONMENT = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _met() -> Any:
    global _found
    found, _found = _found, None
    return found


class _AnyStore(type(c10d.Store)):  # type: ignore[misc]
    """Every store is an instance of ``_Store``, as it was of what that takes the place of."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, c10d.Store)


class _Store(c10d.Store, metaclass=_AnyStore):  # type: ignore[misc]
    """torch passes ``Store()``, which stores nothing, for backend "mpi"; here it is a real one, so
    that groups of other backends can be made beside.
    """

    def __new__(cls) -> Any:
        global _found
        _found = _meet()
        return _found[0]


def _meet() -> Any:
    if not launch.by_mpi() and os.environ.keys() >= _ENVIRONMENT:
        return next(c10d.rendezvous("env://"))
    from mpicoll.torch.rendezvous import meet

    return meet(timedelta(minutes=30))


def install() -> None:
    """Puts the stand-in where torch.distributed looks for its MPI backend."""
    distributed_c10d.ProcessGroupMPI = _ProcessGroupMPI
    distributed_c10d._MPI_AVAILABLE = True
    distributed_c10d.Store = _Store
