"""Broadcasts of parameters, optimizer state and objects; gathering of objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpicoll.core import pickles
from mpicoll.core.indices import check_index
from mpicoll.errors import ArgumentError, ArgumentTypeError
from mpicoll.horovod.torch.basics import rank
from mpicoll.horovod.torch.mpi_ops import allgather_async, broadcast_async_

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcast tensors in place.

    params: such as ``model.state_dict()``, ``model.named_parameters()`` or a list of tensors; other
            values in it are ignored.
    root_rank: the rank that sends.

    Raises ArgumentTypeError (a TypeError) for other types.
    """
    if isinstance(params, Mapping):
        named: list[tuple[Any, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ArgumentTypeError(
            f"broadcast_parameters: params: expected a dict or a list, got {type(params).__name__}"
        )
    pending = [
        broadcast_async_(tensor, root_rank, None if name is None else f"parameter.{name}")
        for name, tensor in named
        if isinstance(tensor, Tensor)
    ]
    for request in pending:
        request.wait()


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Broadcast a pickled object.

    obj: the object to send; ignored on other ranks.
    root_rank: the rank that sends.

    Returns the root's object; on the root, ``obj``. Raises ArgumentError (a ValueError) for an
    invalid root.
    """
    root_rank = check_index(root_rank, "broadcast_object: root_rank")
    prefix = None if name is None else f"{name}."
    is_root = rank() == root_rank
    data = torch.from_numpy(pickles.encode(obj)) if is_root else torch.empty(0, dtype=torch.uint8)
    count = torch.tensor([len(data)])
    broadcast_async_(count, root_rank, prefix and prefix + "size").wait()
    if not is_root:
        data = torch.empty(int(count), dtype=torch.uint8)
    broadcast_async_(data, root_rank, prefix and prefix + "data").wait()
    return obj if is_root else pickles.decode(data.numpy())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gather one pickled object from each rank.

    obj: this rank's object.

    Returns a list of all ranks' objects, in rank order, on all ranks.
    """
    prefix = None if name is None else f"{name}."
    data = torch.from_numpy(pickles.encode(obj))
    sizes = allgather_async(torch.tensor([len(data)]), prefix and prefix + "size").wait()
    everything = allgather_async(data, prefix and prefix + "data").wait()
    return [pickles.decode(part.numpy().copy()) for part in everything.split(sizes.tolist())]


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Broadcast the state and the options of an optimizer.

    optimizer: of torch.optim, or of DistributedOptimizer, with equal parameters on all ranks.
    root_rank: the rank that sends.
    model: ignored; the state is sent as it is, without a step to create it.

    Raises ArgumentError (a ValueError) for torch.optim.LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("broadcast_optimizer_state: the state of LBFGS cannot be broadcast")
    root_rank = check_index(root_rank, "broadcast_optimizer_state: root_rank")
    is_root = rank() == root_rank
    state = broadcast_object(_on_cpu(optimizer.state_dict()) if is_root else None, root_rank)
    if is_root:
        return
    # load_state_dict moves state to the parameters' devices, but not options such as a tensor for
    # lr.
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        for option, value in group.items():
            if isinstance(value, Tensor) and isinstance(own.get(option), Tensor):
                group[option] = value.to(own[option].device)
    given = optimizer.param_groups
    optimizer.load_state_dict(state)
    # Keep the group objects, which a wrapped optimizer and its scheduler share.
    for group, own in zip(optimizer.param_groups, given, strict=True):
        own.update(group)
    optimizer.param_groups = given


def _on_cpu(state: Any) -> Any:
    """Move tensors to the CPU: the root's device may not exist on other ranks."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_on_cpu, state))
    return state
