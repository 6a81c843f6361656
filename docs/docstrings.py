"""Convert mpicoll's docstrings to Markdown for the reference, with parameters as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETER = re.compile(r"(\*{0,2}\w+(?:, \w+)*):\s+(\S.*)")

#: A bracket outside of inline code, where Markdown would look for a link.
_BRACKET = re.compile(r"(`[^`]*`)|\[")

#: The meaning of one value of a parameter, in the lines after it.
_VALUE = re.compile(r"^( +)((?:\"[^\"]*\"(?:, )?)+: |None: )")


def markdown(text: str) -> str:
    """Return the docstring with parameters as list items and code blocks fenced."""
    lines: list[str] = []
    is_entry = is_code = False
    for line in text.splitlines():
        if is_code and (not line or line.startswith("    ")):
            lines.append(line[4:])
            continue
        if is_code:
            is_code = False
            lines += ["```", ""]
        line = _BRACKET.sub(lambda found: found[1] or r"\[", line)
        found = _PARAMETER.fullmatch(line)
        if line.endswith("::"):
            lines += [line[:-2].rstrip() + ":" * (line != "::"), "", "```"]
            is_code, is_entry = True, False
        elif found:
            lines += [] if is_entry else [""]
            lines.append(f"- **{found[1]}**: {found[2]}")
            is_entry = True
        elif is_entry and line.startswith("    "):
            lines.append(_VALUE.sub(r"\1- \2", line))
        else:
            lines += [""] if is_entry and line else []
            is_entry = False
            lines.append(line)
    return "\n".join([*lines, "```"] if is_code else lines)


class Docstrings(griffe.Extension):
    """Convert the docstring of every object."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
