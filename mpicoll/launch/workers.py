"""A function on workers of another engine, such as Ray or Spark, as the ranks of one MPI world.

Each worker starts its rank as a process of its own (``worker_rank.py``): MPI starts once in a
process, and a rank that aborts must not take the engine's worker along. What the ranks have to know
of each other goes over the engine's own channel, and that is little: a worker says where its rank
runs, rank 0's also where the server is (``server.py``), and all of it goes to every worker.

A rank whose function raises ends the others, as an exception does that nobody catches under mpirun.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mpicoll.errors import ArgumentError, LaunchError, MpicollError
from mpicoll.launch import launchers
from mpicoll.launch.host_identity import addresses, node

__all__ = ["Outcome", "Ready", "RemoteTraceback", "Worker", "assign", "check_ranks", "collect",
           "dump_call", "run_driven"]  # fmt: skip

W = TypeVar("W")

#: Seconds that the other ranks have to end by themselves once one has failed.
_GRACE = 10.0
#: Seconds beyond the time to start that the driver waits for an answer of a worker.
_SLACK = 30.0


class RemoteTraceback(Exception):
    """Where a rank raised its exception: the cause of the same exception in the caller."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    value:  what the function returned, pickled; None where it did not return.
    error:  the exception, pickled; None where there is none, or where it cannot be pickled.
    trace:  the traceback as text, or what else is known of a rank without a value.
    code:   the exit code of its process, negative for a signal.
    """

    rank: int
    value: bytes | None = None
    error: bytes | None = None
    trace: str = ""
    code: int = 0


@dataclass(frozen=True)
class Ready:
    """A rank that waits for the others.

    node:    names what shares memory.
    host:    an address of this host that others reach.
    port:    free on it.
    address: where the server is, as rank 0 publishes it; "" on other ranks.
    failure: how it ended, if it did.
    """

    rank: int
    node: str
    host: str
    port: int
    address: str = ""
    failure: Outcome | None = None


class Worker:
    """One rank, on the side of the engine's worker that starts it."""

    _process: subprocess.Popen[bytes] | None = None

    def place(self) -> str:
        """Return the node."""
        return node()

    def start(self, rank: int, size: int, limit: float) -> Ready:
        """Start the rank's process, and wait until it waits for the others.

        limit: seconds for all ranks to meet and to start MPI.
        """
        self._rank = rank
        reader, answers = os.pipe()
        self._answers = os.fdopen(reader, "rb")
        # The launcher of the engine's workers has told this process nothing of these ranks.
        kept = {
            name: value
            for name, value in os.environ.items()
            if (launchers.is_job_variable(name) or not launchers.is_launcher_variable(name))
            and not launchers.is_bootstrap_variable(name)
        }
        own = str(Path(__file__).parents[2])
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [kept.get("PYTHONPATH"), own]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mpicoll.launch.worker_rank", str(answers)],
            stdin=subprocess.PIPE,
            pass_fds=[answers],
            env=kept,
        )
        os.close(answers)
        self._tell((os.getpid(), rank, size, limit, sys.path))
        with socket.create_server(("", 0)) as probe:  # the port is free now, if not for ever
            port = probe.getsockname()[1]
        kind, *rest = self._hear()
        where = rank, node(), addresses()[0], port
        if kind == "ready":
            return Ready(*where, address=rest[0])
        return Ready(*where, failure=self._end(kind, rest))

    def finish(self, told: tuple[Mapping[str, str], str, bytes]) -> Outcome:
        """Tell the rank of the others, and wait until it has ended.

        told: what ``assign`` returns for this rank.
        """
        self._tell(told)
        kind, *rest = self._hear()
        return self._end(kind, rest)

    def kill(self) -> None:
        """End the rank's process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _tell(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and what it answers says why
            self._process.stdin.write(pickle.dumps(message))
            self._process.stdin.flush()

    def _hear(self) -> tuple[Any, ...]:
        try:
            found: tuple[Any, ...] = pickle.load(self._answers)
        except (EOFError, pickle.UnpicklingError):
            return ("nothing",)
        return found

    def _end(self, kind: str, rest: list[Any]) -> Outcome:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        code = self._process.wait()
        self._answers.close()
        if kind == "value" and code == 0:
            return Outcome(self._rank, value=rest[0])
        if kind == "error":
            return Outcome(self._rank, error=rest[0], trace=rest[1])
        after = " after its function had returned" if kind == "value" else ""
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return Outcome(
            self._rank,
            trace=f"rank {self._rank} on {socket.gethostname()} ended {how}{after}",
            code=code,
        )


def check_ranks(ranks: int, where: str) -> None:
    """Raise ArgumentError for an impossible number of ranks."""
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"{where}: ranks: expected a number of at least 1, got {ranks!r}")


def dump_call(
    dumps: Callable[[object], bytes],
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> bytes:
    """Pickle a call, with what pickles its results where pickle cannot."""
    return pickle.dumps((dumps, dumps((function, tuple(args), dict(kwargs or {})))))


def assign(
    ready: Sequence[Ready], call: bytes
) -> list[tuple[Mapping[str, str], str, bytes]]:  # fmt: skip
    """Return what each rank is told: variables, where the server is, and the call.

    ready: of all ranks, in their order.
    """
    nodes = [each.node for each in ready]
    host = "127.0.0.1" if len(set(nodes)) == 1 else ready[0].host
    return [
        (
            {
                "RANK": str(each.rank),
                "WORLD_SIZE": str(len(ready)),
                "LOCAL_RANK": str(nodes[: each.rank].count(each.node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(each.node)),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(ready[0].port),
            },
            ready[0].address,
            call,
        )
        for each in ready
    ]


def collect(outcomes: Sequence[Outcome], size: int, where: str) -> list[Any]:
    """Return what the function returned, by rank; raise the exception of a rank instead.

    outcomes: of all ``size`` ranks, or of those that have failed.

    Of several exceptions the one that is no consequence of another, see ``_order``. LaunchError
    where a rank has ended without an exception.
    """
    found = []
    for one in (each for each in outcomes if each.value is None):
        error: object = None
        if one.error is not None:
            with contextlib.suppress(Exception):  # a class that is not known here
                error = pickle.loads(one.error)
        found.append((one, error))
    for one, error in sorted(found, key=lambda pair: _order(*pair)):
        cause = RemoteTraceback(f"on rank {one.rank}:\n{one.trace}")
        if isinstance(error, Exception):
            raise error from cause
        raise LaunchError(
            f"{where}: rank {one.rank} of {size} did not return: "
            f"{one.trace.strip().splitlines()[-1]}"
        ) from cause
    ordered = sorted(outcomes, key=lambda one: one.rank)
    return [pickle.loads(one.value) for one in ordered if one.value is not None]


def _order(one: Outcome, error: object) -> int:
    """Rank what may have ended a job: exceptions of the function before those of mpicoll, which
    tell of ranks that have gone; then signals, before the exit code with which others end.
    """
    if one.error is not None or one.code == 1:
        return 0 if one.error is not None and not isinstance(error, MpicollError) else 2
    return 1 if one.code < 0 else 3


def run_driven(
    workers: Sequence[W],
    ask: Callable[..., Any],
    kill: Callable[[W], None],
    call: bytes,
    limit: float,
    where: str,
) -> list[Any]:
    """Run a call on workers that the caller reaches one by one; return the results by rank.

    workers: hold a ``Worker`` each. Ranks on one node get numbers in a row.
    ask:     ``ask(worker, seconds or None, method, *arguments)`` calls a method and waits.
    kill:    ends a worker, so that what waits for it raises.
    """
    size = len(workers)
    with futures.ThreadPoolExecutor(size) as pool, _killing(workers, kill):
        nodes = list(pool.map(lambda each: ask(each, limit, "place"), workers))
        order = sorted(range(size), key=lambda index: nodes.index(nodes[index]))
        ranked = [workers[index] for index in order]
        wait = limit + _SLACK
        ready: list[Ready] = list(
            pool.map(lambda each: ask(each[1], wait, "start", each[0], size, limit),
                     enumerate(ranked))
        )  # fmt: skip
        failures = [each.failure for each in ready if each.failure is not None]
        if failures:
            collect(failures, size, where)
        pending = {
            pool.submit(_finish, ask, rank, ranked[rank], told)
            for rank, told in enumerate(assign(ready, call))
        }
        outcomes: list[Outcome] = []
        while pending:
            left = _GRACE if any(one.value is None for one in outcomes) else None
            done, pending = futures.wait(pending, left, futures.FIRST_COMPLETED)
            outcomes += [one.result() for one in done]
            if not done:
                for each in ranked:
                    kill(each)
    return collect(outcomes, size, where)


@contextlib.contextmanager
def _killing(workers: Sequence[W], kill: Callable[[W], None]) -> Iterator[None]:
    """End all workers with the block, however it ends: threads may still wait for them."""
    try:
        yield
    finally:
        for each in workers:
            kill(each)


def _finish(ask: Callable[..., Any], rank: int, worker: object, told: object) -> Outcome:
    try:
        outcome: Outcome = ask(worker, None, "finish", told)
    except Exception as error:  # whatever the engine says of a worker that is gone
        return Outcome(rank, trace=f"the worker of rank {rank} is gone: {error}")
    return outcome
