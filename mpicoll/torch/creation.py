"""Creation of the groups that torch.distributed requests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d

from mpicoll.api import backends
from mpicoll.core.work import parse_timeout
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.torch import NAME, core_groups
from mpicoll.torch.backend import HAS_PYTHON_BACKENDS, BackedGroup, TorchBackend
from mpicoll.torch.group import TorchGroup
from mpicoll.torch.hooks import replace_builtin_hook, watch_attaching
from mpicoll.torch.internals import find_variable
from mpicoll.torch.options import GroupOptions, Options

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

__all__ = ["create"]


def create(
    options: _DistributedBackendOptions, pg_options: object
) -> TorchGroup | BackedGroup | TorchBackend:
    """Create the group for torch's ``_DistributedBackendOptions``; only members call it.

    If the group also has other backends, return only mpicoll's backend. Only mpicoll's own
    pg_options have an effect.

    Raises ArgumentError for a duplicate rank, and UnsupportedError before torch 2.15 for several
    backends, and for a subset of the ranks if it is the first group of mpicoll.
    """
    requested = str(find_variable("_new_process_group_helper", "backend") or NAME)
    mixed = _is_mixed(requested)
    level = None
    if isinstance(pg_options, (Options, GroupOptions)):
        level = pg_options.reproducible
    else:
        backends.warn_about_options(pg_options, "mpicoll")
    _enable_flight_recorder()
    limit = parse_timeout(options.timeout, None, "timeout")
    ranks = list(options.global_ranks_in_group)
    if len(set(ranks)) < len(ranks):  # torch checks this from 2.13 on
        raise ArgumentError(f"new_group: ranks: expected each rank once, got {ranks}")
    rank, size, group = options.group_rank, options.group_size, options.group_id
    if ranks:
        core = core_groups.create(options.store, rank, ranks, limit, group, level)
    else:
        core = core_groups.create_default(options.store, rank, size, limit, group, level)
    device = find_variable("_new_process_group_helper", "device_id")
    if not HAS_PYTHON_BACKENDS:
        return TorchGroup(core, options.store, device)
    if options.enable_reconfigure:
        from mpicoll.torch.reconfigure import ReconfigurableBackend, ReconfigurableGroup

        return ReconfigurableGroup(ReconfigurableBackend(core), options.store, device)
    backend = TorchBackend(core)
    if not mixed:
        return BackedGroup(backend, options.store, device)
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        _wrapped.append(backend)
    return backend


#: Backends in a C++ wrapper of torch, kept alive because the wrapper holds only their C++ half.
_wrapped: list[TorchBackend] = []


#: Variables that set the size of torch's flight recorder.
_RECORDER_VARIABLES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"


def _enable_flight_recorder() -> None:
    """Enable torch's flight recorder (from 2.15 on) only if a variable requests it.

    torch records every backend that does not record by itself. This doubles the time of a call of 4
    bytes.
    """
    self_recording = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if self_recording is not None:
        is_enabled = any(map(os.environ.get, _RECORDER_VARIABLES))
        (self_recording.discard if is_enabled else self_recording.add)(NAME)


def _is_mixed(requested: str) -> bool:
    """Return whether a group also has other backends."""
    mixed = len({part.rpartition(":")[2] for part in requested.split(",")}) > 1
    if mixed and not HAS_PYTHON_BACKENDS:
        raise UnsupportedError(
            f"mpicoll: backend {requested!r}: not supported by torch {torch.__version__}, in which "
            f"a Python backend must serve all devices of a group; use backend={NAME!r} for all, "
            "create a second group with new_group(backend=...) for the other device, or use torch "
            "2.15"
        )
    return mixed


watch_attaching()
replace_builtin_hook()
