"""Clusters: runs of consecutive ranks of a node that share a last-level cache or a NUMA node.

Large sums cross from one cluster to the next once (``all_reduce_by_clusters`` in
``kernels/src/shared.c``). Ranks must be consecutive because sums are in rank order.

The operating system's topology is used if each rank is bound to processors within one cache or
NUMA node. Virtual machines may report a false topology, so measured latencies can override it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, groupby
from pathlib import Path
from typing import NamedTuple

from mpicoll import settings
from mpicoll.errors import ArgumentError

__all__ = ["Seen", "choose", "find_domain"]

#: Minimum average number of ranks per cluster (docs/model.md).
LEAST = 4

_SYSTEM = Path("/sys/devices/system")


class Seen(NamedTuple):
    """A rank's view of the topology.

    forced:    ``MPICOLL_CLUSTERS`` of its process.
    domain:    result of ``find_domain``.
    latencies: in nanoseconds to the ranks whose numbers differ in bit 0, 1, …; 0: unknown.
    """

    forced: str
    domain: str
    latencies: list[int]


def find_domain(processors: set[int], system: Path = _SYSTEM) -> str:
    """Return the name of the last-level cache or else the NUMA node that these processors share;
    "" if there is none or it is unknown.
    """
    places = [
        ("cache", system / f"cpu/cpu{min(processors)}/cache", "index*/shared_cpu_list"),
        ("node", system / "node", "node*/cpulist"),
    ]
    for name, folder, pattern in places:
        shared = [_numbers(path) for path in folder.glob(pattern)]
        around = [(len(each), min(each)) for each in shared if processors <= each]
        if around:  # the last level has the most processors
            return f"{name} {max(around)[1]}"
    return ""


def _numbers(path: Path) -> set[int]:
    """Return the numbers of a list like 0-3,8; none if it cannot be read."""
    found: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found


def choose(everybody: Sequence[Seen], crowded: bool, far: int) -> list[int]:
    """Return the number of ranks in each cluster, in order: the same for what all ranks know.

    crowded: there are more ranks than processors.
    far:     nanoseconds from which on a rank is far.
    Raises ArgumentError, on all ranks, if rank 0's setting makes no sense.
    """
    n = len(everybody)
    if forced := everybody[0].forced:
        return _cut(n, _lengths(forced))
    if crowded:
        return [n]
    if (lengths := _described(everybody)) and _differs(everybody, lengths, far) != 1:
        return lengths if _pays(n, lengths) else [n]
    for bit in range(1, n.bit_length()):
        lengths = _cut(n, [1 << bit])
        if _pays(n, lengths) and _differs(everybody, lengths, far) == 0:
            return lengths
    return [n]


def _lengths(forced: str) -> list[int]:
    """Return the numbers in ``MPICOLL_CLUSTERS``; none for 0."""
    try:
        lengths = [int(part) for part in forced.split(",")]
    except ValueError:
        lengths = [-1]
    if lengths != [0] and min(lengths) < 1:
        name = settings.CLUSTERS
        raise ArgumentError(f"{name.name}: expected {name.expected}, got {forced!r}")
    return lengths


def _cut(n: int, lengths: list[int]) -> list[int]:
    """Return lengths, over and over again, that make up n."""
    if lengths == [0]:
        return [n]
    found: list[int] = []
    for length in cycle(lengths):
        found.append(min(length, n - sum(found)))
        if sum(found) == n:
            return found
    raise AssertionError


def _described(everybody: Sequence[Seen]) -> list[int]:
    """Return how many ranks in a row share a domain; none if one is unknown, or is met again."""
    runs = [(name, len([*run])) for name, run in groupby(seen.domain for seen in everybody)]
    names = {name for name, _ in runs}
    return [] if "" in names or len(names) < len(runs) else [length for _, length in runs]


def _pays(n: int, lengths: list[int]) -> bool:
    return len(lengths) > 1 and n >= LEAST * len(lengths)


def _differs(everybody: Sequence[Seen], lengths: list[int], far: int) -> int | None:
    """Return whether a measured latency contradicts clusters of such lengths: 1 or 0, and None if
    too few are measured to tell.
    """
    of = [number for number, length in enumerate(lengths) for _ in range(length)]
    found = set()  # whether in one cluster, and whether near
    for rank, seen in enumerate(everybody):
        for bit, latency in enumerate(seen.latencies):
            partner = rank ^ 1 << bit
            if latency and partner < len(of):
                found.add((of[rank] == of[partner], latency < far))
    if any(together != near for together, near in found):
        return 1
    return 0 if len(found) == 2 else None
