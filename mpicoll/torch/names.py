"""Which names of backends mean mpicoll."""

from __future__ import annotations

import torch.distributed as c10d
from torch.distributed import distributed_c10d

from mpicoll import launch
from mpicoll.torch import NAME

__all__ = ["installed", "served"]

#: The names that mean mpicoll besides its own.
installed: set[str] = set()


def served(asked: str) -> str:
    """The backend, or backends by device, that a group of the one asked for is made of.

    "gloo" and "cpu:gloo,cuda:nccl" are "mpicoll" where those names are installed, and so is no
    name at all where torch would choose among them. Any other name stays what it is, and all do in
    processes that ranks of mpirun start, such as those of asynchronous checkpoints.
    """
    if not installed or launch.is_child_of_rank():
        return asked
    if asked == c10d.Backend.UNDEFINED:
        parts = str(distributed_c10d.BackendConfig(asked)).split(",")
    else:
        parts = asked.lower().split(",")
    pairs = [part.rpartition(":") for part in parts]
    if not any(name in installed for *_, name in pairs):
        return asked
    names = [NAME if name in installed else name for *_, name in pairs]
    if set(names) == {NAME}:
        return NAME
    return ",".join("".join((*pair[:2], name)) for pair, name in zip(pairs, names, strict=True))
