"""``python -m mpicoll doctor``: report installation, routes of calls, and what to change."""

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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import cli, control_messages, machine, settings
from mpicoll.launch.launchers import find_launcher
from mpicoll.machine import format_ranges, ranks_by_value
from mpicoll.output import format_count

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup
    from mpicoll.cuda.capabilities import Capabilities

Facts = dict[str, str]
Routes = dict[str, str]

#: Free memory in /dev/shm below which MPI libraries may fail; Docker's default.
_MIN_FREE_BYTES = 64 << 20
_SHARED = "/dev/shm"


class Placement(NamedTuple):
    """Processors and memory of a rank."""

    host: str
    processors: int  # number of processors of the host
    allowed: tuple[int, ...]  # numbers of the processors on which the rank may run
    #: Size and free bytes of /dev/shm, or None.
    shared: int | None
    free: int | None
    threads: str = ""  # OMP_NUM_THREADS, or ""

    @classmethod
    def find(cls) -> Placement:
        """Return the placement of this process."""
        shared = free = None
        with suppress(OSError):
            found = os.statvfs(_SHARED)
            shared, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        allowed = tuple(sorted(os.sched_getaffinity(0)))
        processors = max(os.cpu_count() or 1, len(allowed))
        threads = os.environ.get("OMP_NUM_THREADS", "")
        return cls(socket.gethostname(), processors, allowed, shared, free, threads)


@dataclass
class Findings:
    """Findings of all ranks. Lists are indexed by rank, except idle."""

    facts: list[Facts]  # facts of each rank
    problem: str = ""  # error of init_process_group, or ""
    all_ranks: tuple[Capabilities, ...] = ()  # capabilities of each rank
    #: Lines about GPUs that are idle while other GPUs are shared.
    idle: list[str] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)  # processors and memory of each rank
    #: Invalid settings, with their errors.
    misspelled: list[dict[str, str]] = field(default_factory=list)
    bad_route: str = ""  # error of MPICOLL_DEVICE_ROUTE or MPICOLL_CUDA_AWARE, or ""
    #: Whether all_reduce uses shared memory; None if unknown or on several nodes.
    shared: bool | None = None
    #: Reason why a rank cannot copy from the memory of other ranks, or "".
    no_single_copy: list[str] = field(default_factory=list)
    host: Routes = field(default_factory=dict)  # routes of host arrays, by primitive
    #: Measured durations of the ways through shared memory, by call.
    ways: Routes = field(default_factory=dict)
    device: Routes = field(default_factory=dict)  # routes of device arrays, by primitive
    #: Reasons why device routes are not used, by name; "" if used.
    off: Routes = field(default_factory=dict)
    far: list[list[str]] = field(default_factory=list)  # warnings about processors far from a GPU


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --again."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--again", action="store_true", help="repeat the tests of device memory, ignoring the cache"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report on rank 0; return 0, or 1 if there is an error."""
    # Read these before init_process_group, which sets variables and rejects misspelled ones.
    in_use = "; ".join(f"{name}={value}" for name, value in settings.list_set().items())
    launcher = find_launcher()
    before = {"launcher": launcher.name if launcher else "none", "settings": in_use or "none"}
    misspelled = settings.find_problems()
    for name in misspelled:
        del os.environ[name]
    problem = cli.start_group()
    if problem:
        prints = cli.is_first_rank()
        facts = _describe_process() | before | {"torch": _describe_torch()}
        findings = Findings([facts], problem=problem, misspelled=[misspelled])
    else:
        prints, findings = _examine(before, misspelled, options.again)
    advice = advise(findings)
    if prints:
        print((_to_json if options.json else _to_text)(findings, advice), flush=True)
    return int(any(is_error for is_error, _ in advice))


# --- the report ---------------------------------------------------------------------------------


def _to_json(findings: Findings, advice: list[tuple[bool, str]]) -> str:
    all_ranks = findings.all_ranks or [None] * len(findings.facts)
    report: dict[str, object] = {
        "ok": not any(is_error for is_error, _ in advice),
        "ranks": [
            {**facts, **({"capabilities": own._asdict()} if own else {})}
            for facts, own in zip(findings.facts, all_ranks, strict=True)
        ],
        "routes": {
            "host": findings.host,
            "ways": findings.ways,
            "device": findings.device,
            "off": {name: why for name, why in findings.off.items() if why},
        },
        "advice": [{"wrong": is_error, "text": text} for is_error, text in advice],
    }
    return json.dumps(report, indent=1)


def _to_text(findings: Findings, advice: list[tuple[bool, str]]) -> str:
    lines = ["Found"]
    for name in dict.fromkeys(name for facts in findings.facts for name in facts):
        values = [facts.get(name, "") for facts in findings.facts]
        texts = _by_text([[value] for value in values]) if len({*values}) > 1 else values[:1]
        lines += [f"  {name:<14}{text}" for text in texts if text]
    if findings.host:
        lines += ["", "Routes of host arrays"]
        lines += [f"  {name:<34}{route}" for name, route in findings.host.items()]
        if findings.ways:
            lines += ["", "Ways through shared memory, measured, the fastest first"]
            lines += [f"  {name:<34}{ways}" for name, ways in findings.ways.items()]
        lines += ["", "Routes of device arrays"]
        lines += [f"  {name:<34}{route}" for name, route in findings.device.items()]
        if not findings.device:
            lines += ["  no rank has a usable GPU" if not findings.bad_route else "  ?"]
        else:
            lines += ["", "Device routes, best first", *_list_device_routes(findings)]
    lines += ["", "What to change" if advice else "No problems found"]
    lines += [_wrap(text, 100, "  WRONG: " if wrong else "  ", 4) for wrong, text in advice]
    return "\n".join(lines)


def _wrap(text: str, width: int, first: str, indent: int) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _list_device_routes(findings: Findings) -> list[str]:
    """Return a line for each device route: whether it is used, and how long the host waits."""
    from mpicoll.routes.registry import DEVICE

    lines = []
    for name, why in findings.off.items():
        waits = DEVICE[name].policy.host_waits_for
        text = "used" if waits is None else f"used; the host waits {waits or 'for nothing'}"
        lines.append(_wrap(f"{name:<13}{f'not used: {why}' if why else text}", 110, "  ", 15))
    return lines


def _by_text(texts_of_ranks: Sequence[Iterable[str]]) -> list[str]:
    """Return each text once, with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, texts in enumerate(texts_of_ranks):
        for text in filter(None, texts):
            found.setdefault(text, []).append(rank)
    return [f"{_name_ranks(ranks)}: {text}" for text, ranks in found.items()]


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0,2-4"."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


def _format_bytes(count: int) -> str:
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:.3g} {name}"


# --- findings -----------------------------------------------------------------------------------


def _examine(before: Facts, misspelled: dict[str, str], again: bool) -> tuple[bool, Findings]:
    """Collect the findings of all ranks. Returns whether this is rank 0, and the findings."""
    import mpicoll as dist
    from mpicoll.core.groups import default_group
    from mpicoll.cuda import binding
    from mpicoll.cuda.capabilities import exchange
    from mpicoll.errors import MpicollError
    from mpicoll.primitives import PRIMITIVES, Layout
    from mpicoll.routes.device import eligibility
    from mpicoll.routes.registry import DEVICE

    group, me = default_group(), dist.get_rank()
    comm, findings = group.inner, Findings([])
    names: tuple[str, ...] = ()
    far: list[str] = []
    try:
        findings.all_ranks = exchange(comm, probes=True, again=again)
        index = binding.device_for(dist.get_node_local_rank(), len(findings.all_ranks[me].gpus))
        used = control_messages.allgather(comm, index, int | None)
        findings.all_ranks = eligibility.with_used(findings.all_ranks, used)
        findings.idle = list(binding.describe_idle_gpus(findings.all_ranks, used).values())
        far = binding.describe_far_gpu(findings.all_ranks[me], index)
        forced = eligibility.forced_route(findings.all_ranks)
        names = eligibility.eligible_routes(findings.all_ranks, forced)
        findings.off = eligibility.describe_routes(names, findings.all_ranks, forced)
        if None not in used:
            names, findings.off = _try_device_routes(group, index or 0)
    except MpicollError as error:  # the same on all ranks
        findings.bad_route = str(error)
    findings.host = _describe_host_routes(group)
    if group.size() > 1 and len({own.node for own in findings.all_ranks}) == 1:
        findings.shared = bool(group.resources.find("shared"))
        findings.ways = _measure_ways(group)
    if any(own.gpus for own in findings.all_ranks) and names:
        findings.device = {
            row.name: next((n for n in names if row.name in DEVICE[n].serves.primitives), "refused")
            for row in PRIMITIVES
            if row.layout is not Layout.EMPTY
        }
    facts = _describe_process() | before | _describe_mpi(findings, me)
    # By rank 0 only, because importing torch is slow.
    torch = control_messages.bcast(comm, _describe_torch() if me == 0 else "", 0, str)
    if torch.startswith(facts["torch"]):
        facts["torch"] = torch
    shared = group.resources.find("shared")
    own = facts, Placement.find(), misspelled, far, shared.no_single_copy if shared else ""
    gathered = control_messages.allgather(
        comm, own, tuple[Facts, Placement, dict[str, str], list[str], str]
    )
    (
        findings.facts, findings.placements, findings.misspelled, findings.far,
        findings.no_single_copy,
    ) = map(list, zip(*gathered, strict=True))  # fmt: skip
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
    problems = _by_text([[each] for each in control_messages.allgather(group.inner, problem, str)])
    if problems:
        raise DistBackendError("; ".join(problems))
    assert context is not None
    agreed = agree(group, context)
    return agreed.names, agreed.describe()


def _describe_process() -> Facts:
    """Return facts that need no MPI."""
    import mpicoll
    from mpicoll.kernels import library

    name, place = platform.system(), Placement.find()
    with suppress(OSError):
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    return {
        "host": place.host,
        "system": f"{name}, {platform.system()} {platform.release()} {platform.machine()}",
        "processors": machine.describe(),
        "may run on": f"{len(place.allowed)} of them: {format_ranges(place.allowed)}",
        _SHARED: "none" if place.shared is None else _format_bytes(place.shared),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "mpicoll": f"{mpicoll.__version__} ({Path(mpicoll.__file__).parent})",
        "settings": "",
        "mpi4py": _find_version("mpi4py"),
        "MPI": "not running",
        "launcher": "",
        "ranks": "",
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
    gpus = zip(own.names, own.gpus, strict=True)
    return facts | {
        "MPI": f"{own.vendor} {own.version} ({own.library})",
        "ranks": f"{len(findings.all_ranks)} on {nodes} node{'s' * (nodes > 1)}",
        "GPUs": "; ".join(f"{i}: {name} ({gpu})" for i, (name, gpu) in enumerate(gpus))
        or f"none: {own.no_gpu}",
        "CUDA in MPI": f"{'yes' if own.cuda else 'no'} ({own.why})",
    }


def _find_version(*names: str) -> str:
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def _describe_torch() -> str:
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
    for row in PRIMITIVES:
        for dtype in ("float32", "bfloat16") if row.reduces else ("float32",):
            name = f"{row.name} ({dtype})" if row.reduces else row.name
            op = ReduceOp.SUM if row.reduces else None
            found[name] = describe(CallKind(row, group, op, by_name[dtype]))
    return found


def _measure_ways(group: ProcessGroup) -> Routes:
    """Make calls of several sizes until their ways are chosen; return the durations."""
    import numpy as np

    import mpicoll as dist

    for nbytes in (16 << 10, 256 << 10, 4 << 20):
        whole = np.zeros(nbytes, np.uint8).view(np.float32)
        block = whole[: whole.size // group.size()].copy()
        for _ in range(_CHOICE_CALLS):
            dist.all_reduce(whole)
            dist.all_gather_single(whole[: block.size * group.size()], block)
    shared = group.resources.find("shared")
    return shared.ways.describe() if shared else {}


#: Number of calls after which a way is chosen (``kernels/src/choice.c``), and its result exchanged:
#: the first, two of each candidate, and the next.
_CHOICE_CALLS = 16

# --- advice -------------------------------------------------------------------------------------

_BIND = "bind each to a processor (mpirun --bind-to core, srun --cpu-bind=cores)"

#: Advice on facts: whether it is an error, the fact, a pattern, and the text.
_ON_FACTS = (
    (True, "C library", "does not load",
     "the C library does not load, and NumPy replaces it: install mpicoll again, from source (pip "
     "install --force-reinstall --no-deps . in its folder)"),
    (True, "torch", "cannot be imported", "torch is installed but cannot be imported"),
    (False, "torch", "is not registered",
     "the backend is not registered with torch: import mpicoll.torch and call its register(), or "
     "unset TORCH_DEVICE_BACKEND_AUTOLOAD"),
    (False, "C library", "was not built",
     "NumPy replaces the C library, and no memory is shared: install mpicoll again with a C "
     "compiler"),
    (False, "C library", "MPICOLL_KERNELS", "unset MPICOLL_KERNELS"),
    (False, "threads", "SINGLE|FUNNELED|SERIALIZED",
     "MPI allows one thread at a time, so calls wait for each other: use an MPI that supports "
     "MPI_THREAD_MULTIPLE"),
)  # fmt: skip


def advise(findings: Findings) -> list[tuple[bool, str]]:
    """Return the advice, errors first: whether it is an error, and the text."""
    errors = [(True, text) for text in _find_errors(findings) if text]
    return [*errors, *((False, text) for text in _suggest(findings))]


def _find_errors(findings: Findings) -> Iterator[str]:
    yield findings.problem
    yield from _by_text([each.values() for each in findings.misspelled])
    for name in ("mpicoll", "MPI"):
        if len({facts.get(name, "").partition(" (")[0] for facts in findings.facts}) > 1:
            yield f"{name} differs between ranks: use the same on all"
    yield from _advise_on_facts(findings, True)
    yield findings.bad_route
    yield from sorted({own.problem for own in findings.all_ranks})


def _suggest(findings: Findings) -> Iterator[str]:
    yield from _advise_on_facts(findings, False)
    if findings.shared is False:
        if settings.SHARED_MEMORY.is_set_to("0"):
            yield "MPICOLL_SHARED_MEMORY=0 disables shared memory: unset it"
        else:
            yield (
                "the ranks are on one node but do not share memory, which is several times faster: "
                "they need the C library, one user, and one container"
            )
    reasons = "; ".join(_by_text([[why] for why in findings.no_single_copy]))
    if findings.shared and reasons:
        remedy = (
            "the node must allow process_vm_readv and process_vm_writev between processes of one "
            "user: kernel.yama.ptrace_scope=0 (sysctl), and in a container no seccomp filter "
            "against them (docker run --cap-add=SYS_PTRACE) and one PID namespace"
        )
        if settings.SINGLE_COPY.name in reasons:
            remedy = f"unset {settings.SINGLE_COPY.name}"
        yield (
            "large messages without a reduction are copied twice instead of once "
            f"({reasons}): {remedy}"
        )
    missing = [own.no_gpu for own in findings.all_ranks if not own.gpus and own.no_gpu]
    if missing and any(re.search(r"\d", facts.get("driver", "")) for facts in findings.facts):
        yield f"a driver is installed, but {missing[0]}"
    yield from _advise_on_device_routes(findings.all_ranks)
    yield from findings.idle
    yield from _by_text(findings.far)
    yield from _advise_on_hosts(findings.placements)
    unbound = _find_unbound(findings.placements)
    if unbound:
        yield (
            f"{_name_ranks(unbound)}: not bound to processors, so they may move away from the "
            "contents of their caches, and to processors without a common cache, where calls "
            f"through shared memory take longer: {_BIND}"
        )
    if not findings.problem and [facts.get("launcher") for facts in findings.facts] == ["none"]:
        yield (
            "this process is the only rank, because no launcher started it: to examine a job, "
            "start all its ranks (mpirun -n 4 python -m mpicoll doctor, or srun)"
        )


def _advise_on_facts(findings: Findings, errors: bool) -> Iterator[str]:
    for is_error, name, pattern, text in _ON_FACTS:
        if is_error is errors:
            matches = [re.search(pattern, facts.get(name, "")) for facts in findings.facts]
            yield from _by_text([[text] if match else [] for match in matches])


def _advise_on_device_routes(all_ranks: Sequence[Capabilities]) -> list[str]:
    """Advise how to get a better device route."""
    remedies = {f"{own.why}: {own.remedy}" for own in all_ranks if own.remedy}
    tls = os.environ.get("UCX_TLS", "")
    if any(own.gpus for own in all_ranks) and tls and not re.search(r"cuda|all|^\^", tls):
        remedies.add(f"UCX_TLS={tls} excludes cuda: add cuda_copy,cuda_ipc if MPI uses UCX")
    several = len({own.node for own in all_ranks}) > 1
    plain = any(own.gpus and not own.cuda and not own.remedy for own in all_ranks)
    if several and plain:
        remedies.add(
            "between nodes, device memory is copied through the host, because MPI does not support "
            "it: a CUDA-aware MPI avoids the copies (a module of your site, or a build with CUDA); "
            "if MPI is CUDA-aware, set MPICOLL_CUDA_AWARE=1"
        )
    return sorted(remedies)


def _advise_on_hosts(placements: Sequence[Placement]) -> list[str]:
    """Return advice on the hosts: each text once, with the names of its hosts."""
    found: dict[str, list[str]] = {}
    for host, ranks in ranks_by_value(each.host for each in placements).items():
        own = [placements[rank] for rank in ranks]
        for check in (_check_crowd, _check_threads, _check_memory):
            found.setdefault(check(own), []).append(host)
    found.pop("", None)
    return [
        text.format(host=f"{names[0]} (and {len(names) - 1} more)" if names[1:] else names[0])
        for text, names in found.items()
    ]


def _check_crowd(ranks: Sequence[Placement]) -> str:
    """Check for more ranks of a host than processors, or than allowed processors."""
    n, count = len(ranks), ranks[0].processors
    processors = format_count(count, "processor")
    effect = "they share processors, and calls take many times longer"
    if n > count:
        return (
            f"{n} ranks on {{host}}, which has {processors}: {effect}. Start at most "
            f"{count} there (mpirun -n {count}), or use more nodes"
        )
    sets = [set(each.allowed) for each in ranks]
    worst, few = 0, set[int]()
    for one in [*sets, set[int]().union(*sets)]:
        users = sum(each <= one for each in sets)
        if users - len(one) > worst - len(few):
            worst, few = users, one
    if not worst:
        return ""
    return (
        f"{worst} ranks on {{host}} may only run on {len(few)} of its {processors} "
        f"({format_ranges(few)}): {effect}. Bind each to its own (mpirun --bind-to core, srun "
        "--cpu-bind=cores), leave them unbound (mpirun --bind-to none), or request more from the "
        "batch system"
    )


def _check_threads(ranks: Sequence[Placement]) -> str:
    """Check for a host without OMP_NUM_THREADS, where libraries start too many threads."""
    threads = sum(len(each.allowed) for each in ranks if not each.threads)
    processors = len(set[int]().union(*(each.allowed for each in ranks)))
    if threads <= processors:
        return ""
    return (
        "OMP_NUM_THREADS is not set: in each rank on {host}, NumPy and PyTorch may start a "
        f"thread for every processor, {threads} threads on "
        f"{format_count(processors, 'processor')}. Set it: export OMP_NUM_THREADS="
        f"{max(1, processors // len(ranks))}"
    )


def _check_memory(ranks: Sequence[Placement]) -> str:
    """Check for so little memory in /dev/shm that MPI may fail."""
    free = [each.free for each in ranks if each.free is not None]
    if not free or min(free) > _MIN_FREE_BYTES:
        return ""
    return (
        f"{_SHARED} on {{host}} has {_format_bytes(min(free))} left: MPI libraries store messages "
        "there, and a rank dies of SIGBUS when it is full. Increase its size (docker run "
        f"--shm-size=1g, or --ipc=host; mount -o remount,size=1g {_SHARED})"
    )


def _find_unbound(placements: Sequence[Placement]) -> list[int]:
    """Return the ranks that may move between processors that other ranks may also use.

    Skips hosts with more ranks than processors, where binding does not help.
    """
    unbound = []
    for ranks in ranks_by_value(each.host for each in placements).values():
        if _check_crowd([placements[rank] for rank in ranks]):
            continue
        users = Counter(number for rank in ranks for number in placements[rank].allowed)
        unbound += [
            rank
            for rank in ranks
            if len(placements[rank].allowed) > 1
            and any(users[number] > 1 for number in placements[rank].allowed)
        ]
    return sorted(unbound)
