"""Where ranks that no launcher of MPI started find each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

__all__ = ["Meeting", "NotThere", "Place", "Store", "Taken", "loopback"]


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
class Place:
    """Where rank 0's server is, as rank 0 says it through a store.

    hosts, port: its addresses, the likeliest first.
    secret:  of the job; "" where it is told to nobody.
    machine: what shares a loopback address with it, "" where nobody knows.
    """

    hosts: list[str]
    port: int
    secret: str
    machine: str

    def text(self) -> str:
        """For a store."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, value: bytes) -> Place:
        """What a store holds; raises NotThere for anything that is no place, such as a leftover."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            place = cls(**json.loads(value))
            texts = [*place.hosts, place.secret, place.machine]
            if (
                isinstance(place.hosts, list)
                and all(isinstance(text, str) for text in texts)
                and type(place.port) is int
                and 0 < place.port < 1 << 16
            ):
                return place
        raise NotThere(f"rank 0 has not written what is there: {value[:40]!r}", wrong=True)


def loopback(host: str) -> str:
    """The host, if it is an address of the loopback, which is for this host alone; else ""."""
    return host if host.startswith("127.") or host in ("::1", "localhost") else ""


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
