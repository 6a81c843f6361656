"""``python -m mpicoll bench``: time the collectives, with the flags and columns of nccl-tests.

This is the command line. A line of the table is a ``Case``: ``bench_calls`` builds its arrays and
calls from the row of ``mpicoll.primitives``, ``bench_others`` the calls to compare with, ``timing``
and ``bench_measure`` measure them, ``bench_check`` knows the right results, ``bench_table`` prints
and ``bench_plot`` draws.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpicoll import cli, control_messages
from mpicoll.primitives import PRIMITIVES, Layout, Primitive, by_name

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.cli.bench_calls import Case, Place
    from mpicoll.dtypes import DType, ReduceOp

__all__ = ["add_arguments", "run"]

# --- the command line ---------------------------------------------------------------------------

#: nccl-tests' names of dtypes, and their rows.
_DTYPES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2",
}

#: Flags of nccl-tests without a meaning here, and why.
_NOT_TAKEN = {
    ("-t", "--nthreads"): "a rank is a process: start more of them",
    ("-g", "--ngpus"): "a rank has one GPU: start one for each",
    ("-m", "--agg_iters"): "calls are not aggregated",
    ("-N", "--run_cycles"): "there is one cycle; --repetitions makes it longer",
    ("-p", "--parallel_init"): "no threads start MPI",
    ("-z", "--blocking"): "calls return when they are done; --async makes them otherwise",
    ("-y", "--stream_null"): "calls are in the order of the current stream",
    ("-T", "--timeout"): "the process group has one",
    ("-G", "--cudagraph"): "MPI calls cannot be part of a CUDA graph",
    ("-C", "--report_cputime"): "the time is that of the calling process",
    ("-S", "--report_timestamps"): "lines carry no time of day",
    ("-R", "--local_register"): "memory needs no registration",
    ("-x", "--cta_policy"): "no kernel of NCCL is configured",
    ("-D", "--device_implementation"): "there is one implementation",
    ("-V", "--device_cta_count"): "no kernel of NCCL is configured",
    ("-M", "--memory"): "memory is not reported",
    ("-F",): "use --json",
}


class _NotTaken(argparse.Action):
    """The refusal of a flag, with the reason."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        flag: str | None = None,
    ) -> NoReturn:
        reason = _NOT_TAKEN[tuple(self.option_strings)]
        parser.error(f"{flag}: a flag of nccl-tests that is not taken: {reason}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of nccl-tests that have a meaning here, and others."""
    add = parser.add_argument
    add("primitives", nargs="+", type=_primitives, metavar="PRIMITIVE",
        help=f"all, or some of {', '.join(by_name)}")  # fmt: skip
    add("-b", "--minbytes", type=cli.parse_size, default="8", metavar="SIZE",
        help="the first size: bytes of the larger array, with K, M, G or T for 1024 and so on "
        "(default: 8)")  # fmt: skip
    add("-e", "--maxbytes", type=cli.parse_size, default="64M", metavar="SIZE",
        help="the last size (default: 64M)")  # fmt: skip
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("-f", "--stepfactor", type=_number_from(2), default="2", metavar="FACTOR",
                       help="of a size over the one before (default: 2)")  # fmt: skip
    steps.add_argument("-i", "--stepbytes", type=cli.parse_size, metavar="SIZE",
                       help="of a size more than the one before, instead")  # fmt: skip
    add("-d", "--datatype", type=_dtypes, default="float", metavar="DTYPE",
        help="all, or dtypes of mpicoll or by nccl-tests' names, as in float,half "
        "(default: float)")  # fmt: skip
    add("-o", "--op", type=_ops, default="sum", metavar="OP",
        help="all, sum, prod, min, max, avg, band, bor or bxor (default: sum)")  # fmt: skip
    add("-r", "--root", type=_number_from(0), default=0, metavar="RANK",
        help="the root (default: 0)")  # fmt: skip
    add("-n", "--iters", type=_number_from(1), metavar="N",
        help="calls in a repetition, or with --latency (default: by their time)")  # fmt: skip
    add("-w", "--warmup_iters", type=_number_from(0), default=5, metavar="N",
        help="calls before those that are timed (default: 5)")  # fmt: skip
    add("--repetitions", type=_number_from(1), default=7, metavar="N",
        help="of which the median counts (default: 7)")  # fmt: skip
    add("-c", "--check", type=int, choices=(0, 1), nargs="?", const=1, default=0,
        help="count wrong elements; exit code 1 if there are any")  # fmt: skip
    add(
        "-a",
        "--average",
        type=int,
        choices=(0, 1, 2, 3),
        default=3,
        help="which rank's time: 0 rank 0's, 1 the mean, 2 the least, 3 the greatest (default: 3)",
    )
    add("--latency", action="store_true",
        help="one call at a time: least, percentiles and greatest")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where arrays are (default: cpu)")
    add("--async", action="store_true", dest="waits", help="call with async_op=True, and wait")
    add("--compare", type=_others, action="extend", default=[], metavar="OTHER",
        help="the same calls by mpi4py or torch's gloo beside, or a copy of as many bytes; "
        "several: mpi4py,gloo; all: mpi4py, and gloo if torch is installed")  # fmt: skip
    add("--routes", default="", metavar="ROUTES",
        help="the same calls by these routes beside, as in mpi,shared; all: those that these ranks "
        "can take")  # fmt: skip
    add("--short", action="store_true", help="a small table: time, the others' time and ratio")
    add("-J", "--json", "--output_file", type=Path, metavar="FILE", help="the table as JSON")
    add("--plot", type=Path, metavar="FILE", help="the table as an image; needs matplotlib")
    for flags in _NOT_TAKEN:
        add(*flags, action=_NotTaken, nargs="?", help=argparse.SUPPRESS)


def _primitives(text: str) -> list[Primitive]:
    if text == "all":
        return list(PRIMITIVES)
    if text not in by_name:
        raise argparse.ArgumentTypeError(f"{text!r} is none of all, {', '.join(by_name)}")
    return [by_name[text]]


def _number_from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} on")
        return int(text)

    return number


def _dtypes(text: str) -> list[DType]:
    from mpicoll import dtypes

    if text == "all":
        return list(dtypes.DTYPES)
    found = {}
    for word in text.split(","):
        name = _DTYPES.get(word, word)
        if name not in dtypes.by_name:
            names = ", ".join(["all", *dtypes.by_name, *_DTYPES])
            raise argparse.ArgumentTypeError(f"{word!r} is none of {names}")
        found[name] = dtypes.by_name[name]
    return list(found.values())


def _ops(text: str) -> list[ReduceOp]:
    from mpicoll.cli.bench_calls import op_name
    from mpicoll.dtypes import OPERATIONS, ReduceOp

    ops = {op_name(op): op for op in OPERATIONS if op is not ReduceOp.PREMUL_SUM}
    if text != "all" and text not in ops:
        raise argparse.ArgumentTypeError(f"{text!r} is none of all, {', '.join(ops)}")
    return list(ops.values()) if text == "all" else [ops[text]]


def _others(text: str) -> list[str]:
    if text == "all":
        from mpicoll.cli.bench_others import missing

        return [name for name in ("mpi4py", "gloo") if not missing(name)]
    names = text.split(",")
    for name in names:
        if name not in ("mpi4py", "gloo", "copy"):
            raise argparse.ArgumentTypeError(f"{name!r} is neither mpi4py nor gloo nor copy")
    return names


def _contradiction(options: argparse.Namespace) -> str:
    """Return what is wrong with the options as a whole; "" for nothing."""
    if options.minbytes > options.maxbytes:
        return f"--minbytes {options.minbytes} is more than --maxbytes {options.maxbytes}"
    if options.short and options.latency:
        return "--short is without percentiles: leave --latency out"
    if options.device != "cpu" and set(options.compare) - {"copy"}:
        return "--compare is for --device cpu: MPI that is given device memory may crash"
    if (
        options.json
        and options.plot
        and Path(options.json).resolve() == Path(options.plot).resolve()
    ):
        return "--json and --plot name the same file"
    from mpicoll.cli.bench_others import route_names

    known = route_names(options.device)
    for name in options.routes.split(",") if options.routes not in ("", "all") else []:
        if name not in known:
            return f"--routes {name}: expected all, or some of {', '.join(known)}"
    fit = any(dtype.kind in op.kinds for dtype in options.datatype for op in options.op)
    if any(row.reduces for row in itertools.chain(*options.primitives)) and not fit:
        from mpicoll.cli.bench_calls import op_name

        (op, *_), (dtype, *_) = options.op, options.datatype
        return f"--op {op_name(op)} has no meaning for {dtype}"
    return ""


# --- the command --------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Return the exit code: 1 if an element is wrong or the ranks form no world, 2 if a request
    cannot be met. Rank 0 prints.
    """
    wrong = _contradiction(options)
    if wrong:
        return cli.refuse("bench", wrong, cli.is_first_rank(), 2)
    wrong = cli.start_group()
    if wrong:
        return cli.refuse("bench", wrong, cli.is_first_rank(), 1)
    import mpicoll as dist

    code = _with_ranks(options)
    dist.destroy_process_group()
    return code


def _with_ranks(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    import mpicoll as dist
    from mpicoll.cli.bench_calls import PLACES
    from mpicoll.cli.bench_measure import Bench
    from mpicoll.cli.bench_others import OTHERS, Other, Route
    from mpicoll.cli.bench_plot import draw
    from mpicoll.failures.consistency import FIRST

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # so that mpi4py raises exceptions
    first = comm.Get_rank() == 0
    wrong = next(filter(None, control_messages.allgather(comm, _obstacle(options, comm), str)), "")
    if wrong:
        return cli.refuse("bench", wrong, first, 2)
    place = PLACES[options.device]()
    routes, notes, wrong = _routes(options)
    wrong = wrong or _too_much(options, comm, place, len(routes))
    if wrong:
        return cli.refuse("bench", wrong, first, 2)
    for _ in range(FIRST):  # the first calls of a group are compared between the ranks
        dist.barrier()
    others: dict[str, Other] = {
        name: OTHERS[name](comm, place) for name in dict.fromkeys(options.compare)
    }
    others |= {name: Route(name, options.device, options.waits) for name in routes}
    bench = Bench(options, comm, place, others, notes)
    report = bench.run(_cases(options, comm, _sizes(options)))
    for other in others.values():
        other.close()
    comm.Free()
    if first and options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if first and options.plot:
        draw(report, options.plot)
    return 1 if report["wrong"] else 0


def _routes(options: argparse.Namespace) -> tuple[list[str], list[str], str]:
    """Return the routes to measure, lines about those left out of "all", and what is wrong.

    All ranks call.
    """
    if not options.routes:
        return [], [], ""
    from mpicoll.cli.bench_others import find_routes, route_names

    every = options.routes == "all"
    names = route_names(options.device) if every else dict.fromkeys(options.routes.split(","))
    reasons = find_routes(list(names), options.device)
    unfit = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if unfit and not every:
        return [], [], f"--routes {unfit[0]}"
    routes = [name for name, reason in reasons.items() if not reason]
    return routes, [f"not measured: {line}" for line in unfit], ""


def _obstacle(options: argparse.Namespace, comm: MPI.Intracomm) -> str:
    """Return why this rank cannot meet the options; "" if it can."""
    from mpicoll.cli.bench_calls import PLACES
    from mpicoll.cli.bench_others import missing
    from mpicoll.cli.bench_plot import obstacle
    from mpicoll.errors import UnsupportedError

    if options.root >= comm.Get_size():
        return f"--root {options.root}: there are {comm.Get_size()} ranks"
    try:
        place = PLACES[options.device]()
        for dtype in options.datatype:
            place.empty(1, dtype)
    except UnsupportedError as error:
        return f"--device {options.device}: {error}"
    found = [missing(name) for name in options.compare]
    if comm.Get_rank() == 0:
        found += [obstacle(options.plot)] if options.plot else []
        found += [_unwritable(path) for path in (options.json, options.plot) if path]
    return next(filter(None, found), "")


def _unwritable(path: Path) -> str:
    """Return why a file cannot be written; "" if it can."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"{path}: there is no folder {folder}"
    there = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        return f"{path}: cannot be written: {error.strerror}"
    if not there:
        path.unlink()
    return ""


def _too_much(options: argparse.Namespace, comm: MPI.Intracomm, place: Place, routes: int) -> str:
    """Return which arrays do not fit into memory, the same on all ranks; "" for none."""
    from mpicoll.cli.bench_calls import needed_bytes

    most, name = max(
        (needed_bytes(case, options.compare, routes), case.row.name)
        for case in _cases(options, comm, [options.maxbytes])
    )
    users: dict[str, list[tuple[int, int, str]]] = {}
    own = place.memory, (most, place.available(), name)
    for memory, use in control_messages.allgather(comm, own, tuple[str, tuple[int, int, str]]):
        users.setdefault(memory, []).append(use)
    for memory, uses in users.items():
        needed, free = sum(use[0] for use in uses), min(use[1] for use in uses)
        if needed > free:
            return (
                f"--maxbytes {options.maxbytes}: {max(uses)[2]} needs {needed / 2**30:.1f} GiB on "
                f"{memory} for its {len(uses)} ranks, {free / 2**30:.1f} GiB are available"
            )
    return ""


def _cases(
    options: argparse.Namespace, comm: MPI.Intracomm, sizes: Iterable[int]
) -> Iterator[Case]:
    """Yield the lines of the table; sizes with the same number of elements are one line."""
    from mpicoll.cli.bench_calls import Case, block_count

    n, me, root = comm.Get_size(), comm.Get_rank(), options.root
    sizes = list(sizes)
    for row in dict.fromkeys(itertools.chain(*options.primitives)):
        if row.layout is Layout.EMPTY:
            yield Case(row, None, None, 0, n, me, root)
            continue
        for dtype in options.datatype:
            for op in options.op if row.reduces else [None]:
                if op is not None and dtype.kind not in op.kinds:
                    continue
                for count in dict.fromkeys(block_count(row, dtype, n, size) for size in sizes):
                    yield Case(row, dtype, op, count, n, me, root)


def _sizes(options: argparse.Namespace) -> Iterator[int]:
    size = options.minbytes
    while size <= options.maxbytes:
        yield size
        size = size + options.stepbytes if options.stepbytes else size * options.stepfactor
