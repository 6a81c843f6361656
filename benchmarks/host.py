"""Measure collectives of mpicoll, MPI and Gloo on host memory, and training steps on CPUs or GPUs.

    mpirun -n 2 python benchmarks/host.py sizes --json sizes.json

Sections:

    sizes    every collective by size: mpi4py, mpicoll, mpicoll under torch, Gloo, and a copy of the
             same number of bytes on all ranks at once
    dtypes   all_reduce of several dtypes by size
    many     many small all_reduces: one by one, all pending at once, in one coalesced call
    reproducible  all_reduce in reproducible groups
    overlap  asynchronous calls that overlap with computation
    ddp      a step of torch's DistributedDataParallel, on CPUs or GPUs
    fsdp     a step of torch's FSDP2, on CPUs or GPUs
    growth   a few sizes, for several numbers of ranks; all primitives up to 4 ranks
    contest  all_reduce, also with the libraries of others.py
    limit    all_reduce beside copies: of the other rank's data, and in the own array; 2 ranks
    async    all_reduce, synchronous and asynchronous
    memory   memory of a collective besides its arrays; one collective per launch

--json writes a file with every sample:

    machine, date, mpi, versions, reductions, ranks, device    versions and machine
    left out       cases that could not be measured, with the reason
    measurements   section, case (caller), primitive, ranks, bytes (of the larger array of a rank),
                   dtype, median, spread, seconds (of each repetition; cases that
                   were measured together have their turns in common), and by section:
                   many: count of tensors, how; reproducible, async, fsdp: how; overlap: part;
                   ddp: bucket (MB), how;
                   memory: extra (bytes) instead of times

``make bench`` runs all sections. benchmarks/report.py reads the files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aims import COPY, FACADE, KIB, MIB, MPI4PY, OWN, READ, TORCH
from contestants import PLACE, World
from session import Session, parse

import mpicoll
from mpicoll import cli
from mpicoll.cli.bench_calls import Buffers, fresh, ring
from mpicoll.cli.timing import Call, Effort, Fresh, Timed
from mpicoll.core.reproducible import LEVELS
from mpicoll.dtypes import by_name as dtype_of
from mpicoll.output import format_bytes

#: From 4 B to 64 MiB, and the sizes near which libraries change their way.
SIZES = sorted([4 * 4**i for i in range(13)] + [32 * KIB, 512 * KIB])
PRIMITIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single", "gather", "scatter", "scan", "exscan",
)  # fmt: skip
#: Primitives of the section growth with more than ``GROWTH_RANKS`` ranks.
GROWN = (
    "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single",
)  # fmt: skip
#: An additional size of all_reduce.
LARGEST = 256 * MIB
DTYPES = "float32", "bfloat16", "float16", "int8"
#: Number of tensors, and bytes of each tensor.
TENSORS = [(1000, 4 * KIB), (16, 256 * KIB)]
OVERLAPPED = [
    ("all_reduce", 64 * KIB), ("all_reduce", MIB), ("all_reduce", 16 * MIB),
    ("broadcast", MIB), ("broadcast", 16 * MIB),
    ("all_gather_single", MIB), ("all_gather_single", 16 * MIB),
    ("reduce_scatter_single", MIB), ("reduce_scatter_single", 16 * MIB),
]  # fmt: skip
GROWTH_SIZES = [8, 64 * KIB, 16 * MIB]
#: The sizes up to ``GROWTH_RANKS`` ranks.
MORE_SIZES, GROWTH_RANKS = [8, KIB, 16 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 64 * MIB], 4
LIMIT_SIZES = [64 * KIB, MIB, 16 * MIB, 64 * MIB]
ASYNC_SIZES = [4, KIB, 64 * KIB, MIB, 16 * MIB]
#: Bytes that are copied at a time to an array in the caches, to measure reading.
READ_BYTES = 64 * KIB


# --- the sections -------------------------------------------------------------------------------


def by_size(
    session: Session, section: str, primitive: str, sizes: Sequence[int], copies: bool = False
) -> None:
    """Measure one collective of float32 with all contestants."""
    for size in (size for size in sizes if size <= session.largest):
        case = session.world.case(primitive, size)
        cases: dict[str, Timed] = dict(session.fresh_calls(case))
        if copies:
            source, target = np.zeros(case.size, np.uint8), np.zeros(case.size, np.uint8)
            cases[COPY] = partial(np.copyto, target, source)
        found = session.measure(cases)
        for name in cases:
            session.record(section, name, primitive, case.size, "float32", found)
        session.report(f"{primitive} {format_bytes(case.size)}", found)


def sizes(session: Session) -> None:
    """Measure every collective by size."""
    for primitive in session.primitives or PRIMITIVES:
        more = [LARGEST] if primitive == "all_reduce" else []
        by_size(session, "sizes", primitive, SIZES + more, copies=True)


def growth(session: Session) -> None:
    """Measure a few sizes, for several numbers of ranks."""
    many = session.world.n > GROWTH_RANKS
    for primitive in session.primitives or (GROWN if many else PRIMITIVES):
        by_size(session, "growth", primitive, GROWTH_SIZES if many else MORE_SIZES)


def contest(session: Session) -> None:
    """Measure all_reduce with the libraries of others.py."""
    by_size(session, "contest", "all_reduce", SIZES)


def limit(session: Session) -> None:
    """Measure all_reduce on two ranks, and what it has to copy at least.

    ``READ``: reading as many bytes that the other rank wrote into shared memory. ``OWN``: reading
    and writing the own array.
    """
    from mpi4py import MPI

    comm = session.world.mpi
    for size in (size for size in LIMIT_SIZES if size <= session.largest):
        window = MPI.Win.Allocate_shared(size, 1, comm=comm)
        ranks = session.world.me, 1 - session.world.me
        memory: list[Any] = [window.Shared_query(rank)[0] for rank in ranks]
        own, other = (np.frombuffer(each, np.uint8) for each in memory)
        small, array = np.zeros(READ_BYTES, np.uint8), np.zeros(size // 4, np.float32)
        reads = [
            partial(np.copyto, small, other[start : start + READ_BYTES])
            for start in range(0, size, READ_BYTES)
        ]
        cases: dict[str, Timed] = {
            FACADE: session.fresh_calls(session.world.case("all_reduce", size))[FACADE],
            READ: Fresh(partial(own.fill, 1), [partial(in_turn, reads)]),
            OWN: Fresh(partial(array.fill, 1), [partial(np.negative, array, out=array)]),
        }
        found = session.measure(cases)
        for name in cases:
            session.record("limit", name, "all_reduce", size, "float32", found)
        session.report(f"all_reduce {format_bytes(size)}", found)
        window.Free()


def asynchronous(session: Session) -> None:
    """Measure all_reduce, synchronous and asynchronous."""
    facade = session.world.contestants[FACADE]
    for size in (size for size in ASYNC_SIZES if size <= session.largest):
        case = session.world.case("all_reduce", size)
        buffers = ring(case, PLACE)
        calls = [facade.call(case, each) for each in buffers]
        begun = [partial(wait_for_all, [facade.begin(call)]) for call in calls]
        hows: dict[str, Timed] = {
            "synchronous": fresh(case, buffers, calls),
            "asynchronous": fresh(case, buffers, begun),
        }
        found = session.measure(hows)
        for how in hows:
            session.record(
                "async", FACADE, "all_reduce", size, "float32", found, label=how, how=how
            )
        session.report(f"all_reduce {format_bytes(size)}", found)


def dtypes(session: Session) -> None:
    """Measure all_reduce of several dtypes. All dtypes of a size take turns."""
    for size in (size for size in SIZES if KIB <= size <= session.largest):
        cases: dict[str, Timed] = {}
        labels = {}
        for name in DTYPES:
            case = session.world.case("all_reduce", size, dtype_of[name])
            for caller, call in session.fresh_calls(case).items():
                cases[f"{name} {caller}"] = call
                labels[f"{name} {caller}"] = name, caller
        found = session.measure(cases)
        for label, (name, caller) in labels.items():
            session.record("dtypes", caller, "all_reduce", size, name, found, label=label)
        session.report(f"all_reduce {format_bytes(size)}", found)


def many(session: Session) -> None:
    """Measure many small all_reduces."""
    for count, size in TENSORS:
        if size > session.largest:
            continue
        case = session.world.case("all_reduce", size)
        each = [Buffers(case, PLACE) for _ in range(count)]
        cases: dict[str, Timed] = {}
        labels = {}
        for caller, contestant in session.world.contestants.items():
            calls = [contestant.call(case, buffers) for buffers in each]
            begins = [contestant.begin(call) for call in calls if call]
            hows = {
                "one by one": partial(in_turn, calls),
                "pending": partial(wait_for_all, begins),
                "coalesced": contestant.together([call for call in calls if call]),
            }
            for how, timed in hows.items():
                if timed is not None:
                    cases[f"{caller} {how}"] = fresh(case, each, [timed])
                    labels[f"{caller} {how}"] = caller, how
        one = session.world.case("all_reduce", count * size)
        fused = session.fresh_calls(one)
        for caller in (MPI4PY, FACADE):  # one call of the same size, without packing
            cases[f"{caller} fused"] = fused[caller]
            labels[f"{caller} fused"] = caller, "fused"
        found = session.measure(cases)
        for label, (caller, how) in labels.items():
            more: dict[str, Any] = {"label": label, "count": count, "how": how}
            session.record("many", caller, "all_reduce", size, "float32", found, **more)
        session.report(f"{count} all_reduces of {format_bytes(size)}", found)


def in_turn(calls: Sequence[Callable[[], object]]) -> None:
    """Make the calls one after another."""
    for call in calls:
        call()


def wait_for_all(begins: Sequence[Callable[[], Callable[[], object]]]) -> None:
    """Start all calls, then wait for all."""
    for wait in [begin() for begin in begins]:
        wait()


class Computation:
    """Products of small matrices, which release the interpreter lock."""

    def __init__(self, products: int) -> None:
        self._products = range(products)
        self._matrix, self._out = np.zeros((2, 64, 64), np.float32)

    def __call__(self) -> None:
        """Compute."""
        for _ in self._products:
            np.matmul(self._matrix, self._matrix, out=self._out)


def overlap(session: Session) -> None:
    """Measure nonblocking calls with computation of the same duration, as the OSU benchmarks do.

    Parts of each contestant: ``pure``, start and wait; ``compute``, only computation; ``beside``,
    start, compute, wait; ``in turn``, a blocking call followed by computation.
    """
    world = session.world
    for primitive, size in OVERLAPPED:
        if size > session.largest:
            continue
        case = world.case(primitive, size)
        buffers = Buffers(case, PLACE)
        calls = {
            caller: call for caller, call in session.calls(case, buffers).items() if caller != TORCH
        }
        cases: dict[str, Timed] = {}
        labels = {}
        ten = Computation(10)
        for caller, call in calls.items():
            begin = world.contestants[caller].begin(call)
            pure = partial(wait_for_all, [begin])
            once = world.timer.once({"pure": pure, "ten": ten}, tries=15)
            compute = Computation(max(1, round(10 * once["pure"] / once["ten"])))
            parts: dict[str, Call] = {
                "pure": pure,
                "compute": compute,
                "beside": partial(beside, begin, compute),
                "in turn": partial(in_turn, [call, compute]),
            }
            for part, timed in parts.items():
                cases[f"{caller} {part}"] = fresh(case, [buffers], [timed])
                labels[f"{caller} {part}"] = caller, part
        found = session.measure(cases)
        for label, (caller, part) in labels.items():
            more = {"label": label, "part": part}
            session.record("overlap", caller, primitive, case.size, "float32", found, **more)
        session.report(f"{primitive} {format_bytes(case.size)}", found)


def beside(begin: Callable[[], Callable[[], object]], compute: Callable[[], object]) -> None:
    """Start a call, compute, and wait for the call."""
    wait = begin()
    compute()
    wait()


def memory(session: Session) -> None:
    """Measure the peak memory of a collective besides its arrays.

    The peak is VmHWM of /proc/self/status. It is reset after the ranks are connected and the arrays
    allocated, so it counts pages touched later. A shared page counts for each rank that touched it.
    The result is the maximum of the ranks. Libraries keep memory, so each launch measures one call.
    """
    world, (primitive, caller) = session.world, session.alone
    case = world.case(primitive, session.largest)
    call = world.contestants[caller].call(case, Buffers(case, PLACE))
    assert call is not None
    world.mpi.Barrier()
    with suppress(OSError):  # not always permitted; the arrays are most of the peak
        Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    for _ in range(3):
        call()
    (extra,) = world.timer.combine([peak() - before])
    session.record("memory", caller, primitive, case.size, "float32", extra=int(extra))
    session.line(f"{primitive} {format_bytes(case.size)} {caller}: {extra / MIB:.1f} MiB more")


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no VmHWM")


def reproducible(session: Session) -> None:
    """Measure sums in groups of each level."""
    size = min(16 * MIB, session.largest)
    levels = {"default": None, **{level: level for level in LEVELS}}
    groups: dict[str, Any] = {
        how: mpicoll.new_group(reproducible=level) for how, level in levels.items()
    }
    for dtype in ("float32", "float64"):
        values = np.random.default_rng(session.world.me).normal(size=size // 8).astype(dtype)
        values = np.resize(values, size // values.itemsize)
        array = values.copy()
        cases: dict[str, Timed] = {
            how: Fresh(
                partial(np.copyto, array, values),
                [partial(mpicoll.all_reduce, array, mpicoll.ReduceOp.SUM, group)],
            )
            for how, group in groups.items()
        }
        found = session.measure(cases)
        for how in cases:
            more = {"label": how, "how": how}
            session.record("reproducible", FACADE, "all_reduce", size, dtype, found, **more)
        session.report(f"all_reduce of {dtype} {format_bytes(size)}", found)
    for group in groups.values():
        mpicoll.destroy_process_group(group)


def ddp(session: Session) -> None:
    """Measure a step of DistributedDataParallel."""
    if session.world.gloo is None:
        session.leave_out("ddp: torch is not installed")
        return
    import training

    training.ddp(session)


def fsdp(session: Session) -> None:
    """Measure a step of FSDP2."""
    if session.world.gloo is None:
        session.leave_out("fsdp: torch is not installed")
        return
    import training

    training.fsdp(session)


SECTIONS: dict[str, Callable[[Session], None]] = {
    "sizes": sizes, "dtypes": dtypes, "many": many, "reproducible": reproducible,
    "overlap": overlap, "ddp": ddp, "fsdp": fsdp, "growth": growth, "memory": memory,
    "contest": contest, "limit": limit, "async": asynchronous,
}  # fmt: skip
#: Sections that do not use torch, and sections that can run on GPUs.
WITHOUT_TORCH = {"growth", "memory", "reproducible", "limit", "async"}
ON_GPUS = {"ddp", "fsdp"}


# --- the command --------------------------------------------------------------------------------

#: Effort with --quick.
QUICK = Effort(seconds=0.15, sample=5e-4, fewest=5, most=15)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("sections", nargs="+", choices=SECTIONS, metavar="SECTION",
                        help=f"any of {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--seconds", type=float, metavar="S",
                        help="approximate seconds per point")  # fmt: skip
    parser.add_argument("--largest", type=int, default=LARGEST, metavar="BYTES",
                        help="maximum size (default: %(default)s)")  # fmt: skip
    parser.add_argument("--alone", nargs=2, default=["all_reduce", FACADE],
                        metavar=("PRIMITIVE", "CASE"), help="the call of memory")  # fmt: skip
    parser.add_argument("--primitives", nargs="+", metavar="PRIMITIVE",
                        help="the primitives of sizes and growth")  # fmt: skip
    parser.add_argument("--without-torch", action="store_true", help="only mpi4py and mpicoll")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="device of ddp and fsdp (default: %(default)s)")  # fmt: skip
    options = parse(parser)
    if options.device != "cpu" and (options.without_torch or set(options.sections) - ON_GPUS):
        if cli.is_first_rank():
            print(f"error: --device cuda: only {' and '.join(sorted(ON_GPUS))}", file=sys.stderr)
        raise SystemExit(2)
    effort = QUICK if options.quick else Effort()
    effort = effort._replace(seconds=options.seconds or effort.seconds)
    torch = not options.without_torch and bool(set(options.sections) - WITHOUT_TORCH)
    world = World(torch, options.device, "contest" in options.sections)
    session = Session(world, effort, options.largest, tuple(options.alone), options.primitives)
    session.results |= {"quick": options.quick, "device": options.device}
    machine = session.results["machine"]
    session.line(f"{session.results['mpi']}, {session.world.n} ranks, {machine['processors']} "
                 f"processors, load before {machine['load before']}")  # fmt: skip
    for section in options.sections:
        session.line(f"\n{section}")
        SECTIONS[section](session)
    session.end(options.json)


if __name__ == "__main__":
    main()
