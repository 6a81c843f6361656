"""Tuning tables: rows, files, and rejection of invalid files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from mpicoll import machine
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.output import format_bytes
from mpicoll.routes import tuning, tuning_files
from mpicoll.routes.host import registry
from mpicoll.routes.tuning import KINDS, PLACES, Table

pytestmark = pytest.mark.any_mpi

KIB, MIB = 1 << 10, 1 << 20
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


@pytest.mark.parametrize(
    ("kind", "place", "routes"),
    [
        ("broadcast", "node", "mpi single_copy shared"),
        ("broadcast", "apart", "mpi"),
        ("all_reduce", "node", "mpi mpi_chunked exchange shared"),
        ("all_reduce", "nodes", "mpi mpi_chunked exchange hierarchical"),
        ("all_reduce of others", "apart", "exchange widened"),
        ("reduce", "apart", "mpi mpi_chunked exchange"),
        ("reduce_scatter", "apart", "mpi exchange"),
        ("reduce_scatter of others", "node", "exchange shared"),
        ("gather", "nodes", "mpi"),
    ],
)
def test_eligible_routes(kind, place, routes):
    assert tuning.eligible_routes(kind, place) == tuple(routes.split())


def test_kinds_without_a_row():
    """On a node: shared memory, or single_copy for large data. Elsewhere: MPI, or exchange."""
    table = Table()
    assert table.row("scan", 4) == {
        "node": ((0, "shared"),), "nodes": ((0, "mpi"),), "apart": ((0, "mpi"),)
    }  # fmt: skip
    assert table.row("exscan of others", 4) == {
        "node": ((0, "shared"),), "nodes": ((0, "exchange"),), "apart": ((0, "exchange"),)
    }  # fmt: skip
    assert table.row("all_to_all", 4) == {
        "node": ((0, "shared"), (16384, "single_copy")),
        "nodes": ((0, "exchange"),), "apart": ((0, "exchange"),),
    }  # fmt: skip


def test_kind_without_a_route_is_unsupported(monkeypatch):
    none = {name: route for name, route in registry.HOST.items() if name == "widened"}
    monkeypatch.setattr(registry, "HOST", none)
    with pytest.raises(UnsupportedError, match="exscan: no route for arrays in host"):
        tuning._of_routes.__wrapped__("exscan")


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


def test_kinds_and_places_that_were_not_measured_use_the_defaults():
    others = {"broadcast": {"apart": ((0, "mpi"),)}, "gather": {"node": ((0, "shared"),)}}
    table, default = Table({4: marked(4), 64: others}), Table()
    before = dict(default.row("broadcast", 4))
    assert table.row("broadcast", 4) == {**before, **marked(4)["broadcast"]}
    assert default.row("broadcast", 4) == before, "the defaults have changed"
    assert table.row("gather", 4)["node"] == ((0, "shared"),)
    assert table.row("gather", 4)["nodes"] == default.row("gather", 4)["nodes"]
    assert table.row("scatter", 64) == default.row("scatter", 64)


def test_route_default_uses_the_defaults_of_the_reading_version(monkeypatch):
    text = stepping([[0, "default"], [512, "mpi"], [4096, "default"], [1 << 20, "mpi"],
                     [1 << 23, "default"]])  # fmt: skip
    later = ((0, "shared"), (64, "exchange"), (8192, "shared"), (1 << 22, "mpi_chunked"))
    apart = ((0, "exchange"), (8, "mpi"))
    row = {"node": later, "nodes": apart, "apart": apart}
    monkeypatch.setattr(tuning, "_DEFAULTS", {2: {"all_reduce": row}})
    table = tuning_files.build_table("/a/file.json", text)
    assert table.row("all_reduce", 5) == row | {
        "node": ((0, "shared"), (64, "exchange"), (512, "mpi"), (4096, "exchange"),
                 (8192, "shared"), (1 << 20, "mpi"), (1 << 23, "mpi_chunked"))
    }  # fmt: skip
    other = Table({2: {"all_reduce": {"apart": ((0, "default"),)}}})
    assert other.row("all_reduce", 2) == row


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expecting value"),
        ("[" * 200000, "got something else"),
        ("{}", "got something else ('ranks')"),
        ('{"ranks": {"2": 3}}', "got something else"),
        ('{"ranks": {"2": {"gather": [1]}}}', "got something else"),
        ('{"ranks": {"0": {}}}', "expected a number of ranks, got '0'"),
        ('{"ranks": {"02": {}}}', "expected a number of ranks, got '02'"),
        ('{"ranks": {"2": {"gathers": {"node": [[0, "mpi"]]}}}}', "scatter, reduce_scatter, "),
        ('{"ranks": {"2": {"gather": {"nodde": [[0, "mpi"]]}}}}', "apart, got 'nodde'"),
        (stepping([3]), "got something else"),
        (stepping([[0, "mpi", 3]]), "too many values"),
        (stepping([]), "expected ascending bytes from 0, got []"),
        (stepping([[0, "mpi"], [8, "shared"], [8, "mpi"]]), "got [0, 8, 8]"),
        (stepping([["0", "mpi"]]), "expected [BYTES, ROUTE], got ['0', 'mpi']"),
        (stepping([[0, "mpi"], [8.5, "shared"]]), "expected [BYTES, ROUTE], got [8.5, 'shared']"),
        (stepping([[False, "mpi"]]), "expected [BYTES, ROUTE], got [False, 'mpi']"),
        ('{"ranks": {"2": {"gather": {"node": [[0, "mpi"], [Infinity, "shared"]]}}}}', "got [inf"),
        (stepping([[0, ["mpi"]]]), "expected [BYTES, ROUTE], got [0, ['mpi']]"),
        (stepping([[0, "mpl"]]),
         "expected one of mpi, mpi_chunked, exchange, shared, default, got 'mpl'"),
        ('{"ranks": {"2": {"broadcast": {"apart": [[0, "exchange"]]}}}}', "got 'exchange'"),
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


def test_no_file():
    found = tuning_files.read(MPI)
    assert found == ("", "", "")
    assert tuning_files.build_table(*found).path == ""


def test_default_path_contains_the_mpi_and_the_machine(monkeypatch, tmp_path):
    path = tuning_files.default_path(MPI)
    assert path.parent == tmp_path / "config" / "mpicoll"
    assert path.name.startswith("an-mpi-1.2-on-") and path.suffix == ".json"
    assert path.name == path.name.lower() and " " not in path.name
    assert path != tuning_files.default_path("An MPI 1.3")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(GOOD))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "describe", lambda: "64 x Some (R) CPU @ 2/3 GHz")
        assert tuning_files.default_path(MPI).name == "an-mpi-1.2-on-64-x-some-r-cpu-2-3-ghz.json"
        assert tuning_files.read(MPI) == ("", "", ""), "used a table of another machine"
    table = tuning_files.build_table(*tuning_files.read(MPI))
    assert table.path == str(path) and table.describe() == f"{path} (measured on 2 ranks)"
    assert table.row("all_reduce", 2)["node"] == ((0, "mpi"), (4096, "shared"))
    monkeypatch.setenv("MPICOLL_TABLE", "0")
    assert tuning_files.read(MPI) == ("", "", "")


def test_default_path_without_xdg_config_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_files.default_path(MPI).parent == tmp_path / ".config" / "mpicoll"

    def expanduser(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert tuning_files.read(MPI) == ("", "", ""), (
        "only one rank reads the file, so read may not raise"
    )


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


def test_unreadable_default_file_is_ignored(monkeypatch):
    path = tuning_files.default_path(MPI)
    path.mkdir(parents=True)
    assert tuning_files.read(MPI) == ("", "", "")


def test_machine_description(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda name: cpuinfo)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine.platform, "machine", lambda: "an architecture")
    assert machine.describe() == "8 x an architecture"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A: B @ 2 GHz\n\nmodel name\t: other\n")
    assert machine.describe() == "8 x A: B @ 2 GHz"
    cpuinfo.write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n\nCPU part : 1\n")
    assert machine.describe() == "8 x an architecture 0x41 0xd4f"


def test_join_keeps_other_entries(monkeypatch):
    """Other numbers of ranks, kinds and places, and remarks of the user."""
    monkeypatch.setattr(machine, "describe", lambda: "this")
    text = tuning_files.join("", MPI, 16, marked(16), {"date": "then"})
    text = json.dumps({**json.loads(text), "remark": "slow on Mondays"})
    text = tuning_files.join(text, MPI, 2, marked(2), {"date": "now"})
    apart = {"broadcast": {"apart": ((0, "mpi"),)}, "gather": {"node": ((0, "shared"),)}}
    text = tuning_files.join(text, MPI, 16, apart, {"date": "later"})
    text = tuning_files.join(text, MPI, 2, marked(7), {"date": "again"})
    assert tuning_files.parse(text) == {
        2: marked(7),
        16: {"broadcast": {**marked(16)["broadcast"], **apart["broadcast"]},
             "gather": apart["gather"]},
    }  # fmt: skip
    written = json.loads(text)
    assert list(written["ranks"]) == ["2", "16"]
    assert written["remark"] == "slow on Mondays" and (written["mpi"], written["machine"]) == (
        MPI,
        "this",
    )
    assert written["measured"] == {"16": {"date": "later"}, "2": {"date": "again"}}
    assert '   "gather": {"node": [[0, "shared"]]}\n' in text, "not readable"
    assert tuning_files.join('{"ranks": {}, "measured": 3}', MPI, 2, marked(2), {})


def test_origin_mismatch_of_tables_of_another_mpi_or_machine(monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: "this")
    text = tuning_files.join("", MPI, 2, {}, {})
    assert tuning_files.origin_mismatch(text, MPI) == ""
    assert tuning_files.origin_mismatch(text, "An MPI 2") == "An MPI 1.2 on this"
    monkeypatch.setattr(machine, "describe", lambda: "another")
    assert tuning_files.origin_mismatch(text, MPI) == "An MPI 1.2 on this"
    assert tuning_files.origin_mismatch(json.dumps(GOOD), MPI) == "", "a file without origin"


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (1000, "1000 B"), (1024, "1 KiB"), (1536, "1536 B"), (3 * MIB, "3 MiB"),
     (MIB + KIB, "1025 KiB"), (1 << 40, "1024 GiB")],
)  # fmt: skip
def test_format_bytes(size, expected):
    assert format_bytes(size) == expected
