"""torch's Window: one-sided writes into tensors that the ranks of a group have registered.

torch 2.15 has the class, but Python cannot derive from it ("No constructor defined"), so this class
has the same methods but another type. ``_new_window``, and ``new_window`` of a group or backend,
return it to Python. C++ that requests a window of a Backend gets a cast error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpicoll.api import windows
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import Work
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.torch.internals import disable_compile
from mpicoll.torch.works import CompletedWork, PendingWork

if TYPE_CHECKING:
    # From torch 2.14 on.
    from torch._C._distributed_c10d import (
        PutOptions,
        SignalOptions,
        WaitSignalOptions,
        WindowAttr,
    )

_UNSET = timedelta(0)


@disable_compile
class TorchWindow:
    """A window of the core, with the methods of ``torch._C._distributed_c10d.Window``.

    group: the core's group. Every member creates the window, and registers, at the same point.
    tensor: registered immediately; None to register later.
    """

    def __init__(self, group: ProcessGroup, tensor: Tensor | None = None) -> None:
        self._core = windows.Window(group)
        self._get_own: Callable[[], Tensor | None] = lambda: None
        if tensor is not None:
            self.tensor_register(tensor)

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Let other ranks write into a contiguous host tensor; every member calls it.

        owning: if True, the window keeps the tensor alive until it is deregistered. If False, the
            caller does.
        """
        self._core.register(tensor, owning)
        self._get_own = (lambda: tensor) if owning else weakref.ref(tensor)

    def tensor_deregister(self) -> None:
        """End the registration; every member calls it."""
        self._core.deregister()
        self._get_own = lambda: None

    def put(
        self,
        tensor: Tensor,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool,
        opts: PutOptions | None = None,
    ) -> CompletedWork | PendingWork:
        """Write a tensor into the tensor of ``dst_rank``. Complete there when the call returns."""
        limit = _parse_limit(opts)
        return _wrap(self._core.put(tensor, dst_rank, target_offset_nelems, async_op, limit))

    def signal(
        self, peer_rank: int, async_op: bool, opts: SignalOptions | None = None
    ) -> CompletedWork | PendingWork:
        """Notify a rank that all earlier puts are complete."""
        return _wrap(self._core.signal(peer_rank, async_op, _parse_limit(opts)))

    def wait_signal(
        self, peer_rank: int, async_op: bool, opts: WaitSignalOptions | None = None
    ) -> CompletedWork | PendingWork:
        """Wait for the next signal of a rank."""
        return _wrap(self._core.wait_signal(peer_rank, async_op, _parse_limit(opts)))

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Return the registered tensor of this rank. Tensors of other ranks cannot be mapped.

        Raises UnsupportedError (a ValueError) for another rank.
        """
        self._core.unified(rank)  # raises if nothing is registered, and for an unknown rank
        if rank != self._core.group.rank():
            raise UnsupportedError(
                f"map_remote_tensor: mapping the tensor of another rank ({rank}) is not supported; "
                "use put"
            )
        own = self._get_own()
        if own is None:
            raise ArgumentError(
                "map_remote_tensor: the tensor of this rank, registered with owning=False, was "
                "deleted; keep it until tensor_deregister"
            )
        return own

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """Return a WindowAttr with the memory model of MPI on that rank."""
        c10d: Any = torch._C._distributed_c10d  # has these from torch 2.15 on
        attributes, kinds = c10d.WindowAttr(), c10d.WindowAccessType
        unified = self._core.unified(peer_rank)
        attributes.access_type = kinds.UNIFIED if unified else kinds.SEPARATE
        return attributes


def _parse_limit(opts: PutOptions | SignalOptions | WaitSignalOptions | None) -> float | None:
    """Return the timeout of an options object in seconds, or None."""
    return opts.timeout.total_seconds() if opts is not None and opts.timeout > _UNSET else None


def _wrap(work: Work | None) -> CompletedWork | PendingWork:
    return CompletedWork() if work is None else PendingWork((work,), ())
