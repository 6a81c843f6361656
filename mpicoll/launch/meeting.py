"""Where ranks that no launcher of MPI started find each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Meeting", "NotThere", "Store", "Taken"]


class Store(Protocol):
    """Keys and values that all ranks see, such as a store of torch.distributed."""

    def set(self, key: str, value: str) -> Any:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """The value of a key, waited for until some rank has set it."""


class NotThere(Exception):
    """Rank 0 is not to be found there, or not yet.

    wrong: somebody else was.
    """

    def __init__(self, why: str, wrong: bool = False) -> None:
        super().__init__(why)
        self.wrong = wrong


class Taken(Exception):
    """Rank 0's server has this rank already."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A store, and this process's place in the job.

    store: reaches all ranks.
    rank, world_size: as the launcher, or whoever started the processes, says.
    host, port: where rank 0's server listens; on all addresses, at a port that is free.
    after: called on rank 0 when all have come, or will not.
    """

    store: Store
    rank: int
    world_size: int
    host: str = ""
    port: int = 0
    after: Callable[[], None] = lambda: None
