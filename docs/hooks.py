"""What mkdocs does with the pages besides what mkdocs.yml says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import messages  # noqa: E402

MARK = "<!-- all messages -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the list of all messages where a page has its mark: nobody has to keep it up to date."""
    return markdown.replace(MARK, messages.listed()) if MARK in markdown else markdown
