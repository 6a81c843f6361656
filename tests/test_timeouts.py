"""Timeouts and hang reports: missing and late ranks in initialization and in calls."""

from __future__ import annotations

import re

import pytest
from rank_scripts import HUNG, Ended, compiled, job, needs_torch

# --- a missing or late rank ---------------------------------------------------------------------


#: Rank 1 does not call init_process_group, or is late. If it ends, the other ranks wait for its end
#: first, because Open MPI's launcher would kill them in MPI_Init before they print anything.
LATE = """
    $start
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
INIT = "dist.init_process_group(timeout=3)"
TORCH_INIT = (
    "import torch; from datetime import timedelta; torch.distributed.init_process_group('mpicoll', "
    "{}timeout=timedelta(seconds=3))"
)


#: The other ranks time out before 8 seconds.
SLEEPS = ["time.sleep(1000)", "time.sleep(8)"]


@compiled
@pytest.mark.parametrize(
    ("start", "begin", "end"),
    [
        *(("", INIT, end) for end in (*SLEEPS, "sys.exit(0)", "os._exit(0)")),
        *(
            pytest.param(start, begin, end, marks=[pytest.mark.any_mpi, needs_torch])
            for start, begin in [
                ("from mpi4py import MPI", INIT),
                ("", TORCH_INIT.format("")),
                ("", TORCH_INIT.format("'mpi://', ")),
            ]
            for end in SLEEPS[:1]
        ),
    ],
)
@job(LATE, ranks=3)
def test_init_times_out(start: str, begin: str, end: str, ended: Ended) -> None:
    ended.badly("init_process_group: timed out after 3 s waiting for the other ranks (missing: 1)")


# --- a group fails after a timeout, and the program continues ------------------------------------

#: Without hang reports, which would be printed after half of the short timeouts.
QUIET = {"MPICOLL_REPORT_AFTER": "0"}
#: Calls in which ranks 0 and 1 wait for rank 2.
CALLS = {
    "all_reduce": "dist.all_reduce(x, group=g)",
    "async": "dist.all_reduce(x, group=g, async_op=True).wait()",
    "several": "several(lambda: dist.all_reduce(x, group=g, async_op=True))",
    "future": "dist.all_reduce(x, group=g, async_op=True).get_future().wait()",
    "broadcast": "dist.broadcast(x, 2, group=g)",
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
        works = [call() for _ in range(3)]
        raise [error_of(dist.CollectiveTimeoutError, work.wait) for work in works][0]
    for name, call in calls.items():
        for size in $sizes:
            g, x = dist.new_group(timeout=0.5), np.ones(size)
            for _ in range($before):
                dist.all_reduce(x, group=g)
            x[:] = 1
            if rank < 2:
                for again in False, True:
                    start = time.monotonic()
                    error = str(error_of(dist.CollectiveTimeoutError, eval, call, globals()))
                    for word in f"on rank {{rank}}", "timeout of 0.5 s", "takes no more calls":
                        assert word in error, (name, size, again, error)
                    found = re.search(r"ranks?( [01],| 1-)? ?2: (.*)\\.", error)[2]
                    # "in call": from the node monitor, once it has started.
                    assert again or found.startswith(("no status received", "in call ")), error
                    assert not again or time.monotonic() - start < 0.4
            dist.all_reduce(np.ones(3))  # rank 2 calls late
            if rank == 2:
                late = lambda: [dist.all_reduce(x, group=g) for _ in range(3)]
                error = str(error_of(dist.CollectiveTimeoutError, late))
                assert "has closed group" in error, (name, size, error)
            dist.barrier()
            dist.destroy_process_group(g)
    say("done")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("before", "sizes"), [("0", "(4,)"), ("66", "(300000,)")])
@job(CLOSED, ranks=3, environment=QUIET, limit=60)
def test_late_call_raises_on_all_ranks(before: str, sizes: str, ended: Ended) -> None:
    ended.in_good_order(*["done"] * 3)


@job(
    CLOSED.replace("$before", "66").replace("$sizes", "(4,)"),
    ranks=3,
    environment={**QUIET, "MPICOLL_SHARED_MEMORY": "0", "MPICOLL_TESTED_CALLS": "1"},
    limit=60,
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
    for scatters in False, True:
        g, x, block = dist.new_group(timeout=0.7), np.ones(5000), np.ones(1250)
        for _ in range(70):
            dist.all_reduce(x, group=g)
        if rank < 3:
            call = (dist.reduce_scatter_single, block, x) if scatters else (dist.all_reduce, x)
            error = str(error_of(dist.CollectiveTimeoutError, *call, group=g))
            assert "timeout of 0.7 s" in error, error
            known = r"ranks? [^:;]*3: (no status received|in call )"
            assert rank < 2 or re.search(known, error), error
        dist.barrier()
        dist.destroy_process_group(g)
    say("done")
    dist.destroy_process_group()
""", ranks=4, environment=QUIET)  # fmt: skip
def test_late_call_raises_on_all_nodes(ended: Ended) -> None:
    ended.in_good_order(*["done"] * 4)


@job("""
    dist.init_process_group(timeout=100)
    pair = dist.new_group([0, 1])
    late = dist.new_group(timeout=1)
    dist.group.WORLD.timeout = 1
    if dist.get_rank() == 2:
        time.sleep(2.5)
    else:
        for call in (lambda: dist.new_group(), lambda: dist.new_subgroups(1)):
            error = str(error_of(dist.CollectiveTimeoutError, call))
            assert "new_group on rank" in error and "timeout of 1 s" in error, error
        dist.barrier(pair)
    say("done")
    dist.destroy_process_group()
""", ranks=3)  # fmt: skip
def test_new_group_times_out(ended: Ended) -> None:
    ended.in_good_order(*["done"] * 3)


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


# --- reports of hangs and lost ranks ------------------------------------------------------------


@pytest.mark.waits
@pytest.mark.parametrize(
    ("calls", "action", "expected"),
    [
        (3, "load()", ("rank 1: in Python, after call", "in load")),
        (99, "ctypes.PyDLL(None).sleep(1000)", ("rank 1: in Python, after call",)),
        (99, "os.kill(os.getpid(), signal.SIGSTOP)", ("rank 1: stopped",)),
        # It waits longer than the other ranks, which therefore time out first.
        (99, "dist.irecv(x, 0).wait(60)", ("rank 1: in Python, after call", "in wait")),
    ],
    ids=["asleep", "holds the interpreter lock", "stopped", "in a receive"],
)
@job("""
    import ctypes
    def load():
        time.sleep(1000)
    os.environ["MPICOLL_REPORT_AFTER"] = "1.5"
    dist.init_process_group(timeout=5)
    x = np.ones(4)
    for _ in range($calls):
        dist.all_reduce(x)
    if dist.get_rank() == 1:
        $action
    dist.all_reduce(x)
""", ranks=3)  # fmt: skip
def test_hang_is_reported_once_before_the_timeout(
    calls: int, action: str, expected: tuple[str, ...], ended: Ended
) -> None:
    head = "mpicoll: ranks 0, 2 of group 0 (3 ranks) wait for 2 s in call"
    ended.badly(f"{head} {calls + 1} of group 0: all_reduce of 4 elements of float64, SUM",
                *expected)  # fmt: skip
    assert ended.err.count(head) == 1
    # The timeout has the same information.
    assert len(re.findall(r"rank 1: (in Python, )?(after call|stopped)", ended.err)) > 1


@job("""
    os.environ["MPICOLL_REPORT_AFTER"] = "0.2"
    for turn in range(2):
        dist.init_process_group(timeout=20)
        if dist.get_rank() == 1:
            time.sleep(2)
        dist.barrier()
        dist.destroy_process_group()
""")
def test_hang_is_reported_again_after_a_second_init(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.err.count("mpicoll: rank 0 of group 0 (2 ranks) waits for") == 2


@job("""
    for _ in range(3):  # monitors may start after the next init_process_group
        dist.init_process_group()
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
""", ranks=3)  # fmt: skip
def test_only_the_latest_monitor_reports_a_lost_rank(ended: Ended) -> None:
    assert re.findall(r"mpicoll: lost.*? of 3", ended.err) == ["mpicoll: lost: rank 1 of 3"], ended


@job("""
    dist.init_process_group()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        import subprocess
        command = [sys.executable, "-m", "mpicoll", "watch", str(os.getppid()), "--stacks"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "MPI"))}
        done = subprocess.run(command, capture_output=True, text=True, env=clean)
        say(done.stdout, done.stderr, done.returncode)
    dist.barrier()
    dist.destroy_process_group()
""")
def test_watch_prints_the_calls_and_stacks_of_a_job(ended: Ended) -> None:
    ended.in_good_order()
    assert "2 ranks: " in ended.out and "rank 0: in call 1 of group 0: barrier" in ended.out
    assert "rank 1: in Python, before its first call" in ended.out
    assert "in run" in ended.out and "script.py:" in ended.out
