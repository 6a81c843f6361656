"""The table of ``python -m mpicoll bench`` as an image; needs matplotlib."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll.output import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "draw", "figure_of", "obstacle"]

#: The colours of all images (after Okabe and Ito, for every kind of sight).
COLOURS = {"mpicoll": "#0072b2", "mpi4py": "#555555", "gloo": "#d55e00", "copy": "#999999"}
#: For routes, in their order.
_ROUTE_COLOURS = ("#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999933")
#: What is measured of mpicoll, and its line.
_OWN = {"out_of_place": ("out of place", "-"), "in_place": ("in place", "--")}
#: A mark for each dtype, operation and distance.
_MARKS = "osv^D*PX<>"
#: Ticks on the axis of sizes, at the most.
_TICKS = 9


class _Line(NamedTuple):
    """One line of a diagram; ``kind``: dtype, operation, and how far the ranks were apart."""

    caller: str
    style: str
    kind: str
    label: str


_Lines = dict[_Line, list[tuple[int, float, float]]]


def obstacle(path: Path) -> str:
    """Return why there can be no such image; "" if there can."""
    try:
        library = importlib.import_module("matplotlib.backend_bases")
    except ImportError as error:
        return f"--plot needs matplotlib ({error}): pip install matplotlib"
    known = sorted(library.FigureCanvasBase.filetypes)
    if path.suffix[1:].lower() not in known:
        return f"--plot {path}: its name must end in one of .{', .'.join(known)}"
    return ""


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the image of a report, which is what --json writes."""
    figure_of(report).savefig(path, dpi=120)


def figure_of(report: dict[str, Any]) -> Figure:
    """Draw bandwidth, or with --latency the median time up to the 99th percentile, by size; one
    diagram for each primitive that has sizes.
    """
    library = importlib.import_module("matplotlib.figure")
    measure = _measure(report)
    found = _lines(report, measure)
    columns = min(2, max(1, len(found)))
    rows = math.ceil(len(found) / columns) or 1
    figure: Figure = library.Figure(
        figsize=(1.5 + 5 * columns, 1.5 + 3.2 * rows), layout="constrained"
    )
    figure.suptitle(f"{report['ranks']} ranks, {report['MPI']}, {report['machine']}", fontsize=9)
    kinds = list(dict.fromkeys(line.kind for lines in found.values() for line in lines))
    callers = dict.fromkeys(line.caller for lines in found.values() for line in lines)
    routes = [caller for caller in callers if caller not in COLOURS]
    colours = COLOURS | dict(zip(routes, _ROUTE_COLOURS, strict=False))
    named: dict[str, Any] = {}
    for i, (name, lines) in enumerate(found.items()):
        axes = figure.add_subplot(rows, columns, i + 1, title=name)
        for line, points in lines.items():
            sizes, values, highs = zip(*points, strict=True)
            (named[line.label],) = axes.plot(
                sizes, values, color=colours[line.caller], linestyle=line.style, label=line.label,
                marker=_MARKS[kinds.index(line.kind) % len(_MARKS)], markersize=4,
            )  # fmt: skip
            if report["latency"]:
                axes.fill_between(
                    sizes, values, highs, color=colours[line.caller], alpha=0.12, linewidth=0
                )
        _scales(axes, [point[0] for points in lines.values() for point in points], measure.unit)
        axes.set_xlabel("size of the larger array (B)")
        axes.set_ylabel(measure.title)
    if named:
        figure.legend(
            named.values(), named.keys(), loc="outside lower center", ncols=2 * columns, fontsize=8
        )
    return figure


class _Measure(NamedTuple):
    """What is drawn.

    title: of the axis.
    unit:  of the axis, and how many of it are one of the table's.
    low, high: the keys of a value and of its upper end.
    """

    title: str
    unit: str
    scale: float
    low: str
    high: str


def _measure(report: dict[str, Any]) -> _Measure:
    if report["latency"]:
        return _Measure("time of a call, p50 to p99 (s)", "s", 1e-6, "p50", "p99")
    if report["ranks"] == 1:  # nothing goes over a bus
        return _Measure("size / time (B/s)", "B/s", 1e9, "algbw", "algbw")
    return _Measure("bus bandwidth (B/s)", "B/s", 1e9, "busbw", "busbw")


def _lines(report: dict[str, Any], measure: _Measure) -> dict[str, _Lines]:
    """Return by primitive what is measured: size, value, and its upper end."""
    found: dict[str, _Lines] = {}
    ops, distances = (
        {result[key] for result in report["results"]} for key in ("redop", "distance")
    )
    for result in report["results"]:
        kind = result["type"]
        kind += f" {result['redop']}" * (len(ops - {"none"}) > 1)
        kind += f" {result['distance']}" * (len(distances) > 1)
        curves = {
            _Line("mpicoll", style, kind, f"mpicoll {how}, {kind}"): result[name]
            for name, (how, style) in _OWN.items()
        }
        for caller, other in result["compare"].items():
            curves[_Line(caller, "-", kind, f"{caller}, {kind}")] = other
        for line, one in curves.items():
            if one and result["size"]:
                ends = (measure.scale * one[measure.low], measure.scale * one[measure.high])
                points = found.setdefault(result["primitive"], {}).setdefault(line, [])
                points.append((result["size"], *ends))
    return found


def _scales(axes: Axes, sizes: Sequence[int], unit: str) -> None:
    """Make both axes logarithmic: sizes in KiB and MiB, values in decimal units."""
    ticker = importlib.import_module("matplotlib.ticker")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    step = math.ceil((last - first + 1) / _TICKS)
    ticks = [2**exponent for exponent in range(first, last + 1, step)]
    axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
    axes.tick_params(axis="x", rotation=30)
    low, high = axes.get_ylim()
    within = (1,) if high / low > 1e3 else (1, 2, 5)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=within))
    axes.yaxis.set_major_formatter(ticker.EngFormatter(unit))
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
