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
    """Run a function on Ray actors, one actor per rank; see ``mpicoll.launch.workers``.

    options: of the actors, such as ``num_gpus=1``; ``num_cpus`` is 1 by default.
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
