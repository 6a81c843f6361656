"""Tensors filled with delay over garbage, so that missing stream order gives wrong values."""

from __future__ import annotations

import torch

#: Clock cycles of the kernel before the values are written: about 10 ms.
CYCLES = 20_000_000


def late(device, cycles=CYCLES):
    """Delay the current stream."""
    torch.cuda._sleep(cycles)


def filled(device, count, value, dtype=torch.float32):
    """Return a tensor that is filled with a value, with delay."""
    tensor = torch.full((count,), 77, dtype=dtype, device=device)
    late(device)
    tensor.fill_(value)
    return tensor
