"""What every library trains here, what comes out of it, and where a rank tells its outcome.

The scripts beside are what a user's script is: none says mpicoll. Each step takes the whole set, in
halves on two ranks, so that how a library shuffles changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

SAMPLES, STEPS, RATE = 8, 5, 0.1


def data() -> tuple[Tensor, Tensor]:
    """Inputs of shape (8, 3) and targets of shape (8, 1)."""
    x = torch.linspace(-1, 1, 3 * SAMPLES).reshape(SAMPLES, 3)
    return x, (x**2).sum(1, keepdim=True)


def dataset() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(*data())


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def tell(parameters: Iterable[Tensor], **more: object) -> None:
    """Writes this rank's outcome: its parameters, and who carried its calls."""
    import torch.distributed as dist

    from mpicoll.core.groups import state

    rank = dist.get_rank()
    outcome: Mapping[str, object] = {
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "carried": sum(group.begun for group in state.groups),
        "parameters": [
            value for p in parameters for value in p.detach().double().flatten().tolist()
        ],
        **more,
    }
    Path(os.environ["OUTCOMES"], f"{rank}.json").write_text(json.dumps(outcome))
