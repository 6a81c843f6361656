"""python -m mpicoll tune: steps from measurements, tables, whole jobs, and invalid options."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import log
from pathlib import Path
from typing import Any

import cli_jobs
import pytest

from mpicoll import cli, machine
from mpicoll.cli import tune
from mpicoll.cli.timing import Figure
from mpicoll.cli.tune_measure import Outcome
from mpicoll.cli.tune_steps import (
    CLEAR_RATIO,
    MAX_STEPS,
    MIN_GAIN,
    Change,
    choose_steps,
    find_changes,
    find_noise,
    splice,
)
from mpicoll.output import format_bytes
from mpicoll.routes import tuning, tuning_files

pytest_plugins = ["whole_jobs"]

pytestmark = pytest.mark.any_mpi

# --- steps from measurements --------------------------------------------------------------------

SIZES = [0, *(16 << i for i in range(10))]


def figures(spread=0.0, sizes=SIZES, distance="near", **times):
    """Return measurements by size, distance and route.

    times: of each route, a list of microseconds, one for each size.
    """
    return {
        size: {
            distance: {
                route: Figure(*(1e-6 * took[i] * part for part in (1 - spread, 1, 1 + spread)))
                for route, took in times.items()
            }
        }
        for i, size in enumerate(sizes)
    }


def near_and_far(near, far):
    """Merge the measurements of two distances."""
    return {size: near.get(size, {}) | far.get(size, {}) for size in sorted({*near, *far})}


FLAT = [10.0] * 11


def test_one_step_where_the_fastest_route_changes():
    found = figures(mpi=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], shared=[20.0] * 11)
    for usual in ((0, "mpi"),), ((0, "shared"),), ((0, "mpi"), (32, "shared"), (64, "mpi")):
        assert choose_steps(found, usual) == ((0, "mpi"), (256, "shared"))


def cost(found, way, usual):
    """Return the cost of one route per size, and the number of routes that differ from `usual`.

    An independent implementation of the rule in tune_steps.py.
    """
    total = 0.0
    for size, route in zip(found, way, strict=True):
        (by_route,) = found[size].values()
        best = min(by_route.values(), key=lambda one: one.median)
        own = by_route[route]
        if own.median > CLEAR_RATIO * best.median and own.low > best.high:
            total += min(log(own.median / best.median), MAX_STEPS * log(MIN_GAIN))
    ways, usuals = (pairwise([usual[0], *each]) for each in (way, usual))
    steps = sum(a != b and (a, b) != old for (a, b), old in zip(ways, usuals, strict=True))
    differing = sum(a != b for a, b in zip(way, usual, strict=True))
    return round(total + steps * log(MIN_GAIN), 9), differing


def test_chosen_steps_have_the_minimum_cost():
    """Compares with all combinations of routes for five sizes."""
    noise = random.Random(3)
    sizes = SIZES[:5]
    for _ in range(100):
        times = {name: [noise.choice([10, 10.3, 11, 13, 20]) for _ in sizes] for name in "abc"}
        found = figures(noise.choice([0, 0.02]), sizes, **times)
        usual = [noise.choice("abc") for _ in sizes]
        before = tuple(
            step for i, step in enumerate(zip(sizes, usual, strict=True))
            if i == 0 or usual[i - 1] != usual[i]
        )  # fmt: skip
        steps = choose_steps(found, before)
        way = [tuning.route_at(steps, size) for size in sizes]
        allowed = [
            [route for route in "abc" if found[size]["near"][route].median
             <= CLEAR_RATIO * found[size]["near"][default].median]
            for size, default in zip(sizes, usual, strict=True)
        ]  # fmt: skip
        least = min(cost(found, each, usual) for each in product(*allowed))
        assert cost(found, way, usual) == least


def test_steps_beyond_the_measured_sizes_stay():
    before = ((0, "exchange"), (64, "mpi"), (512, "shared"), (1 << 20, "mpi"), (1 << 30, "shared"))
    found = figures(sizes=[128, 256, 512, 1024], mpi=[10, 10, 5, 5], shared=[5, 5, 10, 10])
    steps = choose_steps(found, before)
    assert steps == ((128, "shared"), (512, "mpi"))
    assert splice(before, steps, 1024) == (
        (0, "exchange"), (64, "mpi"), (128, "shared"), (512, "mpi"), (1025, "shared"),
        (1 << 20, "mpi"), (1 << 30, "shared"),
    )  # fmt: skip
    nothing = ((0, "default"),)
    assert splice(nothing, steps, 1024) == ((0, "default"), *steps, (1025, "default"))
    assert splice(nothing, ((0, "mpi"),), 8) == ((0, "mpi"), (9, "default"))
    assert splice(((0, "mpi"), (1025, "shared")), ((0, "mpi"),), 1024) == (
        (0, "mpi"), (1025, "shared"),
    )  # fmt: skip
    tied = figures(sizes=[128, 256], mpi=[10, 10], shared=[10, 9.2])
    assert choose_steps(tied, ((0, "mpi"),)) == ((128, "mpi"),)


def test_unavailable_routes_are_ignored():
    """A step to an unavailable route extends the previous step."""
    before = ((0, "mpi"), (64, "shared"), (256, "exchange"))
    assert choose_steps(figures(mpi=FLAT, exchange=FLAT), before) == ((0, "mpi"), (256, "exchange"))
    assert choose_steps(figures(mpi_chunked=FLAT, hierarchical=[9.0] * 11), before) == (
        (0, "hierarchical"),
    )


def test_find_changes():
    found = figures(mpi=[4, 4, 4, *FLAT[3:]], shared=[2, 8, 2, *FLAT[3:]])
    default = ((0, "mpi"), (1024, "shared"))
    steps = ((0, "shared"), (64, "mpi"), (256, "shared"), (4096, "mpi"))
    assert find_changes(found, default, steps) == [
        Change(0, 64, "mpi", "shared", {"near": pytest.approx(1.26, abs=0.01)}),
        Change(256, 1024, "mpi", "shared", {"near": pytest.approx(1)}),
        Change(4096, None, "shared", "mpi", {"near": pytest.approx(1)}),
    ]
    assert find_changes(found, default, default) == []
    found = figures(mpi=FLAT, exchange=FLAT)
    changes = find_changes(found, ((0, "shared"), (64, "mpi")), ((0, "exchange"),))
    assert changes == [Change(0, None, "mpi", "exchange", {"near": pytest.approx(1)})]


def test_steps_minimize_the_maximum_regret_over_distances():
    """The default, a, is slow, so that mpi and shared are allowed at every size.

    At the first five sizes, shared is 4 times slower than mpi when far, and mpi is 3 times slower
    than shared when near. At the next sizes it is the opposite.
    """
    near = figures(a=[90.0] * 11, mpi=[30.0] * 5 + [40.0] * 6, shared=FLAT)
    far = figures(distance="far", a=[90.0] * 11, mpi=FLAT, shared=[40.0] * 5 + [30.0] * 6)
    usual = ((0, "a"),)
    # Costs are limited to MAX_STEPS steps, so the ratios must be small to differ.
    small = {
        size: {
            distance: {
                route: Figure(*((one.median ** 0.1,) * 3)) for route, one in by_route.items()
            }
            for distance, by_route in by.items()
        }
        for size, by in near_and_far(near, far).items()
    }  # fmt: skip
    assert choose_steps(small, usual) == ((0, "mpi"), (SIZES[5], "shared"))
    assert choose_steps({s: {"near": by["near"]} for s, by in small.items()}, usual) == (
        (0, "shared"),
    )
    assert choose_steps({s: {"far": by["far"]} for s, by in small.items()}, usual) == ((0, "mpi"),)


def test_changes_have_a_gain_for_each_distance():
    near = figures(mpi=FLAT, shared=[5.0] * 11)
    far = figures(sizes=SIZES[:3], distance="far", mpi=FLAT, shared=[8.0] * 11)
    (change,) = find_changes(near_and_far(near, far), ((0, "mpi"),), ((0, "shared"),))
    assert change.gains == {"near": pytest.approx(2), "far": pytest.approx(1.25)}


def test_find_noise():
    calm, wild = figures(0.02, mpi=FLAT, shared=FLAT), figures(0.3, mpi=FLAT)
    assert find_noise([calm, wild]) == pytest.approx(0.02)
    assert find_noise([wild]) == pytest.approx(0.3)
    assert find_noise([]) == 0


# --- tables -------------------------------------------------------------------------------------

MPI = "An MPI 1.2"
SETTING = tune._Setting(MPI, 2, ["here"], "node")


@dataclass
class Written:
    """A table that is written from given measurements."""

    path: Path

    def end(self, by_kind, last, sizes=(8, 8192), **options):
        """Finish a run, and return its exit code."""
        given = {"json": None, "force": False, "dry_run": False, "sizes": list(sizes), **options}
        outcome = Outcome(by_kind, dict.fromkeys(by_kind, last), 5, "distance: near")
        target = tune._Target(self.path, True, True)
        kinds = list(by_kind) or ["gather"]
        return tune._finish(SETTING, outcome, kinds, argparse.Namespace(**given), target)

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
            distance: {
                route: Figure(took * (1 - spread), took, took * (1 + spread))
                for route in tuning.eligible_routes(kind, "node")
                for took, spread in [(chance.choice([10, 10.3, 11, 13, 20])
                                      * chance.uniform(0.9, 1.1), chance.choice([0, 0.02, 0.2]))]
            }
            for distance in chance.choice([["near"], ["far"], ["near", "far"], ["unknown"]])
        }
        for size in sizes
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
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
    for kind, figures in found.items():
        steps = written.table().row(kind, 2)["node"]
        for size in sizes:
            for by_route in figures[size].values():
                median = {route: one.median for route, one in by_route.items()}
                most = CLEAR_RATIO * median[tuning.route_at(usual[kind], size)]
                assert median[tuning.route_at(steps, size)] <= most
        for size in {0, 98, 99, max(first - 1, 0), last + 1, 2 * last, 1 << 40}:
            if not first <= size <= last:
                assert tuning.route_at(steps, size) == tuning.route_at(usual[kind], size)
    monkeypatch.setattr(tuning, "_DEFAULTS", {2: later})
    for kind in found:
        steps = written.table().row(kind, 2)["node"]
        for size in {0, 98, 99, max(first - 1, 0), last + 1, 1 << 40}:
            if not first <= size <= last:
                assert tuning.route_at(steps, size) == tuning.route_at(later[kind]["node"], size)


#: The default is shared.
CALM = {"all_reduce": figures(0.02, mpi=[5.0] * 11, shared=FLAT)}
NOISY = {"all_reduce": figures(0.12, mpi=[5.0] * 11, shared=FLAT)}


def test_output_has_a_column_for_each_distance(written, capsys):
    far = figures(0.02, distance="far", mpi=[8.0] * 11, shared=FLAT)
    both = {"all_reduce": near_and_far(CALM["all_reduce"], far),
            "gather": figures(0.02, mpi=[5.0] * 11, shared=FLAT)}  # fmt: skip
    assert written.end(both, 8192) == 0
    head, reduced, gathered, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["faster,", "near", "faster,", "far"]
    assert reduced.split()[-4:] == ["2.00", "x", "1.25", "x"]
    assert gathered.split()[-3:] == ["2.00", "x", "-"]
    assert json.loads(written.path.read_text())["measured"]["2"]["distance of the ranks"] == (
        "near and far"
    )


@pytest.mark.parametrize("before", [None, '{"ranks": {}}'])
def test_noisy_measurements_are_printed_but_not_written(written, capsys, before):
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


def test_force_writes_noisy_measurements(written, capsys):
    assert written.end(NOISY, 8192, force=True) == 0
    shown = capsys.readouterr()
    assert "times vary by 12.0%" in shown.out and f"# written to {written.path}" in shown.out
    assert shown.err == ""
    assert json.loads(written.path.read_text())["measured"]["2"]["noise"] == "12.0%"
    assert written.table().row("all_reduce", 2)["node"] == ((0, "mpi"), (8193, "shared"))


@pytest.mark.parametrize(("found", "code"), [(CALM, 0), (NOISY, 3)])
def test_dry_run_prints_the_table_and_the_changes(written, capsys, found, code):
    assert written.end(found, 8192, dry_run=True) == code
    assert not written.path.exists()
    shown = capsys.readouterr()
    assert "shared       mpi          2.00 x" in shown.out
    assert f"written to {written.path}\n" not in shown.out
    text = shown.out[shown.out.index("{") : shown.out.rindex("}") + 1]
    assert tuning_files.parse(text)[2]["all_reduce"] == {"node": ((0, "mpi"), (8193, "default"))}
    assert bool(shown.err) == bool(code)
    assert written.end(CALM, 8192) == 0
    capsys.readouterr()
    kept = written.path.read_text()
    opposite = {"all_reduce": figures(0.02, mpi=FLAT, shared=[8.0] * 11)}
    assert written.end(opposite, 8192, dry_run=True) == 0
    assert "mpi          shared       1.25 x" in capsys.readouterr().out
    assert written.end(CALM, 8192, dry_run=True) == 0
    assert "no route is faster than the current one" in capsys.readouterr().out
    assert written.path.read_text() == kept


def test_output_lists_sizes_that_were_not_measured(written, capsys):
    assert written.end(CALM, 8192, sizes=(8, 16384)) == 0
    out = capsys.readouterr().out
    assert "not measured within --seconds, not changed: all_reduce of more than 8 KiB" in out
    assert written.end(CALM, 8192, sizes=(8, 8192)) == 0
    assert "not measured" not in capsys.readouterr().out
    kept = written.path.read_text()
    assert written.end({}, 0, force=True) == 3
    assert "too few measurements" in capsys.readouterr().err
    assert written.path.read_text() == kept


def test_second_run_over_fewer_sizes_keeps_other_steps(written):
    assert written.end(CALM, 8192) == 0
    fewer = figures(0.02, SIZES[:3], mpi=[9.0] * 3, shared=[5.0] * 3)
    assert written.end({"all_reduce": fewer}, SIZES[2]) == 0
    (steps,) = tuning_files.parse(written.path.read_text())[2]["all_reduce"].values()
    assert steps == ((0, "shared"), (SIZES[2] + 1, "mpi"), (8193, "default"))


# --- progress -----------------------------------------------------------------------------------


class Screen(io.StringIO):
    """A terminal, or a pipe of a launcher."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_replaces_a_line_on_terminals_and_is_rare_elsewhere(monkeypatch, terminal):
    screen, now = Screen(terminal), 1000.0
    monkeypatch.setattr(cli.sys, "stderr", screen)
    monkeypatch.setattr(cli.time, "monotonic", lambda: now)
    monkeypatch.setattr(cli, "_last_shown", None)
    after = [(0, "a"), (9, "b"), (2, "c"), (9, "d"), (0.5, ""), (9, "e"), (1, "f")]
    for seconds, text in after:
        now += seconds
        cli.show_progress(text)
    shown = [f"\r\x1b[K{text}" for _, text in after] if terminal else ["c\n", "f\n"]
    assert screen.getvalue() == "".join(shown)


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8:64", [8, 16, 32, 64]), ("1K:4k", [1024, 2048, 4096]), ("3:20", [3, 6, 12]), ("7", [7]),
     ("0.5K:1K", [512, 1024]), ("8:64M", [8 << i for i in range(24)])],
)  # fmt: skip
def test_sizes_are_parsed(text, sizes):
    assert tune._sizes(text) == sizes


@dataclass(frozen=True)
class Job(cli_jobs.Job):
    """A job, and optionally a second one.

    then: the command line of the second job, on the same number of ranks.
    file: the content of $FOLDER/table.json before the job.
    """

    then: str = ""
    file: str | None = None


@dataclass(frozen=True)
class Ended(cli_jobs.Ended):
    """The result of a job, the result of the second job, and $FOLDER."""

    after: cli_jobs.Ended | None
    folder: Path

    @property
    def table(self) -> Path:
        return self.folder / "table.json"


job = cli_jobs.decorator(Job)


def run(job: Job, parameters: Mapping[str, Any], folder: Path) -> Ended:
    own = {"XDG_CONFIG_HOME": str(folder / "config"), "MPICOLL_TABLE": "", **job.environment}
    job = dataclasses.replace(job, environment=own)
    if job.file is not None:
        (folder / "table.json").write_text(job.file)
    ended = cli_jobs.run(job, parameters, folder)
    second = dataclasses.replace(job, words=job.then)
    after = cli_jobs.run(second, parameters, folder) if job.then else None
    return Ended(**vars(ended), after=after, folder=folder)


#: Takes about two seconds, and more on a busy machine, which needs --force.
FEW = "--quick --force --seconds 20 --sizes 8:64"


@job(f"tune {FEW} --kinds all_reduce 'all_reduce of others' gather --json $FOLDER/all.json",
     ranks=2, then="doctor --json")  # fmt: skip
def test_later_jobs_use_the_table(ended: Ended) -> None:
    ended.succeeded()
    (path,) = (ended.folder / "config" / "mpicoll").iterdir()
    assert f"# written to {path}\n" in ended.out and "takes at most" in ended.out
    assert "# times vary by " in ended.out
    written = json.loads(path.read_text())
    report = json.loads((ended.folder / "all.json").read_text())
    assert written["machine"] == machine.describe() == report["machine"]
    assert written["mpi"] == report["mpi"] and written["measured"]["2"]["mpicoll"] in ended.out
    kinds = ["all_reduce", "all_reduce of others", "gather"]
    rows = tuning_files.parse(path.read_text())
    assert list(rows) == [2] and list(rows[2]) == kinds
    assert report["steps"] == written["ranks"]["2"]
    for kind in kinds:
        (place,) = rows[2][kind]
        assert place == report["place"] in ("node", "apart")
        for one in report["figures"][kind]:
            assert one["distance"] in ("near", "far", "unknown", "mixed")
            routes = set(one) - {"bytes", "distance"}
            assert routes <= set(tuning.eligible_routes(kind, place)) and len(routes) > 1
            assert all(0 < one[r]["low"] <= one[r]["median"] <= one[r]["high"] for r in routes)
        sizes = list(dict.fromkeys(one["bytes"] for one in report["figures"][kind]))
        assert sizes == [0, *(8 << i for i in range(1, len(sizes)))]
        assert rows[2][kind][place][-1] == ((sizes[-1] or 8) + 1, "default")
    assert ended.after is not None and ended.after.code == 0, ended
    found = json.loads(ended.after.out)
    assert {each["routes"] for each in found["ranks"]} == {f"{path} (measured on 2 ranks)"}
    words = {"mpi": "MPI", "shared": "shared memory", "mpi_chunked": "MPI in chunks",
             "exchange": "messages over MPI", "single_copy": "one copy by the kernel",
             "widened": "MPI in float32"}  # fmt: skip
    table = tuning_files.build_table(str(path), path.read_text())
    for kind, name in zip(kinds, ("all_reduce (float32)", "all_reduce (bfloat16)", "gather"),
                          strict=True):  # fmt: skip
        (_, first), *others = table.row(kind, 2)[report["place"]]
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


@job(f"tune {FEW} --kinds gather gather reduce", ranks=2, file=json.dumps({"ranks": OLD}),
     environment={"MPICOLL_TABLE": "$FOLDER/table.json"}, then="doctor")  # fmt: skip
def test_tune_adds_to_an_existing_table(ended: Ended) -> None:
    """Steps of kinds and sizes that were not measured stay."""
    ended.succeeded()
    rows = tuning_files.parse(ended.table.read_text())
    assert rows[16] == {"scatter": {"node": ((0, "shared"),)}}
    assert rows[2]["scatter"] == rows[16]["scatter"]
    assert rows[2]["gather"]["apart"] == ((0, "mpi"), (9, "mpi"))
    assert rows[2]["gather"]["node"][-1] == (1 << 21, "mpi"), "the steps of larger sizes stay"
    assert "reduce" in rows[2] and "reduce" not in rows[16]
    assert sorted(each.name for each in ended.folder.iterdir()) == ["table.json"]
    assert ended.after is not None
    assert f"{ended.table} (measured on 2, 16 ranks)" in ended.after.out, ended.after


@job("tune --sizes 8:1G --seconds 0.001 --kinds all_reduce -o $FOLDER/table.json", ranks=3)
def test_too_few_seconds_write_no_table(ended: Ended) -> None:
    assert ended.code == 3 and "Traceback" not in ended.err, ended
    assert "8 B to 1 GiB: takes at most 0.001 s" in ended.out
    assert ended.err.count("too few measurements") == 1
    assert not ended.table.exists()


@job("tune --quick --force --seconds 20 --sizes 8:16 --kinds gather -o $FOLDER/table.json", ranks=3,
     environment={"TEST_MPICOLL_PACE": "0"})  # fmt: skip
def test_one_rank_prints_progress_under_a_launcher(ended: Ended) -> None:
    assert ended.code == 0, ended
    lines = ended.err.splitlines()
    assert all(line.startswith("tune: ") and line.count("tune: ") == 1 for line in lines), ended
    assert sum(line.startswith("tune: repetition 1, 0 of 1 sizes, at most ") for line in lines) == 1


# --- dry runs and tables that are removed -------------------------------------------------------


@job("tune --quick --dry-run --seconds 20 --sizes 8:16 --kinds gather", ranks=2)
def test_dry_run_writes_no_file(ended: Ended) -> None:
    assert ended.code in (0, 3) and "Traceback" not in ended.err, ended
    text = ended.out[ended.out.index("{") : ended.out.rindex("}") + 1]
    assert list(tuning_files.parse(text)) == [2]
    assert not list(ended.folder.iterdir()), ended


MADE = '{"ranks": {"2": {"gather": {"node": [[0, "mpi"]]}}}}'


@pytest.mark.parametrize("words", ["", "-o $FOLDER/table.json"])
@job("tune --reset $words", ranks=2, file=MADE, environment={"MPICOLL_TABLE": "$FOLDER/table.json"},
     then="tune --reset $words")  # fmt: skip
def test_reset_removes_the_table(words: str, ended: Ended) -> None:
    """One rank removes the file that tune would write. The second job finds none."""
    ended.succeeded()
    assert ended.out.count(f"# removed {ended.table}") == 1 and not ended.table.exists()
    assert ("unset MPICOLL_TABLE" in ended.out) == (not words)
    assert ended.after is not None
    ended.after.succeeded()
    assert f"no table at {ended.table}\n" in ended.after.out


@job("tune --reset")
def test_reset_without_a_launcher_creates_no_folder(ended: Ended) -> None:
    ended.succeeded()
    assert f"no table at {ended.folder}/config/mpicoll/" in ended.out
    assert not list(ended.folder.iterdir())


def test_reset_removes_the_table_of_this_mpi(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    target = tune._target(None, "", MPI)
    target.path.parent.mkdir()
    target.path.write_text(tuning_files.join("", MPI, 2, {}, {}))
    assert tune._remove(target, MPI) == f"# removed {target.path}"
    assert not target.path.exists()
    assert f"no table at {target.path}" in tune._remove(target, MPI)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("precious", "not a tuning table: Expecting value"),
        ('{"precious": 1}', "not a tuning table: expected"),
        ("", "it is empty"),
        ('{"ranks": {}, "mpi": "Our MPI 7"}', "was measured with Our MPI 7"),
    ],
)
def test_reset_keeps_files_that_are_not_tables(tmp_path, text, why):
    path = tmp_path / "precious"
    path.write_text(text)
    with pytest.raises(tune.ArgumentError, match=why):
        tune._remove(tune._target(path, "", MPI), MPI)
    assert path.read_text() == text
    with pytest.raises(tune.ArgumentError, match="Is a directory"):
        tune._remove(tune._target(tmp_path, "", MPI), MPI)


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
        ("--seconds 0", "number of seconds, got '0'"),
        ("--seconds inf", "number of seconds, got 'inf'"),
        ("--sizes 8:16T", "GiB are available"),
        ("-o /nowhere/table.json", "no folder /nowhere"),
        ("-o /", "/: cannot be read: Is a directory"),
        ("-o /proc/table.json", "/proc/table.json: cannot be written: "),
        ("--json /nowhere/table.json", "no folder /nowhere"),
        ("--force --dry-run", "argument --dry-run: not allowed with argument --force"),
        ("--reset --dry-run", "argument --dry-run: not allowed with argument --reset"),
        ("--reset -o /", "/: cannot be read: Is a directory"),
        ("--dry-run -o table.json --json table.json", "name the same file"),
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
@job("tune --quick --force --seconds 20 --sizes 8 --kinds all_reduce $words", ranks=2, file=BROKEN,
     environment={"MPICOLL_TABLE": "$FOLDER/table.json"})  # fmt: skip
def test_invalid_table_is_kept_and_does_not_prevent_another_one(words: str, ended: Ended) -> None:
    assert ended.table.read_text() == BROKEN
    if words:
        ended.succeeded()
        return
    message = f"{ended.table} is not a tuning table: gather: node: expected "
    ended.refused(message, "remove it")


@job("tune --quick --sizes 8 -o $FOLDER/table.json", ranks=2, file=OTHERS)
def test_table_of_another_machine_is_kept(ended: Ended) -> None:
    ended.refused("was measured with Our MPI 7 on 9 x A, but this is ", "--output")
    assert ended.table.read_text() == OTHERS


@job("doctor --json", ranks=3, file=BROKEN, environment={"MPICOLL_TABLE": "$FOLDER/table.json"})
def test_job_with_an_invalid_table_fails_with_one_error(ended: Ended) -> None:
    assert ended.code == 1 and "Traceback" not in ended.err, ended
    (advice,) = json.loads(ended.out)["advice"]
    assert advice["wrong"] and f"{ended.table} is not a tuning table: " in advice["text"], ended


@job("tune", environment=cli_jobs.SRUN)
def test_ranks_that_mpi_does_not_have_are_reported(ended: Ended) -> None:
    ended.refused("srun announces 2 ranks", code=1)
