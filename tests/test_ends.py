"""Ends of jobs: exceptions, exits, Ctrl-C, signals, and the output of failed ranks."""

from __future__ import annotations

import ast
import re

import pytest
from rank_scripts import WAITING, Ended, compiled, job, needs_torch

# --- a rank that ends ---------------------------------------------------------------------------


RAISED = ("Traceback (most recent call last)", "script.py", "ValueError: lost my way")
#: The exit hooks do not see a SystemExit that sys.exit did not raise. Waiting ranks detect the end.
UNSEEN = ("rank 1 ended without making this call", WAITING["all_reduce"])
CLOSED = ("Traceback", "DistBackendError", "the other rank has ended")


@pytest.mark.parametrize(
    ("end", "waiting", "words", "code", "traces"),
    [
        *(("raise ValueError('lost my way')", WAITING[name], RAISED, 0, 1) for name in WAITING),
        ("sys.exit(1)", WAITING["all_reduce"], (), 1, 0),
        ("sys.exit('there is no such file')", WAITING["async"], ("there is no such file",), 1, 0),
        ("sys.exit(77)", WAITING["recv"], (), 77, 0),
        ("raise SystemExit(3)", WAITING["all_reduce"], UNSEEN, 0, 1),
        ("raise SystemExit(0)", WAITING["all_reduce"], UNSEEN, 0, 1),
        ("raise SystemExit(3)", WAITING["recv"], (*CLOSED, WAITING["recv"]), 0, 1),
        ("raise SystemExit(3)", WAITING["irecv"], (*CLOSED, WAITING["irecv"]), 0, 1),
    ],
)
@job("""
    dist.init_process_group()
    x = np.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        $end
    $waiting
    say("not reached")
""")
def test_end_of_a_rank_ends_the_job(
    end: str, waiting: str, words: tuple[str, ...], code: int, traces: int, ended: Ended
) -> None:
    """code: of the job; 0: any code but 0."""
    ended.badly(*words)
    assert not code or ended.code == code, ended
    assert ended.err.count("Traceback") == traces, ended
    # A rank that raises or calls sys.exit ends the job itself, not a waiting rank.
    assert (words is UNSEEN) == ("rank 1 ended" in ended.err), ended


@job("""
    dist.init_process_group()
    x = np.ones(4)
    for _ in range(70):
        dist.all_reduce(x)
    if dist.get_rank() == 0:
        error = str(error_of(dist.MismatchError, dist.all_reduce, x))
        say("caught", "rank 1 ended without making this call" in error)
""")
def test_waiting_rank_can_catch_the_end_of_another_rank(ended: Ended) -> None:
    assert (ended.code, ended.lines) == (0, ["caught True"]), ended


@job("""
    dist.init_process_group()
    if dist.get_rank() == 1:
        raise ValueError("lost my way")
    dist.barrier()
""", options=("-m", "mpi4py"))  # fmt: skip
def test_uncaught_exception_under_mpi4pys_runner(ended: Ended) -> None:
    ended.badly("Traceback (most recent call last)", "ValueError: lost my way")


@pytest.mark.parametrize(
    ("end", "destroy"),
    [
        ("pass", ""),
        ("sys.exit(0)", ""),
        ("raise SystemExit", ""),
        ("pass", "dist.destroy_process_group()"),
        ("sys.exit()", "dist.destroy_process_group()"),
    ],
)
@job("""
    dist.init_process_group()
    x = np.ones(4)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    w = dist.isend(x, 1 - dist.get_rank())
    dist.recv(np.zeros(4))
    w.wait()
    g = dist.new_group([1])
    say("done")
    $destroy
    $end
""", options=("-W", "error"))  # fmt: skip
def test_successful_end(end: str, destroy: str, ended: Ended) -> None:
    ended.in_good_order("done", "done")


@job("""
    dist.init_process_group()
    for code in 1, "message", 3:
        try:
            sys.exit(code)
        except SystemExit as error:
            kept = error
            assert error.code == code
    import argparse
    try:
        argparse.ArgumentParser().parse_args(["--nonsense"])
    except SystemExit:
        pass
    def quiet():
        try:
            sys.exit(1)
        except SystemExit:
            return 5
    assert quiet() == 5
    time.sleep(1)
    dist.barrier()
    say("alive")
    $end
""")
@pytest.mark.parametrize("end", ["del kept", "sys.exit(0)", "dist.destroy_process_group()"])
def test_caught_sys_exit_does_not_end_the_job(end: str, ended: Ended) -> None:
    ended.printed("alive", "alive")
    assert all("usage:" in line or "error: unrecog" in line for line in ended.err.splitlines())


@job("""
    dist.init_process_group()
    thread = threading.Thread(target=lambda: sys.exit(1))
    thread.start()
    thread.join()
    time.sleep(1)
    dist.barrier()
    say("alive")
""")
def test_sys_exit_in_a_thread_does_not_end_the_job(ended: Ended) -> None:
    ended.in_good_order("alive", "alive")


@job("""
    def mine(kind, error, trace):
        say("seen", kind.__name__)
    sys.excepthook = mine
    dist.init_process_group()
    if dist.get_rank() == 1:
        raise ValueError("lost my way")
    dist.barrier()
""")
def test_excepthook_of_the_program_is_called_first(ended: Ended) -> None:
    ended.badly()
    assert ended.lines == ["seen ValueError"]


@job("""
    def refused(*_):
        raise OSError(28, "No space left on device")
    os.memfd_create = refused
    dist.init_process_group()
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()
""")
def test_sys_exit_without_a_node_monitor_is_reported(ended: Ended) -> None:
    ended.badly("mpicoll: rank 1 exited with code 3")
    assert ended.code == 3, ended


# --- without a process group ----------------------------------------------------------------------

#: How rank 1 fails, the job's exit code, and the output of rank 1.
EARLY = {
    "exception": ("raise ValueError('lost my way')", 1, "[rank 1] ValueError: lost my way"),
    "bad timeout": ("dist.init_process_group(timeout='soon')", 1, "got str"),
    "exit": ("sys.exit(3)", 3, "mpicoll: rank 1 exited with code 3"),
    "message": ("sys.exit('there is no such file')", 1, "there is no such file"),
}


#: Steps of all ranks before rank 1 fails.
STARTED = {
    "no MPI": "",
    "mpi4py": "from mpi4py import MPI",
    "destroyed": "dist.init_process_group(); dist.destroy_process_group()",
}


@pytest.mark.parametrize("started", STARTED.values(), ids=list(STARTED))
@pytest.mark.parametrize(("end", "code", "word"), EARLY.values(), ids=list(EARLY))
@job("""
    $started
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        time.sleep(1)  # meanwhile ranks 0 and 2 enter MPI_Init, or the first call after it
        $end
    dist.init_process_group()
    say("not reached")
""", ranks=3)  # fmt: skip
def test_failure_without_a_group_ends_the_job(
    started: str, end: str, code: int, word: str, ended: Ended
) -> None:
    ended.badly(word)
    assert ended.code == code and ended.out == "", ended
    assert ended.err.count("[rank 1] Traceback") == ("exit" not in end), ended


@job("""
    import subprocess
    for close_fds in True, False:
        child = subprocess.run(
            [sys.executable, "-c", "import mpicoll; raise ValueError('of a child')"],
            close_fds=close_fds, stderr=subprocess.PIPE, text=True,
        )
        assert child.returncode == 1 and "ValueError: of a child" in child.stderr
    dist.init_process_group()
    dist.barrier()
    say("alive")
""")
def test_failed_child_of_a_rank_does_not_end_the_job(ended: Ended) -> None:
    ended.in_good_order("alive", "alive")


# --- printed errors -------------------------------------------------------------------------------

MISMATCH = """
    if "$front" == "torch":
        import torch, torch.distributed as dist
    else:
        import numpy as torch
    for _ in range($cycles):
        dist.init_process_group("mpicoll")
        sys.excepthook = lambda *error, hook=sys.excepthook: hook(*error)
        dist.destroy_process_group()
    dist.init_process_group("mpicoll")
    def step():
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    step()
"""


@pytest.mark.parametrize(
    ("front", "cycles"),
    [
        ("numpy", 0),
        pytest.param("torch", 0, marks=[needs_torch, pytest.mark.nightly]),
        pytest.param("torch", 2, marks=needs_torch),  # hooks of torch call mpicoll's
    ],
)
@job(MISMATCH, limit=90)  # torch takes long to load
def test_error_of_all_ranks_is_printed_once(front: str, cycles: int, ended: Ended) -> None:
    ended.badly("MismatchError", "rank 1: all_reduce of 4 elements", "in step")
    shown = re.split("(?m)^mpicoll: ", ended.err)[0].splitlines()
    assert shown[0].endswith("] Traceback (most recent call last):"), ended
    assert {line[:8] for line in shown} in ({"[rank 0]"}, {"[rank 1]"}), ended
    assert "script.py" in shown[1] and len(shown) <= 7, ended  # without frames of libraries
    assert ended.err.count("collective mismatch") == 1, ended


@job("""
    def step():
        dist.all_reduce(np.ones(3 + dist.get_rank()))
    dist.init_process_group()
    step()
""", environment={"MPICOLL_DEBUG": "INFO"})  # fmt: skip
def test_mpicoll_debug_prints_frames_of_mpicoll(ended: Ended) -> None:
    ended.badly("MismatchError", "consistency.py", "in step")


@job("""
    dist.init_process_group()
    if dist.get_rank() == 0:
        dist.all_reduce(np.ones(3))
    dist.all_reduce(np.ones(4))
""")
def test_same_error_at_another_line_prints_that_line(ended: Ended) -> None:
    ended.badly("MismatchError")
    assert ended.err.count("collective mismatch") == 1, ended
    assert len({*re.findall(r"script\.py., line (\d+)", ended.err)}) == 2, ended


# --- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "shared_memory", "waiting"),
    [
        *((0, "1", WAITING[name]) for name in ("all_reduce", "recv", "async")),
        (70, "0", WAITING["all_reduce"]),  # in a native call of MPI
    ],
)
@job("""
    os.environ["MPICOLL_SHARED_MEMORY"] = "$shared_memory"
    dist.init_process_group()
    x = np.ones(4)
    for _ in range($calls):
        dist.all_reduce(x)
    ready()
    if dist.get_rank() == 1:
        time.sleep(1000)
    $waiting
    say("not reached")
""", interrupt=0)  # fmt: skip
def test_ctrl_c_of_one_rank_ends_the_job(
    calls: int, shared_memory: str, waiting: str, ended: Ended
) -> None:
    ended.badly("Traceback (most recent call last)", waiting, "interrupted while" if calls else "")
    assert re.search("KeyboardInterrupt|interrupted", ended.err), ended


@job("""
    dist.init_process_group()
    ready()
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(np.ones(4))
    say("not reached")
""", interrupt="mpiexec")  # fmt: skip
def test_ctrl_c_of_mpiexec_ends_the_job(ended: Ended) -> None:
    ended.badly()


@job("""
    dist.init_process_group()
    ready()
    if dist.get_rank() == 0:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            say("caught")
    dist.barrier()
    say("done")
    dist.destroy_process_group()
""", interrupt=0)  # fmt: skip
def test_caught_ctrl_c_does_not_end_the_job(ended: Ended) -> None:
    ended.in_good_order("caught", "done", "done")


# --- signal handlers of the program ---------------------------------------------------------------


@compiled
@pytest.mark.parametrize(
    ("handles", "printed"),
    [
        ("sys.exit(9)", ["finally"]),
        ("raise ZeroDivisionError", ["caught", "finally", "the group has failed"]),
        ("None", ["finally", "rank 0 continued", "rank 1 continued"]),
    ],
)
@job("""
    dist.init_process_group(timeout=20)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    def handle(number, frame):
        handled.append(1)
        $handles
    handled = []
    signal.signal(signal.SIGTERM, handle)
    x = np.ones(4)
    for _ in range(70):
        dist.all_reduce(x)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.7)
        os.kill(pids[0], signal.SIGTERM)
        time.sleep(0.7)
        dist.all_reduce(x)
        say("rank 1 continued")
        sys.exit(0)
    try:
        dist.all_reduce(x)
        assert handled == [1]
        say("rank 0 continued")
    except ZeroDivisionError:
        say("caught")
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as error:
            say("the group has failed") if "raised ZeroDivisionError" in str(error) else 0
        sys.exit(4)
    finally:
        say("finally")
""")
def test_signal_handlers_run_during_a_call(handles: str, printed: list[str], ended: Ended) -> None:
    assert ended.lines == printed, ended


@compiled
@job("""
    dist.init_process_group(timeout=20)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    x, y, refused, other = np.ones(4), np.ones(1), [], dist.new_group()
    def handle(number, frame):
        for call in (dist.barrier, lambda: dist.all_reduce(x, async_op=True),
                     lambda: dist.all_gather_object([None, None], 1),
                     lambda: dist.monitored_barrier(timeout=3), dist.destroy_process_group):
            refused.append("inside call 72 of group 0" in str(error_of(ValueError, call)))
        dist.all_reduce(y, group=other)
    signal.signal(signal.SIGUSR2, handle)
    for _ in range(70):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGUSR2)
        dist.all_reduce(y, group=other)
    dist.all_reduce(x)
    say(x[0], y[0], *refused)
    dist.destroy_process_group()
""")
def test_call_in_a_signal_handler_raises_if_it_would_wait_for_the_interrupted_call(
    ended: Ended,
) -> None:
    ended.in_good_order()
    assert sorted(ended.lines) == ["2.0 2.0", "2.0 2.0" + 5 * " True"]


# --- messages before the end --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise ValueError('lost my way')", ["Traceback", "script.py", "ValueError: lost my way"]),
        (
            "dist.barrier()",
            ["Traceback", "dist.barrier()", "on rank 0", "not all ranks of group"],
        ),
        (
            "kept.append(dist.all_reduce(np.ones(3), async_op=True))",
            ["rank 0 of group 0 ends with work pending"],
        ),
    ],
)
@job("""
    class Stream:  # prints one line per write
        def write(self, text):
            os.write(1, (repr(text) + "\\n").encode())
        def flush(self):
            pass
    dist.init_process_group(timeout=8)
    kept = []
    if dist.get_rank() == 1:
        time.sleep(1000)
    sys.stderr = Stream()
    $end
""")
def test_message_is_written_in_one_call(end: str, words: list[str], ended: Ended) -> None:
    assert ended.code != 0 and len(ended.lines) == 1, ended
    text = ast.literal_eval(ended.lines[0])
    assert text.endswith("\n") and all(word in text for word in words), text


# --- init_process_group as a context manager ----------------------------------------------------


@pytest.mark.parametrize(
    ("before", "waiting"),
    [
        ("pass", WAITING["all_reduce"]),
        ("pass", WAITING["objects"]),
        ("dist.all_reduce(y, async_op=True)", WAITING["recv"]),
        ("dist.irecv(y, 0)", WAITING["barrier"]),
    ],
)
@job("""
    import contextlib
    x, y = np.ones(4), np.ones(4)
    with contextlib.ExitStack() as stack:
        late = lambda: time.sleep(0.2 * rank)  # on a busy machine rank 0 receives the end first
        stack.callback(late)
        stack.enter_context(dist.init_process_group(timeout=100))
        rank = dist.get_rank()
        if rank == 1:
            $before
            raise KeyError("mine")
        $waiting
        say("not reached")
""")
def test_exception_in_a_block_ends_the_job(before: str, waiting: str, ended: Ended) -> None:
    ended.badly("KeyError: 'mine'")


@job("""
    try:
        with dist.init_process_group(timeout=100):
            if dist.get_rank() == 1:
                raise KeyError("mine")
            dist.all_reduce(np.ones(4))
            say("not reached")
    except KeyError:
        say("caught")
""")
def test_caught_exception_of_a_block_ends_waiting_ranks(ended: Ended) -> None:
    ended.badly("rank 1 ended without making this call")
    assert "caught" in ended.out
