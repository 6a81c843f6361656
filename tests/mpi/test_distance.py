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
from mpicoll.cli.distance import FAR, MIXED, NEAR, UNKNOWN, Distance, classify, describe_farthest
from mpicoll.cli.timing import Timer, Times
from mpicoll.kernels.library import kernels


def crowded(mpi):
    return len(set().union(*mpi.allgather(os.sched_getaffinity(0)))) < mpi.size


def answered(comm, measure):
    """Measure until every rank has a latency to each partner. Skip after 30 s."""
    end = time.monotonic() + 30
    while True:
        every = comm.allgather(measure())
        if all(all(each.values()) for each in every):
            return every
        if comm.bcast(time.monotonic() > end):
            pytest.skip("no latency measured within 30 s: the processors are busy")


@pytest.fixture
def comm(mpi):
    own = mpi.Dup()
    yield own
    own.Free()


def test_partners_measure_the_same_latency_line(comm):
    """Partners differ in one bit of their rank. Both ends of a pair measure the same cache line."""
    distance = Distance(comm)
    assert len(set(comm.allgather(bool(distance.problem)))) == 1
    found = distance.measure_partners()
    if distance.problem:
        assert found == {} and distance.measure() == 0
        assert ("one rank" in distance.problem) == (comm.size == 1)
        return
    assert set(found) == {
        rank for rank in range(comm.size) if (rank ^ comm.rank).bit_count() == 1
    }  # fmt: skip
    every = answered(comm, distance.measure_partners)
    for rank, each in enumerate(every):
        for partner, latency in each.items():
            assert 0 < latency < 50_000
            assert 0 < every[partner][rank] < 50_000


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
    partners = list(distance.measure_partners())
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
    found = describe_farthest(comm, range(comm.size), times=2)
    assert comm.rank or "C library" in found


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
    found = distance.measure_partners()
    assert all(each == 0 for partner, each in found.items() if 0 in (partner, comm.rank))
    monkeypatch.undo()
    assert all(answered(comm, distance.measure_partners))


def test_latencies_are_classified_as_near_or_far():
    if kernels is None:
        pytest.skip("needs the C library")
    limit = kernels.far_ns()
    assert 60 < limit < 160, "between measured latencies of near and far ranks"
    assert classify(limit - 1, limit - 1) == NEAR and classify(limit, limit) == FAR
    assert classify(limit - 1, 0) == classify(0, 0) == UNKNOWN
    assert classify(limit, 0) == classify(limit, 1) == FAR


@pytest.mark.parametrize(
    ("latencies", "expected"),
    [
        ([0.0], "unknown: "),
        ([44.0, 45.0, 170.0], "45 ns between ranks b and a, the farthest: near"),
        ([165.0, 165.0, 165.0, 40.0], "165 ns between ranks b and a, the farthest: far"),
        ([45.0, 160.0, 44.0, 165.0], "102 ns between ranks b and a, the farthest: near and far in"),
    ],
)
def test_farthest_ranks_are_described(comm, monkeypatch, latencies, expected):
    script = [{1: latency} for latency in latencies] if comm.rank == 0 else [{}] * len(latencies)
    monkeypatch.setattr(Distance, "measure_partners", lambda self: script.pop(0))
    found = describe_farthest(comm, "bacdefgh", len(latencies))
    assert comm.rank or kernels is None or found.startswith(expected)


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


def counts_of(found):
    """Return the number of samples by distance, which is the same for all cases."""
    counts = {distance: {len(times) for times in own.values()} for distance, own in found.items()}
    assert all(len(each) == 1 for each in counts.values())
    return {distance: each.pop() for distance, each in counts.items()}


def test_samples_with_a_constant_distance(comm, monkeypatch):
    """The number of samples is as requested.

    Distance is measured around each turn. One distant rank makes the turn far.
    """
    last = comm.rank == comm.size - 1
    for script, expected in (([45.0], NEAR), ([165.0 if last else 45.0], FAR), ([0.0], UNKNOWN)):
        own, scripted = timer(comm, monkeypatch, script)
        found = own.sample(CASES, 7, ONCE)
        assert counts_of(found) == {expected: 7}
        assert scripted.measured == 7 + 1
        assert list(found[expected]["a"]) == list(range(7))


def test_sample_time_is_the_maximum_over_ranks(comm, monkeypatch):
    """Both for near and for far samples."""

    def call():
        if comm.rank == comm.size - 1:
            time.sleep(2e-3)

    own, _ = timer(comm, monkeypatch, [45.0] * 6 + [165.0])
    found = own.sample({"a": call}, 11, {"a": 1})
    assert counts_of(found) == {NEAR: 5, FAR: 5}
    assert min(min(times["a"].values()) for times in found.values()) >= 2e-3
    assert all(each == found for each in comm.allgather(found))


def test_turns_are_dropped_when_the_distance_changes(comm, monkeypatch):
    """More turns replace them. A distance with too few turns is left out."""
    own, scripted = timer(comm, monkeypatch, [45.0] * 5 + [165.0])
    found = own.sample(CASES, 7, ONCE)
    assert counts_of(found) == {FAR: 9} and list(found[FAR]["b"]) == list(range(5, 14))
    assert scripted.measured == 14 + 3, "twice the requested number, in three parts"
    expected = "distance of the ranks: changed in 1, far in 9, near in 4 of 14 turns"
    assert own.describe_distances() == expected


def test_samples_are_split_by_distance(comm, monkeypatch):
    own, _ = timer(comm, monkeypatch, [45.0] * 6 + [165.0])
    found = own.sample(CASES, 7, ONCE)
    assert counts_of(found) == {NEAR: 5, FAR: 6}, "more turns than requested: enough of both"
    assert list(found) == [NEAR, FAR]


def test_samples_are_mixed_when_the_distance_keeps_changing(comm, monkeypatch):
    """Sampling stops after twice the requested number, and all samples are kept as mixed."""
    own, _ = timer(comm, monkeypatch, [[45.0, 165.0][i % 2] for i in range(1000)])
    assert counts_of(own.sample(CASES, 7, ONCE)) == {MIXED: 14}


def test_turns_of_unknown_distance_are_kept_only_without_known_ones(comm, monkeypatch):
    own, _ = timer(comm, monkeypatch, [0.0] * 5 + [45.0])
    assert counts_of(own.sample(CASES, 10, ONCE)) == {NEAR: 5}
    own, _ = timer(comm, monkeypatch, [45.0] * 3 + [0.0])
    assert counts_of(own.sample(CASES, 5, ONCE)) == {UNKNOWN: 7}


def test_samples_are_compared_within_one_turn():
    one = Times({turn: turn + 1.0 for turn in range(6)})
    other = Times(dict.fromkeys((1, 2, 5, 9), 2.0))
    assert one.pair(other, truediv) == {1: 1.0, 2: 1.5, 5: 3.0}
    assert Times({7: 3.0}).figure == (3.0, 3.0, 3.0)
    assert one.figure == (2.25, 3.5, 4.75)


def test_description_states_why_the_distance_is_unknown(comm, monkeypatch):
    own, scripted = timer(comm, monkeypatch, [0.0])
    own.sample(CASES, 5, ONCE)
    assert own.describe_distances() == "distance of the ranks: unknown in 5 of 5 turns"
    scripted.problem = "there is one rank"
    assert own.describe_distances() == "distance of the ranks: unknown, because there is one rank"


def test_timer_with_the_real_distance(comm):
    array, own = np.zeros(1000), Timer(comm)
    found = own.measure({"a": lambda: array.sum(), "b": comm.Barrier}, timing.Effort(0.01))
    assert set(found) <= {NEAR, FAR, UNKNOWN, MIXED}
    assert all(times.figure.low > 0 for own in found.values() for times in own.values())
    assert all(each == found for each in comm.allgather(found))
