"""Make very many calls, groups and works in one process, and see that nothing grows.

    mpiexec -n N python tests/soak/soak.py [--share 1.0] [--phases NAME ...]

Each phase is cut into slices. After each slice every rank looks at what it holds: private memory,
open files and threads; after a phase, at how many communicators MPI still has to give.
Each phase prints its growth since the first slices, on any rank, as a row of a table in Markdown.
The exit code is 1 if anything has grown. ``make soak`` runs all phases, with UCX_MEM_EVENTS=n,
because MPICH's UCX otherwise keeps about 150 bytes of each unmapped region: two for each group.
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
#: Slices after which everything that is made once, and kept, is there.
WARM = 3
#: Bytes by which private memory may grow in the rest of a phase: the allocator keeps what it likes.
ALLOWED = 1 << 20
#: Communicators that are asked of MPI at most: MPICH has some 2,000.
MANY = 2200
#: Works that are pending at a time, and groups.
PENDING, LIVING = 100, 10


class Held(NamedTuple):
    """What a process holds just now; memory in bytes, of pages that it shares with none."""

    memory: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        private = 0
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Private"):
                private += int(line.split()[1]) * 1024
        files, threads = (len([*Path("/proc/self", each).iterdir()]) for each in ("fd", "task"))
        return cls(private, files, threads)


def count_communicators() -> int:
    """Return how many more communicators MPI has to give, MANY at most; all ranks call."""
    made: list[MPI.Comm] = []
    try:
        while len(made) < MANY:
            made.append(MPI.COMM_WORLD.Dup())
    except MPI.Exception:
        pass
    for one in made:
        one.Free()
    return len(made)


# ---- Phases: each makes ``times`` of its kind --------------------------------------------------


def small_calls(times: int) -> None:
    x = np.ones(1, np.float32)
    for _ in range(times):
        dist.all_reduce(x, dist.ReduceOp.MAX)


def kinds_of_calls(times: int) -> None:
    """Every kind, dtype and size in turn: what is kept of each must be bounded, too."""
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
    """Futures with callbacks, and works that nobody waits for."""
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
    """Some live at a time; they end in another order than they were made in."""
    x = np.ones(100, np.float32)
    for _ in range(0, times, LIVING):
        made = [dist.new_group() for _ in range(LIVING)]
        for one in made:
            dist.all_reduce(x, dist.ReduceOp.MAX, one)
            dist.all_reduce(x, dist.ReduceOp.MAX, one, async_op=True).wait()
        for one in made[::2] + made[1::2]:
            dist.destroy_process_group(one)


def beginnings(times: int) -> None:
    """Of the whole library; the default group is there afterwards as it was before."""
    for _ in range(times):
        dist.destroy_process_group()
        dist.init_process_group()
        dist.barrier()


def start_threads() -> None:
    """Start the thread of the default group: it carries out asynchronous calls that cannot be
    carried out at once, as some rank is late.
    """
    for late in range(dist.get_world_size()):
        time.sleep(0.1 * (dist.get_rank() == late))
        dist.all_reduce(np.ones(1), async_op=True).wait()


class Phase(NamedTuple):
    words: str
    times: int
    run: Callable[[int], None]


PHASES = {
    "calls": Phase("small calls", 10**7, small_calls),
    "kinds": Phase("calls of many kinds and sizes", 10**4, kinds_of_calls),
    "works": Phase("asynchronous works", 10**5, works),
    "futures": Phase("works that nobody waits for", 10**5, works_with_futures),
    "messages": Phase("messages", 10**5, messages),
    "objects": Phase("calls of objects", 10**4, objects),
    "groups": Phase("groups", 10**4, groups),
    "init": Phase("init and destroy", 10**3, beginnings),
}


def soak(phase: Phase, times: int, free: int) -> tuple[str, bool]:
    """Run a phase; return its row, and whether all is flat on all ranks.

    free: how many communicators MPI had to give before all phases.
    """
    start_threads()
    held, start = [], time.monotonic()
    for _ in range(SLICES):
        phase.run(times // SLICES)
        dist.barrier()  # what one rank has ended the others may still hold
        held.append(Held.now())
    seconds = time.monotonic() - start
    warm, last = held[WARM - 1], held[-1]
    grown = [b - a for a, b in zip(warm, last, strict=True)]
    lost = free - count_communicators()
    most = np.array([*grown, lost])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    memory, files, threads, lost = most.tolist()
    flat = memory <= ALLOWED and files <= 0 and threads <= 0 and lost <= 0
    each = memory / (times * (1 - WARM / SLICES))
    row = (
        f"| {phase.words} | {times:,} | {seconds:.0f} s | {memory / 1024:+.0f} KiB "
        f"| {each:+.2f} B | {files:+d} | {threads:+d} | {-lost:+d} |"
    )
    return row, flat


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--share", type=float, default=1.0, help="of the times of each phase")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    arguments = parser.parse_args()
    dist.init_process_group()
    free, all_flat = count_communicators(), True
    library = MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0]
    name, n = " ".join(library.split()).replace(" Version:", ""), dist.get_world_size()
    lines = [
        f"| {name}, {n} ranks | times | in | memory | each | files | threads | communicators |",
        "|---" * 8 + "|",
    ]
    rank = dist.get_rank()
    if rank == 0:
        print("\n".join(lines), flush=True)
    for chosen in arguments.phases:
        phase = PHASES[chosen]
        row, flat = soak(phase, max(SLICES * LIVING, int(phase.times * arguments.share)), free)
        all_flat &= flat
        if rank == 0:
            print(row + ("" if flat else " NOT FLAT"), flush=True)
    dist.destroy_process_group()
    return 0 if all_flat else 1


if __name__ == "__main__":
    sys.exit(main())
