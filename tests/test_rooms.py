"""A package imports only packages below it, without cycles."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import mpicoll

pytestmark = pytest.mark.any_mpi

HOME = Path(mpicoll.__file__).parent

#: From top to bottom: a room imports from those behind it alone. ``mpicoll`` itself finds names
#: when they are used.
ROOMS = [
    "__main__", "cli", "horovod", "torch", "api", "dispatch", "routes", "failures", "core",
    "arrays", "cuda", "launch", "kernels", "ground",
]  # fmt: skip
GROUND = {
    "communicators", "control_messages", "dtypes", "errors", "line_protocol", "machine", "output",
    "primitives", "private_files", "serialized_mpi", "settings", "signals",
}  # fmt: skip

Imports = dict[str, dict[str, bool]]


def _name(path: Path) -> str:
    parts = path.relative_to(HOME.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in HOME.rglob("*.py")}


def _imports(path: Path) -> dict[str, bool]:
    """What a module imports of mpicoll, and whether it does so when it is loaded. What is for types
    alone does not count.
    """
    found: dict[str, bool] = {}

    def look(node: ast.AST, loads: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            names: list[str] = []
            if isinstance(child, ast.ImportFrom) and child.module:
                inside = [f"{child.module}.{each.name}" for each in child.names]
                names = [each if each in MODULES else child.module for each in inside]
            elif isinstance(child, ast.Import):
                names = [each.name for each in child.names]
            for each in names:
                if each.split(".")[0] == "mpicoll":
                    found[each] = found.get(each, False) or loads
            look(child, loads and not isinstance(child, (ast.FunctionDef, ast.Lambda)))

    look(ast.parse(path.read_text("utf-8")), True)
    return found


@pytest.fixture(scope="module")
def imports() -> Imports:
    return {name: _imports(path) for name, path in MODULES.items()}


def _room(name: str) -> str | None:
    """The room of a module; None for ``mpicoll`` itself."""
    first = name.split(".")[1:2]
    return ("ground" if first[0] in GROUND else first[0]) if first else None


def test_every_module_has_a_room() -> None:
    assert {_room(name) for name in MODULES} == {None, *ROOMS}


def test_every_import_leads_downwards(imports: Imports) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in others
        if (room := _room(name)) and (below := _room(other))
        if ROOMS.index(room) > ROOMS.index(below)
    ]
    assert not wrong


def test_there_are_no_circles(imports: Imports) -> None:
    """Among what modules load when they are loaded."""
    graph = {name: {other for other in others if others[other]} for name, others in imports.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def _patches(path: Path) -> list[str]:
    """Assignments to attributes of names that a module imports from mpicoll. At import time
    attributes of these attributes count, too.
    """
    found: list[str] = []
    tree = ast.parse(path.read_text("utf-8"))
    imported = {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mpicoll"
        for each in node.names
    }

    def look(node: ast.AST, loads: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, (ast.Store, ast.Del)):
                owner = child.value
                while loads and isinstance(owner, ast.Attribute):
                    owner = owner.value
                if isinstance(owner, ast.Name) and owner.id in imported:
                    found.append(f"{_name(path)}:{child.lineno} {ast.unparse(child)}")
            look(child, loads and not isinstance(child, (ast.FunctionDef, ast.Lambda)))

    look(tree, True)
    return found


def test_no_module_assigns_to_attributes_of_imported_names() -> None:
    """Lower packages take functions by constructors, arguments and declared interfaces."""
    assert [each for path in MODULES.values() for each in _patches(path)] == []
