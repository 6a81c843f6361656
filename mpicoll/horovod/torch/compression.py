"""Compression of gradients for sending."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Sends tensors unchanged; base class of compressors."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for ``decompress``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a received tensor in its original form."""
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
    """Values of the argument ``compression`` of allreduce and DistributedOptimizer."""

    none = Compressor
    fp16 = _FP16
