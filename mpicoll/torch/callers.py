"""What torch.distributed knows and does not pass on.

A rendezvous handler is not told for which backend it is, nor is the function that makes a group
told of the other backends in "cpu:gloo,cuda:mpicoll". Both matter here, and both are variables of
the function of torch that calls; this module looks there, and nothing else does.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["variable"]


def variable(function: str, name: str) -> Any:
    """The variable ``name`` of the nearest caller that is ``function`` of torch.distributed.

    None where no such function calls, or where it has no such variable.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and frame.f_globals.get("__name__", "").startswith("torch."):
            return frame.f_locals.get(name)
        frame = frame.f_back  # type: ignore[assignment]
    return None
