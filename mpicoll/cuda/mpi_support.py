"""What MPI libraries report about their support for device memory, and their quirks, as tables.

A report alone is not trusted: some libraries claim support, then crash when they reduce device
memory.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpicoll.launch.mpi_library import find_function


class Switch(NamedTuple):
    """An environment variable that turns off device memory in an MPI library."""

    library: str  # pattern for the text of MPI_Get_library_version
    name: str  # name of the variable
    default: str  # value that applies if the variable is not set
    off: str  # pattern for the full value that turns device memory off
    remedy: str  # advice for the user


_NO = r"0|no?|off|false|"

SWITCHES: tuple[Switch, ...] = (
    Switch(
        "CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", "0", _NO,
        "set MPICH_GPU_SUPPORT_ENABLED=1, with the GTL library loaded: craype-accel-nvidia* when "
        "mpi4py is built, or LD_PRELOAD=libmpi_gtl_cuda.so",
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


def _query_cuda_support() -> int | None:
    """Call MPIX_Query_cuda_support (Open MPI, MPICH, MVAPICH, Intel MPI)."""
    function = find_function("MPIX_Query_cuda_support")
    return None if function is None else int(function())


def _query_gpu_support() -> int | None:
    """Call MPIX_GPU_query_support (MPICH and its family) for MPIX_GPU_SUPPORT_CUDA, 0."""
    function, found = find_function("MPIX_GPU_query_support"), ctypes.c_int(0)
    if function is None or function(0, ctypes.byref(found)) != 0:
        return None
    return found.value


def _query_alloc_kinds() -> int | None:
    """Read mpi_memory_alloc_kinds (MPI-4.1 section 12.4.3). Only a list with cuda is an answer:
    MPI does not list kinds that were not requested when it started.
    """
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return 1 if re.search(r"\bcuda\b", kinds) else None


#: The ways to ask an MPI library for its support: 1 (yes), 0 (no) or None (no answer).
QUERIES: dict[str, Callable[[], int | None]] = {
    "MPIX_Query_cuda_support": _query_cuda_support,
    "MPIX_GPU_query_support": _query_gpu_support,
    "mpi_memory_alloc_kinds": _query_alloc_kinds,
}


def find_switch(version: str, environment: Mapping[str, str]) -> Switch | None:
    """Return the variable that turns off device memory in this MPI library, or None."""
    for switch in SWITCHES:
        value = environment.get(switch.name, switch.default)
        if re.search(switch.library, version) and re.fullmatch(switch.off, value, re.IGNORECASE):
            return switch
    return None


def has_ucx_cuda() -> bool:
    """Return whether UCX has CUDA transports: it may move device memory even if MPI denies it."""
    with suppress(OSError):
        for path in set(re.findall(r"/\S*/libuct\.so\S*", Path("/proc/self/maps").read_text())):
            if any(Path(path).parent.glob("ucx/libuct_cuda.so*")):
                return True
    return False


def find_ucx_remedy(environment: Mapping[str, str]) -> str:
    """Return advice for a UCX that fails with device memory, or "". CuPy's wheels contain the CUDA
    runtime, and UCX may not notice allocations of a runtime that is not a shared library.
    """
    if "UCX_MEMTYPE_CACHE" in environment or not has_ucx_cuda():
        return ""
    return "set UCX_MEMTYPE_CACHE=n: UCX may take CuPy's device memory for host memory"
