"""Calls as events of torch's profilers: what the calling thread spends on them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._C._profiler import _RecordFunctionFast

from mpicoll.torch import NAME

__all__ = ["event"]


def event(name: str, inputs: list[Any]) -> AbstractContextManager[Any]:
    """An event "mpicoll:name" with the shapes of the tensors that are read, from its ``with`` on.

    It does not outlast the statement: torch has no means to end an event later, on a thread that
    Python started, and one that is ended after the profiler crashes it.
    """
    return _RecordFunctionFast(f"{NAME}:{name}", inputs, {})
