"""Ranks of a job: initialization, groups of a subset of the world, a default group that shrinks."""

from __future__ import annotations

import pytest
from rank_scripts import Ended, compiled, job

# --- a rank that fails during initialization ----------------------------------------------------


@job("""
    def broken(*args, **kwargs):
        raise OSError("the disk is full")
    def fail_on(failing, breaks, restores, words, **arguments):
        if failing == me:
            breaks()
        else:
            arguments = {}
        try:
            dist.init_process_group(**{"timeout": 60} | arguments)
            say("no error", words)
        except Exception as error:
            quotes = isinstance(error, dist.LaunchError) and f"rank {failing} failed" in str(error)
            say(failing == me, quotes, words in str(error))
        restores()
    def patch(where, name):
        kept = getattr(where, name)
        return lambda: setattr(where, name, broken), lambda: setattr(where, name, kept)
    def nothing():
        pass

    me = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
    dist.init_process_group()
    dist.destroy_process_group()
    for failing in range(2):
        fail_on(failing, nothing, nothing, "expected a datetime.timedelta", timeout="long")
    fail_on(1, nothing, nothing, "reproducible: expected", reproducible="yes")
    fail_on(1, nothing, nothing, "rank=5 disagrees", rank=5)
    fail_on(0, nothing, nothing, "world_size=4 disagrees with MPI's own world", world_size=4)
    fail_on(0, nothing, nothing, "http://there", init_method="http://there")
    fail_on(1, lambda: os.environ.update(MPICOLL_SETTING="1"),
            lambda: os.environ.pop("MPICOLL_SETTING", None), "unknown setting")
    from mpicoll.api import lifecycle
    from mpicoll.routes import tuning_files
    fail_on(1, *patch(lifecycle, "find_facts"), "disk is full")
    fail_on(0, *patch(lifecycle, "Watchdog"), "disk is full")
    fail_on(0, *patch(tuning_files, "read"), "disk is full")
    dist.init_process_group()
    x = np.array([me + 1])
    dist.all_reduce(x)
    say("sum", x[0])
    dist.destroy_process_group()
""")
def test_local_failure_raises_on_all_ranks(ended: Ended) -> None:
    """The failed rank raises its own error, other ranks raise one that quotes it. All can retry."""
    ended.in_good_order()
    expected = ["True False True", "False True True"] * 10 + ["sum 3"] * 2
    assert ended.lines == sorted(expected), ended


# --- other ranks and sizes ----------------------------------------------------------------------


@job("""
    import socket
    me = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
    number = 0
    def group(*members):  # in the order of their ranks
        global number
        number += 1
        if me not in members:
            return
        rank = members.index(me)
        method = f"file://{sys.argv[1]}/meet-{number}"
        dist.init_process_group("mpi", method, rank=rank, world_size=len(members))
        assert (dist.get_rank(), dist.get_world_size()) == (rank, len(members))
        x, y = np.array([2**me]), np.array([me])
        dist.all_reduce(x)
        dist.broadcast(y, 0)
        assert (x[0], y[0]) == (sum(2**member for member in members), members[0])
        assert os.environ["RANK"] == str(rank)
        comm = dist.group.WORLD.comm
        assert (comm.rank, comm.size) == (rank, len(members))
        dist.destroy_process_group()
    group(0, 1, 2)
    group(2, 0, 1)
    group(1)
    group(0, 1, 2)
    for size in 2, 3:
        method = "file:///" + sys.argv[1] + "/x"
        init = dist.init_process_group
        say(error_of(dist.LaunchError, init, "mpi", method, rank=0, world_size=size))
    say("done")
""", ranks=3)  # fmt: skip
def test_default_group_of_all_ranks_in_another_order_or_of_one(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines[:3] == ["done"] * 3, ended
    assert all("were given the ranks [0, 0, 0]" in line for line in ended.lines[3:6]), ended
    assert all("got world_size 2, and MPI has 3 ranks" in line for line in ended.lines[6:]), ended


# --- a communicator as default group ------------------------------------------------------------

#: Begins a program of mpi4py with communicators of the even ranks and of the odd ranks.
PARTS = """
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    part = world.Split(world.rank % 2)
    """


@compiled
@job(PARTS + """
    if world.rank == 2:
        time.sleep(8)
    if world.rank % 2:
        time.sleep(1000)
    dist.init_process_group(comm=part, timeout=3)
    say("not reached")
""", ranks=4)  # fmt: skip
def test_missing_member_of_a_communicator_times_out(ended: Ended) -> None:
    ended.badly(
        "mpicoll: rank 0 of 2: init_process_group: timed out after 3 s waiting for the other ranks "
        "(missing: 1)"
    )


@job(PARTS + """
    if world.rank % 2:
        if world.rank == 3:
            part.recv(source=0)
        else:
            part.send("independent", 1)
        say("done")
    else:
        dist.init_process_group(comm=part, timeout=20)
        x = np.ones(1 << 16)
        dist.all_reduce(x)
        say(dist.get_rank(), x[0])
        if "$destroy":
            dist.destroy_process_group()
    MPI.Finalize() if "$destroy" else None
""", ranks=4)  # fmt: skip
@pytest.mark.parametrize("destroy", ["yes", ""])
def test_ranks_outside_the_communicator_continue(destroy: str, ended: Ended) -> None:
    ended.in_good_order("0 2.0", "1 2.0", "done", "done")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise KeyError('mine')", "KeyError: 'mine'"),
        ("time.sleep(1000)", "called within its timeout of 5 s"),
        ("sys.exit(0)", "rank 1 ended without making this call"),
        ("MPI.COMM_WORLD.Abort(3)", ""),
    ],
)
@job(PARTS + """
    dist.init_process_group(comm=part, timeout=5)
    dist.barrier()
    if world.rank == 2:
        $end
    if world.rank % 2:
        time.sleep(1000)  # the other program of a coupled job
    dist.all_reduce(np.ones(1))
    say("not reached")
""", ranks=4)  # fmt: skip
def test_failed_member_ends_the_job(end: str, words: str, ended: Ended) -> None:
    ended.badly(words)


# --- shrinking the default group ----------------------------------------------------------------


@pytest.mark.parametrize("flags", ["SHRINK_DEFAULT", "SHRINK_ABORT"])
@job("""
    import warnings
    dist.init_process_group()
    rank = dist.get_rank()
    other = dist.new_group([0, 2])
    x = np.full(3, rank + 1.0)
    dist.all_reduce(x)
    assert x[0] == 6
    if rank == 1:
        say("excluded:", error_of(dist.MpicollError, dist.shrink_group, [1]))
        sys.exit()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = dist.group.WORLD
        made = dist.shrink_group([1], shrink_flags=dist.$flags)
    say("warned:", [str(one.message) for one in caught])
    assert made is dist.group.WORLD and made is not old
    assert (dist.get_rank(), dist.get_world_size()) == ({0: 0, 2: 1}[rank], 2)
    assert dist.get_process_group_ranks(made) == [0, 1]
    assert dist.get_pg_count() == 1
    for destroyed in old, other:
        assert "destroyed" in str(error_of(ValueError, dist.all_reduce, x, group=destroyed))
    x[:] = rank
    dist.all_reduce(x)
    assert x[0] == 2
    dist.all_reduce(x, async_op=True).wait()
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    dist.new_group([1])
    say("done", x[0])
    dist.destroy_process_group()
""", ranks=3)  # fmt: skip
def test_shrink_default_group(flags: str, ended: Ended) -> None:
    ended.in_good_order()
    lines = ended.lines
    assert lines[:2] == ["done 4.0"] * 2
    assert "rank 1 is excluded" in lines[2]
    assert len(lines) == 5
    assert all("ends 1 other group(s)" in line for line in lines[3:])


# --- groups created by a subset of the ranks -----------------------------------------------------


@job("""
    dist.init_process_group(timeout=15)
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank != 1:
        mine, made = dist.new_subgroups(1, group)
        assert dist.get_process_group_ranks(mine) == [rank] and len(made) == 2
    dist.barrier(dist.new_group())
    say("done")
    dist.destroy_process_group()
""", ranks=3)  # fmt: skip
def test_only_members_create_subgroups_of_a_group(ended: Ended) -> None:
    ended.in_good_order(*["done"] * 3)
