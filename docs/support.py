"""Write the tables of api.md, architecture.md, gpu.md, launching.md and settings.md, and the
variables of jobs/bind_gpu.sh, from the code, and the figure of performance.md from measurements.md.

python docs/support.py          rewrite the text between the marks
python docs/support.py --check  list the files that are out of date; exit with 1 if there are any
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import figure
import tree

from mpicoll.dtypes import DTYPES, OPERATIONS, Kind
from mpicoll.launch.launchers import LAUNCHERS
from mpicoll.primitives import PRIMITIVES, Layout
from mpicoll.routes import registry
from mpicoll.settings import SETTINGS

BEGIN, END = "<!-- {}: begin (docs/support.py) -->\n", "<!-- {}: end -->\n"

#: The arrays of a layout; with a list of arrays on one side or both; n is the number of ranks.
_ARRAYS = {
    Layout.IN_PLACE: ("one array, in place", ""),
    Layout.GATHERED: ("output: n times the input", "output: list of n arrays"),
    Layout.SCATTERED: ("input: n times the output", "input: list of n arrays"),
    Layout.EXCHANGED: ("n blocks in, n blocks out", "list of n arrays in, list of n arrays out"),
    Layout.ALIKE: ("input and output of equal size", ""),
    Layout.EMPTY: ("none", ""),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def primitives() -> str:
    """Return the table of primitives."""
    rows = [
        [
            ", ".join(f"`{name}`" for name in (row.name, *row.aliases)),
            _ARRAYS[row.layout][row.listed],
            f"`{row.root}`" if row.root else "",
            f"`MPI_{row.mpi}`" if row.mpi else "",
        ]
        for row in PRIMITIVES
    ]
    return table(["function", "arrays", "root", "in MPI"], rows)


def reductions() -> str:
    """Return the table of dtypes; dtypes with the same operations share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in DTYPES:
        is_own = row.accumulate.name == row.name
        computed = (
            "logic" if row.kind is Kind.BOOL else "the same" if is_own else row.accumulate.name
        )
        allowed = ", ".join(op.name for op in OPERATIONS if row.kind in op.kinds)
        rows.setdefault((computed, allowed), []).append(f"`{row.name}`")
    return table(
        ["dtype", "computed in", "operations"],
        [[", ".join(names), *words] for words, names in rows.items()],
    )


def environment() -> str:
    """Return the table of environment variables."""
    link = partial(re.sub, r"\b(\w+\.md)\b", r"[\1](\1)")
    rows = [[f"`{each.name}`", each.expected, link(each.effect)] for each in SETTINGS]
    return table(["variable", "value", "effect"], rows)


def waiting() -> str:
    """Return the table of device routes and the events that the host waits for."""
    rows = [
        [
            f"`{name}`",
            route.policy.host_waits_for or "for nothing: the call is put into a stream at once",
        ]
        for name, route in registry.DEVICE.items()
    ]
    return table(["route", "the host waits"], rows)


def launchers() -> str:
    """Return the table of launchers in the order of detection."""
    rows = [
        [
            each.name,
            ", ".join(f"`{mark}`" for mark in each.detected_by),
            each.protocol.value if each.protocol else "",
        ]
        for each in LAUNCHERS
        if each.detected_by
    ]
    return table(["launcher", "variables", "protocol"], rows)


def bind_script(text: str) -> str:
    """Return jobs/bind_gpu.sh with the local rank's variable of each launcher, innermost first."""
    names = [name for each in LAUNCHERS for name in each.local_rank]
    names = list(dict.fromkeys(reversed(names)))[::-1]
    lines = textwrap.wrap(" ".join(names), 84)
    return re.sub(r"(?<=for name in )[^;]*", lambda _: " \\\n    ".join(lines), text, count=1)


def packages() -> str:
    """The table of packages, from top to bottom."""
    return table(
        ["package", "contents"],
        [
            [f"`{name}`", re.sub(r"``(.*?)``", r"`\1`", about) + "."]
            for name, about in tree.packages()
        ],
    )


#: The tables of each page, by their names in its marks.
PAGES = {
    "api.md": {"primitives": primitives, "reductions": reductions},
    "architecture.md": {"packages": packages},
    "gpu.md": {"waiting": waiting},
    "launching.md": {"launchers": launchers},
    "settings.md": {"environment": environment},
}


def page(file: str, text: str) -> str:
    """Return the page with new tables."""
    for name, made in PAGES[file].items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{made()}\n{end}{after}"
    return text


def main() -> int:
    """Write or check the tables."""
    changed = False
    made: dict[Path, Callable[[str], str]] = {figure.FIGURE: lambda _: figure.drawn()}
    made |= {Path(__file__).with_name(name): partial(page, name) for name in PAGES}
    made[Path(__file__).parents[1] / "jobs" / "bind_gpu.sh"] = bind_script
    for path, make in made.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = make(old)
        changed = changed or new != old
        if "--check" not in sys.argv[1:]:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            print(f"{path} is out of date; run python docs/support.py", file=sys.stderr)
    return int(changed and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
