"""Puts what was measured into the pages of docs/, between marks that they have for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["DOCS", "filled"]

DOCS = Path(__file__).resolve().parent.parent / "docs"


def filled(text: str, topic: str, parts: Mapping[str, Sequence[str]]) -> str:
    """The page with what is between its marks written anew.

    parts: lines, by the names of the marks of this topic. Raises ValueError without a mark.
    """
    for name, lines in parts.items():
        begin, end = f"<!-- {topic}: {name} -->\n", f"<!-- {topic}: end of {name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"expected the marks {begin.strip()} and {end.strip()}")
        body = "\n".join(lines)
        text = f"{before}{begin}\n{body}\n\n{end}{after}"
    return text
