"""States that ranks keep, and functions that begin anew from them when ranks are lost.

As in Horovod, whose tutorial is the page "Elastic Horovod" of its documentation.
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
    """What has become of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """What training goes on from. A class of one's own has save, restore and sync.

    bcast_object: returns rank 0's object on all ranks.
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
        """Have functions without arguments called after each change of the ranks, before sync.

        callbacks: such as one that sets the learning rate by the new number of ranks.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Get used to the new ranks: ``reset``, then the callbacks."""
        self._updates = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell of new hosts; the next commit of all ranks interrupts. Rank 0's words count.

        timestamp: later than the last one. update_res: a HostUpdateResult.

        May be called by any thread. Nobody here calls it: it is for what watches a job's hosts.
        """
        self._updates.put((timestamp, int(update_res)))

    def commit(self) -> None:
        """Save, then check_host_updates. All ranks call."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 was told of new hosts. All call."""
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
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state. All ranks call."""
        raise NotImplementedError

    def reset(self) -> None:
        """Get used to the new ranks; nothing here."""


class ObjectState(State):
    """Objects that can be pickled, as attributes of the state.

    kwargs: their names and first values.
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
        """Keep copies of the attributes."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Set the attributes to what was saved last."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Set the attributes to what rank 0 saved last, and save that."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self.restore()

    def _set(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], bool]) -> Callable[..., Any]:
    """Return a function that calls ``func`` until it returns.

    func: its first argument is a State, which is synchronized before each call. After a
        HorovodInternalError, or a LostRankError of mpicoll's own calls, it is restored before that.
    reset: makes the operations work again, among the ranks that live; returns whether any was lost.
        It comes before the restoring, for which nothing may be on its way.

    An error that comes again, with no commit in between and nobody lost, is the program's, and is
    raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *arguments: Any, **options: Any) -> Any:
        skip_sync, begins_anew = False, False
        failed: Exception | None = None
        in_vain = None  # the number of commits at the last error without a loss
        while True:
            if begins_anew and not reset() and failed is not None:
                if in_vain == state._commits:
                    raise failed
                in_vain = state._commits
            try:
                if failed is not None:
                    state.restore()
                    failed = None
                if begins_anew:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                return func(state, *arguments, **options)
            except (HorovodInternalError, LostRankError) as error:
                failed = error
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            begins_anew = True

    return wrapper
