"""Calls as events of torch's profilers: what the calling thread spends on them."""

# No `from __future__ import annotations`: TorchScript reads annotations, and not as text.

import itertools
import threading
import warnings
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

__all__ = ["event"]


def event(backend: str, name: str, inputs: list[Any]) -> AbstractContextManager[Any]:
    """An event "backend:name" with the shapes of the tensors that are read, from its ``with`` on.

    It does not outlast the statement: torch has no means to end an event later, on a thread that
    Python started, and one that is ended after the profiler crashes it.
    """
    fast: AbstractContextManager[Any] = _RecordFunctionFast(f"{backend}:{name}", inputs, {})
    return _Elsewhere(fast) if backend == "mpi" else fast


# --- the events of torch's own MPI backend -------------------------------------------------------


class _Elsewhere(AbstractContextManager[Any]):
    """An event that ends on another thread, as all of torch's own MPI backend do.

    torch marks it as asynchronous for that, and its tests of backend="mpi" look for the mark. Few
    threads will do: a profiler listens to those that have taken over the state of one that it
    listens to, as does that on which a forked script goes on after it has waited.
    """

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._end = _script()
        self._inner.__enter__()

    def __exit__(self, *exception: object) -> None:
        number, go, gone = next(_numbers), torch.futures.Future[int](), threading.Event()
        _open[number] = self._inner, gone
        self._end(go)
        go.set_result(number)
        # Scripts go on in threads of torch, which may all be in calls like this one.
        if not gone.wait(_PATIENCE) and _open.pop(number, None) is not None:
            self._inner.__exit__(None, None, None)


#: Seconds to wait for such a thread.
_PATIENCE = 1.0
#: Events that are about to end, and whom to tell.
_open: dict[int, Any] = {}
_numbers = itertools.count()


@torch.jit.ignore  # type: ignore[untyped-decorator]
def _end(number: int) -> None:
    inner, gone = _open.pop(number, (None, None))
    if inner is not None:
        inner.__exit__(None, None, None)
        gone.set()


def _wait_and_end(go: torch.jit.Future[int]) -> None:
    _end(torch.jit.wait(go))


def mpicoll_event(go: torch.jit.Future[int]) -> torch.jit.Future[None]:
    """Ends the event whose number ``go`` brings. TorchScript; profiles show its name."""
    return torch.jit.fork(_wait_and_end, go)


@cache
def _script() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is not what torch is written in any more
        return torch.jit.script(mpicoll_event)
