"""DDP's built-in hook FP16_COMPRESS, for groups whose Works come from Python.

The hook is in C++. It needs a future that holds a list of tensors in C++, and a future that Python
completes holds a Python object. The hook of the same name in Python does the same.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as c10d
from torch.nn.parallel import DistributedDataParallel

from mpicoll.torch.collectives import Collectives

__all__ = ["replace_builtin_hook"]


def replace_builtin_hook() -> None:
    """Make ``DistributedDataParallel._register_builtin_comm_hook`` register the hook in Python.

    Only for FP16_COMPRESS, and for models whose group's backend is mpicoll.
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
