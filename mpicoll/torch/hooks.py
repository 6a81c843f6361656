"""Replacements of torch functions that would bypass Python groups: C++ hooks and FP16_COMPRESS."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch._C._distributed_c10d
import torch.distributed as c10d
from torch.nn.parallel import DistributedDataParallel

from mpicoll.torch.collectives import Collectives

__all__ = ["replace_builtin_hook", "watch_attaching"]

C: Any = torch._C._distributed_c10d  # older versions lack the hooks, in their stubs as well


def watch_attaching() -> None:
    """Call ``note_hook`` of a group when torch attaches a C++ hook, and ``forget_hook`` at its end.

    torch attaches hooks such as ``NanCheckHook`` without calling the Python class. Groups with
    these methods bypass torch's dispatcher, which calls the hooks, unless a hook is noted.
    """
    for name in "NanCheckHook", "FlightRecorderHook":
        if hasattr(C, name):  # from torch 2.15 on
            _wrap(getattr(C, name))


def _wrap(kind: Any) -> None:
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


def replace_builtin_hook() -> None:
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
