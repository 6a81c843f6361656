"""``python -m mpicoll doctor``: report installation, routes of calls, and what to change."""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpicoll import cli, settings
from mpicoll.cli.doctor_facts import (
    Findings,
    describe_process,
    describe_settings,
    describe_torch,
    examine,
    name_launcher,
)
from mpicoll.cli.doctor_machine import (
    find_crowded,
    find_small_memory,
    find_thread_excess,
    find_unbound,
    name_ranks,
)

__all__ = ["ADVICE", "add_arguments", "advise", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --again."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--again", action="store_true", help="repeat the tests of device memory, ignoring the cache"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report on rank 0; return 0, or 1 if there is an error."""
    # Read these before init_process_group, which sets variables and rejects misspelled ones.
    before = {"launcher": name_launcher(), "settings": describe_settings()}
    misspelled = settings.find_problems()
    for name in misspelled:
        del os.environ[name]
    problem = cli.start_group()
    if problem:
        prints = cli.is_first_rank()
        facts = describe_process() | before | {"torch": describe_torch()}
        findings = Findings([facts], problem=problem, misspelled=[misspelled])
    else:
        prints, findings = examine(before, misspelled, options.again)
    advice = advise(findings)
    if prints:
        report = _json if options.json else _text
        print(report(findings, advice), flush=True)
    return int(any(is_error for is_error, _ in advice))


def _json(findings: Findings, advice: list[tuple[bool, str]]) -> str:
    all_ranks = findings.all_ranks or [None] * len(findings.facts)
    report: dict[str, object] = {
        "ok": not any(is_error for is_error, _ in advice),
        "ranks": [
            {**facts, **({"capabilities": own.words()} if own else {})}
            for facts, own in zip(findings.facts, all_ranks, strict=True)
        ],
        "routes": {
            "host": findings.host,
            "device": findings.device,
            "off": {name: why for name, why in findings.off.items() if why},
        },
        "advice": [{"wrong": is_error, "text": text} for is_error, text in advice],
    }
    return json.dumps(report, indent=1)


def _text(findings: Findings, advice: list[tuple[bool, str]]) -> str:
    lines = ["Found"]
    for name in dict.fromkeys(name for facts in findings.facts for name in facts):
        lines += _fact(name, [facts.get(name, "") for facts in findings.facts])
    if findings.host:
        lines += ["", "Routes of host arrays"]
        lines += [f"  {name:<34}{route}" for name, route in findings.host.items()]
        lines += ["", "Routes of device arrays"]
        lines += [f"  {name:<34}{route}" for name, route in findings.device.items()]
        if not findings.device:
            lines += ["  no rank has a usable GPU" if not findings.bad_route else "  ?"]
        else:
            lines += ["", "Device routes, best first"]
            lines += _device_routes(findings)
    lines += ["", "What to change" if advice else "No problems found"]
    for is_error, text in advice:
        lines.append(_wrap(text, 100, "  WRONG: " if is_error else "  ", 4))
    return "\n".join(lines)


def _wrap(text: str, width: int, first: str, indent: int) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _device_routes(findings: Findings) -> list[str]:
    """Return a line for each device route: whether it is used, and how long the host waits."""
    from mpicoll.routes.registry import DEVICE

    lines = []
    for name, why in findings.off.items():
        waits = DEVICE[name].policy.host_waits_for
        text = "used" if waits is None else f"used; the host waits {waits or 'for nothing'}"
        if why:
            text = f"not used: {why}"
        lines.append(_wrap(f"{name:<13}{text}", 110, "  ", 15))
    return lines


def _fact(name: str, values: list[str]) -> list[str]:
    """Return one line if the ranks agree, else one for each value."""
    if len(set(values)) == 1:
        return [f"  {name:<14}{values[0]}"] if values[0] else []
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(value, []).append(rank)
    return [f"  {name:<14}{name_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items()]


# --- advice -------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """One rule.

    is_error: an error, not a suggestion.
    texts:    returns the advice, or nothing.
    """

    is_error: bool
    texts: Callable[[Findings], Sequence[str]]


def _ranks_with(findings: Findings, name: str, pattern: str) -> str:
    """Return the ranks on which a fact matches, or ""."""
    return name_ranks(
        [r for r, facts in enumerate(findings.facts) if re.search(pattern, facts.get(name, ""))]
    )


def _if(name: str, pattern: str, text: str) -> Callable[[Findings], Sequence[str]]:
    """Return a rule that returns the text if a fact matches."""

    def texts(findings: Findings) -> Sequence[str]:
        ranks = _ranks_with(findings, name, pattern)
        return [f"{ranks}: {text}"] if ranks else []

    return texts


def _differ(name: str) -> Callable[[Findings], Sequence[str]]:
    def texts(findings: Findings) -> Sequence[str]:
        values = {facts.get(name, "").partition(" (")[0] for facts in findings.facts}
        return [f"{name} differs between ranks: use the same on all"] if len(values) > 1 else []

    return texts


def _by_text(texts_of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return each text once, with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, texts in enumerate(texts_of_ranks):
        for text in filter(None, texts):
            found.setdefault(text, []).append(rank)
    return [f"{name_ranks(ranks)}: {text}" for text, ranks in found.items()]


def _alone(findings: Findings) -> Sequence[str]:
    if findings.problem or [facts.get("launcher") for facts in findings.facts] != ["none"]:
        return []
    return [
        "this process is the only rank, because no launcher started it: to examine a job, start "
        "all its ranks (mpirun -n 4 python -m mpicoll doctor, or srun)"
    ]


def _no_cupy(findings: Findings) -> Sequence[str]:
    all_ranks = findings.all_ranks
    if all(own.gpus for own in all_ranks) or not _ranks_with(findings, "driver", r"\d"):
        return []
    return [f"a driver is installed, but {own.no_gpu}" for own in all_ranks if own.no_gpu][:1]


def _not_shared(findings: Findings) -> Sequence[str]:
    if findings.shared is not False:
        return []
    if settings.SHARED_MEMORY.is_set_to("0"):
        return ["MPICOLL_SHARED_MEMORY=0 disables shared memory: unset it"]
    return [
        "the ranks are on one node but do not share memory, which is several times faster: they "
        "need the C library, one user, and one container"
    ]


def _not_copied(findings: Findings) -> Sequence[str]:
    reasons = _by_text([[why] for why in findings.no_single_copy])
    if not findings.shared or not reasons:
        return []
    if any(settings.SINGLE_COPY.name in reason for reason in reasons):
        remedy = f"unset {settings.SINGLE_COPY.name}"
    else:
        remedy = (
            "the node must allow process_vm_readv and process_vm_writev between processes of one "
            "user: kernel.yama.ptrace_scope=0 (sysctl), and in a container no seccomp filter "
            "against them (docker run --cap-add=SYS_PTRACE) and one PID namespace"
        )
    return [
        "large messages without a reduction are copied twice instead of once "
        f"({'; '.join(reasons)}): {remedy}"
    ]


_BIND = "bind each to a processor (mpirun --bind-to core, srun --cpu-bind=cores)"


def _unbound(findings: Findings) -> Sequence[str]:
    """Advise to bind ranks: first the ranks that moved during the measurement."""
    moving = [r for r in sorted(findings.moving) if len(findings.placements[r].allowed) > 1]
    others = [rank for rank in find_unbound(findings.placements) if rank not in moving]
    advice = []
    if moving:
        advice.append(
            f"{name_ranks(moving)}: they move between near and far processors, and calls through "
            f"shared memory take longer between far ones: {_BIND}; processors of a virtual machine "
            "may still move"
        )
    if others:
        advice.append(
            f"{name_ranks(others)}: not bound to processors, so they may move and lose the "
            f"contents of their caches: {_BIND}"
        )
    return advice


def _remedies(findings: Findings) -> Sequence[str]:
    """Advise how to get a better device route."""
    from mpicoll.cuda.capabilities import CudaSupport

    all_ranks = findings.all_ranks
    remedies = {f"{own.why}: {own.remedy}" for own in all_ranks if own.remedy}
    for own in all_ranks:
        tls = os.environ.get("UCX_TLS", "")
        if own.gpus and tls and not re.search(r"cuda|all|^\^", tls):
            remedies.add(f"UCX_TLS={tls} excludes cuda: add cuda_copy,cuda_ipc if MPI uses UCX")
    several = len({own.node for own in all_ranks}) > 1
    plain = any(own.gpus and own.cuda is CudaSupport.NONE and not own.remedy for own in all_ranks)
    if several and plain:
        remedies.add(
            "between nodes, device memory is copied through the host, because MPI does not support "
            "it: a CUDA-aware MPI avoids the copies (a module of your site, or a build with CUDA); "
            "if MPI is CUDA-aware, set MPICOLL_CUDA_AWARE=transfer or full"
        )
    return sorted(remedies)


ADVICE: tuple[Advice, ...] = (
    Advice(True, lambda findings: [findings.problem]),
    Advice(True, lambda findings: _by_text([[*each.values()] for each in findings.misspelled])),
    Advice(True, _differ("mpicoll")),
    Advice(True, _differ("MPI")),
    Advice(
        True,
        _if(
            "C library", "does not load",
            "the C library does not load, and NumPy replaces it: install mpicoll again, from "
            "source (pip install --force-reinstall --no-deps . in its folder)",
        ),
    ),
    Advice(True, lambda findings: [findings.bad_route]),
    Advice(True, lambda findings: sorted({own.problem for own in findings.all_ranks})),
    Advice(True, _if("torch", "cannot be imported", "torch is installed but cannot be imported")),
    Advice(
        False,
        _if(
            "torch", "is not registered",
            "the backend is not registered with torch: import mpicoll.torch and call its "
            "register(), or unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
    ),
    Advice(
        False,
        _if(
            "C library", "was not built",
            "NumPy replaces the C library, and no memory is shared: install mpicoll again with a C "
            "compiler",
        ),
    ),
    Advice(False, _if("C library", "MPICOLL_KERNELS", "unset MPICOLL_KERNELS")),
    Advice(
        False,
        _if(
            "threads", "SINGLE|FUNNELED|SERIALIZED",
            "MPI allows one thread at a time, so calls wait for each other: use an MPI that "
            "supports MPI_THREAD_MULTIPLE",
        ),
    ),
    Advice(False, _not_shared),
    Advice(False, _not_copied),
    Advice(False, _no_cupy),
    Advice(False, _remedies),
    Advice(False, lambda findings: findings.idle),
    Advice(False, lambda findings: _by_text(findings.far)),
    Advice(False, lambda findings: find_crowded(findings.placements)),
    Advice(False, _unbound),
    Advice(False, lambda findings: find_thread_excess(findings.placements)),
    Advice(False, lambda findings: find_small_memory(findings.placements)),
    Advice(False, _alone),
)  # fmt: skip


def advise(findings: Findings) -> list[tuple[bool, str]]:
    """Return the advice: whether it is an error, and the text."""
    return [(each.is_error, text) for each in ADVICE for text in each.texts(findings) if text]
