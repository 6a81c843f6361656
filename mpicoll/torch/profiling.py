"""Calls as events of torch's profilers, from their beginning to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._profiler import _RecordFunctionFast

from mpicoll.work import Work

__all__ = ["profiled"]

W = TypeVar("W", bound="Work | None")


def profiled(name: str, tensors: Sequence[Any], begin: Callable[[], W]) -> W:
    """``begin()``, as an event of that name with the shapes of its tensors.

    The event ends when the Work does, on the thread that ends it.
    """
    inputs = [one for one in tensors if isinstance(one, torch.Tensor)]
    event = _RecordFunctionFast(name, inputs, {})
    event.__enter__()
    try:
        work = begin()
    except BaseException:
        event.__exit__(None, None, None)
        raise
    if work is None:
        event.__exit__(None, None, None)
    else:
        work.get_future().add_done_callback(lambda done: event.__exit__(None, None, None))
    return work
