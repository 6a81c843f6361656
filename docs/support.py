"""Writes the tables of api.md, gpu.md and launching.md from the project's own tables, and the
figure of performance.md from that page's tables.

python docs/support.py          rewrite what is between the marks
python docs/support.py --check  exit code 1 if that would change anything
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import figure

from mpicoll.dtypes import DTYPES, OPERATIONS, Kind
from mpicoll.launch.launchers import LAUNCHERS, Dialect, Launcher
from mpicoll.primitives import PRIMITIVES, Layout
from mpicoll.routes import registry
from mpicoll.settings import SETTINGS

BEGIN, END = "<!-- {}: begin (docs/support.py) -->\n", "<!-- {}: end -->\n"

_IN_WORDS = {
    Layout.IN_PLACE: "one array, in place",
    Layout.GATHERED: "the inputs of all ranks, in rank order",
    Layout.SCATTERED: "one block for each rank, in rank order",
    Layout.EXCHANGED: "one block for and from each rank",
    Layout.ALIKE: "one array in, one out, of as many elements",
    Layout.EMPTY: "no array",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def tables() -> str:
    """The table of primitives and the table of dtypes and operations."""
    primitives = [
        [
            f"`{row.name}`" + "".join(f", `{alias}`" for alias in row.aliases),
            _IN_WORDS[row.layout] + (", as a list" if row.listed else ""),
            f"`{row.root}`" if row.root else "",
            "yes" if row.reduces else "",
            f"`MPI_{row.mpi}`",
        ]
        for row in PRIMITIVES
    ]
    dtypes = [
        [
            f"`{row.name}`",
            "logical" if row.kind is Kind.BOOL else row.accumulate.name,
            *("yes" if row.kind in op.kinds else "refused" for op in OPERATIONS),
        ]
        for row in DTYPES
    ]
    return (
        table(["primitive", "arrays", "root", "combines", "in MPI"], primitives)
        + "\nEvery dtype is moved by every primitive; these are the reductions:\n\n"
        + table(["dtype", "computed in", *(op.name for op in OPERATIONS)], dtypes)
    )


def environment() -> str:
    """The table of environment variables."""
    link = partial(re.sub, r"\b(\w+\.md)\b", r"[\1](\1)")
    rows = [[f"`{each.name}`", each.expected, link(each.effect)] for each in SETTINGS]
    return table(["variable", "value", "what it does"], rows)


def waiting() -> str:
    """The table of what the host waits for in calls on device memory."""
    rows = [
        [
            f"`{name}`",
            route.policy.host_waits_for or "for nothing: the call is put into a stream at once",
        ]
        for name, route in registry.DEVICE.items()
    ]
    return table(["route", "the host waits"], rows)


def _gives(launcher: Launcher) -> str:
    """Where the rank and the number of ranks are, and those on the node."""
    if not launcher.marks:
        return "a batch system: it starts no ranks itself"
    named = {
        "rank": [launcher.rank],
        "size": [launcher.size],
        "local rank": launcher.local_rank,
        "local size": [launcher.local_size],
    }
    words = [f"{what} `{name}`" for what, names in named.items() for name in names if name]
    return ", ".join(words)


_LISTENERS = {
    Dialect.PMI: "PMI: MPICH, Intel MPI, Cray MPICH, MVAPICH",
    Dialect.PMIX: "PMIx: Open MPI, and libraries that were built with PMIx",
}


#: What starts ranks without variables of its own: how it is recognised, and what it gives.
_OTHERS = {
    "`torch.multiprocessing`": (
        "a child of `multiprocessing`: what a launcher has set is for its parent",
        "the arguments `rank` and `world_size`, of the program",
    ),
    "processes by hand": (
        "`RANK` and `WORLD_SIZE`, with `MASTER_ADDR` and `MASTER_PORT` or an `init_method`; or "
        "arguments",
        _gives(LAUNCHERS[0]),
    ),
    "Ray, Spark, Dask": (
        "as by hand: `run` takes away what makes the worker a rank of a launcher",
        _gives(LAUNCHERS[0]),
    ),
}


def launchers() -> str:
    """The table of launchers, in the order in which they are looked for."""
    rows = [
        [
            each.name,
            ", ".join(f"`{mark}`" for mark in each.marks),
            _gives(each),
            _LISTENERS[each.dialect] if each.dialect else "",
        ]
        for each in LAUNCHERS
    ]
    rows += [[name, *words, ""] for name, words in _OTHERS.items()]
    return table(
        ["", "launcher", "recognised by", "what it gives", "MPI learns its ranks by"],
        [[str(number), *row] for number, row in enumerate(rows, 1)],
    )


#: The tables of each page, by their names in its marks.
PAGES = {
    "api.md": {"tables": tables, "environment": environment},
    "gpu.md": {"waiting": waiting},
    "launching.md": {"launchers": launchers},
}


def page(file: str, text: str) -> str:
    """The page with its tables written anew."""
    for name, made in PAGES[file].items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{made()}\n{end}{after}"
    return text


def main() -> int:
    """Write or check."""
    changed = False
    made: dict[Path, Callable[[str], str]] = {figure.FIGURE: lambda _: figure.drawn()}
    made |= {Path(__file__).with_name(name): partial(page, name) for name in PAGES}
    for path, make in made.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = make(old)
        changed = changed or new != old
        if "--check" not in sys.argv[1:]:
            path.write_text(new, encoding="utf-8")
    return int(changed and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
