"""Run a function in a Spark barrier stage as one MPI world: ``mpicoll.launch.spark.run``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpicoll import control_messages
from mpicoll.errors import LaunchError
from mpicoll.launch.workers import Outcome, Place, Worker, assign, collect, dump_call

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
    """Run a function in the tasks of a barrier stage, one rank per task; see
    ``mpicoll.launch.workers``.

    ranks: Spark needs one free slot per rank at the same time; it orders the ranks.
    timeout: seconds for all ranks to start MPI.
    spark: the SparkSession; None: the active one, or a new one.

    Raises LaunchError also for a Spark Connect session. Errors of Spark, such as too few slots, are
    passed on.
    """
    from pyspark import cloudpickle
    from pyspark.sql import SparkSession

    call = dump_call(_WHERE, ranks, cloudpickle.dumps, function, args, kwargs)
    try:
        context = (spark or SparkSession.builder.getOrCreate()).sparkContext
    except AttributeError:
        raise LaunchError(
            f"{_WHERE}: the session has no sparkContext, which barrier stages need (Spark Connect "
            "sessions have none). Call it in the driver, with a session created by "
            "SparkSession.builder.master(...) or spark-submit"
        ) from None

    def task(_: Iterable[int]) -> Iterator[Outcome]:
        yield _run_rank(ranks, timeout, call)

    stage = context.parallelize(range(ranks), ranks).barrier()
    return collect(stage.mapPartitions(task).collect(), ranks, _WHERE)


def _run_rank(size: int, limit: float, call: bytes) -> Outcome:
    """Run one rank, in its task. The tasks exchange their ``Place`` records by allGather."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    worker = Worker()
    place = worker.prepare(size if rank == 0 else 0)
    texts = context.allGather(control_messages.encode(place).decode())
    places = [control_messages.decode(text.encode(), Place, n) for n, text in enumerate(texts)]
    return worker.run(*assign(places, rank), limit, call)
