"""``hvd.elastic``: training that continues after ranks are lost.

If the MPI library survives lost ranks (docs/reliability.md), operations of the surviving ranks
raise HorovodInternalError; the ranks restore their states and continue. Otherwise the job ends.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from mpicoll.errors import LostRankError
from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch.basics import is_initialized, rank, restart, size
from mpicoll.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpicoll.horovod.torch.mpi_ops import barrier

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class State:
    """A state that training can continue from. Subclasses implement save, restore and sync.

    bcast_object: broadcasts an object from rank 0.
    get_rank: ignored.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object
        self._commits = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register functions without arguments that are called after each change of the ranks,
        before sync.

        callbacks: such as a function that adapts the learning rate to the number of ranks.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new ranks: call ``reset``, then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state. All ranks call."""
        self.save()
        self._commits += 1

    def check_host_updates(self) -> None:
        """Do nothing: new hosts are not discovered."""

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast rank 0's state. All ranks call."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new ranks; does nothing by default."""


class ObjectState(State):
    """Picklable objects as attributes of a state.

    kwargs: their names and initial values.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        self._set(kwargs)

    def save(self) -> None:
        """Save copies of the attributes."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Restore the attributes from the last save."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Set the attributes to rank 0's last save, and save them."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self.restore()

    def _set(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


class ElasticSampler(Sampler):  # type: ignore[misc]
    """Like torch's DistributedSampler; when the ranks change, the unprocessed samples are
    redistributed.

    Call ``record_batch`` after each batch and ``set_epoch`` at the end of each epoch, and add the
    sampler to a TorchState.

    dataset: of constant length. shuffle: use a different order in each epoch. seed: the same on all
             ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples.

        epoch: its number, which also determines the order.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch.

        batch_idx: ignored. batch_size: samples of one rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples that all ranks have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position.

        state_dict: a result of ``state_dict``.
        """
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining samples of the epoch among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's samples; the first are repeated to make the numbers equal."""
        indices = self.remaining_indices
        mine = range(self.rank, self.total_size, self.num_replicas)
        return (indices[place % len(indices)] for place in mine)

    def __len__(self) -> int:
        return self.num_samples


#: How to send rank 0's ``state_dict`` to all ranks, by class.
_SYNC: dict[type, Callable[[Any], None]] = {
    torch.nn.Module: lambda model: broadcast_parameters(model.state_dict(), root_rank=0),
    torch.optim.Optimizer: lambda optimizer: broadcast_optimizer_state(optimizer, root_rank=0),
    ElasticSampler: lambda sampler: sampler.load_state_dict(broadcast_object(sampler.state_dict())),
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


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function that restarts from the last commit after ranks are lost.

    func: its first argument is a State, such as TorchState. Rank 0's state is sent to all ranks
          before each call. After a HorovodInternalError, or a LostRankError of mpicoll's calls, the
          state is restored before that.

    Returns a function that returns the result of ``func`` once it has returned on all ranks:
    finished ranks restart together with a rank that finds a loss at the end.

    An error that occurs again without a commit in between and without lost ranks is an error of the
    program, and is raised.
    """

    @functools.wraps(func)
    def run_with_restarts(state: State, *arguments: Any, **options: Any) -> Any:
        failed: Exception | None = None
        last_commits = None  # number of commits at the last error without lost ranks
        while True:
            if failed is not None and not restart():  # first: then no operation is pending
                if last_commits == state._commits:
                    raise failed
                last_commits = state._commits
            try:
                if failed is not None:
                    state.restore()
                    state.on_reset()
                state.sync()
                result = func(state, *arguments, **options)
                if is_initialized():
                    barrier()
                return result
            except (HorovodInternalError, LostRankError) as error:
                failed = error

    return run_with_restarts
