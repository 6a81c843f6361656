"""Files about a job that only their owner can read, also in folders that others can write to."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 atomically.

    Missing folders are created with mode 0700. An existing file or symbolic link is replaced. A
    link is not followed, because another user may have created it.

    Raises OSError if the file cannot be written.
    """
    import tempfile

    folder = path.parent
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    # The dot is needed because torchfrtrace reads all files with the prefix of flight records.
    descriptor, beside = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:  # mkstemp creates it with mode 0600
            file.write(data)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
