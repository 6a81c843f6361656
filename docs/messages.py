"""Read the messages of mpicoll's errors and warnings from its sources."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from mpicoll import errors
from mpicoll.horovod.common import exceptions

ROOT = Path(__file__).resolve().parent.parent / "mpicoll"

#: The classes of errors.
ERRORS = {*errors.__all__, *exceptions.__all__}

#: Placeholder for a value in a message.
GAP = "…"


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def template(node: ast.expr, names: Mapping[str, ast.expr] = MappingProxyType({})) -> str:
    """Return the text of a message, with a placeholder for each value.

    names: the constants of the module.
    """
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value, names) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, names) + template(right, names)
        case ast.Name(id=name) if name in names:
            return template(names[name])
    return GAP


def calls(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the class name (or "warning") and the message of each error of a source file."""
    tree = parse(path)
    names = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ERRORS or name == "warn":
            yield "warning" if name == "warn" else name, template(node.args[0], names)


def messages() -> dict[str, list[str]]:
    """Return the messages of each class in alphabetical order."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for name, text in calls(path):
            words = text.replace(GAP, "")
            if sum(letter.isalpha() for letter in words) > 7:  # otherwise it is composed elsewhere
                found.setdefault(name, set()).add(" ".join(text.split()))
    return {name: sorted(found[name], key=str.lower) for name in sorted(found)}


def listed() -> str:
    """Return all messages as Markdown."""
    parts = []
    for name, texts in messages().items():
        lines = "".join(f"- `` {text} ``\n" for text in texts)
        parts.append(f"### {'Warnings' if name == 'warning' else name}\n\n{lines}")
    return "\n".join(parts)
