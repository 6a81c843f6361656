"""A cost model, fitted to what ``make bench`` measured on one node, and what it says of many nodes.

    python benchmarks/model.py .cache/bench/mpich .cache/bench/openmpi

Files, or folders of them, as host.py writes them; of each MPI library there may be several. Printed
are the rates that were found and how sure they are, how well they explain the times, what they say
of more ranks over a network that is stated, not measured, at which sizes one algorithm becomes
better than another, and where mpicoll's tables have something else today. ``--markdown`` writes
the part of docs/model.md that comes from here. It needs no MPI, and for the figure matplotlib.

model_steps.py and model_costs.py have the formulas, model_fit.py the fit, model_predictions.py what
follows from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from aims import Results
from measure import KIB, MIB, shown
from model_costs import WAYS, Machine, Rates, least
from model_fit import GUESSES, Fit, Point, crowded, fit, points
from model_predictions import (
    LARGEST,
    Cluster,
    changes,
    places,
    sizes_of,
    spread_of,
    steps,
    times_of,
    where,
    worse,
)
from model_steps import Place
from pages import DOCS, filled
from report import about, table

from mpicoll.routes.tuning import Table

ROOT = Path(__file__).resolve().parent.parent
PAGE, FIGURE = DOCS / "model.md", ROOT / ".cache" / "bench" / "figures" / "model.svg"

GIB = 1 << 30
RANKS = [64, 1024, 16384]
#: Sizes of which the predicted times are printed.
SHOWN = [KIB, 32 * KIB, MIB, 32 * MIB, LARGEST]
#: A fit whose median error is greater is not to be relied on.
UNSURE = 0.3
#: Rates as they might as well be, of which the spread of a size is taken.
DRAWS = 100


# --- words --------------------------------------------------------------------------------------


def size_shown(size: float) -> str:
    """Bytes, with two digits where they are not round."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")):
        if size >= 0.95 * unit:
            value = size / unit
            return f"{value if value.is_integer() else float(f'{value:.2g}'):g} {name}"
    return f"{size:g} B"


def rate_shown(rate: float, name: str) -> str:
    """A time, or that of a byte."""
    return f"{rate * 1e9:.3g} ns" if name.removesuffix("_far") in _OF_BYTES else shown(rate)


_OF_BYTES = {name.removesuffix("_far") for name in Rates._fields if name.endswith("_far")}


def knowledge(told: float) -> str:
    """How much the figures tell of a rate, in words."""
    return "told" if told > 0.9 else "partly" if told > 0.4 else "guessed"


class Library(NamedTuple):
    """What was found of one MPI library.

    crowd: see model_fit.crowded.
    """

    results: Results
    fit: Fit
    crowd: Sequence[tuple[Point, float]]

    @property
    def table(self) -> Table:
        """mpicoll's, without what ``tune`` finds."""
        return Table(openmpi=self.results.mpi.startswith("Open MPI"))

    def on(self, cluster: Cluster) -> Machine:
        """The machine that is stated, with the caches of the one that was measured."""
        return cluster.machine._replace(cache=self.fit.cache)


def fitted_table(found: Sequence[Library]) -> list[str]:
    """The rates, their errors, and whether they come from the figures."""
    heads = ["rate", "seconds for", *(each.results.mpi for each in found)]
    rows = []
    for name, guess in zip(Rates._fields, GUESSES, strict=True):
        cells = []
        for each in found:
            of = each.fit.rates, each.fit.factors, each.fit.told
            rate, factor, told = (getattr(one, name) for one in of)
            cells.append(f"{rate_shown(rate, name)} x/ {factor:.2f} {knowledge(told)}")
        rows.append([name.replace("_far", " far"), guess.what, *cells])
    caches = (size_shown(each.fit.cache) for each in found)
    rows.append(["cache", "bytes of which half are in caches", *caches])
    return table(heads, rows)


#: Classes of sizes: up to so many bytes.
CLASSES = [4 * KIB, MIB, LARGEST]


def explained_table(found: Sequence[Library]) -> list[str]:
    """Median relative errors, by route and size."""
    heads = ["route"]
    heads += [f"{each.results.mpi}: up to {size_shown(c)}" for each in found for c in CLASSES]
    routes = dict.fromkeys(point.route for each in found for point in each.fit.points)
    rows = []
    for route in [*routes, "all"]:
        row = [route]
        for each in found:
            for low, high in zip([0, *CLASSES], CLASSES, strict=False):
                errors = [
                    error
                    for point, error in zip(each.fit.points, each.fit.errors, strict=True)
                    if low < point.bytes <= high and route in (point.route, "all")
                ]
                row.append(f"{np.median(errors):.0%} ({len(errors)})" if errors else "-")
        rows.append(row)
    return table(heads, rows)


def ratios_table(fit: Fit) -> list[str]:
    """Measured and predicted, of every point."""
    heads = ["kind", "ranks", "case", "route", "bytes", "measured", "predicted", "ratio"]
    rows = [
        [point.kind, str(point.place.ranks), point.case, point.route, size_shown(point.bytes),
         shown(point.seconds), shown(time), f"{point.seconds / time:.2f}"]
        for point, time in zip(fit.points, fit.predicted, strict=True)
    ]  # fmt: skip
    return table(heads, rows)


def caveats(found: Sequence[Library]) -> list[str]:
    """What the figures do not tell, a line for each MPI."""
    lines = []
    for results, made, crowd in found:
        guessed = [
            name.replace("_far", " far")
            for name, told in zip(Rates._fields, made.told, strict=True)
            if knowledge(told) == "guessed"
        ]
        processors = processors_of(results)
        most = max(point.place.ranks for point in made.points)
        line = f"{results.mpi}: {len(made.points)} times of up to {most} ranks on {processors} "
        line += f"processors, off by {np.median(made.errors):.0%} (median). "
        if np.median(made.errors) > UNSURE:
            line += "**That is too much to rely on any of this.** "
        line += f"Guessed, not told by them: {', '.join(guessed) or 'nothing'}."
        pairs = [f"{a} and {b}" for a, b in made.entangled()]
        if pairs:
            line += f" Told together rather than each: {'; '.join(pairs)}."
        if crowd:
            ratios = [ratio for _, ratio in crowd]
            line += (
                f" {len(ratios)} times from 1 MiB on of more ranks than processors, which are not "
                "fitted, are by the model's, times ranks per processor: "
                f"{np.median(ratios):.2f} (median; {min(ratios):.2f} to {max(ratios):.2f})."
            )
        lines.append(line)
    return lines


def predictions_table(
    kind: str, where_: Sequence[Place], rates: Rates, machine: Machine
) -> list[str]:
    """Times by algorithm, ranks and size."""
    heads = ["ranks", "where", "algorithm", "route", *map(size_shown, SHOWN)]
    rows = []
    for place in where_:
        sizes = [size for size in SHOWN if size >= least(kind, place.ranks)]
        times = {size: times_of(kind, place, size, rates, machine) for size in sizes}
        for way in WAYS[kind]:
            cells = [times.get(size, {}).get(way.name) for size in SHOWN]
            if any(cell is not None for cell in cells):
                told = ["-" if cell is None else shown(float(cell)) for cell in cells]
                rows.append([str(place.ranks), where(place), way.name, way.route or "none", *told])
    return table(heads, rows)


def changes_table(found: Sequence[Library], cluster: Cluster, ranks: Sequence[int]) -> list[str]:
    """Which algorithm is the fastest from which size on."""
    heads = ["kind", "ranks", *(each.results.mpi for each in found)]
    rows = []
    for kind in WAYS:
        for place in map(cluster.place, ranks):
            cells = []
            for each in found:
                machine, draws = each.on(cluster), each.fit.draws(DRAWS)
                words = []
                for change in changes(kind, place, each.fit.rates, machine):
                    if not change.before:
                        words.append(change.name)
                        continue
                    ends = spread_of(change, kind, place, draws, machine)
                    between = " to ".join(map(size_shown, ends)) if ends else "unsure"
                    words.append(f"from {size_shown(change.size)} ({between}) {change.name}")
                cells.append("; ".join(words))
            rows.append([kind, str(place.ranks), *cells])
    return table(heads, rows)


def today_table(found: Sequence[Library], cluster: Cluster, ranks: Sequence[int]) -> list[str]:
    """Where mpicoll's tables have another route than the model, with any of the libraries."""
    heads = ["kind", "where", "ranks", *(each.results.mpi for each in found)]
    rows = []
    for kind in WAYS:
        for place in places(cluster, ranks):
            cells = []
            for each in found:
                words = []
                for one in worse(each.table, kind, place, each.fit.rates, each.on(cluster)):
                    sizes = dict.fromkeys(map(size_shown, (one.first, one.last)))
                    most = f"{one.most:.2g}" if one.most < 100 else f"{round(one.most, -1):g}"
                    words.append(
                        f"{' to '.join(sizes)}: {one.today}, better {one.better} "
                        f"({most} x at {size_shown(one.at)})"
                    )
                cells.append("; ".join(words))
            if any(cells):
                rows.append([kind, where(place), str(place.ranks), *cells])
    return table(heads, rows)


def steps_table(found: Sequence[Library], cluster: Cluster, ranks: Sequence[int]) -> list[str]:
    """What the model would have in the tables."""
    heads = ["kind", "where", "ranks", *(each.results.mpi for each in found)]
    rows = []
    for kind in WAYS:
        for place in places(cluster, ranks):
            cells = []
            for each in found:
                first, *more = steps(kind, place, each.fit.rates, each.on(cluster))
                words = [f"from {size_shown(size)} {route}" for size, route in more]
                cells.append("; ".join([first[1], *words]))
            rows.append([kind, where(place), str(place.ranks), *cells])
    return table(heads, rows)


# --- the page and the figure --------------------------------------------------------------------


def stated(cluster: Cluster) -> str:
    """The network, in words."""
    _, memory, latency, bandwidth = cluster.machine
    order = "in turn" if cluster.scattered else "one after another"
    return (
        f"{cluster.each} ranks a node, {order}; {bandwidth / 1e9:g} GB/s out of a node and as much "
        f"into it, {latency * 1e6:g} µs a message between nodes; memory of a node "
        f"{memory / 1e9:g} GB/s."
    )


def parts(found: Sequence[Library], cluster: Cluster, ranks: Sequence[int]) -> dict[str, list[str]]:
    """What docs/model.md has from here, by the names of its marks."""
    return {
        "fitted": [
            *fitted_table(found), "", *explained_table(found), "",
            *(f"- {line}" for line in caveats(found)),
        ],
        "network": [stated(cluster)],
        "changes": changes_table(found, cluster, ranks),
        "tables": [*today_table(found, cluster, ranks), "", *steps_table(found, cluster, ranks)],
    }  # fmt: skip


#: Colours of algorithms.
_COLOURS = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999933",
    "#882255", "#aaaaaa",
]  # fmt: skip
#: Algorithms that are part of something else, by what comes first in their names.
_LINES = {"levels": "--", "widened": ":", "pieces": "-."}


def draw(library: Library, cluster: Cluster, ranks: Sequence[int], path: Path) -> None:
    """Time by size, one line an algorithm; where another begins to be the fastest it is marked.

    Needs matplotlib.
    """
    import figures
    import matplotlib

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mpicoll",
        "font.size": 8,
        "axes.grid": True,
    }
    colours = iter(_COLOURS)
    colour: dict[str, str] = {}
    rates, machine = library.fit.rates, library.on(cluster)
    with matplotlib.rc_context(settings | {"grid.alpha": 0.3}):
        grid, axes = figures._grid(
            len(WAYS), [f"{n} ranks" for n in ranks],
            f"predicted with {library.results.mpi}, the fastest marked\n{stated(cluster)}",
        )  # fmt: skip
        for kind, row in zip(WAYS, axes, strict=True):
            for place, axis in zip(map(cluster.place, ranks), row, strict=True):
                sizes = sizes_of(kind, place)
                found = [times_of(kind, place, size, rates, machine) for size in sizes]
                for name in found[0]:
                    way, _, rest = name.partition(", ")
                    family = rest if way in _LINES else way
                    if family not in colour:
                        colour[family] = next(colours)
                    style = {"color": colour[family], "linestyle": _LINES.get(way, "-")}
                    times = [each[name] * 1e6 for each in found]
                    axis.plot(sizes, times, **style, linewidth=1, label=name)
                for change in changes(kind, place, rates, machine)[1:]:
                    time = times_of(kind, place, change.size, rates, machine)[change.name] * 1e6
                    axis.plot([change.size], [time], "ko", markersize=4, fillstyle="none")
                    axis.axvline(change.size, color="black", linewidth=0.4, linestyle=":")
                figures._by_bytes(axis, "")
            row[0].set_ylabel(f"{kind} (us)")
        figures._legend(grid, axes.flat, 4)
        path.parent.mkdir(parents=True, exist_ok=True)
        figures._save(grid, path)


# --- the command --------------------------------------------------------------------------------


def processors_of(results: Results) -> int:
    """Of the machine that was measured."""
    return min(int(record["machine"]["processors"]) for record in results.records)


def read(paths: Iterable[Path]) -> list[Results]:
    """The results of each MPI library in files, and in folders of them; raises ValueError."""
    by_mpi: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                record = json.loads(file.read_text())
                if record.get("measurements"):
                    by_mpi.setdefault(record["mpi"], []).append(record)
            except (OSError, LookupError, AttributeError, ValueError) as error:
                raise ValueError(f"{file} is no report of host.py: {error}") from error
    return [Results(records) for records in by_mpi.values()]


def look(results: Results) -> Library:
    """Fits; raises ValueError where there is nothing to fit."""
    processors = processors_of(results)
    made, crowd = points(results, processors)
    found = fit(made)
    return Library(results, found, crowded(found, crowd, processors))


def report(
    found: Sequence[Library], cluster: Cluster, ranks: Sequence[int], every: bool
) -> list[str]:
    """Everything, in words; every: each measured time too."""
    lines = []
    for each in found:
        lines += [*about(each.results), ""]
        if every:
            lines += [f"{each.results.mpi}: times", "", *ratios_table(each.fit), ""]
    lines += ["Fitted", "", *fitted_table(found), ""]
    lines += ["Median relative error (and number of times)", "", *explained_table(found), ""]
    lines += [*caveats(found), "", f"Stated: {stated(cluster)}", ""]
    for each in found:
        for kind in WAYS:
            lines += [f"{kind}, from {each.results.mpi}", ""]
            rates, machine = each.fit.rates, each.on(cluster)
            lines += [*predictions_table(kind, places(cluster, ranks), rates, machine), ""]
    lines += ["The fastest by size", "", *changes_table(found, cluster, ranks), ""]
    lines += ["Where mpicoll's tables have another route", ""]
    lines += [*today_table(found, cluster, ranks), ""]
    return [*lines, "What the tables would be", "", *steps_table(found, cluster, ranks)]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json",
                        help="or a folder of them")  # fmt: skip
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, metavar="N")
    parser.add_argument("--each", type=int, default=64, metavar="N",
                        help="ranks a node (default: %(default)s)")  # fmt: skip
    parser.add_argument("--scattered", action="store_true",
                        help="ranks are put on the nodes in turn")  # fmt: skip
    parser.add_argument("--latency", type=float, default=1.5, metavar="US",
                        help="of a message between nodes (default: %(default)s)")  # fmt: skip
    parser.add_argument("--bandwidth", type=float, default=25.0, metavar="GB/S",
                        help="out of a node, and into it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--memory", type=float, default=200.0, metavar="GB/S",
                        help="read and written by a node (default: %(default)s)")  # fmt: skip
    parser.add_argument("--every", action="store_true", help="print each measured time")
    parser.add_argument("--markdown", nargs="?", type=Path, const=PAGE, metavar="PAGE",
                        help=f"write the parts of the page (default: {PAGE})")  # fmt: skip
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="FILE.svg",
                        help="default: %(default)s")  # fmt: skip
    options = parser.parse_args()
    if min(options.latency, options.bandwidth, options.memory) <= 0 or options.each < 1:
        parser.error("expected --each, --latency, --bandwidth and --memory above 0")
    for n in options.ranks:
        if n < 2 or (n > options.each and n % options.each):
            parser.error(f"--ranks {n}: expected 2 or more, on full nodes of {options.each}")
    return options


def main() -> int:
    """Fits, prints, draws."""
    options = parse_arguments()
    machine = Machine(0, 1e9 * options.memory, 1e-6 * options.latency, 1e9 * options.bandwidth)
    cluster = Cluster(options.each, options.scattered, machine)
    try:
        found = [look(results) for results in read(options.reports)]
        if not found:
            raise ValueError("there are no measurements in these files")
        print("\n".join(report(found, cluster, options.ranks, options.every)))
        if options.markdown:
            made = parts(found, cluster, options.ranks)
            text = filled(options.markdown.read_text(), "model", made)
            options.markdown.write_text(text)
    except (OSError, ValueError) as error:
        print(f"model.py: {error}", file=sys.stderr)
        return 2
    try:
        draw(found[0], cluster, options.ranks, options.figure)
    except ImportError as error:
        print(f"NO FIGURE: it needs matplotlib ({error}): pip install mpicoll[bench]")
    else:
        print(f"\nfigure: {options.figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
