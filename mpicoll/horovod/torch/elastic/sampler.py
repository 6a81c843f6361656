"""ElasticSampler: distributes the remaining samples of an epoch among the current ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from mpicoll.horovod.torch.process_sets import rank, size

__all__ = ["ElasticSampler"]


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
        """Iterate over this rank's samples; the first samples are repeated to make the numbers
        equal.
        """
        indices = self.remaining_indices
        mine = range(self.rank, self.total_size, self.num_replicas)
        return (indices[place % len(indices)] for place in mine)

    def __len__(self) -> int:
        return self.num_samples
