"""The pages: Python blocks run on two ranks, commands and options exist, and quoted messages match
the code.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import messages
import pytest
from page_blocks import ENGINES, Block, blocks
from whole_jobs import MPIEXEC, needs_mpiexec, run_program

import mpicoll
from mpicoll import cli

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.any_mpi

PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
if MPIEXEC and (ROOT / MPIEXEC[0]).exists():  # make passes a relative path
    MPIEXEC[0] = str(ROOT / MPIEXEC[0])
#: Whether to run blocks that need PyTorch; `make test-docs` sets it, because torch loads slowly.
WITH_TORCH = "TEST_MPICOLL_DOCS" in os.environ and importlib.util.find_spec("torch") is not None
#: Words of blocks that need PyTorch.
NEEDS_TORCH = ("import torch", "mpicoll.torch", "horovod.torch", "hvd.")

#: Names that blocks use.
PRELUDE = """
import threading
import numpy as np
from mpi4py import MPI
import mpicoll as dist
color = 0
x = np.ones(4)
"""

#: Names of the script in horovod.md.
SCRIPT = """
import torch
model, steps = torch.nn.Linear(3, 1), 20
optimizer, set_learning_rate = torch.optim.SGD(model.parameters(), lr=0.1), lambda: None
"""

#: Names of reliability.md. tests/test_losses.py runs its blocks with lost ranks.
STATE = """
import numpy as np
import mpicoll as dist
state = np.ones(3)
def step(state):
    dist.all_reduce(state)
    return state
"""

#: The reason to skip blocks that need an engine.
ON_ENGINES = "tests/clients/test_engines.py runs it on its engine"

#: How to run every page with Python blocks, in the order of execution (see page_blocks.py). Blocks
#: with a word of "skip" are only parsed; the text is the reason.
TREATMENT: dict[str, dict[str, Any]] = {
    "README.md": {},
    "docs/api.md": {"grouped": PRELUDE + "output, input = np.zeros(4), np.ones(4)"},
    "docs/coming_from.md": {},
    "docs/horovod.md": {"in_turn": SCRIPT},
    "docs/index.md": {},
    "docs/launching.md": {"skip": {"import ray": ON_ENGINES}},
    "docs/pickle.md": {"grouped": PRELUDE + "class MyConfig: pass\nobjects = [x]"},
    "docs/pytorch.md": {"skip": {
        "_reconfigure": "torch 2.15, and a lost rank",
        "file://": "tests/test_torch_front.py has processes without a launcher",
    }},
    "docs/reference.md": {"in_turn": ""},
    "docs/reference_fronts.md": {"in_turn": "", "skip": dict.fromkeys(ENGINES, ON_ENGINES)},
    "docs/reliability.md": {
        "grouped": STATE, "skip": {"grow_group": "tests/test_losses.py loses a rank before"},
    },
    "docs/reproducibility.md": {"grouped": PRELUDE},
    "docs/sharp_bits.md": {},
    "docs/tutorial.md": {},
    "docs/gpu.md": {"skip": {"import cupy": "tests/gpu/test_gpu_jobs.py runs it"}},
}  # fmt: skip


def found(page: Path) -> list[Block]:
    return list(blocks(page.read_text(encoding="utf-8")))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- Python -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_parse_and_use_existing_names(page: Path) -> None:
    for block in found(page):
        if block.language != "python":
            continue
        tree = ast.parse(block.text)
        if "torch" in page.stem + block.text or page.stem == "clients":
            continue  # there dist is torch.distributed
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist":
                assert hasattr(mpicoll, node.attr), f"line {block.line}: dist.{node.attr}"


@pytest.mark.waits
@needs_mpiexec
def test_python_blocks_run_on_two_ranks() -> None:
    """One job runs all pages."""
    never = () if WITH_TORCH else NEEDS_TORCH
    chosen = {page: {**how, "skip": [*how.get("skip", ()), *never]}
              for page, how in TREATMENT.items()}  # fmt: skip
    script, choice = ROOT / "tests/page_blocks.py", json.dumps(chosen)
    done = run_program(*MPIEXEC, "-n", "2", sys.executable, script, choice, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_treatment_lists_all_pages_with_python() -> None:
    for page in PAGES:
        texts = [block.text for block in found(page) if block.language == "python"]
        assert bool(texts) == (name(page) in TREATMENT), name(page)
        for word in TREATMENT.get(name(page), {}).get("skip", ()):
            assert any(word in text for text in texts), f"{page}: no block has {word}"


# --- commands -----------------------------------------------------------------------------------


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command: each line of shell blocks, and prompts in other blocks."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language in ("sh", "bash"):
            yield shlex.split(line, comments=True)
        elif re.match(r"\$ |(mpirun|mpiexec|srun|python|make) .*-", line):
            yield shlex.split(line.removeprefix("$ "), comments=True)


def wrong(words: list[str]) -> Iterator[str]:
    """Yield the errors of a command line in options, scripts and targets of mpicoll."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        for extra in re.findall(r"\.\[(\w+)\]", word):
            if not re.search(rf"^{extra} = \[", project, re.MULTILINE):
                yield f"unknown extra {extra}"
        if word == "make":
            for target in (one for one in rest if re.fullmatch(r"[a-z-]+", one)):
                if not re.search(rf"^{target}:", makefile, re.MULTILINE):
                    yield f"make {target}"
        if word == "-m" and rest[:1] == ["mpicoll"]:
            try:
                cli._parser().parse_args(rest[1:])
            except SystemExit as end:
                if end.code:
                    yield f"python -m mpicoll {' '.join(rest[1:])}"
            return
        if re.match(r"(jobs|tests|benchmarks|docs)/", word) and not word.endswith("/"):
            script = ROOT / word.partition("::")[0]
            if not script.exists():
                yield f"{word} does not exist"
            elif script.suffix == ".py" and "/test_" not in word:
                text = script.read_text(encoding="utf-8")
                options = [option for option in rest if option.startswith("--")]
                yield from (f"{word} {one}" for one in options if f'"{one}"' not in text)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    for block in found(page):
        for words in commands(block):
            assert list(wrong(words)) == [], f"line {block.line}: {shlex.join(words)}"


#: Commands to run, which take seconds. Other commands install packages, need a batch system or a
#: running job, take minutes, or fail on a busy machine (tune). Only their options are checked.
QUICK = re.compile(
    r"(mpiexec|torchrun) .*(-m mpicoll (doctor|hello|bench .*|run train\.py)|hello\.py)"
)

#: A script of a user.
TRAIN = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == dist.get_world_size() > 1, x
dist.destroy_process_group()
"""


def quick() -> list[str]:
    """Return the commands to run."""
    lines = (shlex.join(words) for page in PAGES for block in found(page)
             for words in commands(block))  # fmt: skip
    lines = (line.replace(".venv/bin/", "").replace("mpirun", "mpiexec") for line in lines)
    return sorted({line for line in lines if QUICK.fullmatch(line)})


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(not WITH_TORCH, reason="make test-docs runs the commands of the pages")
@needs_mpiexec
@pytest.mark.parametrize("line", quick())
def test_commands_run(line: str, tmp_path: Path) -> None:
    first = next(block for block in found(ROOT / "README.md") if block.language == "python")
    (tmp_path / "hello.py").write_text(first.text)
    (tmp_path / "train.py").write_text(TRAIN)
    programs = {
        "mpiexec": MPIEXEC,
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }
    command = [word for each in shlex.split(line) for word in programs.get(each, [each])]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path}
    done = run_program("env", *command, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the reference ------------------------------------------------------------------------------


def examples(page: str) -> dict[str, str]:
    """Return the documented names of a page with their Python examples."""
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = re.split(r"^::: mpicoll\.(?!api\.)", text, flags=re.MULTILINE)[1:]
    return {part.split()[0]: "".join(re.findall(r"^```python\n(.*?)^```", part, re.M | re.S))
            for part in parts}  # fmt: skip


def test_reference_has_an_example_for_every_public_name() -> None:
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    shown = examples("docs/reference.md")
    names = set(mpicoll.__all__)  # type: ignore[attr-defined]  # made on demand
    expected = names - set(mpicoll.errors.__all__)
    constants = {"SHRINK_ABORT", "SHRINK_DEFAULT"}
    assert set(shown) == expected - constants | {"errors"}
    for constant in constants:
        assert f"dist.{constant}" in text
    for name, example in [*shown.items(), *examples("docs/reference_fronts.md").items()]:
        assert example, f"{name} has no example"


# --- messages -----------------------------------------------------------------------------------


def texts_of_the_code() -> str:
    """Return all string literals of mpicoll, one per line, with … for values."""
    found = []
    for path in (ROOT / "mpicoll").rglob("*.py"):
        for node in ast.walk(messages.parse(path)):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                text = messages.template(node)
                if text.strip("…"):
                    found.append(" ".join(text.split()))
    return "\n".join(found)


def quoted(text: str, sources: str) -> bool:
    """Return whether a string literal of mpicoll matches a message."""
    pattern = ".*".join(re.escape(words.strip()) for words in text.split("…"))
    return re.search(pattern, sources) is not None


def test_quoted_messages_match_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    sources = texts_of_the_code()
    heads = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(heads) > 30
    assert [head for head in heads if not quoted(head, sources)] == []
    assert not quoted("there is no default process groop", sources)
