"""Ranks on the workers of Ray: ``mpicoll.launch.ray.run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpicoll.errors import LaunchError
from mpicoll.launch.workers import Worker, check_ranks, dump_call, run_driven

__all__ = ["run"]

_WHERE = "mpicoll.launch.ray.run"


def run(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    timeout: float = 300.0,
    **options: Any,
) -> list[Any]:
    """Run a function on Ray's workers, which are the ranks of one MPI world.

    function: called as ``function(*args, **kwargs)`` on each rank, in a process of its own on the
        worker. It makes its process group itself, like a script under mpirun.
    args, kwargs: what it is called with; pickled.
    ranks: how many. Ranks on one node get numbers in a row.
    timeout: seconds for Ray to find room for all of them, and for the ranks to meet.
    options: of the actors, one a rank, such as ``num_gpus=1``; ``num_cpus`` is 1 unless given.

    Returns what the function returned, by rank.

    Raises the exception of a rank whose function raised one, with the rank's traceback as its
    cause; the other ranks are ended. LaunchError where Ray has no room, and where a rank ended
    without an exception. ArgumentError (a ValueError) for an impossible number of ranks.
    """
    import ray
    from ray import cloudpickle

    check_ranks(ranks, _WHERE)
    call = dump_call(cloudpickle.dumps, function, args, kwargs)
    actor = ray.remote(**{"num_cpus": 1, "max_restarts": 0} | options)(Worker)
    workers = [actor.remote() for _ in range(ranks)]

    def ask(worker: Any, limit: float | None, method: str, *arguments: object) -> Any:
        try:
            return ray.get(getattr(worker, method).remote(*arguments), timeout=limit)
        except ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"{_WHERE}: Ray did not start {ranks} workers within {limit:g} s: each wants "
                f"{options or {'num_cpus': 1}}, and the cluster has {ray.cluster_resources()}; ask "
                "for fewer, or give a longer timeout"
            ) from None

    return run_driven(workers, ask, lambda each: ray.kill(each), call, timeout, _WHERE)
