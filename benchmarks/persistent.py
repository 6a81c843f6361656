"""Whether MPI-4's persistent all_reduce is worth a plan: beside MPI's own call, and by size.

    mpirun -n 2 python benchmarks/persistent.py

MPI_Allreduce_init once, then MPI_Start and MPI_Wait a call (MPI-4.1 section 6.14), with mpi4py on
the same memory as MPI_Allreduce; and mpicoll's call. Time is that of the slowest rank, cases take
turns, the figure is the median with half the distance of the quartiles. docs/performance.md has
what came of it.
"""

from __future__ import annotations

import numpy as np
from contestants import World
from measure import KIB, MIB, bytes_shown, measure
from mpi4py import MPI

import mpicoll

SIZES = [4, KIB, 64 * KIB, MIB, 16 * MIB]


def main() -> None:
    """Measures and prints."""
    world = World(torch=False)
    for size in SIZES:
        array = np.zeros(size // 4, np.float32)
        ready = [array, array.size, MPI.FLOAT]
        cases = {
            "MPI_Allreduce": lambda ready=ready: world.mpi.Allreduce(MPI.IN_PLACE, ready),
            "mpicoll": lambda array=array: mpicoll.all_reduce(array),
        }
        try:
            request = world.mpi.Allreduce_init(MPI.IN_PLACE, ready)
        except NotImplementedError:
            if world.me == 0:
                print(f"{world.facts()['mpi']} has no MPI_Allreduce_init")
            break

        def persistent(request: MPI.Prequest = request) -> None:
            request.Start()
            request.Wait()

        times = measure(
            world.ranks, {**cases, "persistent": persistent}, 50, max(1, 64 * KIB // size)
        )
        request.Free()
        if world.me == 0:
            told = (f"{name} {each.text(1e-6, 8)} us" for name, each in times.items())
            print(f"{bytes_shown(size):>8}  {'   '.join(told)}", flush=True)
    world.close()


if __name__ == "__main__":
    main()
