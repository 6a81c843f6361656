"""Flight records of jobs, read by PyTorch's torchfrtrace."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from rank_scripts import job, needs_torch
from whole_jobs import run_program

from mpicoll.launch.error_output import find_stack


def analyze(ended):
    """Return the output of torchfrtrace for the records of a job that failed."""
    assert ended.code != 0
    command = Path(sys.executable).with_name("torchfrtrace")
    done = run_program(command, ended.folder / "records", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.any_mpi
@needs_torch
@pytest.mark.parametrize(
    ("culprit", "shared_memory", "expected"),
    [
        ("time.sleep(1000)", 1, [
            "Not all ranks joining collective, sequence number: 71", "missing ranks: {1}",
            "collective: gloo:all_reduce",
        ]),
        ("dist.broadcast(x, 0)", 0, [
            "Collective sequence number: 71 has errors",
            "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH",
            "does not match found collective type: 'broadcast'",
        ]),
        ("dist.all_reduce(np.ones(8, np.float32))", 1, [
            "Collective sequence number: 71 has errors",
            "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH",
            "'[[4]]' does not match found input sizes: '[[8]]'",
        ]),
    ],
)  # fmt: skip
@job(
    """
    os.umask(0o022)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = sys.argv[1] + "/records/rank_"
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
    folder = ended.folder / "records"
    modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
    assert modes == [0o700] + [0o600] * 3


def test_stack_of_a_running_thread():
    """Each stack is one that the thread had at some moment."""
    ended = threading.Event()

    def recurse(depth):
        return depth and recurse(depth - 1)

    def run_until_ended():
        while not ended.is_set():
            recurse(20)

    thread = threading.Thread(target=run_until_ended)
    thread.start()
    try:
        stacks = [[frame.name for frame in find_stack(thread.ident)] for _ in range(300)]
    finally:
        ended.set()
        thread.join()
    for names in stacks:
        assert names[:4] == ["_bootstrap", "_bootstrap_inner", "run", "run_until_ended"]
        assert {*names[4:]} <= {"recurse", "is_set"} and names.count("recurse") <= 21
    assert any("recurse" in names for names in stacks)
    assert find_stack(0) == []
