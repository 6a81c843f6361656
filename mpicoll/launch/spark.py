"""Ranks on the executors of Spark, by its barrier mode: ``mpicoll.launch.spark.run``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpicoll import control_messages
from mpicoll.errors import LaunchError
from mpicoll.launch.workers import Outcome, Ready, Worker, assign, check_ranks, collect, dump_call

__all__ = ["run"]

_WHERE = "mpicoll.launch.spark.run"


def run(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    timeout: float = 300.0,
    spark: Any = None,
) -> list[Any]:
    """Run a function in the tasks of a barrier stage, which are the ranks of one MPI world.

    function: called as ``function(*args, **kwargs)`` on each rank, in a process of its own beside
        the task. It makes its process group itself, like a script under mpirun.
    args, kwargs: what it is called with; pickled.
    ranks: how many; Spark must have as many free slots at once.
    timeout: seconds for the ranks to meet.
    spark: the SparkSession; the active one, or a new one, where None.

    Returns what the function returned, by rank.

    Raises the exception of a rank whose function raised one, with the rank's traceback as its
    cause; the other ranks are ended. LaunchError where a rank ended without an exception, and for a
    session of Spark Connect. ArgumentError (a ValueError) for an impossible number of ranks.
    Spark's own errors, such as too few slots, are not changed.
    """
    from pyspark import cloudpickle
    from pyspark.sql import SparkSession

    check_ranks(ranks, _WHERE)
    call = dump_call(cloudpickle.dumps, function, args, kwargs)
    try:
        context = (spark or SparkSession.builder.getOrCreate()).sparkContext
    except AttributeError:
        raise LaunchError(
            f"{_WHERE}: the session has no sparkContext, as those of Spark Connect: barrier stages "
            "start from one. Run this where the driver runs, with a session that is made by "
            "SparkSession.builder.master(...) or spark-submit"
        ) from None

    def task(_: Iterable[int]) -> Iterator[Outcome]:
        yield _run_rank(ranks, timeout, call)

    stage = context.parallelize(range(ranks), ranks).barrier()
    return collect(stage.mapPartitions(task).collect(), ranks, _WHERE)


def _run_rank(size: int, limit: float, call: bytes) -> Outcome:
    """Run one rank, in its task. Only the tasks reach each other: by allGather."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    worker = Worker()
    ready = worker.start(rank, size, limit)
    everybody: list[Ready] = [
        control_messages.decode(text.encode(), Ready, rank)
        for rank, text in enumerate(context.allGather(control_messages.encode(ready).decode()))
    ]
    if any(each.failure for each in everybody):
        if ready.failure is None:
            worker.kill()
        return ready.failure or Outcome(rank, trace=f"rank {rank} was not needed")
    return worker.finish(assign(everybody, call)[rank])
