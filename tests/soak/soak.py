"""Make millions of calls, groups and works in one process, and check for leaks.

    mpiexec -n N python tests/soak/soak.py [--share 1.0]

Each phase has several slices. After each slice every rank measures its private memory, open files
and threads. Each group has two communicators, of which MPICH can create about 2,000.
Each phase prints the maximum growth of any rank since the first slices, as a row of a Markdown
table. The exit code is 1 after growth. ``make soak`` runs all phases with UCX_MEM_EVENTS=n, because
MPICH's UCX otherwise keeps about 150 bytes for each unmapped region, and a group has two.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

import mpicoll as dist

SLICES = 10
#: Number of slices after which all caches are filled.
WARM = 3
#: Maximum growth of private memory after these slices: the allocator keeps free memory.
ALLOWED_BYTES = 1 << 20
#: Number of works that are pending, and of groups that exist, at the same time.
PENDING, LIVING = 100, 10


class Usage(NamedTuple):
    """Resources of this process: private memory in bytes, files and threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        private = 0
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Private"):
                private += int(line.split()[1]) * 1024
        files, threads = (len([*Path("/proc/self", each).iterdir()]) for each in ("fd", "task"))
        return cls(private, files, threads)


# ---- Phases: each repeats its calls ``times`` times ---------------------------------------------


def small_calls(times: int) -> None:
    x = np.ones(1, np.float32)
    for _ in range(times):
        dist.all_reduce(x, dist.ReduceOp.MAX)


def kinds_of_calls(times: int) -> None:
    """Make calls of different primitives, dtypes and sizes, whose caches must be bounded."""
    n = dist.get_world_size()
    for turn in range(times):
        count = (1, 100, 5000, 300_000)[turn % 4]
        x = np.ones(count, ("float32", "float64", "int32")[turn % 3])
        dist.all_reduce(x, (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[turn % 2])
        dist.broadcast(x, turn % n)
        dist.all_gather_single(np.empty(n * count, x.dtype), x)


def works(times: int) -> None:
    arrays = [np.ones(10, np.float32) for _ in range(PENDING)]
    for _ in range(0, times, PENDING):
        pending = [dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True) for x in arrays]
        for one in pending:
            one.wait()


def works_with_futures(times: int) -> None:
    """Add callbacks to futures, and do not wait for the works."""
    x, seen = np.ones(1000, np.float32), []
    for turn in range(times):
        work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
        if turn % 2:
            work.get_future().then(lambda future: seen.append(future.done()))
        if turn % PENDING == PENDING - 1:
            dist.barrier()
            seen.clear()


def messages(times: int) -> None:
    n, me = dist.get_world_size(), dist.get_rank()
    x, y = np.ones(100), np.empty(100)
    for _ in range(times):
        receipt = dist.irecv(y, (me - 1) % n)
        dist.send(x, (me + 1) % n)
        receipt.wait()


def objects(times: int) -> None:
    n = dist.get_world_size()
    for turn in range(times):
        dist.all_gather_object([None] * n, {"turn": turn, "text": "x" * (turn % 500)})
        dist.broadcast_object_list([turn] * 3, turn % n)


def groups(times: int) -> None:
    """Destroy groups in another order than they were created in."""
    x = np.ones(100, np.float32)
    for _ in range(0, times, LIVING):
        made = [dist.new_group() for _ in range(LIVING)]
        for one in made:
            dist.all_reduce(x, dist.ReduceOp.MAX, one)
            dist.all_reduce(x, dist.ReduceOp.MAX, one, async_op=True).wait()
        for one in made[::2] + made[1::2]:
            dist.destroy_process_group(one)


def initializations(times: int) -> None:
    """Leaves a default group."""
    for _ in range(times):
        dist.destroy_process_group()
        dist.init_process_group()
        dist.barrier()


def start_threads() -> None:
    """Start the default group's progress thread, by an asynchronous call before which a rank is
    late. Other asynchronous calls run inline.
    """
    for late in range(dist.get_world_size()):
        time.sleep(0.1 * (dist.get_rank() == late))
        dist.all_reduce(np.ones(1), async_op=True).wait()


#: Description, number of repetitions, and function of each phase.
PHASES = [
    ("small calls", 10**7, small_calls),
    ("calls of many kinds and sizes", 10**4, kinds_of_calls),
    ("asynchronous calls", 10**5, works),
    ("asynchronous calls without wait()", 10**5, works_with_futures),
    ("messages", 10**5, messages),
    ("object collectives", 10**4, objects),
    ("groups", 10**4, groups),
    ("init and destroy", 10**3, initializations),
]


def soak(words: str, times: int, run: Callable[[int], None]) -> tuple[str, bool]:
    """Run a phase. Return its row, and True if no resource has grown on any rank."""
    start_threads()
    usage, start = [], time.monotonic()
    for _ in range(SLICES):
        run(times // SLICES)
        dist.barrier()  # ranks release resources at different times
        usage.append(Usage.now())
    seconds = time.monotonic() - start
    warm, last = usage[WARM - 1], usage[-1]
    grown = [b - a for a, b in zip(warm, last, strict=True)]
    most = np.array(grown)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    memory, files, threads = most.tolist()
    flat = memory <= ALLOWED_BYTES and files <= 0 and threads <= 0
    each = memory / (times * (1 - WARM / SLICES))
    row = (
        f"| {words} | {times:,} | {seconds:.0f} s | {memory / 1024:+.0f} KiB "
        f"| {each:+.2f} B | {files:+d} | {threads:+d} |"
    )
    return row, flat


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the repetitions")
    share = parser.parse_args().share
    dist.init_process_group()
    all_flat = True
    library = MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0]
    name, n = " ".join(library.split()).replace(" Version:", ""), dist.get_world_size()
    lines = [
        f"| {name}, {n} ranks | times | in | memory | each | files | threads |",
        "|---" * 7 + "|",
    ]
    rank = dist.get_rank()
    if rank == 0:
        print("\n".join(lines), flush=True)
    for words, times, run in PHASES:
        row, flat = soak(words, max(SLICES * LIVING, int(times * share)), run)
        all_flat &= flat
        if rank == 0:
            print(row + ("" if flat else " NOT FLAT"), flush=True)
    dist.destroy_process_group()
    return 0 if all_flat else 1


if __name__ == "__main__":
    sys.exit(main())
