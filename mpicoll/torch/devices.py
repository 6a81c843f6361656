"""The devices whose tensors the backend serves on this machine."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["devices"]


@cache
def devices() -> tuple[str, ...]:
    """The kinds of device: "cpu", and "cuda" where there is such a GPU.

    Where a backend is registered for a kind of device, torch takes that device for present: its
    checkpoints would copy to GPUs that are not there. ROCm, which torch calls "cuda" as well, is
    not served. Counting asks the driver's management library; a process may fork afterwards.
    """
    return ("cpu", "cuda") if torch.version.cuda and torch.cuda.device_count() else ("cpu",)
