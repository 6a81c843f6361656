"""Output on standard error, and formatting."""

from __future__ import annotations

import contextlib
import sys
import warnings


def flush_streams() -> None:
    """Flush standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()


def write_lines(text: str) -> None:
    """Write lines and the final newline in one call, so that output of ranks does not mix."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def format_bytes(size: int) -> str:
    """Return a size with the largest unit of which it is a multiple."""
    for exponent, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << exponent) == 0:
            return f"{size >> exponent} {name}"
    return f"{size} B"


def format_count(count: object, noun: str) -> str:
    """Return a count with a noun: "1 element", "2 elements". ``count`` may be text."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def warn(text: str) -> None:
    """Warn at the calling line of the program, above the frames of mpicoll and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_LIBRARY_PREFIXES):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


_LIBRARY_PREFIXES = ("mpicoll.", "torch.")
