"""Adasum: a sum that does not count twice what gradients have in common.

S. Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021: of two
gradients it is ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``, their sum where they are orthogonal
and their mean where they are equal; of more, that of pairs, of pairs of pairs, and so on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpicoll as dist

__all__ = ["adasum"]


def adasum(tensor: Tensor, group: Any) -> None:
    """Combine the ranks' tensors in place; their number is a power of 2, their dtype a float.

    In step k a rank and the one whose number differs in bit k exchange what they have. Both combine
    it in the order of their ranks, so all get the same bits.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    distance = 1
    while distance < size:
        peer = rank ^ distance
        own, other = (
            tensor.contiguous(),
            torch.empty_like(tensor, memory_format=torch.contiguous_format),
        )
        sending = dist.isend(own, group=group, group_dst=peer)
        dist.recv(other, group=group, group_src=peer)
        assert sending is not None
        sending.wait()
        tensor.copy_(_combine(own, other) if rank < peer else _combine(other, own))
        distance *= 2


def _combine(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    # Sums of squares of many elements: in float64, as the paper has it.
    x, y = a.double().flatten(), b.double().flatten()
    dot, aa, bb = float(x @ y), float(x @ x), float(y @ y)
    return a * (1 - dot / (2 * aa) if aa else 1.0) + b * (1 - dot / (2 * bb) if bb else 1.0)
