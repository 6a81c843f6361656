"""A few faults of the chaos tests. ``make chaos`` runs all of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from rank_scripts import MPIEXEC, needs_mpiexec

sys.path.insert(0, str(Path(__file__).parent / "chaos"))

import run as chaos

pytestmark = [needs_mpiexec, pytest.mark.any_mpi, pytest.mark.waits, pytest.mark.slow]

RANKS = 3
CASES = [("SIGKILL", "small"), ("late", "asynchronous"), ("never", "small")]
#: Number of concurrent jobs. Most of them wait.
AT_A_TIME = 3


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[object, Future[chaos.Outcome]]]:
    """Return the futures of the jobs of all selected tests."""
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_fault_has_the_documented_outcome"
    ]
    pool = ThreadPoolExecutor(AT_A_TIME)
    command = chaos.find_command("mpirun", shlex.join(MPIEXEC), RANKS)
    yield {case: pool.submit(chaos.watch, command, *case) for case in chosen}
    pool.shutdown(cancel_futures=True)


def lost_rank(rank: int) -> str:
    return f"mpicoll: lost: rank {rank} of 3 (pid 7 on node) exited with code 3 and no message\n"


@pytest.mark.parametrize("case", CASES, ids=" - ".join)
def test_fault_has_the_documented_outcome(
    case: tuple[str, str], outcomes: dict[object, Future[chaos.Outcome]]
) -> None:
    found = outcomes[case].result()
    wrong = chaos.judge(case[0], RANKS, found)
    assert not wrong, "; ".join(wrong) + "\n" + found.words


@pytest.mark.parametrize(
    ("fault", "found", "wrong"),
    [
        ("late", chaos.Outcome(0, 1.0, RANKS, "", []), []),
        ("late", chaos.Outcome(0, 1.0, RANKS - 1, "", []), ["2 of 3 came through"]),
        ("late", chaos.Outcome(1, 1.0, RANKS, "", []), ["exit code 1"]),
        ("exit", chaos.Outcome(0, 1.0, 0, lost_rank(2), []), ["exit code 0"]),
        ("exit", chaos.Outcome(3, 1.0, 0, lost_rank(1), []), ["is missing", "rank 1 was"]),
        ("exit", chaos.Outcome(3, 1.0, 0, lost_rank(2) * 2 + lost_rank(0), []), ["rank 0 was"]),
        ("late", chaos.Outcome(0, 1.0, RANKS, lost_rank(2), []), ["rank 2 was"]),
        ("exit", chaos.Outcome(3, 99.0, 0, lost_rank(2), ["pid 9"]), ["more than", "left behind"]),
        ("exit", chaos.Outcome(None, 99.0, 0, "", []), ["it hung"]),
        ("another root", chaos.Outcome(1, 1.0, 0, "MPI_Abort src 1", []), ["is missing"]),
        ("late", chaos.Outcome(0, 1.0, RANKS, "a silent wrong result", []), ["a wrong result"]),
    ],
)
def test_judge_reports_every_problem(fault: str, found: chaos.Outcome, wrong: list[str]) -> None:
    problems = chaos.judge(fault, RANKS, found)
    assert len(problems) == len(wrong), problems
    assert all(words in each for words, each in zip(wrong, problems, strict=True)), problems
