"""The rules by which ``python -m mpicoll doctor`` advises what to change."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpicoll import settings
from mpicoll.cli.doctor_facts import Findings
from mpicoll.cli.doctor_machine import (
    find_crowded,
    find_small_memory,
    find_thread_excess,
    find_unbound,
    name_ranks,
)

__all__ = ["ADVICE", "advise"]


class Advice(NamedTuple):
    """One rule: what to advise, and when.

    wrong: whether this is an error, not a suggestion.
    texts: returns the advice, or nothing.
    """

    wrong: bool
    texts: Callable[[Findings], Sequence[str]]


def _where(seen: Findings, name: str, pattern: str) -> str:
    """Name the ranks on which a fact matches; "" for none."""
    return name_ranks(
        [r for r, facts in enumerate(seen.facts) if re.search(pattern, facts.get(name, ""))]
    )


def _if(name: str, pattern: str, text: str) -> Callable[[Findings], Sequence[str]]:
    """Return a rule that gives the text where a fact matches."""

    def texts(seen: Findings) -> Sequence[str]:
        where = _where(seen, name, pattern)
        return [f"{where}: {text}"] if where else []

    return texts


def _differ(name: str) -> Callable[[Findings], Sequence[str]]:
    def texts(seen: Findings) -> Sequence[str]:
        values = {facts.get(name, "").partition(" (")[0] for facts in seen.facts}
        return [f"the ranks differ in {name}: let all run the same"] if len(values) > 1 else []

    return texts


def _misspelt(seen: Findings) -> Sequence[str]:
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(seen.misspelt):
        for text in each.values():
            found.setdefault(text, []).append(rank)
    return [f"{name_ranks(ranks)}: {text}" for text, ranks in found.items()]


def _alone(seen: Findings) -> Sequence[str]:
    if seen.wrong or [facts.get("launcher") for facts in seen.facts] != ["none"]:
        return []
    return [
        "this process is alone, for no launcher started it: to see a job, start all its ranks "
        "(mpirun -n 4 python -m mpicoll doctor, or srun)"
    ]


def _no_cupy(seen: Findings) -> Sequence[str]:
    if all(own.gpus for own in seen.all_ranks) or not _where(seen, "driver", r"\d"):
        return []
    return [f"there is a driver, but {own.no_gpu}" for own in seen.all_ranks if own.no_gpu][:1]


def _not_shared(seen: Findings) -> Sequence[str]:
    if seen.shared is not False:
        return []
    if settings.SHARED_MEMORY.is_set_to("0"):
        return ["MPICOLL_SHARED_MEMORY=0 keeps the ranks from sharing memory: unset it"]
    return [
        "the ranks are on one node and do not share memory, which is several times faster: they "
        "need the C library, one user, and one container"
    ]


def _not_copied(seen: Findings) -> Sequence[str]:
    found: dict[str, list[int]] = {}
    for rank, why in enumerate(seen.apart):
        if why:
            found.setdefault(why, []).append(rank)
    if not seen.shared or not found:
        return []
    if any(settings.SINGLE_COPY.name in why for why in found):
        remedy = f"unset {settings.SINGLE_COPY.name}"
    else:
        remedy = (
            "the node has to allow process_vm_readv and process_vm_writev among processes of one "
            "user: kernel.yama.ptrace_scope=0 (sysctl), and in a container no seccomp filter "
            "against them (docker run --cap-add=SYS_PTRACE) and one PID namespace"
        )
    why = "; ".join(f"{name_ranks(ranks)}: {why}" for why, ranks in found.items())
    return [f"large messages that are only moved are copied twice, not once ({why}): {remedy}"]


_BIND = "bind each to a processor (mpirun --bind-to core, srun --cpu-bind=cores)"


def _unbound(seen: Findings) -> Sequence[str]:
    """Advise to bind ranks: first the ranks that moved during the measurement."""
    moving = [rank for rank in sorted(seen.moving) if len(seen.places[rank].allowed) > 1]
    others = [rank for rank in find_unbound(seen.places) if rank not in moving]
    advice = []
    if moving:
        advice.append(
            f"{name_ranks(moving)}: they move between near and far processors, and when far, calls "
            f"through shared memory take longer: {_BIND}; in a virtual machine its processors may "
            "move all the same"
        )
    if others:
        advice.append(
            f"{name_ranks(others)}: not bound to processors, so they may move and lose the "
            f"contents of their caches: {_BIND}"
        )
    return advice


def _far(seen: Findings) -> Sequence[str]:
    """Advise ranks whose GPU or network card is far from what they use with it."""
    found: dict[str, list[int]] = {}
    for rank, texts in enumerate(seen.far):
        for text in texts:
            found.setdefault(text, []).append(rank)
    return [f"{name_ranks(ranks)}: {text}" for text, ranks in found.items()]


def _remedies(seen: Findings) -> Sequence[str]:
    """Advise how to get a better device route, where there are GPUs."""
    from mpicoll.cuda.capabilities import CudaSupport

    told = {f"{own.why}: {own.remedy}" for own in seen.all_ranks if own.remedy}
    for own in seen.all_ranks:
        tls = os.environ.get("UCX_TLS", "")
        if own.gpus and tls and not re.search(r"cuda|all|^\^", tls):
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
            "(pip install --force-reinstall --no-deps . in its folder)",
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
    Advice(False, _not_copied),
    Advice(False, _no_cupy),
    Advice(False, _remedies),
    Advice(False, lambda seen: seen.idle),
    Advice(False, _far),
    Advice(False, lambda seen: find_crowded(seen.places)),
    Advice(False, _unbound),
    Advice(False, lambda seen: find_thread_excess(seen.places)),
    Advice(False, lambda seen: find_small_memory(seen.places)),
    Advice(False, _alone),
)  # fmt: skip


def advise(seen: Findings) -> list[tuple[bool, str]]:
    """Return what to change: whether it is an error, and the text."""
    return [(each.wrong, text) for each in ADVICE for text in each.texts(seen) if text]
