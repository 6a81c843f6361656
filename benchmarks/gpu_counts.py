"""Count what one call of each device route does on a rank; prints the table of docs/gpu.md.

    mpirun -n 2 python benchmarks/gpu_counts.py

It needs a GPU for each rank, or an emulated device (``make test-gpu-emulated``), and counts, for
rank 0 and a call of 1 MiB: kernels, copies, bytes that they read and write (without the
kernels of `peer`), waits of the host for the device, and how often the hosts meet (collectives and
messages between hosts).
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
from mpi4py import MPI

import mpicoll as dist
from mpicoll.core.plan import CallKind, Implementation
from mpicoll.cuda import binding, capabilities, runtime
from mpicoll.routes import registry
from mpicoll.routes.host import select

ROUTES = "peer", "ipc", "direct", "staged"
CALLS = "all_reduce", "all_gather_single", "all_to_all_single"
NBYTES = 1 << 20

counts: Counter[str] = Counter()


class CountingRuntime(runtime.Runtime):
    """Counts the work of calls."""

    def combine(self, *arguments: Any) -> None:
        """See Runtime."""
        _, by, sources, outs, count, *_ = arguments
        counts["kernels"] += 1
        size = 4 * by.elements * count  # float32
        counts["read"] += len(sources) * size
        counts["written"] += len(outs) * size
        super().combine(*arguments)

    def copy(self, *arguments: Any) -> None:
        """See Runtime."""
        *_, nbytes, _ = arguments
        counts["copies"] += 1
        counts["read"] += nbytes
        counts["written"] += nbytes
        super().copy(*arguments)

    def collective(self, *arguments: Any) -> None:
        """See Runtime."""
        counts["kernels"] += 1
        super().collective(*arguments)

    def synchronize(self, *arguments: Any) -> None:
        """See Runtime."""
        counts["waits"] += 1
        super().synchronize(*arguments)


class CountingComm(MPI.Intracomm):
    """Counts collectives and messages."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("Allgather", "Allreduce", "Irecv", "Isendrecv", "Sendrecv"):
            counts["meetings"] += 1
        return super().__getattribute__(name)


@contextmanager
def a_group(route: str) -> Iterator[Any]:
    """Yield a group that uses a route."""
    os.environ["MPICOLL_DEVICE_ROUTE"] = route
    capabilities.forget()
    group: Any = dist.new_group()
    yield group
    dist.destroy_process_group(group)


def main() -> None:
    """Print a row for each call and route."""
    os.environ["EMULATED_GPU_PROTECTION"] = "0"  # on an emulated device, MPI may access memory
    os.environ["MPICOLL_CUDA_AWARE"] = "1"
    runtime._runtime = CountingRuntime()
    choose = select.choose

    def counted_choose(kind: CallKind, listed: bool = False) -> Implementation:
        found = choose(kind, listed)
        run = found.run

        def call(*arguments: Any) -> None:
            counts["meetings"] += 1
            run(*arguments)

        return Implementation(call)

    select.choose = counted_choose
    dist.init_process_group(timeout=300)
    binding.bind()
    n = dist.get_world_size()
    for name, route in itertools.product(CALLS, ROUTES):
        if name not in registry.DEVICE[route].serves.primitives:
            continue
        with a_group(route) as group:
            group.inner, agree = CountingComm(group.inner), group.agree
            if agree is not None:
                group.agree = lambda *words, agree=agree: (counts.update(meetings=1), agree(*words))
            given = cupy.ones(NBYTES // 4, cupy.float32)
            arguments = {
                "all_reduce": [given],
                "all_gather_single": [cupy.empty(n * given.size, cupy.float32), given],
                "all_to_all_single": [cupy.empty_like(given), given],
            }[name]
            for _ in range(3):  # the first call makes the route
                counts.clear()
                getattr(dist, name)(*arguments, group=group)
            found = counts.copy()
        bytes_moved = [f"{found[key] / NBYTES:g}" for key in ("read", "written")]
        if dist.get_rank() == 0:
            numbers = [found[key] for key in ("kernels", "copies", "waits", "meetings")]
            moved = ["", ""] if route == "peer" else bytes_moved
            print("|", " | ".join(map(str, [name, f"`{route}`", *numbers, *moved])), "|")
    dist.destroy_process_group()


main()
