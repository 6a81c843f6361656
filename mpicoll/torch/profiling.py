"""Calls as events of torch's profilers: the time that the calling thread spends in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.autograd import (
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

from mpicoll.torch import NAME

__all__ = ["Event", "is_recording"]


def _find_check() -> Callable[[], bool]:
    """Return ``at::hasCallbacks`` of C++, or the closest function of Python.

    ``_profiler_enabled`` ignores ``ExecutionTraceObserver`` and profilers that another thread
    started.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        check = ctypes.PyDLL(str(path))._ZN2at12hasCallbacksEv
    except (OSError, AttributeError):  # another build of torch
        return _profiler_enabled  # type: ignore[no-any-return]
    check.argtypes, check.restype = (), ctypes.c_bool
    return check


#: Return whether any profiler or observer records this thread's calls. Takes 70 ns.
is_recording: Callable[[], bool] = _find_check()


class Event:
    """A context manager that records an event "mpicoll:name" with the shapes of the inputs.

    The event ends with the ``with`` statement. torch cannot end an event on a Python thread, and an
    event that ends after the profiler crashes the process.
    """

    __slots__ = ("_handle", "_inputs", "_name")

    def __init__(self, name: str, inputs: list[torch.Tensor]) -> None:
        self._name = f"{NAME}:{name}"
        self._inputs = inputs

    def __enter__(self) -> None:
        self._handle: Any = _record_function_with_args_enter(self._name, *self._inputs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _record_function_with_args_exit(self._handle)
