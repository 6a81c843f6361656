"""Making the groups that torch.distributed asks for."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d

from mpicoll.core import backends
from mpicoll.core.work import seconds
from mpicoll.errors import UnsupportedError
from mpicoll.torch import NAME, backend, cores
from mpicoll.torch.callers import variable
from mpicoll.torch.group import TorchGroup

__all__ = ["create"]


def create(
    options: Any, pg_options: Any
) -> TorchGroup | backend.BackedGroup | backend.TorchBackend:
    """The group that torch's ``_DistributedBackendOptions`` describe; only its members call.

    Where it is of other backends as well, only its backend. pg_options have no effect, as on
    torch's Gloo.

    Raises UnsupportedError before torch 2.15 for a mix of backends, and for a part of the ranks
    where the default group is of another backend.
    """
    asked = str(variable("_new_process_group_helper", "backend") or NAME)
    mixed = _mixed(asked)
    backends.warn_of_options(pg_options, "mpicoll")
    _record_if_asked()
    limit = seconds(options.timeout, None, "timeout")
    ranks = list(options.global_ranks_in_group)
    rank, size, group = options.group_rank, options.group_size, options.group_id
    if ranks:
        core = cores.some(options.store, rank, ranks, limit, group)
    else:
        core = cores.whole(options.store, rank, size, limit, group)
    if not backend.AVAILABLE:
        return TorchGroup(core, options.store)
    if options.enable_reconfigure:
        from mpicoll.torch.reconfigure import ReconfigurableBackend, ReconfigurableGroup

        return ReconfigurableGroup(ReconfigurableBackend(core), options.store)
    made = backend.TorchBackend(core)
    if not mixed:
        return backend.BackedGroup(made, options.store)
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        _wrapped.append(made)
    return made


#: Backends around which torch puts a wrapper in C++, which holds their half in C++ and no more. It
#: may ask them to its own end.
_wrapped: list[backend.TorchBackend] = []


#: The variables by which torch's flight recorder gets its size.
_RECORDER = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"


def _record_if_asked() -> None:
    """Has torch, from 2.15 on, hook its flight recorder into a group where somebody wants it.

    torch does so with every group of a backend that does not record by itself, and then a call of
    4 bytes takes twice as long: here one of the variables has to be set.
    """
    recording = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        change = recording.discard if any(map(os.environ.get, _RECORDER)) else recording.add
        change(NAME)


def _mixed(asked: str) -> bool:
    """Whether a group is of other backends as well."""
    mixed = len({part.rpartition(":")[2] for part in asked.split(",")}) > 1
    if mixed and not backend.AVAILABLE:
        raise UnsupportedError(
            f"mpicoll: backend {asked!r}: torch {torch.__version__} lets a backend written in "
            f"Python serve all devices of a group, not some of them; use backend={NAME!r} for all, "
            "make a second group with new_group(backend=...) for the other device, or use torch "
            "2.15"
        )
    return mixed
