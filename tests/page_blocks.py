"""The code blocks of the pages, and what ranks do with them:

mpiexec -n 2 python tests/page_blocks.py CHOICE

CHOICE is JSON: {page: {"way": IN_TURN or PROGRAMS, "prelude": source, "skip": words, "grouped":
whether blocks that make no process group find one}}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ENGINES", "IN_TURN", "PROGRAMS", "Block", "blocks", "engine_blocks"]

ROOT = Path(__file__).resolve().parent.parent

#: Ways to execute the Python blocks of a page: one after another with the same names, or each as a
#: program of its own.
IN_TURN, PROGRAMS = "in turn", "programs"

#: What a block has that starts ranks on the workers of an engine, and the engine.
#: tests/clients/test_engines.py runs these blocks.
ENGINES = {"import ray": "ray", "import spark": "spark", "import dask": "dask"}

#: Seconds after which a page hangs: on a busy machine torch alone takes long to load.
LIMIT = 150

_BLOCK = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code: its first line's number, its language, and its text.

    output: what the page says that it prints: the block of language text right behind it.
    """

    line: int
    language: str
    text: str
    output: str | None = None

    @property
    def lined(self) -> str:
        """The text with its line numbers in the page."""
        return "\n" * (self.line - 1) + self.text


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page."""
    found = list(_BLOCK.finditer(page))
    for i, one in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        prints = after and after[2] == "text" and "\n#" not in page[one.end() : after.start()]
        yield Block(
            page[: one.start(3)].count("\n") + 1,
            one[2],
            re.sub(f"^{one[1]}", "", one[3], flags=re.MULTILINE),
            after[3] if after and prints else None,
        )


def engine_blocks() -> Iterator[tuple[str, str, Block]]:
    """The blocks of all pages that need an engine: page, engine, block."""
    for page in sorted(ROOT.glob("docs/*.md")):
        for block in blocks(page.read_text(encoding="utf-8")):
            for word, engine in ENGINES.items():
                if block.language == "python" and word in block.text:
                    yield str(page.relative_to(ROOT)), engine, block


def _end() -> None:
    """End the groups that a block has left."""
    for name in ("torch.distributed", "mpicoll"):
        module = sys.modules.get(name)
        if module and module.is_initialized():
            module.destroy_process_group()


def _run(page: Path, how: dict[str, Any]) -> None:
    """Execute the Python blocks of a page; raises what one raises."""
    from mpi4py import MPI

    names: dict[str, Any] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "python" or any(word in block.text for word in how["skip"]):
            continue
        if how["way"] == PROGRAMS or not names:
            names = {"__name__": "__main__"}
            exec(how["prelude"], names)
            if how["grouped"] and "init_process_group" not in block.text:
                exec("group = dist.init_process_group()", names)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.lined, str(page), "exec"), names)
        if how["way"] == PROGRAMS:
            _end()
        if block.output is not None:
            everything = MPI.COMM_WORLD.allgather(printed.getvalue())
            lines = sorted("".join(everything).splitlines())
            expected = sorted(block.output.splitlines())
            if lines != expected:
                raise AssertionError(f"line {block.line} prints {lines}, not {expected}")
    _end()


def main() -> int:
    """Run the chosen pages; what goes wrong ends the job."""
    for page, how in json.loads(sys.argv[1]).items():
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        try:
            _run(ROOT / page, how)
        except BaseException:
            from mpi4py import MPI

            sys.stderr.write(f"{page}: {traceback.format_exc()}")
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
