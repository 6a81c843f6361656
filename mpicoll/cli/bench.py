"""``python -m mpicoll bench``: time collectives, with the options and columns of nccl-tests.

A line of the table is a ``Case``. ``bench_calls`` builds its arrays, calls and expected results.
``bench_others`` builds calls to compare with. ``bench_table`` measures and prints.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll import cli, control_messages
from mpicoll.primitives import PRIMITIVES, Layout, Primitive, by_name

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.cli.bench_calls import Case
    from mpicoll.dtypes import DType, ReduceOp

__all__ = ["add_arguments", "run"]

# --- the command line ---------------------------------------------------------------------------

#: Names of dtypes in nccl-tests.
_DTYPES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of nccl-tests that apply here, and others."""
    add = parser.add_argument
    add("primitives", nargs="+", type=_primitives, metavar="PRIMITIVE",
        help=f"all, or any of {', '.join(by_name)}")  # fmt: skip
    add("-b", "--minbytes", type=cli.parse_size, default="8", metavar="SIZE",
        help="smallest size of the larger array in bytes, or with K, M, G or T (powers of 1024; "
        "default: 8)")  # fmt: skip
    add("-e", "--maxbytes", type=cli.parse_size, default="64M", metavar="SIZE",
        help="largest size (default: 64M)")  # fmt: skip
    add("-f", "--stepfactor", type=_number_from(2), default="2", metavar="FACTOR",
        help="factor between sizes (default: 2)")  # fmt: skip
    add("-d", "--datatype", type=_dtypes, default="float", metavar="DTYPE",
        help="all, or a list such as float,half: names of mpicoll or nccl-tests "
        "(default: float)")  # fmt: skip
    add("-o", "--op", type=_ops, default="sum", metavar="OP",
        help="all, sum, prod, min, max, avg, band, bor or bxor (default: sum)")  # fmt: skip
    add("-r", "--root", type=_number_from(0), default=0, metavar="RANK",
        help="root rank (default: 0)")  # fmt: skip
    add("-n", "--iters", type=_number_from(1), metavar="N",
        help="calls per repetition, or in total with --latency (default: by time)")  # fmt: skip
    add("-w", "--warmup_iters", type=_number_from(0), default=5, metavar="N",
        help="untimed calls before the first repetition (default: 5)")  # fmt: skip
    add("--repetitions", type=_number_from(1), default=7, metavar="N",
        help="repetitions; the median is printed (default: 7)")  # fmt: skip
    add("-c", "--check", type=int, choices=(0, 1), nargs="?", const=1, default=0,
        help="count wrong elements; exit code 1 if there are any")  # fmt: skip
    add("--latency", action="store_true",
        help="time single calls: minimum, percentiles and maximum")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="memory of arrays (default: cpu)")
    add("--async", action="store_true", dest="waits", help="use async_op=True and wait()")
    add("--compare", type=_others, action="extend", default=[], metavar="OTHER",
        help="also time mpi4py, torch's gloo, or a copy of the same size, as in mpi4py,gloo; all: "
        "mpi4py, and gloo if torch is installed")  # fmt: skip
    add("--routes", default="", metavar="ROUTES",
        help="also time these routes, as in mpi,shared; all: all available routes")  # fmt: skip
    add("-J", "--json", "--output_file", type=Path, metavar="FILE", help="write the table as JSON")


def _primitives(text: str) -> list[Primitive]:
    if text == "all":
        return list(PRIMITIVES)
    if text not in by_name:
        raise argparse.ArgumentTypeError(f"expected all, {', '.join(by_name)}, got {text!r}")
    return [by_name[text]]


def _number_from(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"expected a number of at least {minimum}, got {text!r}"
            )
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
            raise argparse.ArgumentTypeError(f"expected {names}, got {word!r}")
        found[name] = dtypes.by_name[name]
    return list(found.values())


def _ops(text: str) -> list[ReduceOp]:
    from mpicoll.cli.bench_calls import op_name
    from mpicoll.dtypes import OPERATIONS, ReduceOp

    ops = {op_name(op): op for op in OPERATIONS if op is not ReduceOp.PREMUL_SUM}
    if text != "all" and text not in ops:
        raise argparse.ArgumentTypeError(f"expected all, {', '.join(ops)}, got {text!r}")
    return list(ops.values()) if text == "all" else [ops[text]]


def _others(text: str) -> list[str]:
    if text == "all":
        from mpicoll.cli.bench_others import missing

        return [name for name in ("mpi4py", "gloo") if not missing(name)]
    names = text.split(",")
    for name in names:
        if name not in ("mpi4py", "gloo", "copy"):
            raise argparse.ArgumentTypeError(f"expected mpi4py, gloo or copy, got {name!r}")
    return names


def _contradiction(options: argparse.Namespace) -> str:
    """Return an error of the combination of options, or ""."""
    from mpicoll.cli.bench_others import route_names

    if options.minbytes > options.maxbytes:
        return f"--minbytes {options.minbytes} is more than --maxbytes {options.maxbytes}"
    if options.device != "cpu" and set(options.compare) - {"copy"}:
        return "--compare requires --device cpu, because MPI may crash with device memory"
    known = route_names(options.device)
    for name in options.routes.split(",") if options.routes not in ("", "all") else []:
        if name not in known:
            return f"--routes {name}: expected all, or any of {', '.join(known)}"
    fit = any(dtype.kind in op.kinds for dtype in options.datatype for op in options.op)
    if any(row.reduces for row in itertools.chain(*options.primitives)) and not fit:
        from mpicoll.cli.bench_calls import op_name

        (op, *_), (dtype, *_) = options.op, options.datatype
        return f"--op {op_name(op)} is not supported for {dtype}"
    return ""


# --- the command --------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Run the benchmark and print on rank 0.

    Returns the exit code: 1 for a wrong element or a failed init, 2 for invalid options.
    """
    problem = _contradiction(options)
    if problem:
        return cli.refuse("bench", problem, cli.is_first_rank(), 2)
    problem = cli.start_group()
    if problem:
        return cli.refuse("bench", problem, cli.is_first_rank(), 1)

    code = _with_ranks(options)
    cli.end_group()
    return code


def _with_ranks(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    import mpicoll as dist
    from mpicoll.cli.bench_calls import MEMORIES, find_memory_problem
    from mpicoll.cli.bench_others import OTHERS, Other, Route
    from mpicoll.cli.bench_table import Bench
    from mpicoll.failures.consistency import FIRST

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py then raises exceptions
    first = comm.Get_rank() == 0
    problems = control_messages.allgather(comm, _find_problem(options, comm), str)
    problem = next(filter(None, problems), "")
    if problem:
        return cli.refuse("bench", problem, first, 2)
    memory = MEMORIES[options.device]()
    routes, notes, problem = _routes(options)
    if not problem:
        largest = _cases(options, comm, [options.maxbytes])
        problem = find_memory_problem(comm, memory, largest, options.compare, len(routes))
        problem = f"--maxbytes {options.maxbytes}: {problem}" if problem else ""
    if problem:
        return cli.refuse("bench", problem, first, 2)
    for _ in range(FIRST):  # the first calls of a group are compared between ranks
        dist.barrier()
    others: dict[str, Other] = {
        name: OTHERS[name](comm, memory) for name in dict.fromkeys(options.compare)
    }
    others |= {name: Route(name, options.device, options.waits) for name in routes}
    sizes = [options.minbytes]
    while sizes[-1] * options.stepfactor <= options.maxbytes:
        sizes.append(sizes[-1] * options.stepfactor)
    report = Bench(options, comm, memory, others, notes).run(_cases(options, comm, sizes))
    for other in others.values():
        other.close()
    comm.Free()
    if first and options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["wrong"] else 0


def _routes(options: argparse.Namespace) -> tuple[list[str], list[str], str]:
    """Return the routes to measure, lines about unavailable ones of "all", and an error or "".

    All ranks call it.
    """
    if not options.routes:
        return [], [], ""
    from mpicoll.cli.bench_others import find_routes, route_names

    is_all = options.routes == "all"
    names = route_names(options.device) if is_all else dict.fromkeys(options.routes.split(","))
    reasons = find_routes(list(names), options.device)
    missing = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if missing and not is_all:
        return [], [], f"--routes {missing[0]}"
    routes = [name for name, reason in reasons.items() if not reason]
    return routes, [f"not measured: {line}" for line in missing], ""


def _find_problem(options: argparse.Namespace, comm: MPI.Intracomm) -> str:
    """Return the reason why this rank cannot run with these options, or ""."""
    from mpicoll.cli.bench_calls import MEMORIES
    from mpicoll.cli.bench_others import missing
    from mpicoll.errors import UnsupportedError

    if options.root >= comm.Get_size():
        return f"--root {options.root}: there are {comm.Get_size()} ranks"
    try:
        memory = MEMORIES[options.device]()
        for dtype in options.datatype:
            memory.empty(1, dtype)
    except UnsupportedError as error:
        return f"--device {options.device}: {error}"
    problems = [missing(name) for name in options.compare]
    if comm.Get_rank() == 0 and options.json:
        problems.append(cli.find_write_problem(options.json))
    return next(filter(None, problems), "")


def _cases(
    options: argparse.Namespace, comm: MPI.Intracomm, sizes: Sequence[int]
) -> Iterator[Case]:
    """Yield the lines of the table. Sizes with the same number of elements are one line."""
    from mpicoll.cli.bench_calls import Case, block_count

    n, me, root = comm.Get_size(), comm.Get_rank(), options.root
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
