"""Where ranks that no launcher of MPI started find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Meeting", "Store"]


class Store(Protocol):
    """Keys and values that all ranks see, such as a store of torch.distributed."""

    def set(self, key: str, value: str) -> Any:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """The value of a key, waited for until some rank has set it."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A store, and this process's place in the job.

    store: reaches all ranks.
    rank, world_size: as the launcher, or whoever started the processes, says.
    """

    store: Store
    rank: int
    world_size: int
