"""Collectives on device memory by every route, beside what the device and MPI do alone.

    mpirun -n 2 python benchmarks/gpu.py

Needs CuPy and a GPU, which the ranks may share; without a GPU it says so and ends. For 4 B to 1 GiB
of float32 it prints the time of all_reduce, broadcast, all_gather_single and reduce_scatter_single
(bytes are those of the larger array) by

- each device route that these ranks and this MPI can take, in a group of its own;
- mpi4py on the same CuPy arrays, the MPI library's own collective, where it is known to work: what
  is not known is tried in other processes first (mpicoll.cuda.capabilities);
- copy: a device-to-device copy of as many bytes on rank 0 alone, while the others wait: the limit.

Times are by the host's clock, around a call and the wait for its stream. They are medians, of the
slowest rank in each repetition; +- is half the distance between the quartiles. Repetitions of all
cases are interleaved.

algbw is bytes / time; busbw is algbw times the factor of nccl-tests, for ranks with a GPU each.
Ranks that share a GPU share its memory, and there another figure tells how near the limit is:
"moved", the bytes that any way must read and write over the time. For n ranks on one GPU an
all_reduce must read n inputs and write n outputs at least, 2 n times the bytes; a copy reads and
writes, 2 times the bytes. A route that puts data into a workspace on the way moves more, which is
not counted. The aims are for two ranks on one GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import Aim, Case, Ranks, Report, Times, measure

import mpicoll as dist
from mpicoll.core.groups import default_group
from mpicoll.cuda import binding, capabilities, device_routes, runtime
from mpicoll.errors import MpicollError, UnsupportedError
from mpicoll.primitives import by_name

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [4, KIB, 16 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, 256 * MIB, GIB]
#: The size at which routes are compared.
LARGE = 256 * MIB
ROUTES = ["peer", "direct", "native", "staged", "nccl"]
#: The sum of all calls that are timed together lasts about as long, in seconds.
TOGETHER = 1e-3


@dataclass(frozen=True)
class Operation:
    """One primitive.

    call:   what mpicoll does, of the larger array, the smaller one and the group.
    by_mpi: what mpi4py does with the same.
    moved:  how many times the bytes n ranks must read and write at least.
    """

    name: str
    call: Callable[[Any, Any, Any], object]
    by_mpi: Callable[[Any, Any, Any], object]
    moved: Callable[[int], float]


def operations() -> list[Operation]:
    """What is measured."""
    from mpi4py import MPI

    return [
        Operation(
            "all_reduce",
            lambda whole, part, group: dist.all_reduce(whole, group=group),
            lambda whole, part, comm: comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM),
            lambda n: 2 * n,
        ),
        Operation(
            "broadcast",
            lambda whole, part, group: dist.broadcast(whole, 0, group=group),
            lambda whole, part, comm: comm.Bcast(whole, 0),
            lambda n: n,  # read once, written n - 1 times
        ),
        Operation(
            "all_gather_single",
            lambda whole, part, group: dist.all_gather_single(whole, part, group=group),
            lambda whole, part, comm: comm.Allgather(part, whole),
            lambda n: n + 1,  # n parts are read, n wholes written
        ),
        Operation(
            "reduce_scatter_single",
            lambda whole, part, group: dist.reduce_scatter_single(part, whole, group=group),
            lambda whole, part, comm: comm.Reduce_scatter_block(whole, part, MPI.SUM),
            lambda n: n + 1,  # n wholes are read, n parts written
        ),
    ]


def no_gpu() -> str:
    """Why there is no GPU that can be used; "" where there is one."""
    try:
        runtime.get_runtime()
    except UnsupportedError as error:
        return str(error)
    return ""


class Gpu:
    """This rank's GPU, and the stream that it works in."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        index = binding.bind()
        assert index is not None
        self.index = index
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()

    def numbers(self, count: int) -> Any:
        """An array of zeros, in memory of cudaMalloc."""
        memory = self.cupy.cuda.Memory(4 * count)
        array = self.cupy.ndarray(count, "f4", self.cupy.cuda.MemoryPointer(memory, 0))
        array.fill(0)
        self.stream.synchronize()
        return array

    def waited(self, call: Callable[[], object]) -> Case:
        """The call, and the wait for what it left in the stream."""

        def case() -> None:
            call()
            self.stream.synchronize()

        return case

    def before(self, call: Callable[[], object]) -> Case:
        """What has to be done by hand for MPI: the wait before; it ends when all is done."""

        def case() -> None:
            self.stream.synchronize()
            call()

        return case


def groups_of(report: Report, wanted: list[str]) -> dict[str, Any]:
    """A group for each route that the ranks can take; says why the others are not measured."""
    found = capabilities.exchange(default_group().inner, probes=True)
    made = {}
    for name in wanted:
        try:
            device_routes.eligible_routes(found, name)
            made[name] = forced(name)
        except MpicollError as error:
            report.line(f"not measured: {name}: {error}")
            report.add("not measured", {"route": name, "why": str(error)})
    return made


def forced(name: str) -> Any:
    """A group that takes a route, which its first call agrees on. All ranks call."""
    import cupy

    os.environ[device_routes.FORCED] = name
    capabilities._known = None  # it holds the variable of before
    try:
        group = dist.new_group()
        array = cupy.ones(3, "f4")
        dist.all_reduce(array, group=group)
        if not bool((array == dist.get_world_size()).all()):
            raise SystemExit(f"{name}: all_reduce gives a wrong sum")
        return group
    finally:
        del os.environ[device_routes.FORCED]
        capabilities._known = None


def takes_device_memory() -> bool:
    """MPI's own collectives take device memory on all ranks: it has been seen to, or is said to."""
    found = capabilities.exchange(default_group().inner, probes=True)
    return all(own.cuda is capabilities.CudaSupport.FULL for own in found)


def copies(gpu: Gpu, whole: Any) -> Case:
    """A device-to-device copy on rank 0 alone."""
    other = gpu.numbers(whole.size) if dist.get_rank() == 0 else None
    nothing: Case = lambda: None  # noqa: E731
    return nothing if other is None else gpu.waited(
        lambda: gpu.cupy.cuda.runtime.memcpyAsync(
            other.data.ptr, whole.data.ptr, whole.nbytes,
            gpu.cupy.cuda.runtime.memcpyDeviceToDevice, gpu.stream.ptr,
        )
    )  # fmt: skip


def once(ranks: Ranks, cases: dict[str, Case]) -> float:
    """Seconds that all cases take together, about."""
    times = measure(ranks, cases, 2, first=2)
    return sum(each.median for each in times.values())


def sweep(
    report: Report, ranks: Ranks, gpu: Gpu, groups: dict[str, Any], options: argparse.Namespace
) -> dict[tuple[str, int, str], Times]:
    """Every operation, size and route."""
    from mpi4py import MPI

    by_mpi = takes_device_memory()
    if not by_mpi:
        text = "MPI's own collectives, and mpi4py on CuPy arrays: not known to work here"
        report.line(f"not measured: {text}")
        report.add("not measured", {"route": "mpi4py", "why": text})
    n = dist.get_world_size()
    found: dict[tuple[str, int, str], Times] = {}
    for operation in operations():
        if operation.name not in options.operations:
            continue
        factor = by_name[operation.name].moved(n)
        report.line(f"\n{operation.name}, microseconds a call")
        report.line(f"{'bytes':>11} {'':<8}{'time':>20}{'algbw':>9}{'busbw':>9}{'moved':>9}  GB/s")
        for size in options.sizes:
            parts = n if operation.name.endswith("_single") else 1
            count = max(1, size // 4 // parts) * parts  # of the larger array
            whole, part = gpu.numbers(count), gpu.numbers(count // parts)
            nbytes = whole.nbytes
            cases = {"copy": copies(gpu, whole)}
            for name, group in groups.items():
                cases[name] = gpu.waited(partial(operation.call, whole, part, group))
            if by_mpi:
                cases["mpi4py"] = gpu.before(partial(operation.by_mpi, whole, part, MPI.COMM_WORLD))
            took = once(ranks, cases)
            repetitions = int(min(options.repetitions, max(3, options.seconds / max(took, 1e-9))))
            calls = int(min(50, max(1, TOGETHER * len(cases) / max(took, 1e-9))))
            # Each rank's clock has said the same: the slowest's.
            times = measure(ranks, cases, repetitions, calls, first=1)
            for name, each in times.items():
                found[operation.name, size, name] = each
                algbw = nbytes / each.median / 1e9
                moved = algbw * (2 if name == "copy" else operation.moved(n))
                busbw = f"{algbw * factor:>9.1f}" if name != "copy" else f"{'':>9}"
                report.line(
                    f"{nbytes:>11} {name:<8}{each.text(1e-6, 12)}{algbw:>9.1f}{busbw}{moved:>9.1f}"
                )
                entry = {"operation": operation.name, "bytes": nbytes, "case": name}
                entry |= {"repetitions": repetitions, "calls": calls, **each.record()}
                report.add("times", {**entry, "algbw": algbw, "moved": moved})
    return found


def aims(report: Report, found: dict[tuple[str, int, str], Times], shared: bool) -> None:
    """What is aimed at, for two ranks on one GPU."""
    n = dist.get_world_size()
    if n != 2 or not shared:
        report.line(f"\nno aims: they are for two ranks on one GPU, these are {n}")
        return
    report.line(f"\n{'aim, for two ranks on one GPU':<74}measured")

    def aim(
        name: str, limit: float, unit: str, what: Callable[..., float], *used: tuple[int, str]
    ) -> None:
        """``what`` of the seconds of these sizes and cases, if they were measured."""
        times = [found.get(("all_reduce", *each)) for each in used]
        if None in times:
            report.line(f"{name:<58}not measured")
            return
        measured = what(*(each.median for each in times if each is not None))
        report.aims.append(Aim(name, limit, measured, unit, at_least=unit == "x"))

    # Reading n inputs and writing n outputs is as much as n copies.
    aim("all_reduce 256 MiB, peer: bytes moved, of a copy's rate", 0.5, "x",
        lambda copy, peer: n * copy / peer, (LARGE, "copy"), (LARGE, "peer"))  # fmt: skip
    aim("all_reduce 256 MiB, staged / peer", 5.0, "x",
        lambda staged, peer: staged / peer, (LARGE, "staged"), (LARGE, "peer"))  # fmt: skip
    for size, text in [(4, "4 B"), (KIB, "1 KiB")]:
        aim(f"all_reduce {text}, peer", 50.0, "us", lambda peer: 1e6 * peer, (size, "peer"))


def describe(report: Report, gpu: Gpu) -> bool:
    """Say what runs here; True where all ranks share one GPU."""
    from mpi4py import MPI

    cuda = runtime.get_runtime()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, cuda.pci_bus_id(gpu.index))
    library = MPI.Get_library_version().splitlines()[0].strip("\0")
    what = {
        "gpu": cuda.name(gpu.index),
        "gpus": len(set(everybody)),
        "ranks": dist.get_world_size(),
        "driver": cuda.driver_version(),
        "mpi": " ".join(library.split()),
        "mpicoll": dist.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processors": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
    }
    report.record |= what
    report.line(", ".join(f"{name} {value}" for name, value in what.items()))
    return len(set(everybody)) == 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ["all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single"]
    parser.add_argument("--operations", nargs="+", choices=names, default=names)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--repetitions", type=int, default=30, help="interleaved, at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="about, for each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if options.repetitions < 3:
        parser.error("--repetitions must be at least 3")
    return options


def main() -> None:
    """Measures and prints."""
    options = parse_arguments()
    reason = no_gpu()
    dist.init_process_group()
    if any_lacks(reason):
        if dist.get_rank() == 0:
            print(f"SKIPPED: nothing is measured, for a rank has no GPU: {reason}", flush=True)
        dist.destroy_process_group()
        return
    ranks = Ranks(
        dist.get_rank(), dist.barrier, lambda table: dist.all_reduce(table, dist.ReduceOp.MAX)
    )
    report, gpu = Report(ranks), Gpu()
    shared = describe(report, gpu)
    groups = groups_of(report, options.routes)
    found = sweep(report, ranks, gpu, groups, options)
    aims(report, found, shared)
    report.end(options.json)
    dist.destroy_process_group()


def any_lacks(reason: str) -> bool:
    """Whether any rank has a reason; all ranks call."""
    reasons = np.array([bool(reason)], np.uint8)
    dist.all_reduce(reasons, dist.ReduceOp.MAX)
    return bool(reasons[0])


if __name__ == "__main__":
    main()
