"""The model and the data of the scripts, and the function that writes a rank's outcome.

The scripts do not mention mpicoll, as scripts of users. Each step uses the whole data set, half of
it on each of two ranks, so the result does not depend on shuffling.
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


def write_outcome(parameters: Iterable[Tensor], **more: object) -> None:
    """Write this rank's outcome: its parameters, and the number of calls of mpicoll's groups."""
    import torch.distributed as dist

    from mpicoll.core.groups import state

    rank = dist.get_rank()
    outcome: Mapping[str, object] = {
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "calls": sum(group.begun for group in state.groups),
        "parameters": [
            value for p in parameters for value in p.detach().double().flatten().tolist()
        ],
        **more,
    }
    Path(os.environ["OUTCOMES"], f"{rank}.json").write_text(json.dumps(outcome))
