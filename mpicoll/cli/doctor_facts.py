"""Findings of ``python -m mpicoll doctor``: facts of each rank, and routes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mpicoll import cli, control_messages, settings
from mpicoll.cli.distance import Pair, measure_pairs
from mpicoll.cli.doctor_machine import (
    Placement,
    describe_distance,
    describe_gpudirect,
    describe_memory,
    describe_system,
    find_moving,
)
from mpicoll.launch.host_identity import node

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup
    from mpicoll.cuda.capabilities import Capabilities

__all__ = [
    "Facts",
    "Findings",
    "describe_process",
    "describe_settings",
    "describe_torch",
    "examine",
    "name_launcher",
]

Facts = dict[str, str]
Routes = dict[str, str]


@dataclass
class Findings:
    """Findings of all ranks. Lists are indexed by rank, except idle.

    facts:      facts of each rank.
    problem:    error of init_process_group, or "".
    all_ranks:  capabilities of each rank.
    idle:       lines about GPUs that are idle while other GPUs are shared.
    placements: processors and memory of each rank.
    misspelled: invalid settings, with their errors.
    bad_route:  error of MPICOLL_DEVICE_ROUTE or MPICOLL_CUDA_AWARE, or "".
    moving:     ranks that move between near and far processors.
    shared:     whether all_reduce uses shared memory; None if unknown or on several nodes.
    no_single_copy: reason why a rank cannot copy from the memory of other ranks, or "".
    host, device: routes of host and device arrays, by primitive.
    off:        reasons why device routes are not used, by name; "" if used.
    far:        warnings about processors far from a GPU.
    """

    facts: list[Facts]
    problem: str = ""
    all_ranks: tuple[Capabilities, ...] = ()
    idle: list[str] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    misspelled: list[dict[str, str]] = field(default_factory=list)
    bad_route: str = ""
    moving: set[int] = field(default_factory=set)
    shared: bool | None = None
    no_single_copy: list[str] = field(default_factory=list)
    host: Routes = field(default_factory=dict)
    device: Routes = field(default_factory=dict)
    off: Routes = field(default_factory=dict)
    far: list[list[str]] = field(default_factory=list)


def examine(before: Facts, misspelled: dict[str, str], again: bool) -> tuple[bool, Findings]:
    """Collect the findings of all ranks. Returns whether this is rank 0, and the findings."""
    import mpicoll as dist
    from mpicoll.core.groups import default_group
    from mpicoll.cuda import binding
    from mpicoll.cuda.capabilities import exchange
    from mpicoll.errors import MpicollError
    from mpicoll.primitives import PRIMITIVES, Layout
    from mpicoll.routes.device.eligibility import (
        describe_routes,
        eligible_routes,
        forced_route,
        with_used,
    )
    from mpicoll.routes.host import single_copy
    from mpicoll.routes.registry import DEVICE

    group, n, me = default_group(), dist.get_world_size(), dist.get_rank()
    findings = Findings([])
    names: tuple[str, ...] = ()
    try:
        findings.all_ranks = exchange(group.inner, probes=True, again=again)
        local = control_messages.allgather(group.inner, dist.get_node_local_rank(), int)
        used = [
            binding.device_for(rank, len(own.gpus))
            for rank, own in zip(local, findings.all_ranks, strict=True)
        ]
        findings.all_ranks = with_used(findings.all_ranks, used)
        findings.idle = list(binding.describe_idle_gpus(findings.all_ranks, used).values())
        index = used[me]
        own = findings.all_ranks[me]
        far = [] if index is None else binding.describe_far_gpu(own, index, os.sched_getaffinity(0))
        findings.far = control_messages.allgather(group.inner, far, list[str])
        forced = forced_route(findings.all_ranks)
        names = eligible_routes(findings.all_ranks, forced)
        findings.off = describe_routes(names, findings.all_ranks, forced)
        if None not in used:
            names, findings.off = _try_device_routes(group, index or 0)
    except MpicollError as error:  # the same on all ranks
        findings.bad_route = str(error)
    findings.host = _describe_host_routes(group)
    if n > 1 and len({own.node for own in findings.all_ranks}) == 1:
        findings.shared = bool(group.resources.find("shared"))
    findings.no_single_copy = control_messages.allgather(
        group.inner, single_copy.find_obstacle(group), str
    )
    if any(own.gpus for own in findings.all_ranks) and names:
        findings.device = {
            row.name: next((n for n in names if row.name in DEVICE[n].serves.primitives), "refused")
            for row in PRIMITIVES
            if row.layout is not Layout.EMPTY
        }
    facts = describe_process() | before | _describe_mpi(findings, me)
    pairs = _measure_distances(group.inner)
    facts["distance"] = describe_distance(pairs)
    findings.moving = set().union(
        *control_messages.allgather(group.inner, find_moving(pairs), set[int])
    )
    torch = control_messages.bcast(  # by rank 0 only, because importing torch is slow
        group.inner, describe_torch() if me == 0 else "", 0, str
    )
    if torch.startswith(facts["torch"]):
        facts["torch"] = torch
    gathered = control_messages.allgather(
        group.inner, (facts, Placement.find(), misspelled), tuple[Facts, Placement, dict[str, str]]
    )
    findings.facts, findings.placements, findings.misspelled = map(
        list, zip(*gathered, strict=True)
    )
    for each, shared in zip(findings.facts, describe_memory(findings.placements), strict=True):
        each["/dev/shm"] = shared
    cli.end_group()
    return me == 0, findings


def _try_device_routes(group: ProcessGroup, index: int) -> tuple[tuple[str, ...], Routes]:
    """Negotiate device routes as a first call does. Returns them, and reasons against others."""
    from mpicoll.cuda.runtime import get_runtime
    from mpicoll.cuda.streams import DeviceContext
    from mpicoll.errors import DistBackendError
    from mpicoll.routes.device.select import agree

    context, problem = None, ""
    try:
        context = group.resources.get_or_create(
            "doctor", lambda: DeviceContext(get_runtime(), index), DeviceContext.close
        )
    except Exception as error:  # any error of CUDA
        problem = f"GPU {index} cannot be used: {error}"
    problems = control_messages.allgather(group.inner, problem, str)
    for rank, problem in enumerate(problems):
        if problem:
            raise DistBackendError(f"rank {rank}: {problem}")
    assert context is not None
    agreed = agree(group, context)
    return agreed.names, agreed.describe()


def _measure_distances(comm: MPI.Intracomm) -> list[Pair] | str:
    """Return the measured pairs of ranks on this node, or the reason why there are none.

    All ranks call it.
    """
    nodes = control_messages.allgather(comm, node(), str)
    own = nodes[comm.Get_rank()]
    ranks = [rank for rank, name in enumerate(nodes) if name == own]
    here = cast("MPI.Intracomm", comm.Split(nodes.index(own)))
    pairs = control_messages.bcast(here, measure_pairs(here), 0, str | list[Pair])
    here.Free()
    if isinstance(pairs, str):
        return pairs
    return [pair._replace(ranks=(ranks[pair.ranks[0]], ranks[pair.ranks[1]])) for pair in pairs]


def describe_process() -> Facts:
    """Return facts that need no MPI."""
    import mpicoll
    from mpicoll.kernels import library

    return {
        "host": socket.gethostname(),
        **describe_system(),
        "/dev/shm": describe_memory([Placement.find()])[0],
        "Python": f"{platform.python_version()} ({sys.executable})",
        "mpicoll": f"{mpicoll.__version__} ({Path(mpicoll.__file__).parent})",
        "settings": "",
        "mpi4py": _find_version("mpi4py"),
        "MPI": "not running",
        "launcher": "",
        "ranks": "",
        "distance": "",
        "threads": "",
        "NumPy": _find_version("numpy"),
        "ml_dtypes": _find_version("ml_dtypes"),
        "C library": library.describe(),
        "torch": _find_version("torch"),
        "CuPy": _find_version("cupy", "cupy-cuda13x", "cupy-cuda12x"),
        "driver": _find_driver(),
    }


def _describe_mpi(findings: Findings, me: int) -> Facts:
    """Return facts that need MPI."""
    from mpi4py import MPI

    from mpicoll.routes import tuning

    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    level = next(name for name in levels if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread())
    facts = {"threads": f"MPI_THREAD_{level}", "routes": tuning.job.table.describe()}
    if not findings.all_ranks:
        return facts
    own, nodes = findings.all_ranks[me], len({each.node for each in findings.all_ranks})
    n = len(findings.all_ranks)
    gpus = zip(own.names, own.gpus, strict=True)
    return facts | {
        "MPI": f"{own.vendor} {own.version} ({own.library})",
        "ranks": f"{n} on {nodes} node{'s' * (nodes > 1)}",
        "GPUs": "; ".join(f"{i}: {name} ({gpu})" for i, (name, gpu) in enumerate(gpus))
        or f"none: {own.no_gpu}",
        "CUDA in MPI": f"{own.cuda.name.lower()} ({own.why})",
        "GPUDirect": describe_gpudirect() if own.gpus else "",
    }


def name_launcher() -> str:
    """Return the name of the launcher of this process, or "none"."""
    from mpicoll import launch

    launcher = launch.find_launcher()
    return "none" if launcher is None else launcher.name


def describe_settings() -> str:
    """Return the settings in the environment."""
    found = settings.list_set().items()
    return "; ".join(f"{name}={value}" for name, value in found) or "none"


def _find_version(*names: str) -> str:
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def describe_torch() -> str:
    """Return the version of torch, and whether the backend is registered."""
    version = _find_version("torch")
    if version == "none":
        return version
    try:
        from torch.distributed import Backend
    except Exception as error:
        return f"{version}, cannot be imported: {error}"
    served = "is" if hasattr(Backend, "MPICOLL") else "is not"
    return f"{version}; the backend mpicoll {served} registered"


def _find_driver() -> str:
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"Kernel Module\D*([\d.]+)", text)
        return found[1] if found else text.partition("\n")[0]
    return "none"


def _describe_host_routes(group: ProcessGroup) -> Routes:
    """Return the routes of host arrays by primitive; of reductions for float32 and bfloat16."""
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
