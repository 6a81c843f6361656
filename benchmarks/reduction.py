"""Time of the local reduction, SUM of 2 and of 4 sources, by dtype and by who computes.

``compiled`` and ``numpy`` are the two implementations of ``kernels/reduction.py``, ``plain`` is one
whole-array np.add after the other, which for narrow floats rounds at every step, and ``torch`` is
torch.add, which rounds at every step too, in one thread. Repetitions are interleaved; a line gives
the median, and the spread between the quartiles. GB/s counts every source read and the result
written.

    python benchmarks/reduction.py [--elements N] [--repetitions N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll.dtypes import DType, ReduceOp, by_name
from mpicoll.kernels import library, reduction

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32")


def contestants(dtype: DType, n: int, count: int) -> dict[str, Callable[[], object]]:
    """What to time, by name."""
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

    found: dict[str, Callable[[], object]] = {}
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


def measure(functions: dict[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each call, the functions taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(repetitions + 2):
        for name, function in functions.items():
            function()  # what the others left in the caches is not this one's fault
            start = time.perf_counter()
            function()
            if repetition >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def report(dtype: DType, n: int, count: int, repetitions: int) -> None:
    """Print a line for each contestant."""
    for name, times in measure(contestants(dtype, n, count), repetitions).items():
        low, median, high = statistics.quantiles(times, n=4)
        rate = (n + 1) * count * dtype.itemsize / median / 1e9
        print(
            f"{dtype.name:14} {n} sources  {name:9}{median * 1e3:8.3f} ms"
            f"  ({low * 1e3:.3f} .. {high * 1e3:.3f}){median / count * 1e9:8.3f} ns/element"
            f"{rate:8.1f} GB/s"
        )


def overhead(dtype: DType, calls: int = 2000) -> None:
    """Print the time of a call for 4 elements."""
    times = {}
    for name, function in contestants(dtype, 2, 4).items():
        batches = []
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            batches.append((time.perf_counter() - start) / calls)
        times[name] = f"{name} {statistics.median(batches) * 1e6:.1f} us"
    print(f"{dtype.name:14} 4 elements: {', '.join(times.values())}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 19)
    parser.add_argument("--repetitions", type=int, default=31)
    arguments = parser.parse_args()
    print(f"{library.describe()}; {arguments.elements} elements, one thread")
    for name in DTYPES:
        for n in (2, 4):
            report(by_name[name], n, arguments.elements, arguments.repetitions)
        overhead(by_name[name])


if __name__ == "__main__":
    main()
