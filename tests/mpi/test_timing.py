"""Measured latency between ranks, and how a Timer takes samples."""

from __future__ import annotations

import os
import time
from operator import truediv

import numpy as np
import pytest
from conftest import needs_2_ranks

from mpicoll.cli import latency as latencies
from mpicoll.cli import timing
from mpicoll.cli.latency import Latency
from mpicoll.cli.timing import Fresh, Timer, Times
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
    own = Latency(comm)
    assert len(set(comm.allgather(bool(own.problem)))) == 1
    if own.problem:
        assert own.measure() == 0
        assert ("one rank" in own.problem) == (comm.size == 1)
        return
    assert all(0 < latency < 50_000 for latency in answered(comm, own.measure))


def test_both_ends_of_a_pair_measure_together(comm, monkeypatch):
    """One end leads. Both use each other's counters and the same measurement number."""
    own = Latency(comm)
    if own.problem:
        pytest.skip(own.problem)
    calls = []

    def record(line, other, leads, measurement, patience):
        calls.append((line - start, other - start, leads, measurement))
        return 45

    start = own._memory.ctypes.data
    monkeypatch.setattr(kernels, "latency", record)
    partners = [comm.rank ^ 1 << bit for bit in own._bits]
    own.measure()
    own.measure()
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


def test_latency_is_not_measured_with_more_ranks_than_processors(comm, mpi):
    if kernels is None or comm.size == 1 or not crowded(mpi):
        pytest.skip("needs the C library, and more ranks than processors")
    assert "more ranks than processors" in Latency(comm).problem


@needs_2_ranks
def test_missing_c_library_on_one_rank_disables_measurement_on_all(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setattr(latencies, "kernels", None)
    assert "C library" in Latency(comm).problem


def test_latency_is_unknown_while_a_partner_does_not_answer(comm, monkeypatch, mpi):
    """It is known again once the partner responds."""
    own = Latency(comm)
    if own.problem or crowded(mpi):
        pytest.skip(f"needs ranks whose latency can be measured: {own.problem}")
    latency = kernels.latency

    def late(*arguments):
        time.sleep(5e-3)
        return latency(*arguments)

    if comm.rank == 0:
        monkeypatch.setattr(kernels, "latency", late)
    found = own.measure()
    assert comm.rank or found == 0
    monkeypatch.undo()
    assert all(answered(comm, own.measure))


class Scripted:
    """A scripted Latency: returns the given latencies, then repeats the last one."""

    problem = ""

    def __init__(self, script):
        self.script, self.measured = list(script), 0

    def measure(self):
        self.measured += 1
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def timer(comm, monkeypatch, script):
    own = Scripted(script)
    monkeypatch.setattr(timing, "Latency", lambda comm: own)
    return Timer(comm), own


CASES = {"a": lambda: None, "b": lambda: None}
ONCE = dict.fromkeys(CASES, 1)


def test_samples_have_the_latency_of_their_turns(comm, monkeypatch):
    """It is measured before the first turn and after each one. The slowest rank counts."""
    own, scripted = timer(comm, monkeypatch, [0.0, 45.0, 47.0, 165.0])
    if comm.rank < comm.size - 1:
        scripted.script = [40.0]
    found = own.sample(CASES, 3, ONCE)
    assert found.latency == (47.0 if comm.size == 1 else 46.0) and scripted.measured == 4
    assert [len(times) for times in found.times.values()] == [3, 3]


def test_sample_time_is_the_maximum_over_ranks(comm):
    def call():
        if comm.rank == comm.size - 1:
            time.sleep(2e-3)

    found = Timer(comm).sample({"a": call, "b": lambda: None}, 5, {"a": 1, "b": 1})
    assert len(found.times["a"]) == 5 and min(found.times["a"]) >= 2e-3
    assert all(each == found for each in comm.allgather(found))


class Recorded:
    """A communicator that records its barriers."""

    def __init__(self, log):
        self.log = log

    def Barrier(self):
        self.log.append("barrier")


@pytest.mark.parametrize(
    ("count", "log"),
    [
        (1, "write settle barrier a settle"),
        (2, "a write settle barrier a b settle"),
        (3, "a write settle barrier a b settle write settle barrier a b settle"),
    ],
)
def test_new_data_is_written_before_the_barrier_of_each_round(comm, count, log):
    found = []
    own = Timer(comm, lambda: found.append("settle"))
    own._comm = Recorded(found)
    calls = [lambda name=name: found.append(name) for name in "ab"]
    own.time(Fresh(lambda: found.append("write"), calls), count)
    assert found == log.split()


def test_only_the_calls_are_timed(comm):
    case = Fresh(lambda: time.sleep(0.02), [lambda: time.sleep(0.002)] * 2)
    assert 0.002 <= Timer(comm).time(case, 4) < 0.02


def test_samples_are_compared_within_one_turn():
    one, other = Times([1.0, 3.0, 6.0]), Times([2.0, 2.0, 2.0])
    assert one.pair(other, truediv) == [0.5, 1.5, 3.0]
    assert Times([3.0]).figure == (3.0, 3.0, 3.0)
    assert Times(range(1, 7)).figure == (2.25, 3.5, 4.75)


def test_description_has_the_latencies_or_why_they_are_unknown(comm, monkeypatch):
    own, scripted = timer(comm, monkeypatch, [0.0])
    own.sample(CASES, 1, ONCE)
    assert own.describe_latency() == "latency between the ranks: unknown"
    scripted.problem = "there is one rank"
    words = "latency between the ranks: unknown, because there is one rank"
    assert own.describe_latency() == words
    scripted.script = [45.0, 47.0, 165.0]
    own.sample(CASES, 2, ONCE)
    assert own.describe_latency() == "latency between the ranks: 47 ns (45 to 165 ns)"


def test_timer_with_the_real_latency(comm):
    array, own = np.zeros(1000), Timer(comm)
    found = own.measure({"a": lambda: array.sum(), "b": comm.Barrier}, timing.Effort(0.01))
    assert 0 <= found.latency < 50_000
    assert all(times.figure.low > 0 for times in found.times.values())
    assert all(each == found for each in comm.allgather(found))
