"""A package imports only packages below it, without cycles."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tree

import mpicoll

pytestmark = pytest.mark.any_mpi

HOME = Path(mpicoll.__file__).parent

#: From top to bottom. BASE is the modules directly in mpicoll/.
BASE = "(base)"
PACKAGES = ["__main__", *tree.ORDER, BASE]

Imports = dict[str, dict[str, bool]]


def _name(path: Path) -> str:
    parts = path.relative_to(HOME.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in HOME.rglob("*.py")}


def _imports(path: Path) -> dict[str, bool]:
    """Return the modules of mpicoll that a module imports: whether it does so at import time."""
    found: dict[str, bool] = {}
    for node, at_import in _walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{each.name}" for each in node.names]
            names = [each if each in MODULES else node.module for each in inside]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        for each in names:
            if each.split(".")[0] == "mpicoll":
                found[each] = found.get(each, False) or at_import
    return found


@pytest.fixture(scope="module")
def imports() -> Imports:
    return {name: _imports(path) for name, path in MODULES.items()}


def _package(name: str) -> str | None:
    """Return the package of a module; None for ``mpicoll`` itself, which imports on first use."""
    _, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return (first if first == "__main__" or (HOME / first).is_dir() else BASE) if first else None


def test_order_lists_every_package() -> None:
    assert {_package(name) for name in MODULES} == {None, *PACKAGES}


def test_packages_import_only_packages_below(imports: Imports) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in others
        if (package := _package(name)) and (below := _package(other))
        if PACKAGES.index(package) > PACKAGES.index(below)
    ]
    assert not wrong


def test_imports_at_import_time_have_no_cycles(imports: Imports) -> None:
    graph = {name: {other for other in others if others[other]} for name, others in imports.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def _walk(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes below a node, and whether they run at import time. Skips TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child, at_import
        is_function = isinstance(child, (ast.FunctionDef, ast.Lambda))
        yield from _walk(child, at_import and not is_function)


def _patches(path: Path) -> list[str]:
    """Return the assignments to attributes of names that a module imports from mpicoll.

    At import time, attributes of these attributes also count.
    """
    found: list[str] = []
    module = ast.parse(path.read_text("utf-8"))
    imported = {
        each.asname or each.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mpicoll"
        for each in node.names
    }
    for node, at_import in _walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = node.value
            while at_import and isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in imported:
                found.append(f"{_name(path)}:{node.lineno} {ast.unparse(node)}")
    return found


def test_no_module_assigns_to_attributes_of_imported_names() -> None:
    """Lower packages take functions by constructors, arguments and declared interfaces."""
    assert [each for path in MODULES.values() for each in _patches(path)] == []
