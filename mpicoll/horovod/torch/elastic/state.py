"""TorchState: the state of a training with PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from mpicoll.horovod.common.elastic import ObjectState
from mpicoll.horovod.torch.elastic.sampler import ElasticSampler
from mpicoll.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpicoll.horovod.torch.process_sets import rank

__all__ = ["TorchState"]


def _sync_sampler(sampler: ElasticSampler) -> None:
    sampler.load_state_dict(broadcast_object(sampler.state_dict()))


#: How to send rank 0's ``state_dict`` to all ranks, by class.
_SYNC: dict[type, Callable[[Any], None]] = {
    torch.nn.Module: lambda model: broadcast_parameters(model.state_dict(), root_rank=0),
    torch.optim.Optimizer: lambda optimizer: broadcast_optimizer_state(optimizer, root_rank=0),
    ElasticSampler: _sync_sampler,
}


class _Kept:
    """A model, an optimizer or a sampler, and its last saved state."""

    def __init__(self, value: Any, sync: Callable[[Any], None]) -> None:
        self.value, self._sync = value, sync
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy, because load_state_dict may make the loaded tensors the optimizer's own.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self._sync(self.value)
        self.save()


class TorchState(ObjectState):
    """Models, optimizers, samplers and other objects as attributes of a state.

    model, optimizer: a torch.nn.Module and a torch.optim.Optimizer, or None.
    kwargs: names and initial values of further models, optimizers and ElasticSamplers, and of
            objects that can be pickled.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        kept: dict[str, _Kept] = {}
        for name, value in given.items():
            for each, sync in _SYNC.items():
                if isinstance(value, each):
                    kept[name] = _Kept(value, sync)
        self._kept = kept
        for name in kept:
            super().__setattr__(name, given.pop(name))
        super().__init__(broadcast_object, rank, **given)

    def save(self) -> None:
        """Save copies of all attributes."""
        for each in self._kept.values():
            each.save()
        super().save()

    def restore(self) -> None:
        """Restore all attributes from the last save."""
        for each in self._kept.values():
            each.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcast rank 0's attributes, and save them."""
        for each in self._kept.values():
            each.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        kept = self.__dict__.get("_kept", {})
        if name in kept:
            kept[name].value = value
            kept[name].save()
        super().__setattr__(name, value)
