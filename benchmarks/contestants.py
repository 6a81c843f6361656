"""Contestants: the libraries that are compared, on the same memory of the same ranks.

mpi4py          one call of MPI with a prepared ``[buffer, count, datatype]``
mpicoll         functions of mpicoll on NumPy arrays
mpicoll torch   torch.distributed on tensors, with the backend mpicoll
Gloo            torch.distributed on tensors, with torch's own backend

Those of others.py are added in their environments.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
from aims import FACADE, GLOO, MPI4PY, TORCH
from mpi4py import MPI
from others import find_installed

import mpicoll
from mpicoll import machine, primitives
from mpicoll.cli import bench_others
from mpicoll.cli.bench_calls import Buffers, Case, Memory, block_count, own_call, variants
from mpicoll.cli.timing import Call, Timer
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.failures.consistency import FIRST
from mpicoll.kernels import library

#: Starts an asynchronous call, and returns a function that waits for it.
Begin = Callable[[], Callable[[], object]]

PLACE = Memory()


class Mpi4py(bench_others.Mpi4py):
    """MPI, called by mpi4py."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Use MPI's float16 if it has one. mpicoll never reduces with it."""
        if case.dtype is by_name["float16"] and MPI.FLOAT16_T != MPI.DATATYPE_NULL:
            case = replace(case, dtype=replace(case.dtype, kind=Kind.FLOAT, mpi="FLOAT16_T"))
        return super().call(case, buffers)

    def begin(self, call: Any) -> Begin:
        """Use the nonblocking function, such as MPI_Iallreduce."""
        method = getattr(self._comm, f"I{call.func.__name__.lower()}")
        return lambda: method(*call.args).Wait

    def together(self, calls: Sequence[Call]) -> Call | None:
        """Return None: MPI cannot coalesce calls."""
        return None


class Facade:
    """Functions of mpicoll."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Return the call, out of place if possible."""
        return own_call(case, buffers, variants(case.row)[0])

    def begin(self, call: Call) -> Begin:
        """Use ``async_op``."""
        return _asynchronous(call)

    def together(self, calls: Sequence[Any]) -> Call | None:
        """Use all_reduce_coalesced."""
        return partial(mpicoll.all_reduce_coalesced, [call.args[0] for call in calls])


class Torch(bench_others.TorchApi):
    """Functions of torch.distributed in one of its groups."""

    def begin(self, call: Call) -> Begin:
        """Use ``async_op``."""
        return _asynchronous(call)

    def together(self, calls: Sequence[Call]) -> Call | None:
        """Coalesce, as DTensor and FSDP do."""

        def all_of_them() -> None:
            with self.api._coalescing_manager(self.group):
                for call in calls:
                    call()

        return all_of_them


def _asynchronous(call: Callable[..., Any]) -> Begin:
    begun = partial(call, async_op=True)
    return lambda: begun().wait


class World:
    """The process group of all ranks, and its contestants.

    torch:  include the contestants of torch, if it is installed.
    device: device of torch's tensors, "cpu" or "cuda" (this rank's GPU).
    others: include the libraries of others.py.
    mpi:    an MPI communicator of the same ranks.
    gloo:   torch's group of the same ranks, or None.
    """

    def __init__(self, torch: bool, device: str = "cpu", others: bool = False) -> None:
        self.device = device
        settle: Call | None = None
        self._api: Any = mpicoll
        self.gloo: Any = None
        of_torch: dict[str, Any] = {}
        if torch and importlib.util.find_spec("torch") is not None:
            import torch as library_of_torch
            import torch.distributed as api

            library_of_torch.set_num_threads(1)
            api.init_process_group("mpicoll")
            if device == "cuda":
                cuda: Any = library_of_torch.cuda
                local_rank = api.get_node_local_rank(api.get_rank())
                cuda.set_device(local_rank % cuda.device_count())
                settle = cuda.synchronize
            self._api, self.gloo = api, api.new_group(backend="gloo")
            of_torch = {TORCH: Torch(), GLOO: Torch(self.gloo)}
        else:
            mpicoll.init_process_group()
        for _ in range(FIRST):  # ranks compare each of the first calls of a group
            mpicoll.barrier()
        self.mpi = comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises them
        self.timer = Timer(comm, settle)
        self.contestants: dict[str, Any] = {
            MPI4PY: Mpi4py(comm, PLACE),
            FACADE: Facade(),
            **of_torch,
        }
        self.others, self.problems = find_installed(comm) if others else ({}, [])
        self.contestants |= self.others
        self.n, self.me = comm.Get_size(), comm.Get_rank()
        affinities = comm.allgather(os.sched_getaffinity(0))
        #: Number of processors of all ranks, and minimum of a rank.
        self.processors, self.fewest = len(set().union(*affinities)), min(map(len, affinities))

    def case(self, primitive: str, size: int, dtype: DType = by_name["float32"]) -> Case:
        """Return a call on about ``size`` bytes, with SUM if it reduces, and root 0."""
        row = primitives.by_name[primitive]
        op = ReduceOp.SUM if row.reduces else None
        return Case(row, dtype, op, block_count(row, dtype, self.n, size), self.n, self.me, 0)

    def close(self) -> None:
        """Free the communicator and destroy the groups."""
        self.mpi.Free()
        self._api.destroy_process_group()

    def facts(self) -> dict[str, Any]:
        """Return the head of a file of results: versions and machine."""
        name, version = MPI.get_vendor()
        versions = {"mpicoll": mpicoll.__version__, "mpi4py": mpi4py.__version__}
        versions |= {"NumPy": np.__version__, "Python": platform.python_version()}
        if self.gloo is not None:
            versions["torch"] = importlib.metadata.version("torch")
        return {
            "machine": {
                "processor": describe_processor(),
                "processors": self.processors,
                "processors of a rank": self.fewest,
                "load before": round(os.getloadavg()[0], 1),
            },
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "mpi": f"{name} {'.'.join(map(str, version))}",
            "others": list(self.others),
            "versions": versions,
            "reductions": library.describe(),
            "ranks": self.n,
        }


def describe_processor() -> str:
    """Return the model of the processors. In virtual machines its name may be that of many."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    words = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    name = machine.describe().partition(" x ")[2]
    if {"cpu family", "model"} <= words.keys():
        name += f" (family {words['cpu family']}, model {words['model']})"
    return name
