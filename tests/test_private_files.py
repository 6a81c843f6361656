"""Files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpicoll import private_files

pytestmark = pytest.mark.any_mpi


@pytest.fixture(autouse=True)
def default_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_and_new_folders_are_private(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "a" / "b" / "file"
    private_files.write(path, b"one")
    assert path.read_bytes() == b"one" and mode(path) == 0o600
    assert [mode(each) for each in (path.parent, path.parent.parent)] == [0o700] * 2
    assert mode(tmp_path) == 0o755
    path.chmod(0o644)
    private_files.write(path, b"two")
    assert path.read_bytes() == b"two" and mode(path) == 0o600
    with pytest.raises(OSError):
        private_files.write(path.parent, b"a folder")
    assert list(path.parent.iterdir()) == [path] and list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_symbolic_link_is_replaced(tmp_path):
    """Another user can create a link in a folder that all users can write to."""
    target = tmp_path / "target"
    for exists in (False, True):
        if exists:
            target.write_text("mine")
        link = tmp_path / "link"
        link.symlink_to(target)
        private_files.write(link, b"record")
        assert link.read_bytes() == b"record" and not link.is_symlink()
        link.unlink()
    assert target.read_text() == "mine"
