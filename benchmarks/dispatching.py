"""What a call costs on its way from PyTorch to the backend, with torch 2.15 or newer.

    mpirun -n 2 python benchmarks/dispatching.py

all_reduce of 4 bytes on one group for each way: as it is, through torch's dispatcher, recorded by
its flight recorder, in a group of several backends, and asynchronous as it is. The ways take turns;
the figure is the median in microseconds with half the distance of the quartiles, and the same of
the ratio to the first way. docs/pytorch.md has what came of it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CALLS, TURNS = 500, 101


def loop(group: Any, asynchronous: bool) -> float:
    """Microseconds a call."""
    tensor = torch.zeros(1)
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(CALLS):
        work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
        if work is not None:
            work.wait()
    return (time.perf_counter() - start) / CALLS * 1e6


def recorded(backend: str) -> Any:
    """A group that torch's flight recorder looks at."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    group = dist.new_group(backend=backend)
    del os.environ["TORCH_FR_BUFFER_SIZE"]
    return group


def main() -> None:
    """Measures and prints."""
    dist.init_process_group("mpicoll")
    mixed = "cpu:mpicoll,cuda:gloo"
    group, dispatched = dist.new_group(), dist.new_group()
    dispatched.register_pre_hook(0, lambda _: None)
    ways = {
        "as it is": (group, False),
        "as it is, asynchronous": (group, True),
        "dispatched, with a hook in Python": (dispatched, False),
        "recorded": (recorded("mpicoll"), False),
        "of several backends": (dist.new_group(backend=mixed), False),
        "of several backends, recorded": (recorded(mixed), False),
    }
    distributed_c10d._world.pg_flight_recorder_hooks.pop(ways["of several backends"][0], None)
    for way in ways.values():
        loop(*way)
    mine = torch.tensor([[loop(*way) for way in ways.values()] for _ in range(TURNS)])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, all_reduce of 4 B")
        for i, name in enumerate(ways):
            time_of, ratio = mine[:, i].numpy(), (mine[:, i] / mine[:, 0]).numpy()
            figures = []
            for values in time_of, ratio:
                low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
                figures += [middle, (high - low) / 2]
            print("{:34}{:7.2f} us +-{:.2f}   {:.2f} +-{:.2f}".format(name, *figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
