"""Run a function on the workers of an engine (Ray, Spark, Dask) as the ranks of one MPI world.

Each worker starts its rank in a child process (``worker_rank.py``), because MPI starts only once
per process and an aborting rank must not end the worker. First the engine's channel carries one
record per rank, ``Place``, with the address of the server that the worker of rank 0 has started.

The function ``run`` of each engine takes

    function      called as ``function(*args, **kwargs)`` on each rank, in a new process next to the
                  engine's worker. It calls init_process_group itself, like a script under mpirun.
    args, kwargs  the arguments of the function; pickled.
    ranks         number of ranks. Ranks of one node are consecutive.
    timeout       seconds for the engine to start all workers, and for all ranks to start MPI.

and returns the results of the function, by rank. It raises the exception of a rank, with the rank's
traceback as the cause, after the other ranks were ended, like an uncaught exception under mpirun.
It raises LaunchError if a rank ends without an exception, or if the engine cannot start them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

from mpicoll.errors import ArgumentError, LaunchError, MpicollError
from mpicoll.launch import launchers
from mpicoll.launch.environment import LOOPBACK, TORCH_VARIABLES
from mpicoll.launch.host_identity import addresses, node
from mpicoll.launch.joining import start_server

W = TypeVar("W")

#: Seconds from the failure of one rank until the workers of the other ranks are killed.
_EXIT_TIMEOUT_S = 10.0


class RemoteTraceback(Exception):
    """The traceback of a rank: the cause of the same exception in the caller."""


class Outcome(NamedTuple):
    """Result of one rank."""

    rank: int
    value: bytes | None = None  # the pickled result of the function; None if it did not return
    error: bytes | None = None  # the pickled exception, if there is one that can be pickled
    trace: str = ""  # the traceback, or a description of the failure
    code: int = 0  # the exit code of the process, negative for a signal


class Place(NamedTuple):
    """Where a rank will run."""

    node: str  # identifies the node
    host: str  # an address of this host that other hosts reach
    port: int  # a free port of this host
    address: str = ""  # the address of the server, on rank 0


class Worker:
    """Starts and controls the process of one rank. Runs in the engine's worker."""

    _server: subprocess.Popen[bytes] | None = None
    _process: subprocess.Popen[bytes] | None = None

    def prepare(self, size: int) -> Place:
        """Return this worker's node, host address and a free port. On rank 0 of several, also start
        the server and return its address.

        size: number of ranks, on rank 0; 0 on other ranks.
        """
        address = ""
        if size > 1:
            found, self._server = start_server(size)
            # Without MASTER_ADDR, which may be another job's in the engine's worker.
            address = found._replace(hosts=addresses()).format()
        with socket.create_server(("", 0)) as probe:  # finds a free port
            return Place(node(), addresses()[0], probe.getsockname()[1], address)

    def run(self, variables: Mapping[str, str], address: str, limit: float, call: bytes) -> Outcome:
        """Run the call on this rank and wait until its process has ended.

        variables, address: see ``assign``. limit: seconds for all ranks to connect.
        """
        # The variables of the launcher that started the engine's worker do not describe this rank.
        found = launchers.without_launcher(os.environ).items()
        kept = {name: value for name, value in found if not launchers.is_bootstrap_variable(name)}
        reader, writer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mpicoll.launch.worker_rank", str(writer)],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            env={**kept, **variables},
        )
        os.close(writer)
        with os.fdopen(reader, "rb") as answers:
            with contextlib.suppress(OSError):  # the process has ended
                self._process.stdin.write(  # type: ignore[union-attr]
                    pickle.dumps((os.getpid(), address, limit, sys.path, call))
                )
                self._process.stdin.close()  # type: ignore[union-attr]
            try:
                kind, *rest = pickle.load(answers)
            except (EOFError, pickle.UnpicklingError):
                kind, rest = "", []
            code = self._process.wait()
        self._close_server()
        rank = int(variables["RANK"])
        if kind == "value" and code == 0:
            return Outcome(rank, value=rest[0])
        if kind == "error":
            return Outcome(rank, error=rest[0], trace=rest[1])
        after = " after its function had returned" if kind == "value" else ""
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        where = f"rank {rank} on {socket.gethostname()}"
        return Outcome(rank, trace=f"{where} ended {how}{after}", code=code)

    def kill(self) -> None:
        """End the rank's process, if it runs."""
        self._close_server()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _close_server(self) -> None:
        """Let the server end with its ranks, or now if rank 0 has not connected."""
        server, self._server = self._server, None
        if server is not None:
            server.communicate()


def dump_call(
    where: str,
    ranks: int,
    dumps: Callable[[object], bytes],
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> bytes:
    """Pickle a call, and ``dumps`` for results that pickle does not support.

    Raises ArgumentError if ``ranks`` is not a positive integer.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"{where}: ranks: expected a number of at least 1, got {ranks!r}")
    return pickle.dumps((dumps, dumps((function, tuple(args), dict(kwargs or {})))))


def assign(places: Sequence[Place], rank: int) -> tuple[dict[str, str], str]:
    """Return torchrun's variables for a rank, and the address of the server.

    places: of all ranks, by rank.
    """
    nodes = [each.node for each in places]
    host = LOOPBACK if len(set(nodes)) == 1 else places[0].host
    local = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
    values = rank, len(places), *local, host, places[0].port
    return dict(zip(TORCH_VARIABLES, map(str, values), strict=True)), places[0].address


def collect(outcomes: Sequence[Outcome], size: int, where: str) -> list[Any]:
    """Return the results of the function, by rank; raise the most likely cause of a failure.

    outcomes: of all ``size`` ranks. Raises LaunchError if a rank ended without an exception.
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
    with futures.ThreadPoolExecutor(size) as pool, contextlib.ExitStack() as stack:
        for each in workers:  # at the end, so that threads stop waiting for them
            stack.callback(kill, each)
        sizes = [size] + [0] * (size - 1)  # the first worker has rank 0
        found: list[Place] = list(
            pool.map(lambda each, n: ask(each, limit, "prepare", n), workers, sizes)
        )
        nodes = [each.node for each in found]
        order = sorted(range(size), key=lambda index: nodes.index(nodes[index]))
        places = [found[index] for index in order]

        def run_rank(rank: int) -> Outcome:
            worker = workers[order[rank]]
            try:
                outcome: Outcome = ask(worker, None, "run", *assign(places, rank), limit, call)
            except Exception as error:  # the engine's error for a lost worker
                return Outcome(rank, trace=f"the worker of rank {rank} is lost: {error}")
            return outcome

        pending = {pool.submit(run_rank, rank) for rank in range(size)}
        outcomes: list[Outcome] = []
        while pending:
            left = _EXIT_TIMEOUT_S if any(one.value is None for one in outcomes) else None
            done, pending = futures.wait(pending, left, futures.FIRST_COMPLETED)
            outcomes += [one.result() for one in done]
            if not done:
                for each in workers:
                    kill(each)
    return collect(outcomes, size, where)
