"""Keeping torch.compile out of the backend."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch._C._dynamo.eval_frame

__all__ = ["uncompiled"]

C = TypeVar("C", bound=type)

_eval_frame: Any = torch._C._dynamo.eval_frame


def uncompiled(cls: C) -> C:
    """Marks the methods of a class as what torch.compile runs as it is, with all that they call.

    torch's C++ calls them in the middle of what is compiled: DDP's broadcast of its buffers, say.
    Dynamo would take them for the user's code.
    """
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            _skip(function.__code__)
    return cls


def _skip(code: Any) -> None:
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    else:  # before torch 2.13
        _eval_frame.skip_code(code)
