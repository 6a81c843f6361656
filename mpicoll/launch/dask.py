"""Ranks on the workers of Dask: ``mpicoll.launch.dask.run``."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpicoll.errors import LaunchError
from mpicoll.launch.workers import Worker, check_ranks, dump_call, run_driven

__all__ = ["run"]

_WHERE = "mpicoll.launch.dask.run"


def run(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    timeout: float = 300.0,
    client: Any = None,
) -> list[Any]:
    """Run a function on Dask's workers, which are the ranks of one MPI world.

    function: called as ``function(*args, **kwargs)`` on each rank, in a process of its own beside
        the worker. It makes its process group itself, like a script under mpirun.
    args, kwargs: what it is called with; pickled.
    ranks: how many, at most one a worker. Ranks on one node get numbers in a row.
    timeout: seconds for the workers to answer, and for the ranks to meet.
    client: the Client; the current one where None.

    Returns what the function returned, by rank.

    Raises the exception of a rank whose function raised one, with the rank's traceback as its
    cause; the other ranks are ended. LaunchError where Dask has too few workers, where one does not
    answer, and where a rank ended without an exception. ArgumentError (a ValueError) for an
    impossible number of ranks.
    """
    import cloudpickle
    import distributed

    check_ranks(ranks, _WHERE)
    call = dump_call(cloudpickle.dumps, function, args, kwargs)
    used = client or distributed.default_client()
    found = sorted(used.nthreads())
    if len(found) < ranks:
        raise LaunchError(
            f"{_WHERE}: {ranks} ranks need {ranks} workers, one each, and Dask has {len(found)}: "
            "ask for fewer ranks, or start more workers"
        )
    job = uuid.uuid4().hex
    addresses = found[:ranks]
    actors = {
        address: used.submit(
            _Found,
            job,
            address,
            actor=True,
            workers=[address],
            allow_other_workers=False,
            pure=False,
        )
        for address in addresses
    }

    def ask(address: str, limit: float | None, method: str, *arguments: object) -> Any:
        try:
            actor = actors[address].result(limit)
            return getattr(actor, method)(*arguments).result(limit)
        except distributed.TimeoutError:
            raise LaunchError(
                f"{_WHERE}: Dask's worker {address} did not answer within {limit:g} s: see whether "
                "it is busy with other tasks (its thread has to be free), start more workers, or "
                "give a longer timeout"
            ) from None

    def kill(address: str) -> None:
        used.run(_kill, job, address, workers=[address], on_error="ignore")

    return run_driven(addresses, ask, kill, call, timeout, _WHERE)


class _Found(Worker):
    """A worker that is found again: while a method of an actor runs, no other does."""

    def __init__(self, job: str, address: str) -> None:
        _workers[job, address] = self


#: By their jobs and the addresses of Dask's workers, several of which may be in one process.
_workers: dict[tuple[str, str], Worker] = {}


def _kill(job: str, address: str) -> None:
    worker = _workers.pop((job, address), None)
    if worker is not None:
        worker.kill()
