"""How a Timer takes samples."""

from __future__ import annotations

import time
from operator import truediv

import numpy as np
import pytest

from mpicoll.cli import timing
from mpicoll.cli.timing import Fresh, Timer, Times


@pytest.fixture
def comm(mpi):
    own = mpi.Dup()
    yield own
    own.Free()


def test_sample_time_is_the_maximum_over_ranks(comm):
    def call():
        if comm.rank == comm.size - 1:
            time.sleep(2e-3)

    found = Timer(comm).sample({"a": call, "b": lambda: None}, 5, {"a": 1, "b": 1})
    assert len(found["a"]) == 5 and min(found["a"]) >= 2e-3
    assert all(each == found for each in comm.allgather(found))


def test_only_the_calls_are_timed(comm):
    case = Fresh(lambda: time.sleep(0.02), [lambda: time.sleep(0.002)] * 2)
    assert 0.002 <= Timer(comm).time(case, 4) < 0.02


def test_samples_are_compared_within_one_turn():
    one, other = Times([1.0, 3.0, 6.0]), Times([2.0, 2.0, 2.0])
    assert one.pair(other, truediv) == [0.5, 1.5, 3.0]
    assert Times([3.0]).figure == (3.0, 3.0, 3.0)
    assert Times(range(1, 7)).figure == (2.25, 3.5, 4.75)


def test_measure_gives_all_ranks_the_same_samples(comm):
    array, own = np.zeros(1000), Timer(comm)
    found = own.measure({"a": lambda: array.sum(), "b": comm.Barrier}, timing.Effort(0.01))
    assert all(times.figure.low > 0 for times in found.values())
    assert all(each == found for each in comm.allgather(found))
