"""Description of this machine, and lists of its ranks and processors."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def describe() -> str:
    """Return number and model of the processors, which measurements depend on."""
    words: dict[str, str] = {}
    with suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:  # end of the first processor
                break
            words[name.strip()] = value.strip()
    parts = [os.uname().machine, words.get("CPU implementer"), words.get("CPU part")]
    return f"{os.cpu_count()} x {words.get('model name') or ' '.join(filter(None, parts))}"


@cache
def l2_cache_bytes() -> int:
    """Return the size of the processor's second-level cache; 1 MiB if Linux does not report it."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with suppress(OSError, ValueError):
            if (index / "level").read_text().strip() == "2":
                return int((index / "size").read_text().strip().removesuffix("K")) << 10
    return 1 << 20


def ranks_by_value(values: Iterable[T], ranks: Iterable[int] | None = None) -> dict[T, list[int]]:
    """Return the ranks of each value, such as a node, in the order of their first ranks.

    values: one of each rank. ranks: by default 0, 1, ...
    """
    found: dict[T, list[int]] = {}
    for value, rank in zip(values, count() if ranks is None else ranks, strict=False):
        found.setdefault(value, []).append(rank)
    return found


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
