"""What MPI libraries say of their support for device memory; their quirks are rows of tables.

Their word alone is not believed: some claim support, and crash when they reduce device memory.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpicoll.cuda.runtime import CUDA, ROCM
from mpicoll.launch.mpi_library import find_function

__all__ = [
    "QUERIES", "ROCM_QUERIES", "SWITCHES", "find_queries", "find_switch", "has_ucx_with",
]  # fmt: skip


class Switch(NamedTuple):
    """An environment variable that turns device memory off in an MPI library.

    library: a pattern of MPI_Get_library_version's text.
    name:    of the variable.
    default: what counts if the variable is not set.
    off:     a pattern of the whole value that turns device memory off.
    remedy:  what to do about it.
    kinds:   of devices that it is about.
    """

    library: str
    name: str
    default: str
    off: str
    remedy: str
    kinds: tuple[str, ...] = (CUDA, ROCM)


_NO = r"0|no?|off|false|"


def _cray(kind: str, library: str, module: str) -> Switch:
    return Switch(
        "CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", "0", _NO,
        "set MPICH_GPU_SUPPORT_ENABLED=1, with the GTL library loaded: "
        f"{module} when mpi4py is built, or LD_PRELOAD={library}",
        (kind,),
    )  # fmt: skip


SWITCHES: tuple[Switch, ...] = (
    _cray(CUDA, "libmpi_gtl_cuda.so", "craype-accel-nvidia*"),
    _cray(ROCM, "libmpi_gtl_hsa.so", "craype-accel-amd-gfx*"),
    *(
        Switch("^(MPICH|MVAPICH) ", name, "1", _NO, f"unset {name}, or set it to 1")
        for name in ("MPIR_CVAR_ENABLE_GPU", "MPICH_ENABLE_GPU", "MVP_ENABLE_GPU")
    ),
    *(
        Switch("MVAPICH2", name, "0", _NO, f"set {name}=1 (needs MVAPICH2-GDR)", (kind,))
        for kind, name in ((CUDA, "MV2_USE_CUDA"), (ROCM, "MV2_USE_ROCM"))
    ),
    Switch("Intel.*MPI", "I_MPI_OFFLOAD", "0", _NO, "set I_MPI_OFFLOAD=1"),
    *(
        Switch(
            "Open MPI v[5-9]", "OMPI_MCA_accelerator", "", rf"null|\^.*{kind.lower()}.*|{other}|ze",
            "unset OMPI_MCA_accelerator",
            (kind,),
        )
        for kind, other in ((CUDA, "rocm"), (ROCM, "cuda"))
    ),
    Switch(
        "Open MPI v[1-4]", "OMPI_MCA_opal_cuda_support", "1", _NO,
        "unset OMPI_MCA_opal_cuda_support, or set it to 1", (CUDA,),
    ),
)  # fmt: skip


def _ask(name: str) -> int | None:
    """Ask MPIX_Query_cuda_support (Open MPI, MPICH, MVAPICH, Intel MPI), or that of ROCm."""
    function = find_function(name)
    return None if function is None else int(function())


def _gpu_support(number: int) -> int | None:
    """Ask MPIX_GPU_query_support (MPICH and its family) of MPIX_GPU_SUPPORT_CUDA, 0, or HIP, 2."""
    function, found = find_function("MPIX_GPU_query_support"), ctypes.c_int(0)
    if function is None or function(number, ctypes.byref(found)) != 0:
        return None
    return found.value


def _has_kind(kind: str) -> int | None:
    """Read mpi_memory_alloc_kinds (MPI-4.1 section 12.4.3), which means something only if it lists
    cuda or rocm: kinds that were not asked for when MPI started are not listed.
    """
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return 1 if re.search(rf"\b{kind}\b", kinds) else None


#: What MPI libraries say of themselves: 1, 0, or None for nothing. One table for each kind.
QUERIES: dict[str, Callable[[], int | None]] = {
    "MPIX_Query_cuda_support": lambda: _ask("MPIX_Query_cuda_support"),
    "MPIX_GPU_query_support": lambda: _gpu_support(0),
    "mpi_memory_alloc_kinds": lambda: _has_kind("cuda"),
}
ROCM_QUERIES: dict[str, Callable[[], int | None]] = {
    "MPIX_Query_rocm_support": lambda: _ask("MPIX_Query_rocm_support"),
    "MPIX_GPU_query_support": lambda: _gpu_support(2),
    "mpi_memory_alloc_kinds": lambda: _has_kind("rocm"),
}


def find_queries(kind: str) -> dict[str, Callable[[], int | None]]:
    """Return what to ask an MPI library about devices of a kind."""
    return QUERIES if kind == CUDA else ROCM_QUERIES


def find_switch(version: str, environment: Mapping[str, str], kind: str = CUDA) -> Switch | None:
    """Return the variable by which memory of a kind of devices is off in this library, if any."""
    for switch in SWITCHES:
        if kind not in switch.kinds:
            continue
        value = environment.get(switch.name, switch.default)
        if re.search(switch.library, version) and re.fullmatch(switch.off, value, re.IGNORECASE):
            return switch
    return None


def has_ucx_with(kind: str) -> bool:
    """Return whether UCX is loaded with transports of devices of a kind, and may move their memory
    anyway.
    """
    with suppress(OSError):
        for path in set(re.findall(r"/\S*/libuct\.so\S*", Path("/proc/self/maps").read_text())):
            if any(Path(path).parent.glob(f"ucx/libuct_{kind.lower()}.so*")):
                return True
    return False
