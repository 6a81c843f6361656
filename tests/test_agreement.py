"""Jobs whose ranks differ in settings, versions, calls or progress."""

from __future__ import annotations

import re

import pytest
from rank_scripts import HUNG, Job, job, needs_mpiexec, run

#: With shared memory every mismatch is found at once. Without it, ranks compare call records.
MESSAGES = {"MPICOLL_SHARED_MEMORY": "0"}

#: The rank, before MPI is initialized.
RANK = """
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
"""

#: 300 calls. The first calls of a group are all compared, the later ones are not.
TRAIN = """
for i in range(300):
    x = np.array([1, 2, 4], np.int64) << dist.get_rank()
    dist.all_reduce(x)
    assert x.tolist() == [3, 6, 12], (i, x)
"""


def trained(script, environment=MESSAGES):
    """Return the decorator of a test whose job runs ``script`` after TRAIN."""
    start = "dist.init_process_group(timeout=600)\nrank = dist.get_rank()\n"
    return job(start + TRAIN + script, environment=environment)


# ---- settings and versions -----------------------------------------------------------------------


@pytest.mark.any_mpi
@trained("""
if rank == 1:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
for i in range(64):  # including a compared call
    dist.all_reduce(np.ones(3))
op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
error = str(error_of(dist.MismatchError, dist.all_reduce, np.ones(3), op))
assert "later" not in error, error
say("at once")
if rank == 1:
    dist.set_debug_level(dist.DebugLevel.OFF)
dist.all_reduce(np.ones(3))
number = dist.group.WORLD.sequence
assert dist.group.WORLD.next_check > number + 1, "every call is still compared"
dist.destroy_process_group()
""")
def test_set_debug_level_on_one_rank_applies_to_all_ranks(ended):
    ended.in_good_order(*["at once"] * 2)


@pytest.mark.any_mpi
@trained("""
mine, n = np.ones(4), dist.get_world_size()
try:
    if rank == 0:
        dist.all_reduce(mine)
    else:
        $other
except dist.MismatchError:
    say("raised")
dist.destroy_process_group()
""", environment={})  # fmt: skip
@pytest.mark.parametrize(
    "other", ["dist.all_gather_object([None] * n, 1)", "dist.all_to_all_single(mine, mine.copy())"]
)
def test_destroy_does_not_report_a_mismatch_again(ended, other):
    ended.in_good_order(*["raised"] * 2)


@job(
    RANK + "if rank == 1:\n    import mpi4py\n    mpi4py.rc.thread_level = '$level'\n"
    "dist.init_process_group()\n" + TRAIN +
    "works = [dist.all_reduce(np.ones(9), async_op=True) for _ in range(5)]\n"
    "for work in works:\n    work.wait()\n"
    "dist.destroy_process_group()\nsay('done')",
)  # fmt: skip
@pytest.mark.parametrize("level", ["single", "serialized"])
def test_ranks_may_have_different_thread_levels(ended, level):
    # No progress thread and no warning if all calls run inline.
    assert ended.code == 0, ended
    assert not ended.err or "before the program calls MPI itself" in ended.err, ended
    assert ended.lines == ["done"] * 2


@pytest.mark.any_mpi
@job(RANK + "dist.__version__ += '+other' if rank == 1 else ''\ndist.init_process_group()")
def test_init_rejects_different_versions(ended):
    ended.badly("LaunchError", "do not run the same mpicoll", "the version of mpicoll is rank 0: ")
    assert len(re.findall(r"LaunchError: .*rank 1: [\w.]+\+other", ended.err)) == 1, ended


@pytest.mark.any_mpi
@job(
    RANK
    + """
import pathlib, shutil, tempfile
home, copy = pathlib.Path(dist.__file__).parent, tempfile.TemporaryDirectory()
other = pathlib.Path(shutil.copytree(home, pathlib.Path(copy.name) / "mpicoll"))
with open(other / "$source", "a") as file:
    file.write("# rank {}".format(rank))
dist.__file__ = str(other / "__init__.py")
dist.init_process_group()
"""
)
@pytest.mark.parametrize("source", ["routes/host/shared.py", "failures/consistency.py"])
def test_init_rejects_different_sources(ended, source):
    ended.badly("LaunchError", f"{source} is rank 0: ")
    assert len(re.findall(f"LaunchError: .*{source} is rank 0", ended.err)) == 1, ended


# ---- collective mismatches after the first calls ------------------------------------------------


@trained("""
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT]
try:
    for i in range(64):
        $call
    say("not found")
except dist.MismatchError as error:
    say("found", error)
error_of(dist.MismatchError, dist.barrier)
say("failed")
dist.destroy_process_group()
""")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("dist.all_reduce(np.ones(3), OPS[rank])", "PRODUCT"),
        ("dist.all_reduce(np.ones(3, np.uint64 if rank else np.int64))", "of uint64"),
        ("dist.broadcast(np.ones(3, np.uint64 if rank else np.int64), 0)", "of uint64"),
    ],
)
def test_mismatch_that_mpi_does_not_detect_is_found_within_64_calls(ended, call, words):
    ended.in_good_order()
    found = [line for line in ended.lines if line.startswith("found")]
    assert len(found) == 2 and all("as call 301 of the group" in line for line in found), ended
    assert all(words in line and "cannot be used any more" in line for line in found), ended
    assert ended.lines.count("failed") == 2, ended


#: The counts are so large that no rank returns from the call before all ranks have entered it.
SIZES = """
dist.init_process_group()
for i in range(69):
    dist.all_reduce(np.ones(3))
    time.sleep(0.01)
dist.all_reduce(np.ones(300_000 + 100_000 * dist.get_rank()))
dist.barrier()
"""


@needs_mpiexec
@pytest.mark.parametrize("ranks", [2, 3])
def test_mismatch_of_sizes_that_mpi_rejects_is_reported(ranks, tmp_path):
    ended = run(Job(SIZES, ranks, environment=MESSAGES), {}, tmp_path)
    assert ended.code != 0 and HUNG not in ended.err, ended
    _, found, text = ended.err.partition("collective mismatch")
    named = sum(f"all_reduce of {3 + rank}00000 elements" in text for rank in range(ranks))
    # All ranks, or two ranks if a waiting rank has found the mismatch first.
    assert found and "call 70" in text and named >= 2, ended


@trained("""
if rank == 0:
    dist.broadcast(np.ones(3), 0)
for i in range(10):
    dist.broadcast(np.full(3, float(i)), 0)
say("through")
dist.destroy_process_group()
""")
def test_additional_call_before_equal_calls_is_found_by_destroy(ended):
    assert ended.lines == ["through"] * 2, ended
    ended.badly("MismatchError", "destroy_process_group", "call 311", "call 310")


@trained("""
B, n, Op = dist.broadcast, 1 << 22, dist.ReduceOp
for i in range(64):
    $script
""")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        # Ranks wait in different calls. Status messages show it, because no comparison is due.
        ("dist.barrier() if rank else B(np.ones(n), 1)", " of 4194304 "),
        ("dist.all_reduce(np.ones(3)) if rank else B(np.ones(n), 1)", " of 4194304 "),
        # Rank 0 calls MPI_Allreduce, rank 1 exchanges messages.
        ("dist.all_reduce(np.ones(n), Op.MAX if rank else Op.SUM)", " of 4194304 "),
        # Found by a comparison, or by status messages if the ranks wait for each other.
        ("dist.reduce(np.ones(3), 0) if rank else dist.all_reduce(np.ones(3))", "301"),
        ("B(np.ones(3), 1 - rank)", "301"),
        ("B(np.ones(3), rank)", "301"),
        ("dist.new_group() if rank else dist.barrier()", "making another group after call 300"),
        # An additional call of one rank.
        ("B(np.ones(3), 0) if rank + i == 0 else 0; B(np.ones(3), 0); dist.all_reduce(np.ones(3))",
         "as call 302 of the group: rank 0: broadcast of 3"),
    ],
)  # fmt: skip
def test_mismatch_ends_the_job_before_the_timeout(ended, script, words):
    ended.badly("collective mismatch", words)


@trained("""
if rank == 0:
    try:
        $call
    except dist.CollectiveTimeoutError as error:
        say("caught")
dist.destroy_process_group()
say("end")
time.sleep(9 * rank)  # launchers end the job with the first rank that does not finalize MPI
os._exit(0)  # MPI cannot be finalized while an all_reduce is stuck
""")
@pytest.mark.parametrize(
    "call",
    ["dist.monitored_barrier(timeout=5)", "dist.all_reduce(np.ones(3), async_op=True).wait(5)"],
)
def test_timeout_is_raised_if_other_ranks_have_destroyed_their_groups(ended, call):
    # The launcher may print a message about ranks that do not finalize MPI.
    printed = [line for line in ended.lines if line in ("caught", "end")]
    assert sorted(printed) == ["caught", "end", "end"], ended


@job("""
dist.init_process_group()
me = dist.get_rank()
for _ in range(5):
    groups = [dist.new_group() for _ in range(12)]
    x = np.ones(3)
    for group in groups:
        dist.all_reduce(x, group=group)
    # Each rank destroys different groups. The second destroy ends the remaining groups.
    for group in groups[:: 2 + me]:
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group()
say("done")
dist.destroy_process_group()
""")
def test_ranks_may_destroy_groups_in_different_ways(ended):
    ended.in_good_order(*["done"] * 2)


@pytest.mark.any_mpi
@trained("""
for i in range(3):
    if rank == i % 2:
        time.sleep(3.5)  # the waiting rank sends its status, and this rank ignores it
    x = np.full(3, i + 1.0)
    dist.all_reduce(x)
    assert (x == 2 * i + 2).all()
    dist.barrier()
if rank == 0:
    time.sleep(2)  # longer than destroy waits on rank 1
dist.destroy_process_group()
say("done")
""", environment={})  # fmt: skip
def test_late_rank_does_not_fail_the_group(ended):
    ended.in_good_order(*["done"] * 2)
