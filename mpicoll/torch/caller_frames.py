"""Variables of the functions of torch.distributed that call mpicoll.

torch does not tell a rendezvous handler which backend it is for, nor the function that makes a
group which other backends are in "cpu:gloo,cuda:mpicoll". Both are local variables of the torch
function that calls. Only this module reads them.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["find_variable"]


def find_variable(function: str, name: str) -> Any:
    """Return the local variable ``name`` of the nearest caller that is torch's ``function``.

    Returns None if no such function calls, or if it has no such variable.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and frame.f_globals.get("__name__", "").startswith("torch."):
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
