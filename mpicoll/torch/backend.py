"""The backend and its process group from torch 2.15 on, where Python can make a backend.

torch's ProcessGroup hands a call to its dispatcher, where fake tensors, the counts of
``CommDebugMode``, hooks and the flight recorder stand, and the dispatcher hands it to the backend
of the tensors' device. ``TorchBackend`` is such a backend. In a group of several backends it stands
behind torch's own ProcessGroup; in a group of its own behind ``BackedGroup``, which

- gives the caller the backend's Work. What torch gives hides all of it but wait() and its future:
  it is never completed, and knows no source;
- leaves the dispatcher out while nothing there looks on, which halves what a small call costs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import seconds
from mpicoll.errors import ArgumentError
from mpicoll.torch import cores
from mpicoll.torch.collectives import Collectives
from mpicoll.torch.compilation import uncompiled
from mpicoll.torch.devices import devices
from mpicoll.torch.windows import TorchWindow

__all__ = ["AVAILABLE", "SUCCESS", "BackedGroup", "TorchBackend"]


C: Any = torch._C._distributed_c10d  # the stubs are those of the torch that is installed


#: What a backend says while nothing is wrong.
SUCCESS = C.ErrorType.SUCCESS
#: Whether this torch lets Python make a backend. 2.14 does, but asks it for ever what it supports.
AVAILABLE = hasattr(C.Backend, "supports_completion_hooks")

#: The calls that torch's dispatcher hands to a backend. Their older names are C++'s, which calls
#: these by them.
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


class _Dispatched:
    """A call of a group on its way through the dispatcher, and the Work that its backend makes."""

    __slots__ = ("backend", "name", "work")

    def __init__(self, backend: TorchBackend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.work: Any = None


class _Thread(threading.local):
    """What of a thread's calls is on its way: the innermost, for hooks may make calls."""

    call: _Dispatched | None = None


_thread = _Thread()


class TorchBackend(Collectives, C.Backend):  # type: ignore[misc]
    """A group of the core, as torch's ProcessGroup calls it."""

    # What torch asks before it asks for more. Each has to be here: where Python does not say, torch
    # 2.15 asks Python for ever.
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
        """A window for one-sided communication; every member calls at the same place.

        tensor: registered at once, None: later. C++ cannot call this: its windows are in C++.
        """
        return TorchWindow(self.core, tensor)

    def supports_tensor_alloc(self, device: Any) -> bool:
        """False: tensors need no memory of a kind."""
        return False

    def get_error(self) -> Any:
        """torch's ErrorType: COMM_ERROR once the group cannot be used any more, else SUCCESS."""
        return C.ErrorType.COMM_ERROR if self.core.broken else SUCCESS

    def eager_connect_single_device(self, device: Any) -> None:
        """Nothing: the ranks are connected when the group has been made."""

    def perform_nocolor_split(self, device: Any) -> None:
        """Nothing: ranks outside have no part in the making of a group."""

    def abort(self) -> None:
        """Runs the abort hooks; ends the group without waiting for anything."""
        self._call_abort_hooks()
        super().abort()

    def _call_abort_hooks(self) -> None:
        for hook in list(self._abort_hooks.values()):
            hook()

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Calls ``hook`` before the group is aborted."""
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Removes a hook."""
        self._abort_hooks.pop(hook_id, None)

    # The names by which C++ looks for these.
    registerAbortHook, unregisterAbortHook = register_abort_hook, unregister_abort_hook

    def parted(self, ranks: Sequence[int], limit: float | None, name: str) -> TorchBackend:
        """The backend of some ranks of the group, made by them alone.

        ranks: ranks in the group, in the order of the new one.
        limit: seconds after which an operation has failed, None never.
        name:  of the new group, the same on all of them.

        Raises ArgumentError where this rank is none of them.
        """
        if self.core.rank() not in ranks:
            raise ArgumentError(
                f"split_group: rank {self.core.rank()} is in none of the groups; let only their "
                "members call, or use new_group"
            )
        chosen = [self.core.ranks[rank] for rank in ranks]
        return TorchBackend(cores.part(chosen, limit, name))

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> TorchBackend:
        """The backend of some ranks of the group, made by them alone; torch's split_group."""
        limit = self.core.timeout if opts is None else opts._timeout.total_seconds()
        return self.parted(ranks, limit, "" if opts is None else opts.group_name)

    def shrink(self, excluded: Sequence[int], flags: int = 0, opts: Any = None) -> TorchBackend:
        """The backend of the ranks that remain, made by them alone; torch's shrink_group.

        flags: 1 gives up what is pending.
        """
        return TorchBackend(cores.without(self.core, excluded, flags))


def _kept(name: str) -> Callable[..., Any]:
    """A call of the backend, whose Work is kept for a ``BackedGroup`` that waits for it."""
    call = getattr(Collectives, name)

    def keep(self: TorchBackend, *arguments: Any, **named: Any) -> Any:
        work, waiting = call(self, *arguments, **named), _thread.call
        if waiting is not None and waiting.backend is self and waiting.name == name:
            waiting.work = work
        return work

    keep.__doc__ = call.__doc__
    return keep


def _dispatched(name: str) -> Callable[..., Any]:
    """A call of the group: of its backend, through torch's dispatcher where somebody looks on."""
    call, dispatch = getattr(Collectives, name), getattr(C.ProcessGroup, name)

    def method(self: BackedGroup, *arguments: Any, **named: Any) -> Any:
        if not self.watched():
            return call(self.backend, *arguments, **named)
        outer, mine = _thread.call, _Dispatched(self.backend, name)
        _thread.call = mine
        try:
            hidden = dispatch(self, *arguments, **named)
        finally:
            _thread.call = outer
        return hidden if mine.work is None else mine.work

    method.__doc__ = call.__doc__
    # C++ calls the Python method of the name, unless it was called from that: it looks at the
    # name of the function that calls.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


class BackedGroup(C.ProcessGroup):  # type: ignore[misc]
    """A process group of one ``TorchBackend``.

    backend: what carries everything out, for all devices.
    store: torch's store of the group.
    """

    def __init__(self, backend: TorchBackend, store: c10d.Store) -> None:
        super().__init__(store, backend.rank(), backend.size())
        self.backend = backend
        # torch hooks its look for NaNs in where Python does not see it.
        nan = os.environ.get("TORCH_DIST_NAN_CHECK") == "1"
        self._hooks: set[tuple[str, int]] = {("nan", 0)} if nan else set()
        for kind in devices():
            self._register_backend(torch.device(kind), self.BackendType.CUSTOM, backend)
        self._set_default_backend(self.BackendType.CUSTOM)

    @property
    def core(self) -> ProcessGroup:
        """The group of the core that carries everything out."""
        return self.backend.core

    def watched(self) -> bool:
        """Whether somebody in torch's dispatcher looks at this thread's calls of the group."""
        return bool(
            self._hooks
            or torch._C._len_torch_dispatch_stack()
            or self in distributed_c10d._world.pg_flight_recorder_hooks
        )

    def name(self) -> str:
        """The name of the backend, whatever name of another was asked for."""
        return self.backend.name()

    getBackendName = name  # for C++

    def shutdown(self) -> None:
        """Waits for what is pending and ends the group; the default group ends everything."""
        self.backend.shutdown()

    def abort(self) -> None:
        """Ends the group without waiting for anything, which other ranks may never join."""
        self.backend.abort()

    def gather_single(self, *arguments: Any, **named: Any) -> c10d.Work:
        """gather to the root into one tensor; past the dispatcher, for backends in C++ alone."""
        return self.backend.gather_single(*arguments, **named)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names who is missing."""
        self.backend.monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.backend.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> c10d.Work:
        return self.backend.end_coalescing()

    def gather_into_tensor(self, *arguments: Any, **named: Any) -> c10d.Work:
        """The older name of ``gather_single``."""
        return self.backend.gather_single(*arguments, **named)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> BackedGroup | None:
        """The group of some ranks of this one, made by them alone; None on the others."""
        if self.rank() not in new_ranks:
            return None
        limit = seconds(timeout, self.core.timeout, "split_group")
        name = group_name or f"{self.group_name}:{'-'.join(map(str, new_ranks))}"
        store = c10d.PrefixStore(f"{name}/", self.get_group_store())
        made = BackedGroup(self.backend.parted(new_ranks, limit, name), store)
        made._set_group_name(name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every group begins at 0."""

    def new_window(self, tensor: Tensor | None = None) -> TorchWindow:
        """A window for one-sided communication; every member calls at the same place."""
        return self.backend.new_window(tensor)

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can be made anew of other ranks."""
        return self.backend.supports_reconfigure

    @property
    def supports_window(self) -> bool:
        """Whether the group has windows for one-sided communication."""
        return self.backend.supports_window

    @property
    def supports_abort_hooks(self) -> bool:
        """True."""
        return self.backend.supports_abort_hooks

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Calls ``hook`` before the group is aborted."""
        self.backend.register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Removes a hook."""
        self.backend.unregister_abort_hook(hook_id)

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Calls ``hook`` before each operation."""
        super().register_pre_hook(hook_id, hook)
        self._hooks.add(("pre", hook_id))

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Removes a hook."""
        super().unregister_pre_hook(hook_id)
        self._hooks.discard(("pre", hook_id))

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Calls ``hook`` after each operation was begun."""
        super().register_post_hook(hook_id, hook)
        self._hooks.add(("post", hook_id))

    def unregister_post_hook(self, hook_id: int) -> None:
        """Removes a hook."""
        super().unregister_post_hook(hook_id)
        self._hooks.discard(("post", hook_id))


for _name in _CALLS:
    setattr(TorchBackend, _name, _kept(_name))
    setattr(BackedGroup, _name, _dispatched(_name))
# Older names that C++ does not look for; by the others it calls what they were renamed to.
BackedGroup._allgather_base = BackedGroup.all_gather_single
BackedGroup._reduce_scatter_base = BackedGroup.reduce_scatter_single
uncompiled(TorchBackend)
uncompiled(BackedGroup)
