"""``python -m mpicoll doctor``: what was found, how calls are carried out, what to change."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import cli, settings
from mpicoll.cli.doctor_machine import (
    Place,
    describe_memory,
    describe_system,
    find_crowded,
    find_small_memory,
    format_ranges,
)

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup
    from mpicoll.cuda.capabilities import Capabilities

__all__ = ["ADVICE", "Seen", "add_arguments", "run"]

Facts = dict[str, str]
Routes = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --again."""
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--again", action="store_true", help="try device memory again, whatever is known of it"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report on rank 0; return 0, or 1 if something is wrong."""
    # init_process_group sets variables, and refuses what is misspelt: the report is to be whole.
    before = {"launcher": _launcher(), "settings": _settings()}
    misspelt = settings.find_problems()
    for name in misspelt:
        del os.environ[name]
    wrong = cli.start_group()
    if wrong:
        speaks, seen = (
            cli.is_first_rank(),
            Seen([_here() | before | {"torch": _torch()}], wrong=wrong),
        )
        seen.misspelt = [misspelt]
    else:
        speaks, seen = _examine(before, misspelt, options.again)
    advice = [(each.wrong, text) for each in ADVICE for text in each.texts(seen) if text]
    if speaks:
        show = _json if options.json else _text
        print(show(seen, advice), flush=True)
    return 1 if any(bad for bad, _ in advice) else 0


@dataclass
class Seen:
    """What the ranks found.

    facts:  each rank's facts, by rank.
    wrong:  why the ranks do not form one world, "" if they do.
    all_ranks: what each can do.
    idle:   lines on GPUs that are idle while others are shared.
    places: where each rank runs.
    misspelt: by rank, the settings that are wrong, and why.
    bad_route: why MPICOLL_DEVICE_ROUTE or MPICOLL_CUDA_AWARE cannot be followed.
    shared: whether all_reduce goes through shared memory; None if unknown or on several nodes.
    host, device: the route of arrays there, by primitive.
    """

    facts: list[Facts]
    wrong: str = ""
    all_ranks: tuple[Capabilities, ...] = ()
    idle: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    misspelt: list[dict[str, str]] = field(default_factory=list)
    bad_route: str = ""
    shared: bool | None = None
    host: Routes = field(default_factory=dict)
    device: Routes = field(default_factory=dict)


# --- looking ------------------------------------------------------------------------------------


def _examine(before: Facts, misspelt: dict[str, str], again: bool) -> tuple[bool, Seen]:
    """Collect what all ranks find out; return whether this is rank 0, and the findings."""
    import mpicoll as dist
    from mpicoll.core.groups import default_group
    from mpicoll.cuda import binding
    from mpicoll.cuda.capabilities import exchange
    from mpicoll.errors import MpicollError
    from mpicoll.primitives import PRIMITIVES, Layout
    from mpicoll.routes.device.eligibility import eligible_routes, forced_route
    from mpicoll.routes.registry import DEVICE

    group, n, me = default_group(), dist.get_world_size(), dist.get_rank()
    seen = Seen([])
    names: tuple[str, ...] = ()
    try:
        seen.all_ranks = exchange(group.inner, probes=True, again=again)
        names = eligible_routes(seen.all_ranks, forced_route(seen.all_ranks))
    except MpicollError as error:  # the same on all ranks
        seen.bad_route = str(error)
    if seen.all_ranks:
        local = group.inner.allgather(dist.get_node_local_rank())
        used = [
            binding.device_for(rank, len(own.gpus))
            for rank, own in zip(local, seen.all_ranks, strict=True)
        ]
        seen.idle = list(binding.describe_idle_gpus(seen.all_ranks, used).values())
    seen.host = _host_routes(group)
    if n > 1 and len({own.node for own in seen.all_ranks}) == 1:
        seen.shared = bool(group.resources.find("shared"))
    if any(own.gpus for own in seen.all_ranks) and names:
        seen.device = {
            row.name: next((n for n in names if row.name in DEVICE[n].primitives), "refused")
            for row in PRIMITIVES
            if row.layout is not Layout.EMPTY
        }
    facts = _here() | before | _mpi(seen, me)
    told = group.inner.bcast(_torch() if me == 0 else "", 0)  # importing torch takes long
    if told.startswith(facts["torch"]):
        facts["torch"] = told
    seen.facts, seen.places, seen.misspelt = map(
        list, zip(*group.inner.allgather((facts, Place.find(), misspelt)), strict=True)
    )
    for each, shared in zip(seen.facts, describe_memory(seen.places), strict=True):
        each["/dev/shm"] = shared
    dist.destroy_process_group()
    return me == 0, seen


def _here() -> Facts:
    """Return the facts that need no MPI."""
    import mpicoll
    from mpicoll.kernels import library

    return {
        "host": socket.gethostname(),
        **describe_system(),
        "/dev/shm": describe_memory([Place.find()])[0],
        "Python": f"{platform.python_version()} ({sys.executable})",
        "mpicoll": f"{mpicoll.__version__} ({Path(mpicoll.__file__).parent})",
        "settings": "",
        "mpi4py": _version("mpi4py"),
        "MPI": "not running",
        "launcher": "",
        "ranks": "",
        "threads": "",
        "NumPy": _version("numpy"),
        "ml_dtypes": _version("ml_dtypes"),
        "C library": library.describe(),
        "torch": _version("torch"),
        "CuPy": _version("cupy", "cupy-cuda13x", "cupy-cuda12x"),
        "driver": _driver(),
    }


def _mpi(seen: Seen, me: int) -> Facts:
    """Return the facts that need MPI."""
    from mpi4py import MPI

    from mpicoll.routes import tuning

    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    level = next(name for name in levels if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread())
    facts = {"threads": f"MPI_THREAD_{level}", "routes": tuning.job.table.describe()}
    if not seen.all_ranks:
        return facts
    own, nodes = seen.all_ranks[me], len({each.node for each in seen.all_ranks})
    n = len(seen.all_ranks)
    gpus = zip(own.names, own.gpus, strict=True)
    return facts | {
        "MPI": f"{own.vendor} {own.version} ({own.library})",
        "ranks": f"{n} on {nodes} node{'s' * (nodes > 1)}",
        "GPUs": "; ".join(f"{i}: {name} ({gpu})" for i, (name, gpu) in enumerate(gpus))
        or f"none: {own.no_gpu}",
        "CUDA in MPI": f"{own.cuda.name.lower()} ({own.why})",
    }


def _launcher() -> str:
    from mpicoll import launch

    launcher = launch.find_launcher()
    return "none" if launcher is None else launcher.name


def _settings() -> str:
    found = settings.list_set().items()
    return "; ".join(f"{name}={value}" for name, value in found) or "none"


def _version(*names: str) -> str:
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def _torch() -> str:
    """Return torch's version and whether it knows the backend."""
    version = _version("torch")
    if version == "none":
        return version
    try:
        from torch.distributed import Backend
    except Exception as error:
        return f"{version}, which cannot be imported: {error}"
    served = "is" if hasattr(Backend, "MPICOLL") else "is not"
    return f"{version}; the backend mpicoll {served} registered"


def _driver() -> str:
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"Kernel Module\D*([\d.]+)", text)
        return found[1] if found else text.partition("\n")[0]
    return "none"


# --- how calls are carried out ------------------------------------------------------------------


def _host_routes(group: ProcessGroup) -> Routes:
    """Return the routes of arrays on the host, by primitive; of reductions, for float32 and
    bfloat16.
    """
    from mpicoll.core.plan import CallKind
    from mpicoll.dtypes import ReduceOp, by_name
    from mpicoll.primitives import PRIMITIVES
    from mpicoll.routes.host.select import describe

    found = {}
    for primitive in PRIMITIVES:
        if not primitive.reduces:
            found[primitive.name] = describe(CallKind(primitive, group, None, by_name["float32"]))
            continue
        for name in ("float32", "bfloat16"):
            route = describe(CallKind(primitive, group, ReduceOp.SUM, by_name[name]))
            found[f"{primitive.name} ({name})"] = route
    return found


# --- what to change -----------------------------------------------------------------------------


class Advice(NamedTuple):
    """One rule: what to advise, and when.

    wrong: whether this is an error, not a suggestion.
    texts: returns the advice, or nothing.
    """

    wrong: bool
    texts: Callable[[Seen], Sequence[str]]


def _where(seen: Seen, name: str, pattern: str) -> str:
    """Name the ranks on which a fact matches; "" for none."""
    return _ranks(
        [r for r, facts in enumerate(seen.facts) if re.search(pattern, facts.get(name, ""))]
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}" if ranks else ""


def _if(name: str, pattern: str, text: str) -> Callable[[Seen], Sequence[str]]:
    """Return a rule that gives the text where a fact matches."""

    def texts(seen: Seen) -> Sequence[str]:
        where = _where(seen, name, pattern)
        return [f"{where}: {text}"] if where else []

    return texts


def _differ(name: str) -> Callable[[Seen], Sequence[str]]:
    def texts(seen: Seen) -> Sequence[str]:
        values = {facts.get(name, "").partition(" (")[0] for facts in seen.facts}
        return [f"the ranks differ in {name}: let all run the same"] if len(values) > 1 else []

    return texts


def _misspelt(seen: Seen) -> Sequence[str]:
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(seen.misspelt):
        for text in each.values():
            found.setdefault(text, []).append(rank)
    return [f"{_ranks(ranks)}: {text}" for text, ranks in found.items()]


def _alone(seen: Seen) -> Sequence[str]:
    if seen.wrong or [facts.get("launcher") for facts in seen.facts] != ["none"]:
        return []
    return [
        "this process is alone, for no launcher started it: to see a job, start all its ranks "
        "(mpirun -n 4 python -m mpicoll doctor, or srun)"
    ]


def _no_cupy(seen: Seen) -> Sequence[str]:
    if all(own.gpus for own in seen.all_ranks) or not _where(seen, "driver", r"\d"):
        return []
    return [f"there is a driver, but {own.no_gpu}" for own in seen.all_ranks if own.no_gpu][:1]


def _not_shared(seen: Seen) -> Sequence[str]:
    if seen.shared is not False:
        return []
    if settings.SHARED_MEMORY.is_set_to("0"):
        return ["MPICOLL_SHARED_MEMORY=0 keeps the ranks from sharing memory: unset it"]
    return [
        "the ranks are on one node and do not share memory, which is several times faster: they "
        "need the C library, one user, and one container"
    ]


def _remedies(seen: Seen) -> Sequence[str]:
    """Advise how to get a better device route, where there are GPUs."""
    from mpicoll.cuda.capabilities import CudaSupport

    told = {f"{own.why}: {own.remedy}" for own in seen.all_ranks if own.remedy}
    for own in seen.all_ranks:
        tls = os.environ.get("UCX_TLS", "")
        if own.gpus and tls and not re.search("cuda|all|^\\^", tls):
            told.add(f"UCX_TLS={tls} leaves out cuda: add cuda_copy,cuda_ipc if MPI uses UCX")
    several = len({own.node for own in seen.all_ranks}) > 1
    plain = any(
        own.gpus and own.cuda is CudaSupport.NONE and not own.remedy for own in seen.all_ranks
    )
    if several and plain:
        told.add(
            "between nodes device memory goes through the host, because MPI does not take it: a "
            "CUDA-aware MPI saves the copies (your site's module, or one built with CUDA); if it "
            "is one, say so with MPICOLL_CUDA_AWARE=transfer or full"
        )
    return sorted(told)


ADVICE: tuple[Advice, ...] = (
    Advice(True, lambda seen: [seen.wrong]),
    Advice(True, _misspelt),
    Advice(True, _differ("mpicoll")),
    Advice(True, _differ("MPI")),
    Advice(
        True,
        _if(
            "C library", "does not load",
            "the C library does not load, NumPy does its work: install mpicoll again, from source "
            "(pip install --force-reinstall --no-deps --no-binary mpicoll mpicoll)",
        ),
    ),
    Advice(True, lambda seen: [seen.bad_route]),
    Advice(True, lambda seen: sorted({own.problem for own in seen.all_ranks})),
    Advice(True, _if("torch", "cannot be imported", "torch is installed and cannot be imported")),
    Advice(
        False,
        _if(
            "torch", "is not registered",
            "torch does not know the backend: import mpicoll.torch and call its register(), or "
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
    ),
    Advice(
        False,
        _if(
            "C library", "was not built",
            "NumPy does the work of the C library, and no memory is shared: install mpicoll again "
            "where there is a C compiler",
        ),
    ),
    Advice(False, _if("C library", "MPICOLL_KERNELS", "unset MPICOLL_KERNELS")),
    Advice(
        False,
        _if(
            "threads", "SINGLE|FUNNELED|SERIALIZED",
            "MPI lets one thread in at a time, and calls wait for each other: ask for "
            "MPI_THREAD_MULTIPLE, with an MPI that was built for it",
        ),
    ),
    Advice(False, _not_shared),
    Advice(False, _no_cupy),
    Advice(False, _remedies),
    Advice(False, lambda seen: seen.idle),
    Advice(False, lambda seen: find_crowded(seen.places)),
    Advice(False, lambda seen: find_small_memory(seen.places)),
    Advice(False, _alone),
)  # fmt: skip


# --- showing ------------------------------------------------------------------------------------


def _json(seen: Seen, advice: list[tuple[bool, str]]) -> str:
    report: dict[str, object] = {
        "ok": not any(bad for bad, _ in advice),
        "ranks": [
            {**facts, **({"capabilities": own.words()} if own else {})}
            for facts, own in zip(
                seen.facts, seen.all_ranks or [None] * len(seen.facts), strict=True
            )
        ],
        "routes": {"host": seen.host, "device": seen.device},
        "advice": [{"wrong": bad, "text": text} for bad, text in advice],
    }
    return json.dumps(report, indent=1)


def _text(seen: Seen, advice: list[tuple[bool, str]]) -> str:
    lines = ["Found"]
    for name in dict.fromkeys(name for facts in seen.facts for name in facts):
        lines += _fact(name, [facts.get(name, "") for facts in seen.facts])
    if seen.host:
        lines += ["", "How calls are carried out, on arrays on the host"]
        lines += [f"  {name:<34}{route}" for name, route in seen.host.items()]
        lines += ["", "and on arrays on a device"]
        lines += [f"  {name:<34}{route}" for name, route in seen.device.items()]
        if not seen.device:
            lines += ["  no rank has a GPU that can be used" if not seen.bad_route else "  ?"]
    lines += [
        "",
        "What to change" if advice else "Nothing is wrong, and there is nothing to change",
    ]
    lines += [
        textwrap.fill(
            text, 100, initial_indent="  WRONG: " if bad else "  ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )
        for bad, text in advice
    ]  # fmt: skip
    return "\n".join(lines)


def _fact(name: str, values: list[str]) -> list[str]:
    """Format a fact: one line if the ranks agree, else one for each value."""
    if len(set(values)) == 1:
        return [f"  {name:<14}{values[0]}"] if values[0] else []
    where: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        where.setdefault(value, []).append(rank)
    return [f"  {name:<14}{_ranks(ranks)}: {value}" for value, ranks in where.items()]
