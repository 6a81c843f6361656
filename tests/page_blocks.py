"""Run the code blocks of the pages:

mpiexec -n 2 python tests/page_blocks.py CHOICE

CHOICE is JSON by page: {"skip": words of blocks that do not run}, and, optionally, "in_turn" or
"grouped", with source to run before. "in_turn" runs the blocks one after another with the same
names. Otherwise each is a program, and "grouped" creates a process group for those without one.
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

ROOT = Path(__file__).resolve().parent.parent

#: Words of blocks that start ranks on an engine, and the engine.
#: tests/clients/test_engines.py runs these blocks.
ENGINES = {"import ray": "ray", "import spark": "spark", "import dask": "dask"}

#: Timeout of a page in seconds; torch alone loads slowly on a busy machine.
LIMIT = 150

_BLOCK = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    line:   the number of its first line.
    output: the expected output: the text block after it.
    """

    line: int
    language: str
    text: str
    output: str | None = None

    @property
    def lined(self) -> str:
        """The text, shifted to its line numbers in the page."""
        return "\n" * (self.line - 1) + self.text


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page."""
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
    """Yield page, engine and block of all blocks that need an engine."""
    for page in sorted(ROOT.glob("docs/*.md")):
        for block in blocks(page.read_text(encoding="utf-8")):
            for word, engine in ENGINES.items():
                if block.language == "python" and word in block.text:
                    yield str(page.relative_to(ROOT)), engine, block


def _end() -> None:
    """Destroy the groups that a block has not destroyed."""
    for name in ("torch.distributed", "mpicoll"):
        module = sys.modules.get(name)
        if module and module.is_initialized():
            module.destroy_process_group()


def _run(page: Path, how: dict[str, Any]) -> None:
    """Execute the Python blocks of a page. Raises the exception of a block."""
    from mpi4py import MPI

    names: dict[str, Any] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "python" or any(word in block.text for word in how["skip"]):
            continue
        if "in_turn" not in how or not names:
            names = {"__name__": "__main__"}
            exec(how.get("in_turn", how.get("grouped", "")), names)
            if "grouped" in how and "init_process_group" not in block.text:
                exec("group = dist.init_process_group()", names)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.lined, str(page), "exec"), names)
        if "in_turn" not in how:
            _end()
        if block.output is not None:
            everything = MPI.COMM_WORLD.allgather(printed.getvalue())
            lines = sorted("".join(everything).splitlines())
            expected = sorted(block.output.splitlines())
            if lines != expected:
                raise AssertionError(f"line {block.line} prints {lines}, not {expected}")
    _end()


def main() -> int:
    """Run the chosen pages. An error aborts the job."""
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
