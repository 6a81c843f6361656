"""Operations matched by name: a thread of each process set has the ranks agree what is ready.

Horovod lets every rank begin operations in an order of its own, as backward passes do. A collective
needs one order. So a request waits until every rank of the set has made one of its kind and name:
kinds may share names, as in Horovod, which puts the kind before each. The thread
meets those of the other ranks in rounds: each says what it has, all know what all have, and all
carry out what all have, in the same order. Requests that disagree fail on every rank, and the next
ones go on.

A round is one all_gather of a few bytes: the length and the digest of what a rank says. Where all
have the same, as in most steps of a training, it is known without another message.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import mpicoll as dist
from mpicoll import control_messages
from mpicoll.cuda.threads import use_process_device
from mpicoll.errors import ArgumentError, ForkedError, UsageError
from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch.kinds import KINDS, Call, Facts, synchronize_devices
from mpicoll.horovod.torch.timeline import TIMELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Engine", "Request"]

#: Seconds between rounds of a rank that others wait for, while it has nothing new to say.
_PAUSE = 0.002
#: Seconds after which a request that some ranks have not made is worth a warning.
_STALLED = 60.0
#: Bytes that one call of mpicoll reduces for several requests.
_FUSED = 64 * 2**20
_DIGEST = 16


@dataclass(eq=False)
class Request:
    """An operation that has begun: what ``poll`` and ``synchronize`` take.

    call: what this rank brings to it.
    facts: what the other ranks have to know of it.
    """

    call: Call
    facts: Facts
    done: threading.Event = field(default_factory=threading.Event)
    error: HorovodInternalError | None = None
    began: float = field(default_factory=time.monotonic)
    _has_warned: bool = False

    def fail(self, error: HorovodInternalError) -> None:
        """End it with an error."""
        self.error = error
        self.done.set()

    def wait(self) -> Any:
        """Wait for it; return its result. Raises HorovodInternalError if it failed.

        Warns after a minute.
        """
        if not self.done.wait(_STALLED):
            # The thread cannot say who is missing while a rank that has begun nothing keeps it.
            self.warn(f"has not ended within {_STALLED:.0f} s; some rank may not have begun it")
            self.done.wait()
        if self.error is not None:
            raise HorovodInternalError(str(self.error)) from self.error.__cause__
        return self.call.result()

    def warn(self, text: str) -> None:
        """Say what keeps it, once. text: goes on after its name."""
        if not self._has_warned:
            self._has_warned = True
            name = self.facts.get("name", self.call.kind)
            warnings.warn(f"horovod: {name} {text}", stacklevel=3)


class Said(NamedTuple):
    """What a rank says in a round."""

    joined: bool
    closing: bool
    requests: list[Facts]


class Engine:
    """The requests of this rank in one process set.

    group: a process group that nobody else uses.
    ranks: the global ranks of its members, in its order.
    """

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group, self.ranks = group, list(ranks)
        self.size, self.rank = len(self.ranks), dist.get_rank(group)
        self.failure: Exception | None = None
        self._process = os.getpid()
        self._pending: dict[str, Request] = {}
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._news = self._closing = self._abandons = False
        self._join: Request | None = None
        self._gpu: int | None = None
        self._were_joined: set[int] = set()
        self._last_joined = -1
        self._thread: threading.Thread | None = None

    # --- on the program's threads ----------------------------------------------------------------

    def submit(self, call: Call, name: str | None, **facts: Any) -> Request:
        """Begin an operation.

        name: what the other ranks call it; None: the number of such calls so far.
        facts: see ``Call.facts``.

        Raises ArgumentError (a ValueError) for what is wrong with this rank's part alone, and if an
        operation of this kind and name is on its way, HorovodInternalError after the end,
        ForkedError (a RuntimeError) in a forked child.
        """
        self._check_process(call.kind)
        synchronize_devices([call])
        with self._changed:
            is_counted = name is None
            name = f"{call.kind}.{f'noname.{self._counts[call.kind]}' if is_counted else name}"
            request = Request(call, call.facts(name, **facts))
            self._check_alive(name)
            if wrong := KINDS[call.kind].check(request.facts, self.size):
                raise ArgumentError(f"{call.kind}: {wrong}")
            if name in self._pending:
                raise ArgumentError(
                    f"{call.kind}: name: {name} is that of an operation that is not done; "
                    "expected another name, or synchronize() first"
                )
            # A call that was refused is none: the next one is the one that others wait for.
            self._counts[call.kind] += is_counted
            self._pending[name] = request
            self._tell()
        return request

    def join(self, gpu: int | None) -> int:
        """Take part in the other ranks' reductions, with zeros, until all ranks have joined.

        gpu: where zeros are for CUDA tensors of the others; None without CUDA.

        Returns the rank that joined last.
        """
        self._check_process("join")
        with self._changed:
            self._check_alive("join")
            if self._join is not None:
                raise HorovodInternalError("join: this rank has joined already")
            self._gpu = gpu
            request = self._join = Request(Call("join", []), {})
            self._tell()
        request.wait()
        return self._last_joined

    def close(self, abandon: bool = False) -> None:
        """End the thread when all that is pending is done; all ranks of the set call.

        abandon: what is pending on this rank fails, and what other ranks begin.
        """
        with self._changed:
            self._closing, self._abandons = True, abandon
            if self.failure is None:
                self._tell()
        if self._thread is not None:
            self._thread.join()

    def _check_process(self, where: str) -> None:
        # First of all: the thread of the parent may have held the lock.
        if os.getpid() != self._process:
            raise ForkedError(
                f"{where}: this process was forked from a rank, and has no thread that carries it "
                "out; begin operations in the rank"
            )

    def _check_alive(self, name: str) -> None:
        if self.failure is not None:
            raise HorovodInternalError(f"{name}: {self.failure}") from self.failure

    def _tell(self) -> None:
        self._news = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpicoll-horovod", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # --- on its own thread -----------------------------------------------------------------------

    def _run(self) -> None:
        waited_for = False
        try:
            while self.failure is None:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._pending or self._join is not None or self._closing
                    )
                    if waited_for:
                        self._changed.wait_for(lambda: self._news, _PAUSE)
                    self._news = False
                    requests = dict(self._pending)
                    joined = self._join is not None
                    closing = self._closing and (self._abandons or not (requests or joined))
                use_process_device()
                waited_for = self._round(requests, joined, closing)
        except BaseException as error:
            self._end(error)

    def _round(self, requests: dict[str, Request], joined: bool, closing: bool) -> bool:
        """Meet the other ranks. Return whether they wait for some that this rank has not made."""
        own = Said(joined, closing, [request.facts for request in requests.values()])
        TIMELINE.cycle()
        everybody = self._exchange(own)
        if any(said.closing for said in everybody):
            self._end(None)
            return False
        facts = [{each["name"]: each for each in said.requests} for said in everybody]
        for rank, each in zip(self.ranks, facts, strict=True):
            TIMELINE.told(each, rank)
        names = dict.fromkeys(name for each in facts for name in each)
        ready: list[tuple[Request, list[Facts | None]]] = []
        waited_for = False
        for name in names:
            known = [each.get(name) for each in facts]
            missing = [
                rank
                for rank, each in enumerate(known)
                if each is None and not everybody[rank].joined
            ]
            if not missing:
                request = requests.get(name)
                ready.append((request or self._stand_in(known), known))
                TIMELINE.runs(name)
            else:
                waited_for |= self.rank in missing
                self._warn(requests.get(name), missing)
        self._carry_out(ready)
        with self._changed:
            for request, _ in ready:
                self._pending.pop(request.facts["name"], None)
        for request, _ in ready:
            TIMELINE.done(request.facts["name"])
            request.done.set()
        self._note_joined({rank for rank, said in enumerate(everybody) if said.joined})
        return waited_for

    def _exchange(self, own: Said) -> list[Said]:
        """Tell the other ranks; return what each of them says."""
        text = control_messages.encode(own)
        head = np.frombuffer(
            len(text).to_bytes(8, "little") + hashlib.blake2b(text, digest_size=_DIGEST).digest(),
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
            control_messages.decode(each.tobytes(), Said, rank) for rank, each in enumerate(texts)
        ]

    def _stand_in(self, known: list[Facts | None]) -> Request:
        """Return what a rank that has joined brings to the others' operation."""
        facts = next(each for each in known if each is not None)
        return Request(Call.stand_in(facts, self._gpu), facts)

    def _carry_out(self, ready: list[tuple[Request, list[Facts | None]]]) -> None:
        """Run operations in order; those that disagree fail. What can go together does."""
        batch: list[tuple[Request, list[Facts | None]]] = []
        for request, known in ready:
            wrong = _disagreement(known, self.ranks)
            if wrong:
                request.error = HorovodInternalError(f"{request.facts['name']}: {wrong}")
                continue
            if batch and not self._fits(batch, request):
                self._perform(batch)
                batch = []
            batch.append((request, known))
        if batch:
            self._perform(batch)

    @staticmethod
    def _fits(batch: list[tuple[Request, list[Facts | None]]], request: Request) -> bool:
        together = KINDS[request.call.kind].together(request.facts)
        first = batch[0][0]
        return (
            together is not None
            and first.call.kind == request.call.kind
            and together == KINDS[first.call.kind].together(first.facts)
            and sum(each.call.nbytes() for each, _ in batch) + request.call.nbytes() <= _FUSED
        )

    def _perform(self, batch: list[tuple[Request, list[Facts | None]]]) -> None:
        try:
            calls = [request.call for request, _ in batch]
            KINDS[calls[0].kind].perform(self, calls, batch[0][1])
            synchronize_devices(calls)
        except UsageError as error:  # raised before anything was sent, on every rank
            for request, _ in batch:
                request.error = HorovodInternalError(f"{request.facts['name']}: {error}")
                request.error.__cause__ = error

    def _note_joined(self, joined: set[int]) -> None:
        """Remember who joined last; when all have, let them go."""
        new = joined - self._were_joined
        if new:
            self._last_joined = self.ranks[max(new)]
        self._were_joined = joined
        if len(joined) == self.size:
            self._were_joined = set()
            with self._changed:
                request, self._join = self._join, None
                # Ranks that joined early have begun fewer calls without a name: they begin anew.
                self._counts.clear()
            assert request is not None
            request.done.set()

    def _warn(self, request: Request | None, missing: list[int]) -> None:
        if request is None or time.monotonic() - request.began < _STALLED:
            return
        who = ", ".join(str(self.ranks[rank]) for rank in missing)
        request.warn(
            f"waits for rank{'s' * (len(missing) > 1)} {who}, which "
            f"{'have' if len(missing) > 1 else 'has'} not begun it for {_STALLED:.0f} s"
        )

    def _end(self, error: BaseException | None) -> None:
        """Fail what is pending, and all that comes."""
        failure = error or HorovodInternalError("the process set has been shut down")
        with self._changed:
            self.failure = failure if isinstance(failure, Exception) else RuntimeError(str(failure))
            left = [*self._pending.values(), *([self._join] if self._join else [])]
            self._pending, self._join = {}, None
        for request in left:
            raised = HorovodInternalError(f"{request.facts.get('name', 'join')}: {failure}")
            raised.__cause__ = failure
            request.fail(raised)


def _disagreement(known: list[Facts | None], ranks: list[int]) -> str | None:
    """Return what is wrong with an operation, the same on all ranks; None if nothing is."""
    present = {ranks[i]: facts for i, facts in enumerate(known) if facts is not None}
    kind = KINDS[next(iter(present.values()))["kind"]]
    words = {rank: kind.common(facts) for rank, facts in present.items()}
    first = next(iter(words.values()))
    for word, value in first.items():
        if any(each[word] != value for each in words.values()):
            each = ", ".join(f"rank {rank}: {said[word]}" for rank, said in words.items())
            return f"the ranks' arguments differ in {word}: {each}; expected the same on all"
    if len(present) < len(known) and not kind.with_joined(next(iter(present.values()))):
        return "not possible while ranks have joined, with join()"
    return None
