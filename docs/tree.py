"""Lists the packages and modules of mpicoll with the first sentence of their docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parent.parent / "mpicoll"

#: The packages from top to bottom. Others come last.
ORDER = (
    "cli", "horovod", "torch", "api", "dispatch", "routes", "failures", "core", "arrays",
    "cuda", "launch", "kernels",
)  # fmt: skip


def summary(path: Path) -> str:
    """Return the first sentence of a Python docstring or of the first comment of a C file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = re.sub(r"^/\*|\*/.*", "", text, flags=re.DOTALL)
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0].rstrip(".:")


def packages() -> list[tuple[str, str]]:
    """Return (name, summary) of each package, from top to bottom."""
    names = sorted(path.parent.name for path in HOME.glob("*/__init__.py"))
    names.sort(key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return [(f"{name}/", summary(HOME / name / "__init__.py")) for name in names]


def _folder(folder: Path, indent: str) -> Iterator[str]:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.suffix in (".py", ".c", ".h", ".cu") and path.name != "__init__.py":
            yield f"{indent}{path.name}".ljust(32) + summary(path)
        elif path.is_dir() and any(path.glob("*.*")) and path.name != "__pycache__":
            about = path / "__init__.py"
            yield f"{indent}{path.name}/".ljust(32) + (summary(about) if about.exists() else "")
            yield from _folder(path, indent + "  ")


def tree() -> str:
    """Return all modules as an indented list, one a line."""
    return "\n".join(line.rstrip() for line in ["mpicoll/", *_folder(HOME, "  ")]) + "\n"


if __name__ == "__main__":
    print(tree(), end="")
