"""What ``python -m mpicoll doctor`` says of the machine: its system, its processors and which of
them each rank may run on, and the memory that processes share.
"""

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
    "Place",
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

#: With so few free bytes in /dev/shm, Docker's default, MPI libraries fail.
_LITTLE = 64 << 20
_SHARED = "/dev/shm"


class Place(NamedTuple):
    """Where a rank is.

    processors: how many the host has.
    allowed:    the numbers of those on which the rank may run.
    shared, free: bytes of /dev/shm; None where there is no such.
    threads:    OMP_NUM_THREADS, "" if it is not set.
    """

    host: str
    processors: int
    allowed: tuple[int, ...]
    shared: int | None
    free: int | None
    threads: str = ""

    @classmethod
    def find(cls) -> Place:
        """Find out where this process runs."""
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
    allowed = Place.find().allowed
    return {
        "system": f"{name}, {platform.system()} {platform.release()} {platform.machine()}",
        "processors": machine.describe(),
        "may run on": f"{len(allowed)} of them: {format_ranges(allowed)}",
    }


def describe_memory(places: Sequence[Place]) -> list[str]:
    """Describe /dev/shm by rank, the same for all ranks of a host."""
    first: dict[str, Place] = {}
    return [_format_shared(first.setdefault(place.host, place)) for place in places]


def _format_shared(place: Place) -> str:
    if place.shared is None or place.free is None:
        return "none"
    return f"{_format_bytes(place.shared)}, {_format_bytes(place.free)} free"


def _format_bytes(count: int) -> str:
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:.3g} {name}"


def describe_gpudirect(modules: Path = Path("/sys/module")) -> str:
    """Describe which kernel modules of GPUDirect are loaded; dma-buf needs none of them."""
    found = [
        f"{name} ({what}) is {'loaded' if (modules / name).exists() else 'not loaded'}"
        for name, what in (("nvidia_peermem", "RDMA"), ("gdrdrv", "GDRCopy"))
    ]
    return ", ".join(found)


def describe_distance(pairs: Sequence[Pair] | str) -> str:
    """Describe how far the ranks of a node are apart, by those that are farthest; or why that is
    unknown.
    """
    if isinstance(pairs, str):
        return f"unknown: {pairs}"
    moving = find_moving(pairs)
    if moving:
        latencies = [latency for pair in pairs for latency in pair.latencies if pair.moves]
        return (
            f"{min(latencies):.0f} to {max(latencies):.0f} ns: {name_ranks(sorted(moving))} move "
            f"between processors that share a cache ({NEAR}) and others ({FAR})"
        )
    farthest = max(pairs, key=lambda pair: pair.median)
    found = classify(farthest.median, farthest.median)
    a, b = farthest.ranks
    if found == FAR:
        what = f"they share no cache ({FAR})"
    else:
        what = f"{'they' if len(pairs) == 1 else 'all ranks'} share a cache ({found})"
    return f"{farthest.median:.0f} ns between ranks {a} and {b}: {what}"


def find_moving(pairs: Sequence[Pair] | str) -> set[int]:
    """Return the ranks that are near each other at times and far at others."""
    if isinstance(pairs, str):
        return set()
    return {rank for pair in pairs if pair.moves for rank in pair.ranks}


# --- what to change -----------------------------------------------------------------------------


def find_crowded(places: Sequence[Place]) -> list[str]:
    """Report hosts with more ranks than processors, or than processors they may use."""
    return _by_host(places, _crowd)


def _crowd(ranks: Sequence[Place]) -> str:
    n, there = len(ranks), ranks[0].processors
    waits = "they take turns, and calls take many times as long"
    if n > there:
        return (
            f"{n} ranks on {{host}}, which has {_processors(there)}: {waits}. Start at most "
            f"{there} there (mpirun -n {there}), or spread them over more nodes"
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
        f"{worst} ranks on {{host}} may only run on {len(few)} of its {_processors(there)} "
        f"({format_ranges(few)}): {waits}. Give each one of its own (mpirun --bind-to core, srun "
        "--cpu-bind=cores), leave them unbound (mpirun --bind-to none), or ask the batch system "
        "for more"
    )


def find_unbound(places: Sequence[Place]) -> list[int]:
    """Return the ranks that may move between processors that other ranks may also use.

    Skips hosts with more ranks than processors, where binding does not help.
    """
    unbound = []
    for ranks in _hosts(places).values():
        if _crowd([places[rank] for rank in ranks]):
            continue
        users = Counter(number for rank in ranks for number in places[rank].allowed)
        unbound += [
            rank
            for rank in ranks
            if len(places[rank].allowed) > 1
            and any(users[number] > 1 for number in places[rank].allowed)
        ]
    return sorted(unbound)


def find_thread_excess(places: Sequence[Place]) -> list[str]:
    """Report hosts where libraries start more threads than there are processors, because
    OMP_NUM_THREADS is not set.
    """

    def excess(ranks: Sequence[Place]) -> str:
        threads = sum(len(each.allowed) for each in ranks if not each.threads)
        processors = len(set[int]().union(*(each.allowed for each in ranks)))
        if threads <= processors:
            return ""
        return (
            "OMP_NUM_THREADS is not set: in each of the ranks on {host}, NumPy and PyTorch may "
            f"start a thread for every processor, {threads} threads on {_processors(processors)}. "
            f"Set it: export OMP_NUM_THREADS={max(1, processors // len(ranks))}"
        )

    return _by_host(places, excess)


def find_small_memory(places: Sequence[Place]) -> list[str]:
    """Report hosts with so little memory in /dev/shm that MPI may fail."""

    def small(ranks: Sequence[Place]) -> str:
        free = min((each.free for each in ranks if each.free is not None), default=_LITTLE + 1)
        if free > _LITTLE:
            return ""
        return (
            f"{_SHARED} on {{host}} has {_format_bytes(free)} left: MPI libraries keep messages "
            "there, and a rank is killed by SIGBUS once it is full. Make it larger (docker run "
            f"--shm-size=1g, or --ipc=host; mount -o remount,size=1g {_SHARED})"
        )

    return _by_host(places, small)


def _by_host(places: Sequence[Place], tell: Callable[[Sequence[Place]], str]) -> list[str]:
    """What there is to tell of each host, which is {host} in it; the same of several once."""
    told: dict[str, list[str]] = {}
    for host, ranks in _hosts(places).items():
        told.setdefault(tell([places[rank] for rank in ranks]), []).append(host)
    told.pop("", None)
    return [
        text.format(host=f"{names[0]} (so on {len(names) - 1} more)" if names[1:] else names[0])
        for text, names in told.items()
    ]


def _hosts(places: Sequence[Place]) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    return hosts


def _processors(n: int) -> str:
    return f"{n} processor{'s' * (n != 1)}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 2-4"; "" for none."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}" if ranks else ""
