"""Calls as events of torch's profilers: the time that the calling thread spends in them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from mpicoll.torch import NAME

__all__ = ["record"]


def record(name: str, inputs: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context manager that records an event "mpicoll:name" with the inputs' shapes.

    The event ends with the ``with`` statement: torch cannot end an event later, on a thread that
    Python started, and an event that ends after the profiler crashes it.
    """
    return _RecordFunctionFast(f"{NAME}:{name}", inputs, {})  # type: ignore[no-any-return]
