"""Run a function on the workers of an engine (Ray, Spark, Dask) as the ranks of one MPI world.

Each worker starts its rank in a child process (``worker_rank.py``), because MPI starts only once
per process and an aborting rank must not end the worker. The engine's channel carries one record
per rank: its node, and on rank 0 the address of the server (``server.py``).

An exception of the function ends all ranks, like an uncaught exception under mpirun.
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

#: Seconds from the failure of one rank until the workers of the other ranks are killed.
_EXIT_TIMEOUT_S = 10.0
#: Seconds beyond the start timeout that the driver waits for the answer of a worker.
_ANSWER_MARGIN_S = 30.0


class RemoteTraceback(Exception):
    """The traceback of a rank: the cause of the same exception in the caller."""


@dataclass(frozen=True)
class Outcome:
    """Result of one rank.

    value:  the pickled result of the function; None if it did not return.
    error:  the pickled exception; None without an exception, or if it cannot be pickled.
    trace:  the traceback as text, or a description of the failure.
    code:   the exit code of the process, negative for a signal.
    """

    rank: int
    value: bytes | None = None
    error: bytes | None = None
    trace: str = ""
    code: int = 0


@dataclass(frozen=True)
class Ready:
    """Record of a rank that is ready to start MPI.

    node:    identifies the node.
    host:    an address of this host that other hosts reach.
    port:    a free port of this host.
    address: the address of the server, on rank 0; "" on other ranks.
    failure: the outcome of a rank that failed before it was ready.
    """

    rank: int
    node: str
    host: str
    port: int
    address: str = ""
    failure: Outcome | None = None


class Worker:
    """Starts and controls the process of one rank. Runs in the engine's worker."""

    _process: subprocess.Popen[bytes] | None = None

    def node(self) -> str:
        """Return the identifier of the node."""
        return node()

    def start(self, rank: int, size: int, limit: float) -> Ready:
        """Start the rank's process and wait until it is ready.

        limit: seconds for all ranks to connect and to start MPI.
        """
        self._rank = rank
        reader, answers = os.pipe()
        self._answers = os.fdopen(reader, "rb")
        # The variables of the launcher that started the engine's worker do not describe this rank.
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
        self._send((os.getpid(), rank, size, limit, sys.path))
        with socket.create_server(("", 0)) as probe:  # finds a free port
            port = probe.getsockname()[1]
        kind, *rest = self._receive()
        where = rank, node(), addresses()[0], port
        if kind == "ready":
            return Ready(*where, address=rest[0])
        return Ready(*where, failure=self._end(kind, rest))

    def finish(self, assignment: tuple[Mapping[str, str], str, bytes]) -> Outcome:
        """Send the rank its assignment (see ``assign``) and wait until its process has ended."""
        self._send(assignment)
        kind, *rest = self._receive()
        return self._end(kind, rest)

    def kill(self) -> None:
        """End the rank's process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _send(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended; ``_end`` reports why
            self._process.stdin.write(pickle.dumps(message))
            self._process.stdin.flush()

    def _receive(self) -> tuple[Any, ...]:
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
    """Raise ArgumentError if ``ranks`` is not a positive integer."""
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"{where}: ranks: expected a number of at least 1, got {ranks!r}")


def dump_call(
    dumps: Callable[[object], bytes],
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> bytes:
    """Pickle a call, and ``dumps`` for results that pickle does not support."""
    return pickle.dumps((dumps, dumps((function, tuple(args), dict(kwargs or {})))))


def assign(
    ready: Sequence[Ready], call: bytes
) -> list[tuple[Mapping[str, str], str, bytes]]:  # fmt: skip
    """Return the assignment of each rank: variables, address of the server, and the call.

    ready: the records of all ranks, by rank.
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
    """Return the results of the function, by rank; raise the exception of a failed rank.

    outcomes: of all ``size`` ranks, or only of the failed ranks.

    If several ranks raised, raises the most likely cause (see ``_order``). Raises LaunchError if a
    rank ended without an exception.
    """
    found = []
    for one in (each for each in outcomes if each.value is None):
        error: object = None
        if one.error is not None:
            with contextlib.suppress(Exception):  # the class may not exist in this process
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
    """Sort key, most likely cause first: an exception of the function, a signal, an exception of
    mpicoll (it reports other ranks), an exit code (the other ranks end with it).
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
    """Run a call on the given workers; return the results by rank.

    workers: each has a ``Worker``. Ranks of one node are consecutive.
    ask:     ``ask(worker, seconds or None, method, *arguments)`` calls a method and waits.
    kill:    ends a worker; a pending ``ask`` then raises.
    """
    size = len(workers)
    with futures.ThreadPoolExecutor(size) as pool, _killing(workers, kill):
        nodes = list(pool.map(lambda each: ask(each, limit, "node"), workers))
        order = sorted(range(size), key=lambda index: nodes.index(nodes[index]))
        ranked = [workers[index] for index in order]
        wait = limit + _ANSWER_MARGIN_S
        ready: list[Ready] = list(
            pool.map(lambda each: ask(each[1], wait, "start", each[0], size, limit),
                     enumerate(ranked))
        )  # fmt: skip
        failures = [each.failure for each in ready if each.failure is not None]
        if failures:
            collect(failures, size, where)
        pending = {
            pool.submit(_finish, ask, rank, ranked[rank], assignment)
            for rank, assignment in enumerate(assign(ready, call))
        }
        outcomes: list[Outcome] = []
        while pending:
            left = _EXIT_TIMEOUT_S if any(one.value is None for one in outcomes) else None
            done, pending = futures.wait(pending, left, futures.FIRST_COMPLETED)
            outcomes += [one.result() for one in done]
            if not done:
                for each in ranked:
                    kill(each)
    return collect(outcomes, size, where)


@contextlib.contextmanager
def _killing(workers: Sequence[W], kill: Callable[[W], None]) -> Iterator[None]:
    """Kill all workers at the end of the block, so that threads stop waiting for them."""
    try:
        yield
    finally:
        for each in workers:
            kill(each)


def _finish(ask: Callable[..., Any], rank: int, worker: object, assignment: object) -> Outcome:
    try:
        outcome: Outcome = ask(worker, None, "finish", assignment)
    except Exception as error:  # the engine's error for a lost worker
        return Outcome(rank, trace=f"the worker of rank {rank} is lost: {error}")
    return outcome
