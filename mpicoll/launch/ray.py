"""Run a function on Ray actors as the ranks of one MPI world: ``mpicoll.launch.ray.run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpicoll.errors import LaunchError
from mpicoll.launch.workers import Worker, dump_call, run_driven

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
    """Run a function on Ray actors, one actor per rank.

    function: called as ``function(*args, **kwargs)`` on each rank, in a new process next to the
        actor. It calls init_process_group itself, like a script under mpirun.
    args, kwargs: the arguments of the function; pickled.
    ranks: number of ranks. Ranks of one node are consecutive.
    timeout: seconds for Ray to schedule all actors and for all ranks to start MPI.
    options: of the actors, such as ``num_gpus=1``; ``num_cpus`` is 1 by default.

    Returns the results of the function, by rank.

    Raises the exception of a rank, after the other ranks were ended, with the rank's traceback as
    the cause. Raises LaunchError if Ray cannot schedule the actors, or if a
    rank ends without an exception.
    """
    import ray
    from ray import cloudpickle

    call = dump_call(_WHERE, ranks, cloudpickle.dumps, function, args, kwargs)
    actor = ray.remote(**{"num_cpus": 1, "max_restarts": 0} | options)(Worker)
    workers = [actor.remote() for _ in range(ranks)]

    def ask(worker: Any, limit: float | None, method: str, *arguments: object) -> Any:
        try:
            return ray.get(getattr(worker, method).remote(*arguments), timeout=limit)
        except ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"{_WHERE}: Ray did not start {ranks} workers within {limit:g} s: each needs "
                f"{options or {'num_cpus': 1}}, and the cluster has {ray.cluster_resources()}; "
                "request fewer ranks or pass a longer timeout"
            ) from None

    return run_driven(workers, ask, lambda each: ray.kill(each), call, timeout, _WHERE)
