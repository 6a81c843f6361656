"""Keeping torch.compile out of the backend."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch._C._dynamo.eval_frame

__all__ = ["disable_compile"]

C = TypeVar("C", bound=type)

_eval_frame: Any = torch._C._dynamo.eval_frame


def disable_compile(cls: C) -> C:
    """Make torch.compile run the methods of a class, and all that they call, as they are.

    torch's C++ calls them inside a compiled program, for instance in DDP's broadcast of its
    buffers. Dynamo would take them for the user's code.
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
