"""torch's process groups. Before torch 2.15, a group is a ``TorchGroup``.

From torch 2.15 on, which supports Python backends, torch's ProcessGroup passes a call to its
dispatcher, which implements fake tensors, the counts of ``CommDebugMode``, hooks and the flight
recorder. The dispatcher calls the backend of the tensors' device, here ``TorchBackend``. A group
with several backends is torch's own ProcessGroup. A group with this backend only is a
``BackedGroup``, which

- returns the Work of the backend. torch's own Work only has wait() and the future: it never
completes and has no source rank;
- bypasses the dispatcher if nothing observes calls, which halves the time of a small call.

store: torch's store of a group.
device: the ``device_id`` of ``init_process_group`` or ``new_group``; unused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as c10d

from mpicoll.api import subgroups
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import parse_timeout
from mpicoll.errors import UnsupportedError
from mpicoll.torch import core_groups
from mpicoll.torch.collectives import Collectives
from mpicoll.torch.internals import device_types, disable_compile, is_recording
from mpicoll.torch.options import get_seconds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend


C: Any = torch._C._distributed_c10d  # untyped, because the stubs depend on the installed torch


#: The state of a backend without an error.
SUCCESS = C.ErrorType.SUCCESS
#: Whether torch supports Python backends. 2.14 does, but recurses endlessly in ``supports_...``.
HAS_PYTHON_BACKENDS = hasattr(C.Backend, "supports_completion_hooks")


def build_group(
    core: ProcessGroup, store: c10d.Store, device: torch.device | None = None
) -> c10d.ProcessGroup:
    """Return torch's process group for a group of the core."""
    if HAS_PYTHON_BACKENDS:
        return BackedGroup(TorchBackend(core), store, device)
    return TorchGroup(core, store, device)


@disable_compile
class DerivedGroups:
    """Methods of a process group, of any torch, that create another group from it."""

    #: Number of groups that were split from this one.
    split_count = 0

    def split_group(
        self: Any,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Backend.Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Create a subgroup. Only its members need to call it; returns None on other ranks.

        new_ranks: ranks in this group, in the order of the new one.
        """
        if self.core.rank() not in new_ranks:
            return None
        limit = parse_timeout(timeout, self.core.timeout, "split_group")
        name = group_name or f"{self.group_name}:split:{sorted(new_ranks)}"
        description = group_desc or f"{self.group_desc}:split:{self.split_count}"
        store = c10d.PrefixStore(f"{name}/", self.get_group_store())
        core = core_groups.split(self.core, new_ranks, limit, name)
        self.split_count += 1
        group: Any = build_group(core, store)
        group._set_group_name(name)
        group._set_group_desc(description)
        return group


# --- from torch 2.15 on ---------------------------------------------------------------------------

#: The calls that torch's dispatcher passes to a backend.
_CALLS = (
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
    "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "barrier", "broadcast",
    "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "scatter", "send",
)  # fmt: skip
#: Methods of a group that call its backend. ``getBackendName`` is ``name`` in C++.
_DELEGATED = (
    "_end_coalescing", "_start_coalescing", "abort", "getBackendName", "monitored_barrier", "name",
    "new_window", "register_abort_hook", "shutdown", "unregister_abort_hook",
)  # fmt: skip


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

    def shrink(
        self, excluded: Sequence[int], flags: int = 0, opts: Backend.Options | None = None
    ) -> TorchBackend:
        """Create the backend of the remaining ranks, for torch's shrink_group; only they call it.

        flags: 1 aborts pending operations.
        """
        return TorchBackend(subgroups.shrink_group(list(excluded), self.core, flags))


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


def _build_delegate(name: str) -> Callable[..., Any]:
    """Build a method of the group that calls the backend's method."""

    def method(self: BackedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.backend, name)(*args, **kwargs)

    method.__doc__ = getattr(TorchBackend, name).__doc__
    return method


class BackedGroup(DerivedGroups, C.ProcessGroup):  # type: ignore[misc]
    """A process group of one ``TorchBackend``.

    backend: serves all devices.
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

    # It calls ``gather``, because torch's dispatcher has gather_single only for C++ backends.
    gather_single = gather_into_tensor = Collectives.gather_single

    _set_sequence_number_for_group = Collectives._do_nothing
    # torch reads these from the group.
    supports_abort_hooks = property(lambda self: self.backend.supports_abort_hooks)
    supports_reconfigure = property(lambda self: self.backend.supports_reconfigure)
    supports_window = property(lambda self: self.backend.supports_window)

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


for _call in _CALLS:
    setattr(TorchBackend, _call, _build_backend_method(_call))
for _method in _DELEGATED:
    setattr(BackedGroup, _method, _build_delegate(_method))
if HAS_PYTHON_BACKENDS:  # else BackedGroup is unused, and torch's group may lack these names
    for _call in _CALLS:
        setattr(BackedGroup, _call, _build_group_method(_call))
    # Older names that C++ does not map to new ones. For names that it maps, a Python method would
    # replace its dispatcher.
    BackedGroup._allgather_base = BackedGroup.all_gather_single
    BackedGroup._reduce_scatter_base = BackedGroup.reduce_scatter_single
disable_compile(TorchBackend)
disable_compile(BackedGroup)


# --- before torch 2.15 ---------------------------------------------------------------------------


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: TorchGroup, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(
            f"{name}: not supported by torch {torch.__version__} for Python backends; expected "
            "torch 2.15 or newer"
        )

    refuse.__doc__ = "Not supported."
    return refuse


@disable_compile
class TorchGroup(Collectives, DerivedGroups, c10d.ProcessGroup):  # type: ignore[misc]
    """The process group before torch 2.15, on a group of the core.

    It is its own backend, because torch's C++ finds no other.
    """

    # torch checks these before it calls anything but collectives.
    supports_splitting = True
    supports_shrinking = supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = supports_tensor_alloc = False
    supports_abort_hooks = supports_completion_hooks = supports_reconfigure = False
    supports_window = True
    #: Whether symmetric memory finds its peers through the group. False is torch's default.
    use_pg_for_symm_mem_rendezvous = False

    # The inherited methods need a C++ backend, or store hooks that are never called.
    _register_on_completion_hook = _refusal("_register_on_completion_hook")
    register_pre_hook = _refusal("register_pre_hook")
    register_post_hook = _refusal("register_post_hook")
    register_abort_hook = _refusal("register_abort_hook")
    note_hook = _refusal("C++ hooks")
    get_reconfigure_handle = _refusal("get_reconfigure_handle")
    reconfigure = _refusal("reconfigure")

    def __init__(
        self, core: ProcessGroup, store: c10d.Store, device: torch.device | None = None
    ) -> None:
        super().__init__(core)
        self.store = store
        self.bound_device_id = device
        self._name = core.group_name
        self._description = core.group_desc

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description of the group."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in device_types()]

    def _get_backend(self, device: torch.device) -> TorchGroup:
        """Return this group, which is its own backend for all device types that it serves."""
        if torch.device(device).type not in device_types():
            raise UnsupportedError(
                f"mpicoll: device {device} is not supported; expected one of "
                f"{', '.join(device_types())}"
            )
        return self

    def get_group_store(self) -> c10d.Store:
        """Return torch's store of the group."""
        return self.store
