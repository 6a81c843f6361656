"""Which versions of torch mpicoll is for."""

from __future__ import annotations

import re
import warnings

import torch

__all__ = ["FOUND", "KNOWN", "warn_if_newer"]

#: The newest that the tests have run with.
_NEWEST = 2, 15
#: What is known of versions; the oldest is that of pyproject.toml.
KNOWN = "it needs 2.13 or newer, and was tested with 2.13 to 2.15"


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


#: This torch's.
FOUND = _numbers(str(torch.__version__))


def warn_if_newer() -> None:
    """Says so where torch is newer than any that was tested; it may do all the same."""
    found = str(torch.__version__)
    if _numbers(found) > _NEWEST:
        warnings.warn(f"mpicoll has not been tested with torch {found}: {KNOWN}", stacklevel=2)
