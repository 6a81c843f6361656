"""What it costs to compare the ranks' calls, by the stride between two comparisons.

    mpirun -n 2 python benchmarks/comparing.py

all_reduce of 4 bytes, in the memory that ranks share and by MPI, where a comparison costs the most
for what it compares. "never" is the program without any. Loops of all strides take turns; the
figure is the median of their ratios to "never" with half the distance of the quartiles.
docs/performance.md has what came of it.
"""

from __future__ import annotations

import os
import time

import numpy as np
from contestants import World

import mpicoll
from mpicoll.watch import consistency

STRIDES = [1, 8, 16, 32, 64, 128, 0]
CALLS, TURNS = 1024, 101


def loop(group: mpicoll.ProcessGroup, stride: int) -> float:
    """Microseconds a call of a loop with this stride; 0: that compares nothing."""
    array = np.zeros(1, np.float32)
    group.next_check = group.sequence + 1
    consistency.STRIDE = stride or 1 << 40
    mpicoll.all_reduce(array, group=group)  # compares, and takes the stride on
    mpicoll.barrier(group)
    start = time.perf_counter()
    for _ in range(CALLS):
        mpicoll.all_reduce(array, group=group)
    took = (time.perf_counter() - start) / CALLS * 1e6
    group.recent = group.recent[:1]  # what was never compared is not to fill the memory
    return took


def main() -> None:
    """Measures and prints."""
    world = World(torch=False)
    for shared in "10":
        os.environ["MPICOLL_SHARED_MEMORY"] = shared
        group = mpicoll.new_group()
        mpicoll.all_reduce(np.zeros(1 << 20, np.float32), group=group)  # looks for shared memory
        for _ in range(consistency.FIRST):
            mpicoll.barrier(group)
        rows = [{stride: loop(group, stride) for stride in STRIDES} for _ in range(TURNS)]
        slowest = np.max(world.mpi.allgather([[row[s] for s in STRIDES] for row in rows]), axis=0)
        if world.me == 0:
            carrier = "shared memory" if group.resources.find("shared") else "by MPI"
            print(f"{world.facts()['mpi']}, {carrier}")
            for stride, column in zip(STRIDES, slowest.T, strict=True):
                low, middle, high = np.quantile(column / slowest[:, -1], [0.25, 0.5, 0.75])
                print(
                    f"{stride or 'never':>6} {np.median(column):7.2f} us  {middle:.3f} +-"
                    f"{(high - low) / 2:.3f}",
                    flush=True,
                )
    world.close()


if __name__ == "__main__":
    main()
