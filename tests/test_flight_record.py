"""Flight records of jobs, read by PyTorch's torchfrtrace and by ``mpicoll trace``."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import rank_scripts
from rank_scripts import Ended, job, needs_mpiexec

from mpicoll.cli import trace

pytest_plugins = ["whole_jobs"]

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torchfrtrace is PyTorch's"
)


@dataclasses.dataclass(frozen=True)
class Dumped(Ended):
    """How a job ended, and the folder of its flight records."""

    folder: Path


def run(task, parameters, folder):
    records = folder / "records"
    environment = task.environment | {"TORCH_FR_DUMP_TEMP_FILE": str(records / "rank_")}
    task = dataclasses.replace(task, environment=environment)
    return Dumped(**vars(rank_scripts.run(task, parameters, folder)), folder=records)


def analyze(ended):
    """Return the output of torchfrtrace for the records of a job that failed."""
    assert ended.code != 0
    done = subprocess.run(
        [Path(sys.executable).with_name("torchfrtrace"), ended.folder],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.any_mpi
@needs_mpiexec
@needs_torch
@pytest.mark.parametrize(
    ("culprit", "shared_memory", "expected"),
    [
        ("time.sleep(1000)", 1, [
            "Not all ranks joining collective, sequence number: 71", "missing ranks: {1}",
            "collective: gloo:all_reduce",
        ]),
        ("dist.broadcast(x, 0)", 1, [
            "Collective sequence number: 71 has errors",
            "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH",
            "does not match found collective type: 'broadcast'",
        ]),
        ("dist.all_reduce(np.ones(8, np.float32))", 1, [
            "Collective sequence number: 71 has errors",
            "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH",
            "'[[4]]' does not match found input sizes: '[[8]]'",
        ]),
        ("dist.barrier()", 0, ["Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH"]),
    ],
)  # fmt: skip
@job(
    """
    os.umask(0o022)
    os.environ["MPICOLL_SHARED_MEMORY"] = "$shared_memory"
    dist.init_process_group(timeout=3)
    x, rank = np.ones(4, np.float32), dist.get_rank()
    for _ in range(70):
        dist.all_reduce(x)
    if rank == 1:
        $culprit
    dist.all_reduce(x)
    time.sleep(1000)
    """,
    ranks=3,
)
def test_torchfrtrace_finds_the_rank_that_caused_a_hang(culprit, shared_memory, expected, ended):
    text = analyze(ended)
    assert all(words in text for words in expected), text
    assert "script.py:" in text  # where the other ranks wait
    modes = [path.stat().st_mode & 0o777 for path in (ended.folder, *ended.folder.iterdir())]
    assert modes == [0o700] + [0o600] * 3


# --- the timeline -------------------------------------------------------------------------------


def entry(number, started, ended, name="gloo:all_reduce"):
    return {
        "process_group": ("0", "default_pg"), "profiling_name": name, "collective_seq_id": number,
        "time_created_ns": started - 1000, "time_discovered_started_ns": started,
        "time_discovered_completed_ns": ended,
        "state": "started" if ended is None else "completed",
        "input_sizes": [[4]], "input_dtypes": ["Float"], "is_p2p": False,
    }  # fmt: skip


START_NS = 10**15


@pytest.fixture
def folder(tmp_path):
    """Records of four ranks on two hosts. The clock of the second host is 5 s ahead, and rank 1
    measured the time of day with an error of 3000 ns.
    """
    for rank in range(4):
        host, seen = rank // 2, 3000 * (rank == 1)
        ahead = START_NS + 5_000_000_000 * host + seen
        calls = [  # the last rank enters 40, 30 and 20 µs after the first rank
            entry(k, 10**6 * k + 10_000 * (4 - k) * (rank == 3) + ahead,
                  10**6 * k + 10_000 * (4 - k) + 2000 * (1 + rank) + ahead)
            for k in range(3)
        ]  # fmt: skip
        calls.append(entry(3, 5 * 10**6 + ahead, None, "gloo:barrier"))
        record = {
            "version": "2.10", "entries": calls, "pg_config": {},
            "mpicoll": {
                "host": f"node{host}", "clock": f"boot{host}", "offset_ns": seen,
                "time_ns": 9 * 10**6 + ahead, "messages": [],
            },
        }  # fmt: skip
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(record))
    return tmp_path


def test_align_computes_clock_offsets_from_the_calls(folder):
    records = trace.read_folder(folder)
    # Rank 1's times are on rank 0's clock.
    starts = [each["time_discovered_started_ns"] - START_NS for each in records[1].calls[:3]]
    assert starts == [0, 10**6, 2 * 10**6]
    offsets = trace.align(records)
    # The duration of each call bounds the offset; the third call gives the range from -2 to 26 µs.
    assert offsets["boot0"] == 0
    assert abs(offsets["boot1"] - 5_000_000_000) <= 28_000 / 2
    # No rank ends a call before all ranks have begun it.
    aligned = [
        [(each["time_discovered_started_ns"] - offsets[record.clock],
          each["time_discovered_completed_ns"] - offsets[record.clock])
         for each in record.calls[:3]]
        for record in records.values()
    ]  # fmt: skip
    for call in zip(*aligned, strict=True):
        assert max(begun for begun, _ in call) <= min(ended for _, ended in call)


def test_trace_writes_a_timeline_of_all_ranks(folder):
    done = subprocess.run(
        [sys.executable, "-m", "mpicoll", "trace", folder], capture_output=True, text=True,
        check=False, env=os.environ | {"MPICOLL_ALLOW_SINGLETON": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "trace.json").stat().st_mode & 0o777 == 0o600
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == [f"rank {rank} node{rank // 2}" for rank in range(4)]
    for rank in range(4):
        shown = [each for each in events if each["pid"] == rank and each["ph"] == "X"]
        assert [each["name"] for each in shown] == ["all_reduce"] * 3 + ["barrier (started)"]
        assert all(each["ts"] >= 0 and each["dur"] > 0 for each in shown)
        ends = [each["ts"] + each["dur"] for each in shown]
        assert all(end <= each["ts"] for end, each in zip(ends, shown[1:], strict=False))
    starts = [each["ts"] for each in events if each["ph"] == "X" and each["args"]["number"] == 1]
    assert max(starts) - min(starts) < 100  # µs, although the clocks differ by 5 s


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no file"),
        ({"rank_0": pickle.dumps({"entries": [os.system]})}, "contains a"),
        ({"a0": b"", "b0": b""}, "prefixes"),
    ],
    ids=["no file", "code", "two prefixes"],
)
def test_read_folder_rejects_other_files(files, words, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        trace.read_folder(tmp_path)
