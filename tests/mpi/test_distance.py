"""Measured distance between ranks (cache latency), and how a Timer classifies samples by it."""

from __future__ import annotations

import os
import time
from operator import truediv

import numpy as np
import pytest
from conftest import needs_2_ranks

from mpicoll.cli import distance as distances
from mpicoll.cli import timing
from mpicoll.cli.distance import FAR, MIXED, NEAR, UNKNOWN, Distance, classify
from mpicoll.cli.timing import Timer, Times
from mpicoll.kernels.library import kernels


def crowded(mpi):
    return len(set().union(*mpi.allgather(os.sched_getaffinity(0)))) < mpi.size


def answered(comm, measure):
    """Measure until every rank has a latency. Skip after 30 s."""
    end = time.monotonic() + 30
    while True:
        every = comm.allgather(measure())
        if all(every):
            return every
        if comm.bcast(time.monotonic() > end):
            pytest.skip("no latency measured within 30 s: the processors are busy")


@pytest.fixture
def comm(mpi):
    own = mpi.Dup()
    yield own
    own.Free()


def test_every_rank_measures_the_latency_to_its_farthest_partner(comm):
    distance = Distance(comm)
    assert len(set(comm.allgather(bool(distance.problem)))) == 1
    if distance.problem:
        assert distance.measure() == 0
        assert ("one rank" in distance.problem) == (comm.size == 1)
        return
    assert all(0 < latency < 50_000 for latency in answered(comm, distance.measure))


def test_both_ends_of_a_pair_measure_together(comm, monkeypatch):
    """One end leads. Both use each other's counters and the same measurement number."""
    distance = Distance(comm)
    if distance.problem:
        pytest.skip(distance.problem)
    calls = []

    def record(own, other, leads, measurement, patience):
        calls.append((own - start, other - start, leads, measurement))
        return 45

    start = distance._memory.ctypes.data
    monkeypatch.setattr(kernels, "latency", record)
    partners = [comm.rank ^ 1 << bit for bit in distance._bits]
    distance.measure()
    distance.measure()
    each = len(calls) // 2 // len(partners)
    ends = {
        (partner, i, again): calls[(again * len(partners) + at) * each + i]
        for at, partner in enumerate(partners)
        for i in range(each)
        for again in range(2)
    }
    numbers = [call[3] for call in calls[:each]] + [call[3] for call in calls[-each:]]
    assert numbers == list(range(2 * each)), "measurements of a pair are numbered"
    every = comm.allgather(ends)
    lines = {own for end in every for own, *_ in end.values()}
    assert len(lines) == sum(len(end) for end in every) // (2 * each), "one cache line per end"
    for rank, end in enumerate(every):
        for (partner, *which), (own, other, leads, number) in end.items():
            assert every[partner][(rank, *which)] == (other, own, not leads, number)


def test_distance_is_not_measured_with_more_ranks_than_processors(comm, mpi):
    if kernels is None or comm.size == 1 or not crowded(mpi):
        pytest.skip("needs the C library, and more ranks than processors")
    assert "more ranks than processors" in Distance(comm).problem


@needs_2_ranks
def test_missing_c_library_on_one_rank_disables_measurement_on_all(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setattr(distances, "kernels", None)
    assert "C library" in Distance(comm).problem


def test_distance_is_unknown_while_a_partner_does_not_answer(comm, monkeypatch, mpi):
    """It is known again once the partner responds."""
    distance = Distance(comm)
    if distance.problem or crowded(mpi):
        pytest.skip(f"needs ranks whose distance can be measured: {distance.problem}")
    latency = kernels.latency

    def late(*arguments):
        time.sleep(5e-3)
        return latency(*arguments)

    if comm.rank == 0:
        monkeypatch.setattr(kernels, "latency", late)
    found = distance.measure()
    assert comm.rank or found == 0
    monkeypatch.undo()
    assert all(answered(comm, distance.measure))


def test_latencies_are_classified_as_near_or_far():
    if kernels is None:
        pytest.skip("needs the C library")
    limit = kernels.far_ns()
    assert 60 < limit < 160, "between measured latencies of near and far ranks"
    assert classify(limit - 1, limit - 1) == NEAR and classify(limit, limit) == FAR
    assert classify(limit - 1, 0) == classify(0, 0) == UNKNOWN
    assert classify(limit, 0) == classify(limit, 1) == FAR


class Scripted:
    """A scripted Distance: returns the given latencies, then repeats the last one."""

    problem = ""

    def __init__(self, script):
        self.script, self.measured = list(script), 0

    def measure(self):
        self.measured += 1
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def timer(comm, monkeypatch, script):
    own = Scripted(script)
    monkeypatch.setattr(timing, "Distance", lambda comm: own)
    return Timer(comm), own


CASES = {"a": lambda: None, "b": lambda: None}
ONCE = dict.fromkeys(CASES, 1)


@pytest.mark.parametrize(
    ("script", "turns", "distance", "kept", "taken"),
    [
        ([45.0], 7, NEAR, 7, 7),
        ([165.0], 7, FAR, 7, 7),
        ([0.0], 7, UNKNOWN, 7, 7),
        ([45.0] * 6 + [165.0], 11, NEAR, 5, 11),
        ([45.0] * 6 + [165.0], 12, FAR, 6, 12),  # one turn is dropped, in which it changed
        ([45.0] * 5 + [165.0], 7, FAR, 7, 12),  # too few of both distances: five more turns
        ([45.0, 165.0] * 500, 7, MIXED, 14, 14),  # twice the requested number
        ([45.0] * 3 + [0.0], 8, UNKNOWN, 5, 8),
    ],
)
def test_samples_have_the_most_frequent_distance(
    comm, monkeypatch, script, turns, distance, kept, taken
):
    """The distance is measured before each turn and after the last one of each attempt.

    A single far rank makes the turn far.
    """
    if comm.rank < comm.size - 1:
        script = [min(latency, 45.0) for latency in script]
    own, scripted = timer(comm, monkeypatch, script)
    found = own.sample(CASES, turns, ONCE)
    assert found.distance == distance
    assert [len(times) for times in found.times.values()] == [kept, kept]
    attempts = -(-(taken - turns) // timing.ENOUGH_COUNT)
    assert scripted.measured == taken + 1 + attempts


def test_sample_time_is_the_maximum_over_ranks(comm, monkeypatch):
    def call():
        if comm.rank == comm.size - 1:
            time.sleep(2e-3)

    own, _ = timer(comm, monkeypatch, [45.0] * 6 + [165.0])
    found = own.sample({"a": call}, 11, {"a": 1})
    assert len(found.times["a"]) == 5 and min(found.times["a"]) >= 2e-3
    assert all(each == found for each in comm.allgather(found))


def test_samples_are_compared_within_one_turn():
    one, other = Times([1.0, 3.0, 6.0]), Times([2.0, 2.0, 2.0])
    assert one.pair(other, truediv) == [0.5, 1.5, 3.0]
    assert Times([3.0]).figure == (3.0, 3.0, 3.0)
    assert Times(range(1, 7)).figure == (2.25, 3.5, 4.75)


def test_description_states_why_the_distance_is_unknown(comm, monkeypatch):
    own, scripted = timer(comm, monkeypatch, [0.0])
    own.sample(CASES, 5, ONCE)
    assert own.describe_distances() == "distance of the ranks: unknown in 5 of 5 turns"
    scripted.problem = "there is one rank"
    assert own.describe_distances() == "distance of the ranks: unknown, because there is one rank"


def test_timer_with_the_real_distance(comm):
    array, own = np.zeros(1000), Timer(comm)
    found = own.measure({"a": lambda: array.sum(), "b": comm.Barrier}, timing.Effort(0.01))
    assert found.distance in {NEAR, FAR, UNKNOWN, MIXED}
    assert all(times.figure.low > 0 for times in found.times.values())
    assert all(each == found for each in comm.allgather(found))
