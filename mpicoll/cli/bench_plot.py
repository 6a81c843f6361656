"""The table of ``python -m mpicoll bench`` as an image; needs matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["draw", "unable"]


def unable(path: Path) -> str:
    """Why there can be no such image; "" if there can."""
    try:
        library: Any = importlib.import_module("matplotlib.backend_bases")
    except ImportError as error:
        return f"--plot needs matplotlib ({error}): pip install mpicoll[bench]"
    known = sorted(library.FigureCanvasBase.filetypes)
    if path.suffix[1:].lower() not in known:
        return f"--plot {path}: its name must end in one of .{', .'.join(known)}"
    return ""


def draw(report: dict[str, Any], path: Path) -> None:
    """Bus bandwidth, or with --latency the median time and the way to the 99th percentile, by size;
    one diagram for each primitive that has sizes.

    report: what --json writes.
    """
    library: Any = importlib.import_module("matplotlib.figure")
    lines = _lines(report)
    figure = library.Figure(figsize=(8, 1 + 3.6 * max(1, len(lines))), layout="constrained")
    figure.suptitle(f"{report['ranks']} ranks, {report['MPI']}, {report['machine']}", fontsize=9)
    for i, (name, found) in enumerate(lines.items()):
        axes = figure.add_subplot(len(lines), 1, i + 1)
        for label, points in found.items():
            sizes, values, highs = zip(*points, strict=True)
            axes.plot(sizes, values, marker=".", label=label)
            if report["latency"]:
                axes.fill_between(sizes, values, highs, alpha=0.15)
        axes.set_xscale("log", base=2)
        axes.set_title(name)
        axes.set_xlabel("size (B)")
        axes.set_ylabel("p50 to p99 (us)" if report["latency"] else "bus bandwidth (GB/s)")
        if report["latency"]:
            axes.set_yscale("log")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _lines(report: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
    """By primitive and by what is measured: size, value, and its upper end."""
    found: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    keys = ("p50", "p99") if report["latency"] else ("busbw", "busbw")
    for result in report["results"]:
        told = {
            "mpicoll out of place": result["out_of_place"],
            "mpicoll in place": result["in_place"],
            **result["compare"],
        }
        kind = " ".join(x for x in (result["type"], result["redop"]) if x != "none")
        for name, one in told.items():
            if one and result["size"]:
                mine = found.setdefault(result["primitive"], {})
                point = (result["size"], one[keys[0]], one[keys[1]])
                mine.setdefault(f"{kind}, {name}", []).append(point)
    return found
