"""Which rank works on which GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence

from mpicoll import launch
from mpicoll.cuda import runtime
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.errors import MpicollError, UnsupportedError

__all__ = ["bind", "describe_idle_gpus", "device_for", "warn_of_idle_gpus"]

#: Variables that tell that the launcher has given each rank GPUs of its own.
OWN_GPUS = ("SLURM_GPUS_PER_TASK",)


def device_for(
    local_rank: int, count: int, environment: Mapping[str, str] = os.environ
) -> int | None:
    """The GPU of a rank: in turn, or the first where the launcher has given each rank its own.

    local_rank: the rank on its node.
    count: how many GPUs the process sees: those that CUDA_VISIBLE_DEVICES lists, if it is set.

    None without a GPU.
    """
    if count == 0:
        return None
    if any(environment.get(name) for name in OWN_GPUS):
        return 0
    return local_rank % count


def bind() -> int | None:
    """Makes the GPU that this rank is to work on current in CuPy, and returns its number; None
    where there is no GPU, or no CuPy.

    Raises MpicollError (a RuntimeError) where the rank on the node is not known: no launcher says
    it, and there is no process group yet.
    """
    try:
        cuda = runtime.get_runtime()
    except UnsupportedError:
        return None
    local_rank = launch.local_rank()  # known once init_process_group was there
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
    """The nodes on which ranks share a GPU while others are idle, with what to say of it.

    all_ranks: what each rank can do.
    used:      the number of the GPU that each works on.
    """
    users: dict[str, dict[str, list[int]]] = {}
    for rank, (own, index) in enumerate(zip(all_ranks, used, strict=True)):
        here = users.setdefault(own.node, {})
        for number, gpu in enumerate(own.gpus):
            here.setdefault(gpu, []).extend([rank] * (number == index))
    told = {}
    for node, here in users.items():
        unused = [gpu for gpu, ranks in here.items() if not ranks]
        shared = [
            f"ranks {', '.join(map(str, ranks))} share GPU {gpu}"
            for gpu, ranks in here.items()
            if len(ranks) > 1
        ]
        if shared and unused:
            told[node] = (
                f"{', '.join(shared)}, while of the GPUs of their node idle: {', '.join(unused)}; "
                "let each rank choose its own with mpicoll.cuda.binding.bind()"
            )
    return told


def warn_of_idle_gpus(
    all_ranks: Sequence[Capabilities], used: Sequence[int | None], rank: int
) -> None:
    """Warns of idle GPUs, on the first rank of each node where there are some.

    rank: this process's.
    """
    node = all_ranks[rank].node
    text = describe_idle_gpus(all_ranks, used).get(node)
    if text and rank == next(r for r, own in enumerate(all_ranks) if own.node == node):
        warnings.warn(f"mpicoll: {text}", RuntimeWarning, stacklevel=3)
