"""``mpicoll.launch.dask``, ``.ray`` and ``.spark`` with the engines: ``make test-clients``.

Each engine runs once on this machine, with three workers. The blocks of the pages start their own
engines. If a test hangs, this process prints the stacks of its threads and exits.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from page_blocks import Block, engine_blocks

from mpicoll.errors import LaunchError

#: Timeout of a test in seconds. On two busy cores, Ray needs ten seconds to start two workers.
LIMIT_S = 240

Run = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def no_hang(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Run]:
    import ray

    from mpicoll.launch.ray import run

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield run
    ray.shutdown()


def needs_java() -> None:
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("Spark needs Java: apt-get install default-jre-headless")


@pytest.fixture(scope="module")
def on_spark() -> Iterator[Run]:
    needs_java()
    from pyspark.sql import SparkSession

    from mpicoll.launch.spark import run

    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Three executor processes, each with one core and 1024 MiB.
    builder = SparkSession.builder.master("local-cluster[3,1,1024]")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    yield run
    session.stop()


@pytest.fixture(scope="module")
def on_dask() -> Iterator[Run]:
    from distributed import Client, LocalCluster

    from mpicoll.launch.dask import run

    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        yield run


@pytest.fixture(params=["dask", "ray", "spark"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.getfixturevalue(f"on_{request.param}")
    return found


def add(factor: float, where: str = "nowhere", how: str = "") -> Callable[[], Any]:
    """Return the function of a rank, which is pickled by value: workers cannot import this module.

    where: where rank 1 raises. apart: the other ranks use no mpicoll.
    how: "kill" or "stop" sends that signal.
    """

    def work(start: float, step: float = 1.0) -> tuple[Any, ...]:
        import os
        import signal
        import time

        import numpy as np

        import mpicoll as dist

        here = os.environ["RANK"] == "1"
        if here and where in ("before", "apart"):
            raise ValueError(f"of rank {os.environ['RANK']}")
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if where == "apart":
            time.sleep(100_000)
        with dist.init_process_group():
            x = np.array([start + step * dist.get_rank()])
            dist.all_reduce(x)
            if here and where == "inside":
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError(f"of rank {dist.get_rank()}")
            if where == "inside":
                dist.barrier()
            local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
            return dist.get_rank(), dist.get_world_size(), float(x[0]) * factor, local

    return work


def test_ranks_return_results(run: Run) -> None:
    """Twice, because the second job gets the workers that the first one used."""
    for _ in range(2):
        found = run(add(10.0), 3, (5.0,), {"step": 2.0})
        assert found == [(rank, 3, 10.0 * (5 + 7 + 9), (rank, 3)) for rank in range(3)]
    assert run(add(1.0), 1, (5.0,)) == [(0, 1, 5.0, (0, 1))]


@pytest.mark.parametrize("where", ["before", "inside", "apart"])
def test_exception_of_a_rank_is_raised(run: Run, where: str) -> None:
    """The other ranks wait in init_process_group, in a collective, or outside mpicoll."""
    with pytest.raises(ValueError, match="of rank 1") as caught:
        run(add(1.0, where), 3, (5.0,))
    assert "on rank 1:\nTraceback" in str(caught.value.__cause__)
    assert "in work" in str(caught.value.__cause__)


def test_killed_rank_raises_launch_error(run: Run) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 of 2 did not return: .* by signal 9"):
        run(add(1.0, "inside", "kill"), 2, (5.0,))


def test_ddp_averages_gradients(run: Run) -> None:

    def train() -> list[float]:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("mpicoll")
        network = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(network.weight)
        model = DistributedDataParallel(network)
        x = torch.full((1, 2), float(dist.get_rank() + 1))
        (model(x) - 1).square().sum().backward()
        dist.destroy_process_group()
        assert network.weight.grad is not None
        return network.weight.grad.flatten().tolist()

    # d/dw (w x - 1)^2 = -2 x at w = 0
    assert run(train, 2) == [[-3.0, -3.0], [-3.0, -3.0]]


def test_dask_with_too_few_workers_raises(on_dask: Run) -> None:
    with pytest.raises(LaunchError, match="4 ranks need 4 workers, one each, and Dask has 3"):
        on_dask(add(1.0), 4, (5.0,))


def test_dask_with_a_busy_worker_times_out(on_dask: Run) -> None:
    from distributed import Event, default_client

    free = Event("free")
    busy = default_client().submit(lambda: Event("free").wait())
    try:
        with pytest.raises(LaunchError, match=r"worker \S+ did not answer within 3 s\. .* busy"):
            on_dask(add(1.0), 3, (5.0,), timeout=3.0)
    finally:
        free.set()
        busy.result(LIMIT_S)


def test_dask_workers_kill_stopped_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are threads of one process. Each worker kills the rank that it started."""
    from distributed import Client, LocalCluster

    from mpicoll.launch import workers
    from mpicoll.launch.dask import run

    monkeypatch.setattr(workers, "_EXIT_TIMEOUT_S", 1.0)
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(ValueError, match="of rank 1"),
    ):
        run(add(1.0, "apart", "stop"), 3, (5.0,), client=client)


def test_ray_with_too_few_workers_times_out(on_ray: Run) -> None:
    with pytest.raises(LaunchError, match="did not start 4 workers within 3 s"):
        on_ray(add(1.0), 4, (5.0,), timeout=3.0)


# --- blocks of the pages. Last, because they start their own engines ----------------------------


@pytest.fixture
def ray_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give ``ray.init()`` eight processors: four ranks with two each."""
    import ray

    ray.shutdown()
    options = {"num_cpus": 8, "include_dashboard": False, "log_to_driver": False}
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, **options))
    yield
    ray.shutdown()


@pytest.fixture
def spark_alone() -> Iterator[None]:
    needs_java()
    from pyspark.sql import SparkSession

    def stop() -> None:
        session = SparkSession.getActiveSession()
        if session:
            session.stop()

    os.environ["PYSPARK_PYTHON"] = sys.executable
    stop()
    yield
    stop()


@pytest.fixture
def dask_alone() -> Iterator[None]:
    yield
    from distributed import default_client

    client = default_client()
    cluster = client.cluster
    client.close()
    cluster.close()


#: Expected results by variable name.
RESULTS = {"squares": [9, 9, 9, 9], "results": [0, 100, 200, 300]}


@pytest.mark.parametrize(
    "engine, page, block",
    [
        pytest.param(engine, page, block, id=f"{engine}-{page}:{block.line}")
        for page, engine, block in engine_blocks()
    ],
)
def test_page_block_returns_the_expected_results(
    engine: str, page: str, block: Block, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"{engine}_alone")
    # Functions of __main__ are pickled by value.
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block.lined, page, "exec"), names)
    (found,) = names.keys() & RESULTS.keys()
    assert names[found] == RESULTS[found]
