"""Elastic states, and functions that restart from them after ranks are lost.

See the page "Elastic Horovod" of Horovod's documentation.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import Any

from mpicoll.errors import LostRankError
from mpicoll.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HostUpdateResult", "ObjectState", "State", "run_fn"]


class HostUpdateResult(IntFlag):
    """The kind of a change of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """A state that training can continue from. Subclasses implement save, restore and sync.

    bcast_object: broadcasts an object from rank 0.
    get_rank: returns this rank.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._updates: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_update = 0.0
        self._commits = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register functions without arguments that are called after each change of the ranks,
        before sync.

        callbacks: such as a function that adapts the learning rate to the number of ranks.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new ranks: call ``reset``, then the callbacks."""
        self._updates = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Report new hosts, which interrupts the next commit of all ranks. Only reports on rank 0
        count.

        timestamp: later than the previous one. update_res: a HostUpdateResult.

        May be called on any thread. mpicoll does not call it: it is for programs that watch a job's
        hosts.
        """
        self._updates.put((timestamp, int(update_res)))

    def commit(self) -> None:
        """Save, then check_host_updates. All ranks call."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if new hosts were reported on rank 0. All ranks
        call.
        """
        before = last = self._last_update
        update = 0
        while not self._updates.empty():
            timestamp, each = self._updates.get()
            if timestamp > last:
                last, update = timestamp, update | each
        before, self._last_update, update = self._bcast_object((before, last, update))
        if self._last_update > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast rank 0's state. All ranks call."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new ranks; does nothing by default."""


class ObjectState(State):
    """Picklable objects as attributes of a state.

    kwargs: their names and initial values.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        self._set(kwargs)

    def save(self) -> None:
        """Save copies of the attributes."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Restore the attributes from the last save."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Set the attributes to rank 0's last save, and save them."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self.restore()

    def _set(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], bool]) -> Callable[..., Any]:
    """Return a function that calls ``func`` until it returns.

    func: its first argument is a State, which is synchronized before each call. After a
          HorovodInternalError, or a LostRankError of mpicoll's calls, it is restored before that.
    reset: restarts the operations among the surviving ranks; returns whether ranks were lost.
           Called before the state is restored, because no operation may be pending then.

    An error that occurs again without a commit in between and without lost ranks is an error of the
    program, and is raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *arguments: Any, **options: Any) -> Any:
        skip_sync, restarts = False, False
        failed: Exception | None = None
        last_commits = None  # number of commits at the last error without lost ranks
        while True:
            if restarts and not reset() and failed is not None:
                if last_commits == state._commits:
                    raise failed
                last_commits = state._commits
            try:
                if failed is not None:
                    state.restore()
                    failed = None
                if restarts:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                return func(state, *arguments, **options)
            except (HorovodInternalError, LostRankError) as error:
                failed = error
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            restarts = True

    return wrapper
