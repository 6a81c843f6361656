"""Find the file, the functions and the mpiexec of the MPI library that mpi4py has loaded."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def find_function(name: str) -> Any:
    """Return a function of the MPI library or of its dependencies; None if it does not exist."""
    from mpi4py import MPI

    return getattr(ctypes.CDLL(MPI.__file__), name, None)


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def find_library() -> Path:
    """Return the file of the MPI library that mpi4py has loaded."""
    symbol, function = _Symbol(), find_function("MPI_Get_library_version")
    with suppress(AttributeError):
        ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol))
    return Path(os.fsdecode(symbol.file or b""))


def find_mpiexec() -> Path | None:
    """Return the mpiexec that was installed with the library; None if it is not found."""
    folder = find_library().parent
    found = folder.parent / "bin" / "mpiexec"
    # /usr/bin/mpiexec may belong to another MPI of the system.
    is_own = folder.name in ("lib", "lib64") and folder.parent != Path("/usr")
    return found if is_own and found.exists() else None
