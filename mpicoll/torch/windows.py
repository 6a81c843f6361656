"""torch's Window: one-sided writes into the tensors that the ranks of a group have registered.

torch 2.15 has the class and no way to derive from it in Python ("No constructor defined"), so this
one is of the same methods and not of its type: what Python code is given by ``_new_window`` and by
a group's or backend's ``new_window``. C++ that asks a Backend for a window gets a cast error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from mpicoll.api import windows
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import Work
from mpicoll.errors import ArgumentError
from mpicoll.torch.compilation import uncompiled
from mpicoll.torch.works import Done, Pending

__all__ = ["TorchWindow", "allocate_tensor"]

_UNSET = timedelta(0)


@uncompiled
class TorchWindow:
    """A window of the core, with the methods of ``torch._C._distributed_c10d.Window``.

    group: the core's group; every member makes the window, and registers, at the same place.
    tensor: registered at once; None: later.
    """

    def __init__(self, group: ProcessGroup, tensor: Tensor | None = None) -> None:
        self._core = windows.Window(group)
        self._own: Callable[[], Tensor | None] = lambda: None
        if tensor is not None:
            self.tensor_register(tensor)

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Lets the others write into a contiguous host tensor; every member calls with its own.

        owning: the window holds it until it is deregistered, else the caller does.
        """
        self._core.register(tensor, owning)
        self._own = (lambda: tensor) if owning else weakref.ref(tensor)

    def tensor_deregister(self) -> None:
        """Ends that; every member calls."""
        self._core.deregister()
        self._own = lambda: None

    def put(
        self,
        tensor: Tensor,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool,
        opts: Any = None,
    ) -> Any:
        """Writes a tensor into that of ``dst_rank`` from an element on; done when it is there."""
        limit = _limit(opts)
        return _work(self._core.put(tensor, dst_rank, target_offset_nelems, async_op, limit))

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Any:
        """Tells a rank that what was put before is there."""
        return _work(self._core.signal(peer_rank, async_op, _limit(opts)))

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Any:
        """Waits for the next signal of a rank."""
        return _work(self._core.wait_signal(peer_rank, async_op, _limit(opts)))

    def map_remote_tensor(self, rank: int) -> Tensor:
        """The tensor that a rank has registered: this one's own, or one of another rank of this
        node whose memory came from ``allocate_tensor``.
        """
        if rank == self._core.group.rank():
            self._core.unified(rank)  # raises where nothing is registered
            own = self._own()
            if own is None:
                raise ArgumentError(
                    "map_remote_tensor: this rank's tensor was registered with owning=False and is "
                    "gone; keep it until tensor_deregister"
                )
            return own
        memory, dtype, shape = self._core.mapped(rank)
        return _tensor(memory, getattr(torch, dtype), shape)

    def get_attr(self, peer_rank: int) -> Any:
        """A WindowAttr: whether MPI has one copy of that rank's memory or two."""
        c10d: Any = torch._C._distributed_c10d  # which has these from torch 2.15 on
        found, kinds = c10d.WindowAttr(), c10d.WindowAccessType
        unified = self._core.unified(peer_rank)
        found.access_type = kinds.UNIFIED if unified else kinds.SEPARATE
        return found


def allocate_tensor(size: int, dtype: torch.dtype) -> Tensor:
    """A host tensor of ``size`` zeros that the other ranks of the node can map from a window."""
    nbytes = size * dtype.itemsize
    return _tensor(windows.allocate(nbytes), dtype, (size,))


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor on bytes of memory; empty ones have none."""
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _limit(opts: Any) -> float | None:
    """Seconds of an Options object; None where it does not say."""
    return opts.timeout.total_seconds() if opts is not None and opts.timeout > _UNSET else None


def _work(work: Work | None) -> Any:
    return Done() if work is None else Pending((work,), ())
