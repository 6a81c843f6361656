"""Measure the overhead of a call, independent of its size.

    python benchmarks/overhead.py [calls]
    mpirun -n 2 python benchmarks/overhead.py comparing|reduction|dispatching|monitoring

calls        microseconds per call of 4 bytes, on one rank by default: functions of mpicoll, and the
             backend of torch if it is installed. The minimum of many samples, because noise only
             adds time. A change may add at most 0.1 us. Measures the mpicoll on PYTHONPATH
comparing    all_reduce by the number of calls between two comparisons of call records
reduction    SUM of two arrays on one rank: the C library, NumPy, and np.add
dispatching  the path from PyTorch 2.15 or newer to the backend: direct, through torch's
             dispatcher, with torch's flight recorder, in a group with several backends
monitoring   all_reduce of 4 bytes with and without the node monitor, and the share of a processor
             that the node monitor uses

Samples take turns, and the slowest rank counts. A line has the median with half the distance
between the quartiles, and the ratio to the first line with the same spread.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import time
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.cli.timing import Call, Effort, Samples, Timer, Times


def show(title: str, found: Samples, count: int = 1) -> None:
    """Print a line for each case, on rank 0. count: calls of a case."""
    if MPI.COMM_WORLD.Get_rank() != 0:
        return
    print(title)
    first = next(iter(found.values()))
    for name, each in found.items():
        ratio = each.pair(first, truediv)
        print(f"{name:34}{_text(each, 1e-6 * count, 8)} us  {_text(ratio, 1, 6)}", flush=True)


def _text(times: Times, unit: float, width: int) -> str:
    """Format median and spread."""
    median, spread = times.figure.median / unit, times.figure.spread / unit
    digits = 2 if median < 100 else 0
    return f"{median:>{width}.{digits}f} +-{spread:5.{digits}f}"


def calls(timer: Timer, effort: Effort) -> None:
    """Print the minimum time of each call."""
    has_torch = importlib.util.find_spec("torch") is not None
    cases: dict[str, Call] = {}
    if has_torch:
        import torch
        import torch.distributed as dist

        dist.init_process_group("mpicoll")
        tensor = torch.zeros(1)
        cases = {
            "torch all_reduce": lambda: dist.all_reduce(tensor),
            "torch all_reduce, asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        }
    else:
        mpicoll.init_process_group()
    one, many = np.zeros(1, np.float32), np.zeros(mpicoll.get_world_size(), np.float32)
    cases = {
        "all_reduce": lambda: mpicoll.all_reduce(one),
        "all_reduce, asynchronous": lambda: mpicoll.all_reduce(one, async_op=True).wait(),  # type: ignore[union-attr]
        "broadcast": lambda: mpicoll.broadcast(one, 0),
        "all_gather_single": lambda: mpicoll.all_gather_single(many, one),
        "reduce_scatter_single": lambda: mpicoll.reduce_scatter_single(one, many),
        "barrier": mpicoll.barrier,
        **cases,
    }
    timer.once(cases)
    end, least = time.monotonic() + effort.seconds, dict.fromkeys(cases, float("inf"))
    while MPI.COMM_WORLD.bcast(time.monotonic() < end):
        for name, case in cases.items():
            (took,) = timer.combine([timer.time(case, _CALLS)])
            least[name] = min(least[name], took)
    if mpicoll.get_rank() == 0:
        print(f"mpicoll in {Path(mpicoll.__file__).parent}, {mpicoll.get_world_size()} ranks")
        for name, took in least.items():
            print(f"{name:34}{1e6 * took:8.2f} us")


def comparing(timer: Timer, effort: Effort) -> None:
    """Print all_reduce of 4 bytes for several strides, with shared memory and with MPI."""
    from mpicoll.failures import consistency

    mpicoll.init_process_group()
    for setting in "10":
        os.environ["MPICOLL_SHARED_MEMORY"] = setting
        group = mpicoll.new_group()
        assert isinstance(group, mpicoll.ProcessGroup)
        mpicoll.all_reduce(np.zeros(1 << 20, np.float32), group=group)  # creates the segment
        for _ in range(consistency.FIRST):
            mpicoll.barrier(group)
        cases = {
            f"every {stride}" if stride else "never": _compared(group, stride)
            for stride in (0, 1, 8, 16, 32, 64, 128)
        }
        title = "shared memory" if group.resources.find("shared") else "by MPI"
        show(title, timer.measure(cases, effort), _CALLS)
    mpicoll.destroy_process_group()


_CALLS = 1024


def _compared(group: mpicoll.ProcessGroup, stride: int) -> Call:
    """Return a loop of calls that are compared with this stride; 0 compares no calls."""
    from mpicoll.failures import consistency

    array = np.zeros(1, np.float32)

    def loop() -> None:
        group.next_check = group.sequence + 1
        consistency.STRIDE = stride or 1 << 40
        for _ in range(_CALLS):  # the first call compares and reads the stride
            mpicoll.all_reduce(array, group=group)
        group.recent = group.recent[:1]  # limits memory without comparisons

    return loop


def reduction(timer: Timer, effort: Effort) -> None:
    """Print SUM of two arrays of 1 MiB and of 4 elements, by dtype and implementation."""
    from mpicoll.dtypes import ReduceOp, by_name
    from mpicoll.kernels import reduction as kernels

    compiled = kernels._compiled

    def combine(implementation: Any, arrays: list[Any]) -> None:
        kernels._compiled = implementation
        kernels.combine(ReduceOp.SUM, dtype, arrays[:2], arrays[2])

    for dtype in (by_name[name] for name in ("bfloat16", "float16", "float8_e4m3fn", "float32")):
        for count in ((1 << 20) // dtype.itemsize, 4):
            arrays = [np.ones(count, dtype.numpy) for _ in range(3)]
            cases: dict[str, Call] = {
                "compiled": partial(combine, compiled, arrays),
                "NumPy, same bits": partial(combine, None, arrays),
                "np.add": partial(np.add, *arrays[:2], out=arrays[2]),
            }
            show(f"{count} elements of {dtype}", timer.measure(cases, effort))
    kernels._compiled = compiled


def dispatching(timer: Timer, effort: Effort) -> None:
    """Print all_reduce of 4 bytes under torch, with one group for each path."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    dist.init_process_group("mpicoll")
    mixed = "cpu:mpicoll,cuda:gloo"
    hooked, several = dist.new_group(), dist.new_group(backend=mixed)
    hooked.register_pre_hook(0, lambda _: None)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    recorded, both = dist.new_group(backend="mpicoll"), dist.new_group(backend=mixed)
    del os.environ["TORCH_FR_BUFFER_SIZE"]
    distributed_c10d._world.pg_flight_recorder_hooks.pop(several, None)
    tensor, plain = torch.zeros(1), dist.new_group()

    def call(group: Any) -> Call:
        return lambda: dist.all_reduce(tensor, group=group)

    cases = {
        "direct": call(plain),
        "direct, asynchronous": lambda: dist.all_reduce(tensor, group=plain, async_op=True).wait(),
        "dispatched, with a Python hook": call(hooked),
        "recorded": call(recorded),
        "several backends": call(several),
        "several backends, recorded": call(both),
    }
    show(f"torch {torch.__version__}", timer.measure(cases, effort))
    dist.destroy_process_group()


def monitoring(timer: Timer, effort: Effort) -> None:
    """Print all_reduce of 4 bytes with and without the node monitor."""
    from ctypes import addressof

    from mpicoll.failures import monitor_client as own

    mpicoll.init_process_group()
    group = mpicoll.new_group()
    assert isinstance(group, mpicoll.ProcessGroup) and own._own is not None
    array, monitor = np.zeros(1, np.float32), _find_monitor()
    cell = addressof(own._own.cells[group])
    for _ in range(_CALLS):
        mpicoll.all_reduce(array, group=group)

    def call(address: int, number: int) -> Call:
        def loop() -> None:
            group.publish(address)
            os.kill(monitor, number)
            for _ in range(_MONITORED):
                mpicoll.all_reduce(array, group=group)
            os.kill(monitor, signal.SIGCONT)

        return loop

    monitored = call(cell, signal.SIGCONT)
    cases = {
        "without the node monitor": call(0, signal.SIGSTOP),
        "without, again": call(0, signal.SIGSTOP),
        "with the node monitor": monitored,
    }
    found = timer.measure(cases, effort)
    show("monitored", found, _MONITORED)
    for name, each in found.items():
        ratio = each.pair(next(iter(found.values())), truediv)
        if mpicoll.get_rank() == 0:
            print(f"{name}: {ratio.figure.median - 1:+.2%} +- {ratio.figure.spread:.2%} in "
                  f"each of {len(ratio)} pairs")  # fmt: skip
    slowest = max(found["with the node monitor"])
    turns = MPI.COMM_WORLD.bcast(int(effort.seconds / 2 / slowest))
    used, began = _processor_time(monitor), time.monotonic()
    for _ in range(turns):
        monitored()
    if mpicoll.get_rank() == 0:
        share = (_processor_time(monitor) - used) / (time.monotonic() - began)
        print(f"the node monitor took {share:.3%} of a processor")
    mpicoll.destroy_process_group()


#: Calls per sample, so that the time of the signals to the node monitor is negligible.
_MONITORED = 1 << 14


def _find_monitor() -> int:
    """Return the process id of the node monitor."""
    from mpicoll import line_protocol
    from mpicoll.failures import node_monitor

    end = time.monotonic() + 10  # while it starts
    while time.monotonic() < end:
        for path in node_monitor.find_folder().glob(f"*{node_monitor.SOCKETS}"):
            with contextlib.suppress(OSError):
                if os.getpid() in line_protocol.ask(path, {"ask": "job"})["pids"]:
                    return int(path.name.removesuffix(node_monitor.SOCKETS))
        time.sleep(0.1)
    raise SystemExit("no node monitor found; expected Linux with pidfds and memfds")


def _processor_time(process: int) -> float:
    """Return the processor time of a process in seconds."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


SUBJECTS = {each.__name__: each for each in (calls, comparing, reduction, dispatching, monitoring)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("subject", nargs="?", choices=SUBJECTS, default="calls")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="approximate duration (default: %(default)s)"
    )
    options = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    SUBJECTS[options.subject](Timer(comm), Effort(options.seconds, 4e-3, 15, 200))
    comm.Free()


if __name__ == "__main__":
    main()
