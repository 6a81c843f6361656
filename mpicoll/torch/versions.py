"""Which versions of torch mpicoll is for."""

from __future__ import annotations

import re
import warnings

import torch

__all__ = ["KNOWN", "warn_if_newer"]

#: The newest that the tests have run with.
_NEWEST = 2, 15
#: What is known of versions; the oldest is that of pyproject.toml.
KNOWN = "it needs 2.13 or newer, and was tested with 2.13 to 2.15"


def warn_if_newer() -> None:
    """Says so where torch is newer than any that was tested; it may do all the same."""
    found = str(torch.__version__)
    if tuple(map(int, re.findall(r"\d+", found)[:2])) > _NEWEST:
        warnings.warn(f"mpicoll has not been tested with torch {found}: {KNOWN}", stacklevel=2)
