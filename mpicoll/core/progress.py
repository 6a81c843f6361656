"""The threads that carry asynchronous work on: one a group for collectives, in order, and one a
process that keeps point-to-point messages moving while Python computes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

__all__ = ["Pollable", "Poller", "Worker"]


#: What is to be done; it must not raise.
Task = Callable[[], None]


class Worker:
    """A thread that carries tasks out in the order in which they were given.

    The thread starts with the first task.
    """

    MANY = 8

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Tasks given and tasks finished: each number is changed by one side alone, so that
        #: neither needs a lock.
        self.given = 0
        self.done = 0

    @property
    def busy(self) -> bool:
        """Some task is not finished, and a caller has to queue behind it.

        Not so on the thread itself: what a task's callbacks call belongs right behind that task.
        """
        return self.given != self.done and not self.current

    @property
    def crowded(self) -> bool:
        """Many tasks are not finished."""
        return self.given - self.done >= self.MANY

    def give(self, task: Task) -> None:
        """Runs ``task()`` behind what was given before. One caller at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self.given += 1
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            self.done += 1
            del task  # it holds arrays: not while waiting for the next

    def run_until(self, finished: Callable[[], bool]) -> None:
        """On the thread itself, carries tasks out until one brings ``finished()``."""
        while not finished() and (task := self._tasks.get()) is not None:
            task()
            self.done += 1

    def stop(self, limit: float | None) -> bool:
        """Ends the thread after the tasks it has; False, and it goes on, if that takes longer than
        ``limit``. A later task starts it again.
        """
        if self._thread is None:
            return True
        idle = threading.Event()
        self.give(idle.set)
        if not idle.wait(limit):
            return False
        self._tasks.put(None)
        self._thread.join()
        self._thread = None
        return True

    @property
    def current(self) -> bool:
        """This is the thread."""
        return threading.current_thread() is self._thread


class Pollable(Protocol):
    """What the Poller keeps moving."""

    def poll(self) -> bool:
        """Looks after the operation; True once it has ended."""


class Poller:
    """The thread that tests pending messages, so that MPI moves them while nobody waits.

    MPI libraries move a large message only inside calls. The thread looks often when something
    has just begun, ever more rarely while nothing changes, and sleeps when nothing is pending.
    """

    SHORTEST, LONGEST = 50e-6, 2e-3

    def __init__(self) -> None:
        self._new: deque[Pollable] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, item: Pollable) -> None:
        """Takes ``item`` into care, and holds it until it has ended."""
        self._new.append(item)
        if not self._wake.is_set():
            self._wake.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mpicoll-poller", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        pending: list[Pollable] = []
        pause = self.SHORTEST
        sleep = threading.Event().wait
        while True:
            if not pending and not self._new:
                self._wake.clear()
                if not self._new:
                    if self._stopping:
                        return
                    self._wake.wait()
                continue
            if self._new:
                pause = self.SHORTEST
                while self._new:
                    pending.append(self._new.popleft())
            sleep(pause)
            before = len(pending)
            pending = [item for item in pending if not item.poll()]
            if self._stopping:
                return
            pause = self.SHORTEST if len(pending) < before else min(2 * pause, self.LONGEST)

    def stop(self) -> None:
        """Ends the thread; what is pending is no longer looked after."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
