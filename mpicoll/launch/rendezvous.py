"""Where ranks that no launcher of MPI started find each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

__all__ = [
    "RankTakenError",
    "Rendezvous",
    "ServerAddress",
    "ServerNotFoundError",
    "Store",
    "loopback",
]


class Store(Protocol):
    """Keys and values that all ranks see, such as a store of torch.distributed."""

    def set(self, key: str, value: str) -> object:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key, and wait for it until some rank has set it."""


class ServerNotFoundError(Exception):
    """Rank 0's server is not there, or not yet.

    is_other: something else was there.
    """

    def __init__(self, why: str, is_other: bool = False) -> None:
        super().__init__(why)
        self.is_other = is_other


class RankTakenError(Exception):
    """Rank 0's server has this rank already."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where rank 0's server is, as rank 0 publishes it in a store.

    hosts, port: its addresses, the likeliest first.
    secret:  of the job; "" where it is not published.
    machine: names what shares a loopback address with it, "" where that is unknown.
    """

    hosts: list[str]
    port: int
    secret: str
    machine: str

    def format(self) -> str:
        """Return it as text for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, value: bytes) -> ServerAddress:
        """Return the address that a store holds; raise ServerNotFoundError for anything else."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            address = cls(**json.loads(value))
            texts = [*address.hosts, address.secret, address.machine]
            if (
                isinstance(address.hosts, list)
                and all(isinstance(text, str) for text in texts)
                and type(address.port) is int
                and 0 < address.port < 1 << 16
            ):
                return address
        raise ServerNotFoundError(
            f"rank 0 has not written what is there: {value[:40]!r}", is_other=True
        )


def loopback(host: str) -> str:
    """Return the host if it is a loopback address, which this host alone can reach; else ""."""
    return host if host.startswith("127.") or host in ("::1", "localhost") else ""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A store, and this process's place in the job.

    store: reaches all ranks.
    rank, world_size: as the launcher, or whatever started the processes, announces them.
    host: name or address of rank 0's host, "" if unknown. The server listens at its address if rank
          0 resolves it to exactly one of its own, else at all addresses.
    port: where the server listens, 0 for a free port.
    after: called on rank 0 when all ranks have come, or will not.
    """

    store: Store
    rank: int
    world_size: int
    host: str = ""
    port: int = 0
    after: Callable[[], None] = lambda: None
