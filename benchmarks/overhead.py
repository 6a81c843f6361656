"""What a call costs: mpicoll beside mpi4py in one run.

    mpirun -n 2 python benchmarks/overhead.py

Prints the median time of a synchronous all_reduce (float32, sum, in place) for 4 B to 64 KiB:
mpi4py with a ready ``[buffer, count, datatype]``, mpi4py with a NumPy array, mpicoll with a NumPy
array, and, where torch is installed, mpi4py and mpicoll with a torch CPU tensor. Then bfloat16
beside float32 of as many elements, and the time to import mpicoll. Repetitions are interleaved, so
that what else the machine does meets all alike; +- is half the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
from mpi4py import MPI

import mpicoll as dist

try:
    import torch
except ImportError:
    torch = None

Case = Callable[[], object]


def measure(cases: dict[str, Case], repetitions: int, calls: int) -> dict[str, list[float]]:
    """Seconds a call of each case, for each repetition: the slowest rank's."""
    comm = MPI.COMM_WORLD
    for case in cases.values():
        for _ in range(100):  # the first calls are compared between the ranks, and make plans
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, case in cases.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                case()
            took = (time.perf_counter() - start) / calls
            times[name].append(comm.allreduce(took, MPI.MAX))
    return times


def spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def latency(repetitions: int) -> None:
    """The table of small messages."""
    comm = MPI.COMM_WORLD
    main = comm.Get_rank() == 0
    names = ["mpi4py ready", "mpi4py NumPy", "mpicoll NumPy"]
    if torch is not None:
        names += ["mpi4py torch", "mpicoll torch"]
    if main:
        print(f"all_reduce float32, {comm.Get_size()} ranks, microseconds a call")
        print(f"{'bytes':>8}" + "".join(f"{name:>19}" for name in names) + f"{'over ready':>13}"
              + (f"{'torch ratio':>13}" if torch is not None else ""))  # fmt: skip
    for size in [4 * 4**i for i in range(8)]:
        x = np.zeros(size // 4, np.float32)
        ready = [x, x.size, MPI.FLOAT]
        cases: dict[str, Case] = {
            "mpi4py ready": lambda r=ready: comm.Allreduce(MPI.IN_PLACE, r, MPI.SUM),
            "mpi4py NumPy": lambda x=x: comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM),
            "mpicoll NumPy": lambda x=x: dist.all_reduce(x),
        }
        if torch is not None:
            t = torch.zeros(size // 4)
            cases["mpi4py torch"] = lambda t=t: comm.Allreduce(MPI.IN_PLACE, t, MPI.SUM)
            cases["mpicoll torch"] = lambda t=t: dist.all_reduce(t)
        times = measure(cases, repetitions, 200 if size <= 4096 else 50)
        median = {name: 1e6 * statistics.median(times[name]) for name in names}
        over = [
            1e6 * (a - b)
            for a, b in zip(times["mpicoll NumPy"], times["mpi4py ready"], strict=True)
        ]
        if main:
            row = f"{size:>8}"
            for name in names:
                row += f"{median[name]:>12.2f} +-{1e6 * spread(times[name]):>4.2f}"
            row += f"{statistics.median(over):>+13.2f}"
            if torch is not None:
                row += f"{median['mpi4py torch'] / median['mpicoll torch']:>12.2f}x"
            print(row, flush=True)


def narrow(repetitions: int) -> None:
    """bfloat16 and float16 beside float32 of as many elements."""
    main = MPI.COMM_WORLD.Get_rank() == 0
    count = 1 << 20
    kinds = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    arrays = {name: np.zeros(count, kind) for name, kind in kinds.items()}
    cases: dict[str, Case] = {name: (lambda x=x: dist.all_reduce(x)) for name, x in arrays.items()}
    times = measure(cases, repetitions, 5)
    if main:
        print(f"\nall_reduce of {count} elements, milliseconds a call")
        base = statistics.median(times["float32"])
        for name, values in times.items():
            median = statistics.median(values)
            print(f"{name:>10}{1e3 * median:>9.3f} +-{1e3 * spread(values):.3f}"
                  f"   {median / base:.2f} x float32")  # fmt: skip


def imports() -> None:
    """The time that ``import mpicoll`` adds to a Python that does nothing."""
    if MPI.COMM_WORLD.Get_rank():
        return
    code = "import time; t = time.perf_counter(); import mpicoll; print(time.perf_counter() - t)"
    took = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(15)
    ]
    print(f"\nimport mpicoll: {1e3 * statistics.median(took):.1f} +-{1e3 * spread(took):.1f} ms")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=60, help="interleaved repetitions")
    options = parser.parse_args()
    dist.init_process_group()
    if dist.get_rank() == 0:
        print(MPI.Get_library_version().splitlines()[0].strip("\0"))
    latency(options.repetitions)
    narrow(options.repetitions)
    imports()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
