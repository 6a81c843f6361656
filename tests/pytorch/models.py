"""Small models, and reference training by one process on the batches of all ranks."""

from __future__ import annotations

import copy

import torch
from inputs import normal
from torch import nn

#: Samples per rank and step.
BATCH = 4


class Plain(nn.Module):
    """Layers of different shapes, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))


def make(model=Plain) -> nn.Module:
    """Create a model with the same weights on all ranks."""
    torch.manual_seed(7)
    return model()


def batch(rank: int, step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of one rank in a step."""
    return normal(rank, size, 6, key=("x", step)), normal(rank, size, 3, key=("y", step))


def batches(ranks: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of all ranks in a step, concatenated."""
    parts = [batch(rank, step) for rank in range(ranks)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), y)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_alone(ranks: int, steps: int, model: nn.Module | None = None) -> nn.Module:
    """Train one process on the concatenated batches; return the model."""
    model = copy.deepcopy(model) if model else make()
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batches(ranks, step)).backward()
        optimizer.step()
    return model


def train(model: nn.Module, rank: int, steps: int, optimizer=None) -> list[float]:
    """Train on this rank's batches; return the losses."""
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_parameters(found: nn.Module, wanted: nn.Module, **tolerance: float) -> None:
    """Compare parameters, which may be DTensors."""
    parameters = dict(wanted.named_parameters())
    assert dict(found.named_parameters()).keys() == parameters.keys()
    for name, parameter in found.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(full, parameters[name], **tolerance)


def moved(found: nn.Module, start: nn.Module) -> bool:
    """Return True if training changed every parameter."""
    return all(
        not torch.equal(new, old)
        for new, old in zip(found.parameters(), start.parameters(), strict=True)
    )
