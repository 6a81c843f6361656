"""Tensors whose values come late, over garbage: who does not wait for their stream finds that."""

from __future__ import annotations

import torch

#: Cycles of the clock that a kernel takes before the values are made: some 10 ms.
CYCLES = 20_000_000


def late(device, cycles=CYCLES):
    """What comes after this in the current stream has to wait a while."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def filled(device, count, value, dtype=torch.float32):
    """A tensor of one value."""
    tensor = torch.full((count,), 77, dtype=dtype, device=device)
    late(device)
    tensor.fill_(value)
    return tensor
