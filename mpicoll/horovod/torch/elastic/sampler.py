"""The samples of an epoch that are left, shared out among the ranks that are there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from mpicoll.horovod.torch.process_sets import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler):  # type: ignore[misc]
    """As torch's DistributedSampler; when the ranks change, those not yet processed are shared out.

    For that call ``record_batch`` after each batch and ``set_epoch`` at the end of each epoch, and
    give the sampler to TorchState.

    dataset: of a length that stays. shuffle: another order in each epoch. seed: the same on all
    ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed.

        epoch: its number, which also gives the order.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch.

        batch_idx: ignored. batch_size: samples of one rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many samples of it all ranks have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved place.

        state_dict: what ``state_dict`` returned.
        """
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left of the epoch among the ranks that are there."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Go through this rank's; the first come again at the end where it does not come out."""
        indices = self.remaining_indices
        mine = range(self.rank, self.total_size, self.num_replicas)
        return (indices[place % len(indices)] for place in mine)

    def __len__(self) -> int:
        return self.num_samples
