"""Count what one call of each device route does on a rank; prints the table of docs/gpu.md.

    mpirun -n 2 python benchmarks/gpu_counts.py
    mpirun -n 4 python benchmarks/gpu_counts.py  # hierarchical, on two simulated nodes

It needs two GPUs, or an emulated device (``make test-gpu-emulated``), and counts, for rank 0 and a
call of each of SIZES: kernels, copies, bytes that they read and write (without the kernels of
`peer` and NCCL), waits of the host for the device, and how often the hosts meet (collectives and
messages between hosts). A stand-in for NCCL counts its kernels and moves no data.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import cupy
from mpi4py import MPI

import mpicoll as dist
from mpicoll.core.plan import CallKind, Implementation
from mpicoll.cuda import binding, capabilities, runtime
from mpicoll.routes import registry
from mpicoll.routes.device import hierarchical
from mpicoll.routes.host import select

ROUTES = "nccl", "peer", "hierarchical", "ipc", "direct", "staged"
CALLS = "all_reduce", "all_gather_single", "all_to_all_single"
SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}

counts: Counter[str] = Counter()


class Nccl:
    """Counts NCCL's kernels, one for each call."""

    def allReduce(self, *arguments: Any) -> None:
        """See CuPy's NcclCommunicator."""
        counts["kernels"] += 1

    allGather = allReduce

    def send(self, *arguments: Any) -> None:
        """See CuPy's NcclCommunicator."""

    recv = check_async_error = destroy = send


class CountingRuntime(runtime.Runtime):
    """Counts the work of calls."""

    def has_nccl(self) -> bool:
        """See Runtime."""
        return True

    def nccl_unique_id(self) -> bytes:
        """See Runtime."""
        return b""

    def create_nccl(self, *arguments: Any) -> Nccl:
        """See Runtime."""
        return Nccl()

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        """See Runtime."""
        counts["kernels"] += 1
        yield

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

    def copy_strided(self, *arguments: Any) -> None:
        """See Runtime."""
        *_, shape, itemsize, _ = arguments
        counts["kernels"] += 1
        counts["read"] += prod(shape) * itemsize
        counts["written"] += prod(shape) * itemsize
        super().copy_strided(*arguments)

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
        if name in ("Allgather", "Allreduce", "Iallreduce", "Irecv", "Isendrecv", "Sendrecv"):
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
    runtime._runtime = CountingRuntime()
    os.environ["MPICOLL_CUDA_AWARE"] = "1"  # on an emulated device, memory is the host's
    choose = select.choose

    def counted_choose(kind: CallKind, listed: bool = False) -> Implementation:
        found = choose(kind, listed)
        run = found.run

        def call(*arguments: Any) -> None:
            counts["meetings"] += 1
            run(*arguments)

        return Implementation(call)

    select.choose = counted_choose
    make_part = vars(hierarchical)["make_part"]

    def make_counted_part(*arguments: Any) -> Any:
        part = make_part(*arguments)
        part.inner = part.messages = CountingComm(part.inner)
        return part

    vars(hierarchical)["make_part"] = make_counted_part
    dist.init_process_group(timeout=300)
    binding.bind()
    n, me = dist.get_world_size(), dist.get_rank()
    if n == 4:
        vars(capabilities)["node"] = lambda: f"node {me // 2}"
    routes = [name for name in ROUTES if (name == "hierarchical") == (n == 4)]
    for name, route in itertools.product(CALLS, routes):
        if name not in registry.DEVICE[route].serves.primitives:
            continue
        rows: dict[str, list[str]] = {}  # the sizes of each row
        with a_group(route) as group:
            group.inner, agree = CountingComm(group.inner), group.agree
            if agree is not None:
                group.agree = lambda *words, agree=agree: (counts.update(meetings=1), agree(*words))
            for size, nbytes in SIZES.items():
                row = " | ".join(count_call(group, name, nbytes, route in ("peer", "nccl")))
                rows.setdefault(row, []).append(size)
        for row, sizes in rows.items() if me == 0 else ():
            print(f"| {name} | `{route}` | {row} | {', '.join(sizes)} |", flush=True)
    dist.destroy_process_group()


def count_call(group: Any, name: str, nbytes: int, hides_bytes: bool) -> list[str]:
    """Return the counts of a call after the first two, which set up the route."""
    given = cupy.ones(nbytes // 4, cupy.float32)
    arguments = {
        "all_reduce": [given],
        "all_gather_single": [cupy.empty(group.size() * given.size, cupy.float32), given],
        "all_to_all_single": [cupy.empty_like(given), given],
    }[name]
    for _ in range(3):
        counts.clear()
        getattr(dist, name)(*arguments, group=group)
    found = counts.copy()
    moved = ["" if hides_bytes else f"{found[key] / nbytes:g}" for key in ("read", "written")]
    return [str(found[key]) for key in ("kernels", "copies", "waits", "meetings")] + moved


main()
