"""torch's Work and Future on top of the core's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from mpicoll.core import work as core
from mpicoll.core.groups import ProcessGroup
from mpicoll.torch.internals import disable_compile
from mpicoll.torch.options import MAX_TIMEOUT_S

#: A tensor, a list of tensors, nested lists, or None.
Outputs: TypeAlias = "Tensor | Sequence[Outputs] | None"

_ZERO = timedelta(0)
_WorkResult = torch._C._distributed_c10d.WorkResult


#: Latest Works that Python has dropped without a wait. C++ may still hold them: DDP's reducer keeps
#: a Work without its Python half, which implements wait(). Small outputs are also kept.
_dropped: deque[PendingWork] = deque(maxlen=64)
#: Maximum size of outputs that are kept.
_MAX_KEPT_BYTES = 1 << 16


@disable_compile
class _Work(TorchWork):  # type: ignore[misc]
    """Methods that completed and pending calls have in common."""

    #: Name of the call, as a profiler records it; "" unless it is a collective or a message.
    name = ""
    #: The core's Works that have to end.
    _works: Sequence[core.Work] = ()

    def synchronize(self) -> None:
        """Wait as ``wait()`` does."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return whether the call has ended, with success or an error. Queries the device."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether the call has ended with success."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def get_future_result(self) -> Any:
        """Return a torch.futures.Future of the WorkResult: SUCCESS, TIMEOUT or COMM_ERROR."""
        works = self._works
        return self.get_future().then(lambda _: _find_result(works))


@disable_compile
class PendingWork(_Work):
    """A pending call: one Work of the core, or several that were started together.

    outputs: the tensors that the call fills.
    name: name of the call.
    """

    _future: torch.futures.Future[list[Tensor]] | None = None
    _has_waited = False

    def __init__(
        self, works: Sequence[core.Work], outputs: Sequence[Tensor], name: str = ""
    ) -> None:
        super().__init__()
        self.name = name
        self._works = works
        self._outputs = outputs

    def __del__(self) -> None:
        if self._has_waited or self._future is not None:
            return
        if any(work.has_failed() for work in self._works):
            return  # the core's Work prints its error when it is deleted
        large = sum(one.numel() * one.element_size() for one in self._outputs) > _MAX_KEPT_BYTES
        if large:
            self._outputs = ()
        for work in self._works:
            work.drop()
            if large:
                work.outputs = ()
        _dropped.append(self)

    def wait(self, timeout: timedelta = _ZERO) -> bool:
        """Wait until the outputs are filled. A ``timeout`` of zero means the timeout of the group.

        As with NCCL, the current stream waits for CUDA tensors. With a timeout, the host waits as
        well.

        Raises the error of the call, and CollectiveTimeoutError (a RuntimeError) if it timed out.
        """
        self._has_waited = True
        for work in self._works:
            work.wait(timeout or None)
        return True

    def result(self) -> list[Tensor]:
        """Wait, and return the output tensors."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a torch.futures.Future of the list of output tensors."""
        if self._future is None:
            self._future = _build_future(self._works, list(self._outputs))
        return self._future

    @property
    def timeout(self) -> timedelta:
        """Time after which ``wait()`` raises CollectiveTimeoutError."""
        limits = [MAX_TIMEOUT_S if work.limit is None else work.limit for work in self._works]
        return timedelta(seconds=min(limits, default=MAX_TIMEOUT_S))

    def source_rank(self) -> int:
        """Return the global rank of the sender. Raises ArgumentError if this is not a receive."""
        return self._works[0].source_rank()

    def _source_rank(self) -> int:
        return self.source_rank()


@disable_compile
class ReceiveWork(PendingWork):
    """A receive. Its source is a rank in the group, as in torch."""

    def __init__(
        self, group: ProcessGroup, work: core.Work, outputs: Sequence[Tensor], name: str
    ) -> None:
        super().__init__((work,), outputs, name)
        self._group = group

    def source_rank(self) -> int:
        """Return the rank in the group that sent the message, or -1 before it is received."""
        rank = self._group.group_rank(self._works[0].source_rank())
        return -1 if rank is None else rank


@disable_compile
class CompletedWork(_Work):
    """A synchronous call. Later work on the current stream sees its result."""

    #: The output of the call: a tensor, or a list of tensors.
    output: Outputs = ()

    def wait(self, timeout: timedelta = _ZERO) -> bool:
        """Return True."""
        return True

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return flatten(self.output)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a completed torch.futures.Future of the list of output tensors.

        Its callbacks run after work that the current streams of their devices hold now.
        """
        return _build_future((), self.result())


def join_works(pending: Sequence[PendingWork]) -> PendingWork:
    """Combine several Works into one."""
    return PendingWork(
        [work for one in pending for work in one._works],
        [tensor for one in pending for tensor in one._outputs],
        "coalesced",
    )


def flatten(output: Outputs) -> list[Tensor]:
    """Return the tensors of an output: a tensor, a list, or nested lists."""
    if isinstance(output, (list, tuple)):
        return [tensor for one in output for tensor in flatten(one)]
    return [] if output is None else [output]


def _build_future(
    works: Sequence[core.Work], outputs: list[Tensor]
) -> torch.futures.Future[list[Tensor]]:
    """Return a torch Future of ``outputs`` that completes, or fails, with the works."""
    # A torch Future accepts only values on the devices that it was created with. Its callbacks run
    # in separate streams, after the streams that are current when the value is set. With works,
    # these are new streams that wait for the works, so that no stream of the program waits. Without
    # works (a synchronous call), these are the caller's current streams.
    devices = {one.device for one in outputs if one.is_cuda}
    ended: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))
    pending = list(works)

    def check_works(_: core.Future | None) -> None:
        # Works end in any order. The callback that finds all of them done completes the future.
        while pending:
            if not pending[0].has_ended():
                pending[0].get_future().add_done_callback(check_works)
                return
            if pending[0].exception() is not None:
                break
            pending.pop(0)
        with ExitStack() as stack:
            if works:
                for device in devices:
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            for order in (order for work in works for order in work.orders):
                order.join("Work.get_future")
            ended.set_result(outputs if devices else None)

    def get_outputs(_: torch.futures.Future[Any]) -> list[Tensor]:
        for work in pending:  # the first of these has failed
            error = work.exception()
            if error is not None:
                raise error
        return outputs

    # Not Future.set_exception: it sets a value that raises when Python reads it, which C++, such as
    # DDP's reducer, would use as a tensor. An exception in a callback is an error also for C++.
    future = ended.then(get_outputs)
    check_works(None)
    return future


def _find_result(works: Sequence[core.Work]) -> Any:
    errors = [work.exception() for work in works]
    if any(isinstance(error, TimeoutError) for error in errors):
        return _WorkResult.TIMEOUT
    return _WorkResult.SUCCESS if not any(errors) else _WorkResult.COMM_ERROR
