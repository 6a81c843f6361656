"""The benchmarks: an aim, a table and pages from given measurements, and short runs."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import aims
import compare
import pytest
import report
from whole_jobs import MPIEXEC, needs_mpiexec, run_program

from mpicoll.primitives import PRIMITIVES

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.any_mpi, pytest.mark.slow]

KIB, MIB = 1 << 10, 1 << 20

# --- aims, from given measurements --------------------------------------------------------------


def measured(case: str, primitive: str, size: int, seconds: float, **more: Any) -> dict[str, Any]:
    """Return five repetitions with this median. The quartiles differ by 5 %."""
    every = [seconds * factor for factor in (1.0, 0.95, 1.05, 0.9, 1.1)]
    entry = {"section": "sizes", "case": case, "primitive": primitive, "bytes": size, "ranks": 2}
    entry |= {"dtype": "float32", "median": seconds, "spread": 0.075 * seconds, "seconds": every}
    return entry | more


def results(*measurements: dict[str, Any], mpi: str = "MPICH 5.0.2", cpu: str = "P 1") -> Any:
    machine = {"processor": cpu, "processors": 2, "processors of a rank": 2}
    record = {"mpi": mpi, "machine": machine | {"load before": 0.5}, "versions": {"Python": "3"}}
    record |= {"ranks": 2, "date": "today", "measurements": list(measurements)}
    return aims.Results([record])


def find(name: str, given: aims.Results) -> aims.Aim:
    (aim,) = [aim for aim in aims.aims(given) if aim.name.startswith(name)]
    return aim


def test_all_reduce_is_compared_with_the_fastest_other_library() -> None:
    given = [
        measured(case, "all_reduce", size, seconds * size, section=section)
        for size in (KIB, 4 * KIB, 64 * KIB, 4 * MIB)
        for section, case, seconds in (
            ("sizes", "mpi4py", 2e-9), ("sizes", "mpicoll", 1e-9), ("sizes", "copy", 1e-10),
            ("contest", "mpicoll", 1e-9), ("contest", "oneCCL", 1.2e-9 if size > KIB else 1e-12),
        )
    ]  # fmt: skip
    small, large = (find(f"all_reduce {name}", results(*given)) for name in ("4 KiB", "from 4 MiB"))
    assert small.measured == pytest.approx(1.2) and small.verdict == "MISSED"
    assert small.note in ("4 KiB, oneCCL", "64 KiB, oneCCL") and large.verdict == "met"


def test_limit_is_the_sum_of_both_copies() -> None:
    cases = {"mpicoll": 10e-6, "read": 3e-6, "own": 4e-6}
    given = results(
        *(measured(case, "all_reduce", MIB, s, section="limit") for case, s in cases.items())
    )
    aim = find("all_reduce: share of the limit", given)
    assert aim.measured == pytest.approx(70) and aim.verdict == "MISSED"


def test_slower_cells_are_counted_and_listed() -> None:
    """A ratio of 1 within the spread is not slower. On four ranks they are those of growth."""
    given = results(
        *(measured("mpi4py", name, KIB, 1e-6) for name in ("scan", "gather", "scatter")),
        measured("mpicoll", "scan", KIB, 2e-6), measured("mpicoll", "gather", KIB, 0.5e-6),
        {**measured("mpicoll", "scatter", KIB, 1e-6), "seconds": [0.9e-6, 1.1e-6] * 2 + [1.03e-6]},
        measured("mpi4py", "scan", MIB, 3e-6, section="growth", ranks=4),
        measured("mpicoll", "scan", MIB, 4e-6, section="growth", ranks=4),
    )  # fmt: skip
    two, four = (find(f"any primitive, {ranks} ranks", given) for ranks in (2, 4))
    assert two.note == "scan 1 KiB; 1 of 3 cells slower" and two.verdict == "MISSED"
    assert four.measured == pytest.approx(4 / 3) and four.verdict == "MISSED"
    assert [cells(line) for line in report.slower_table([given])[2:]] == [
        ["2", "scan", "1 KiB", "0.50"],
        ["4", "scan", "1 MiB", "0.75"],
    ]


# --- tables -------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def measure_everything(cpu: str, factor: float = 1.0) -> Any:
    """Return results with a row for each table."""
    return results(
        measured("mpi4py", "all_reduce", MIB, 6e-3 * factor),
        measured("mpicoll", "all_reduce", MIB, 2e-3),
        measured("Gloo", "all_reduce", MIB, 8e-3),
        measured("mpicoll torch", "all_reduce", MIB, 2e-3),
        measured("mpicoll", "all_reduce", MIB, 3e-3, section="dtypes", dtype="bfloat16"),
        measured("mpicoll", "all_reduce", KIB, 1e-3, section="many", count=9, how="pending"),
        measured("mpicoll", "all_reduce", MIB, 1e-3, section="reproducible", how="exact"),
        measured("mpicoll", "all_reduce", MIB, 1e-5, section="growth", ranks=4),
        *(measured("mpicoll", "all_reduce", KIB, 1e-5, section="overlap", part=part)
          for part in ("pure", "compute", "beside", "in turn")),
        measured("oneCCL", "all_reduce", MIB, 4e-6, section="contest"),
        cpu=cpu,
    )  # fmt: skip


def test_publish_fills_the_marked_tables_once(tmp_path: Path) -> None:
    """A second call changes nothing, and a page is written only if all its tables can be filled."""
    one = measure_everything("P 1")
    pages = [tmp_path / name for name in ("measurements.md", "pytorch.md")]
    for page in pages:
        page.write_text((report.DOCS / page.name).read_text())
    assert report.publish([one], tmp_path) >= {"sizes", "dtypes", "ran", "speed"}
    own, torch = (page.read_text() for page in pages)
    rows = [cells(line) for line in own.splitlines()]
    assert ["all_reduce", "1 MiB", "6 ms", "2 ms", "3.00 ±0.00"] in rows
    assert ["bfloat16", "1 MiB", "-", "3 ms", "-"] in rows
    assert ["all_reduce 1 MiB", "8 ms", "2 ms", "4.00 ±0.00"] in map(cells, torch.splitlines())
    assert report.publish([one], tmp_path) == set()
    few = results(measured("mpicoll", "all_reduce", MIB, 2e-3))
    with pytest.raises(ValueError, match="nothing was measured for dtypes, many, reproducible"):
        report.publish([few], tmp_path)
    assert [page.read_text() for page in pages] == [own, torch]


def test_publish_keeps_the_sections_of_other_processors(tmp_path: Path) -> None:
    """Each table has a section for each model; only that of the measured model is written."""
    pages = [tmp_path / name for name in ("measurements.md", "pytorch.md")]
    for page in pages:
        page.write_text((report.DOCS / page.name).read_text())

    def sections(mark: str) -> dict[str, list[str]]:
        return report.by_cpu(report._around(pages[0].read_text(), "bench", mark)[1].splitlines())

    before = {mark: sections(mark) for mark in ("ran", "sizes", "aims")}
    assert all(before.values())
    report.publish([measure_everything("P 1")], tmp_path)
    first = sections("sizes")["P 1"]
    report.publish([measure_everything("Q 2", factor=2)], tmp_path)
    for mark, old in before.items():
        now = sections(mark)
        assert now.keys() == {*old, "P 1", "Q 2"} and now == now | old, mark
    assert sections("sizes")["P 1"] == first != sections("sizes")["Q 2"]
    changed = measure_everything("P 1", factor=3)
    assert "sizes" in report.publish([changed], tmp_path)
    assert sections("sizes")["P 1"] == sections("sizes")["P 1"] != first


def measure(file: Path, *words: str) -> dict[str, Any]:
    """Return the record of a short run on two ranks."""
    done = run_program(
        *MPIEXEC, "-n", "2", sys.executable, ROOT / "benchmarks" / "host.py", *words, "--quick",
        "--seconds", "0.01", "--json", file, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(file.read_text())
    return record


@needs_mpiexec
def test_short_run_measures_every_case(tmp_path: Path) -> None:
    file = tmp_path / "mpi" / "small.json"
    file.parent.mkdir()
    record = measure(file, "sizes", "dtypes", "--largest", "1024")
    assert record["ranks"] == 2 and record["mpi"] and record["versions"]["mpicoll"]
    kinds: dict[str, set[Any]] = {}
    for one in record["measurements"]:
        assert one["median"] == pytest.approx(statistics.median(one["seconds"]), rel=1e-3)
        assert one["median"] > 0 and one["spread"] >= 0 and len(one["seconds"]) >= 5
        key = one["primitive"], one["bytes"], one["dtype"]
        kinds.setdefault(f"{one['section']} {one['case']}", set()).add(key)
    blocks = {row.name: 1 + (row.many_in or row.many_out) for row in PRIMITIVES}
    sizes = [4, 16, 64, 256, 1024]
    names = {name for name, *_ in kinds["sizes mpicoll"]}
    assert len(names) == 10 and "exscan" in names
    expected = {(name, max(size, 4 * blocks[name]), "float32") for name in names for size in sizes}
    for case in ("mpi4py", "mpicoll", "copy"):
        assert kinds[f"sizes {case}"] == expected, case
    dtypes = {"float32", "bfloat16", "float16", "int8"}
    assert kinds["dtypes mpicoll"] == {("all_reduce", 1024, dtype) for dtype in dtypes}
    assert ("all_reduce", 1024, "float32") in kinds["dtypes mpi4py"]
    assert any("bfloat16 by mpi4py" in reason for reason in record["left out"])
    if importlib.util.find_spec("torch"):
        # torch.distributed has no scans.
        of_torch = {each for each in expected if each[0] not in ("scan", "exscan")}
        assert kinds["sizes mpicoll torch"] == of_torch
        assert ("all_reduce", 4, "float32") in kinds["sizes Gloo"]
    given = aims.Results([record])
    assert find("any primitive, 2 ranks", given).measured is not None
    assert report.report([given])


@needs_mpiexec
@pytest.mark.nightly
def test_short_run_of_other_sections(tmp_path: Path) -> None:
    sections = "many", "overlap", "reproducible", "contest", "limit", "async"
    words = "--largest", "65536", "--without-torch", "--primitives", "all_reduce", "scan"
    given = aims.Results([measure(tmp_path / "small.json", *sections, *words)])
    assert find("1000 all_reduces", given).measured is not None
    assert set(aims.hidden(given, "mpicoll", "all_reduce", 2)) == {64 * KIB}
    assert find("begun, computed", given).measured is not None
    assert {one["case"] for one in given.find(section="limit")} == {"mpicoll", "read", "own"}
    share, late = find("all_reduce: share of the limit", given), find("all_reduce: async", given)
    assert share.measured is not None and share.measured > 0 and late.measured is not None
    assert find("all_reduce 4 KiB", given).measured is not None
    assert {one["how"] for one in given.find(section="reproducible")} >= {"order", "exact"}


@needs_mpiexec
def test_starts_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "STARTED", 2)
    monkeypatch.setattr(compare, "STARTS", 2)
    assert compare.measure_start(Path(sys.executable), MPIEXEC, tmp_path) == ""
    every = json.loads((tmp_path / "start.json").read_text())["measurements"]
    assert {one["case"]: len(one["seconds"]) for one in every} == {"mpi4py": 2, "mpicoll": 2}
    assert all(one["median"] > 0.05 for one in every)


def test_other_libraries_are_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare.sys, "executable", "false")
    assert compare.prepare("oneccl") == "no message"


# --- benchmarks/gpu.py without a GPU ------------------------------------------------------------

#: Replaces mpiexec: records its command line and writes the output file.
NO_RANKS = """
echo "mpiexec $*" >> {0}/launched
for last; do :; done
case "$*" in *reduce_scatter_single*) echo "cannot be measured"; exit 1;; esac
echo "{{}}" > "$last"
"""


def test_gpu_benchmark_continues_after_a_failed_part(tmp_path: Path) -> None:
    (tmp_path / "mpiexec").write_text(NO_RANKS.format(tmp_path))
    out, launched = tmp_path / "out", tmp_path / "launched"

    def measure(*words: str) -> tuple[int, str, list[str]]:
        launched.write_text("")
        done = run_program(
            sys.executable, ROOT / "benchmarks" / "gpu.py", "--mpiexec", f"sh {tmp_path}/mpiexec",
            "--out", out, *words,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, launched.read_text().splitlines()

    code, output, found = measure()
    assert code == 1 and output.count("cannot be measured") == 4, output
    names = {row.name for row in PRIMITIVES if row.output}
    assert {line.split(" bench ")[1].split()[0] for line in found if " bench " in line} == names
    (out / "scan-float-2.json").unlink()
    code, _, found = measure("--resume")
    assert code == 1 and len(found) == 5 and sum(" bench scan " in line for line in found) == 1
