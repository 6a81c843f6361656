"""Draw the figure of performance.md from the tables of measurements.md and pytorch.md.

Time of an all_reduce on two ranks of one node, by three libraries and four sizes, as points on a
logarithmic axis; large enough to be read on a telephone. A line is the range over the models of
processors that were measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
FIGURE = HERE / "figures/summary.svg"

#: The sizes of the figure, and the colours of the libraries.
SIZES = ("64 KiB", "1 MiB", "16 MiB", "64 MiB")
COLOURS = {"Gloo": "#e07b39", "MPICH's own": "#7a7f87", "mpicoll": "#3f51b5"}

#: The ends of the axis in seconds, and lengths in the figure's units.
LEAST, MOST = 1e-6, 0.1
WIDTH, LEFT, RIGHT, ROW, GAP, TOP = 480, 70, 120, 18, 14, 40

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def rows(page: str) -> Iterator[list[str]]:
    """The rows of a page's tables, as cells."""
    for line in (HERE / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def seconds(cell: str) -> float:
    """A time such as "1.67 ms"."""
    found = re.match(r"([\d.]+) (us|ms|s)\b", cell)
    if found is None:
        raise ValueError(f"{cell!r} is not a time")
    return float(found[1]) * _UNITS[found[2]]


def times() -> dict[str, dict[str, list[float]]]:
    """Seconds by size and library, with MPICH, one for each model of processors."""
    found: dict[str, dict[str, list[float]]] = {
        size: {name: [] for name in COLOURS} for size in SIZES
    }
    at = 0  # MPICH's column in the current table
    for cells in rows("measurements.md"):
        if cells[0] == "primitive":
            own = "MPICH, its own"
            at = cells.index(own) if own in cells and "ranks" not in cells else 0
        elif at and cells[0] == "all_reduce" and cells[1] in found:
            found[cells[1]]["MPICH's own"].append(seconds(cells[at]))
            found[cells[1]]["mpicoll"].append(seconds(cells[at + 1]))
    for cells in rows("pytorch.md"):
        size = cells[0].removeprefix("all_reduce ")
        if cells[0] != size and size in found:
            found[size]["Gloo"].append(seconds(cells[1]))
    return found


def label(time: float) -> str:
    """A time in words."""
    unit, factor = ("ms", 1e3) if time >= 1e-3 else ("µs", 1e6)
    return f"{time * factor:.3g} {unit}"


def drawn() -> str:
    """The figure as SVG."""
    parts, y = [], TOP
    x = float(LEFT)
    for name, colour in COLOURS.items():
        parts.append(f'<circle cx="{x + 7:g}" cy="15" r="6" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20:g}" y="20">{name}</text>')
        x += 30 + 9 * len(name)
    scale = (WIDTH - LEFT - RIGHT) / math.log(MOST / LEAST)
    for size, found in times().items():
        middle = y + ROW * len(COLOURS) / 2 + 5
        parts.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{size}</text>')
        for name, colour in COLOURS.items():
            ends = sorted({min(found[name]), max(found[name])})
            places = [LEFT + math.log(end / LEAST) * scale for end in ends]
            x, text = places[-1], " to ".join(map(label, ends))
            parts.append(f'<path d="M{places[0]:.1f} {y + 8}H{x:.1f}" stroke="{colour}"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y + 8}" r="6" fill="{colour}"/>' for x in places]
            parts.append(f'<text x="{x + 11:.1f}" y="{y + 13}">{text}</text>')
            y += ROW
        y += GAP
    axis = []
    for decade in range(round(math.log10(MOST / LEAST)) + 1):
        x, time = LEFT + decade * math.log(10) * scale, LEAST * 10**decade
        axis.append(f'<path d="M{x:.1f} {TOP - 4}V{y}" stroke="#ddd"/>')
        axis.append(f'<text x="{x:.1f}" y="{y + 15}" text-anchor="middle">{label(time)}</text>')
    middle = (WIDTH + LEFT - RIGHT) / 2
    axis.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#888"/>')
    axis.append(f'<text x="{middle:g}" y="{y + 34}" text-anchor="middle">time of a call</text>')
    height = y + 42
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n'
        + "\n".join(axis + parts)
        + "\n</svg>\n"
    )
