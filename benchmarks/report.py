"""Print the results of ``make bench``, with all MPIs side by side. Does not need MPI.

    python benchmarks/report.py .cache/bench

``--pages`` writes the tables of docs/ in which a number changed by more than its spread. A table of
docs/ has a section for each model of processors. Only the section of the measured model is written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import truediv
from pathlib import Path
from typing import Any

import aims
from aims import FACADE, GLOO, KIB, MIB, MPI4PY, TORCH, Aim, Results, format_seconds

from mpicoll.output import format_bytes

DOCS = Path(__file__).resolve().parent.parent / "docs"

#: The tables: section, title, and keys of a row. Times are medians with spreads.
TABLES = (
    ("sizes", "Time of a call, float32: median, spread", ("primitive", "bytes")),
    ("dtypes", "Time of all_reduce: median, spread", ("bytes", "dtype")),
    ("many", "Many all_reduces of float32, together: median, spread", ("count", "bytes", "how")),
    ("overlap", "Beside computation: median, spread", ("primitive", "bytes", "ranks", "part")),
    (
        "reproducible",
        "all_reduce in reproducible groups: median, spread",
        ("bytes", "dtype", "how"),
    ),
    ("ddp", "A DDP step, by MB of its buckets: median, spread", ("bucket", "how")),
    ("fsdp", "An FSDP2 step: median, spread", ("how",)),
    ("contest", "Other libraries, float32: median, spread", ("primitive", "bytes")),
    ("limit", "Copies, float32: median, spread", ("primitive", "bytes")),
    ("async", "Asynchronous calls, float32: median, spread", ("primitive", "bytes", "how")),
    ("start", "Start of ranks: median, spread", ("ranks",)),
    ("growth", "Numbers of ranks, float32: median, spread", ("primitive", "bytes", "ranks")),
    ("memory", "Memory besides the arrays", ("primitive", "bytes")),
)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table as aligned lines."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return [line(heads), line(["-" * width for width in widths]), *map(line, rows)]


def aims_table(found: Sequence[Results]) -> list[str]:
    """Return the aims and the measured values by MPI."""
    every = [aims.aims(results) for results in found]
    rows: dict[str, list[Aim | None]] = {
        aim.name: [None] * len(found) for own in every for aim in own
    }
    for column, own in enumerate(every):
        for aim in own:
            rows[aim.name][column] = aim
    heads = ["two ranks", "aim", *(results.label for results in found)]
    return table(
        heads,
        [
            [name, next(filter(None, own)).asked, *("-" if a is None else aim_cell(a) for a in own)]
            for name, own in rows.items()
        ],
    )


def slower_table(found: Sequence[Results]) -> list[str]:
    """Return MPI's time / mpicoll's by MPI where mpicoll is slower beyond the spread."""
    cells = {results.label: aims.slower_cells(results) for results in found}
    labels = [label for label, every in cells.items() if any(every.values())]
    rows: dict[tuple[int, str, int], list[str]] = {}
    for column, label in enumerate(labels):
        for ranks, every in cells[label].items():
            for point, ratio in every.items():
                if aims.is_slower(ratio):
                    row = rows.setdefault((ranks, *point), [""] * len(labels))
                    row[column] = f"{1 / ratio.figure.median:.2f}"
    heads = ["ranks", "primitive", "bytes", *labels]
    lines = [[str(at[0]), at[1], format_bytes(at[2]), *rows[at]] for at in sorted(rows)]
    return table(heads, lines or [["-"] * len(heads)])


def aim_cell(aim: Aim) -> str:
    """Return the measured value and the verdict."""
    note = f" ({aim.note})" if aim.note else ""
    if aim.measured is None:
        return f"{aim.verdict}{note}" if note else "-"
    spread = "" if aim.spread is None else f" +-{aim.spread:.2f}"
    return f"{aim.measured:.2f}{spread} {aim.verdict}{note}"


def section_table(
    found: Sequence[Results], section: str, keys: Sequence[str], sizes: Container[int] | None = None
) -> list[str]:
    """Return the measurements of a section: medians, and spreads in percent.

    sizes: in bytes; None for all.
    """
    found = [results for results in found if results.find(section=section)]
    every = [
        [one for one in results.find(section=section) if sizes is None or one["bytes"] in sizes]
        for results in found
    ]
    rows = rows_of(every, keys)
    heads, columns = list(keys), []
    for results, each in zip(found, every, strict=True):
        cells = {(one["case"], *(one[key] for key in keys)): cell(one) for one in each}
        for case in dict.fromkeys(one["case"] for one in each):
            heads.append(f"{results.name}: {case}")
            columns.append([cells.get((case, *row), "-") for row in rows])
    named = [[key_cell(k, v) for k, v in zip(keys, row, strict=True)] for row in rows]
    return table(heads, [[*name, *more] for name, *more in zip(named, *columns, strict=True)])


def rows_of(
    measured: Iterable[Iterable[dict[str, Any]]], keys: Sequence[str]
) -> list[tuple[Any, ...]]:
    """Return the keys of the rows of a table in order."""
    return list(dict.fromkeys(tuple(one[key] for key in keys) for each in measured for one in each))


def cell(one: dict[str, Any]) -> str:
    """Return a measurement as text."""
    if "extra" in one:
        return f"{one['extra'] / MIB:.1f} MiB"
    return f"{format_seconds(one['median'])} {one['spread'] / one['median']:.0%}"


def key_cell(key: str, value: Any) -> str:
    """Return a key of a row as text."""
    return format_bytes(value) if key == "bytes" else str(value)


def overlap_table(found: Sequence[Results]) -> list[str]:
    """Return the table of overlap with computation."""
    found = [results for results in found if results.find(section="overlap")]
    keys = ("primitive", "ranks", "bytes")
    points = rows_of([results.find(section="overlap") for results in found], keys)
    callers = (MPI4PY, FACADE, GLOO)
    heads = [*keys, *(f"{r.name}: {caller}" for r in found for caller in callers)]
    rows = []
    for point in points:
        primitive, ranks, size = point
        row = [key_cell(*pair) for pair in zip(keys, point, strict=True)]
        for results in found:
            for caller in callers:
                share = aims.hidden(results, caller, primitive, ranks).get(size)
                figure = share and share.figure
                row.append(f"{figure.median:.0%} +-{figure.spread:.0%}" if figure else "-")
        rows.append(row)
    return table(heads, rows)


# --- the pages ----------------------------------------------------------------------------------

#: Sizes in bytes that the page shows.
SHOWN = (4, 64 * KIB, MIB, 16 * MIB, 64 * MIB)


def times_table(found: Sequence[Results], keys: Sequence[str], **chosen: Any) -> list[str]:
    """Return the times of MPI and mpicoll and their ratio, by keys.

    chosen: required values of the measurements.
    """
    found = [results for results in found if results.find(**chosen)]
    every = [results.find(**chosen) for results in found]
    rows = rows_of(every, keys)
    heads = list(keys)
    for results in found:
        heads += [f"{results.name}, its own", "mpicoll", "faster"]
    lines = []
    for row in rows:
        given = dict(zip(keys, row, strict=True))
        ranks = given.get("ranks", 4)  # `sizes` has two ranks
        if given.get("bytes", MIB) not in SHOWN or ranks not in (4, 16):
            continue
        cells = [key_cell(*pair) for pair in zip(keys, row, strict=True)]
        for results in found:
            wanted = chosen | dict(zip(keys, row, strict=True))
            cells += beside(results, wanted, MPI4PY, FACADE)
        lines.append(cells)
    return table(heads, lines)


def beside(results: Results, wanted: dict[str, Any], other: str, caller: str) -> list[str]:
    """Return the times of two cases, and their ratio with its spread."""
    above, below = (
        next((aims.times_of(one) for one in results.find(**wanted, case=case)), None)
        for case in (other, caller)
    )
    cells = ["-" if each is None else format_seconds(each.figure.median) for each in (above, below)]
    if above is None or below is None:
        return [*cells, "-"]
    ratio = above.pair(below, truediv)
    return [*cells, f"{ratio.figure.median:.2f} ±{ratio.figure.spread:.2f}"]


def torch_table(found: Sequence[Results]) -> list[str]:
    """Return the times of Gloo and of the backend of torch.distributed."""
    rows: list[tuple[str, dict[str, Any]]] = [
        (
            f"all_reduce {format_bytes(size)}" + f" of {dtype}" * (section == "dtypes"),
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
    rows += [("FSDP2 step", {"section": "fsdp", "how": "FSDP2"})]
    found = [results for results in found if results.find(section="sizes", case=TORCH)]
    heads, lines = [""], []
    for results in found:
        heads += ["Gloo", results.label, "faster"]
    for name, wanted in rows:
        cells = [name]
        for results in found:
            cells += beside(results, wanted, GLOO, TORCH)
        if any(cell != "-" for cell in cells[1:]):
            lines.append(cells)
    return table(heads, lines)


def parts(found: Sequence[Results]) -> dict[str, dict[str, list[str]]]:
    """Return the generated parts of docs/ by page and mark."""
    ran = [f"- {line}" for line in about(found) if "not supported" not in line]  # "-" in the tables
    usual = {MPI4PY, FACADE, TORCH, GLOO}  # which separate tables show
    others = [one for one in found if {x["case"] for x in one.find(section="contest")} - usual]
    return {
        "measurements.md": {
            "ran": ran,
            "sizes": times_table(found, ("primitive", "bytes"), section="sizes"),
            "dtypes": times_table(found, ("dtype", "bytes"), section="dtypes"),
            "many": section_table(found, "many", ("count", "bytes", "how")),
            "reproducible": section_table(found, "reproducible", ("bytes", "dtype", "how")),
            "overlap": overlap_table(found),
            "growth": times_table(found, ("primitive", "bytes", "ranks"), section="growth"),
            "contest": section_table(others or found, "contest", ("bytes",), SHOWN),
            "aims": aims_table(found),
            "slower": slower_table(found),
        },
        "pytorch.md": {"speed": torch_table(found)},
    }


def fill_page(text: str, topic: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return the page with the text between its marks replaced.

    parts: lines by mark of this topic. Raises ValueError if a mark is missing.
    """
    for name, lines in parts.items():
        before, _, after = _around(text, topic, name)
        text = before + "\n" + "\n".join(lines) + "\n\n" + after
    return text


def _around(text: str, topic: str, name: str) -> tuple[str, str, str]:
    """Split a page at the two marks of a part: text before, between and after them."""
    begin, end = f"<!-- {topic}: {name} -->\n", f"<!-- {topic}: end of {name} -->\n"
    before, found, rest = text.partition(begin)
    body, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"expected the marks {begin.strip()} and {end.strip()}")
    return before + begin, body, end + after


#: A number with unit and spread, such as "2.72 +-0.06", "4.42 ms 3%" and "6 ms".
_NUMBER = re.compile(r"(-?\d[\d.e-]*)( us| ms| s|%)?(?: (?:\+-|±)([\d.]+)| (\d+)%)?")
_UNITS = {" us": 1e-6, " ms": 1e-3, " s": 1.0, "%": 1.0, None: 1.0}
#: Relative spread of a number without one.
_UNKNOWN_SPREAD = 0.25


def _number(cell: str) -> tuple[float, float] | None:
    """Return the number at the start of a cell and its spread, or None without a number."""
    found = _NUMBER.match(cell)
    if found is None:
        return None
    digits, unit, spread, percent = found.groups()
    value = float(digits)
    part = float(percent) / 100 if percent else _UNKNOWN_SPREAD
    width = float(spread) if spread else part * abs(value)
    return _UNITS[unit] * value, _UNITS[unit] * width


def _same(before: str, after: str) -> bool:
    """Return whether two cells are equal, or their numbers differ by at most both spreads."""
    if before == after:
        return True
    numbers = _number(before), _number(after)
    if numbers[0] is None or numbers[1] is None:
        return False
    (old, old_spread), (new, new_spread) = numbers[0], numbers[1]
    return abs(new - old) <= old_spread + new_spread


def find_moved(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the first cells of the rows in which a number changed by more than its spread.

    If the tables have different rows or columns, return the first cells of all rows.
    """
    old, new = (
        [_cells(line) for line in lines if line.startswith("| ")] for lines in (before, after)
    )
    if [len(row) for row in old] != [len(row) for row in new] or old[:1] != new[:1]:
        return [row[0] for row in new[2:]]
    return [row[0] for was, row in zip(old, new, strict=True) if not all(map(_same, was, row))]


def _cells(line: str) -> list[str]:
    """Return the cells of a row, without the dashes of the second line."""
    return [cell.strip(" -") or "-" for cell in line.strip("|").split("|")]


#: Begins the section of a model of processors.
_CPU = re.compile(r"\*\*(.+)\*\*")


def by_cpu(lines: Iterable[str]) -> dict[str, list[str]]:
    """Return the sections of a part: the lines by model of the processors, without empty ends."""
    sections: dict[str, list[str]] = {}
    own: list[str] = []
    for line in lines:
        if found := _CPU.fullmatch(line):
            own = sections.setdefault(found[1], [])
        else:
            own.append(line)
    return {cpu: "\n".join(own).strip().splitlines() for cpu, own in sections.items()}


def join_sections(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a part with these sections."""
    lines = [line for cpu, own in sorted(sections.items()) for line in (f"**{cpu}**", "", *own, "")]
    return lines[:-1]


def publish(found: Sequence[Results], folder: Path) -> set[str]:
    """Write the parts of pages in which a number changed by more than its spread.

    Sections of other models of processors are kept. Returns the names of the parts. Raises
    ValueError if a page lacks the marks of a part, or a part has no measurements.
    """
    every = parts(found)
    empty = [
        name
        for own in every.values()
        for name, lines in own.items()
        if lines[0].startswith("|") and not lines[2:]
    ]
    if empty:
        raise ValueError(f"nothing was measured for {', '.join(empty)}: the pages are unchanged")
    cpu, moved = found[0].cpu, set[str]()
    for name, own in every.items():
        text = (folder / name).read_text()
        changed: dict[str, list[str]] = {}
        for part, lines in own.items():
            sections = by_cpu(_around(text, "bench", part)[1].splitlines())
            rows = find_moved(sections.get(cpu, []), lines)
            if rows or part == "ran":
                changed[part] = join_sections(sections | {cpu: lines})
        if changed.keys() - {"ran"}:  # then also the versions and the machine
            (folder / name).write_text(fill_page(text, "bench", changed))
            moved |= changed.keys()
    return moved


# --- the report ---------------------------------------------------------------------------------


def about(found: Sequence[Results]) -> list[str]:
    """Return the machine and the versions; and the date, load and missing cases of each MPI."""
    launched = [[each for each in one.records if "machine" in each] for one in found]
    every = [record for records in launched for record in records]
    processors = every[0]["machine"]["processors"]
    versions = dict.fromkeys(" ".join(each) for one in every for each in one["versions"].items())
    lines = [f"{processors} processors; {', '.join(versions)}"]
    for results, records in zip(found, launched, strict=True):
        load = max(record["machine"]["load before"] for record in records)
        lines.append(f"{results.label}, {records[0]['date']}, load before at most {load}")
        lines += [f"left out with {results.name}: {reason}" for reason in results.left_out]
    if any(record.get("quick") for results in found for record in results.records):
        lines.append("MEASURED WITH --quick: not reliable")
    if crowded := sorted({one["ranks"] for one in every if one["ranks"] > processors}):
        lines.append(f"more ranks than processors: {', '.join(map(str, crowded))} ranks")
    return lines


def report(found: Sequence[Results]) -> list[str]:
    """Return all tables, with the aims at the end."""
    lines = []
    for section, title, keys in TABLES:
        if any(results.find(section=section) for results in found):
            lines += [title, "", *section_table(found, section, keys), ""]
    if any(results.find(section="overlap") for results in found):
        lines += ["Overlap of calls with computation", ""]
        lines += [*overlap_table(found), ""]
    lines += [*about(found), "", f"Aims on {found[0].cpu}", "", *aims_table(found), ""]
    return [*lines, "Slower than MPI's own call beyond the spread", "", *slower_table(found)]


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, help="has a subfolder with files for each MPI")
    parser.add_argument("--pages", nargs="?", type=Path, const=DOCS, metavar="FOLDER",
                        help="write the tables of its pages (default: %(const)s)")  # fmt: skip
    options = parser.parse_args()
    found = aims.read(options.folder) if options.folder.is_dir() else []
    if not found:
        parser.error(f"{options.folder}: no results found")
    text = "\n".join(report(found))
    print(text)
    (options.folder / "report.md").write_text(f"{text}\n")
    if options.pages:
        try:
            publish(found, options.pages)
        except (OSError, ValueError) as error:
            print(f"report.py: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
