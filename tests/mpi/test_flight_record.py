"""The flight record of a rank's own calls, with each implementation path."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
from conftest import needs_2_ranks

import mpicoll as dist
from mpicoll.errors import ArgumentError
from mpicoll.kernels import calls as calls_module

SHARED = {"frames", "pg_id", "process_group", "record_id", "thread_name", "thread_id", "state"}
FIELDS = SHARED | {
    "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name", "time_created_ns",
    "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "retired", "timeout_ms",
    "time_discovered_started_ns", "time_discovered_completed_ns", "is_p2p",
}  # fmt: skip


@pytest.fixture
def record(world, tmp_path):
    """Dump the flight record. Returns the record, and a group's calls."""

    def read(group):
        path = tmp_path / "record"
        assert dist.dump_flight_record(str(path)) == str(path)
        whole = pickle.loads(path.read_bytes())
        name = group.group_name
        calls = [each for each in whole["entries"] if each["process_group"][0] == name]
        return whole, calls

    return read


def made(calls):
    return [
        (
            each["profiling_name"].partition(":")[2],
            each["input_sizes"],
            each["output_sizes"],
            each["input_dtypes"][0],
        )
        for each in calls
    ]


def test_record_lists_calls_of_every_path(world, record):
    group = dist.new_group()
    n = world.size
    begin = time.time_ns()
    x, y = np.ones(3, np.float32), np.ones((n, 3), np.float32)
    for _ in range(3):  # the first call, a planned call, and the native fast path
        dist.all_reduce(x, group=group)
    dist.all_gather(list(y), x, group=group)
    dist.all_gather_single(y, x, group=group)
    dist.reduce_scatter_single(x, y, group=group)
    for work in [dist.broadcast(x, 0, group=group, async_op=True) for _ in range(3)]:
        work.wait()
    dist.all_reduce_coalesced([x, x.copy()], group=group)
    dist.all_gather_object([None] * n, 1, group=group)
    dist.scan(np.ones(2, np.int64), np.ones(2, np.int64), group=group)
    dist.barrier(group)
    dist.monitored_barrier(group)
    end = time.time_ns()
    whole, calls = record(group)
    three, many = [[3]], [[3 * n]]
    *others, listed, objects, scanned, barrier, monitored = made(calls)
    assert others == [
        *[("all_reduce", three, three, "Float")] * 3,
        ("all_gather", three, many, "Float"),
        ("all_gather_single", three, many, "Float"),
        ("reduce_scatter_single", many, three, "Float"),
        *[("broadcast", three, three, "Float")] * 3,
    ]
    assert listed[0] == "allreduce_coalesced" and listed[1] == listed[2]
    assert (objects[0], barrier[0], monitored[0]) == ("all_gather", "barrier", "barrier")
    assert scanned == ("_reduce_oop", [[2]], [[2]], "Long")
    assert [each["collective_seq_id"] for each in calls] == list(range(1, len(calls) + 1))
    before = 0
    for each in calls:
        assert set(each) == FIELDS | {"duration_ms"}
        assert each["state"] == "completed" and each["retired"] and not each["is_p2p"]
        # Allow one millisecond for adjustments of the system clock.
        started = each["time_discovered_started_ns"]
        assert begin - 10**6 <= each["time_created_ns"] <= started >= before
        assert started <= each["time_discovered_completed_ns"] <= end + 10**6
        before = started
    assert [each["record_id"] for each in whole["entries"]] == list(range(len(whole["entries"])))
    assert whole["version"] == "2.10"
    config = whole["pg_config"][group.group_name]
    assert config["ranks"] == str(list(range(n))) and config["desc"] == "undefined"
    dist.destroy_process_group(group)


@pytest.mark.parametrize("length", [0, 4])
def test_buffer_size_limits_the_number_of_calls(world, record, monkeypatch, length):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", str(length))
    group = dist.new_group()
    x = np.ones(2)
    for _ in range(10):
        dist.all_reduce(x, group=group)
    _, calls = record(group)
    assert [entry[1] for entry in group.history()] == ([7, 8, 9, 10] if length else [])
    # Entries are dropped in halves, so that all ranks start with the same call.
    assert [each["collective_seq_id"] for each in calls] == ([9, 10] if length else [])
    if not length:
        monkeypatch.setattr(dist.group.WORLD, "history_length", 0)
        with pytest.raises(ArgumentError, match="TORCH_FR_BUFFER_SIZE is 0"):
            dist.dump_flight_record()
    dist.destroy_process_group(group)


@needs_2_ranks
def test_a_call_that_fails_is_not_complete(world, record, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    group = dist.new_group()
    for _ in range(2):
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(np.ones(1 + (world.me == 1)), group=group)
    path = tmp_path / f"rank_{world.me}"
    whole = pickle.loads(path.read_bytes())
    assert "collective mismatch" in whole["mpicoll"]["why"]
    kept = [each for each in whole["entries"] if each["process_group"][0] == group.group_name]
    assert [each["state"] for each in kept] == ["started"]  # a repeated failure is not dumped again
    frames = [frame["name"] for frame in kept[0]["frames"]]
    assert "test_a_call_that_fails_is_not_complete" in frames
    dist.all_reduce(np.ones(1), group=group)
    states = [each["state"] for each in record(group)[1]]
    assert states == ["started", "started", "completed"]
    dist.destroy_process_group(group)


@pytest.mark.any_mpi
@pytest.mark.parametrize("length", [0, 1, 2, 5, 100])
def test_native_and_python_histories_are_equal(length):
    """For random sequences of immediate, queued, uncompared and completed calls."""
    import random
    import threading

    both = [
        kind(threading.Lock(), length) for kind in (calls_module.Calls, calls_module.PythonCalls)
    ]
    chance = random.Random(length)
    queued = [[], []]
    for step in range(300):
        what = chance.choice(["schedule", "begin", "queued", "uncompared", "complete", "complete"])
        call = chance.getrandbits(50), chance.getrandbits(60), chance.choice([-1, 0, 7])
        for one, waiting in zip(both, queued, strict=True):
            if what == "schedule":
                waiting.append(one.schedule(*call))
            elif what == "queued" and waiting:
                one.begin(*call, waiting.pop(0))
            elif what == "begin":
                one.begin(*call)
            elif what == "uncompared":
                one.begin_uncompared(*call)
            elif what == "complete":
                one.complete()
        first, other = (
            [(*entry[:6], *map(bool, entry[6:9]), entry[9]) for entry in one.history()]
            for one in both
        )
        assert first == other, (step, what)
        assert len(first) <= length
    assert queued[0] == queued[1]
