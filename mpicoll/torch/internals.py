"""Dependencies on the installed torch: version, device types, torch.compile, local variables,
profilers.
"""

from __future__ import annotations

import ctypes
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TypeVar

import torch
import torch._C._dynamo.eval_frame
from torch.autograd import (
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

from mpicoll.torch import NAME, REQUIREMENT

#: Newest version of torch that was tested.
_NEWEST = 2, 15


def warn_if_newer() -> None:
    """Warn if torch is newer than any tested version."""
    version = str(torch.__version__)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) > _NEWEST:
        warnings.warn(
            f"mpicoll has not been tested with torch {version}: {REQUIREMENT}", stacklevel=2
        )


@cache
def device_types() -> tuple[str, ...]:
    """Return the device types that the backend serves here: "cpu", and "cuda" if there is a GPU.

    torch assumes that a device exists if a backend is registered for its type: its checkpoints
    would copy to missing GPUs. ROCm, which torch also calls "cuda", is not supported. The count
    comes from the driver's management library, so a process can still fork.
    """
    return ("cpu", "cuda") if torch.version.cuda and torch.cuda.device_count() else ("cpu",)


C = TypeVar("C", bound=type)

_eval_frame: Any = torch._C._dynamo.eval_frame


def disable_compile(cls: C) -> C:
    """Exclude the methods of a class, and their callees, from torch.compile.

    torch's C++ calls them inside a compiled program, for example when DDP broadcasts its buffers.
    Dynamo would treat them as user code.
    """
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            _skip(function.__code__)
    return cls


def _skip(code: CodeType) -> None:
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    else:  # before torch 2.13
        _eval_frame.skip_code(code)


def find_variable(function: str, name: str) -> Any:
    """Return a local variable of the nearest caller that is ``function`` of torch.

    torch passes neither the backend to a rendezvous handler, nor the other backends of a group such
    as "cpu:gloo,cuda:mpicoll" to the function that creates it. Both are local variables of torch.

    Returns None if there is no such function or variable.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and frame.f_globals.get("__name__", "").startswith("torch."):
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None


# --- profilers: the time that the calling thread spends in calls --------------------------------


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
