"""The README, the pages, the site and the version."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import mpicoll

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"


# --- links --------------------------------------------------------------------------------------


def links(page: Path) -> Iterator[str]:
    """Yield the links of a page to files of this project."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not urlsplit(target).scheme:
            yield target


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_link_targets_exist(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        if page != README:  # the site is built from docs/
            assert target.is_relative_to(DOCS), f"{link} is outside docs/"


def test_index_links_all_pages() -> None:
    index = DOCS / "index.md"
    assert index.resolve() in {(ROOT / link).resolve() for link in links(README)}
    found = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert found | {index} >= set(PAGES)


@pytest.mark.skipif(
    not all(map(util.find_spec, ("material", "mkdocstrings_handlers"))),
    reason="needs the packages that `make docs` installs",
)
def test_site_builds_without_broken_links(tmp_path: Path) -> None:
    """``--strict`` fails at broken links and anchors (mkdocs.yml: validation)."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert [page.name for page in PAGES if f" {page.name}\n" not in navigation] == []
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.glob("*.html"))
    assert {page.stem for page in PAGES} <= {page.stem for page in pages}
    assert (tmp_path / "search/search_index.js").is_file(), "the search index for file://"
    assert not list(tmp_path.rglob("__pycache__")) and not list(tmp_path.rglob("*.py"))
    assert not any("unpkg.com" in page.read_text() for page in pages)


# --- numbers ------------------------------------------------------------------------------------


def cells(page: Path) -> Iterator[list[str]]:
    """Yield the rows of a page's tables."""
    for line in page.read_text().splitlines():
        if line.startswith("|"):
            yield [cell.strip(" *") for cell in line.strip("|").split("|")]


def seconds(cell: str) -> float | None:
    """Return the seconds of a cell such as "1.67 ms 3%"."""
    found = re.match(r"([\d.]+) ([uµm])s\b", cell)
    return float(found[1]) * {"u": 1e-6, "µ": 1e-6, "m": 1e-3}[found[2]] if found else None


def test_ratios_of_the_readme_match_the_pages() -> None:
    """The ranges of MPICH / mpicoll, and of Gloo / mpicoll in PyTorch, over all processors."""
    found: dict[tuple[str, ...], list[float]] = {}
    at = 0  # the column of MPICH's own calls in the current table
    for row in cells(DOCS / "measurements.md"):
        if row[0] in ("primitive", "dtype"):
            at = row.index("MPICH, its own") if "ranks" not in row else 0
        times = [*map(seconds, row[at : at + 2])] if at and len(row) > at + 1 else []
        if len(times) == 2 and times[0] and times[1]:
            found.setdefault((row[0], row[1]), []).append(times[0] / times[1])
    for row in cells(DOCS / "pytorch.md"):
        if len(row) > 3 and row[0].startswith("all_reduce "):
            found.setdefault((row[0],), []).append(float(row[3].split()[0]))
    rows = [row for row in cells(README) if " of float32" in row[0] or " of bfloat16" in row[0]]
    assert len(rows) == 5
    for message, *shown in rows:
        size, dtype = message.split(" of ")
        name = f"all_reduce {size}" + f" of {dtype}" * (dtype != "float32")
        measured = ("all_reduce" if dtype == "float32" else dtype, size), (name,)
        for text, key in zip(shown, measured, strict=True):
            ratios = found.get(key, [])
            ends = [float(word) for word in text.split(" to ")] if ratios else []
            expected = [min(ratios), max(ratios)] if ratios else []
            assert ends == pytest.approx(expected, rel=0.04), key


# --- the version --------------------------------------------------------------------------------


def test_recipes_and_citation_have_the_version() -> None:
    version = mpicoll.__version__
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    assert f"\n  version: {version}\n" in recipe
    (easyconfig,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
    assert f"\nversion = '{version}'\n" in easyconfig.read_text()
    assert easyconfig.name.startswith(f"mpicoll-{version}-")
    citation = (ROOT / "CITATION.cff").read_text()
    license = re.findall(r"^license: (.+)$", citation, re.MULTILINE)[0]
    assert f"\nversion: {version}\n" in citation
    assert f'license = "{license}"' in (ROOT / "pyproject.toml").read_text()


def test_version_matches_pyproject_and_changelog() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text
    assert 'version = { attr = "mpicoll.__version__" }' in text
    assert not re.search(r'^version = "', text, re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text()
    first, *_ = re.findall(r"^## \[(.+)\]", changes, re.MULTILINE)
    last, *_ = re.findall(r"^## \[([\d.]+)\] - ", changes, re.MULTILINE)
    version, is_dev, _ = mpicoll.__version__.partition(".dev")
    if is_dev:
        assert first == "Unreleased"
        assert tuple(map(int, version.split("."))) > tuple(map(int, last.split(".")))
    else:
        assert first == last == version
