"""Creation of the groups that torch.distributed requests. The import replaces torch functions that
would bypass Python groups: C++ hooks and FP16_COMPRESS.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from mpicoll.api import backends
from mpicoll.core.reproducible import Reductions
from mpicoll.core.work import parse_timeout
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.torch import NAME, core_groups
from mpicoll.torch.backend import HAS_PYTHON_BACKENDS, TorchBackend, build_group
from mpicoll.torch.collectives import Collectives
from mpicoll.torch.internals import find_variable
from mpicoll.torch.options import GroupOptions, Options

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions


def create(
    options: _DistributedBackendOptions, pg_options: object
) -> c10d.ProcessGroup | TorchBackend:
    """Create the group for torch's ``_DistributedBackendOptions``; only members call it.

    If the group also has other backends, return only mpicoll's backend. Only mpicoll's own
    pg_options have an effect.

    Raises ArgumentError for a duplicate rank, and UnsupportedError before torch 2.15 for several
    backends, and for a subset of the ranks if it is the first group of mpicoll.
    """
    requested = str(find_variable("_new_process_group_helper", "backend") or NAME)
    mixed = _is_mixed(requested)
    reductions = Reductions()
    if isinstance(pg_options, (Options, GroupOptions)):
        reductions = Reductions(pg_options.reproducible, pg_options.wire)
    else:
        backends.warn_about_options(pg_options, "mpicoll")
    _enable_flight_recorder()
    limit = parse_timeout(options.timeout, None, "timeout")
    ranks = list(options.global_ranks_in_group)
    if len(set(ranks)) < len(ranks):  # torch checks this from 2.13 on
        raise ArgumentError(f"new_group: ranks: expected each rank once, got {ranks}")
    rank, size, group = options.group_rank, options.group_size, options.group_id
    if ranks:
        core = core_groups.create(options.store, rank, ranks, limit, group, reductions)
    else:
        core = core_groups.create_default(options.store, rank, size, limit, group, reductions)
    device = find_variable("_new_process_group_helper", "device_id")
    if HAS_PYTHON_BACKENDS and options.enable_reconfigure:
        from mpicoll.torch.reconfigure import ReconfigurableBackend, ReconfigurableGroup

        return ReconfigurableGroup(ReconfigurableBackend(core), options.store, device)
    if not mixed:
        return build_group(core, options.store, device)
    backend = TorchBackend(core)
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        _wrapped.append(backend)
    return backend


C: Any = torch._C._distributed_c10d  # older versions lack the hooks, in their stubs as well

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
    """Return whether a group also has other backends; before torch 2.15 raise UnsupportedError."""
    mixed = len({part.rpartition(":")[2] for part in requested.split(",")}) > 1
    if mixed and not HAS_PYTHON_BACKENDS:
        raise UnsupportedError(
            f"mpicoll: backend {requested!r}: not supported by torch {torch.__version__}, in which "
            f"a Python backend must serve all devices of a group; use backend={NAME!r} for all, "
            "create a second group with new_group(backend=...) for the other device, or use torch "
            "2.15"
        )
    return mixed


# --- torch functions that would bypass Python groups ---------------------------------------------


def _watch_attaching(kind: Any) -> None:
    """Call ``note_hook`` of a group when torch attaches a C++ hook, and ``forget_hook`` at its end.

    torch attaches hooks such as ``NanCheckHook`` without calling the Python class. Groups with
    these methods bypass torch's dispatcher, which calls the hooks, unless a hook is noted.
    """
    attach, remove = kind.attach, kind.remove
    # For each hook, its group and the key that the group has noted.
    noted: weakref.WeakKeyDictionary[Any, tuple[Callable[[], Any], object]]
    noted = weakref.WeakKeyDictionary()

    @functools.wraps(attach)
    def attach_noted(pg: Any, *args: Any, **kwargs: Any) -> Any:
        key = object()
        note = getattr(pg, "note_hook", None)
        if note is not None:
            note(key)
        try:
            hook = attach(pg, *args, **kwargs)
        except BaseException:
            if note is not None:
                pg.forget_hook(key)
            raise
        if note is not None:
            noted[hook] = weakref.ref(pg), key
        return hook

    @functools.wraps(remove)
    def remove_noted(self: Any) -> None:
        remove(self)
        find_group, key = noted.pop(self, (lambda: None, None))
        group = find_group()
        if group is not None:
            group.forget_hook(key)

    kind.attach, kind.remove = staticmethod(attach_noted), remove_noted


def _replace_builtin_hook() -> None:
    """Make DDP's built-in hook FP16_COMPRESS use its Python version, for models on mpicoll groups.

    The hook in C++ needs a future that holds C++ tensors. A future that Python completes holds a
    Python object.
    """
    register = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(register)
    def register_hook(self: DistributedDataParallel, comm_hook_type: object) -> None:
        backend = self.process_group._get_backend(torch.device(self.device_type))
        if comm_hook_type != c10d.BuiltinCommHookType.FP16_COMPRESS or not isinstance(
            backend, Collectives
        ):
            register(self, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        self.logger._set_comm_hook_name(str(comm_hook_type))
        c10d._register_comm_hook(self.reducer, self.process_group, fp16_compress_hook)

    DistributedDataParallel._register_builtin_comm_hook = register_hook


for _name in "NanCheckHook", "FlightRecorderHook":
    if hasattr(C, _name):  # from torch 2.15 on
        _watch_attaching(getattr(C, _name))
_replace_builtin_hook()
