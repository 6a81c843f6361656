"""Rank, size and rendezvous of ranks that were not started by an MPI launcher.

``init_method`` describes the rendezvous: env://, tcp:// or file://.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

from mpicoll import control_messages, private_files
from mpicoll.errors import ArgumentError, DistBackendError, LaunchError, UnsupportedError
from mpicoll.launch.environment import SINGLETON, is_started_by_mpi, was_filled

_WHERE = "init_process_group"
#: Maximum number of bytes that are read from a file.
_MAX_FILE_BYTES = 1 << 16


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


class ServerAddress(NamedTuple):
    """Address of rank 0's server, as published in a store."""

    #: Its addresses, most likely reachable first.
    hosts: list[str]
    port: int
    secret: str  # of the job; "" if it is not published
    machine: str  # processes with the same ``host_identity.machine()`` connect through loopback

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


class Rendezvous(NamedTuple):
    """A store, and the rank of this process, as announced by the program that started the ranks."""

    store: Store | None  # None if the server's host and port are known, or if it runs already
    rank: int
    world_size: int
    #: Name or address of rank 0's host, "" if unknown. The server listens at this address if rank 0
    #: resolves it to exactly one of its addresses, else at all addresses.
    host: str = ""
    port: int = 0  # where the server listens, 0 for a free port
    #: Called on rank 0 when all ranks have connected, or after a failure.
    after: Callable[[], None] = lambda: None
    #: The address of the server, if it runs already. Else rank 0 starts it.
    server: ServerAddress | None = None


class GivenRank(NamedTuple):
    """The rank and world size that this process was given."""

    #: None if they were not given.
    rank: int | None
    world_size: int | None
    names: Mapping[str, str]  # the argument or variable that gave each of them, for messages


def read_rank(
    init_method: str | None,
    rank: int | None,
    world_size: int | None,
    environment: Mapping[str, str] = os.environ,
) -> GivenRank:
    """Return rank and world size from the arguments, the URL's query, or RANK and WORLD_SIZE.

    Ignores the variables with init_method mpi://, without an init_method under an MPI process
    manager, with MPICOLL_ALLOW_SINGLETON=1, and if fill_environment has set them. Raises
    ArgumentError if a value is not a number or if an argument and the URL disagree.
    """
    query = parse_qs(urlsplit(init_method or "").query)
    variables = (
        not (init_method or "").startswith("mpi://")
        and not (init_method is None and is_started_by_mpi(environment))
        and environment.get(SINGLETON) != "1"
    )
    values: dict[str, int] = {}
    names: dict[str, str] = {}
    for what, argument in (("rank", rank), ("world_size", world_size)):
        variable, name = what.upper(), what
        asked = _number(f"{what} in {init_method!r}", query[what][-1]) if what in query else None
        if argument is not None and asked not in (None, argument):
            raise ArgumentError(
                f"{_WHERE}: {what}={argument} disagrees with init_method {init_method!r}"
            )
        found = asked if argument is None else argument
        is_set = variables and variable in environment and not was_filled(variable, environment)
        if found is None and is_set:
            found, name = _number(variable, environment[variable]), variable
        if found is not None:
            values[what], names[what] = found, f"{name}="
    return GivenRank(values.get("rank"), values.get("world_size"), names)


def _number(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"{_WHERE}: {what}: expected a number, got {text!r}") from None


def find_rendezvous(
    init_method: str | None,
    given: GivenRank,
    limit: float,
    environment: Mapping[str, str] = os.environ,
) -> Rendezvous | None:
    """Return the rendezvous of the ranks; None if MPI's own ranks are used.

    limit: timeout of torchrun's store in seconds.

    Raises UnsupportedError for an unknown init_method, ArgumentError if its address or a rank is
    missing or invalid, and LaunchError if torchrun's store cannot be reached.
    """
    scheme, rest = (init_method or "env://").partition("://")[::2]
    if scheme not in ("mpi", "env", "tcp", "file"):
        raise UnsupportedError(
            f"{_WHERE}: init_method: expected 'env://', 'tcp://HOST:PORT', 'file:///PATH', "
            f"'mpi://' or nothing, got {init_method!r}"
        )
    if scheme == "mpi" or (init_method is None and is_started_by_mpi(environment)):
        return None
    rank, size = given.rank, given.world_size
    if rank is None or size is None:
        if scheme == "env" or is_started_by_mpi(environment):
            return None
        raise ArgumentError(
            f"{_WHERE}: {init_method!r} needs rank and world_size: as arguments, in its query "
            "(?rank=0&world_size=2) or as RANK and WORLD_SIZE"
        )
    if size < 1 or not 0 <= rank < size:
        raise ArgumentError(
            f"{_WHERE}: {given.names['rank']}{rank}, {given.names['world_size']}{size}: expected a "
            "rank from 0 to world_size - 1"
        )
    if scheme == "file":
        file = FileStore(Path(urlsplit(f"file://{rest}").path))
        return Rendezvous(file, rank, size, after=file.remove)
    if scheme == "tcp":
        host, _, port = urlsplit(f"tcp://{rest}").netloc.rpartition(":")
        return _at_port(host.strip("[]"), port, rank, size, repr(init_method))
    if size == 1:
        return Rendezvous(None, rank, size)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host = environment.get("MASTER_ADDR", "")
        return Rendezvous(_open_agent_store(environment, limit), rank, size, host=host)
    if "MASTER_PORT" not in environment and (init_method is None or is_started_by_mpi(environment)):
        return None  # without a rendezvous, MPI's own ranks are used
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    return _at_port(host, port, rank, size, "MASTER_ADDR and MASTER_PORT")


def _at_port(host: str, port: str, rank: int, size: int, what: str) -> Rendezvous:
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ArgumentError(
            f"{_WHERE}: {what}: expected the host of rank 0 and a port that is free there, got "
            f"{host}:{port}"
        )
    return Rendezvous(None, rank, size, host=host, port=int(port))


class FileStore(Store):
    """A file on a file system of all ranks. Only its owner may read and write it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, key: str, value: str) -> None:
        """Replace the file atomically, because an earlier job may have left one."""
        try:
            private_files.write(self._path, value.encode())
        except OSError as error:
            message = f"{_WHERE}: file://{self._path}: rank 0 cannot write: {error}"
            raise LaunchError(message) from error

    def get(self, key: str) -> bytes:
        """Return the content, maybe an earlier job's. Raises ServerNotFoundError without a file."""
        try:
            with self._path.open("rb") as file:
                value = file.read(_MAX_FILE_BYTES)
                owner = os.fstat(file.fileno()).st_uid
        except OSError as error:
            raise ServerNotFoundError(f"file://{self._path}: {error.strerror}") from None
        if not value:
            raise ServerNotFoundError(f"file://{self._path} is empty")
        if owner != os.geteuid():
            raise LaunchError(
                f"{_WHERE}: file://{self._path} belongs to user {owner}, not to this user; use "
                "another file"
            )
        return value

    def remove(self) -> None:
        """Remove the file. Rank 0 calls it when all ranks have read the file."""
        self._path.unlink(missing_ok=True)


def _open_agent_store(environment: Mapping[str, str], limit: float) -> Store:
    """Return the store of torchrun's agent, with a prefix."""
    try:
        from torch.distributed import PrefixStore, TCPStore

        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(host, port, timeout=timedelta(seconds=limit))
    except (ImportError, KeyError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"{_WHERE}: torchrun's store cannot be reached: {error!r}; check MASTER_ADDR and "
            "MASTER_PORT"
        ) from error
    # The prefix is the same after a restart, because each agent counts restarts separately. A
    # stale address of an earlier attempt does not connect, and is read again.
    return PrefixStore("mpicoll", store)  # type: ignore[no-any-return]
