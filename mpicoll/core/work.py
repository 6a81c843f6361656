"""Work, the handle of an asynchronous call, and its Future."""

from __future__ import annotations

import numbers
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from mpicoll.core.observers import observers
from mpicoll.core.progress import Worker
from mpicoll.cuda.streams import Point, StreamOrder, look_until
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistBackendError,
)
from mpicoll.output import write_lines

__all__ = ["Future", "Work", "parse_timeout"]


def parse_timeout(
    timeout: timedelta | float | None, default: float | None, where: str
) -> float | None:
    """Convert a timeout to seconds: a timedelta, a number of seconds, or None for ``default``.

    Raises ArgumentTypeError for anything else and ArgumentError for a negative one.
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
    """A value that will be there later.

    ``wait()`` returns the value or raises the error; ``value()`` does the same without waiting;
    ``then(f)`` returns a Future of ``f(self)``.

    Where arrays of the value are on a device, it is there once all that makes them is in streams.
    The current streams of who waits go on after that, and so do those in which callbacks run.
    """

    # What makes the value on devices.
    points: Sequence[Point] = ()

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._done = False
        self._value: object = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], Any]] = []

    def done(self) -> bool:
        """Return whether there is a value or an error."""
        return self._done

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Wait for the value.

        timeout: seconds or a timedelta, None for ever.

        Returns the value. Raises the error if the Future ended with one, and
        CollectiveTimeoutError when the time is over.
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

        Raises the error if the Future ended with one, and ArgumentError (a ValueError) if it is
        not done.
        """
        if not self._done:
            raise ArgumentError("Future.value: there is no value yet; wait() for it")
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Call a function once this Future is done.

        callback: called with this Future.

        Returns a Future of what the callback returns or raises, or of why this one's value is not
        there.
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
        except Exception as error:  # this one is done, and devices have not made its value
            after.set_exception(error)
        return after

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        """Call a function once this Future is done; at once if it already is.

        callback: called with this Future; an exception that it raises is printed.

        Raises, without a call, why devices have not made the value of a Future that is done.
        """
        with self._condition:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._join()
        callback(self)

    def set_result(self, value: object) -> None:
        """End the Future with a value.

        value: what ``wait()`` returns.

        Raises ArgumentError (a ValueError) if it has ended.
        """
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        """End the Future with an error.

        error: what ``wait()`` raises.

        Raises ArgumentError (a ValueError) if it has ended.
        """
        self._end(None, error)

    def _end(self, value: object, error: BaseException | None) -> None:
        with self._condition:
            if self._done:
                raise ArgumentError("Future: it already has a value")
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:
                traceback.print_exc()  # nothing waits for the callback's result


#: Seconds that a thread sleeps before it waits for a Work with many queued behind it.
CROWDED_PAUSE = 50e-6

#: Seconds in which a Work ends with its group's error once that is closed, with plenty to spare, if
#: it is not stuck in MPI.
A_MOMENT = 0.5


#: Decides whether finish() or get_future() settles a Work's Future.
_future_lock = threading.Lock()


class Work:
    """One asynchronous operation.

    It owns the arrays it moves until it is done, even if the caller drops the Work. ``wait()``
    raises the operation's error; one that no caller waited for is printed when the Work is deleted.

    Of an operation on devices the host's part ends when all is in streams; the devices go on.
    """

    # description:   the operation, for messages.
    # outputs:       the arrays that the operation fills, as the caller passed them.
    # limit:         seconds that ``wait()`` waits by default.
    # has_timed_out: a ``wait()`` has ended with CollectiveTimeoutError.
    # expire:        called when a ``wait()`` without a timeout of its own has lasted ``limit``.
    # worker:        the group's thread that runs the operation; None for any other.
    # orders:        the places of an operation on a device among the caller's streams.

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
    ) -> None:
        self.expire = expire
        self.description = description
        self.outputs = outputs
        self.limit = limit
        self.orders = orders
        self._gate = threading.Lock()  # held until the work is done
        self._gate.acquire()
        self._finished = False
        self._error: BaseException | None = None
        self._error_seen = False
        self.has_timed_out = False
        self.worker: Worker | None = None
        self._future: Future | None = None

    def set_limit(self, limit: float | None) -> None:
        """Give the operation a timeout of its own, after which its group is not closed.

        limit: seconds; None: no timeout.
        """
        self.limit, self.expire = limit, None

    def finish(self, error: BaseException | None = None) -> None:
        """End the Work, when the host's part has ended; only the first call counts.

        error: what ``wait()`` raises, None on success.
        """
        with _future_lock:
            if self._finished:
                return
            self._error = error
            self._finished = True
            future = self._future
        try:
            if future is not None:
                self._settle_in_streams(future)
        finally:
            self._gate.release()

    def _settle_in_streams(self, future: Future) -> None:
        """End the Future; on devices, with callbacks in streams after the operation."""
        try:
            with ExitStack() as stack:
                for order in self.orders:
                    stack.enter_context(order.in_callbacks())
                self._settle_future(future)
        except Exception as error:  # a device that has failed
            self._error = self._error or error
            if not future.done():
                self._settle_future(future)

    def abandon(self, error: BaseException) -> None:
        """End the Work with an error, though the operation may go on inside MPI.

        error: what ``wait()`` raises.
        """
        self._error_seen = True
        self.finish(error)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the outputs hold the result; on a device, let the current streams wait.

        timeout: seconds or a timedelta; zero or None is the group's timeout.

        Arrays on a device: the host waits until all is in streams, which the calling thread's
        current streams then go on after, and no longer, but with a timeout above zero: then until
        the device is done, too, as with torch's NCCL.

        Returns True. Raises the operation's error, and CollectiveTimeoutError when the time is
        over. After a timeout of its own the operation goes on and can be waited for again; after
        the group's, a collective's group is closed.
        """
        if timeout is None and self._finished:
            return self._end_wait() if self.orders else self._check_error()
        given = parse_timeout(timeout, None, "Work.wait")
        limit = given or self.limit
        moment = deadline(given or None)
        worker = self.worker
        if worker is not None and not self._finished:
            if worker.is_current:
                # A callback of an earlier Work waits, on the thread that has to run this one.
                worker.run_until(self.has_ended)
            elif worker.is_crowded:
                # A caller that waits for one Work after another would be woken for each, and take
                # the processor from the thread each time. After a pause several are done.
                time.sleep(CROWDED_PAUSE)
        if not self._finished and not self._wait_finished(limit):
            if given or self.expire is None:
                raise self._late(limit)
            self.expire()
            if not self._wait_finished(A_MOMENT):
                raise self._late(limit)
        self._end_wait()
        if given:
            if not look_until(self.is_completed, moment):
                raise self._late(limit)
            self._ask_devices(done=True)
        return self._check_error()

    def _end_wait(self) -> bool:
        """Let the current streams go on after what is in streams, and raise the error."""
        try:
            for order in self.orders:
                order.join("Work.wait")
        except Exception:
            if self._error is None:
                raise
        self._ask_devices()
        return self._check_error()

    def _ask_devices(self, done: bool = False) -> None:
        """Note why a device has ended the operation without its result, if that is known.

        done: it has ended. Then the result is there if there is no failure, and what becomes of
              later calls of the group is not this one's.
        """
        if self._error is None and self._finished:
            errors = (order.find_failure() for order in self.orders)
            self._error = next((error for error in errors if error is not None), None)
            if done and self._error is None:
                for order in self.orders:
                    order.settle()

    def _late(self, limit: float | None) -> CollectiveTimeoutError:
        """Note that a wait has ended without the Work; return the error."""
        self.has_timed_out = True
        error = self._timeout_error(limit)
        if limit == self.limit:  # no shorter one, after which the program may wait again
            for observer in observers:
                observer.work_timed_out(str(error))
        return error

    def _timeout_error(self, limit: float | None) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self.description}: not complete within the timeout of {limit:g} s; another rank has "
            "not made this call, or is still on its way"
        )

    def _check_error(self) -> bool:
        self._error_seen = True
        if self._error is not None:
            raise self._error
        return True

    def _wait_finished(self, limit: float | None) -> bool:
        """Wait until the Work has ended, ``limit`` seconds at most; return whether it has."""
        if not self._gate.acquire(timeout=-1 if limit is None else limit):
            return False
        self._gate.release()
        return True

    def has_ended(self) -> bool:
        """Return whether the host's part has ended: a wait for it does not block the host."""
        return self._finished

    def has_failed(self) -> bool:
        """Return whether the host's part has ended with an error."""
        return self._finished and self._error is not None

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with success or an error; asks the device."""
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
        """Return the operation's error, None if there is none (yet).

        What a device finds wrong later is raised by the next call of CUDA, as ever. That kernels
        have ended without a result, as another rank did not come, is known once they have.
        """
        self._ask_devices(done=self.is_completed())
        self._error_seen = self._error_seen or self._finished
        return self._error

    def result(self) -> list[Any]:
        """Wait as ``wait()`` does, and return the output arrays as a list.

        Raises what ``wait()`` raises.
        """
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Wait as ``wait()`` does.

        Raises what ``wait()`` raises.
        """
        self.wait()

    def block_current_stream(self) -> None:
        """Wait as ``wait()`` does.

        Raises what ``wait()`` raises.
        """
        self.wait()

    def get_future(self) -> Future:
        """Return the Future of the list of output arrays, the same one at every call.

        Its callbacks run on the group's thread, on devices after the operation, in a stream that is
        current there meanwhile.
        """
        with _future_lock:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            future.points = self.orders
            finished = self._finished
        if finished:
            self._settle_future(future)
        return future

    def _settle_future(self, future: Future) -> None:
        if self._error is not None:
            self._error_seen = True
            future.set_exception(self._error)
        else:
            future.set_result(list(self.outputs))

    def source_rank(self) -> int:
        """Return the global rank that a message came from, once it is received.

        Raises ArgumentError (a ValueError) if the operation is not a receive.
        """
        raise ArgumentError(f"{self.description}: only a receive has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def __repr__(self) -> str:
        state = "pending" if not self._finished else "failed" if self._error else "done"
        return f"<mpicoll.Work {self.description}: {state}>"

    def drop(self) -> None:
        """Keep the arrays only for as long as the devices work on them."""
        for order in self.orders:
            order.drop()

    def __del__(self) -> None:
        try:
            if self.orders:
                self.drop()
            unseen = self._error is not None and not self._error_seen
        except AttributeError:  # it was not made
            return
        if unseen and not _was_said(self._error):
            write_lines(f"mpicoll: nobody waited for {self!r}: {self._error}")


#: The last that was said of works that nobody waited for.
_said = ""


def _was_said(error: BaseException | None) -> bool:
    """Return whether that is what was said of the work before: all that are queued in a group that
    breaks fail alike.
    """
    global _said
    text = str(error) if isinstance(error, DistBackendError) else ""
    before, _said = _said, text
    return bool(text) and text == before


def deadline(limit: float | None) -> float:
    """Return the time on the monotonic clock that is ``limit`` seconds from now."""
    return float("inf") if limit is None else time.monotonic() + limit
