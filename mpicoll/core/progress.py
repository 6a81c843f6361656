"""Threads for async progress.

One progress thread per group runs its collectives in order. One thread per process tests pending
point-to-point messages while Python computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from mpicoll.cuda.threads import use_process_device

#: A function that a Worker runs; it must not raise.
Task = Callable[[], None]


class Worker:
    """A thread that runs tasks in the order in which they were submitted.

    The thread starts with the first task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Number of tasks. Each is changed by one thread only, so no lock is needed.
        self.submitted = 0
        self.finished = 0

    @property
    def is_busy(self) -> bool:
        """Whether a task is unfinished, so that a caller must queue behind it.

        False on the thread itself, because calls of a task's callbacks run right after that task.
        """
        return self.submitted != self.finished and not self.is_current

    def submit(self, task: Task) -> None:
        """Run ``task()`` after all earlier tasks. Only one thread at a time may call this."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self.submitted += 1
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            use_process_device()
            task()
            self.finished += 1
            del task  # releases arrays that it holds

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run tasks, on the thread itself, until ``is_done()``."""
        while not is_done() and (task := self._tasks.get()) is not None:
            task()
            self.finished += 1

    def stop(self, limit: float | None) -> bool:
        """End the thread after its tasks. A later task starts it again.

        Returns False, and leaves the thread running, after ``limit`` seconds.
        """
        if self._thread is None:
            return True
        idle = threading.Event()
        self.submit(idle.set)
        if not idle.wait(limit):
            return False
        self._tasks.put(None)
        self._thread.join()
        self._thread = None
        return True

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread


class Poller:
    """The thread that tests pending messages, so that MPI progresses them while no rank waits.

    MPI libraries progress a large message only inside calls. The thread polls often after an
    operation starts, less often while nothing changes, and sleeps when nothing is pending.
    """

    MIN_INTERVAL_S, MAX_INTERVAL_S = 50e-6, 2e-3

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, poll: Callable[[], bool]) -> None:
        """Call ``poll()``, which tests an operation, until it returns True: the operation ended."""
        self._new.put(poll)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mpicoll-poller", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        pending: list[Callable[[], bool]] = []
        pause = self.MIN_INTERVAL_S
        sleep = threading.Event().wait
        while True:
            while not pending or not self._new.empty():
                poll = self._new.get()
                if poll is None:
                    return
                pending.append(poll)
                pause = self.MIN_INTERVAL_S
            sleep(pause)
            use_process_device()
            before = len(pending)
            pending = [poll for poll in pending if not poll()]
            pause = (
                self.MIN_INTERVAL_S
                if len(pending) < before
                else min(2 * pause, self.MAX_INTERVAL_S)
            )

    def stop(self) -> None:
        """End the thread; pending operations are no longer tested. ``add`` starts it again."""
        if self._thread is not None:
            self._new.put(None)
            self._thread.join()
            self._thread = None


#: The thread of this process that tests pending messages.
poller = Poller()
