"""The device types whose tensors the backend serves on this machine."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["device_types"]


@cache
def device_types() -> tuple[str, ...]:
    """Return "cpu", and "cuda" if there is such a GPU.

    If a backend is registered for a device type, torch assumes that such a device is present: its
    checkpoints would copy to GPUs that do not exist. ROCm, which torch also calls "cuda", is not
    supported. Counting asks the driver's management library, so a process may still fork.
    """
    return ("cpu", "cuda") if torch.version.cuda and torch.cuda.device_count() else ("cpu",)
