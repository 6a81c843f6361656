"""The backend and its process group from torch 2.15 on, which supports backends in Python.

torch's ProcessGroup passes a call to its dispatcher, which implements fake tensors, the counts of
``CommDebugMode``, hooks and the flight recorder. The dispatcher passes it to the backend of the
tensors' device. ``TorchBackend`` is such a backend. A group of several backends is torch's own
ProcessGroup; a group of this backend alone is a ``BackedGroup``, which

- returns the backend's Work to the caller. torch's own Work hides all but wait() and the future:
  it is never completed, and has no source rank;
- bypasses the dispatcher if nothing there observes calls, which halves the time of a small call.
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
from mpicoll.torch.compilation import disable_compile
from mpicoll.torch.derived_groups import DerivedGroups
from mpicoll.torch.devices import device_types
from mpicoll.torch.options import get_seconds
from mpicoll.torch.profiling import is_recording
from mpicoll.torch.windows import TorchWindow

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

__all__ = ["HAS_PYTHON_BACKENDS", "SUCCESS", "BackedGroup", "TorchBackend"]


C: Any = torch._C._distributed_c10d  # the stubs are those of the torch that is installed


#: The state of a backend without an error.
SUCCESS = C.ErrorType.SUCCESS
#: Whether torch supports backends in Python. 2.14 does, but recurses endlessly in ``supports_...``.
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
    """A group's call on its way through the dispatcher, and the Work that its backend returns."""

    __slots__ = ("backend", "name", "work")

    def __init__(self, backend: TorchBackend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.work: c10d.Work | None = None


class _ThreadState(threading.local):
    """The innermost call of a thread in the dispatcher: hooks may make calls."""

    call: _DispatchedCall | None = None


_thread_state = _ThreadState()


class TorchBackend(Collectives, C.Backend):  # type: ignore[misc]
    """A torch backend on a group of the core."""

    # torch checks these before it calls more than collectives. Each must be defined: torch 2.15
    # recurses endlessly for one that Python does not define.
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
        """Create a window for one-sided communication; every member calls at the same place.

        tensor: registered at once; None to register later. C++ cannot call this: its windows are in
        C++.
        """
        return TorchWindow(self.core, tensor)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors need no special memory."""
        return False

    def get_error(self) -> Any:
        """Return torch's ErrorType: COMM_ERROR if the group is broken, else SUCCESS."""
        return C.ErrorType.COMM_ERROR if self.core.error else SUCCESS

    def abort(self) -> None:
        """Run the abort hooks; end the group without waiting for pending operations."""
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

    # The names by which C++ looks for these.
    registerAbortHook, unregisterAbortHook = register_abort_hook, unregister_abort_hook

    def split(
        self, store: c10d.Store, ranks: Sequence[int], opts: Backend.Options | None
    ) -> TorchBackend:
        """Create the backend of a new group of some ranks, for torch's split_group."""
        limit, name = (get_seconds(opts), opts.group_name) if opts else (self.core.timeout, "")
        return TorchBackend(core_groups.split(self.core, ranks, limit, name))

    def merge(self, store: c10d.Store, opts: Backend.Options, rank: int, size: int) -> TorchBackend:
        """Create the backend of a merged group, for torch's merge_remote_group."""
        return TorchBackend(core_groups.merge(self.core, store, rank, size, get_seconds(opts)))

    def shrink(
        self, excluded: Sequence[int], flags: int = 0, opts: Backend.Options | None = None
    ) -> TorchBackend:
        """Create the backend of the remaining ranks, for torch's shrink_group; only they call.

        flags: 1 abandons pending operations.
        """
        return TorchBackend(core_groups.shrink(self.core, excluded, flags))


def _build_backend_method(name: str) -> Callable[..., Any]:
    """Build a call of the backend that keeps its Work for the ``BackedGroup`` that calls it."""
    call = getattr(Collectives, name)

    def method(self: TorchBackend, *args: Any, **kwargs: Any) -> Any:
        work, dispatched = call(self, *args, **kwargs), _thread_state.call
        if dispatched is not None and dispatched.backend is self and dispatched.name == name:
            dispatched.work = work
        return work

    method.__doc__ = call.__doc__
    return method


def _build_group_method(name: str) -> Callable[..., Any]:
    """Build a call of the group, which uses torch's dispatcher only if something observes calls."""
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
    # C++ calls the Python method of the same name, unless the calling function has this name.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


class BackedGroup(DerivedGroups, C.ProcessGroup):  # type: ignore[misc]
    """A process group of one ``TorchBackend``.

    backend: serves all devices.
    store: torch's store of the group.
    device: the ``device_id`` of ``init_process_group`` or ``new_group``; it has no effect.
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
        """The backend's group of the core."""
        return self.backend.core

    def is_observed(self) -> bool:
        """Return whether torch's dispatcher has to see this thread's calls of the group."""
        return bool(self._hooks or is_recording() or torch._C._len_torch_dispatch_stack())

    def note_hook(self, key: object) -> None:
        """Let the dispatcher see all calls, because it calls a hook.

        key: of the hook, for ``forget_hook``.
        """
        self._hooks.add(key)

    def forget_hook(self, key: object) -> None:
        """End what ``note_hook`` began."""
        self._hooks.discard(key)

    def name(self) -> str:
        """Return the name of the backend, even if the program used an alias."""
        return self.backend.name()

    getBackendName = name  # for C++

    def shutdown(self) -> None:
        """Wait for pending operations and end the group; with the default group, all groups."""
        self.backend.shutdown()

    def abort(self) -> None:
        """End the group without waiting for pending operations, which others may never join."""
        self.backend.abort()

    # It calls ``gather``: torch's dispatcher has gather_single for backends in C++ alone.
    gather_single = gather_into_tensor = Collectives.gather_single

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, or raise an error that names the missing ones."""
        self.backend.monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.backend.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> c10d.Work:
        return self.backend.end_coalescing()

    def _build_group(self, core: ProcessGroup, store: c10d.Store) -> BackedGroup:
        return BackedGroup(TorchBackend(core), store)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every group begins at 0."""

    def new_window(self, tensor: Tensor | None = None) -> TorchWindow:
        """Create a window for one-sided communication; every member calls at the same place."""
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
        """Whether there are abort hooks: always."""
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
        """Call ``hook`` after each operation has begun."""
        super().register_post_hook(hook_id, hook)
        self.note_hook(("post", hook_id))

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook."""
        super().unregister_post_hook(hook_id)
        self.forget_hook(("post", hook_id))


for _name in _CALLS:
    setattr(TorchBackend, _name, _build_backend_method(_name))
if HAS_PYTHON_BACKENDS:  # where there is no BackedGroup, torch's group may lack some of the names
    for _name in _CALLS:
        setattr(BackedGroup, _name, _build_group_method(_name))
    # Older names that C++ does not map to the new ones. Where it does, the Work is torch's own: C++
    # calls a method of an older name in Python instead of its dispatcher.
    BackedGroup._allgather_base = BackedGroup.all_gather_single
    BackedGroup._reduce_scatter_base = BackedGroup.reduce_scatter_single
disable_compile(TorchBackend)
disable_compile(BackedGroup)
