"""Whole jobs whose ranks differ: in what they run, in what they call, in how far they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_scripts import HUNG, Job, job, needs_mpiexec, run

pytest_plugins = ["whole_jobs"]

pytestmark = needs_mpiexec

__all__ = ["run"]  # for whole_jobs

#: Small messages by MPI as well, where nothing else finds a mismatch.
APART = {"MPICOLL_SHARED_MEMORY": "0"}

#: What a rank knows of its number before MPI runs.
RANK = """
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
"""

TRAIN = """
for i in range(300):
    x = np.array([1, 2, 4], np.int64) << dist.get_rank()
    dist.all_reduce(x)
    assert x.tolist() == [3, 6, 12], (i, x)
"""


def once(ended, pattern):
    """All ranks have raised an error in such words, and one has printed it."""
    assert len(re.findall(pattern, ended.err)) == 1, ended


# ---- what decides how bytes go over the wire -----------------------------------------------------


@pytest.mark.any_mpi
@job(
    RANK + "os.environ['MPICOLL_DEBUG'] = 'DETAIL' if rank == $rank else 'OFF'\n"
    "dist.init_process_group()\n" + TRAIN + "dist.destroy_process_group()\nsay('done')",
    environment=APART,
)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_that_asks_for_detail(ended, rank):
    ended.in_good_order()
    assert ended.lines == ["done"] * 2


@pytest.mark.any_mpi
@job(
    RANK + "dist.init_process_group()\n" + TRAIN +
    """
if rank == 1:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
for i in range(64):  # the next that is compared is among these
    dist.all_reduce(np.ones(3))
try:
    dist.all_reduce(np.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
except dist.MismatchError as error:
    assert "later" not in str(error), error
    say("at once")
if rank == 1:
    dist.set_debug_level(dist.DebugLevel.OFF)
dist.all_reduce(np.ones(3))
number = dist.group.WORLD.sequence
assert dist.group.WORLD.next_check > number + 1, "every call is still compared"
dist.destroy_process_group()
""",
    environment=APART,
)  # fmt: skip
def test_a_level_set_on_one_rank_holds_on_all(ended):
    ended.in_good_order()
    assert ended.lines == ["at once"] * 2


@pytest.mark.any_mpi
@job(
    "dist.init_process_group()\n" + TRAIN +
    """
mine, n = np.ones(4), dist.get_world_size()
try:
    if dist.get_rank() == 0:
        dist.all_reduce(mine)
    else:
        $other
except dist.MismatchError:
    say("told")
dist.destroy_process_group()
""",
)  # fmt: skip
@pytest.mark.parametrize(
    "other", ["dist.all_gather_object([None] * n, 1)", "dist.all_to_all_single(mine, mine.copy())"]
)
def test_what_was_told_is_not_told_again_at_the_end(ended, other):
    ended.in_good_order()
    assert ended.lines == ["told"] * 2


@job(
    RANK + "if rank == 1:\n    import mpi4py\n    mpi4py.rc.thread_level = '$level'\n"
    "dist.init_process_group()\n" + TRAIN +
    "works = [dist.all_reduce(np.ones(9), async_op=True) for _ in range(5)]\n"
    "for work in works:\n    work.wait()\n"
    "dist.destroy_process_group()\nsay('done')",
)  # fmt: skip
@pytest.mark.parametrize("level", ["single", "serialized"])
def test_ranks_with_another_thread_level(ended, level):
    # Where the calls are carried out at once no thread is started, and nothing is said of it.
    assert ended.code == 0, ended
    assert not ended.err or "before the program calls MPI itself" in ended.err, ended
    assert ended.lines == ["done"] * 2


@pytest.mark.any_mpi
@job(RANK + "dist.__version__ += '+other' if rank == 1 else ''\ndist.init_process_group()")
def test_another_version_is_refused_by_name(ended):
    ended.badly("LaunchError", "do not run the same mpicoll", "the version of mpicoll is rank 0: ")
    once(ended, r"LaunchError: .*rank 1: [\w.]+\+other")


CONSTANTS = [
    "routes.host.shared.ONE_SHOT_MAX_BYTES", "routes.host.shared.SLOT", "routes.space.SMALL",
    "routes.host.hierarchical.CHUNK", "failures.consistency.FIRST", "failures.consistency.STRIDE",
    "dispatch.fusing.SMALL", "routes.host.lists.LISTED",
]  # fmt: skip


@pytest.mark.any_mpi
@job(
    RANK
    + """
import importlib, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
module, name = "mpicoll.$constant".rsplit(".", 1)
module = importlib.import_module(module)
setattr(module, name, getattr(module, name) // (rank + 1))
dist.init_process_group()
"""
)
@pytest.mark.parametrize("constant", CONSTANTS)
def test_another_constant_is_refused_by_name(ended, constant):
    ended.badly("LaunchError", f"{constant} is rank 0: ")
    once(ended, f"LaunchError: .*{constant} is rank 0")


@pytest.mark.any_mpi
@job(RANK + "os.environ['MPICOLL_SHARED_MEMRY'] = '0'\ndist.init_process_group()")
def test_a_misspelt_setting_is_refused_by_name(ended):
    ended.badly("ArgumentError", "MPICOLL_SHARED_MEMRY", "did you mean MPICOLL_SHARED_MEMORY?")


# ---- collective mismatches after the first calls, which are all compared ------------------------


@job(
    "dist.init_process_group()\nrank = dist.get_rank()\n" + TRAIN + """
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT]
try:
    for i in range(64):
        $call
    say("not found")
except dist.MismatchError as error:
    say("found", error)
try:
    dist.barrier()
except dist.MismatchError:
    say("closed")
dist.destroy_process_group()
""",
    environment=APART,
)  # fmt: skip
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("dist.all_reduce(np.ones(3), OPS[rank])", "PRODUCT"),
        ("dist.all_reduce(np.ones(3, np.uint64 if rank else np.int64))", "of uint64"),
        ("dist.broadcast(np.ones(3, np.uint64 if rank else np.int64), 0)", "of uint64"),
    ],
)
def test_calls_that_differ_are_found_within_a_stride(ended, call, words):
    """MPI carries all of these out, and says nothing."""
    ended.in_good_order()
    found = [line for line in ended.lines if line.startswith("found")]
    assert len(found) == 2 and all("as call 301 of the group" in line for line in found), ended
    assert all(words in line and "cannot be used any more" in line for line in found), ended
    assert ended.lines.count("closed") == 2, ended


#: Counts by rank so great that no rank comes out of the call before all are in it.
SIZES = """
dist.init_process_group()
for i in range(69):
    dist.all_reduce(np.ones(3))
    time.sleep(0.01)
dist.all_reduce(np.ones(300_000 + 100_000 * dist.get_rank()))
dist.barrier()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_sizes_that_mpi_refuses_name_the_mismatch(ranks: int, tmp_path: Path) -> None:
    ended = run(Job(SIZES, ranks, environment=APART), {}, tmp_path)
    assert ended.code != 0 and HUNG not in ended.err, ended
    line = next(line for line in ended.err.splitlines() if "collective mismatch" in line)
    named = sum(f"all_reduce of {3 + rank}00000 elements" in line for rank in range(ranks))
    # All ranks, or two of them if one that waits has found it first.
    assert "call 70" in line and named >= 2, ended
    assert "MPICOLL_SURVIVE" not in ended.err and "with-ft" not in ended.err, ended


@job(
    "dist.init_process_group()\n" + TRAIN + """
if dist.get_rank() == 0:
    dist.broadcast(np.ones(3), 0)
for i in range(100):
    dist.broadcast(np.full(3, float(i)), 0)
    dist.all_reduce(np.ones(3))
""",
    environment=APART,
)  # fmt: skip
def test_one_call_more_is_found_within_a_stride(ended):
    """It shifts all that follow, though each of them has its like on the other rank."""
    ended.badly("MismatchError", "as call 302 of the group: rank 0: broadcast of 3")


@job(
    "dist.init_process_group()\n" + TRAIN + """
if dist.get_rank() == 0:
    dist.broadcast(np.ones(3), 0)
for i in range(10):
    dist.broadcast(np.full(3, float(i)), 0)
say("through")
dist.destroy_process_group()
""",
    environment=APART,
)  # fmt: skip
def test_one_call_more_among_others_like_it_is_found_at_the_end(ended):
    assert ended.lines == ["through"] * 2, ended
    ended.badly("MismatchError", "destroy_process_group", "is call 311", "call 310")


@job(
    "dist.init_process_group(timeout=600)\nrank = dist.get_rank()\n" + TRAIN + """
for i in range(3):
    $call
""",
    environment=APART,
)  # fmt: skip
@pytest.mark.parametrize(
    "call",
    [
        "dist.barrier() if rank else dist.broadcast(np.ones(1 << 22), 1)",
        "dist.all_reduce(np.ones(3)) if rank else dist.broadcast(np.ones(1 << 22), 1)",
        # The one by MPI_Allreduce, the other by an exchange.
        "dist.all_reduce(np.ones(1 << 22), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
    ],
)
def test_ranks_that_wait_in_different_calls_say_so_in_seconds(ended, call):
    """Long before the group's timeout; the first three calls do not reach a comparison."""
    ended.badly("collective mismatch", "call 301, ", " of 4194304 elements")


@job(
    "dist.init_process_group(timeout=600)\nrank = dist.get_rank()\n" + TRAIN + """
for i in range(64):
    $call
""",
    environment=APART,
)  # fmt: skip
@pytest.mark.parametrize(
    "call",
    [
        "dist.reduce(np.ones(3), 0) if rank else dist.all_reduce(np.ones(3))",
        "dist.broadcast(np.ones(3), 1 - rank)",
        "dist.broadcast(np.ones(3), rank)",
    ],
)
def test_calls_that_mpi_mixes_up_end_the_job_in_seconds(ended, call):
    """By a comparison or, where the ranks wait for each other, by what they tell each other."""
    ended.badly("collective mismatch", "301")


@job(
    "dist.init_process_group(timeout=600)\n" + TRAIN + """
if dist.get_rank() == 0:
    dist.barrier()
else:
    dist.new_group()
""",
    environment=APART,
)  # fmt: skip
def test_a_group_is_made_where_others_call(ended):
    ended.badly("collective mismatch", "call 301, barrier", "making another group after call 300")


@job(
    "dist.init_process_group(timeout=600)\n" + TRAIN + """
dist_rank = dist.get_rank()
if dist_rank == 0:
    try:
        $call
    except dist.CollectiveTimeoutError as error:
        say("caught")
dist.destroy_process_group()
say("end")
time.sleep(9 * dist_rank)  # launchers end the job with the first rank that does not finalise MPI
os._exit(0)  # an all_reduce that is stuck keeps MPI from being finalized
""",
    environment=APART,
)  # fmt: skip
@pytest.mark.parametrize(
    "call",
    [
        "dist.monitored_barrier(timeout=5)",
        "dist.all_reduce(np.ones(3), async_op=True).wait(5)",
    ],
)
def test_a_timeout_can_be_caught_where_others_have_destroyed_their_groups(ended, call):
    # The launcher may have words of its own for ranks that do not finalise MPI.
    said = [line for line in ended.lines if line in ("caught", "end")]
    assert sorted(said) == ["caught", "end", "end"], ended


@job(
    """
dist.init_process_group()
me = dist.get_rank()
for _ in range(5):
    groups = [dist.new_group() for _ in range(12)]
    x = np.ones(3)
    for group in groups:
        dist.all_reduce(x, group=group)
    # Of some the one rank is told that the other leaves, of others it is not.
    for group in groups[:: 2 + me]:
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group()
say("done")
dist.destroy_process_group()
"""
)
def test_groups_that_ranks_end_in_different_ways(ended):
    ended.in_good_order()
    assert ended.lines == ["done"] * 2


@pytest.mark.any_mpi
@job(
    "dist.init_process_group()\nrank = dist.get_rank()\n" + TRAIN + """
for i in range(100):
    x = np.ones(3 + rank if i % 10 == 0 else 3)
    try:
        dist.reduce_scatter_single(np.ones(len(x)), np.ones(2 * len(x)), dist.ReduceOp.MIN)
    except dist.DistBackendError as error:
        assert i % 10 == 0 and "later" not in str(error), (i, error)
        say("caught")
    else:
        assert i % 10, i
dist.destroy_process_group()
""",
)  # fmt: skip
def test_calls_that_failed_are_not_reported_again(ended):
    """Through the memory that ranks share, where every mismatch is found at once."""
    if "caught" not in ended.lines:
        pytest.skip("these do not go through shared memory here")
    ended.in_good_order()
    assert ended.lines == ["caught"] * 20


@job(
    "dist.init_process_group(timeout=600)\n" + TRAIN + """
if dist.get_rank() == 1:
    dist.broadcast(np.ones(3), 0)
dist.broadcast(np.ones(3), 0)
dist.destroy_process_group()
""",
    environment=APART,
)  # fmt: skip
def test_a_rank_that_has_destroyed_its_groups_is_missed_in_seconds(ended):
    ended.badly("rank 0 ended without making this call")


@pytest.mark.any_mpi
@job(
    "dist.init_process_group()\n"
    + TRAIN
    + """
for i in range(3):
    if dist.get_rank() == i % 2:
        time.sleep(3.5)  # the other tells where it is, and is left alone
    x = np.full(3, i + 1.0)
    dist.all_reduce(x)
    assert (x == 2 * i + 2).all()
    dist.barrier()
if dist.get_rank() == 0:
    time.sleep(2)  # the other does not wait for as long
dist.destroy_process_group()
say("done")
"""
)
def test_ranks_that_are_late_are_waited_for(ended):
    ended.in_good_order()
    assert ended.lines == ["done"] * 2
