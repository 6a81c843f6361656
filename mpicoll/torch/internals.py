"""Dependencies on the installed torch: version, device types, torch.compile, local variables."""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch._C._dynamo.eval_frame

from mpicoll.torch import REQUIREMENT

__all__ = ["device_types", "disable_compile", "find_variable", "warn_if_newer"]

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
