"""Ranks on the workers of an engine. This process is the engine; tests/clients has real engines."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from launch_jobs import mpich

from mpicoll.errors import LaunchError, LostRankError
from mpicoll.launch.workers import (
    Outcome,
    Place,
    RemoteTraceback,
    Worker,
    assign,
    collect,
    dump_call,
    run_driven,
)  # fmt: skip

pytestmark = [pytest.mark.any_mpi, pytest.mark.waits]


def run(function: Callable[..., Any], ranks: int, *arguments: object) -> list[Any]:
    """Run a function on workers in this process."""

    def ask(worker: Worker, limit: float | None, method: str, *arguments: object) -> Any:
        return getattr(worker, method)(*arguments)

    call = dump_call("test", ranks, pickle.dumps, function, arguments, None)
    return run_driven([Worker() for _ in range(ranks)], ask, Worker.kill, call, 30.0, "test")


@mpich
def test_two_ranks_form_a_world() -> None:
    # The ranks cannot import this module, so the function is a builtin.
    script = (
        "(lambda m, os: (m.init_process_group(), m.get_rank(), m.get_world_size(), "
        "os.environ['LOCAL_RANK'])[1:])(__import__('mpicoll'), __import__('os'))"
    )
    assert run(eval, 2, script) == [(0, 2, "0"), (1, 2, "1")]


@mpich
def test_rank_that_cannot_start_mpi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_MPIABI", "unknown")
    with pytest.raises(LaunchError, match="cannot load an MPI library"):
        run(eval, 2, "1")


@mpich
def test_exception_of_one_rank_ends_the_other_ranks() -> None:
    script = (
        "int('oops') if __import__('os').environ['RANK'] == '1' else "
        "__import__('mpicoll').init_process_group()"
    )
    with pytest.raises(ValueError, match="oops") as caught:
        run(eval, 2, script)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "on rank 1:" in str(caught.value.__cause__)


def test_assign() -> None:
    places = [Place(node, f"h{node}", 70 + rank) for rank, node in enumerate("aabab")]
    variables = [assign(places, rank)[0] for rank in range(5)]
    assert [each["LOCAL_RANK"] for each in variables] == ["0", "1", "0", "2", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in variables] == ["3", "3", "2", "3", "2"]
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in variables} == {("ha", "70")}
    assert assign(places[:2], 1)[0]["MASTER_ADDR"] == "127.0.0.1"


def raised(rank: int, error: Exception) -> Outcome:
    return Outcome(rank, error=pickle.dumps(error), trace=str(error), code=1)


def test_collect_raises_the_most_likely_cause() -> None:
    good = Outcome(0, value=pickle.dumps("a"))
    assert collect([Outcome(1, value=pickle.dumps("b")), good], 2, "w") == ["a", "b"]
    lost = raised(0, LostRankError("rank 2 is lost", ()))
    ended = Outcome(1, trace="rank 1 on h ended with exit code 1", code=1)
    killed = Outcome(2, trace="rank 2 on h ended by signal 9", code=-9)
    with pytest.raises(LaunchError, match=r"rank 2 of 4 did not return: .* by signal 9"):
        collect([good, lost, ended, killed], 4, "w")
    with pytest.raises(KeyError, match="mine"):
        collect([good, lost, killed, raised(3, KeyError("mine"))], 4, "w")
    with pytest.raises(LaunchError, match="w: rank 1 of 2 did not return: ValueError: odd"):
        collect([good, Outcome(1, trace="Traceback ...\nValueError: odd", code=1)], 2, "w")
    with pytest.raises(LaunchError, match="rank 2 of 4 did not return"):
        collect([killed], 4, "w")


@mpich
def test_ranks_do_not_get_variables_of_the_engines_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "PBS_JOBID":
        monkeypatch.setenv(name, "8")
    script = "[n for n in __import__('os').environ if n[:3] in ('PMI', 'SLU', 'PBS')]"
    assert run(eval, 1, script) == [[]]
    assert os.environ["PMI_SIZE"] == "8"
