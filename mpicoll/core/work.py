"""Work, the handle of an async call, and its Future."""

from __future__ import annotations

import numbers
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpicoll.core.progress import Worker
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistBackendError,
)
from mpicoll.output import write_lines

if TYPE_CHECKING:
    from mpicoll.cuda.streams import Point, StreamOrder


def parse_timeout(
    timeout: timedelta | float | None, default: float | None, where: str
) -> float | None:
    """Convert a timeout to seconds: a timedelta, a number of seconds, or None for ``default``.

    Raises ArgumentTypeError for anything else and ArgumentError for a negative value.
    """
    if timeout is None:
        return default
    if isinstance(timeout, timedelta):
        limit = timeout.total_seconds()
    elif isinstance(timeout, numbers.Real) and not isinstance(timeout, bool):
        limit = float(timeout)
    else:
        raise ArgumentTypeError(
            f"{where}: timeout: expected a datetime.timedelta or a number of seconds, "
            f"got {type(timeout).__name__}"
        )
    if not limit >= 0:
        raise ArgumentError(f"{where}: timeout: expected no less than 0 seconds, got {limit}")
    return min(limit, threading.TIMEOUT_MAX)


class Future:
    """A value that will be available later.

    ``wait()`` returns the value or raises the error. ``value()`` does the same without waiting.
    ``then(f)`` returns a Future of ``f(self)``.

    If arrays of the value are on a device, the Future is done once the work that fills them is
    enqueued. The current streams of a waiting thread, and the streams of callbacks, wait for that
    work.
    """

    # Operations on devices that produce the value.
    points: Sequence[Point] = ()

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._done = False
        self._value: object = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], Any]] = []

    def done(self) -> bool:
        """Return whether the Future has a value or an error."""
        return self._done

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Wait for the value.

        timeout: seconds or a timedelta; None waits forever.

        Returns the value. Raises the error of the Future, and CollectiveTimeoutError if it timed
        out.
        """
        limit = parse_timeout(timeout, None, "Future.wait")
        with self._condition:
            if not self._condition.wait_for(self.done, limit):
                raise CollectiveTimeoutError(f"Future.wait: no value within {limit} s")
        self._join()
        return self.value()

    def _join(self) -> None:
        for point in self.points:
            point.join("Future.wait")
            error = point.find_failure()
            if error is not None:
                raise error

    def value(self) -> Any:
        """Return the value of a Future that is done.

        Raises the error of the Future, and ArgumentError (a ValueError) if it is not done.
        """
        if not self._done:
            raise ArgumentError("Future.value: the value is not available yet; call wait()")
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Call a function once this Future is done.

        callback: called with this Future.

        Returns a Future of the result of the callback. It raises the exception of the callback, or
        the device error of this Future.
        """
        after = Future()

        def run(done: Future) -> None:
            try:
                result = callback(done)
                after.points = [point.here() for point in done.points]
            except BaseException as error:
                after.set_exception(error)
            else:
                after.set_result(result)

        try:
            self.add_done_callback(run)
        except Exception as error:  # the device error of this Future
            after.set_exception(error)
        return after

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        """Call a function once this Future is done, immediately if it already is.

        callback: called with this Future; its exceptions are printed.

        Raises the device error of a Future that is done; then the callback is not called.
        """
        with self._condition:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._join()
        callback(self)

    def set_result(self, value: object) -> None:
        """End the Future with a value.

        value: returned by ``wait()``.

        Raises ArgumentError (a ValueError) if it has ended.
        """
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        """End the Future with an error.

        error: raised by ``wait()``.

        Raises ArgumentError (a ValueError) if it has ended.
        """
        self._end(None, error)

    def _end(self, value: object, error: BaseException | None) -> None:
        with self._condition:
            if self._done:
                raise ArgumentError("Future: it already has a value or an exception")
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:
                traceback.print_exc()  # nothing waits for the callback's result


#: Number of queued Works from which a thread sleeps before it waits for one, and the time.
CROWD_COUNT, CROWDED_PAUSE_S = 8, 50e-6

#: Time within which a Work fails after its group is closed, unless it is blocked in MPI.
THREAD_EXIT_TIMEOUT_S = 0.5


#: Functions of higher packages. Called with the message when the wait for a Work has exceeded the
#: group's timeout.
on_timeout: list[Callable[[str], None]] = []

#: Decides whether finish() or get_future() completes the Future of a Work.
_future_lock = threading.Lock()


class Work:
    """One async operation.

    It keeps its arrays alive until it completes, even if the caller drops the Work. ``wait()``
    raises the error of the operation. An error without a ``wait()`` is printed when the Work is
    deleted.

    For an operation on devices, the host part ends when all work is enqueued in streams.
    """

    __slots__ = (
        "__weakref__", "_error", "_error_seen", "_finished", "_future", "_gate", "description",
        "expire", "has_timed_out", "limit", "orders", "outputs", "worker",
    )  # fmt: skip

    def __init__(
        self,
        description: str,
        outputs: Sequence[Any],
        limit: float | None,
        orders: Sequence[StreamOrder] = (),
        expire: Callable[[], None] | None = None,
        finished: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.expire = expire  # called when a ``wait()`` without a timeout has lasted ``limit``
        self.description = description  # the operation, for messages
        self.outputs = outputs  # as the caller passed them
        self.limit = limit  # default timeout of ``wait()`` in seconds
        self.orders = orders  # stream orders of an operation on a device
        if not finished:
            self._gate = threading.Lock()  # held until the work is done
            self._gate.acquire()
        self._finished = finished
        self._error = error
        self._error_seen = False
        self.has_timed_out = False  # a ``wait()`` has raised CollectiveTimeoutError
        self.worker: Worker | None = None  # the progress thread that runs the operation
        self._future: Future | None = None

    def set_limit(self, limit: float | None) -> None:
        """Set a timeout for this Work only. The group does not fail if ``wait()`` exceeds it.

        limit: seconds; None: no timeout.
        """
        self.limit, self.expire = limit, None

    def finish(self, error: BaseException | None = None) -> None:
        """End the Work after the host part has ended. Only the first call has an effect.

        error: raised by ``wait()``; None on success.
        """
        with _future_lock:
            if self._finished:
                return
            self._error = error
            self._finished = True
            future = self._future
        try:
            if future is not None:
                with ExitStack() as stack:  # on devices, callbacks run in streams after this
                    for order in self.orders:
                        stack.enter_context(order.in_callbacks())
                    self._settle(future)
        except Exception as failure:  # a device that has failed
            self._error = self._error or failure
            if future is not None and not future.done():
                self._settle(future)
        finally:
            self._gate.release()

    def abandon(self, error: BaseException) -> None:
        """End the Work with an error, while the operation may continue inside MPI.

        error: raised by ``wait()``.
        """
        self._error_seen = True
        self.finish(error)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the outputs hold the result. On a device, only the current streams wait.

        timeout: seconds or a timedelta; zero or None is the timeout of the group.

        For device arrays, the host waits until all work is enqueued in streams, and the current
        streams of the thread wait for it. With a timeout above zero, the host also waits for the
        device, as with torch's NCCL.

        Returns True. Raises the error of the operation, and CollectiveTimeoutError if it timed out.
        After a timeout passed here, the operation continues and can be waited for again. If a
        collective exceeds the timeout of the group, the group fails.
        """
        if timeout is None and self._finished:
            return self._end_wait() if self.orders else self._check_error()
        given = parse_timeout(timeout, None, "Work.wait")
        limit = given or self.limit
        moment = deadline(given or None)
        worker = self.worker
        if worker is not None and not self._finished:
            if worker.is_current:
                # A callback of an earlier Work waits, on the thread that must run this Work.
                worker.run_until(self.has_ended)
            elif worker.submitted - worker.finished >= CROWD_COUNT:
                # A caller that waits for one Work after another would be woken for each and take
                # the core from the progress thread. After a pause, several Works are done.
                time.sleep(CROWDED_PAUSE_S)
        if not self._finished and not self._wait_finished(limit):
            if given or self.expire is None:
                raise self._record_timeout(limit)
            self.expire()
            if not self._wait_finished(THREAD_EXIT_TIMEOUT_S):
                raise self._record_timeout(limit)
        self._end_wait()
        if given:
            from mpicoll.cuda.streams import poll_until

            if not poll_until(self.is_completed, moment):
                raise self._record_timeout(limit)
            self._ask_devices(done=True)
        return self._check_error()

    def _end_wait(self) -> bool:
        """Make the current streams wait for the operation, and raise its error."""
        try:
            for order in self.orders:
                order.join("Work.wait")
        except Exception:
            if self._error is None:
                raise
        self._ask_devices()
        return self._check_error()

    def _ask_devices(self, done: bool = False) -> None:
        """Store the device error of the operation, if one is known.

        done: the devices have finished. Without an error the result is final, and failures of later
            calls of the group no longer affect this Work.
        """
        if self._error is None and self._finished:
            errors = (order.find_failure() for order in self.orders)
            self._error = next((error for error in errors if error is not None), None)
            if done and self._error is None:
                for order in self.orders:
                    order.settle()

    def _record_timeout(self, limit: float | None) -> CollectiveTimeoutError:
        self.has_timed_out = True
        error = CollectiveTimeoutError(
            f"{self.description}: timed out: not complete within {limit:g} s; another rank has not "
            "made this call, or has not reached it yet"
        )
        if limit == self.limit:  # not a shorter timeout, after which the program may wait again
            for call in on_timeout:
                call(str(error))
        return error

    def _check_error(self) -> bool:
        self._error_seen = True
        if self._error is not None:
            raise self._error
        return True

    def _wait_finished(self, limit: float | None) -> bool:
        """Wait at most ``limit`` seconds for the end of the Work. Return whether it has ended."""
        if not self._gate.acquire(timeout=-1 if limit is None else limit):
            return False
        self._gate.release()
        return True

    def has_ended(self) -> bool:
        """Return whether the host part has ended, so that waiting does not block the host."""
        return self._finished

    def has_failed(self) -> bool:
        """Return whether the host part has ended with an error."""
        return self._finished and self._error is not None

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with success or an error. Queries the device."""
        return self.has_failed() or (
            self._finished and all(order.is_done() for order in self.orders)
        )

    def is_success(self) -> bool:
        """Return whether the operation has ended with success."""
        if not self.is_completed():
            return False
        self._ask_devices(done=True)
        return self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None.

        Device errors that occur later are raised by the next CUDA call. If kernels end without a
        result, because another rank did not call, the error is known once they have ended.
        """
        self._ask_devices(done=self.is_completed())
        self._error_seen = self._error_seen or self._finished
        return self._error

    def result(self) -> list[Any]:
        """Wait, and return the output arrays as a list.

        Raises the errors of ``wait()``.
        """
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Wait as ``wait()`` does. Raises the errors of ``wait()``."""
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Future:
        """Return the Future of the list of output arrays, always the same object.

        Its callbacks run on the progress thread. On devices, a stream that waits for the operation
        is current meanwhile.
        """
        with _future_lock:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            future.points = self.orders
            finished = self._finished
        if finished:
            self._settle(future)
        return future

    def _settle(self, future: Future) -> None:
        if self._error is not None:
            self._error_seen = True
            future.set_exception(self._error)
        else:
            future.set_result(list(self.outputs))

    def source_rank(self) -> int:
        """Return the global rank that sent the received message.

        Raises ArgumentError (a ValueError) if the operation is not a receive.
        """
        raise ArgumentError(f"{self.description}: only a receive has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def __repr__(self) -> str:
        state = "pending" if not self._finished else "failed" if self._error else "done"
        return f"<mpicoll.Work {self.description}: {state}>"

    def drop(self) -> None:
        """Release the arrays as soon as the devices no longer use them."""
        for order in self.orders:
            order.drop()

    def __del__(self) -> None:
        try:
            if self.orders:
                self.drop()
            unseen = self._error is not None and not self._error_seen
        except AttributeError:  # __init__ has failed
            return
        if unseen and not _was_printed(self._error):
            write_lines(f"mpicoll: wait() was not called for {self!r}: {self._error}")


#: Latest printed error of a Work without a wait().
_last_printed = ""


def _was_printed(error: BaseException | None) -> bool:
    """Return whether the same error was just printed: queued calls of a group fail alike."""
    global _last_printed
    text = str(error) if isinstance(error, DistBackendError) else ""
    before, _last_printed = _last_printed, text
    return bool(text) and text == before


def deadline(limit: float | None) -> float:
    """Return the time on the monotonic clock that is ``limit`` seconds from now."""
    return float("inf") if limit is None else time.monotonic() + limit
