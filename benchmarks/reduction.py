"""Time of the local reduction, SUM of 2 and of 4 sources, by dtype and implementation.

``compiled`` and ``numpy`` are the two implementations of ``kernels/reduction.py``, ``plain`` is one
whole-array np.add after the other, which for narrow floats rounds at every step, and ``torch`` is
torch.add, which rounds at every step too, in one thread. A line gives the median with half the
distance between the quartiles. GB/s counts every source read and the result written.

    python benchmarks/reduction.py [--elements N] [--seconds S]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.cli.timing import Call, Effort, Timer
from mpicoll.dtypes import DType, ReduceOp, by_name
from mpicoll.kernels import library, reduction

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32")


def contestants(dtype: DType, n: int, count: int) -> dict[str, Call]:
    """Return what to time, by name."""
    rng = np.random.default_rng(0)
    sources = [rng.standard_normal(count).astype(dtype.numpy) for _ in range(n)]
    out = np.empty(count, dtype.numpy)
    chosen = reduction._compiled

    def combine(compiled: Any) -> None:
        reduction._compiled = compiled
        reduction.combine(ReduceOp.SUM, dtype, sources, out)
        reduction._compiled = chosen

    def plain() -> None:
        np.add(sources[0], sources[1], out=out)
        for source in sources[2:]:
            np.add(out, source, out=out)

    found: dict[str, Call] = {}
    if chosen:
        found["compiled"] = lambda: combine(chosen)
    found["numpy"] = lambda: combine(None)
    found["plain"] = plain
    try:
        import torch

        torch.set_num_threads(1)
        tensors = [
            torch.from_numpy(array.view(f"u{dtype.itemsize}")).view(getattr(torch, dtype.name))
            for array in (*sources, out)
        ]

        def add() -> None:
            torch.add(tensors[0], tensors[1], out=tensors[-1])
            for tensor in tensors[2:-1]:
                torch.add(tensors[-1], tensor, out=tensors[-1])

        add()
        found["torch"] = add
    except (ImportError, RuntimeError):  # torch is missing, or does not add this dtype
        pass
    return found


def report(timer: Timer, dtype: DType, n: int, count: int, effort: Effort) -> None:
    """Print a line for each contestant."""
    for name, times in timer.measure(contestants(dtype, n, count), effort).items():
        rate = (n + 1) * count * dtype.itemsize / times.median / 1e9
        print(
            f"{dtype.name:14} {n} sources  {name:9}{times.text(1e-6, 10)} us"
            f"{times.median / count * 1e9:10.3f} ns/element{rate:8.1f} GB/s"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 19)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line, about")
    arguments = parser.parse_args()
    print(f"{library.how()}; one thread; {arguments.elements} elements, then 4")
    timer, effort = Timer(MPI.COMM_SELF), Effort(arguments.seconds)
    for name in DTYPES:
        for n in (2, 4):
            report(timer, by_name[name], n, arguments.elements, effort)
        report(timer, by_name[name], 2, 4, effort)


if __name__ == "__main__":
    main()
