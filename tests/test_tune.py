"""python -m mpicoll tune: steps from measurements, tables, whole jobs, and invalid options."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_jobs import SRUN, Ended, job

from mpicoll import machine
from mpicoll.cli import tune
from mpicoll.cli.timing import Figure
from mpicoll.cli.tune import CLEAR_RATIO, Outcome, choose_steps, describe_changes
from mpicoll.output import format_bytes
from mpicoll.routes import tuning, tuning_files

pytest_plugins = ["whole_jobs"]

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


def test_one_step_where_the_fastest_route_changes():
    found = figures(mpi=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], shared=[20.0] * 11)
    for usual in ((0, "mpi"),), ((0, "shared"),), ((0, "mpi"), (32, "shared"), (64, "mpi")):
        assert choose_steps(found, usual) == ((0, "mpi"), (256, "shared"))


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


def test_ties_keep_the_default():
    tied = figures(sizes=[128, 256], mpi=[10, 10], shared=[10, 9.6])
    assert choose_steps(tied, ((0, "mpi"),)) == ((128, "mpi"),)
    unclear = figures(0.2, mpi=FLAT, shared=[9.0] * 11)
    assert choose_steps(unclear, ((0, "mpi"),)) == ((0, "mpi"),)


def test_unavailable_routes_are_ignored():
    """A step to an unavailable route extends the previous step."""
    before = ((0, "mpi"), (64, "shared"), (256, "exchange"))
    assert choose_steps(figures(mpi=FLAT, exchange=FLAT), before) == ((0, "mpi"), (256, "exchange"))
    assert choose_steps(figures(mpi_chunked=FLAT, hierarchical=[9.0] * 11), before) == (
        (0, "hierarchical"),
    )


def test_changes_are_described():
    def changes(found, default, steps):
        lines = describe_changes("gather", found, default, steps, 8192)
        return [line[26:].replace(" B", "B").replace(" KiB", "K").split() for line in lines]

    found = figures(mpi=[4, 4, 4, *FLAT[3:]], shared=[2, 8, 2, *FLAT[3:]])
    default = ((0, "mpi"), (1024, "shared"))
    steps = ((0, "shared"), (64, "mpi"), (256, "shared"), (4096, "mpi"))
    assert changes(found, default, steps) == [
        ["0B", "64B", "mpi", "shared", "1.26", "x"],
        ["256B", "1K", "mpi", "shared", "1.00", "x"],
        ["4K", "8K", "shared", "mpi", "1.00", "x"],
    ]
    assert changes(found, default, default) == []
    found = figures(mpi=FLAT, exchange=FLAT)
    (change,) = changes(found, ((0, "shared"), (64, "mpi")), ((0, "exchange"),))
    assert change == ["0B", "8K", "mpi", "exchange", "1.00", "x"]


# --- tables -------------------------------------------------------------------------------------

MPI = "An MPI 1.2"


@dataclass
class Written:
    """A table that is written from given measurements."""

    path: Path

    def end(self, by_kind, last, sizes=(8, 8192), **options):
        """Finish a run, and return its exit code."""
        given = {"force": False, "dry_run": False, "sizes": list(sizes), **options}
        outcome = Outcome(by_kind, dict.fromkeys(by_kind, last), "distance: near")
        setting = tune._Setting(MPI, 2, "here", "node", self.path)
        kinds = list(by_kind) or ["gather"]
        return tune._finish(setting, outcome, kinds, argparse.Namespace(**given))

    def table(self):
        """Return the table that a job reads."""
        return tuning_files.build_table(str(self.path), self.path.read_text())


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning.job, "table", tuning.Table())
    return Written(tmp_path / "table.json")


def any_figures(kind, sizes, chance):
    """Return random measurements of every route: ties, small and large differences and spreads."""
    return {
        size: {
            route: Figure(took * (1 - spread), took, took * (1 + spread))
            for route in tuning.eligible_routes(kind, "node")
            for took, spread in [(chance.choice([10, 10.3, 11, 13, 20]) * chance.uniform(0.9, 1.1),
                                  chance.choice([0, 0.02, 0.2]))]
        }
        for size in sizes
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_tables_have_no_slower_routes_and_defaults_at_other_sizes(written, monkeypatch, seed):
    """At sizes that were not measured, jobs use the current defaults, also if these change."""
    chance = random.Random(seed)
    first, count = chance.choice([0, 64, 4096]), chance.randrange(1, 14)
    sizes = [first, *((first or 8) << i for i in range(1, count))]
    last = max(sizes[-1], 8)
    found = {kind: any_figures(kind, sizes, chance) for kind in tuning.KINDS}
    assert written.end(found, last, force=True) == 0
    later = {
        kind: {
            place: ((0, names[-1]), (99, names[0]))
            for place in tuning.PLACES
            for names in [tuning.eligible_routes(kind, place)]
        }
        for kind in tuning.KINDS
    }
    usual = {kind: tuning.job.table.row(kind, 2)["node"] for kind in tuning.KINDS}
    others = [
        s for s in (0, 98, 99, max(first - 1, 0), last + 1, 1 << 40) if not first <= s <= last
    ]
    for kind, by_size in found.items():
        steps = written.table().row(kind, 2)["node"]
        for size, by_route in by_size.items():
            most = CLEAR_RATIO * by_route[tuning.route_at(usual[kind], size)].median
            assert by_route[tuning.route_at(steps, size)].median <= most
        for size in others:
            assert tuning.route_at(steps, size) == tuning.route_at(usual[kind], size)
    monkeypatch.setattr(tuning, "_DEFAULTS", {2: later})
    for kind in found:
        steps = written.table().row(kind, 2)["node"]
        for size in others:
            assert tuning.route_at(steps, size) == tuning.route_at(later[kind]["node"], size)


#: The default is shared.
CALM = {"all_reduce": figures(0.02, mpi=[5.0] * 11, shared=FLAT)}
NOISY = {"all_reduce": figures(0.12, mpi=[5.0] * 11, shared=FLAT)}


@pytest.mark.parametrize("before", [None, '{"ranks": {}}'])
def test_noisy_measurements_are_printed_but_written_only_with_force(written, capsys, before):
    if before:
        written.path.write_text(before)
    assert written.end(NOISY, 8192) == 3
    assert (written.path.read_text() if written.path.exists() else None) == before
    shown = capsys.readouterr()
    row = "all_reduce                0 B        8 KiB      shared       mpi          2.00 x"
    assert row in shown.out
    assert "times vary by 12.0%, at most 10%" in shown.out and "written" not in shown.out
    for words in ("error: times vary by 12.0%, more than 10%", "no table was written", "--seconds",
                  "--force"):  # fmt: skip
        assert words in shown.err
    assert written.end(NOISY, 8192, force=True) == 0
    shown = capsys.readouterr()
    assert "times vary by 12.0%" in shown.out and shown.err == ""
    assert json.loads(written.path.read_text())["measured"]["2"]["noise"] == "12.0%"
    assert written.table().row("all_reduce", 2)["node"] == ((0, "mpi"), (8193, "shared"))


@pytest.mark.parametrize(("found", "code"), [(CALM, 0), (NOISY, 3)])
def test_dry_run_prints_the_table_and_the_changes(written, capsys, found, code):
    assert written.end(found, 8192, dry_run=True) == code
    assert not written.path.exists()
    shown = capsys.readouterr()
    assert "shared       mpi          2.00 x" in shown.out
    text = shown.out[shown.out.index("{") : shown.out.rindex("}") + 1]
    assert tuning_files.parse(text)[2]["all_reduce"] == {"node": ((0, "mpi"), (8193, "default"))}
    assert bool(shown.err) == bool(code)
    assert written.end(CALM, 8192) == 0
    kept = written.path.read_text()
    opposite = {"all_reduce": figures(0.02, mpi=FLAT, shared=[8.0] * 11)}
    capsys.readouterr()
    assert written.end(opposite, 8192, dry_run=True) == 0
    assert "no route is faster than the default" in capsys.readouterr().out
    assert written.path.read_text() == kept


def test_output_lists_sizes_that_were_not_measured(written, capsys):
    assert written.end(CALM, 8192, sizes=(8, 16384)) == 0
    out = capsys.readouterr().out
    assert "not measured within --seconds: all_reduce of more than 8 KiB\n" in out
    assert written.end(CALM, 8192, sizes=(8, 8192)) == 0
    assert "not measured" not in capsys.readouterr().out
    kept = written.path.read_text()
    assert written.end({}, 0, force=True) == 3
    assert "too few measurements" in capsys.readouterr().err
    assert written.path.read_text() == kept


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8:64", [8, 16, 32, 64]), ("1K:4k", [1024, 2048, 4096]), ("3:20", [3, 6, 12]), ("7", [7]),
     ("0.5K:1K", [512, 1024]), ("8:64M", [8 << i for i in range(24)])],
)  # fmt: skip
def test_sizes_are_parsed(text, sizes):
    assert tune._sizes(text) == sizes


#: Takes about two seconds, and more on a busy machine, which needs --force.
FEW = "--force --seconds 40 --sizes 8:64"


@job(f"tune {FEW} --kinds all_reduce 'all_reduce of others' gather", ranks=2,
     then="doctor --json")  # fmt: skip
def test_later_jobs_use_the_table(ended: Ended) -> None:
    ended.succeeded()
    (path,) = (ended.folder / "config" / "mpicoll").iterdir()
    assert f"# written to {path}; jobs with this environment use it\n" in ended.out
    assert "takes about 40 s at most" in ended.out
    assert "# times vary by " in ended.out
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
    words = {"mpi": "MPI", "shared": "shared memory", "mpi_chunked": "MPI in chunks",
             "exchange": "messages over MPI", "single_copy": "one copy by the kernel",
             "widened": "MPI in float32"}  # fmt: skip
    table = tuning_files.build_table(str(path), path.read_text())
    for kind, name in zip(kinds, ("all_reduce (float32)", "all_reduce (bfloat16)", "gather"),
                          strict=True):  # fmt: skip
        (_, first), *others = table.row(kind, 2)[place]
        steps = [f"from {format_bytes(least)} on {words[route]}" for least, route in others]
        assert found["routes"]["host"][name] == "; ".join([words[first], *steps])


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
    ended.succeeded()
    rows = tuning_files.parse(ended.table.read_text())
    assert rows[16] == {"scatter": {"node": ((0, "shared"),)}}
    assert rows[2]["scatter"] == rows[16]["scatter"]
    assert rows[2]["gather"]["apart"] == ((0, "mpi"), (9, "mpi"))
    assert rows[2]["gather"]["node"][-1] == (65, "default")
    assert "reduce" in rows[2] and "reduce" not in rows[16]
    assert sorted(each.name for each in ended.folder.iterdir()) == ["table.json"]
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
        ("--sizes :8", "optionally with K, M, G or T, got ''"),
        ("--kinds all_to_all", "invalid choice: 'all_to_all'"),
        ("--sizes 8:16T", "GiB are available"),
        ("-o /nowhere/table.json", "no folder /nowhere"),
        ("-o /", "Is a directory: '/'"),
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
        ended.succeeded()
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


@job("tune", environment=SRUN)
def test_ranks_that_mpi_does_not_have_are_reported(ended: Ended) -> None:
    ended.refused("srun announces 2 ranks", code=1)
