"""python -m mpicoll tune: steps from measurements, tables, whole jobs, and invalid options."""

from __future__ import annotations

import argparse
import json
import random

import pytest
from cli_jobs import Ended, job

from mpicoll import machine
from mpicoll.cli import tune
from mpicoll.cli.timing import Figure
from mpicoll.cli.tune import CLEAR_RATIO, Outcome, choose_steps
from mpicoll.routes import tuning, tuning_files

pytestmark = pytest.mark.any_mpi

# --- steps from measurements --------------------------------------------------------------------

SIZES = [0, *(16 << i for i in range(10))]


def figures(spread=0.0, sizes=SIZES, **times):
    """Return measurements by size and route.

    times: of each route, a list of microseconds, one for each size.
    """
    return {
        size: {
            route: Figure(*(1e-6 * took[i] * part for part in (1 - spread, 1, 1 + spread)))
            for route, took in times.items()
        }
        for i, size in enumerate(sizes)
    }


FLAT = [10.0] * 11


def test_chosen_routes_are_good_and_not_slower_than_the_default():
    noise = random.Random(3)
    for _ in range(100):
        times = {name: [noise.choice([10, 10.3, 11, 13, 20]) for _ in SIZES] for name in "abc"}
        found = figures(**times)
        usual = [noise.choice("abc") for _ in SIZES]
        steps = choose_steps(found, tuple(zip(SIZES, usual, strict=True)))
        for i, size in enumerate(SIZES):
            allowed = [own[i] for own in times.values()
                       if own[i] <= CLEAR_RATIO * times[usual[i]][i]]  # fmt: skip
            own, best = times[tuning.route_at(steps, size)][i], min(allowed)
            assert own in allowed and own <= CLEAR_RATIO * best


def test_unavailable_routes_are_ignored():
    """A step to an unavailable route extends the previous step."""
    before = ((0, "mpi"), (64, "shared"), (256, "exchange"))
    assert choose_steps(figures(mpi=FLAT, exchange=FLAT), before) == ((0, "mpi"), (256, "exchange"))
    assert choose_steps(figures(widened=FLAT, hierarchical=[9.0] * 11), before) == (
        (0, "hierarchical"),
    )


# --- tables -------------------------------------------------------------------------------------

MPI = "An MPI 1.2"


def test_noisy_measurements_are_printed_but_written_only_with_force(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning.job, "table", tuning.Table())
    path = tmp_path / "table.json"
    by_kind = {"all_reduce": figures(0.12, mpi=[5.0] * 11, shared=FLAT)}  # the default is shared

    def finish(**options):
        options = {"force": False, "dry_run": False, "sizes": [8, 8192], **options}
        outcome = Outcome(by_kind, {"all_reduce": 8192})
        setting = tune._Setting(MPI, 2, "here", "node", path)
        return tune._finish(setting, outcome, ["all_reduce"], argparse.Namespace(**options))

    assert finish() == 3 and not path.exists()
    shown = capsys.readouterr()
    row = "all_reduce                0 B        8 KiB      shared       mpi          2.00 x"
    assert row in shown.out and "written" not in shown.out
    for words in ("error: times vary by 12.0%, more than 10%", "no table was written", "--force"):
        assert words in shown.err
    assert finish(force=True, sizes=[8, 16384]) == 0
    shown = capsys.readouterr()
    assert "times vary by 12.0%" in shown.out and shown.err == ""
    assert "not measured within --seconds: all_reduce of more than 8 KiB\n" in shown.out
    table = tuning_files.build_table(str(path), path.read_text())
    assert table.row("all_reduce", 2)["node"] == ((0, "mpi"), (8193, "shared"))


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1K:4k", [1024, 2048, 4096]), ("3:20", [3, 6, 12]), ("7", [7]), ("0.5K:1K", [512, 1024])],
)
def test_sizes_are_parsed(text, sizes):
    assert tune._sizes(text) == sizes


#: Takes about two seconds, and more on a busy machine, which needs --force.
FEW = "--force --seconds 40 --sizes 8:64"


@job(f"tune {FEW} --kinds all_reduce 'all_reduce of others' gather", ranks=2,
     then="doctor --json")  # fmt: skip
def test_later_jobs_use_the_table(ended: Ended) -> None:
    ended.in_good_order()
    (path,) = (ended.folder / "config" / "mpicoll").iterdir()
    assert f"# written to {path}; jobs with this environment use it\n" in ended.out
    written = json.loads(path.read_text())
    assert written["machine"] == machine.describe()
    assert written["mpi"] in ended.out and written["measured"]["2"]["mpicoll"] in ended.out
    kinds = ["all_reduce", "all_reduce of others", "gather"]
    rows = tuning_files.parse(path.read_text())
    assert list(rows) == [2] and list(rows[2]) == kinds
    for kind in kinds:
        (place,) = rows[2][kind]
        assert place in ("node", "apart") and rows[2][kind][place][-1] == (65, "default")
    assert ended.after is not None and ended.after.code == 0, ended
    found = json.loads(ended.after.out)
    assert {each["routes"] for each in found["ranks"]} == {f"{path} (measured on 2 ranks)"}


#: A table without an MPI and a machine, as written by hand.
OLD = {
    "16": {"scatter": {"node": [[0, "shared"]]}},
    "2": {
        "scatter": {"node": [[0, "shared"]]},
        "gather": {
            "node": [[0, "mpi"], [1 << 20, "shared"], [1 << 21, "mpi"]],
            "apart": [[0, "mpi"], [9, "mpi"]],
        },
    },
}


@job(f"tune {FEW} --kinds gather gather reduce", ranks=2, table=json.dumps({"ranks": OLD}),
     environment={"MPICOLL_TABLE": "$FOLDER/table.json"}, then="doctor")  # fmt: skip
def test_tune_adds_to_an_existing_table(ended: Ended) -> None:
    """Rows of kinds and placements that were not measured stay."""
    ended.in_good_order()
    rows = tuning_files.parse(ended.table.read_text())
    assert rows[16] == {"scatter": {"node": ((0, "shared"),)}}
    assert rows[2]["scatter"] == rows[16]["scatter"]
    assert rows[2]["gather"]["apart"] == ((0, "mpi"), (9, "mpi"))
    assert rows[2]["gather"]["node"][-1] == (65, "default")
    assert "reduce" in rows[2] and "reduce" not in rows[16]
    assert [each.name for each in ended.folder.iterdir() if each.is_file()] == ["table.json"]
    assert ended.after is not None
    assert f"{ended.table} (measured on 2, 16 ranks)" in ended.after.out, ended.after


@job("tune --sizes 8:1G --seconds 0.001 --kinds all_reduce -o $FOLDER/table.json", ranks=3)
def test_too_few_seconds_write_no_table(ended: Ended) -> None:
    assert ended.code == 3 and "Traceback" not in ended.err, ended
    assert "8 B to 1 GiB: takes about 0.001 s" in ended.out
    assert ended.err.count("too few measurements") == 1
    assert not ended.table.exists()


@job("tune --dry-run --seconds 20 --sizes 8:16 --kinds gather", ranks=2)
def test_dry_run_writes_no_file(ended: Ended) -> None:
    assert ended.code in (0, 3) and "Traceback" not in ended.err, ended
    text = ended.out[ended.out.index("{") : ended.out.rindex("}") + 1]
    assert list(tuning_files.parse(text)) == [2]
    assert not list(ended.folder.iterdir()), ended


# --- errors -------------------------------------------------------------------------------------


@job("tune")
def test_tune_on_one_rank_is_an_error(ended: Ended) -> None:
    ended.refused("one rank has only one route")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--sizes 9:8", "'9:8': the first size is larger than the last"),
        ("--kinds all_to_all", "invalid choice: 'all_to_all'"),
        ("--sizes 8:16T", "GiB are available"),
        ("-o /nowhere/table.json", "no folder /nowhere"),
        ("-o /proc/table.json", "/proc/table.json: cannot be written: "),
        ("--force --dry-run", "argument --dry-run: not allowed with argument --force"),
    ],
)
@job("tune $words", ranks=3)
def test_invalid_options_end_all_ranks(words: str, why: str, ended: Ended) -> None:
    ended.refused(why)


@job("tune --kinds gather scatter", ranks=2, environment={"MPICOLL_SHARED_MEMORY": "0"})
def test_tune_with_only_one_route_is_an_error(ended: Ended) -> None:
    ended.refused("ranks do not share memory: only one route is available for gather, scatter")


BROKEN = '{"ranks": {"2": {"gather": {"node": [[8, "mpi"]]}}}}'
OTHERS = '{"ranks": {}, "mpi": "Our MPI 7", "machine": "9 x A"}'


@pytest.mark.parametrize("words", ["", "-o $FOLDER/other.json"])
@job("tune --force --seconds 20 --sizes 8 --kinds all_reduce $words", ranks=2, table=BROKEN,
     environment={"MPICOLL_TABLE": "$FOLDER/table.json"})  # fmt: skip
def test_invalid_table_is_kept_and_does_not_prevent_another_one(words: str, ended: Ended) -> None:
    assert ended.table.read_text() == BROKEN
    if words:
        ended.in_good_order()
        return
    message = f"{ended.table} is not a tuning table: gather: node: expected "
    ended.refused(message, "remove it")


@job("tune --sizes 8 -o $FOLDER/table.json", ranks=2, table=OTHERS)
def test_table_of_another_machine_is_kept(ended: Ended) -> None:
    ended.refused("was measured with Our MPI 7 on 9 x A, but this is ", "--output")
    assert ended.table.read_text() == OTHERS


@job("doctor --json", ranks=3, table=BROKEN, environment={"MPICOLL_TABLE": "$FOLDER/table.json"})
def test_job_with_an_invalid_table_fails_with_one_error(ended: Ended) -> None:
    assert ended.code == 1 and "Traceback" not in ended.err, ended
    (advice,) = json.loads(ended.out)["advice"]
    assert advice["wrong"] and f"{ended.table} is not a tuning table: " in advice["text"], ended
