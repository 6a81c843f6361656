"""Tuning tables: rows, files, and rejection of invalid files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from mpicoll import machine
from mpicoll.errors import ArgumentError
from mpicoll.routes import tuning, tuning_files
from mpicoll.routes.tuning import KINDS, PLACES, Table

pytestmark = pytest.mark.any_mpi

MPI = "An MPI 1.2"
#: A valid file.
GOOD = {"ranks": {"2": {"all_reduce": {"node": [[0, "mpi"], [4096, "shared"]]}}}}


@pytest.fixture(autouse=True)
def no_user_table(monkeypatch, tmp_path):
    monkeypatch.delenv("MPICOLL_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def stepping(text):
    """Return a file with these steps for all_reduce on one node."""
    return json.dumps({"ranks": {"2": {"all_reduce": {"node": text}}}})


def test_defaults_are_complete_and_valid_in_a_file():
    table = Table()
    rows = {kind: table.row(kind, 4) for kind in KINDS}
    assert all(set(row) == set(PLACES) for row in rows.values())
    text = tuning_files.join("", MPI, 4, rows, {})
    assert tuning_files.parse(text) == {4: rows}
    assert table.describe() == "the defaults"


def test_kinds_without_a_row():
    """The first route that requires the placement, or else the first one."""
    for kind, *routes in (
        ("scan", "shared", "mpi", "mpi"),
        ("exscan of others", "shared", "exchange", "exchange"),
        ("all_to_all", "shared", "measured", "exchange"),
    ):
        row = dict(zip(("node", "nodes", "apart"), routes, strict=True))
        assert Table().row(kind, 4) == {place: ((0, name),) for place, name in row.items()}


def marked(n):
    """Return a row that contains the number of ranks of its measurement."""
    return {"broadcast": {"node": ((0, "mpi"), (n, "shared"))}}


@pytest.mark.parametrize(
    ("ranks", "measured", "nearest"),
    [
        (4, [4], 4), (4, [1, 5, 16], 5), (4, [1, 16], 1), (4, [2, 8], 2), (4, [3, 6], 3),
        (5, [4, 6], 6), (100, [2, 64, 1000], 64), (3, [1, 9], 1), (7, [1, 49], 1), (1, [2, 3], 2),
    ],
)  # fmt: skip
def test_row_of_the_nearest_number_of_ranks_by_ratio(ranks, measured, nearest):
    for order in itertools.permutations(measured):
        table = Table({n: marked(n) for n in order})
        assert table.row("broadcast", ranks)["node"] == ((0, "mpi"), (nearest, "shared"))


def test_route_default_uses_the_defaults_of_the_reading_version(monkeypatch):
    text = stepping([[0, "default"], [512, "mpi"], [4096, "default"], [1 << 20, "mpi"],
                     [1 << 23, "default"]])  # fmt: skip
    later = ((0, "shared"), (64, "exchange"), (8192, "shared"), (1 << 22, "hierarchical"))
    apart = ((0, "exchange"), (8, "mpi"))
    row = {"node": later, "nodes": apart, "apart": apart}
    monkeypatch.setattr(tuning, "_DEFAULTS", {2: {"all_reduce": row}})
    table = tuning_files.build_table("/a/file.json", text)
    assert table.row("all_reduce", 5) == row | {
        "node": ((0, "shared"), (64, "exchange"), (512, "mpi"), (4096, "exchange"),
                 (8192, "shared"), (1 << 20, "mpi"), (1 << 23, "hierarchical"))
    }  # fmt: skip
    other = Table({2: {"all_reduce": {"apart": ((0, "default"),)}}})
    assert other.row("all_reduce", 2) == row


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expecting value"),
        ("[" * 200000, "got something else"),
        ("{}", "got something else ('ranks')"),
        ('{"ranks": {"02": {}}}', "expected a number of ranks, got '02'"),
        ('{"ranks": {"2": {"gathers": {"node": [[0, "mpi"]]}}}}', "scatter, reduce_scatter, "),
        ('{"ranks": {"2": {"gather": {"nodde": [[0, "mpi"]]}}}}', "apart, got 'nodde'"),
        (stepping([[0, "mpi"], [8, "shared"], [8, "mpi"]]), "got [0, 8, 8]"),
        (stepping([["0", "mpi"]]), "expected [BYTES, ROUTE], got ['0', 'mpi']"),
        ('{"ranks": {"2": {"gather": {"node": [[0, "mpi"], [Infinity, "shared"]]}}}}', "got [inf"),
        (stepping([[0, "mpl"]]),
         "expected one of mpi, exchange, shared, default, got 'mpl'"),
        ('{"ranks": {"2": {"all_reduce of others": {"apart": [[0, "mpi"]]}}}}',
         "all_reduce of others: apart: expected one of exchange, widened, default, got 'mpi'"),
    ],
)  # fmt: skip
def test_invalid_file_raises(text, expected):
    with pytest.raises(ArgumentError) as caught:
        tuning_files.build_table("/a/file.json", text)
    message = str(caught.value)
    assert message.startswith("init_process_group: /a/file.json is not a tuning table: ")
    assert expected in message
    assert "MPICOLL_TABLE=0" in message and "python -m mpicoll tune" in message
    assert len(message) < 600


def test_default_path_contains_the_mpi_and_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "describe", lambda: "64 x Some (R) CPU @ 2/3 GHz")
    path = tuning_files.default_path(MPI)
    folder = tmp_path / "config" / "mpicoll"
    assert path == folder / "an-mpi-1.2-on-64-x-some-r-cpu-2-3-ghz.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(GOOD))
    table = tuning_files.build_table(*tuning_files.read(MPI))
    assert table.path == str(path) and table.describe() == f"{path} (measured on 2 ranks)"
    assert table.row("all_reduce", 2)["node"] == ((0, "mpi"), (4096, "shared"))
    assert tuning_files.read("An MPI 1.3") == ("", "", "")
    monkeypatch.setenv("MPICOLL_TABLE", "0")
    assert tuning_files.read(MPI) == ("", "", "")


def test_missing_or_unreadable_default_file_is_ignored(monkeypatch, tmp_path):
    """Only one rank reads the file, so read may not raise."""
    assert tuning_files.read(MPI) == ("", "", "")
    tuning_files.default_path(MPI).mkdir(parents=True)
    assert tuning_files.read(MPI) == ("", "", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_files.default_path(MPI).parent == tmp_path / ".config" / "mpicoll"

    def expanduser(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert tuning_files.read(MPI) == ("", "", "")
    assert tuning_files.build_table("", "").path == ""


def test_file_named_by_mpicoll_table(monkeypatch, tmp_path):
    named = tmp_path / "named.json"
    monkeypatch.setenv("MPICOLL_TABLE", str(named))
    for problem in ("No such file", "Is a directory"):
        with pytest.raises(ArgumentError, match=f"init_process_group: .*{problem}.*{named.name}"):
            tuning_files.build_table(*tuning_files.read(MPI))
        if not named.exists():
            named.mkdir()
    named.rmdir()
    named.write_bytes(b"\xff\xfe\x00 no text")
    with pytest.raises(ArgumentError, match="is not a tuning table"):
        tuning_files.build_table(*tuning_files.read(MPI))
    named.write_text(json.dumps({**GOOD, "mpi": "Another", "machine": "1 x other"}))
    assert tuning_files.build_table(*tuning_files.read(MPI)).path == str(named)
