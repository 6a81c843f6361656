"""Facts and advice of ``doctor`` about a machine: system, processors, shared memory."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpicoll import machine
from mpicoll.cli.distance import FAR, NEAR, Pair, classify
from mpicoll.machine import format_ranges

__all__ = [
    "Placement",
    "describe_distance",
    "describe_gpudirect",
    "describe_memory",
    "describe_system",
    "find_crowded",
    "find_moving",
    "find_small_memory",
    "find_thread_excess",
    "find_unbound",
    "format_ranges",
    "name_ranks",
]

#: Free memory in /dev/shm below which MPI libraries may fail; Docker's default.
_MIN_FREE_BYTES = 64 << 20
_SHARED = "/dev/shm"


class Placement(NamedTuple):
    """Processors and memory of a rank.

    processors: number of processors of the host.
    allowed:    numbers of the processors on which the rank may run.
    shared, free: size and free bytes of /dev/shm, or None.
    threads:    OMP_NUM_THREADS, or "".
    """

    host: str
    processors: int
    allowed: tuple[int, ...]
    shared: int | None
    free: int | None
    threads: str = ""

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


def describe_system() -> dict[str, str]:
    """Describe the operating system and the processors."""
    name = platform.system()
    with suppress(OSError):
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    allowed = Placement.find().allowed
    return {
        "system": f"{name}, {platform.system()} {platform.release()} {platform.machine()}",
        "processors": machine.describe(),
        "may run on": f"{len(allowed)} of them: {format_ranges(allowed)}",
    }


def describe_memory(placements: Sequence[Placement]) -> list[str]:
    """Describe /dev/shm by rank, with the same text for all ranks of a host."""
    first: dict[str, Placement] = {}
    return [_format_shared(first.setdefault(placement.host, placement)) for placement in placements]


def _format_shared(placement: Placement) -> str:
    if placement.shared is None or placement.free is None:
        return "none"
    return f"{_format_bytes(placement.shared)}, {_format_bytes(placement.free)} free"


def _format_bytes(count: int) -> str:
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:.3g} {name}"


def describe_gpudirect(modules: Path = Path("/sys/module")) -> str:
    """Describe which kernel modules of GPUDirect are loaded. dma-buf needs none of them."""
    found = [
        f"{name} ({what}) is {'loaded' if (modules / name).exists() else 'not loaded'}"
        for name, what in (("nvidia_peermem", "RDMA"), ("gdrdrv", "GDRCopy"))
    ]
    return ", ".join(found)


def describe_distance(pairs: Sequence[Pair] | str) -> str:
    """Describe the distance of the farthest ranks of a node, or why it is unknown."""
    if isinstance(pairs, str):
        return f"unknown: {pairs}"
    moving = find_moving(pairs)
    if moving:
        latencies = [latency for pair in pairs for latency in pair.latencies if pair.moves]
        return (
            f"{min(latencies):.0f} to {max(latencies):.0f} ns: {name_ranks(sorted(moving))} move "
            f"between processors with a shared cache ({NEAR}) and without one ({FAR})"
        )
    farthest = max(pairs, key=lambda pair: pair.median)
    found = classify(farthest.median, farthest.median)
    a, b = farthest.ranks
    if found == FAR:
        relation = f"no shared cache ({FAR})"
    else:
        relation = f"{'' if len(pairs) == 1 else 'all ranks have '}a shared cache ({found})"
    return f"{farthest.median:.0f} ns between ranks {a} and {b}: {relation}"


def find_moving(pairs: Sequence[Pair] | str) -> set[int]:
    """Return the ranks whose distance changes between near and far."""
    if isinstance(pairs, str):
        return set()
    return {rank for pair in pairs if pair.moves for rank in pair.ranks}


# --- what to change -----------------------------------------------------------------------------


def find_crowded(placements: Sequence[Placement]) -> list[str]:
    """Return advice for hosts with more ranks than processors, or than allowed processors."""
    return _by_host(placements, _crowd)


def _crowd(ranks: Sequence[Placement]) -> str:
    n, count = len(ranks), ranks[0].processors
    effect = "they share processors, and calls take many times longer"
    if n > count:
        return (
            f"{n} ranks on {{host}}, which has {_processors(count)}: {effect}. Start at most "
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
        f"{worst} ranks on {{host}} may only run on {len(few)} of its {_processors(count)} "
        f"({format_ranges(few)}): {effect}. Bind each to its own (mpirun --bind-to core, srun "
        "--cpu-bind=cores), leave them unbound (mpirun --bind-to none), or request more from the "
        "batch system"
    )


def find_unbound(placements: Sequence[Placement]) -> list[int]:
    """Return the ranks that may move between processors that other ranks may also use.

    Skips hosts with more ranks than processors, where binding does not help.
    """
    unbound = []
    for ranks in _hosts(placements).values():
        if _crowd([placements[rank] for rank in ranks]):
            continue
        users = Counter(number for rank in ranks for number in placements[rank].allowed)
        unbound += [
            rank
            for rank in ranks
            if len(placements[rank].allowed) > 1
            and any(users[number] > 1 for number in placements[rank].allowed)
        ]
    return sorted(unbound)


def find_thread_excess(placements: Sequence[Placement]) -> list[str]:
    """Return advice for hosts without OMP_NUM_THREADS, where libraries start too many threads."""

    def excess(ranks: Sequence[Placement]) -> str:
        threads = sum(len(each.allowed) for each in ranks if not each.threads)
        processors = len(set[int]().union(*(each.allowed for each in ranks)))
        if threads <= processors:
            return ""
        return (
            "OMP_NUM_THREADS is not set: in each rank on {host}, NumPy and PyTorch may start a "
            f"thread for every processor, {threads} threads on {_processors(processors)}. "
            f"Set it: export OMP_NUM_THREADS={max(1, processors // len(ranks))}"
        )

    return _by_host(placements, excess)


def find_small_memory(placements: Sequence[Placement]) -> list[str]:
    """Return advice for hosts with so little memory in /dev/shm that MPI may fail."""

    def small(ranks: Sequence[Placement]) -> str:
        free = min(
            (each.free for each in ranks if each.free is not None), default=_MIN_FREE_BYTES + 1
        )
        if free > _MIN_FREE_BYTES:
            return ""
        return (
            f"{_SHARED} on {{host}} has {_format_bytes(free)} left: MPI libraries store messages "
            "there, and a rank dies of SIGBUS when it is full. Increase its size (docker run "
            f"--shm-size=1g, or --ipc=host; mount -o remount,size=1g {_SHARED})"
        )

    return _by_host(placements, small)


def _by_host(
    placements: Sequence[Placement], describe: Callable[[Sequence[Placement]], str]
) -> list[str]:
    """Return each advice once. {host} in it becomes the name of its hosts."""
    found: dict[str, list[str]] = {}
    for host, ranks in _hosts(placements).items():
        found.setdefault(describe([placements[rank] for rank in ranks]), []).append(host)
    found.pop("", None)
    return [
        text.format(host=f"{names[0]} (and {len(names) - 1} more)" if names[1:] else names[0])
        for text, names in found.items()
    ]


def _hosts(placements: Sequence[Placement]) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    hosts: dict[str, list[int]] = {}
    for rank, placement in enumerate(placements):
        hosts.setdefault(placement.host, []).append(rank)
    return hosts


def _processors(n: int) -> str:
    return f"{n} processor{'s' * (n != 1)}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 2-4", or "" without ranks."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}" if ranks else ""
