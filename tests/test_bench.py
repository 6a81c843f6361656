"""python -m mpicoll bench: tables, statistics, checks of results, and invalid options.

The calls of mpi4py and Gloo are tested with the bench's own check. The check is tested with
mpicoll.kernels.reduction, an independent implementation.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cli_jobs import Ended, job
from rank_scripts import needs_torch

from mpicoll.cli import bench_calls
from mpicoll.dtypes import DTYPES, OPERATIONS, DType, Kind, ReduceOp
from mpicoll.dtypes import by_name as dtype_of
from mpicoll.kernels import reduction
from mpicoll.primitives import PRIMITIVES, Layout, by_name

pytestmark = pytest.mark.any_mpi


# --- the table ----------------------------------------------------------------------------------

#: busbw / algbw by number of ranks: nccl-tests, doc/PERFORMANCE.md.
FACTORS: dict[str, Callable[[int], float]] = {
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def check_table(ended: Ended, n: int, itemsize: int, sizes: list[int], root: int) -> None:
    ended.in_good_order()
    report = ended.report
    assert report["ranks"] == n and report["wrong"] == 0
    assert [result["primitive"] for result in report["results"]] == [
        row.name for row in PRIMITIVES for _ in (sizes if row.output else [0])
    ]
    for cells, result in zip(ended.cells, report["results"], strict=True):
        name = result["primitive"]
        assert cells[:5] == [str(result[key]) for key in ("size", "count", "type", "redop", "root")]
        row = by_name[name]
        assert result["root"] == (root if row.root else -1)
        own = [result["out_of_place"], result["in_place"]]
        shown = [cells[i : i + 4] for i in range(5, len(cells) - 2, 4)]
        if name == "barrier":
            assert shown[0][1:] == ["-"] * 3
            continue
        blocks = n if row.many_in or row.many_out else 1
        assert result["size"] == result["count"] * blocks * itemsize
        assert (own[0] is None) == (row.layout is Layout.IN_PLACE)
        assert (own[1] is None) == (row.layout in (Layout.EXCHANGED, Layout.ALIKE))
        for timing, cell in zip(filter(None, own), shown, strict=True):
            time, algbw, busbw = (timing[key] for key in ("time", "algbw", "busbw"))
            assert cell == [f"{time:.2f}", f"{algbw:.2f}", f"{busbw:.2f}", "0"]
            assert time == statistics.median(timing["times"]) > 0
            assert algbw == pytest.approx(result["size"] / (time * 1e-6) / 1e9)
            factor = FACTORS.get(name.removesuffix("_single"), row.moved)(n)
            assert busbw == pytest.approx(algbw * factor)
    assert ended.out.count("Out of bounds values : 0 OK") == len(PRIMITIVES)


@job("bench all -b 8 -e 3000 -f 16 -d bfloat16 --check -n 3 --repetitions 3 "
     "--json $FOLDER/report.json", ranks=2)  # fmt: skip
def test_all_primitives_on_two_ranks(ended: Ended) -> None:
    check_table(ended, 2, 2, [8, 128, 2048], root=0)


@job("bench all -b 100 -e 90K -f 700 -d double -r 2 -o avg -c 1 -w 0 -n 3 "
     "--json $FOLDER/report.json", ranks=3)  # fmt: skip
def test_all_primitives_on_three_ranks(ended: Ended) -> None:
    check_table(ended, 3, 8, [100, 70000], root=2)


# --- comparisons with mpi4py and Gloo -----------------------------------------------------------


@needs_torch
@job("bench all_reduce scatter -b 64 -e 64 -d bfloat16 --compare mpi4py,gloo -n 2 "
     "--json $FOLDER/report.json", ranks=2)  # fmt: skip
def test_compared_libraries_have_times_and_ratios(ended: Ended) -> None:
    ended.in_good_order()
    reduced, scattered = ended.report["results"]
    assert reduced["compare"]["mpi4py"] is None, "MPI has no bfloat16"
    for line, own in ((reduced, "in_place"), (scattered, "out_of_place")):
        for name, timing in line["compare"].items():
            if timing is not None:
                assert timing["time"] == statistics.median(timing["times"])
                assert timing["ratio"] == pytest.approx(timing["time"] / line[own]["time"]), name
    gloo, raw = reduced["compare"]["gloo"], scattered["compare"]["mpi4py"]
    assert ended.cells[0][8:-1] == ["-", "-", f"{gloo['time']:.2f}", f"{gloo['ratio']:.2f}"]
    assert ended.cells[1][11:13] == [f"{raw['time']:.2f}", f"{raw['ratio']:.2f}"]
    lines = ended.out.splitlines()
    at = max(i for i, line in enumerate(lines) if re.match("# +size", line))
    group, titles = lines[at - 1 : at + 1]
    assert group.split() == ["#", "out-of-place", "in-place", "mpi4py", "gloo"]
    assert group.index("mpi4py") > titles.rindex("busbw")


#: Replaces mpicoll's calls with the calls of $LIBRARY.
REPLACE = """
from mpicoll.cli import bench_calls
kinds, made = bench_calls.variants, {}
bench_calls.variants = lambda row: kinds(row)[:1]
def own_call(case, buffers, variant, group=None):
    from mpi4py import MPI
    from mpicoll.cli import bench_others
    if not made:
        made["other"] = bench_others.OTHERS["$LIBRARY"](MPI.COMM_WORLD, bench_calls.Memory())
    return made["other"].call(case, buffers)
bench_calls.own_call = own_call
"""
#: Primitives without lists: mpi4py copies lists to arrays.
ONE_ARRAY = "broadcast all_reduce reduce all_gather_single reduce_scatter_single all_to_all_single"
#: Without reduce: Gloo writes its result on every rank.
NO_REDUCE = " ".join(row.name for row in PRIMITIVES if row.name not in ("reduce", "scan", "exscan"))


@job(f"bench {ONE_ARRAY} -b 12 -e 80K -f 64 -d int32 -r 1 -c -n 1", ranks=3,
     site=REPLACE.replace("$LIBRARY", "mpi4py"))  # fmt: skip
def test_calls_of_mpi4py_give_the_expected_results(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.out.count("0 OK") == len(ONE_ARRAY.split())


@needs_torch
@job(f"bench {NO_REDUCE} -b 12 -e 80K -f 4096 -d int32 -r 1 -c -n 1 -w 0 --repetitions 1",
     ranks=2, site=REPLACE.replace("$LIBRARY", "gloo"))  # fmt: skip
def test_calls_of_gloo_give_the_expected_results(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.out.count("0 OK") == len(NO_REDUCE.split())


# --- the check ----------------------------------------------------------------------------------

#: Rank 1 adds one to the last element of an all_reduce.
BREAK = """
from mpicoll.api import collectives
whole = collectives.all_reduce
def all_reduce(tensor, op=None, group=None, async_op=False):
    import mpicoll
    whole(tensor, op, group)
    if mpicoll.get_rank() == 1:
        tensor[-1] += 1
collectives.all_reduce = all_reduce
"""


@job("bench all_reduce broadcast -b 4 -e 64K -f 128 -d int16 -c -n 1 --json $FOLDER/report.json",
     ranks=3, site=BREAK)  # fmt: skip
def test_wrong_elements_are_counted(ended: Ended) -> None:
    assert ended.code == 1 and "Traceback" not in ended.err, ended
    assert [cells[8] for cells in ended.cells] == ["1"] * 3 + ["0"] * 3
    assert "Out of bounds values : 3 FAILED" in ended.out
    assert ended.report["wrong"] == 3


def case_of(name: str, dtype: DType, op: ReduceOp | None, n: int, rank: int, count: int) -> Any:
    return bench_calls.Case(by_name[name], dtype, op, count, n, rank, 0)


def spoil(array: np.ndarray, at: int, dtype: DType) -> None:
    """Replace an element with a wrong value."""
    if dtype.kind is Kind.BOOL:
        array[at] = ~array[at]
    elif dtype.kind is Kind.INTEGER:
        array[at] ^= dtype.numpy.type(1)
    else:
        array[at] = np.nan


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_check_accepts_correct_and_rejects_wrong_reductions(dtype: DType) -> None:
    n, count = 5, 2 * bench_calls.PERIOD + 100
    for op in OPERATIONS[:-1]:
        if dtype.kind not in op.kinds:
            continue
        arrays = []
        case = case_of("all_reduce", dtype, op, n, 1, count)
        for rank in range(n):
            array = np.empty(count, dtype.numpy)
            (pattern,) = bench_calls.contents(dataclasses.replace(case, me=rank))
            bench_calls.fill(array, pattern, dtype, lambda a: a)
            arrays.append(array)
        out = np.empty(count, dtype.numpy)
        divisor = n if op is ReduceOp.AVG else 1
        reduction.combine(op, dtype, arrays, out, divisor)
        (right,) = bench_calls.expected(case)
        assert bench_calls.wrong(out, right, case, lambda a: a) == 0, op
        before = [out[i] for i in (0, count - 1)]
        spoil(out, 0, dtype)
        spoil(out, count - 1, dtype)
        changed = sum(bool(out[i] != x) for i, x in zip((0, count - 1), before, strict=True))
        assert bench_calls.wrong(out, right, case, lambda a: a) == changed == 2, op


@pytest.mark.parametrize("name", [row.name for row in PRIMITIVES if row.output])
@pytest.mark.parametrize("rank", [0, 1])
def test_check_rejects_a_call_that_does_nothing(name: str, rank: int) -> None:
    row, memory = by_name[name], bench_calls.MEMORIES["cpu"]()
    op = ReduceOp.SUM if row.reduces else None
    case = case_of(name, dtype_of["int64"], op, 2, rank, 50)
    for variant in bench_calls.variants(row):
        buffers = bench_calls.Buffers(case, memory)
        found = bench_calls.count_wrong(lambda: None, case, buffers, variant, memory)
        unchanged = name in ("broadcast", "scatter") and rank == 0 and variant == "in_place"
        if unchanged or (name, rank) in (("reduce", 1), ("exscan", 0), ("gather", 1)):
            assert found == 0  # the rank's result is its input, or it has no result
            continue
        _, output = buffers.of(case, variant)
        own = 50 if variant == "in_place" and "gather" in name else 0
        assert output is not None and found == 50 * len(output.blocks) - own


@pytest.mark.parametrize("name", [row.name for row in PRIMITIVES if row.output])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_new_data_is_written_into_all_that_a_rank_sends(name: str, rank: int, dtype: str) -> None:
    """The other blocks keep their zeros."""
    row, memory = by_name[name], bench_calls.MEMORIES["cpu"]()
    op = ReduceOp.MAX if row.reduces else None
    case = case_of(name, dtype_of[dtype], op, 2, rank, 50)
    for variant in bench_calls.variants(row):
        buffers = bench_calls.ring(case, memory)
        assert len(buffers) > 1
        bench_calls.fresh(case, buffers, [], variant).write()
        for each in buffers:
            input, output = each.of(case, variant)
            sides = [side.blocks for side in (input, output) if side]
            read = output if row.layout is Layout.IN_PLACE else input
            sent = read.blocks if read else []
            sent = [block for block, _ in zip(sent, bench_calls.contents(case), strict=False)]
            assert bool(sent) == ((name, rank) not in (("broadcast", 1), ("scatter", 1)))
            for block in itertools.chain(*sides):
                shared = any(np.shares_memory(block, one) for one in sent)
                assert block.all() if shared else not block.any()


# --- routes -------------------------------------------------------------------------------------


@job("bench all_reduce broadcast all_to_all_single -b 64K -e 64K -d float,bfloat16 --routes all "
     "-c -n 2 --json $FOLDER/report.json", ranks=2)  # fmt: skip
def test_host_routes_are_measured(ended: Ended) -> None:
    ended.in_good_order()
    found: dict[tuple[str, str], set[str]] = {}
    for result in ended.report["results"]:
        names = {name for name, one in result["compare"].items() if one is not None}
        assert all(result["compare"][name]["wrong"] == 0 for name in names)
        found[result["primitive"], result["type"]] = names
    shared = {"shared"} & set(ended.out.split())
    assert found["all_reduce", "float32"] == {"mpi", "exchange"} | shared
    assert found["all_reduce", "bfloat16"] == {"exchange", "widened"} | shared
    assert found["broadcast", "float32"] == {"mpi"} | shared
    assert found["all_to_all_single", "float32"] == {"exchange"} | shared
    assert "# not measured: hierarchical: it needs several nodes" in ended.out


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("all_redcue", "expected all, broadcast, all_reduce"),
        ("barrier -b 1X", "got '1X'"),
        ("barrier -d floot", "expected all, bool"),
        ("barrier --compare nccl", "expected all, mpi4py, gloo, copy, got 'nccl'"),
        ("reduce -b 2M -e 1M", "--minbytes 2097152 is more than --maxbytes 1048576"),
        ("reduce -r 3", "--root 3: there are 3 ranks"),
        ("reduce -d int8 -o avg", "--op avg is not supported for int8"),
        ("reduce --json /nowhere/x.json", "no folder /nowhere"),
        ("reduce --routes mpi,peer", "--routes peer: expected all, or any of mpi"),
        ("reduce --device cuda --compare mpi4py", "--compare requires --device cpu"),
    ],
)
@job("bench $words", ranks=3)
def test_invalid_options_end_all_ranks(words: str, error: str, ended: Ended) -> None:
    ended.refused(error)
