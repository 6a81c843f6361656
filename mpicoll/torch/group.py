"""The process group before torch 2.15, which has no backends in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as c10d

from mpicoll.core.groups import ProcessGroup
from mpicoll.errors import UnsupportedError
from mpicoll.torch.collectives import Collectives
from mpicoll.torch.compilation import disable_compile
from mpicoll.torch.derived_groups import DerivedGroups
from mpicoll.torch.devices import device_types
from mpicoll.torch.windows import TorchWindow

__all__ = ["TorchGroup"]


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: TorchGroup, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(
            f"{name}: torch {torch.__version__} has it for backends in C++ alone; expected 2.15 or "
            "newer"
        )

    refuse.__doc__ = "Not supported."
    return refuse


@disable_compile
class TorchGroup(Collectives, DerivedGroups, c10d.ProcessGroup):  # type: ignore[misc]
    """A torch process group on a group of the core.

    It is its own backend: torch's C++ finds no other in it.

    store: torch's store of the group.
    device: the ``device_id`` of ``init_process_group`` or ``new_group``; it has no effect.
    """

    # torch checks these before it calls more than collectives.
    supports_splitting = True
    supports_shrinking = supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = supports_tensor_alloc = False
    supports_abort_hooks = supports_completion_hooks = supports_reconfigure = False
    supports_window = True
    #: Whether symmetric memory finds its peers through the group: torch's default.
    use_pg_for_symm_mem_rendezvous = False

    # The inherited methods need a backend in C++, or store hooks that are never called.
    _register_on_completion_hook = _refusal("_register_on_completion_hook")
    register_pre_hook = _refusal("register_pre_hook")
    register_post_hook = _refusal("register_post_hook")
    register_abort_hook = _refusal("register_abort_hook")
    note_hook = _refusal("a hook in C++")
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
        """Return this group: it is its own backend, for every device that it serves."""
        if torch.device(device).type not in device_types():
            raise UnsupportedError(
                f"mpicoll: no backend for device {device}; expected one of "
                f"{', '.join(device_types())}"
            )
        return self

    def get_group_store(self) -> c10d.Store:
        """Return torch's store of the group."""
        return self.store

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchWindow:
        """Create a window for one-sided communication, as torch has them from 2.14 on."""
        return TorchWindow(self.core, tensor)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> c10d.Work:
        return self.end_coalescing()
