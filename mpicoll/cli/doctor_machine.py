"""What ``python -m mpicoll doctor`` says of the machine: its system, its processors and which of
them each rank may run on, and the memory that processes share.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from mpicoll import machine

__all__ = ["Place", "crowded", "memory", "ranges", "small_memory", "system"]

#: Bytes free in /dev/shm with which MPI libraries come to their end; Docker gives as many.
_LITTLE = 64 << 20
_SHARED = "/dev/shm"


class Place(NamedTuple):
    """Where a rank is.

    processors: how many the host has.
    allowed:    the numbers of those on which the rank may run.
    shared, free: bytes of /dev/shm; None where there is no such.
    """

    host: str
    processors: int
    allowed: tuple[int, ...]
    shared: int | None
    free: int | None

    @classmethod
    def own(cls) -> Place:
        """This process's."""
        shared = free = None
        with suppress(OSError):
            found = os.statvfs(_SHARED)
            shared, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        allowed = tuple(sorted(os.sched_getaffinity(0)))
        processors = max(os.cpu_count() or 1, len(allowed))
        return cls(socket.gethostname(), processors, allowed, shared, free)


def system() -> dict[str, str]:
    """The operating system and the processors, in words."""
    name = platform.system()
    with suppress(OSError):
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    allowed = Place.own().allowed
    return {
        "system": f"{name}, {platform.system()} {platform.release()} {platform.machine()}",
        "processors": machine.describe(),
        "may run on": f"{len(allowed)} of them: {ranges(allowed)}",
    }


def memory(places: Sequence[Place]) -> list[str]:
    """What /dev/shm has, by rank: the same on all ranks of a host, which did not look at once."""
    first: dict[str, Place] = {}
    return [_shared(first.setdefault(place.host, place)) for place in places]


def _shared(place: Place) -> str:
    if place.shared is None or place.free is None:
        return "none"
    return f"{_bytes(place.shared)}, {_bytes(place.free)} free"


def _bytes(count: int) -> str:
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:.3g} {name}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in few words: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


# --- what to change -----------------------------------------------------------------------------


def crowded(places: Sequence[Place]) -> list[str]:
    """Hosts on which more ranks run than there are processors, or than they may use."""
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
        f"({ranges(few)}): {waits}. Give each one of its own (mpirun --bind-to core, srun "
        "--cpu-bind=cores), leave them unbound (mpirun --bind-to none), or ask the batch system "
        "for more"
    )


def small_memory(places: Sequence[Place]) -> list[str]:
    """Hosts with so little memory in /dev/shm that MPI may fail."""

    def small(ranks: Sequence[Place]) -> str:
        free = min((each.free for each in ranks if each.free is not None), default=_LITTLE + 1)
        if free > _LITTLE:
            return ""
        return (
            f"{_SHARED} on {{host}} has {_bytes(free)} left: MPI libraries keep messages there, "
            "and a rank is killed by SIGBUS once it is full. Make it larger (docker run "
            f"--shm-size=1g, or --ipc=host; mount -o remount,size=1g {_SHARED})"
        )

    return _by_host(places, small)


def _by_host(places: Sequence[Place], tell: Callable[[Sequence[Place]], str]) -> list[str]:
    """What there is to tell of each host, which is {host} in it; the same of several once."""
    hosts: dict[str, list[Place]] = {}
    for place in places:
        hosts.setdefault(place.host, []).append(place)
    told: dict[str, list[str]] = {}
    for host, ranks in hosts.items():
        told.setdefault(tell(ranks), []).append(host)
    told.pop("", None)
    return [
        text.format(host=f"{names[0]} (so on {len(names) - 1} more)" if names[1:] else names[0])
        for text, names in told.items()
    ]


def _processors(n: int) -> str:
    return f"{n} processor{'s' * (n != 1)}"
