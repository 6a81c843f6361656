"""Hooks of mkdocs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import messages  # noqa: E402

MARK = "<!-- all messages -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark with the list of all messages."""
    return markdown.replace(MARK, messages.listed()) if MARK in markdown else markdown
