"""Handshakes: the members of a group wait for each other, and report the missing ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpicoll.core.work import deadline

if TYPE_CHECKING:
    from mpi4py import MPI

#: Messages to the first member, and its replies, which are also the outcomes of a handshake.
_HERE, _WITHDRAWN, COMPLETE, INCOMPLETE, DIFFERENT = range(1, 6)
#: Tag of all messages. Other messages on the communicator use tag 0.
_TAG = 1
#: Time that a rank, after its timeout, waits for the reply of the first member, which may be
#: COMPLETE.
_REPLY_TIMEOUT_S = 1.0
_POLL_INTERVAL_S = 100e-6
#: Sends that are not complete, with their buffers.
_pending_sends: list[tuple[MPI.Request, npt.NDArray[np.int64]]] = []


class Handshakes:
    """The handshakes over a communicator, one after the other."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        #: Message and mark by source and number of the handshake.
        self._received: dict[tuple[int, int], tuple[int, int]] = {}
        self.count = 0  # for callers that number their handshakes

    def join(
        self, number: int, members: Sequence[int], mark: int, limit: float | None
    ) -> tuple[int, list[int]]:
        """Wait until all members have called. Each notifies the first one, which replies to all.

        number: number of the handshake, which no earlier one of the communicator has had.
        members: ranks in the communicator, the same on all of them.
        mark: a number that must be the same on all members.
        limit: timeout in seconds. A rank that times out withdraws, so that all have one outcome.

        Returns the outcome and, on the first member, the ranks that have another mark, are missing
        or, if none is missing, have withdrawn; elsewhere the first member if it is missing.
        """
        me, first = self._comm.Get_rank(), members[0]
        end = deadline(limit)
        if me == first:
            return self._coordinate(number, [r for r in members if r != me], mark, end)
        self._send(first, number, _HERE, mark)
        has_withdrawn = False
        while True:
            self._receive([first])
            outcome, _ = self._received.pop((first, number), (0, 0))
            if outcome:
                return outcome, []
            if time.monotonic() > end:
                if has_withdrawn:
                    return INCOMPLETE, [first]
                has_withdrawn, end = True, time.monotonic() + _REPLY_TIMEOUT_S
                self._send(first, number, _WITHDRAWN, mark)
            time.sleep(_POLL_INTERVAL_S)

    def _coordinate(
        self, number: int, others: list[int], mark: int, end: float
    ) -> tuple[int, list[int]]:
        while True:
            self._receive(others)
            received = {rank: self._received.get((rank, number), (0, 0)) for rank in others}
            different = [rank for rank, (word, its) in received.items() if word and its != mark]
            missing = [rank for rank, (word, _) in received.items() if not word]
            # A rank that has withdrawn does not call again with this number.
            withdrawn = [rank for rank, (word, _) in received.items() if word == _WITHDRAWN]
            if different or withdrawn or not missing or time.monotonic() > end:
                break
            time.sleep(_POLL_INTERVAL_S)
        late = missing or withdrawn
        outcome = DIFFERENT if different else INCOMPLETE if late else COMPLETE
        for rank in others:
            self._received.pop((rank, number), None)
            self._send(rank, number, outcome, mark)
        return outcome, different or late

    def _send(self, rank: int, *words: int) -> None:
        """Send a message without waiting for the receiver."""
        box = np.array(words, np.int64)
        _pending_sends.append((self._comm.Isend(box, rank, _TAG), box))
        _pending_sends[:] = [one for one in _pending_sends if not one[0].Test()]

    def _receive(self, sources: Sequence[int]) -> None:
        """Receive messages from each source separately, because a lost rank sends nothing more."""
        for source in sources:
            while self._comm.Iprobe(source, _TAG):
                box = np.zeros(3, np.int64)
                self._comm.Irecv(box, source, _TAG).Wait()
                number, word, mark = box.tolist()
                self._received[source, number] = word, mark
