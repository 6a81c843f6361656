"""``python -m mpicoll bench``: time collectives, with the options and columns of nccl-tests.

A line of the table is a ``Case``. ``bench_calls`` builds its arrays, calls and expected results.
``bench_others`` builds calls to compare with. ``bench_table`` measures and prints.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mpicoll import cli, control_messages, dtypes
from mpicoll.cli.bench_calls import MEMORIES, Case, block_count, find_memory_problem, op_name
from mpicoll.dtypes import OPERATIONS, ReduceOp
from mpicoll.errors import UnsupportedError
from mpicoll.primitives import PRIMITIVES, Layout, by_name

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

#: Names of dtypes in nccl-tests.
_NAMES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_DTYPES = dtypes.by_name | {name: dtypes.by_name[own] for name, own in _NAMES.items()}
_OPERATIONS = {op_name(op): op for op in OPERATIONS if op is not ReduceOp.PREMUL_SUM}
_OTHERS = {name: name for name in ("mpi4py", "gloo", "copy")}
_HAS_TORCH = importlib.util.find_spec("torch") is not None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of nccl-tests that apply here, and others."""
    add = parser.add_argument
    add("primitives", nargs="+", type=_names_of(by_name, PRIMITIVES), metavar="PRIMITIVE",
        help=f"all, or any of {', '.join(by_name)}")  # fmt: skip
    add("-b", "--minbytes", type=cli.parse_size, default="8", metavar="SIZE",
        help="smallest size of the larger array in bytes, or with K, M, G or T (powers of 1024; "
        "default: 8)")  # fmt: skip
    add("-e", "--maxbytes", type=cli.parse_size, default="64M", metavar="SIZE",
        help="largest size (default: 64M)")  # fmt: skip
    add("-f", "--stepfactor", type=_number_from(2), default="2", metavar="FACTOR",
        help="factor between sizes (default: 2)")  # fmt: skip
    add("-d", "--datatype", type=_names_of(_DTYPES, dtypes.DTYPES), default="float",
        metavar="DTYPE", help="all, or a list such as float,half: names of mpicoll or nccl-tests "
        "(default: float)")  # fmt: skip
    add("-o", "--op", type=_names_of(_OPERATIONS, tuple(_OPERATIONS.values())), default="sum",
        metavar="OP", help=f"all, or any of {', '.join(_OPERATIONS)} (default: sum)")  # fmt: skip
    add("-r", "--root", type=_number_from(0), default=0, metavar="RANK",
        help="root rank (default: 0)")  # fmt: skip
    add("-n", "--iters", type=_number_from(1), metavar="N",
        help="calls per repetition (default: by time)")  # fmt: skip
    add("-w", "--warmup_iters", type=_number_from(0), default=5, metavar="N",
        help="untimed calls before the first repetition (default: 5)")  # fmt: skip
    add("--repetitions", type=_number_from(1), default=7, metavar="N",
        help="repetitions; the median is printed (default: 7)")  # fmt: skip
    add("-c", "--check", type=int, choices=(0, 1), nargs="?", const=1, default=0,
        help="count wrong elements; exit code 1 if there are any")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="memory of arrays (default: cpu)")
    add("--compare", type=_names_of(_OTHERS, ("mpi4py", "gloo") if _HAS_TORCH else ("mpi4py",)),
        default=[], metavar="OTHERS",
        help="also time mpi4py, torch's gloo, or a copy of the same size, as in mpi4py,gloo; all: "
        "mpi4py, and gloo if torch is installed")  # fmt: skip
    add("--routes", default="", metavar="ROUTES",
        help="also time these routes, as in mpi,shared; all: all available routes")  # fmt: skip
    add("-J", "--json", "--output_file", type=Path, metavar="FILE", help="write the table as JSON")


def _names_of(known: Mapping[str, T], every: Sequence[T]) -> Callable[[str], list[T]]:
    """Return a parser of names, separated by commas. "all" means ``every``."""

    def parse(text: str) -> list[T]:
        words = text.split(",")
        for word in words:
            if word not in known and text != "all":
                names = ", ".join(["all", *known])
                raise argparse.ArgumentTypeError(f"expected {names}, got {word!r}")
        found = every if text == "all" else [known[word] for word in words]
        return list(dict.fromkeys(found))

    return parse


def _number_from(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"expected a number of at least {minimum}, got {text!r}"
            )
        return int(text)

    return number


def run(options: argparse.Namespace) -> int:
    """Run the benchmark and print on rank 0.

    Returns the exit code: 1 for a wrong element or a failed init, 2 for invalid options.
    """
    return cli.run_in_group("bench", lambda: _bench(options))


def _bench(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    import mpicoll as dist
    from mpicoll.cli.bench_others import OTHERS, Other, Route, find_routes
    from mpicoll.cli.bench_table import Bench
    from mpicoll.core.groups import default_group
    from mpicoll.failures.consistency import FIRST
    from mpicoll.routes import registry

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py then raises exceptions
    first = comm.Get_rank() == 0
    known = tuple(registry.HOST if options.device == "cpu" else registry.DEVICE)
    names = list(known) if options.routes == "all" else options.routes.split(",")
    names = list(dict.fromkeys(filter(None, names)))
    own = _find_problem(options, comm, names, known)
    problem = next(filter(None, control_messages.allgather(comm, own, str)), "")
    if problem:
        return cli.refuse("bench", problem, first, 2)
    memory = MEMORIES[options.device]()
    missing = find_routes(names, options.device) if names else {}
    routes = [name for name in names if not missing[name]]
    problem = find_memory_problem(
        comm, memory, _cases(options, comm, [options.maxbytes]), options.compare, len(routes)
    )
    if problem:
        return cli.refuse("bench", f"--maxbytes {options.maxbytes}: {problem}", first, 2)
    for _ in range(FIRST):  # the first calls of a group are compared between ranks
        dist.barrier()
    others: dict[str, Other] = {name: OTHERS[name](comm, memory) for name in options.compare}
    others |= {name: Route(name, options.device) for name in routes}
    notes = [f"not measured: {name}: {reason}" for name, reason in missing.items() if reason]
    sizes = [options.minbytes]
    while sizes[-1] * options.stepfactor <= options.maxbytes:
        sizes.append(sizes[-1] * options.stepfactor)
    report = Bench(options, comm, memory, others, notes).run(_cases(options, comm, sizes))
    shared, measured = map(default_group().resources.find, ("shared", "measured"))
    if first and names:
        for call, ways in (shared.ways.describe() if shared else measured or {}).items():
            print(f"# {call}: {ways}")
    for other in others.values():
        other.close()
    comm.Free()
    if first and options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["wrong"] else 0


def _find_problem(
    options: argparse.Namespace, comm: MPI.Intracomm, routes: Sequence[str], known: Sequence[str]
) -> str:
    """Return the reason why this rank cannot run with these options, or "".

    known: the routes of this device.
    """
    if options.minbytes > options.maxbytes:
        return f"--minbytes {options.minbytes} is more than --maxbytes {options.maxbytes}"
    if options.root >= comm.Get_size():
        return f"--root {options.root}: there are {comm.Get_size()} ranks"
    if options.device != "cpu" and set(options.compare) - {"copy"}:
        return "--compare requires --device cpu, because MPI may crash with device memory"
    if "gloo" in options.compare and not _HAS_TORCH:
        return "--compare gloo needs torch, which is not installed: pip install torch"
    for name in routes:
        if name not in known:
            return f"--routes {name}: expected all, or any of {', '.join(known)}"
    fit = any(dtype.kind in op.kinds for dtype in options.datatype for op in options.op)
    if any(row.reduces for row in itertools.chain(*options.primitives)) and not fit:
        return f"--op {op_name(options.op[0])} is not supported for {options.datatype[0]}"
    try:
        memory = MEMORIES[options.device]()
        for dtype in options.datatype:
            memory.empty(1, dtype)
    except UnsupportedError as error:
        return f"--device {options.device}: {error}"
    if comm.Get_rank() == 0 and options.json:
        return cli.find_write_problem(options.json)
    return ""


def _cases(
    options: argparse.Namespace, comm: MPI.Intracomm, sizes: Sequence[int]
) -> Iterator[Case]:
    """Yield the lines of the table. Sizes with the same number of elements are one line."""
    n, me, root = comm.Get_size(), comm.Get_rank(), options.root
    for row in dict.fromkeys(itertools.chain(*options.primitives)):
        if row.layout is Layout.EMPTY:
            yield Case(row, None, None, 0, n, me, root)  # type: ignore[arg-type]
            continue
        for dtype in options.datatype:
            for op in options.op if row.reduces else [None]:
                if op is not None and dtype.kind not in op.kinds:
                    continue
                for count in dict.fromkeys(block_count(row, dtype, n, size) for size in sizes):
                    yield Case(row, dtype, op, count, n, me, root)
