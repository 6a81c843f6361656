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

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import parse_timeout
from mpicoll.errors import ArgumentError
from mpicoll.torch import core_groups
from mpicoll.torch.collectives import Collectives
from mpicoll.torch.compilation import disable_compile
from mpicoll.torch.devices import device_types
from mpicoll.torch.windows import TorchWindow

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

__all__ = ["HAS_PYTHON_BACKENDS", "SUCCESS", "BackedGroup", "TorchBackend"]


C: Any = torch._C._distributed_c10d  # the stubs are those of the torch that is installed


#: The state of a backend without an error.
SUCCESS = C.ErrorType.SUCCESS
#: Whether torch supports backends in Python. 2.14 does, but recurses endlessly in ``supports_...``.
HAS_PYTHON_BACKENDS = hasattr(C.Backend, "supports_completion_hooks")

#: The calls that torch's dispatcher passes to a backend. C++ implements their older names by these.
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
        return C.ErrorType.COMM_ERROR if self.core.broken else SUCCESS

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: the ranks are connected when the group has been created."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: only members take part in the creation of a group."""

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

    def create_subgroup(self, ranks: Sequence[int], limit: float | None, name: str) -> TorchBackend:
        """Create the backend of a new group of some ranks; only they call.

        ranks: ranks in the group, in the order of the new one.
        limit: seconds after which an operation has failed, None for never.
        name:  of the new group, the same on all of them.

        Raises ArgumentError if this rank is not one of them.
        """
        if self.core.rank() not in ranks:
            raise ArgumentError(
                f"split_group: rank {self.core.rank()} is in none of the groups; let only their "
                "members call, or use new_group"
            )
        global_ranks = [self.core.ranks[rank] for rank in ranks]
        return TorchBackend(
            core_groups.create_subgroup(global_ranks, limit, name, self.core.reproducible)
        )

    def split(
        self, store: c10d.Store, ranks: Sequence[int], opts: Backend.Options | None
    ) -> TorchBackend:
        """Create the backend of a new group of some ranks, for torch's split_group."""
        limit = self.core.timeout if opts is None else opts._timeout.total_seconds()
        return self.create_subgroup(ranks, limit, "" if opts is None else opts.group_name)

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


class BackedGroup(C.ProcessGroup):  # type: ignore[misc]
    """A process group of one ``TorchBackend``.

    backend: serves all devices.
    store: torch's store of the group.
    """

    def __init__(self, backend: TorchBackend, store: c10d.Store) -> None:
        super().__init__(store, backend.rank(), backend.size())
        self.backend = backend
        # Python cannot see the hook of torch's NaN check.
        nan = os.environ.get("TORCH_DIST_NAN_CHECK") == "1"
        self._hooks: set[tuple[str, int]] = {("nan", 0)} if nan else set()
        for kind in device_types():
            self._register_backend(torch.device(kind), self.BackendType.CUSTOM, backend)
        self._set_default_backend(self.BackendType.CUSTOM)

    @property
    def core(self) -> ProcessGroup:
        """The backend's group of the core."""
        return self.backend.core

    def is_observed(self) -> bool:
        """Return whether torch's dispatcher has to see this thread's calls of the group."""
        return bool(
            self._hooks
            or torch._C._len_torch_dispatch_stack()
            or self in distributed_c10d._world.pg_flight_recorder_hooks
        )

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

    def gather_single(self, *args: Any, **kwargs: Any) -> c10d.Work:
        """Gather to the root into one tensor; torch's dispatcher has it for C++ backends only."""
        return self.backend.gather_single(*args, **kwargs)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, or raise an error that names the missing ones."""
        self.backend.monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.backend.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> c10d.Work:
        return self.backend.end_coalescing()

    def gather_into_tensor(self, *args: Any, **kwargs: Any) -> c10d.Work:
        """Call ``gather_single``, of which this is the older name."""
        return self.backend.gather_single(*args, **kwargs)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Backend.Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> BackedGroup | None:
        """Create the group of some ranks of this one; only they call. Returns None on others."""
        if self.rank() not in new_ranks:
            return None
        limit = parse_timeout(timeout, self.core.timeout, "split_group")
        name = group_name or f"{self.group_name}:{'-'.join(map(str, new_ranks))}"
        store = c10d.PrefixStore(f"{name}/", self.get_group_store())
        group = BackedGroup(self.backend.create_subgroup(new_ranks, limit, name), store)
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

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
        self._hooks.add(("pre", hook_id))

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook."""
        super().unregister_pre_hook(hook_id)
        self._hooks.discard(("pre", hook_id))

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call ``hook`` after each operation has begun."""
        super().register_post_hook(hook_id, hook)
        self._hooks.add(("post", hook_id))

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook."""
        super().unregister_post_hook(hook_id)
        self._hooks.discard(("post", hook_id))


for _name in _CALLS:
    setattr(TorchBackend, _name, _build_backend_method(_name))
if HAS_PYTHON_BACKENDS:  # where there is no BackedGroup, torch's group may lack some of the names
    for _name in _CALLS:
        setattr(BackedGroup, _name, _build_group_method(_name))
    # Older names that C++ does not map to the new ones.
    BackedGroup._allgather_base = BackedGroup.all_gather_single
    BackedGroup._reduce_scatter_base = BackedGroup.reduce_scatter_single
disable_compile(TorchBackend)
disable_compile(BackedGroup)
