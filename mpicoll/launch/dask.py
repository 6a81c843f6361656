"""Run a function on Dask workers as the ranks of one MPI world: ``mpicoll.launch.dask.run``."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpicoll.errors import LaunchError
from mpicoll.launch.workers import Worker, dump_call, run_driven

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
    """Run a function on Dask workers, one rank per worker; see ``mpicoll.launch.workers``.

    ranks: at most the number of workers.
    client: the Client; None: the current one.
    """
    import cloudpickle
    import distributed

    call = dump_call(_WHERE, ranks, cloudpickle.dumps, function, args, kwargs)
    used = client or distributed.default_client()
    found = sorted(used.nthreads())
    if len(found) < ranks:
        raise LaunchError(
            f"{_WHERE}: {ranks} ranks need {ranks} workers, one each, and Dask has {len(found)}: "
            "request fewer ranks or start more workers"
        )
    job = uuid.uuid4().hex
    addresses = found[:ranks]
    actors = {
        address: used.submit(
            _RegisteredWorker,
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
                f"{_WHERE}: Dask's worker {address} did not answer within {limit:g} s. It may be "
                "busy with other tasks (its thread has to be free). Start more workers or pass a "
                "longer timeout"
            ) from None

    def kill(address: str) -> None:
        used.run(_kill, job, address, workers=[address], on_error="ignore")

    return run_driven(addresses, ask, kill, call, timeout, _WHERE)


class _RegisteredWorker(Worker):
    """A worker that ``_kill`` finds, because an actor runs only one method at a time."""

    def __init__(self, job: str, address: str) -> None:
        _workers[job, address] = self


#: By job and address of the Dask worker. One process may contain several Dask workers.
_workers: dict[tuple[str, str], Worker] = {}


def _kill(job: str, address: str) -> None:
    worker = _workers.pop((job, address), None)
    if worker is not None:
        worker.kill()
