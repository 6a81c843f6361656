"""What an asynchronous call returns: a Work, and the Future that can be had of it."""

from __future__ import annotations

import numbers
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from mpicoll.core.progress import Worker
from mpicoll.errors import ArgumentError, ArgumentTypeError, CollectiveTimeoutError
from mpicoll.output import write_lines

__all__ = ["Future", "Work", "seconds"]


def seconds(timeout: timedelta | float | None, default: float | None, where: str) -> float | None:
    """A timeout as seconds: a timedelta, a number of seconds, or None for ``default``.

    Raises ArgumentTypeError for anything else and ArgumentError for less than nothing.
    """
    if timeout is None:
        return default
    if isinstance(timeout, timedelta):
        found = timeout.total_seconds()
    elif isinstance(timeout, numbers.Real) and not isinstance(timeout, bool):
        found = float(timeout)
    else:
        raise ArgumentTypeError(
            f"{where}: timeout: expected a datetime.timedelta or a number of seconds, "
            f"got {type(timeout).__name__}"
        )
    if not found >= 0:
        raise ArgumentError(f"{where}: timeout: expected no less than 0 seconds, got {found}")
    return min(found, threading.TIMEOUT_MAX)


class Future:
    """A value that will be there later.

    ``wait()`` returns it or raises what went wrong, ``value()`` the same but only once done,
    ``then(f)`` is a Future of ``f(self)``.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], Any]] = []

    def done(self) -> bool:
        """Tell whether there is a value or an error.

        Returns True or False.
        """
        return self._done

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Wait for the value.

        timeout: seconds or a timedelta, None for ever.

        Returns the value. Raises the error that there is instead, and CollectiveTimeoutError when
        the time is over.
        """
        limit = seconds(timeout, None, "Future.wait")
        with self._condition:
            if not self._condition.wait_for(self.done, limit):
                raise CollectiveTimeoutError(f"Future.wait: no value within {limit} s")
        return self.value()

    def value(self) -> Any:
        """Return the value of a Future that is done.

        Raises the error that there is instead, and ArgumentError (a ValueError) where it is not
        done.
        """
        if not self._done:
            raise ArgumentError("Future.value: there is no value yet; wait() for it")
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Have a function called once this Future is done.

        callback: gets this Future.

        Returns a Future of what the callback returns or raises.
        """
        after = Future()

        def run(done: Future) -> None:
            try:
                result = callback(done)
            except BaseException as error:
                after.set_exception(error)
            else:
                after.set_result(result)

        self.add_done_callback(run)
        return after

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        """Have a function called once this Future is done, at once if that is now.

        callback: gets this Future; what it raises is printed.
        """
        with self._condition:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def set_result(self, value: Any) -> None:
        """End the Future with a value.

        value: what ``wait()`` returns.

        Raises ArgumentError (a ValueError) where it has ended.
        """
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        """End the Future with an error.

        error: what ``wait()`` raises.

        Raises ArgumentError (a ValueError) where it has ended.
        """
        self._end(None, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
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
                traceback.print_exc()  # nobody waits for what a callback does


#: Seconds that a thread sleeps before it waits for a work with many behind it.
MOMENT = 50e-6

#: Guards which of finish() and get_future() settles a Work's Future.
_futures = threading.Lock()


class Work:
    """One asynchronous operation.

    It owns the arrays it moves until it is done, whether or not anybody keeps the Work. An error
    is raised by ``wait()``; one that nobody waited for is printed when the Work goes away.

    description: the operation, as messages name it.
    outputs:     the arrays that the operation fills, as the caller passed them.
    limit:       seconds that ``wait()`` waits if it is not told otherwise.
    overdue:     somebody has waited in vain, and knows.
    carrier:     the thread that carries the work out; None where it is no group's.
    """

    __slots__ = (
        "__weakref__", "_error", "_finished", "_future", "_gate", "_seen", "carrier", "description",
        "limit", "outputs", "overdue",
    )  # fmt: skip

    def __init__(self, description: str, outputs: Sequence[Any], limit: float | None) -> None:
        self.description = description
        self.outputs = outputs
        self.limit = limit
        self._gate = threading.Lock()  # held until the work is done
        self._gate.acquire()
        self._finished = False
        self._error: BaseException | None = None
        self._seen = False
        self.overdue = False
        self.carrier: Worker | None = None
        self._future: Future | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """End the work; whoever carries it out calls, and the first call counts.

        error: what ``wait()`` raises, None where all went well.
        """
        with _futures:
            if self._finished:
                return
            self._error = error
            self._finished = True
            future = self._future
        if future is not None:
            self._settle(future)
        self._gate.release()

    @property
    def has_future(self) -> bool:
        """Somebody may be waiting by the Future, which knows no timeout."""
        return self._future is not None

    def give_up(self, error: BaseException) -> None:
        """End the work for whoever waits for it, though what it began may go on inside MPI.

        error: what ``wait()`` raises.
        """
        self._seen = True
        self.finish(error)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the outputs hold the result.

        timeout: seconds or a timedelta; zero or None is the group's timeout.

        Returns True. Raises what went wrong, and CollectiveTimeoutError when the time is over; the
        operation goes on then, and can be waited for again.
        """
        if timeout is None and self._finished:
            return self._outcome()
        limit = seconds(timeout, None, "Work.wait") or self.limit
        carrier = self.carrier
        if carrier is not None and not self._finished:
            if carrier.current:
                # A callback of an earlier work waits, on the thread that is to carry this one out.
                carrier.run_until(self.is_completed)
            elif carrier.crowded:
                # Who waits for one work after another would be woken for each, and take the
                # processor from the thread each time. In a moment some are done.
                time.sleep(MOMENT)
        if not self._finished and not self._join(limit):
            self.overdue = True
            raise self._late(limit)
        return self._outcome()

    def _late(self, limit: float | None) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self.description}: not complete within the timeout of {limit:g} s; another rank has "
            "not made this call, or is still on its way"
        )

    def time_out(self, limit: float) -> None:
        """End the work with the error that ``wait()`` raises when the time is over.

        limit: the seconds that it took.
        """
        self.overdue = True
        self.give_up(self._late(limit))

    def _outcome(self) -> bool:
        self._seen = True
        if self._error is not None:
            raise self._error
        return True

    def _join(self, limit: float | None) -> bool:
        """Waits until the work has ended, ``limit`` seconds at most; False if it has not."""
        if not self._gate.acquire(timeout=-1 if limit is None else limit):
            return False
        self._gate.release()
        return True

    def is_completed(self) -> bool:
        """Tell whether the operation has ended, well or not.

        Returns True or False.
        """
        return self._finished

    def is_success(self) -> bool:
        """Tell whether the operation has ended well.

        Returns True or False.
        """
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, None if nothing has."""
        self._seen = self._seen or self._finished
        return self._error

    def result(self) -> list[Any]:
        """Wait, and return the output arrays as a list.

        Raises what ``wait()`` raises.
        """
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Wait as ``wait()`` does: what has ended can be seen by every stream.

        Raises what ``wait()`` raises.
        """
        self.wait()

    def block_current_stream(self) -> None:
        """Wait as ``wait()`` does: what has ended can be seen by every stream.

        Raises what ``wait()`` raises.
        """
        self.wait()

    def get_future(self) -> Future:
        """Return a Future of the list of output arrays, the same at every call."""
        with _futures:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            finished = self._finished
        if finished:
            self._settle(future)
        return future

    def _settle(self, future: Future) -> None:
        if self._error is not None:
            self._seen = True
            future.set_exception(self._error)
        else:
            future.set_result(list(self.outputs))

    def source_rank(self) -> int:
        """Return the global rank that a receive got its message from, once it is here.

        Raises ArgumentError (a ValueError) for what is no receive.
        """
        raise ArgumentError(f"{self.description}: only a receive has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def __repr__(self) -> str:
        state = "pending" if not self._finished else "failed" if self._error else "done"
        return f"<mpicoll.Work {self.description}: {state}>"

    def __del__(self) -> None:
        if getattr(self, "_error", None) is not None and not self._seen:
            write_lines(f"mpicoll: nobody waited for {self!r}: {self._error}")


def deadline(limit: float | None) -> float:
    """The moment on the monotonic clock that is ``limit`` seconds away."""
    return float("inf") if limit is None else time.monotonic() + limit
