"""Flight records of whole jobs: PyTorch's own torchfrtrace names the culprit, and the timeline."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_scripts
from rank_scripts import Ended, Job, job, needs_mpiexec

from mpicoll.cli import trace

pytest_plugins = ["whole_jobs"]

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torchfrtrace is PyTorch's"
)


class Hung(Ended):
    """How a job ended, and the folder of its records."""

    folder: Path


def run(task: Job, parameters: dict[str, Any], folder: Path) -> Ended:
    environment = {"TORCH_FR_DUMP_TEMP_FILE": str(folder / "records" / "rank_")}
    task = Job(
        task.script, task.ranks, task.options, environment | task.environment, task.interrupt
    )
    ended = rank_scripts.run(task, parameters, folder)
    return type("Hung", (Hung,), {"folder": folder / "records"})(**vars(ended))


def analysed(folder: Path) -> str:
    """What torchfrtrace prints of the records in a folder, as users start it."""
    done = subprocess.run(
        [Path(sys.executable).with_name("torchfrtrace"), folder],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


HANG = """
    os.umask(0o022)
    dist.init_process_group(timeout=3)
    x, rank = np.ones(4, np.float32), dist.get_rank()
    for _ in range(70):
        dist.all_reduce(x)
    if rank == 1:
        $culprit
    dist.all_reduce(x)
    time.sleep(1000)
"""


@pytest.mark.any_mpi
@needs_mpiexec
@needs_torch
@pytest.mark.parametrize("culprit", ["time.sleep(1000)"])
@job(HANG, ranks=3)
def test_a_rank_that_never_calls(culprit: str, ended: Hung) -> None:
    assert ended.code != 0
    text = analysed(ended.folder)
    assert "Not all ranks joining collective, sequence number: 71" in text
    assert "missing ranks: {1}" in text
    assert "collective: gloo:all_reduce" in text
    assert "script.py:" in text  # where they wait
    modes = [path.stat().st_mode & 0o777 for path in (ended.folder, *ended.folder.iterdir())]
    assert modes == [0o700] + [0o600] * 3


@pytest.mark.any_mpi
@needs_mpiexec
@needs_torch
@pytest.mark.parametrize(
    "culprit", ["dist.broadcast(x, 0)", "dist.all_reduce(np.ones(8, np.float32))"]
)
@job(HANG, ranks=3)
def test_a_rank_in_another_call(culprit: str, ended: Hung) -> None:
    assert ended.code != 0
    text = analysed(ended.folder)
    assert "Collective sequence number: 71 has errors" in text
    what, how = "COLLECTIVE_TYPE_MISMATCH", "does not match found collective type: 'broadcast'"
    if "8" in culprit:
        what, how = "SIZE_OR_SYNTAX_MISMATCH", "'[[4]]' does not match found input sizes: '[[8]]'"
    assert f"Culprit rank 1; Error type: {what}" in text and how in text


@pytest.mark.any_mpi
@needs_mpiexec
@needs_torch
@pytest.mark.parametrize("culprit", ["dist.barrier()"])
@job(HANG, ranks=3, environment={"MPICOLL_SHARED_MEMORY": "0"})
def test_a_rank_in_another_call_over_messages(culprit: str, ended: Hung) -> None:
    assert ended.code != 0
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in analysed(ended.folder)


@pytest.mark.any_mpi
@needs_mpiexec
@needs_torch
@job(
    """
    dist.init_process_group(timeout=3)
    x, rank = np.ones(4), dist.get_rank()
    dist.all_reduce(x)
    if rank == 0:
        dist.send(x, 2)
    if rank == 2:
        dist.recv(x, 0)
        dist.recv(x, 1, tag=7)
    time.sleep(1000)
    """,
    ranks=3,
)
def test_a_message_that_nobody_sends(ended: Hung) -> None:
    assert ended.code != 0
    text = analysed(ended.folder)
    assert text.count("Not all ranks") == 1
    assert "messages 1->2, tag 7:from rank 1 to rank 2" in text and "missing ranks: {1}" in text


@needs_mpiexec
@job(
    """
    dist.init_process_group()
    x, rank = np.ones(4), dist.get_rank()
    dist.all_reduce(x)
    folder = os.path.dirname(os.environ["TORCH_FR_DUMP_TEMP_FILE"])
    def look():  # a thread, for the main one is blocked
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGUSR1)
        while len([name for name in os.listdir(folder) if name[0] != "."]) < 2:
            time.sleep(0.05)
        os._exit(7)
    if rank == 0:
        os.makedirs(folder)
        threading.Thread(target=look).start()
        dist.broadcast(x, 1)
    time.sleep(1000)
    """
)
def test_sigusr1_while_a_call_is_blocked(ended: Hung) -> None:
    assert rank_scripts.HUNG not in ended.err, ended
    first, other = (pickle.loads((ended.folder / f"rank_{rank}").read_bytes()) for rank in (0, 1))
    assert first["mpicoll"]["why"] == "signal SIGUSR1"
    assert other["mpicoll"]["why"] == "requested by rank 0"
    states = [[each["state"] for each in record["entries"]] for record in (first, other)]
    assert states == [["completed", "started"], ["completed"]]
    names = [frame["name"] for frame in first["entries"][1]["frames"]]
    assert names[1:] == ["<module>"]


# --- the timeline -------------------------------------------------------------------------------


def entry(number: int, started: int, ended: int | None, name: str = "gloo:all_reduce") -> Any:
    return {
        "process_group": ("0", "default_pg"),
        "profiling_name": name,
        "collective_seq_id": number,
        "time_created_ns": started - 1000,
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": ended,
        "state": "started" if ended is None else "completed",
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "is_p2p": False,
    }


BEGIN = 10**15


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records of four ranks on two hosts. The second's clock is 5 s ahead, and the time of the day
    that rank 1 saw is off by 3000 ns."""
    for rank in range(4):
        host, seen = rank // 2, 3000 * (rank == 1)
        ahead = BEGIN + 5_000_000_000 * host + seen
        calls = [  # the last rank comes at 40, 30, 20 µs after the first
            entry(k, 10**6 * k + 10_000 * (4 - k) * (rank == 3) + ahead,
                  10**6 * k + 10_000 * (4 - k) + 2000 * (1 + rank) + ahead)
            for k in range(3)
        ]  # fmt: skip
        calls.append(entry(3, 5 * 10**6 + ahead, None, "gloo:barrier"))
        whole = {
            "version": "2.10",
            "entries": calls,
            "pg_config": {},
            "mpicoll": {
                "host": f"node{host}", "clock": f"boot{host}", "offset_ns": seen,
                "time_ns": 9 * 10**6 + ahead, "messages": [],
            },
        }  # fmt: skip
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(whole))
    return tmp_path


def test_clocks_are_aligned_by_the_calls(folder: Path) -> None:
    records = trace.read_folder(folder)
    # Rank 1's times are on rank 0's clock.
    starts = [each["time_discovered_started_ns"] - BEGIN for each in records[1].calls[:3]]
    assert starts == [0, 10**6, 2 * 10**6]
    offsets = trace.align(records)
    # Each call bounds it by its own length, from -2 to 26 µs the third one.
    assert offsets["boot0"] == 0
    assert abs(offsets["boot1"] - 5_000_000_000) <= 28_000 / 2
    # Nothing ends before all have begun.
    aligned = [
        [(each["time_discovered_started_ns"] - offsets[record.clock],
          each["time_discovered_completed_ns"] - offsets[record.clock])
         for each in record.calls[:3]]
        for record in records.values()
    ]  # fmt: skip
    for call in zip(*aligned, strict=True):
        assert max(begun for begun, _ in call) <= min(ended for _, ended in call)


def test_the_timeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = subprocess.run(
        [sys.executable, "-m", "mpicoll", "trace", folder], capture_output=True, text=True,
        check=False, env=os.environ | {"MPICOLL_ALLOW_SINGLETON": "1"},
    )  # fmt: skip
    assert (code.returncode, code.stderr) == (0, "")
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
    assert max(starts) - min(starts) < 100  # µs, and not 5 s


def test_a_clock_that_no_call_tells_of_is_left(folder: Path) -> None:
    records = trace.read_folder(folder)
    for record in records.values():
        record.calls[:] = [each for each in record.calls if each["state"] != "completed"]
    assert trace.align(records) == {"boot0": 0}
    assert len(list(trace.trace_events(records, {"boot0": 0}))) > 4


@pytest.mark.parametrize(
    ("what", "words"),
    [("nothing", "no file"), ("code", "contains a"), ("two", "prefixes")],
)
def test_what_is_no_folder_of_records(
    what: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "code":
        (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [os.system]}))
    if what == "two":
        for name in ("a0", "b0"):
            (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=words):
        trace.read_folder(tmp_path)
