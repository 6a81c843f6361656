"""What a process says on standard error, so that it is whole among what others say there."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["write_lines"]


def write_lines(text: str) -> None:
    """Writes lines with the newline after the last, at once.

    What is written apart comes out apart: other ranks write into the same stream.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
