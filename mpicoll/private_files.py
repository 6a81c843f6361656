"""Files about a job, which its user alone may read, also in folders that others can write to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write"]


def write(path: Path, data: bytes) -> None:
    """Write a whole file of mode 0600, or no file.

    Folders that are missing are made with mode 0700. A file or symbolic link of this name is
    replaced: a link is not followed, because another user may have made it.

    Raises OSError where the file cannot be written.
    """
    folder = path.parent
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    # The name begins with a dot: torchfrtrace reads all files with the prefix of flight records.
    descriptor, beside = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:  # mkstemp makes it for its owner alone
            file.write(data)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
