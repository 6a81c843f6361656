"""Process groups derived from a group, and the process group before torch 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as c10d

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import parse_timeout
from mpicoll.errors import UnsupportedError
from mpicoll.torch import core_groups
from mpicoll.torch.collectives import Collectives
from mpicoll.torch.internals import device_types, disable_compile
from mpicoll.torch.windows import TorchWindow

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

__all__ = ["DerivedGroups", "TorchGroup"]


class _Group(Protocol):
    """The members of a process group that ``DerivedGroups`` uses."""

    group_name: str
    group_desc: str
    split_count: int

    @property
    def core(self) -> ProcessGroup:
        """The group of the core."""
        ...

    def get_group_store(self) -> c10d.Store:
        """Return torch's store of the group."""
        ...

    def _build_group(self, core: ProcessGroup, store: c10d.Store) -> Any:
        """Return a process group of the same class on another group of the core."""
        ...


@disable_compile
class DerivedGroups:
    """Methods of a process group that create another group from it."""

    #: Number of groups that were split from this one.
    split_count = 0

    def split_group(
        self: _Group,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Backend.Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Create a subgroup; only its members call it. Returns None on other ranks.

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
        return _name(self._build_group(core, store), name, description)

    def merge_remote_group(
        self: _Group,
        store: c10d.Store,
        size: int,
        timeout: timedelta = c10d.default_pg_timeout,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Create one group of all members of several groups, in the order of their calls.

        store: the same for all of them, not used by an earlier merge.
        size: number of all members.
        timeout: time to wait for the members, and timeout of the new group.

        All of them are ranks of one MPI job. Raises CollectiveTimeoutError (a RuntimeError) if
        fewer than ``size`` call in time, and ArgumentError (a ValueError) if more call.
        """
        limit = parse_timeout(timeout, None, "merge_remote_group")
        rank = store.add("mergeGroupRank", 1) - 1  # as torch does it for backends in C++
        group = self._build_group(core_groups.merge(self.core, store, rank, size, limit), store)
        name, description = f"{self.group_name}:merge", f"{self.group_desc}:merge"
        return _name(group, group_name or name, group_desc or description)


def _name(group: Any, name: str, description: str) -> Any:
    group._set_group_name(name)
    group._set_group_desc(description)
    return group


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
    """A torch process group on a group of the core.

    It is its own backend, because torch's C++ finds no other.

    store: torch's store of the group.
    device: the ``device_id`` of ``init_process_group`` or ``new_group``; unused.
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

    def _build_group(self, core: ProcessGroup, store: c10d.Store) -> TorchGroup:
        return TorchGroup(core, store)

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
        """The device types whose tensors are served."""
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

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchWindow:
        """Create a window for one-sided communication, as torch does from 2.14 on."""
        return TorchWindow(self.core, tensor)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> c10d.Work:
        return self.end_coalescing()
