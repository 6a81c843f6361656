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


def results(*measurements: dict[str, Any]) -> Any:
    machine = {"processor": "P", "processors": 2, "processors of a rank": 2, "load before": 0.5}
    record = {"mpi": "MPICH 5.0.2", "machine": machine, "versions": {"Python": "3"}}
    record |= {"ranks": 2, "date": "today", "measurements": list(measurements)}
    return aims.Results([record])


def find(name: str, given: aims.Results) -> aims.Aim:
    (aim,) = [aim for aim in aims.aims(given) if aim.name.startswith(name)]
    return aim


# --- tables -------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_publish_fills_the_marked_tables_once(tmp_path: Path) -> None:
    """A second call changes nothing, and a page is written only if all its tables can be filled."""
    one = results(
        measured("mpi4py", "all_reduce", MIB, 6e-3), measured("mpicoll", "all_reduce", MIB, 2e-3),
        measured("Gloo", "all_reduce", MIB, 8e-3),
        measured("mpicoll torch", "all_reduce", MIB, 2e-3),
        measured("mpicoll", "all_reduce", MIB, 3e-3, section="dtypes", dtype="bfloat16"),
        measured("mpicoll", "all_reduce", KIB, 1e-3, section="many", count=9, how="pending"),
        measured("mpicoll", "all_reduce", MIB, 1e-3, section="reproducible", how="exact"),
        measured("mpicoll", "all_reduce", KIB, 1e-5, section="growth"),
        *(measured("mpicoll", "all_reduce", KIB, 1e-5, section="overlap", part=part)
          for part in ("pure", "compute", "beside", "in turn")),
    )  # fmt: skip
    pages = [tmp_path / name for name in ("measurements.md", "pytorch.md")]
    for page in pages:
        page.write_text((report.DOCS / page.name).read_text())
    assert report.publish([one], tmp_path) >= {"all_reduce", "dtypes"}
    own, torch = (page.read_text() for page in pages)
    rows = [cells(line) for line in own.splitlines()]
    assert ["all_reduce", "1 MiB", "-", "6 ms", "2 ms", "3.00 ±0.00"] in rows
    assert ["bfloat16", "1 MiB", "-", "-", "3 ms", "-"] in rows
    (row,) = (row for row in map(cells, torch.splitlines()) if row[0] == "all_reduce 1 MiB")
    assert row[1:5] == ["-", "8 ms", "2 ms", "4.00 ±0.00"]
    assert report.publish([one], tmp_path) == set()
    few = results(measured("mpicoll", "all_reduce", MIB, 2e-3))
    with pytest.raises(ValueError, match="nothing was measured for dtypes, many, reproducible"):
        report.publish([few], tmp_path)
    assert [page.read_text() for page in pages] == [own, torch]


# --- short runs ---------------------------------------------------------------------------------


def measure(file: Path, *words: str) -> dict[str, Any]:
    """Return the record of a short run on two ranks."""
    done = run_program(
        *MPIEXEC, "-n", "2", sys.executable, ROOT / "benchmarks" / "host.py", *words, "--quick",
        "--seconds", "0.01", "--json", file, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def near(record: dict[str, Any]) -> aims.Results:
    """Return the results of a run as if all samples were measured with near ranks."""
    for one in record["measurements"]:
        one["distance"] = "near"
    return aims.Results([record], "near")


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
    blocks = {"all_reduce": 1, "broadcast": 1, "all_gather_single": 2, "reduce_scatter_single": 2,
              "all_to_all_single": 2}  # fmt: skip
    sizes = [4, 16, 64, 256, 1024]
    expected = {(name, max(size, 4 * n), "float32") for name, n in blocks.items() for size in sizes}
    expected |= {("reduce", 4, "float32"), ("reduce", 256, "float32")}
    expected |= {(name, size, "float32") for name in ("gather", "scatter") for size in (8, 256)}
    for case in ("mpi4py", "mpicoll", "copy"):
        assert kinds[f"sizes {case}"] == expected, case
    dtypes = {"float32", "bfloat16", "float16", "int8"}
    assert kinds["dtypes mpicoll"] == {("all_reduce", 1024, dtype) for dtype in dtypes}
    assert ("all_reduce", 1024, "float32") in kinds["dtypes mpi4py"]
    assert any("bfloat16 by mpi4py" in reason for reason in record["left out"])
    if importlib.util.find_spec("torch"):
        assert kinds["sizes mpicoll torch"] == expected
        assert ("all_reduce", 4, "float32") in kinds["sizes Gloo"]
    given = near(record)
    assert find("any collective up to 16 KiB", given).measured is not None
    assert report.report([given])


@needs_mpiexec
def test_short_run_of_other_sections(tmp_path: Path) -> None:
    sections = "many", "overlap", "growth", "reproducible"
    words = "--largest", "65536", "--without-torch"
    given = near(measure(tmp_path / "small.json", *sections, *words))
    hows = {(one["case"], one["how"], one["count"]) for one in given.find(section="many")}
    assert hows == {
        (case, how, 1000)
        for case in ("mpi4py", "mpicoll")
        for how in ("one by one", "pending", "coalesced", "fused")
        if (case, how) != ("mpi4py", "coalesced")
    }
    assert find("1000 all_reduces", given).measured is not None
    assert set(aims.hidden(given, "mpicoll", "all_reduce", 2)) == {64 * KIB}
    assert find("begun, computed", given).measured is not None
    assert {one["bytes"] for one in given.find(section="growth")} == {8, 64 * KIB}
    levels = {(one["how"], one["dtype"]) for one in given.find(section="reproducible")}
    hows = "default", "order", "exact"
    assert levels == {(how, dtype) for how in hows for dtype in ("float32", "float64")}


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
