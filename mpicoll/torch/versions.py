"""The versions of torch that mpicoll supports."""

from __future__ import annotations

import re
import warnings

import torch

__all__ = ["REQUIREMENT", "warn_if_newer"]

#: The newest version that the tests have run with.
_NEWEST = 2, 15
#: The supported versions; the oldest is that of pyproject.toml.
REQUIREMENT = "it needs 2.11 or newer, and was tested with 2.11 and 2.13 to 2.15"


def warn_if_newer() -> None:
    """Warn if torch is newer than any tested version; it may work all the same."""
    version = str(torch.__version__)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) > _NEWEST:
        warnings.warn(
            f"mpicoll has not been tested with torch {version}: {REQUIREMENT}", stacklevel=2
        )
