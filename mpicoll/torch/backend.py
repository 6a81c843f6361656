"""The backend and its process group from torch 2.15 on, which supports Python backends.

torch's ProcessGroup passes a call to its dispatcher, which implements fake tensors, the counts of
``CommDebugMode``, hooks and the flight recorder. The dispatcher calls the backend of the tensors'
device, here ``TorchBackend``. A group with several backends is torch's own ProcessGroup. A group
with this backend only is a ``BackedGroup``, which

- returns the Work of the backend. torch's own Work only has wait() and the future: it never
completes and has no source rank;
- bypasses the dispatcher if nothing observes calls, which halves the time of a small call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d
from torch import Tensor

from mpicoll.core.groups import ProcessGroup
from mpicoll.torch import core_groups
from mpicoll.torch.collectives import Collectives
from mpicoll.torch.group import DerivedGroups
from mpicoll.torch.internals import device_types, disable_compile
from mpicoll.torch.options import get_seconds
from mpicoll.torch.profiling import is_recording
from mpicoll.torch.windows import TorchWindow

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

__all__ = ["HAS_PYTHON_BACKENDS", "SUCCESS", "BackedGroup", "TorchBackend"]


C: Any = torch._C._distributed_c10d  # untyped, because the stubs depend on the installed torch


#: The state of a backend without an error.
SUCCESS = C.ErrorType.SUCCESS
#: Whether torch supports Python backends. 2.14 does, but recurses endlessly in ``supports_...``.
HAS_PYTHON_BACKENDS = hasattr(C.Backend, "supports_completion_hooks")

#: The calls that torch's dispatcher passes to a backend.
_CALLS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)


class _DispatchedCall:
    """A call of a group inside the dispatcher, and the Work that its backend returns."""

    __slots__ = ("backend", "name", "work")

    def __init__(self, backend: TorchBackend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.work: c10d.Work | None = None


class _ThreadState(threading.local):
    """The innermost dispatched call of a thread. Hooks may make calls."""

    call: _DispatchedCall | None = None


_thread_state = _ThreadState()


class TorchBackend(Collectives, C.Backend):  # type: ignore[misc]
    """A torch backend on a group of the core."""

    # torch checks these before it calls anything but collectives. All must be defined, because
    # torch 2.15 recurses endlessly for a missing one.
    supports_splitting = supports_shrinking = True
    supports_abort_hooks = True
    supports_coalescing = supports_completion_hooks = False
    supports_window = True
    supports_reconfigure = False
    _supports_time_estimate = False

    def __init__(self, core: ProcessGroup) -> None:
        super().__init__(core)
        self._abort_hooks: dict[int, Callable[[], None]] = {}

    def new_window(self, tensor: Tensor | None = None) -> TorchWindow:
        """Create a window for one-sided communication; every member calls it.

        tensor: registered immediately; None to register later. Not available from C++, where
            windows are C++ objects.
        """
        return TorchWindow(self.core, tensor)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors need no special memory."""
        return False

    def get_error(self) -> Any:
        """Return COMM_ERROR (torch's ErrorType) if the group has failed, else SUCCESS."""
        return C.ErrorType.COMM_ERROR if self.core.error else SUCCESS

    def abort(self) -> None:
        """Run the abort hooks, then end the group without waiting for pending operations."""
        self._call_abort_hooks()
        super().abort()

    def _call_abort_hooks(self) -> None:
        for hook in list(self._abort_hooks.values()):
            hook()

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call ``hook`` before the group is aborted."""
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook."""
        self._abort_hooks.pop(hook_id, None)

    # Their names in C++.
    registerAbortHook, unregisterAbortHook = register_abort_hook, unregister_abort_hook

    def split(
        self, store: c10d.Store, ranks: Sequence[int], opts: Backend.Options | None
    ) -> TorchBackend:
        """Create the backend of a subgroup, for torch's split_group."""
        limit, name = (get_seconds(opts), opts.group_name) if opts else (self.core.timeout, "")
        return TorchBackend(core_groups.split(self.core, ranks, limit, name))

    def merge(self, store: c10d.Store, opts: Backend.Options, rank: int, size: int) -> TorchBackend:
        """Create the backend of a merged group, for torch's merge_remote_group."""
        return TorchBackend(core_groups.merge(self.core, store, rank, size, get_seconds(opts)))

    def shrink(
        self, excluded: Sequence[int], flags: int = 0, opts: Backend.Options | None = None
    ) -> TorchBackend:
        """Create the backend of the remaining ranks, for torch's shrink_group; only they call it.

        flags: 1 aborts pending operations.
        """
        return TorchBackend(core_groups.shrink(self.core, excluded, flags))


def _build_backend_method(name: str) -> Callable[..., Any]:
    """Build a method of the backend that stores its Work for the calling ``BackedGroup``."""
    call = getattr(Collectives, name)

    def method(self: TorchBackend, *args: Any, **kwargs: Any) -> Any:
        work, dispatched = call(self, *args, **kwargs), _thread_state.call
        if dispatched is not None and dispatched.backend is self and dispatched.name == name:
            dispatched.work = work
        return work

    method.__doc__ = call.__doc__
    return method


def _build_group_method(name: str) -> Callable[..., Any]:
    """Build a method of the group that uses torch's dispatcher only if something observes calls."""
    call, dispatch = getattr(Collectives, name), getattr(C.ProcessGroup, name)

    def method(self: BackedGroup, *args: Any, **kwargs: Any) -> Any:
        if not self.is_observed():
            return call(self.backend, *args, **kwargs)
        outer, dispatched = _thread_state.call, _DispatchedCall(self.backend, name)
        _thread_state.call = dispatched
        try:
            torch_work = dispatch(self, *args, **kwargs)
        finally:
            _thread_state.call = outer
        return torch_work if dispatched.work is None else dispatched.work

    method.__doc__ = call.__doc__
    # C++ calls the Python method of the same name, unless the caller has this name.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


class BackedGroup(DerivedGroups, C.ProcessGroup):  # type: ignore[misc]
    """A process group of one ``TorchBackend``.

    backend: serves all devices.
    store: torch's store of the group.
    device: the ``device_id`` of ``init_process_group`` or ``new_group``; unused.
    """

    def __init__(
        self, backend: TorchBackend, store: c10d.Store, device: torch.device | None = None
    ) -> None:
        super().__init__(store, backend.rank(), backend.size())
        self.backend = backend
        self._hooks: set[object] = set()
        self.bound_device_id = device
        for kind in device_types():
            self._register_backend(torch.device(kind), self.BackendType.CUSTOM, backend)
        self._set_default_backend(self.BackendType.CUSTOM)

    @property
    def core(self) -> ProcessGroup:
        """The core's group of the backend."""
        return self.backend.core

    def is_observed(self) -> bool:
        """Return whether torch's dispatcher must see calls of the group from this thread."""
        return bool(self._hooks or is_recording() or torch._C._len_torch_dispatch_stack())

    def note_hook(self, key: object) -> None:
        """Register a hook, so that all calls use the dispatcher.

        key: identifies the hook, for ``forget_hook``.
        """
        self._hooks.add(key)

    def forget_hook(self, key: object) -> None:
        """Unregister a hook."""
        self._hooks.discard(key)

    def name(self) -> str:
        """Return the name of the backend, even if the program used an alias."""
        return self.backend.name()

    getBackendName = name  # for C++

    def shutdown(self) -> None:
        """Wait for pending operations and end the group. For the default group, end all groups."""
        self.backend.shutdown()

    def abort(self) -> None:
        """End the group without waiting for pending operations."""
        self.backend.abort()

    # It calls ``gather``, because torch's dispatcher has gather_single only for C++ backends.
    gather_single = gather_into_tensor = Collectives.gather_single

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, or raise an error with the missing ranks."""
        self.backend.monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.backend.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> c10d.Work:
        return self.backend.end_coalescing()

    def _build_group(self, core: ProcessGroup, store: c10d.Store) -> BackedGroup:
        return BackedGroup(TorchBackend(core), store)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every group starts at 0."""

    def new_window(self, tensor: Tensor | None = None) -> TorchWindow:
        """Create a window for one-sided communication; every member calls it."""
        return self.backend.new_window(tensor)

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the members of the group can change."""
        return self.backend.supports_reconfigure

    @property
    def supports_window(self) -> bool:
        """Whether the group has windows for one-sided communication."""
        return self.backend.supports_window

    @property
    def supports_abort_hooks(self) -> bool:
        """Whether abort hooks are supported: always."""
        return self.backend.supports_abort_hooks

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call ``hook`` before the group is aborted."""
        self.backend.register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook."""
        self.backend.unregister_abort_hook(hook_id)

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` before each operation."""
        super().register_pre_hook(hook_id, hook)
        self.note_hook(("pre", hook_id))

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook."""
        super().unregister_pre_hook(hook_id)
        self.forget_hook(("pre", hook_id))

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` after each operation has started."""
        super().register_post_hook(hook_id, hook)
        self.note_hook(("post", hook_id))

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook."""
        super().unregister_post_hook(hook_id)
        self.forget_hook(("post", hook_id))


for _name in _CALLS:
    setattr(TorchBackend, _name, _build_backend_method(_name))
if HAS_PYTHON_BACKENDS:  # else BackedGroup is unused, and torch's group may lack these names
    for _name in _CALLS:
        setattr(BackedGroup, _name, _build_group_method(_name))
    # Older names that C++ does not map to new ones. For names that it maps, a Python method would
    # replace its dispatcher.
    BackedGroup._allgather_base = BackedGroup.all_gather_single
    BackedGroup._reduce_scatter_base = BackedGroup.reduce_scatter_single
disable_compile(TorchBackend)
disable_compile(BackedGroup)
