"""Binding of ranks to GPUs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence

from mpicoll import launch
from mpicoll.cuda import runtime, topology
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.errors import MpicollError, UnsupportedError

__all__ = ["bind", "describe_idle_gpus", "device_for", "warn_of_far_gpu", "warn_of_idle_gpus"]


def device_for(
    local_rank: int, count: int, environment: Mapping[str, str] = os.environ
) -> int | None:
    """Return the GPU of a rank: round robin, or the first if the launcher exposes one GPU per rank.

    local_rank: rank on its node.
    count:      number of GPUs that the process sees: those in CUDA_VISIBLE_DEVICES, if it is set.

    Returns None without a GPU.
    """
    if count == 0:
        return None
    if launch.has_own_gpus(environment):
        return 0
    return local_rank % count


def bind() -> int | None:
    """Make this rank's GPU current in CuPy, and return its number.

    Returns None without a GPU or CuPy. Raises MpicollError (a RuntimeError) if the rank on its node
    is unknown: the launcher does not set it, and init_process_group has not run.
    """
    try:
        cuda = runtime.get_runtime()
    except UnsupportedError:
        return None
    local_rank = launch.find_local_rank()  # set by init_process_group
    if local_rank is None:
        raise MpicollError(
            "bind: neither LOCAL_RANK nor a launcher's variable tells the rank on the node; call "
            "init_process_group first"
        )
    index = device_for(local_rank, cuda.count())
    if index is not None:
        cuda.use(index)
    return index


def describe_idle_gpus(
    all_ranks: Sequence[Capabilities], used: Sequence[int | None]
) -> dict[str, str]:
    """Describe, by node, GPUs that ranks share while other GPUs are idle.

    all_ranks: capabilities of each rank. used: number of the GPU that each rank uses.
    """
    users: dict[str, dict[str, list[int]]] = {}
    for rank, (own, index) in enumerate(zip(all_ranks, used, strict=True)):
        here = users.setdefault(own.node, {})
        for number, gpu in enumerate(own.gpus):
            here.setdefault(gpu, []).extend([rank] * (number == index))
    found = {}
    for node, here in users.items():
        unused = [gpu for gpu, ranks in here.items() if not ranks]
        shared = [
            f"ranks {', '.join(map(str, ranks))} share GPU {gpu}"
            for gpu, ranks in here.items()
            if len(ranks) > 1
        ]
        if shared and unused:
            found[node] = (
                f"{', '.join(shared)}, while of the GPUs of their node idle: {', '.join(unused)}; "
                "let each rank choose its own with mpicoll.cuda.binding.bind()"
            )
    return found


def warn_of_idle_gpus(
    all_ranks: Sequence[Capabilities], used: Sequence[int | None], rank: int
) -> None:
    """Warn of idle GPUs, on the first rank of each node that has idle GPUs.

    rank: this process's rank.
    """
    node = all_ranks[rank].node
    text = describe_idle_gpus(all_ranks, used).get(node)
    if text and rank == next(r for r, own in enumerate(all_ranks) if own.node == node):
        warnings.warn(f"mpicoll: {text}", RuntimeWarning, stacklevel=3)


def warn_of_far_gpu(own: Capabilities, used: int, rank: int) -> None:
    """Warn if this rank's GPU, or the network card that it is configured to use, is far and a
    nearer one exists.

    used: number of the GPU that the rank uses.
    """
    seen = [gpu.partition(" ")[0] for gpu in own.gpus]
    for text in topology.find_far(
        topology.find(seen, links=False), seen[used], os.sched_getaffinity(0), os.environ, seen
    ):
        warnings.warn(f"mpicoll: rank {rank}: {text}", RuntimeWarning, stacklevel=3)
