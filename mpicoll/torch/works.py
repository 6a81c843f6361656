"""What asynchronous calls give PyTorch: torch's Work and Future over the core's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from mpicoll.core import work as core
from mpicoll.core.groups import ProcessGroup
from mpicoll.torch.compilation import uncompiled

__all__ = ["Done", "Pending", "Received", "flat", "joined"]

_ZERO = timedelta(0)
_RESULT = torch._C._distributed_c10d.WorkResult


#: Works that Python has let go of without waiting for them, the latest ones. C++ may have them:
#: DDP's reducer keeps a Work that it is given without its Python half, which does the waiting. What
#: they fill is kept as well if it is small, such as DDP's count of ranks.
_let_go: deque[Any] = deque(maxlen=64)
_SMALL = 1 << 16


@uncompiled
class Pending(TorchWork):  # type: ignore[misc]
    """A call that is under way: one Work of the core, or several that were begun together.

    outputs: the tensors that the call fills.
    """

    def __init__(self, works: Sequence[core.Work], outputs: Sequence[Any]) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs
        self._future: Any = None
        self._waited_for = False

    def __del__(self) -> None:
        if self._waited_for or self._future is not None:
            return
        if any(work.is_completed() and not work.is_success() for work in self._works):
            return  # its error is told when it goes
        if sum(one.numel() * one.element_size() for one in self._outputs) > _SMALL:
            self._outputs = ()
            for work in self._works:
                work.outputs = ()
        _let_go.append(self)

    def wait(self, timeout: timedelta = _ZERO) -> bool:
        """Waits until the outputs are filled; ``timeout`` of zero is the group's.

        Raises what went wrong, CollectiveTimeoutError (a RuntimeError) when the time is over.
        """
        self._waited_for = True
        for work in self._works:
            work.wait(timeout or None)
        return True

    def synchronize(self) -> None:
        """The same as ``wait()``: what has ended can be seen by every stream."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as ``wait()``: what has ended can be seen by every stream."""
        self.wait()

    def is_completed(self) -> bool:
        """True once the call has ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """True once the call has ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """What went wrong, None if nothing has."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Any]:
        """The output tensors, once they are filled."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> Any:
        """A torch.futures.Future of the list of output tensors."""
        if self._future is None:
            self._future = _future(self._works, list(self._outputs))
        return self._future

    def get_future_result(self) -> Any:
        """A torch.futures.Future of the WorkResult: SUCCESS, TIMEOUT or COMM_ERROR."""
        works = self._works
        return self.get_future().then(lambda _: _result_of(works))

    def source_rank(self) -> int:
        """The rank in the group that a receive got its message from."""
        return self._works[0].source_rank()

    def _source_rank(self) -> int:
        return self.source_rank()


@uncompiled
class Received(Pending):
    """A receive. Its sender is named by rank in the group, as torch asks for."""

    def __init__(self, group: ProcessGroup, work: core.Work, outputs: Sequence[Any]) -> None:
        super().__init__((work,), outputs)
        self._group = group

    def source_rank(self) -> int:
        """The rank in the group that the message came from, -1 while it has not come."""
        rank = self._group.group_rank(self._works[0].source_rank())
        return -1 if rank is None else rank


@uncompiled
class Done(TorchWork):  # type: ignore[misc]
    """A synchronous call, which is over when it returns."""

    #: What the call filled: a tensor, or a list of tensors.
    output: Any = ()

    def wait(self, timeout: timedelta = _ZERO) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def block_current_stream(self) -> None:
        """Nothing is left to wait for."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True: a synchronous call raises what goes wrong."""
        return True

    def exception(self) -> BaseException | None:
        """None: a synchronous call raises what goes wrong."""
        return None

    def result(self) -> list[Any]:
        """The output tensors."""
        return flat(self.output)

    def get_future(self) -> Any:
        """A torch.futures.Future of the list of output tensors, which is done."""
        return _future((), self.result())

    def get_future_result(self) -> Any:
        """A torch.futures.Future of WorkResult.SUCCESS."""
        return self.get_future().then(lambda _: _RESULT.SUCCESS)


def joined(pending: Sequence[Pending]) -> Pending:
    """One Work for several."""
    return Pending(
        [work for one in pending for work in one._works],
        [tensor for one in pending for tensor in one._outputs],
    )


def flat(output: Any) -> list[torch.Tensor]:
    """The tensors of an output: of one, of a list, or of lists of lists."""
    if isinstance(output, (list, tuple)):
        return [tensor for one in output for tensor in flat(one)]
    return [] if output is None else [output]


def _future(works: Sequence[core.Work], outputs: list[Any]) -> Any:
    """A torch Future of ``outputs`` that ends when all works have, with an error if one has."""
    # torch refuses values on devices that it was not told of.
    devices = {one.device for one in outputs if one.is_cuda}
    ended: Any = torch.futures.Future(devices=list(devices))
    pending = list(works)

    def look(done: core.Future | None) -> None:
        # The works are done in any order; whoever finds the last one done settles the future.
        while pending:
            if not pending[0].is_completed():
                pending[0].get_future().add_done_callback(look)
                return
            if pending[0].exception() is not None:
                break
            pending.pop(0)
        ended.set_result(None)

    def outcome(_: Any) -> Any:
        for work in pending:  # the first of these has failed
            error = work.exception()
            if error is not None:
                raise error
        return outputs

    # Not Future.set_exception: it sets a value that raises where Python asks for it, and C++, such
    # as DDP's reducer, would take the exception for a tensor. What a callback raises is an error.
    found = ended.then(outcome)
    look(None)
    return found


def _result_of(works: Sequence[core.Work]) -> Any:
    errors = [work.exception() for work in works]
    if any(isinstance(error, TimeoutError) for error in errors):
        return _RESULT.TIMEOUT
    return _RESULT.SUCCESS if not any(errors) else _RESULT.COMM_ERROR
