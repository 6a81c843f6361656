"""What MPI libraries say of their support for device memory; their quirks are rows of tables.

Their word alone is not believed: some claim support, and crash when they reduce device memory.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["QUERIES", "SWITCHES", "find_library", "find_switch", "has_ucx_with_cuda"]


class Switch(NamedTuple):
    """An environment variable that turns device memory off in an MPI library.

    library: a pattern of MPI_Get_library_version's text.
    default: what counts if the variable is not set.
    off:     a pattern of the whole value that turns device memory off.
    remedy:  what to do about it.
    """

    library: str
    name: str
    default: str
    off: str
    remedy: str


_NO = r"0|no?|off|false|"

SWITCHES: tuple[Switch, ...] = (
    Switch(
        "CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", "0", _NO,
        "set MPICH_GPU_SUPPORT_ENABLED=1, with the GTL library loaded: "
        "craype-accel-nvidia* when mpi4py is built, or LD_PRELOAD=libmpi_gtl_cuda.so",
    ),
    *(
        Switch("^(MPICH|MVAPICH) ", name, "1", _NO, f"unset {name}, or set it to 1")
        for name in ("MPIR_CVAR_ENABLE_GPU", "MPICH_ENABLE_GPU", "MVP_ENABLE_GPU")
    ),
    Switch("MVAPICH2", "MV2_USE_CUDA", "0", _NO, "set MV2_USE_CUDA=1 (needs MVAPICH2-GDR)"),
    Switch("Intel.*MPI", "I_MPI_OFFLOAD", "0", _NO, "set I_MPI_OFFLOAD=1"),
    Switch(
        "Open MPI v[5-9]", "OMPI_MCA_accelerator", "", r"null|\^.*cuda.*|rocm|ze",
        "unset OMPI_MCA_accelerator",
    ),
    Switch(
        "Open MPI v[1-4]", "OMPI_MCA_opal_cuda_support", "1", _NO,
        "unset OMPI_MCA_opal_cuda_support, or set it to 1",
    ),
)  # fmt: skip


def _support() -> int | None:
    """Ask MPIX_Query_cuda_support (Open MPI, MPICH, MVAPICH, Intel MPI)."""
    function = _function("MPIX_Query_cuda_support")
    return None if function is None else int(function())


def _gpu_support() -> int | None:
    """Ask MPIX_GPU_query_support of MPIX_GPU_SUPPORT_CUDA (MPICH and its family)."""
    function, found = _function("MPIX_GPU_query_support"), ctypes.c_int(0)
    if function is None or function(0, ctypes.byref(found)) != 0:
        return None
    return found.value


def _kinds() -> int | None:
    """Read mpi_memory_alloc_kinds (MPI-4.1 section 12.4.3), which means something only if it lists
    cuda: kinds that were not asked for when MPI started are not listed.
    """
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return 1 if re.search(r"\bcuda\b", kinds) else None


#: What MPI libraries say of themselves: 1, 0, or None for nothing.
QUERIES: dict[str, Callable[[], int | None]] = {
    "MPIX_Query_cuda_support": _support,
    "MPIX_GPU_query_support": _gpu_support,
    "mpi_memory_alloc_kinds": _kinds,
}


def _function(name: str) -> Any:
    """Return a function of the MPI library that mpi4py has loaded, or None."""
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
    symbol, function = _Symbol(), _function("MPI_Get_library_version")
    with suppress(AttributeError):
        ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol))
    return Path(os.fsdecode(symbol.file or b""))


def find_switch(version: str, environment: Mapping[str, str]) -> Switch | None:
    """Return the variable by which device memory is off in this library, if there is one."""
    for switch in SWITCHES:
        value = environment.get(switch.name, switch.default)
        if re.search(switch.library, version) and re.fullmatch(switch.off, value, re.IGNORECASE):
            return switch
    return None


def has_ucx_with_cuda() -> bool:
    """Return whether UCX is loaded with CUDA transports, and may move device memory anyway."""
    with suppress(OSError):
        for path in set(re.findall(r"/\S*/libuct\.so\S*", Path("/proc/self/maps").read_text())):
            if any(Path(path).parent.glob("ucx/libuct_cuda.so*")):
                return True
    return False
