"""Calls as events of torch's profilers, from their beginning to their end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._profiler import _RecordFunctionFast

from mpicoll.torch.works import flat
from mpicoll.work import Work

__all__ = ["profiled"]

W = TypeVar("W", bound="Work | None")


def profiled(name: str, inputs: Any, begin: Callable[[], W]) -> W:
    """``begin()``, as an event of that name with the shapes of the tensors that it reads.

    The event ends when the Work does, on the thread that ends it.
    """
    event = _RecordFunctionFast(name, flat(inputs), {})
    event.__enter__()
    try:
        work = begin()
    except BaseException:
        event.__exit__(None, None, None)
        raise
    if work is None:
        event.__exit__(None, None, None)
        return work
    if work.is_completed():
        # torch calls an event asynchronous that ends on another thread than it began on.
        end = threading.Thread(target=event.__exit__, args=(None, None, None))
        end.start()
        end.join()
    else:
        work.get_future().add_done_callback(lambda done: event.__exit__(None, None, None))
    return work
