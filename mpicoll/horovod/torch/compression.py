"""What gradients are sent as."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Sends tensors as they are; the base of others."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what to send, and what ``decompress`` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return what was sent, as ``compress`` got it."""
        return tensor


class _FP16(Compressor):
    """Sends floats as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor.is_floating_point():
            return tensor, tensor.dtype
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """What ``compression`` of allreduce and DistributedOptimizer can be."""

    none = Compressor
    fp16 = _FP16
