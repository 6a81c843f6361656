"""Collectives on host memory, beside those who make the same calls, on the ranks at hand.

    mpirun -n 2 python benchmarks/host.py sizes --json sizes.json

Sections:

    sizes    every collective by size: mpi4py, mpicoll, mpicoll under torch, Gloo, and a copy of as
             many bytes on every rank at once
    dtypes   all_reduce of several dtypes by size
    many     many small all_reduces: one by one, all pending at once, as one call
    overlap  calls that go on beside computation
    ddp      a step of torch's DistributedDataParallel
    growth   a few sizes; to be run with several numbers of ranks

Times are those of the slowest rank, medians over repetitions of all cases in turn; the spread is
half the distance between the quartiles. With --json everything is written, every repetition too:

    machine, date, mpi, versions, reductions, ranks    what ran
    left out       what could not be measured, with the reason
    measurements   section, case (who), primitive, ranks, bytes (of the larger array of a rank),
                   dtype, median, spread, seconds (of each repetition), and in some sections more:
                   many: count of tensors, how; overlap: part; ddp: bucket (MB), how

``make bench`` runs all of it; benchmarks/report.py reads the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from contestants import PLACE, World
from measure import COPY, FACADE, KIB, MIB, MPI4PY, TORCH, Effort, Report, bytes_shown, measure
from measure import Case as Timed
from points import Bench, file, one_speaks

from mpicoll.cli.bench_calls import Buffers
from mpicoll.dtypes import by_name as dtype_of

#: From 4 B to 64 MiB.
SIZES = [4 * 4**i for i in range(13)]
#: What is measured at every size, and what at every third.
MANY_SIZES = (
    "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single",
)  # fmt: skip
FEW_SIZES = "reduce", "gather", "scatter"
#: all_reduce is measured at this size besides.
LARGEST = 256 * MIB
DTYPES = "float32", "bfloat16", "float16", "int8"
#: Tensors, and bytes of each.
TENSORS = [(1000, 4 * KIB), (16, 256 * KIB)]
OVERLAPPED = [
    ("all_reduce", 64 * KIB), ("all_reduce", MIB), ("all_reduce", 16 * MIB),
    ("broadcast", MIB), ("broadcast", 16 * MIB),
    ("all_gather_single", MIB), ("all_gather_single", 16 * MIB),
    ("reduce_scatter_single", MIB), ("reduce_scatter_single", 16 * MIB),
]  # fmt: skip
GROWTH_SIZES = [8, 64 * KIB, 16 * MIB]
#: all_reduce is measured at this size besides, by so many ranks at most.
GROWTH_LARGEST, GROWTH_RANKS = 64 * MIB, 4


# --- the sections -------------------------------------------------------------------------------


def by_size(bench: Bench, section: str, primitive: str, sizes: Sequence[int], copies: bool) -> None:
    """One collective of float32 by everybody."""
    for size in bench.upto(sizes):
        case = bench.world.case(primitive, size)
        cases: dict[str, Timed] = dict(bench.calls(case, Buffers(case, PLACE)))
        if copies:
            source, target = np.zeros(case.size, np.uint8), np.zeros(case.size, np.uint8)
            cases[COPY] = partial(np.copyto, target, source)
        times = bench.timed(cases)
        for name, each in times.items():
            bench.record(section, name, primitive, case.size, "float32", each)
        bench.tell(f"{primitive} {bytes_shown(case.size)}", times)


def sizes(bench: Bench) -> None:
    """Every collective by size."""
    for primitive in MANY_SIZES:
        more = [LARGEST] if primitive == "all_reduce" else []
        by_size(bench, "sizes", primitive, SIZES + more, True)
    for primitive in FEW_SIZES:
        by_size(bench, "sizes", primitive, SIZES[::3], True)


def growth(bench: Bench) -> None:
    """A few sizes, for several numbers of ranks."""
    for primitive in MANY_SIZES:
        extra = primitive == "all_reduce" and bench.world.n <= GROWTH_RANKS
        by_size(bench, "growth", primitive, GROWTH_SIZES + [GROWTH_LARGEST] * extra, False)


def dtypes(bench: Bench) -> None:
    """all_reduce of several dtypes; all dtypes of a size take turns."""
    for size in bench.upto(SIZES[4:]):
        cases: dict[str, Timed] = {}
        labels = {}
        for name in DTYPES:
            case = bench.world.case("all_reduce", size, dtype_of[name])
            for who, call in bench.calls(case, Buffers(case, PLACE)).items():
                cases[f"{name} {who}"] = call
                labels[f"{name} {who}"] = name, who
        times = bench.timed(cases)
        for label, (name, who) in labels.items():
            bench.record("dtypes", who, "all_reduce", size, name, times[label])
        bench.tell(f"all_reduce {bytes_shown(size)}", times)


def many(bench: Bench) -> None:
    """Many small all_reduces."""
    for count, size in TENSORS:
        if size > bench.largest:
            continue
        case = bench.world.case("all_reduce", size)
        each = [Buffers(case, PLACE) for _ in range(count)]
        cases: dict[str, Timed] = {}
        labels = {}
        for who, way in bench.world.contestants.items():
            calls = [way.call(case, buffers) for buffers in each]
            begins = [way.begin(call) for call in calls if call]
            ways = {
                "one by one": partial(in_turn, calls),
                "pending": partial(wait_for_all, begins),
                "coalesced": way.together([call for call in calls if call]),
            }
            for how, timed in ways.items():
                if timed is not None:
                    cases[f"{who} {how}"] = timed
                    labels[f"{who} {how}"] = who, how
        one = bench.world.case("all_reduce", count * size)
        for who in (MPI4PY, FACADE):  # what one call of as many bytes takes, packing left out
            cases[f"{who} fused"] = bench.calls(one, Buffers(one, PLACE))[who]
            labels[f"{who} fused"] = who, "fused"
        times = bench.timed(cases)
        for label, (who, how) in labels.items():
            bench.record(
                "many", who, "all_reduce", size, "float32", times[label], count=count, how=how
            )
        bench.tell(f"{count} all_reduces of {bytes_shown(size)}", times)


def in_turn(calls: Sequence[Callable[[], object]]) -> None:
    """One after another."""
    for call in calls:
        call()


def wait_for_all(begins: Sequence[Callable[[], Callable[[], object]]]) -> None:
    """All begun, then all waited for."""
    for wait in [begin() for begin in begins]:
        wait()


class Computation:
    """Something to compute: products of small matrices, which let other threads run Python."""

    def __init__(self, products: int) -> None:
        self._products = range(products)
        self._matrix, self._out = np.zeros((2, 64, 64), np.float32)

    def __call__(self) -> None:
        """Computes."""
        for _ in self._products:
            np.matmul(self._matrix, self._matrix, out=self._out)


def overlap(bench: Bench) -> None:
    """Non-blocking calls beside computation, each as long as the other, after the OSU benchmarks.

    Parts, of each who makes calls: ``pure``, begun and waited for at once; ``compute``, nothing
    else; ``beside``, computation between the beginning and the wait; ``in turn``, the blocking call
    and then the computation.
    """
    world = bench.world
    for primitive, size in OVERLAPPED:
        if size > bench.largest:
            continue
        case = bench.world.case(primitive, size)
        calls = {
            who: call
            for who, call in bench.calls(case, Buffers(case, PLACE)).items()
            if who != TORCH
        }
        cases: dict[str, Timed] = {}
        labels = {}
        ten = Computation(10)
        for who, call in calls.items():
            begin = world.contestants[who].begin(call)
            pure = partial(wait_for_all, [begin])
            trial = measure(world.ranks, {"pure": pure, "ten": ten}, 15)
            compute = Computation(max(1, round(10 * trial["pure"].median / trial["ten"].median)))
            parts: dict[str, Timed] = {
                "pure": pure,
                "compute": compute,
                "beside": partial(beside, begin, compute),
                "in turn": partial(in_turn, [call, compute]),
            }
            for part, timed in parts.items():
                cases[f"{who} {part}"] = timed
                labels[f"{who} {part}"] = who, part
        times = bench.timed(cases)
        for label, (who, part) in labels.items():
            bench.record("overlap", who, primitive, case.size, "float32", times[label], part=part)
        bench.tell(f"{primitive} {bytes_shown(case.size)}", times)


def beside(begin: Callable[[], Callable[[], object]], compute: Callable[[], object]) -> None:
    """Begins, computes, waits."""
    wait = begin()
    compute()
    wait()


def ddp(bench: Bench) -> None:
    """A step of DistributedDataParallel."""
    if bench.world.gloo is None:
        bench.left_out("ddp: torch is not installed")
        return
    from training import training

    training(bench)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "sizes": sizes, "dtypes": dtypes, "many": many, "overlap": overlap, "ddp": ddp,
    "growth": growth,
}  # fmt: skip
#: Sections in which torch has no part.
WITHOUT_TORCH = {"growth"}


# --- the command --------------------------------------------------------------------------------

#: What --quick measures with.
QUICK = Effort(seconds=0.15, least=5, most=15, together=5e-4)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("sections", nargs="+", choices=SECTIONS, metavar="SECTION",
                        help=f"some of {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, less exact")
    parser.add_argument("--seconds", type=float, metavar="S",
                        help="about how long to measure each point")  # fmt: skip
    parser.add_argument("--largest", type=int, default=LARGEST, metavar="BYTES",
                        help="leave greater sizes out (default: %(default)s)")  # fmt: skip
    parser.add_argument("--without-torch", action="store_true", help="mpi4py and mpicoll alone")
    parser.add_argument("--json", type=file, metavar="FILE", help="write the figures there")
    with one_speaks():
        options = parser.parse_args()
    torch = not options.without_torch and bool(set(options.sections) - WITHOUT_TORCH)
    world = World(torch)
    report = Report(world.ranks)
    report.record |= {**world.facts(), "quick": options.quick}
    machine = report.record["machine"]
    report.line(f"{report.record['mpi']}, {world.n} ranks, {machine['processors']} processors "
                f"({machine['processor']}), load before {machine['load before']}")  # fmt: skip
    effort = QUICK if options.quick else Effort()
    effort = effort._replace(seconds=options.seconds or effort.seconds)
    bench = Bench(world, report, effort, options.largest)
    for section in options.sections:
        report.line(f"\n{section}")
        SECTIONS[section](bench)
    report.write(options.json)
    world.close()


if __name__ == "__main__":
    main()
