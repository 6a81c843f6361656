"""Hooks of mkdocs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import messages  # noqa: E402
import tree  # noqa: E402


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the generated lists: all error messages, all modules."""
    made = {"<!-- all messages -->": messages.listed, "<!-- tree -->": _tree}
    for mark, make in made.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def _tree() -> str:
    return f"```text\n{tree.tree()}```"
