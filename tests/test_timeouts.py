"""Timeouts: missing and late ranks in initialization and in calls."""

from __future__ import annotations

import pytest
from rank_scripts import HUNG, WAITING, Ended, compiled, job, needs_mpiexec

pytest_plugins = ["whole_jobs"]

pytestmark = needs_mpiexec


# --- a missing or late rank ---------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [WAITING[w] for w in ("all_reduce", "barrier", "objects")])
@job("""
    dist.init_process_group(timeout=5)
    x = np.ones(4)
    if dist.get_rank() == 1:
        time.sleep(1000)
    $waiting
    say("not reached")
""")
def test_blocking_collective_times_out(waiting: str, ended: Ended) -> None:
    ended.badly("timeout of 5 s", waiting, "rank 0")
    assert ended.seconds > 5
    assert "not reached" not in ended.out


#: Rank 1 does not call init_process_group, or is late. If it ends, the other ranks wait for its end
#: first, because Open MPI's launcher would kill them in MPI_Init before they print anything.
LATE = """
    mark = sys.argv[1] + "/pid"
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        open(mark + ".new", "w").write(str(os.getpid()))
        os.rename(mark + ".new", mark)
        $end
    if "exit" in "$end":
        while not os.path.exists(mark):
            time.sleep(0.01)
        while os.path.exists("/proc/" + open(mark).read()):
            time.sleep(0.01)
    $begin
    say("not reached")
"""
#: Code of rank 1. The other ranks time out before 8 seconds.
LATE_ENDS = pytest.mark.parametrize(
    "end", ["sys.exit(0)", "os._exit(0)", "time.sleep(1000)", "time.sleep(8)"]
)
LATE_BEGINS = pytest.mark.parametrize("begin", ["dist.init_process_group(timeout=3)"])
MISSING = "init_process_group: timed out after 3 s waiting for the other ranks (missing: 1)"


@compiled
@LATE_ENDS
@LATE_BEGINS
@job(LATE, ranks=3)
def test_init_times_out(end: str, begin: str, ended: Ended) -> None:
    ended.badly(MISSING)
    assert "not reached" not in ended.out


@pytest.mark.any_mpi
@compiled
@LATE_ENDS
@LATE_BEGINS
@job(LATE, ranks=3, options=("-m", "mpi4py"))
def test_init_times_out_after_mpi_init(end: str, begin: str, ended: Ended) -> None:
    ended.badly(MISSING)
    assert "not reached" not in ended.out


@compiled
@pytest.mark.parametrize(
    "end",
    [
        "time.sleep(1.5); import no_such_module",
        "time.sleep(1.5); os.environ['MPICOLL_DEBUG'] = 'a lot'",
    ],
)
@LATE_BEGINS
@job(LATE)
def test_failure_before_init_ends_the_job(end: str, begin: str, ended: Ended) -> None:
    """The launcher may end the job at once. Open MPI's may hang while other ranks start."""
    ended.badly("Traceback")
    assert "not reached" not in ended.out


TORCH_BEGINS = (
    "import torch; from datetime import timedelta; torch.distributed.init_process_group('mpicoll', "
    "{}timeout=timedelta(seconds=3))"
)


@pytest.mark.any_mpi
@compiled
@pytest.mark.parametrize("end", ["time.sleep(1000)", "time.sleep(8)"])
@pytest.mark.parametrize("begin", [TORCH_BEGINS.format(how) for how in ("", "'mpi://', ")])
@job(LATE, ranks=3)
def test_init_of_torch_times_out(end: str, begin: str, ended: Ended) -> None:
    pytest.importorskip("torch")
    ended.badly(MISSING)
    assert "not reached" not in ended.out


@job("""
    from datetime import timedelta
    dist.init_process_group(timeout=timedelta(minutes=30))
    late = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        dist.barrier(group=late)
    time.sleep(1000)
""")
def test_new_group_has_its_own_timeout(ended: Ended) -> None:
    ended.badly("timeout of 1 s", "dist.barrier(group=late)")


@job("""
    dist.init_process_group(timeout=60)
    rank, x = dist.get_rank(), np.ones(4)
    def timed_out(call, *words):
        start = time.monotonic()
        try:
            call()
        except dist.CollectiveTimeoutError as error:
            assert isinstance(error, TimeoutError) and isinstance(error, RuntimeError)
            assert all(word in str(error) for word in words), error
            assert time.monotonic() - start < 10
            say("timed out")
        else:
            say("not reached")
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        timed_out(lambda: work.wait(0.3), "all_reduce on rank 0", "0.3 s")
        timed_out(lambda: dist.barrier(timeout=0.5), "barrier on rank 0", "0.5 s")
        receive = dist.irecv(np.zeros(2), 1, tag=7)
        timed_out(lambda: receive.wait(0.3), "irecv on rank 0", "0.3 s")
        timed_out(lambda: work.get_future().wait(0.3))
        assert not work.is_completed() and work.exception() is None
        say("checked")
    else:
        time.sleep(4)
        dist.all_reduce(x)
        dist.barrier()
        dist.send(np.full(2, 5.0), 0, tag=7)
    if rank == 0:
        work.wait()
        receive.wait()
    assert x[0] == 2
    dist.all_reduce(x)
    assert x[0] == 4
    say("done")
    dist.destroy_process_group()
""")
def test_timed_out_work_can_be_waited_for_again(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["checked", "done", "done", *["timed out"] * 4]


@pytest.mark.parametrize("wait_all", ["False", "True"])
@job("""
    dist.init_process_group()
    if dist.get_rank() in (1, 3):
        time.sleep(1000)
    try:
        dist.monitored_barrier(timeout=0.5, wait_all_ranks=$wait_all)
    except dist.CollectiveTimeoutError as error:
        say(dist.get_rank(), error)
    if dist.get_rank() == 2:
        time.sleep(0.5)
        sys.exit(9)
    time.sleep(1000)
""", ranks=4)  # fmt: skip
def test_monitored_barrier_names_missing_ranks(wait_all: str, ended: Ended) -> None:
    assert ended.code != 0
    rank_0, rank_2 = ended.lines
    missing = "Ranks 1, 3" if wait_all == "True" else "Rank 1"
    missing += " failed to pass monitoredBarrier: did not arrive within 0.5 s"
    assert rank_0.startswith("0 ") and missing in rank_0
    assert rank_2.startswith("2 ") and "2 rank(s) did not arrive in time" in rank_2


# --- a group fails after a timeout, and the program continues ------------------------------------

#: Without hang reports, which would be printed after half of the short timeouts.
QUIET = {"MPICOLL_REPORT_AFTER": "0"}
#: Calls in which ranks 0 and 1 wait for rank 2.
CALLS = {
    "all_reduce": "dist.all_reduce(x, group=g)",
    "async": "dist.all_reduce(x, group=g, async_op=True).wait()",
    "several": "several(lambda: dist.all_reduce(x, group=g, async_op=True))",
    "future": "dist.all_reduce(x, group=g, async_op=True).get_future().wait()",
    "broadcast": "dist.broadcast(x, 0, group=g)",
    "all_to_all": "dist.all_to_all_single(np.ones(3), np.ones(3), group=g)",
    "list": "dist.all_reduce_coalesced([x, x.copy()], group=g)",
    "barrier": "dist.barrier(g)",
    "objects": "dist.all_gather_object([None] * 3, 'x', group=g)",
}

CLOSED = f"""
    import re
    dist.init_process_group(timeout=100)
    rank = dist.get_rank()
    calls = {CALLS!r}
    def several(call):
        works, errors = [call() for _ in range(3)], []
        for work in works:
            try:
                work.wait()
            except dist.CollectiveTimeoutError as error:
                errors.append(error)
        assert len(errors) == 3
        raise errors[0]
    calls.pop(os.environ.get("NOT"), None)  # its root does not wait
    for name, call in calls.items():
        for size in $sizes:
            g, x = dist.new_group(timeout=0.5), np.ones(size)
            for _ in range($before):
                dist.all_reduce(x, group=g)
            x[:] = 1
            if rank < 2:
                for again in False, True:
                    start = time.monotonic()
                    try:
                        eval(call)
                    except dist.CollectiveTimeoutError as error:
                        for word in f"on rank {{rank}}", "timeout of 0.5 s", "takes no more calls":
                            assert word in str(error), error
                        found = re.search(r"ranks?( [01],| 1-)? ?2: (.*)\\.", str(error))[2]
                        # "in call": from the node monitor, once it has started.
                        assert again or found.startswith(("$where", "in call ")), error
                    else:
                        say("no error of", name, size, again)
                    assert not again or time.monotonic() - start < 0.4
            dist.all_reduce(np.ones(3))  # rank 2 calls late
            if rank == 2:
                try:
                    for _ in range(3):
                        dist.all_reduce(x, group=g)
                except dist.CollectiveTimeoutError as error:
                    assert "has closed group" in str(error), error
                else:
                    say("no error on rank 2 of", name, size)
            dist.barrier()
            dist.destroy_process_group(g)
    say("done")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("before", "sizes", "where"),
    [
        ("0", "(4,)", "no status received"),
        ("66", "(4, 300000)", "not in this call, last in call 66"),
    ],
)
@job(CLOSED, ranks=3, environment=QUIET)
def test_late_call_raises_on_all_ranks(before: str, sizes: str, where: str, ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done"] * 3


@job(
    CLOSED.replace("$before", "66")
    .replace("$sizes", "(4,)")
    .replace("$where", "no status received"),
    ranks=3,
    environment={
        **QUIET,
        "MPICOLL_SHARED_MEMORY": "0",
        "MPICOLL_TESTED_CALLS": "1",
        "NOT": "broadcast",
    },
)
def test_late_call_raises_with_tested_calls(ended: Ended) -> None:
    """Open MPI may print an error when an abandoned call matches the late rank's next call."""
    assert ended.code == 0, ended
    assert ended.lines == ["done"] * 3


@job("""
    import re
    from mpicoll.routes import tuning
    from mpicoll.routes.host import hierarchy
    dist.init_process_group(timeout=100)
    rank = dist.get_rank()
    rows = {kind: {"nodes": ((0, "hierarchical"),)} for kind in tuning.KINDS}
    tuning.job.table = tuning.Table({1: rows})
    hierarchy.node_of = lambda: f"node {rank // 2}"
    for root in 0, 3:
        g, x = dist.new_group(timeout=0.7), np.ones(5000)
        for _ in range(70):
            dist.all_reduce(x, group=g)
        if rank < 3:
            try:
                dist.broadcast(x, root, group=g) if root else dist.all_reduce(x, group=g)
            except dist.CollectiveTimeoutError as error:
                assert "timeout of 0.7 s" in str(error), error
                known = r"ranks? [^:;]*3: (not in this call, last in call 70|in call )"
                assert rank < 2 or re.search(known, str(error)), error
            else:
                say("no error")
        dist.barrier()
        dist.destroy_process_group(g)
    say("done")
    dist.destroy_process_group()
""", ranks=4, environment=QUIET)  # fmt: skip
def test_late_call_raises_on_all_nodes(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done"] * 4


@job("""
    dist.init_process_group(timeout=100)
    pair = dist.new_group([0, 1])
    late = dist.new_group(timeout=1)
    dist.group.WORLD.timeout = 1
    if dist.get_rank() == 2:
        time.sleep(2.5)
    else:
        for call in (lambda: dist.new_group(), lambda: dist.new_subgroups(1)):
            try:
                call()
            except dist.CollectiveTimeoutError as error:
                assert "new_group on rank" in str(error) and "timeout of 1 s" in str(error), error
            else:
                say("no error")
        dist.barrier(pair)
    say("done")
    dist.destroy_process_group()
""", ranks=3)  # fmt: skip
def test_new_group_times_out(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done"] * 3


@job("""
    dist.init_process_group(timeout=100)
    dist.group.WORLD.timeout = 1
    x = np.ones(4)
    for _ in range(70):
        dist.all_reduce(x)
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(x)
    say("not reached")
""", environment={"MPICOLL_SHARED_MEMORY": "0", "MPICOLL_TIMEOUT_GRACE": "1.5"})  # fmt: skip
def test_timeout_of_a_call_blocked_inside_mpi_ends_the_job(ended: Ended) -> None:
    ended.badly(
        "dist.all_reduce(x)", "timeout of 1 s", "is blocked inside MPI", "1.5 s more",
        "MPICOLL_TIMEOUT_GRACE", "MPICOLL_TESTED_CALLS", "MPICOLL_DEBUG=DETAIL",
    )  # fmt: skip
    assert ended.seconds > 2.5
    assert "not reached" not in ended.out


@pytest.mark.parametrize("code", ["0", "7"])
@job("""
    dist.init_process_group(timeout=100)
    dist.group.WORLD.timeout = 1
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.barrier()
    except dist.CollectiveTimeoutError:
        say("caught")
    sys.exit($code)
""", environment={"MPICOLL_TIMEOUT_GRACE": "1"})  # fmt: skip
def test_rank_exits_although_another_rank_is_stopped(code: str, ended: Ended) -> None:
    """Open MPI's launcher returns another code for such a job."""
    assert "caught" in ended.lines
    assert HUNG not in ended.err and "Traceback" not in ended.err, ended
    if code == "0":
        assert "MPI is not finalized" in ended.err, ended
    else:
        assert ended.code != 0, ended
