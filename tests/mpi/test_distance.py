"""Measured distance between ranks (cache latency), and how a Timer classifies samples by it."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter

import numpy as np
import pytest
from conftest import needs_2_ranks

from mpicoll.cli import distance as distances
from mpicoll.cli import timing
from mpicoll.cli.distance import FAR, MIXED, NEAR, UNKNOWN, Distance, classify, measure_pairs
from mpicoll.cli.timing import ENOUGH_COUNT, Sample, Timer, Times, keep
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
    pairs = measure_pairs(comm, times=2)
    assert comm.rank != 0 or "C library" in pairs


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


def test_rank_0_gets_each_pair_once(comm):
    """Otherwise it gets a reason."""
    found = measure_pairs(comm, times=3)
    if comm.rank or isinstance(found, str):
        return
    assert len({pair.ranks for pair in found}) == len(found)
    for pair in found:
        a, b = pair.ranks
        assert a < b and (a ^ b).bit_count() == 1 and 1 <= len(pair.latencies) <= 3


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


def samples_of(found, name="a"):
    return Counter(sample.distance for sample in found[name].samples)


CASES = {"a": lambda: None, "b": lambda: None}
ONCE = dict.fromkeys(CASES, 1)


def test_samples_with_a_constant_distance(comm, monkeypatch):
    """The number of samples is as requested.

    Distance is measured around each sample: three times per turn of two cases. One distant rank
    makes the sample far.
    """
    last = comm.rank == comm.size - 1
    for script, expected in (([45.0], NEAR), ([165.0 if last else 45.0], FAR), ([0.0], UNKNOWN)):
        own, scripted = timer(comm, monkeypatch, script)
        found = own.sample(CASES, 7, ONCE)
        assert samples_of(found) == samples_of(found, "b") == {expected: 7}
        assert scripted.measured == 7 * 3
        assert [each.turn for each in found["a"].samples] == list(range(7))


def test_sample_time_is_the_maximum_over_ranks_by_default(comm, monkeypatch):
    """Both for near and for far samples."""

    def call():
        if comm.rank == comm.size - 1:
            time.sleep(2e-3)

    own, _ = timer(comm, monkeypatch, [45.0] * 10 + [165.0])
    found = own.sample({"a": call}, 10, {"a": 1})
    near, far = found["a"].split().values()
    assert min(near.seconds) >= 2e-3 and min(far.seconds) >= 2e-3
    assert all(each == found for each in comm.allgather(found))
    if comm.size > 1:
        fast = own.sample({"a": call}, 5, {"a": 1}, timing.FASTEST)["a"]
        assert fast.median < 2e-3


def test_samples_are_dropped_when_the_distance_changes(comm, monkeypatch):
    """Dropped samples are replaced. A distance with too few samples is left out."""
    own, scripted = timer(comm, monkeypatch, [45.0] * 5 + [165.0])
    found = own.sample(CASES, 7, ONCE)
    # Turn 0 is near; in turn 1 the second sample is not. Near: 2 and 1.
    assert scripted.measured == 14 * 3, "twice the requested number"
    assert samples_of(found) == samples_of(found, "b") == {FAR: 12}
    assert "near (45 ns) in 3 of 28" in own.describe_distances()
    assert "dropped: 1" in own.describe_distances()


def test_samples_are_split_by_distance(comm, monkeypatch):
    own, scripted = timer(comm, monkeypatch, [45.0] * 3 * 6 + [165.0])
    found = own.sample(CASES, 7, ONCE)
    assert scripted.measured == 12 * 3, "until there are enough of both"
    assert samples_of(found) == samples_of(found, "b") == {NEAR: 6, FAR: 6}
    with pytest.raises(ValueError, match="several distances: near, far"):
        found["a"].median  # noqa: B018
    assert list(found["a"].split()) == [NEAR, FAR]
    near = found["a"].split()[NEAR]
    assert near.median == statistics.median(each.seconds for each in near.samples)


def test_samples_are_mixed_when_the_distance_keeps_changing(comm, monkeypatch):
    """Sampling stops after twice the requested number, and all samples are kept as mixed."""
    chance = random.Random(1)
    script = [[45.0, 165.0][i % 2] for i in range(1000)]
    own, scripted = timer(comm, monkeypatch, script)
    found = own.sample(CASES, 7, ONCE)
    assert samples_of(found) == {MIXED: 14} and scripted.measured == 14 * 3
    assert "dropped: 28" in own.describe_distances()
    script = [chance.choice([45.0, 165.0, 0.0]) for _ in range(1000)]
    found = timer(comm, monkeypatch, script)[0].sample(CASES, 3, ONCE)
    assert set(samples_of(found)) <= {NEAR, FAR, UNKNOWN, MIXED}


def test_unknown_samples_are_kept_only_without_known_samples():
    def turns(*distances):
        return [[Sample(float(i), distance=d)] for i, d in enumerate(distances)]

    (times,) = keep(turns(*[UNKNOWN] * 5, NEAR), 5)
    assert [each.distance for each in times.samples] == [UNKNOWN] * 5
    (times,) = keep(turns(*[UNKNOWN] * 9, *[NEAR] * 5, "moved"), 5)
    assert [each[1:] for each in times.samples] == [(turn, NEAR) for turn in range(9, 14)]
    (times,) = keep(turns(*[UNKNOWN] * 4, *[NEAR] * 4), 5)
    assert [each.distance for each in times.samples] == [MIXED] * 8


def test_a_distance_is_dropped_if_one_case_lacks_it():
    """Figures printed side by side must have the same distance."""
    turns = [[Sample(1.0, distance=NEAR), Sample(1.0, distance=NEAR if i else FAR)]
             for i in range(5)]  # fmt: skip
    assert [samples_of({"a": each}) for each in keep(turns, 5)] == [{MIXED: 5}] * 2
    assert [samples_of({"a": each}) for each in keep(turns, 4)] == [{NEAR: 5}, {NEAR: 4}]


def test_samples_are_compared_within_one_turn_and_distance():
    one = Times([Sample(float(i + 1), i, NEAR if i < 4 else FAR) for i in range(6)])
    other = Times([Sample(2.0, i, FAR if i in (0, 5) else NEAR) for i in (0, 1, 2, 5)])
    assert one.over(other).samples == [
        Sample(1.0, 1, NEAR), Sample(1.5, 2, NEAR), Sample(3.0, 5, FAR),
    ]  # fmt: skip
    assert one.minus(other).seconds == [0.0, 1.0, 4.0]
    assert not one.over(other).is_enough and Times(one.samples[:ENOUGH_COUNT]).is_enough
    assert one.map(lambda took: 2 * took).samples[5] == Sample(12.0, 5, FAR)
    assert Times([Sample(3.0)]).figure == (3.0, 3.0, 3.0)


def test_description_states_why_the_distance_is_unknown(comm, monkeypatch):
    own, scripted = timer(comm, monkeypatch, [0.0])
    own.sample(CASES, 5, ONCE)
    told = own.describe_distances()
    for words in ("near did not occur", "far did not occur", "unknown in 10 (timed out)"):
        assert words in told
    scripted.problem = "there is one rank"
    assert own.describe_distances() == "distance of the ranks: unknown, because there is one rank"


def test_timer_with_the_real_distance(comm):
    array, own = np.zeros(1000), Timer(comm)
    found = own.measure({"a": lambda: array.sum(), "b": comm.Barrier}, timing.Effort(0.01))
    for times in found.values():
        assert set(samples_of({"a": times})) <= {NEAR, FAR, UNKNOWN, MIXED}
        assert all(one.figure.low > 0 for one in times.split().values())
    assert all(each == found for each in comm.allgather(found))
