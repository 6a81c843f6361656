"""Bootstrap and rendezvous from environment variables and arguments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpicoll.errors import ArgumentError, LaunchError, UnsupportedError
from mpicoll.launch import rendezvous
from mpicoll.launch.environment import choose_bootstrap, fill_environment
from mpicoll.launch.rendezvous import FileStore, ServerNotFoundError, find_rendezvous, read_rank

TORCH = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "7"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    ("world_size", "openmpi", "environment", "bootstrap"),
    [
        (4, False, ENV, "server"),
        (4, False, PMI | ENV | TORCH, "server"),  # torchrun inside a job of mpiexec
        (4, False, PMI | {"PMI_FD": "987"}, "server"),  # started by a rank of mpiexec
        (4, False, PMI | {"PMI_SIZE": "1"}, "server"),
        (8, False, PMI, "manager"),  # MPI reports the mismatch
        (1, False, PMI, "single"),
        (1, False, PMI | {"PMI_SIZE": "1"}, "manager"),
        (1, True, OMPI, "single"),
    ],
)
def test_choose_bootstrap(
    world_size: int, openmpi: bool, environment: dict[str, str], bootstrap: str
) -> None:
    assert choose_bootstrap(world_size, openmpi, environment) == bootstrap


@pytest.mark.parametrize(
    ("method", "rank", "size", "environment", "through"),
    [
        (None, None, None, {}, None),
        (None, None, None, ENV, "port"),
        (None, None, None, ENV | TORCH, "agent"),
        (None, None, None, PMI | ENV | TORCH, "agent"),
        (None, 0, 4, {}, None),  # without a rendezvous: MPI's ranks
        ("mpi://", None, None, ENV, None),
        ("env://", None, None, ENV, "port"),
        ("env://", 2, 4, {"MASTER_ADDR": "h", "MASTER_PORT": "7"}, "port"),
        ("env://", 2, 4, PMI, None),
        ("tcp://h:7", 0, 2, {}, "port"),
        ("tcp://h:7?rank=1&world_size=2", None, None, {}, "port"),
        ("tcp://h:7", None, None, ENV, "port"),
        ("tcp://h:7", None, None, PMI, None),
        ("file:///x/y", 0, 2, {}, "file"),
    ],
)
def test_find_rendezvous(
    method: str | None, rank: int | None, size: int | None, environment: dict[str, str],
    through: str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(rendezvous, "_open_agent_store", lambda *_: "agent")
    found = find_rendezvous(method, read_rank(method, rank, size, environment), 1.0, environment)
    if found is None:
        assert through is None
    elif through == "port":
        assert (found.store, found.host, found.port) == (None, "h", 7)
    elif through == "file":
        assert isinstance(found.store, FileStore)
    else:
        assert found.store == through  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("method", "rank", "size", "environment", "error", "words"),
    [
        ("http://x", None, None, {}, UnsupportedError, "'tcp://HOST:PORT'"),
        ("tcp://h:7", None, 2, {}, ArgumentError, "needs rank and world_size"),
        ("tcp://h:x", 0, 2, {}, ArgumentError, "a port that is free"),
        ("tcp://h:7", 2, 2, {}, ArgumentError, "rank=2, world_size=2"),
        ("tcp://h:7?rank=1", 0, 2, {}, ArgumentError, "rank=0 disagrees"),
        ("env://", None, None, ENV | {"RANK": "a"}, ArgumentError, "RANK: expected a number"),
        ("env://", 0, 2, {}, ArgumentError, "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_find_rendezvous_rejects_invalid_arguments(
    method: str, rank: int | None, size: int | None, environment: dict[str, str],
    error: type[Exception], words: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=words.replace("(", r"\(")):
        find_rendezvous(method, read_rank(method, rank, size, environment), 1.0, environment)


def test_fill_environment_keeps_variables_of_the_user() -> None:
    environment = {"RANK": "7", "MASTER_ADDR": "there"}
    fill_environment(1, 4, 0, 2, "here", 99, environment)
    assert environment == {
        "RANK": "7", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "there", "MASTER_PORT": "99",
    }  # fmt: skip


def test_file_store_accepts_only_files_of_its_user(tmp_path: Path) -> None:
    file = FileStore(tmp_path / "meet")
    with pytest.raises(ServerNotFoundError):
        file.get("k")
    (tmp_path / "meet").touch()
    with pytest.raises(ServerNotFoundError):
        file.get("k")
    file.set("k", "v")
    assert file.get("k") == b"v" and (tmp_path / "meet").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["meet"]
    if os.geteuid() == 0:
        os.chown(tmp_path / "meet", 12345, -1)
        with pytest.raises(LaunchError, match="belongs to user 12345"):
            file.get("k")
    file.remove()
    file.remove()
