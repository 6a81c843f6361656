"""Who makes the calls that are compared, all on the same memory of the same ranks.

mpi4py          MPI's own call, once, with a ready ``[buffer, count, datatype]``
mpicoll         this library's functions on NumPy arrays
mpicoll torch   torch.distributed on tensors, with the backend mpicoll
Gloo            torch.distributed on tensors, with the backend that comes with torch
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
from typing import Any, Protocol

import mpi4py
import numpy as np
from measure import FACADE, GLOO, MPI4PY, TORCH, Ranks
from mpi4py import MPI

import mpicoll
from mpicoll import primitives
from mpicoll.cli import bench_calls
from mpicoll.cli.bench_calls import (
    Buffers,
    Call,
    Case,
    Host,
    named_call,
    own_call,
    rounded,
    variants,
)
from mpicoll.core import tables
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.kernels import library
from mpicoll.watch.consistency import FIRST

#: Begins a call, and returns what waits for it.
Begin = Callable[[], Callable[[], object]]

PLACE = Host()


class Contestant(Protocol):
    """One of them."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """The call; None where there is no such call."""

    def begin(self, call: Call) -> Begin:
        """The same call, not blocking."""

    def together(self, calls: Sequence[Call]) -> Call | None:
        """The same calls of all_reduce as one; None where there is no such thing."""


class Mpi4py(bench_calls.RawMpi):
    """MPI alone."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """With MPI's own float16 if need be, which mpicoll never asks to compute."""
        if case.dtype is by_name["float16"] and MPI.FLOAT16_T != MPI.DATATYPE_NULL:
            case = replace(case, dtype=replace(case.dtype, kind=Kind.FLOAT, mpi="FLOAT16_T"))
        return super().call(case, buffers)

    def begin(self, call: Any) -> Begin:
        """MPI_Iallreduce and so on."""
        method = getattr(self._comm, f"I{call.func.__name__.lower()}")
        return lambda: method(*call.args).Wait

    def together(self, calls: Sequence[Call]) -> Call | None:
        """MPI has no such call."""
        return None


class Facade:
    """mpicoll's functions."""

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """Of any kind."""
        return own_call(case, buffers, variants(case.row)[0], False)

    def begin(self, call: Call) -> Begin:
        """With ``async_op``."""
        return _asynchronous(call)

    def together(self, calls: Sequence[Any]) -> Call | None:
        """all_reduce_coalesced."""
        return partial(mpicoll.all_reduce_coalesced, [call.args[0] for call in calls])


class Torch:
    """torch.distributed's functions in one of its groups; None: in the default group."""

    def __init__(self, group: Any) -> None:
        import torch
        import torch.distributed as api

        self._torch, self._api, self._group = torch, api, group

    def call(self, case: Case, buffers: Buffers) -> Call | None:
        """None where torch has no such dtype."""
        if case.dtype is None or not hasattr(self._torch, case.dtype.name):
            return None
        dtype = getattr(self._torch, case.dtype.name)

        def tensors(given: Any) -> Any:
            if isinstance(given, list):
                return [tensors(array) for array in given]
            return self._torch.frombuffer(given.view(np.uint8), dtype=dtype)

        sides = buffers.of(case, variants(case.row)[0])
        input, output = (side and tensors(side.given) for side in sides)
        return partial(named_call(self._api, case, input, output), group=self._group)

    def begin(self, call: Call) -> Begin:
        """With ``async_op``."""
        return _asynchronous(call)

    def together(self, calls: Sequence[Call]) -> Call | None:
        """As DTensor and FSDP call many."""

        def all_of_them() -> None:
            with self._api._coalescing_manager(self._group):
                for call in calls:
                    call()

        return all_of_them


def _asynchronous(call: Call) -> Begin:
    begun: Any = partial(call, async_op=True)
    return lambda: begun().wait


# --- all of them --------------------------------------------------------------------------------


class World:
    """The process group of all ranks, and who makes calls in it.

    torch: also those of torch, where it is installed.
    mpi:   a communicator of MPI with the same ranks.
    gloo:  the group of torch with the same ranks; None where there is none.
    """

    def __init__(self, torch: bool) -> None:
        self._api: Any = mpicoll
        self.gloo: Any = None
        self.contestants: dict[str, Contestant] = {}
        if torch and importlib.util.find_spec("torch") is not None:
            self._begin_with_torch()
        else:
            mpicoll.init_process_group()
        for _ in range(FIRST):  # the first calls of a group are compared between the ranks
            mpicoll.barrier()
        self.mpi = comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py makes exceptions of them
        self.contestants = {MPI4PY: Mpi4py(comm), FACADE: Facade(), **self.contestants}
        self.n, self.me = comm.Get_size(), comm.Get_rank()
        self.ranks = Ranks(
            self.me, comm.Barrier, lambda table: comm.Allreduce(MPI.IN_PLACE, table, MPI.MAX)
        )
        own = os.sched_getaffinity(0)
        everybody = comm.allgather(own)
        #: Processors of all ranks together, and of the rank that has the fewest.
        self.processors, self.fewest = len(set().union(*everybody)), min(map(len, everybody))

    def _begin_with_torch(self) -> None:
        import torch
        import torch.distributed as api

        torch.set_num_threads(1)
        api.init_process_group("mpicoll")
        self._api, self.gloo = api, api.new_group(backend="gloo")
        self.contestants = {TORCH: Torch(None), GLOO: Torch(self.gloo)}

    def case(self, primitive: str, size: int, dtype: DType = by_name["float32"]) -> Case:
        """A call on about so many bytes, SUM where elements are combined; rank 0 is the root."""
        row = primitives.by_name[primitive]
        op = ReduceOp.SUM if row.reduces else None
        return Case(row, dtype, op, rounded(row, dtype, self.n, size), self.n, self.me, 0)

    def close(self) -> None:
        """Ends what was begun."""
        self.mpi.Free()
        self._api.destroy_process_group()

    def facts(self) -> dict[str, Any]:
        """What runs here: what is at the top of each file of results."""
        name, version = MPI.get_vendor()
        versions = {"mpicoll": mpicoll.__version__, "mpi4py": mpi4py.__version__}
        versions |= {"NumPy": np.__version__, "Python": platform.python_version()}
        if self.gloo is not None:
            versions["torch"] = importlib.metadata.version("torch")
        return {
            "machine": {
                "processor": tables.machine().partition(" x ")[2],
                "processors": self.processors,
                "processors of a rank": self.fewest,
                "load before": round(os.getloadavg()[0], 1),
            },
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "mpi": f"{name} {'.'.join(map(str, version))}",
            "versions": versions,
            "reductions": library.describe(),
            "ranks": self.n,
        }
