"""Matching of operations by name: a thread of each rank agrees with the other ranks which
operations are ready.

Horovod lets every rank begin operations in any order, as backward passes do, but collectives need
one order. So a request waits until every rank has made one for the same operation and
name. (Different operations may share a name; as in Horovod, the operation is a prefix of the name.)
The engine threads of all ranks synchronize in rounds: each sends its pending requests, so all ranks
know all requests, and run the requests of every rank in the same order. Requests that do not
match fail on every rank, and later ones continue.

A round is one all_gather of a few bytes: the length and a hash of a rank's status. If all are
equal, as in most training steps, no other message is needed.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
import warnings
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

import mpicoll as dist
from mpicoll import control_messages
from mpicoll.cuda.threads import use_process_device
from mpicoll.errors import ArgumentError, ForkedError, UsageError
from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch.implementations import (
    OPERATIONS,
    Request,
    Signature,
    synchronize_devices,
)

#: Interval in seconds between rounds on a rank for which other ranks wait, while it has no new
#: requests.
_ROUND_INTERVAL_S = 0.002
#: Seconds after which a warning names the ranks that have not made a request.
_STALL_WARNING_S = 60.0
#: Maximum size in bytes of requests that are fused into one call of mpicoll.
_FUSION_MAX_BYTES = 64 * 2**20
_DIGEST_BYTES = 16


#: A request, and each rank's signature of it; None for ranks that have joined.
Ready = tuple[Request, list[Signature | None]]


class Status(NamedTuple):
    """A rank's status in a round."""

    joined: bool
    closing: bool
    requests: list[Signature]


class Engine:
    """The requests of this rank.

    group: a process group that only this engine uses.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self.failure: Exception | None = None
        self._process = os.getpid()
        self._pending: dict[str, Request] = {}
        self._counts: Counter[str] = Counter()
        self._condition = threading.Condition()
        self._has_news = self._closing = self._aborting = False
        self._join: Request | None = None
        self._gpu: int | None = None
        self._were_joined: set[int] = set()
        self._last_joined = -1
        self._thread: threading.Thread | None = None

    # --- on the threads of the program -----------------------------------------------------------

    def submit(self, request: Request, name: str | None) -> Request:
        """Begin an operation, and return the request.

        name: matches requests between ranks; None: the number of calls of this operation so far.

        Raises ArgumentError (a ValueError) if this rank's arguments are invalid, or if a request of
        this operation and name is pending; HorovodInternalError after the end; ForkedError (a
        RuntimeError) in a forked child.
        """
        operation = request.signature["operation"]
        self._check_process(operation)
        synchronize_devices([request])
        with self._condition:
            given = f"noname.{self._counts[operation]}" if name is None else name
            request.signature["name"] = f"{operation}.{given}"
            self._check_alive(request.name)
            if problem := OPERATIONS[operation].check(request.signature, self.size):
                raise ArgumentError(f"{operation}: {problem}")
            if request.name in self._pending:
                raise ArgumentError(
                    f"{operation}: name: an operation named {request.name} is pending; "
                    "use another name, or call synchronize() first"
                )
            # A rejected call is not counted: the other ranks wait for the next one.
            self._counts[operation] += name is None
            self._pending[request.name] = request
            self._wake_thread()
        return request

    def join(self, gpu: int | None) -> int:
        """Join the other ranks' reductions with zeros until all ranks have joined.

        gpu: GPU for the zeros if CUDA tensors are reduced; None without CUDA.

        Returns the rank that joined last.
        """
        self._check_process("join")
        with self._condition:
            self._check_alive("join")
            if self._join is not None:
                raise HorovodInternalError("join: this rank has already joined")
            self._gpu = gpu
            request = self._join = Request.build("join", [])
            self._wake_thread()
        request.wait()
        return self._last_joined

    def close(self, abort: bool = False) -> None:
        """End the thread once all requests are done; all ranks call.

        abort: fail the pending requests of this rank, and requests that only other ranks have made.
        """
        with self._condition:
            self._closing, self._aborting = True, abort
            if self.failure is None:
                self._wake_thread()
        if self._thread is not None:
            self._thread.join()

    def _check_process(self, where: str) -> None:
        # Before locking: the parent's thread may have held the lock during the fork.
        if os.getpid() != self._process:
            raise ForkedError(
                f"{where}: this process was forked from a rank and has no thread for operations; "
                f"call {where} in the parent process"
            )

    def _check_alive(self, name: str) -> None:
        if self.failure is not None:
            raise HorovodInternalError(f"{name}: {self.failure}") from self.failure

    def _wake_thread(self) -> None:
        self._has_news = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpicoll-horovod", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    # --- on the engine thread --------------------------------------------------------------------

    def _run(self) -> None:
        waited_for = False
        try:
            while self.failure is None:
                with self._condition:
                    self._condition.wait_for(
                        lambda: self._pending or self._join is not None or self._closing
                    )
                    if waited_for:
                        self._condition.wait_for(lambda: self._has_news, _ROUND_INTERVAL_S)
                    self._has_news = False
                    requests = dict(self._pending)
                    joined = self._join is not None
                    closing = self._closing and (self._aborting or not (requests or joined))
                use_process_device()
                waited_for = self._round(requests, joined, closing)
        except BaseException as error:
            self._end(error)

    def _round(self, requests: dict[str, Request], joined: bool, closing: bool) -> bool:
        """Run one round. Return whether other ranks wait for a request of this rank."""
        own = Status(joined, closing, [request.signature for request in requests.values()])
        statuses = self._exchange(own)
        if any(status.closing for status in statuses):
            self._end(None)
            return False
        signature = [{each["name"]: each for each in status.requests} for status in statuses]
        names = dict.fromkeys(name for each in signature for name in each)
        ready: list[Ready] = []
        waited_for = False
        for name in names:
            signatures = [each.get(name) for each in signature]
            missing = [
                rank
                for rank, each in enumerate(signatures)
                if each is None and not statuses[rank].joined
            ]
            if not missing:
                own_request = requests.get(name)
                if own_request is None:  # this rank has joined
                    known = next(each for each in signatures if each is not None)
                    own_request = Request.placeholder(known, self._gpu)
                ready.append((own_request, signatures))
            else:
                waited_for |= self.rank in missing
                self._warn(requests.get(name), missing)
        self._run_ready(ready)
        with self._condition:
            for request, _ in ready:
                self._pending.pop(request.name, None)
        for request, _ in ready:
            request.done.set()
        self._release_joined({rank for rank, status in enumerate(statuses) if status.joined})
        return waited_for

    def _exchange(self, own: Status) -> list[Status]:
        text = control_messages.encode(own)
        head = np.frombuffer(
            len(text).to_bytes(8, "little")
            + hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(),
            np.uint8,
        )
        heads = np.empty((self.size, head.size), np.uint8)
        dist.all_gather_single(heads, head, group=self.group)
        if (heads == head).all():
            return [own] * self.size
        sizes = [int.from_bytes(each[:8].tobytes(), "little") for each in heads]
        control_messages.check_sizes(sizes)
        texts = [np.empty(size, np.uint8) for size in sizes]
        dist.all_gather(texts, np.frombuffer(text, np.uint8), group=self.group)
        return [
            control_messages.decode(each.tobytes(), Status, rank) for rank, each in enumerate(texts)
        ]

    def _run_ready(self, ready: list[Ready]) -> None:
        """Run operations in order, fused where possible; operations that do not match fail."""
        batch: list[Ready] = []
        for request, signatures in ready:
            problem = _find_mismatch(signatures)
            if problem:
                request.fail(problem)
                continue
            if batch and not self._can_fuse(batch, request):
                self._run_batch(batch)
                batch = []
            batch.append((request, signatures))
        if batch:
            self._run_batch(batch)

    @staticmethod
    def _can_fuse(batch: list[Ready], request: Request) -> bool:
        first = batch[0][0].signature
        operation = OPERATIONS[request.signature["operation"]]
        fusion_key = operation.fusion_key(request.signature)
        nbytes = sum(each.nbytes() for each, _ in batch) + request.nbytes()
        return (
            fusion_key is not None
            and first["operation"] == request.signature["operation"]
            and fusion_key == operation.fusion_key(first)
            and nbytes <= _FUSION_MAX_BYTES
        )

    def _run_batch(self, batch: list[Ready]) -> None:
        requests = [request for request, _ in batch]
        try:
            operation = requests[0].signature["operation"]
            OPERATIONS[operation].run(self.group, requests, batch[0][1])
            synchronize_devices(requests)
        except UsageError as error:  # raised on every rank before anything was sent
            for request in requests:
                request.fail(error)

    def _release_joined(self, joined: set[int]) -> None:
        """Record which rank joined last; complete ``join`` once all ranks have joined."""
        new = joined - self._were_joined
        if new:
            self._last_joined = max(new)
        self._were_joined = joined
        if len(joined) == self.size:
            self._were_joined = set()
            with self._condition:
                request, self._join = self._join, None
                # Ranks that joined early have made fewer calls without a name: restart the count.
                self._counts.clear()
            assert request is not None
            request.done.set()

    def _warn(self, request: Request | None, missing: list[int]) -> None:
        """Warn once about missing ranks: no call of mpicoll blocks, so no hang is reported."""
        if request is None or time.monotonic() - request.began < _STALL_WARNING_S:
            return
        request.began = math.inf
        who = ", ".join(map(str, missing))
        warnings.warn(
            f"horovod: {request.name} waits for rank{'s' * (len(missing) > 1)} {who}, which "
            f"{'have' if len(missing) > 1 else 'has'} not begun it for {_STALL_WARNING_S:.0f} s",
            stacklevel=1,
        )

    def _end(self, error: BaseException | None) -> None:
        failure = error or HorovodInternalError("Horovod has been shut down")
        with self._condition:
            self.failure = failure if isinstance(failure, Exception) else RuntimeError(str(failure))
            left = [*self._pending.values(), *([self._join] if self._join else [])]
            self._pending, self._join = {}, None
        for request in left:
            request.fail(failure)
            request.done.set()


def _find_mismatch(signatures: list[Signature | None]) -> str | None:
    """Describe the collective mismatch of an operation, the same on all ranks, or return None."""
    present = {rank: each for rank, each in enumerate(signatures) if each is not None}
    operation = OPERATIONS[next(iter(present.values()))["operation"]]
    fields = {rank: operation.must_match(signature) for rank, signature in present.items()}
    first = next(iter(fields.values()))
    for word, value in first.items():
        if any(each[word] != value for each in fields.values()):
            each = ", ".join(f"rank {rank}: {each[word]}" for rank, each in fields.items())
            return (
                f"collective mismatch: the ranks' arguments differ in {word}: {each}; expected the "
                "same on all"
            )
    if len(present) < len(signatures) and not operation.allows_joined(next(iter(present.values()))):
        return "not supported while ranks have joined, with join()"
    return None
