"""Prints what ``make bench`` measured, the MPIs side by side, and draws it. Needs no MPI.

python benchmarks/report.py .cache/bench --figures .cache/bench/figures
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aims
from aims import Results
from measure import FACADE, GLOO, KIB, MIB, MPI4PY, TORCH, Aim, Times, bytes_shown, shown
from pages import DOCS, filled

#: The tables: section, title, and what makes a row of it. Of times: median and spread.
TABLES = (
    ("sizes", "Time of a call, float32: median, spread", ("primitive", "bytes")),
    ("dtypes", "Time of all_reduce: median, spread", ("bytes", "dtype")),
    ("many", "Many all_reduces of float32, together: median, spread", ("count", "bytes", "how")),
    ("overlap", "Beside computation: median, spread", ("primitive", "bytes", "ranks", "part")),
    (
        "ddp",
        "A DDP step, by MB of its buckets: median, spread",
        ("bucket", "how"),
    ),
    ("growth", "Numbers of ranks, float32: median, spread", ("primitive", "bytes", "ranks")),
    ("memory", "Memory besides the arrays", ("primitive", "bytes")),
)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown, aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return [line(heads), line(["-" * width for width in widths]), *map(line, rows)]


def aims_table(found: Sequence[Results]) -> list[str]:
    """What is aimed at, beside what each MPI's measurements say."""
    every = [{aim.name: aim for aim in aims.aims(results)} for results in found]
    first: dict[str, Aim] = {}
    for each in sorted(every, key=len, reverse=True):  # not all is asked of every MPI
        for name, aim in each.items():
            first.setdefault(name, aim)
    heads = ["two ranks", "aim", *(results.mpi for results in found)]
    rows = [
        [name, aim.asked, *(aim_cell(each[name]) if name in each else "-" for each in every)]
        for name, aim in first.items()
    ]
    return table(heads, rows)


def aim_cell(aim: Aim) -> str:
    """What was measured, and the verdict."""
    note = f" ({aim.note})" if aim.note else ""
    if aim.measured is None:
        return f"{aim.verdict}{note}"
    spread = "" if aim.spread is None else f" +-{aim.spread:.2f}"
    return f"{aim.measured:.2f}{spread} {aim.verdict}{note}"


def section_table(found: Sequence[Results], section: str, keys: Sequence[str]) -> list[str]:
    """All measurements of a section: median, and the spread in percent of it."""
    every = [results.find(section=section) for results in found]
    rows = dict.fromkeys(tuple(one[key] for key in keys) for each in every for one in each)
    heads, columns = list(keys), []
    for results, each in zip(found, every, strict=True):
        cells = {(one["case"], *(one[key] for key in keys)): cell(one) for one in each}
        for case in dict.fromkeys(one["case"] for one in each):
            heads.append(f"{results.name}: {case}")
            columns.append([cells.get((case, *row), "-") for row in rows])
    named = [[key_cell(k, v) for k, v in zip(keys, row, strict=True)] for row in rows]
    return table(heads, [[*name, *more] for name, *more in zip(named, *columns, strict=True)])


def cell(one: dict[str, Any]) -> str:
    """A measurement."""
    if "extra" in one:
        return f"{one['extra'] / MIB:.1f} MiB"
    return f"{shown(one['median'])} {one['spread'] / one['median']:.0%}"


def key_cell(key: str, value: Any) -> str:
    """What names a row."""
    return bytes_shown(value) if key == "bytes" else str(value)


def overlap_table(found: Sequence[Results]) -> list[str]:
    """The share of a call that is hidden behind computation."""
    points = dict.fromkeys(
        (one["primitive"], one["ranks"], one["bytes"])
        for results in found
        for one in results.find(section="overlap")
    )
    whos = (MPI4PY, FACADE, GLOO)
    heads = ["primitive", "ranks", "bytes", *(f"{r.name}: {who}" for r in found for who in whos)]
    rows = []
    for primitive, ranks, size in points:
        row = [primitive, str(ranks), bytes_shown(size)]
        for results in found:
            for who in whos:
                share = aims.hidden(results, who, primitive, ranks).get(size)
                row.append(f"{share.median:.0%} +-{share.spread:.0%}" if share else "-")
        rows.append(row)
    return table(heads, rows)


# --- the pages ----------------------------------------------------------------------------------

#: The sizes that the page shows; the figures show all.
SHOWN = (16, KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)


def times_table(found: Sequence[Results], keys: Sequence[str], **chosen: Any) -> list[str]:
    """MPI's own call, mpicoll's, and how many times faster that is; a row for each value of keys.

    chosen: what the measurements must have.
    """
    every = [results.find(**chosen) for results in found]
    rows = dict.fromkeys(tuple(one[key] for key in keys) for each in every for one in each)
    heads = list(keys)
    for results in found:
        heads += [f"{results.name}, its own", "mpicoll", "faster"]
    lines = []
    for row in rows:
        if dict(zip(keys, row, strict=True)).get("bytes", MIB) not in SHOWN:
            continue
        cells = [key_cell(*pair) for pair in zip(keys, row, strict=True)]
        for results in found:
            wanted = chosen | dict(zip(keys, row, strict=True))
            cells += beside(results, wanted, MPI4PY, FACADE)
        lines.append(cells)
    return table(heads, lines)


def beside(results: Results, wanted: dict[str, Any], other: str, who: str) -> list[str]:
    """Three cells: another's time, the own, and how many times faster that is, with its spread."""
    above, below = (
        next((Times(one["seconds"]) for one in results.find(**wanted, case=case)), None)
        for case in (other, who)
    )
    cells = ["-" if each is None else shown(each.median) for each in (above, below)]
    if above is None or below is None:
        return [*cells, "-"]
    ratio = above.per(below)
    return [*cells, f"{ratio.median:.2f} ±{ratio.spread:.2f}"]


def torch_table(found: Sequence[Results]) -> list[str]:
    """The backend of torch.distributed beside Gloo."""
    rows: list[tuple[str, dict[str, Any]]] = [
        (
            f"all_reduce {bytes_shown(size)}" + f" of {dtype}" * (section == "dtypes"),
            {"section": section, "primitive": "all_reduce", "bytes": size, "dtype": dtype},
        )
        for section, dtype, sizes in (
            ("sizes", "float32", (4, 64 * KIB, MIB, 16 * MIB, 64 * MIB)),
            ("dtypes", "bfloat16", (MIB, 16 * MIB)),
        )
        for size in sizes
    ]
    rows += [
        (f"DDP step, buckets of {bucket:g} MB", {"section": "ddp", "bucket": bucket, "how": "DDP"})
        for bucket in (25.0, 4.0)
    ]
    heads, lines = [""], []
    for results in found:
        heads += ["Gloo", results.mpi, "faster"]
    for name, wanted in rows:
        cells = [name]
        for results in found:
            cells += beside(results, wanted, GLOO, TORCH)
        lines.append(cells)
    return table(heads, lines)


def parts(found: Sequence[Results]) -> dict[str, dict[str, list[str]]]:
    """What the pages of docs/ have from here, by the names of the pages and of their marks."""
    ran = [f"- {line.strip()}" for results in found for line in about(results)]
    return {
        "performance.md": {
            "ran": ran,
            "aims": aims_table(found),
            "sizes": times_table(found, ("primitive", "bytes"), section="sizes"),
            "dtypes": times_table(found, ("dtype", "bytes"), section="dtypes"),
            "many": section_table(found, "many", ("count", "bytes", "how")),
            "overlap": overlap_table(found),
            "growth": times_table(found, ("primitive", "bytes", "ranks"), section="growth"),
        },
        "pytorch.md": {"speed": torch_table(found)},
    }


def publish(found: Sequence[Results], folder: Path) -> None:
    """Writes these parts; raises ValueError where a page has no place for one, or nothing was
    measured for it.
    """
    every = parts(found)
    empty = [
        name
        for made in every.values()
        for name, lines in made.items()
        if lines[0].startswith("|") and not lines[2:]
    ]
    if empty:
        raise ValueError(f"nothing was measured for {', '.join(empty)}: the pages stay as they are")
    for name, made in every.items():
        page = folder / name
        page.write_text(filled(page.read_text(), "bench", made))


# --- the report ---------------------------------------------------------------------------------


def about(results: Results) -> list[str]:
    """What ran."""
    first = results.records[0]
    machine = dict(first["machine"])
    load = max(record["machine"]["load before"] for record in results.records)
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        f"{results.mpi}, {first['date']}: {machine['processors']} processors, "
        f"{machine['processor']}; {versions}; load before at most {load}",
        *(f"    left out: {what}" for what in results.left_out),
    ]
    if any(record.get("quick") for record in results.records):
        lines.append("    MEASURED WITH --quick: a look, not to be relied on")
    crowded = sorted({r["ranks"] for r in results.records if r["ranks"] > machine["processors"]})
    if crowded:
        ranks = ", ".join(map(str, crowded))
        lines.append(f"    more ranks than processors, which take turns: {ranks} ranks")
    return lines


def report(found: Sequence[Results]) -> list[str]:
    """Everything, the aims last."""
    lines = []
    for section, title, keys in TABLES:
        if any(results.find(section=section) for results in found):
            lines += [title, "", *section_table(found, section, keys), ""]
    if any(results.find(section="overlap") for results in found):
        lines += ["Share of a call that is hidden behind computation", ""]
        lines += [*overlap_table(found), ""]
    for results in found:
        lines += about(results)
    return [*lines, "", *aims_table(found)]


def main() -> int:
    """Prints and draws."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, help="with a folder of files for each MPI")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw SVG images there")
    parser.add_argument("--pages", nargs="?", type=Path, const=DOCS, metavar="FOLDER",
                        help="write the parts of its pages (default: %(const)s)")  # fmt: skip
    options = parser.parse_args()
    found = aims.read(options.folder) if options.folder.is_dir() else []
    if not found:
        parser.error(f"{options.folder}: there are no results")
    text = "\n".join(report(found))
    print(text)
    (options.folder / "report.md").write_text(f"{text}\n")
    if options.pages:
        try:
            publish(found, options.pages)
        except (OSError, ValueError) as error:
            print(f"report.py: {error}", file=sys.stderr)
            return 2
    if options.figures:
        try:
            import figures
        except ImportError as error:
            print(f"NO FIGURES: they need matplotlib ({error}): pip install mpicoll[bench]")
        else:
            figures.draw(found, options.figures)
            print(f"\nfigures: {options.figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
