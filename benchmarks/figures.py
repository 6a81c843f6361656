"""Draw the results of ``make bench`` as SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
from aims import COPY, FACADE, GLOO, KIB, MPI4PY, TORCH, Results
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mpicoll.cli.timing import Times
from mpicoll.output import format_bytes

#: Line styles by case.
STYLES: dict[str, dict[str, Any]] = {
    MPI4PY: {"color": "#555555", "marker": "s"},
    FACADE: {"color": "#0072b2", "marker": "o"},
    TORCH: {"color": "#56b4e9", "marker": "^"},
    GLOO: {"color": "#d55e00", "marker": "v"},
    COPY: {"color": "#999999", "linestyle": ":"},
}
DTYPES = {"float32": "-", "bfloat16": "--", "float16": "-.", "int8": ":"}


def draw(found: Sequence[Results], folder: Path, only: Collection[str] | None = None) -> list[str]:
    """Draw the figures in a folder, which is created if needed. Return their names.

    only: names of figures to draw; None draws all. Missing figures are always drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams |= {
        "svg.fonttype": "none",  # keep text, no paths
        "svg.hashsalt": "mpicoll",  # the same measurements make the same file
        "font.size": 8,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "lines.markersize": 3,
        "lines.linewidth": 1.2,
    }
    primitives = dict.fromkeys(
        one["primitive"] for each in found for one in each.find(section="sizes")
    )
    figures: dict[str, Callable[[Sequence[Results]], Figure]] = {
        name: partial(_sizes, primitive=name) for name in primitives
    }
    if any(each.find(section="dtypes") for each in found):
        figures["dtypes"] = _dtypes
    drawn = []
    for name, figure in figures.items():
        path = folder / f"{name}.svg"
        if only is None or name in only or not path.exists():
            figure(found).savefig(path, metadata={"Date": None})
            drawn.append(name)
    return drawn


def _grid(rows: int, title: str, share: Literal["all", "col"]) -> tuple[Figure, Any]:
    """Return a figure with two panels per row, as wide as a page.

    share: panels with common axes.
    """
    figure = Figure(figsize=(7.8, 0.7 + 2.4 * rows), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, 2, squeeze=False, sharex=share, sharey=share)


def _by_bytes(axis: Any, unit: str) -> None:
    axis.set_xscale("log", base=4)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size))))
    axis.tick_params(axis="x", rotation=45)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.minorticks_off()
    axis.set_ylabel(unit)


def _curve(
    axis: Any, times: dict[int, Times], value: Callable[[int, float], float], **style: Any
) -> None:
    """Draw a line through the medians, and the area between the quartiles."""
    sizes = sorted(times)
    if not sizes:
        return
    figures = [(size, times[size].figure) for size in sizes]
    axis.plot(sizes, [value(size, each.median) for size, each in figures], **style)
    low = [value(size, each.low) for size, each in figures]
    high = [value(size, each.high) for size, each in figures]
    axis.fill_between(sizes, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _microseconds(size: int, seconds: float) -> float:
    return seconds * 1e6


def _gigabytes(size: int, seconds: float) -> float:
    return size / seconds / 1e9


def _legend(figure: Figure, axes: Iterable[Any], columns: int) -> None:
    named: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)


def _sizes(found: Sequence[Results], primitive: str) -> Figure:
    """Draw time and bandwidth of a collective by size. Each row is an MPI."""
    found = [each for each in found if each.find(section="sizes", primitive=primitive)]
    figure, axes = _grid(len(found), f"{primitive} of float32, two ranks, {found[0].cpu}", "col")
    for row, results in zip(axes, found, strict=True):
        for caller, style in STYLES.items():
            times = results.by_size(section="sizes", case=caller, primitive=primitive)
            _curve(row[0], times, _microseconds, label=caller, **style)
            large = {size: each for size, each in times.items() if size >= KIB}
            _curve(row[1], large, _gigabytes, label=caller, **style)
        _by_bytes(row[0], "time of a call (us)")
        _by_bytes(row[1], "bytes / time (GB/s)")
        for axis in row:
            axis.set_title(results.label)
    for axis in axes[-1]:
        axis.set_xlabel("bytes of the larger array of a rank")
    _legend(figure, axes.flat, 5)
    return figure


def _dtypes(found: Sequence[Results]) -> Figure:
    """Draw the bandwidth of all_reduce by dtype. Each panel is an MPI."""
    found = [each for each in found if each.find(section="dtypes")]
    title = f"all_reduce by dtype, two ranks, {found[0].cpu}"
    figure, axes = _grid((len(found) + 1) // 2, title, "all")
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, results in zip(axes.flat, found, strict=False):
        for caller in (MPI4PY, FACADE, GLOO):
            for dtype, line in DTYPES.items():
                times = results.by_size(section="dtypes", case=caller, dtype=dtype)
                style = {**STYLES[caller], "linestyle": line}
                _curve(axis, times, _gigabytes, label=f"{caller} {dtype}", **style)
        _by_bytes(axis, "bytes / time (GB/s)")
        axis.set_title(results.label)
        axis.set_xlabel("bytes of the array")
    _legend(figure, axes.flat, 4)
    return figure
