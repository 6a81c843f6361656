"""Rendezvous of ranks that were not started by an MPI launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mpicoll import control_messages
from mpicoll.errors import DistBackendError


class Store(Protocol):
    """A key-value store that all ranks reach, such as a store of torch.distributed."""

    def set(self, key: str, value: str) -> object:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until a rank has set it."""


class ServerNotFoundError(Exception):
    """Rank 0's server does not answer, or not yet.

    is_other: another program answers.
    """

    def __init__(self, why: str, is_other: bool = False) -> None:
        super().__init__(why)
        self.is_other = is_other


class RankTakenError(Exception):
    """Another process has connected to rank 0's server as this rank."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of rank 0's server, as published in a store.

    hosts, port: its addresses, most likely reachable first.
    secret:  of the job; "" if it is not published.
    machine: processes with the same ``host_identity.machine()`` connect through loopback.
    """

    hosts: list[str]
    port: int
    secret: str
    machine: str

    def format(self) -> str:
        """Return the address as JSON."""
        return control_messages.encode(self).decode()

    @classmethod
    def parse(cls, value: bytes) -> ServerAddress:
        """Return the address from JSON; raise ServerNotFoundError if it is invalid."""
        with contextlib.suppress(DistBackendError):
            address: ServerAddress = control_messages.decode(value, cls, 0)
            if 0 < address.port < 1 << 16:
                return address
        raise ServerNotFoundError(
            f"expected the address of rank 0's server, got {value[:40]!r}", is_other=True
        )


def loopback(host: str) -> str:
    """Return ``host`` if it is a loopback address, else ""."""
    return host if host.startswith("127.") or host in ("::1", "localhost") else ""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A store, and the rank of this process, as announced by the program that started the ranks.

    host: name or address of rank 0's host, "" if unknown. The server listens at this address if
          rank 0 resolves it to exactly one of its addresses, else at all addresses.
    port: where the server listens, 0 for a free port.
    after: called on rank 0 when all ranks have connected, or after a failure.
    server: the address of the server, if it runs already. Else rank 0 starts and publishes it.
    """

    store: Store
    rank: int
    world_size: int
    host: str = ""
    port: int = 0
    after: Callable[[], None] = lambda: None
    server: ServerAddress | None = None
