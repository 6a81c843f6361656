"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mpicoll.errors import ArgumentError
from mpicoll.horovod.torch.implementations import Sum
from mpicoll.horovod.torch.operations import allgather_async, allreduce_async
from mpicoll.horovod.torch.process_sets import size

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Normalizes by the mean and variance of all ranks' batches, which may differ in length.

    Arguments and state are as in torch.nn.BatchNorm2d. Inputs are floats of shape (N, C, ...), on a
    GPU or on the CPU; C is ``num_features``. Gradients of weight and bias are this rank's share of
    the sum over all ranks; DistributedOptimizer reduces them.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(
                f"SyncBatchNorm: input: expected two dimensions or more, got {input.dim()}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; in training all ranks call.

        input: of shape (N, C, ...); N may be 0 on some ranks.

        Returns a tensor of the same shape.
        """
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        momentum = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1 / float(self.num_batches_tracked)
        running = (self.running_mean, self.running_var) if self.training else (None, None)
        return _SyncBatchNorm.apply(input, self.weight, self.bias, *running, self.eps, momentum)


def _sums(tensor: Tensor) -> Tensor:
    """Sum over all dimensions except 1."""
    return tensor.transpose(0, 1).flatten(1).sum(1)


def _wide(tensor: Tensor, like: Tensor) -> Tensor:
    """Reshape a value per channel so that it broadcasts to ``like``."""
    return tensor.view(1, -1, *[1] * (like.dim() - 2))


class _SyncBatchNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None,
        running_mean: Tensor | None, running_var: Tensor | None, eps: float, momentum: float,
    ) -> Tensor:  # fmt: skip
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        own = x.numel() // x.size(1)
        mean = _sums(x) / max(own, 1)
        # Sums of squares around each rank's mean are combined as in T. F. Chan, G. H. Golub, R. J.
        # LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
        # 1979, which does not cancel digits if means are large.
        squares = _sums((x - _wide(mean, x)) ** 2)
        own_sums = torch.cat([mean, squares, mean.new_tensor([own])])
        gathered = allgather_async(own_sums[None]).wait()
        channels = x.size(1)
        means, counts = gathered[:, :channels], gathered[:, -1:]
        count = counts.sum()
        if count < 2:
            raise ArgumentError(
                f"SyncBatchNorm: input: expected 2 or more values per channel on all ranks "
                f"together, got {int(count)}"
            )
        mean = (means * counts).sum(0) / count
        squares = (gathered[:, channels:-1] + counts * (means - mean) ** 2).sum(0)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
        scale = (squares / count + eps).rsqrt()
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight, mean, scale, count)
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        return torch.addcmul(_wide(shift, x), x, _wide(factor, x)).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, mean, scale, count = ctx.saved_tensors
        wide = gradient.to(scale.dtype)
        normal = (input.to(scale.dtype) - _wide(mean, input)) * _wide(scale, input)
        to_bias, to_weight = _sums(wide), _sums(wide * normal)
        to_input = None
        if ctx.needs_input_grad[0]:
            both = torch.stack([to_bias, to_weight])
            reduced = allreduce_async(both, op=Sum).wait() / count
            wide = wide - _wide(reduced[0], input) - normal * _wide(reduced[1], input)
            factor = scale if weight is None else scale * weight
            to_input = (wide * _wide(factor, input)).to(input.dtype)
        of_weight = None if weight is None else to_weight.to(weight.dtype)
        of_bias = to_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return to_input, of_weight, of_bias, None, None, None, None
