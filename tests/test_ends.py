"""Whole jobs: how they end, in good order or not, and what only a job of its own can show.

Each test is a small script that mpiexec runs on two ranks or more. No job may hang: a rank that is
still there after LIMIT seconds prints where it is and goes.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import pytest
from whole_jobs import made_by

import mpicoll
from mpicoll.kernels.library import kernels

pytest_plugins = ["whole_jobs"]

MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))

pytestmark = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")

#: Seconds after which a job counts as hanging. Most take two.
LIMIT = 25
#: What a rank prints then.
HUNG = "(most recent call first)"

#: What every script begins with.
PREAMBLE = f"""
import faulthandler, os, signal, sys, threading, time
faulthandler.register(signal.SIGALRM, chain=True)  # print where all threads are, then die
signal.alarm({LIMIT})
import numpy as np
import mpicoll as dist

def say(*words):  # one write, so that ranks do not print into each other's lines
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def ready():  # the test may send its signal
    open(sys.argv[1] + f"/pid-{{dist.get_rank()}}", "w").write(str(os.getpid()))
"""


@dataclass(frozen=True)
class Job:
    """A script and how it is started.

    options:   of Python.
    interrupt: who gets SIGINT once all ranks have called ready(): "mpiexec", or a rank's number.
    """

    script: str
    ranks: int = 2
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    interrupt: str | int = ""


@dataclass(frozen=True)
class Ended:
    """How a job ended: mpiexec's exit code, what was printed, and after how long."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.split("\n"))[1:]

    def in_good_order(self) -> None:
        assert (self.code, self.err) == (0, ""), self

    def badly(self, *words: str) -> None:
        """The job ended at once, with a code that says so, its own words before those of MPI."""
        assert self.code != 0, self
        assert HUNG not in self.err, f"a rank hung\n{self}"
        first = re.split("(?i)MPI_Abort", self.err, maxsplit=1)[0]
        for word in words:
            assert word in first, f"{word!r} is missing\n{self}"

    def __str__(self) -> str:
        return (
            f"exit code {self.code} after {self.seconds:.1f} s\n---- stdout\n{self.out}"
            f"---- stderr\n{self.err}"
        )


job = made_by(Job)


def run(task: Job, parameters: dict[str, Any], folder: Path) -> Ended:
    script = folder / "script.py"
    script.write_text(PREAMBLE + Template(task.script).safe_substitute(parameters))
    command = [*MPIEXEC, "-n", str(task.ranks), sys.executable, *task.options, script, folder]
    start = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | task.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if task.interrupt != "":
            send_interrupt(task, process, folder)
        out, err = process.communicate(timeout=start + LIMIT + 10 - time.monotonic())
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the job did not end: {error}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(process.returncode, out, err, time.monotonic() - start)


def send_interrupt(task: Job, process: subprocess.Popen[str], folder: Path) -> None:
    marks = [folder / f"pid-{rank}" for rank in range(task.ranks)]
    while not all(mark.exists() and mark.read_text() for mark in marks):
        if process.poll() is not None:
            return
        time.sleep(0.05)
    time.sleep(1)  # let them reach the call
    if task.interrupt == "mpiexec":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(int(marks[int(task.interrupt)].read_text()), signal.SIGINT)


# --- a rank that goes ---------------------------------------------------------------------------

#: What the others may be waiting in.
WAITING = {
    "all_reduce": "dist.all_reduce(x)",
    "recv": "dist.recv(x, 1)",
    "irecv": "dist.irecv(x, 1).wait()",
    "async": "dist.all_reduce(x, async_op=True).wait()",
    "barrier": "dist.barrier()",
    "objects": "dist.all_gather_object([None, None], 'x')",
}


@pytest.mark.parametrize("waiting", WAITING.values(), ids=list(WAITING))
@job("""
    dist.init_process_group()
    x = np.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        raise ValueError("lost my way")
    $waiting
    say("not reached")
""")
def test_uncaught_exception(waiting: str, ended: Ended) -> None:
    ended.badly("Traceback (most recent call last)", "script.py", "ValueError: lost my way")
    assert "not reached" not in ended.out
    # It is the rank that failed that ended the job, not one that waited for it.
    assert ended.err.count("Traceback") == 1 and "rank 1 ended" not in ended.err


@job(
    """
    dist.init_process_group()
    if dist.get_rank() == 1:
        raise ValueError("lost my way")
    dist.barrier()
    """,
    options=("-m", "mpi4py"),
)
def test_uncaught_exception_under_the_runner_of_mpi4py(ended: Ended) -> None:
    ended.badly("Traceback (most recent call last)", "ValueError: lost my way")


@job("""
    dist.init_process_group()
    g = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        raise ValueError("not of the group")
    for i in range(100000):
        dist.all_reduce(np.ones(4), group=g)
    dist.barrier()
""", ranks=3)  # fmt: skip
def test_uncaught_exception_of_a_rank_that_others_wait_for_later(ended: Ended) -> None:
    ended.badly("ValueError: not of the group")


@pytest.mark.parametrize(
    ("end", "code", "word", "waiting"),
    [
        ("sys.exit(1)", 1, "", WAITING["all_reduce"]),
        ("sys.exit('there is no such file')", 1, "there is no such file", WAITING["async"]),
        ("sys.exit(77)", 77, "", WAITING["recv"]),
    ],
)
@job("""
    dist.init_process_group()
    x = np.ones(4)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        $end
    $waiting
    say("not reached")
""")
def test_sys_exit(end: str, code: int, word: str, waiting: str, ended: Ended) -> None:
    ended.badly(word)
    assert ended.code == code and "Traceback" not in ended.err, ended
    assert "not reached" not in ended.out


@job("""
    dist.init_process_group()
    def deep():
        try:
            sys.exit(5)
        finally:
            say("finally")
    if dist.get_rank() == 1:
        deep()
    dist.barrier()
""")
def test_sys_exit_runs_what_is_to_be_run(ended: Ended) -> None:
    ended.badly()
    assert ended.code == 5
    assert ended.lines == ["finally"]


# No hook sees the code of a SystemExit that sys.exit did not raise: the ranks that wait for the
# one that went notice that it went, whatever its code.
@pytest.mark.parametrize("code", ["3", "0"])
@job("""
    dist.init_process_group()
    if dist.get_rank() == 1:
        raise SystemExit($code)
    dist.all_reduce(np.ones(4))
    say("not reached")
""")
def test_raise_system_exit_while_others_wait(code: str, ended: Ended) -> None:
    ended.badly("rank 1 ended without making this call", "dist.all_reduce(np.ones(4))")
    assert "not reached" not in ended.out


@pytest.mark.parametrize("waiting", [WAITING["recv"], WAITING["irecv"]])
@job("""
    dist.init_process_group()
    x = np.ones(4)
    if dist.get_rank() == 1:
        raise SystemExit(3)
    $waiting
    say("not reached")
""")
def test_raise_system_exit_while_others_wait_for_a_message(waiting: str, ended: Ended) -> None:
    ended.badly("Traceback", "DistBackendError", "the other rank has ended", waiting)
    assert "not reached" not in ended.out


@job("""
    dist.init_process_group()
    dist.all_reduce(np.ones(4))
    raise SystemExit(3)
""")
def test_raise_system_exit_everywhere(ended: Ended) -> None:
    assert ended.code == 3, ended


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
def test_an_end_in_good_order(end: str, destroy: str, ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done", "done"]


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
def test_a_sys_exit_that_was_caught_does_not_end_the_job(end: str, ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.lines == ["alive", "alive"]
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
def test_a_thread_may_end_by_sys_exit(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["alive", "alive"]


@job("""
    def mine(kind, error, trace):
        say("seen", kind.__name__)
    sys.excepthook = mine
    dist.init_process_group()
    if dist.get_rank() == 1:
        raise ValueError("lost my way")
    dist.barrier()
""")
def test_the_hook_of_the_program_is_called_first(ended: Ended) -> None:
    ended.badly()
    assert ended.lines == ["seen ValueError"]


@job("""
    dist.init_process_group()
    dist.destroy_process_group()
    assert sys.excepthook is sys.__excepthook__
    assert sys.exit.__module__ == "sys"
    if dist.is_initialized() or dist.group.WORLD is not None:
        say("still there")
    if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0))) == 1:
        sys.exit(4)
    say("alive")
""")
def test_after_destroy_the_process_is_its_own(ended: Ended) -> None:
    assert ended.code != 0
    assert ended.lines == ["alive"]


# --- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [WAITING[w] for w in ("all_reduce", "recv", "async")])
@job("""
    dist.init_process_group()
    x = np.ones(4)
    ready()
    if dist.get_rank() == 1:
        time.sleep(1000)
    $waiting
    say("not reached")
""", interrupt=0)  # fmt: skip
def test_ctrl_c_of_one_rank(waiting: str, ended: Ended) -> None:
    ended.badly("Traceback (most recent call last)", waiting)
    assert re.search("KeyboardInterrupt|interrupted", ended.err), ended
    assert "not reached" not in ended.out


@job("""
    dist.init_process_group()
    ready()
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(np.ones(4))
    say("not reached")
""", interrupt="mpiexec")  # fmt: skip
def test_ctrl_c_of_mpiexec(ended: Ended) -> None:
    assert ended.code != 0 and HUNG not in ended.err, ended
    assert "not reached" not in ended.out


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
def test_a_ctrl_c_that_is_caught_does_not_end_the_job(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["caught", "done", "done"]


# --- a rank that does not come ------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [WAITING[w] for w in ("all_reduce", "barrier", "objects")])
@job("""
    dist.init_process_group(timeout=5)
    x = np.ones(4)
    if dist.get_rank() == 1:
        time.sleep(1000)
    $waiting
    say("not reached")
""")
def test_a_group_timeout_ends_a_blocking_collective(waiting: str, ended: Ended) -> None:
    ended.badly("timeout of 5 s", waiting, "rank 0")
    assert ended.seconds > 5
    assert "not reached" not in ended.out


#: A rank that does not come to init, or too late.
LATE = """
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        $end
    $begin
    say("not reached")
"""
#: What it does instead. Eight seconds later the others have long given up.
LATE_ENDS = pytest.mark.parametrize(
    "end", ["sys.exit(0)", "os._exit(0)", "time.sleep(1000)", "time.sleep(8)"]
)
LATE_BEGINS = pytest.mark.parametrize("begin", ["dist.init_process_group(timeout=3)"])
MISSING = "init_process_group: the other ranks did not all come within 3 s (missing: 1)"
compiled = pytest.mark.skipif(kernels is None, reason="the limit is the C library's")


@compiled
@LATE_ENDS
@LATE_BEGINS
@job(LATE, ranks=3)
def test_a_rank_that_does_not_come_to_init(end: str, begin: str, ended: Ended) -> None:
    ended.badly(MISSING)
    assert "not reached" not in ended.out


@compiled
@LATE_ENDS
@LATE_BEGINS
@job(LATE, ranks=3, options=("-m", "mpi4py"))
def test_a_rank_that_does_not_come_to_init_with_mpi_begun(
    end: str, begin: str, ended: Ended
) -> None:
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
def test_a_rank_that_fails_before_init(end: str, begin: str, ended: Ended) -> None:
    """Its launcher may end the job at once. Open MPI's may hang when others are still starting."""
    ended.badly("Traceback")
    assert "not reached" not in ended.out


TORCH_BEGINS = (
    "import torch; from datetime import timedelta; torch.distributed.init_process_group('mpicoll', "
    "{}timeout=timedelta(seconds=3))"
)


@compiled
@pytest.mark.parametrize("end", ["time.sleep(1000)", "time.sleep(8)"])
@pytest.mark.parametrize("begin", [TORCH_BEGINS.format(how) for how in ("", "'mpi://', ")])
@job(LATE, ranks=3)
def test_a_rank_that_does_not_come_to_init_of_torch(end: str, begin: str, ended: Ended) -> None:
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
def test_a_timeout_of_a_new_group(ended: Ended) -> None:
    ended.badly("timeout of 1 s", "dist.barrier(group=late)")


@job("""
    dist.init_process_group(timeout=100)
    if dist.get_rank() == 1:
        time.sleep(3)
    start = time.monotonic()
    dist.barrier()
    time.sleep(0.1)
    say("done")
    dist.destroy_process_group()
""")
def test_a_late_rank_is_waited_for(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done", "done"]


@job("""
    dist.init_process_group(timeout=60)
    rank, x = dist.get_rank(), np.ones(4)
    def timed_out(call, *words):
        start = time.monotonic()
        try:
            call()
        except dist.CollectiveTimeoutError as error:
            assert isinstance(error, TimeoutError) and isinstance(error, RuntimeError)
            for word in words:
                assert word in str(error), error
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
        say("never mind")
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
def test_what_timed_out_goes_on_and_can_be_waited_for(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done", "done", "never mind", *["timed out"] * 4]


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
def test_monitored_barrier_names_who_never_came(wait_all: str, ended: Ended) -> None:
    assert ended.code != 0
    lead, follow = ended.lines
    named = "Ranks 1, 3" if wait_all == "True" else "Rank 1"
    named += " failed to pass monitoredBarrier: did not arrive within 0.5 s"
    assert lead.startswith("0 ") and named in lead
    assert follow.startswith("2 ") and "2 rank(s) did not arrive in time" in follow


# --- last words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise ValueError('lost my way')", ["Traceback", "script.py", "ValueError: lost my way"]),
        ("dist.barrier()", ["Traceback", "dist.barrier()", "rank 0: the other ranks of group"]),
        (
            "kept.append(dist.all_reduce(np.ones(3), async_op=True))",
            ["rank 0 of group 0 ends with work pending"],
        ),
    ],
)
@job("""
    class Stream:  # one line for each time that something is written
        def write(self, text):
            os.write(1, (repr(text) + "\\n").encode())
        def flush(self):
            pass
    dist.init_process_group(timeout=5)
    kept = []
    if dist.get_rank() == 1:
        time.sleep(1000)
    sys.stderr = Stream()
    $end
""")
def test_last_words_are_written_at_once(end: str, words: list[str], ended: Ended) -> None:
    assert ended.code != 0 and len(ended.lines) == 1, ended
    text = ast.literal_eval(ended.lines[0])
    assert text.endswith("\n") and all(word in text for word in words), text


def test_nobody_else_writes_last_words() -> None:
    """Who prints by other means writes a line and its newline apart, in some streams."""
    root = Path(mpicoll.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            text = ast.unparse(call)
            # The commands print their results on rank 0, and the server is no rank.
            to_itself = name.startswith("cli/") or name == "launch/server.py"
            prints = text.startswith("print(") and ("stderr" in text or not to_itself)
            if prints or "stderr.write" in text:
                found.append(f"{name}: {text}")
    # How far a command is, on a terminal, is no line.
    assert [one.partition(":")[0] for one in found] == ["cli/__init__.py", "output.py"], found


# --- work left over -----------------------------------------------------------------------------


@job("""
    dist.init_process_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(np.ones(4), async_op=True)
        sys.exit()
    time.sleep(1000)
""")
def test_pending_work_that_nobody_joins(ended: Ended) -> None:
    ended.badly()
    assert "ends with work pending that other ranks have not joined" in ended.out + ended.err


@job("""
    dist.init_process_group()
    dist.all_reduce(np.ones(4), async_op=True)
    dist.isend(np.ones(3), 1 - dist.get_rank())
    dist.recv(np.ones(3))
    w = dist.all_reduce(np.ones(1 << 20), async_op=True)
    if dist.get_rank() == 0:
        time.sleep(1)
    say("done")
""", options=("-W", "error"))  # fmt: skip
def test_pending_work_that_others_join_ends_in_good_order(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done", "done"]


@job("""
    dist.init_process_group()
    if dist.get_rank() == 0:
        dist.all_reduce(np.ones(4), async_op=True)
        try:
            dist.destroy_process_group()
        except dist.CollectiveTimeoutError as error:
            say("pending:", "asynchronous work is still pending" in str(error))
            raise
    time.sleep(1000)
""")
def test_destroy_with_pending_work_that_nobody_joins(ended: Ended) -> None:
    ended.badly("CollectiveTimeoutError", "another rank did not make the call")
    assert ended.lines == ["pending: True"]


@job("""
    dist.init_process_group()
    x = np.ones(4 if dist.get_rank() == 0 else 5)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    del work
    say("done")
    dist.destroy_process_group()
""")
def test_a_dropped_work_that_failed_is_printed(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.lines == ["done", "done"]
    # Launchers may put what two ranks write on one line.
    _, *said = ended.err.split("nobody waited for")
    assert len(said) == 2, ended
    for rank in range(2):
        assert sum(f"all_reduce on rank {rank}" in one for one in said) == 1
    assert all("4 elements" in one and "5 elements" in one for one in said)


@job("""
    dist.init_process_group()
    x = np.ones(4 if dist.get_rank() == 0 else 5)
    work = dist.all_reduce(x, async_op=True)
    try:
        work.wait()
    except dist.MismatchError:
        say("caught")
    del work
    dist.destroy_process_group()
""", options=("-W", "error"))  # fmt: skip
def test_a_failed_work_that_was_waited_for_is_not_printed(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["caught", "caught"]


# --- nothing is left ----------------------------------------------------------------------------


@job("""
    before = threading.enumerate()
    descriptors = None
    for i in range(3):
        dist.init_process_group(timeout=60)
        x = np.ones(4)
        g = dist.new_group([0, 1])
        for group in None, g:
            dist.all_reduce(x, group=group, async_op=True).wait()
        w = dist.isend(x, 1 - dist.get_rank())
        dist.irecv(np.zeros(4)).wait()
        w.wait()
        dist.irecv(np.zeros(4), tag=3)  # nobody sends it
        assert len(threading.enumerate()) > len(before)
        dist.destroy_process_group()
        assert threading.enumerate() == before, threading.enumerate()
        assert dist.get_pg_count() == 0 and not dist.is_initialized()
        opened = sorted(os.listdir("/proc/self/fd"))
        if i:
            assert len(opened) == len(descriptors), (opened, descriptors)
        descriptors = opened
    assert signal.set_wakeup_fd(-1) == -1
    say("done")
""", options=("-W", "error"))  # fmt: skip
def test_destroy_leaves_no_thread_and_no_descriptor(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done", "done"]


@job("""
    def told(call):
        try:
            call()
        except dist.MpicollError as error:
            say(type(error).__name__, str(error))
    dist.init_process_group()
    told(dist.init_process_group)
    g, w = dist.new_group([0, 1]), dist.group.WORLD
    dist.destroy_process_group()
    told(dist.destroy_process_group)
    told(dist.barrier)
    told(lambda: dist.barrier(w))
    told(lambda: dist.all_reduce(np.ones(3), group=g))
    dist.init_process_group()
    told(lambda: dist.barrier(w))
    told(lambda: dist.send(np.ones(3), 1 - dist.get_rank(), group=g))
    dist.barrier()
    dist.destroy_process_group()
""")
def test_init_and_destroy_twice(ended: Ended) -> None:
    ended.in_good_order()
    expected = [
        *["ArgumentError init_process_group: the default process group exists already"] * 2,
        *["NotInitializedError there is no default process group; call init_process_group"] * 4,
        *["ArgumentError process group '0' was destroyed"] * 4,
        *["ArgumentError process group '1' was destroyed"] * 4,
    ]
    assert len(ended.lines) == len(expected), ended
    for line, word in zip(ended.lines, sorted(expected), strict=True):
        assert line.startswith(word)


# --- forked children ----------------------------------------------------------------------------


@job("""
    def told(call):
        try:
            call()
        except dist.ForkedError as error:
            assert isinstance(error, RuntimeError) and "forked" in str(error)
        else:
            os._exit(7)
    dist.init_process_group()
    x, w, rank = np.ones(4), dist.group.WORLD, dist.get_rank()
    g = dist.new_group([0, 1])
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        for group in None, w, g:
            told(lambda: dist.all_reduce(x, group=group))
            told(lambda: dist.all_reduce(x, group=group, async_op=True))
            told(lambda: dist.send(x, 1 - rank, group=group))
            told(lambda: dist.irecv(x, group=group))
            told(lambda: dist.all_gather_object([None, None], 1, group=group))
            told(lambda: dist.barrier(group=group))
        told(dist.init_process_group)
        told(dist.get_rank)
        told(dist.new_group)
        told(dist.destroy_process_group)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    for group in None, g:
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
    assert x[0] == 2**6
    say("done")
    dist.destroy_process_group()
""")
def test_a_forked_child(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.lines == ["done", "done"]


@job("""
    import multiprocessing
    def load(queue):
        try:
            dist.get_rank()
        except dist.ForkedError:
            queue.put("forked")
    def broken():
        raise ValueError("of the child alone")
    def leaves():
        sys.exit(6)
    if __name__ == "__main__":
        dist.init_process_group()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        for target, arguments, code in (load, (queue,), 0), (broken, (), 1), (leaves, (), 6):
            child = context.Process(target=target, args=arguments)
            child.start()
            dist.barrier()
            child.join()
            assert child.exitcode == code, (target, child.exitcode)
        assert queue.get() == "forked"
        x = np.ones(4)
        dist.all_reduce(x, async_op=True).wait()
        say("done", x[0])
        dist.destroy_process_group()
""")
def test_multiprocessing_by_fork(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.lines == ["done 2.0", "done 2.0"]
    assert ended.err.count("ValueError: of the child alone") == 2


@job("""
    dist.init_process_group()
    x = np.ones(5000)
    dist.all_reduce(x)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        sys.exit($code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == $code
    dist.all_reduce(x)
    say("done", x[0])
    dist.destroy_process_group()
""")
@pytest.mark.parametrize("code", [0, 3])
def test_a_forked_child_that_ends_as_python_does(ended: Ended, code: int) -> None:
    """What is called at its end must not end MPI, which is its parent's."""
    assert ended.code == 0, ended
    assert ended.lines == ["done 4.0", "done 4.0"]


@job("""
    import gc
    dist.init_process_group()
    for _ in range(70):
        dist.all_reduce(np.ones(5000))
    try:
        dist.all_reduce(np.ones(5000 + dist.get_rank()))
    except dist.MismatchError as error:
        kept = error  # and with it, in its frames, what the ranks share
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        mine = [np.full(1 << 20, i, np.uint8) for i in range(200)]
        kept = None
        gc.collect()
        assert [int(one.min()) for one in mine] == [int(one.max()) for one in mine]
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    say("done")
    dist.destroy_process_group()
""")
def test_a_forked_child_keeps_its_own_memory(ended: Ended) -> None:
    """Whatever it drops of its parent's."""
    assert ended.code == 0, ended
    assert ended.lines == ["done", "done"]


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
        try:
            dist.shrink_group([1])
        except dist.MpicollError as error:
            say("excluded:", error)
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
    for gone in old, other:
        try:
            dist.all_reduce(x, group=gone)
        except ValueError as error:
            assert "destroyed" in str(error)
            say("gone")
    x[:] = rank
    dist.all_reduce(x)
    assert x[0] == 2
    dist.all_reduce(x, async_op=True).wait()
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    again = dist.new_group([1])
    say("done", x[0])
    dist.destroy_process_group()
""", ranks=3)  # fmt: skip
def test_shrinking_the_default_group(flags: str, ended: Ended) -> None:
    ended.in_good_order()
    lines = ended.lines
    assert lines[:2] == ["done 4.0", "done 4.0"]
    assert "rank 1 is excluded" in lines[2]
    assert lines[3:7] == ["gone"] * 4
    assert len(lines) == 9
    assert all("ends 1 other group(s)" in line for line in lines[7:])


# --- groups that some ranks alone make -----------------------------------------------------------


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
def test_subgroups_of_a_group_are_the_affair_of_its_members(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done"] * 3


# --- the program finalises MPI itself -----------------------------------------------------------


@pytest.mark.parametrize("begin", ["from mpi4py import MPI", "pass"])
@job(
    """
    $begin
    def told(call):
        try:
            call()
        except dist.NotInitializedError as error:
            assert "finalised MPI" in str(error), error
        else:
            say("no error")
    before = threading.enumerate()
    dist.init_process_group()
    from mpi4py import MPI
    rank = dist.get_rank()
    group, world = dist.new_group([0, 1]), dist.group.WORLD
    x = np.ones(1000)
    for one in (world, group):
        dist.all_reduce(x, group=one)
        work = dist.all_reduce(x, group=one, async_op=True)
        dist.irecv(np.zeros(4), tag=3, group=one)  # nobody sends it
    work.wait()
    MPI.Finalize()
    assert threading.enumerate() == before, threading.enumerate()
    assert not dist.is_initialized()
    told(dist.barrier)
    told(dist.get_rank)
    told(lambda: dist.all_reduce(x, group=group))
    told(lambda: dist.all_reduce(x, group=world, async_op=True))
    told(lambda: dist.barrier(group))
    told(lambda: dist.isend(x, group_dst=1 - rank, group=group))
    told(lambda: dist.recv(x, group_src=1 - rank, group=world))
    told(lambda: dist.all_gather_object([None, None], 1, group=group))
    told(lambda: dist.monitored_barrier(group))
    told(dist.new_group)
    told(dist.destroy_process_group)
    try:
        dist.init_process_group()
    except dist.LaunchError as error:
        say("done", "MPI was finalised" in str(error))
""",
    options=("-W", "error"),
)
def test_a_finalize_of_the_program(begin: str, ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done True"] * 2


@job("""
    dist.init_process_group()
    dist.barrier()
    from mpi4py import MPI
    MPI.Finalize()
    if dist.__name__ and sys.argv:
        raise ValueError("own words")
""")
def test_an_exception_after_the_program_has_finalised_mpi(ended: Ended) -> None:
    assert ended.code == 1, ended
    assert "ValueError: own words" in ended.err and "MPI_Abort" not in ended.err, ended
    assert ended.err.count("Traceback") == 2, ended


@job("""
    dist.init_process_group()
    dist.barrier()
    from mpi4py import MPI
    if dist.get_rank() == 0:
        MPI.Finalize()
    else:
        dist.all_reduce(np.ones(4))
""")
def test_a_finalize_while_another_rank_waits(ended: Ended) -> None:
    ended.badly("rank 0 ended without making this call")


# --- one thread at a time -----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["serialized", "multiple"])
@job("""
    import mpi4py
    mpi4py.rc.thread_level = "$level"
    dist.init_process_group(timeout=60)
    from mpi4py import MPI
    rank = dist.get_rank()
    peer = 1 - rank
    one, two = dist.new_group([0, 1]), dist.new_group([1, 0], sort_ranks=False)
    for i in range(30):
        x, y, z = np.full(1000, rank + 1.0), np.full(1000, rank + 1.0), np.zeros(1000)
        first, second = (one, two) if rank == 0 else (two, one)
        works = [
            dist.all_reduce(x if group is one else y, group=group, async_op=True)
            for group in (first, second)
        ]
        works += [dist.irecv(z, peer, tag=i), dist.isend(np.full(1000, i + 0.0), peer, tag=i)]
        objects = [None, None]
        dist.all_gather_object(objects, (rank, i))
        for work in works:
            work.wait()
        assert (x == 3).all() and (y == 3).all() and (z == i).all()
        assert objects == [(0, i), (1, i)]
        dist.send(z, peer) if rank == 0 else dist.recv(z, peer)
        dist.monitored_barrier(timeout=30)
    say("done", MPI.Query_thread() in (MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE))
    dist.destroy_process_group()
""")
def test_work_of_several_groups_at_once(level: str, ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.lines == ["done True"] * 2
    warned = ended.err.count("the program must not call MPI itself")
    assert warned == (level == "serialized"), ended


@pytest.mark.parametrize("level", ["serialized", "multiple"])
@job(
    """
    import mpi4py
    mpi4py.rc.thread_level = "$level"
    from mpi4py import MPI
    from mpicoll.watch import rank_status, watchdog
    watchdog._TICK = watchdog._RECEIVE_INTERVAL = 0.01
    receive, looks = rank_status.receive, []
    def watched(group):
        looks.append(threading.current_thread().name)
        receive(group)
    rank_status.receive = watched
    dist.init_process_group(timeout=60)
    rank, x = dist.get_rank(), np.full(1000, 1.0)
    for _ in range(100):  # the program's own calls, beside mpicoll's that are over when they return
        dist.all_reduce(x)
        dist.reduce_scatter_single(np.zeros(500), x)
        looks.clear()
        time.sleep(0.002)
        if rank == 0:
            MPI.COMM_WORLD.Send(x, 1)
        else:
            MPI.COMM_WORLD.Recv(x, 0)
        x[:] = 1
    looks.clear()
    time.sleep(0.3)
    say("done", bool(looks))
    dist.destroy_process_group()
""",
    environment={"MPICOLL_SHARED_MEMORY": "0"},
)
def test_no_thread_is_in_mpi_beside_the_program(level: str, ended: Ended) -> None:
    """Where one thread may be there at a time: no thread of an idle group."""
    ended.in_good_order()
    assert ended.lines == [f"done {level == 'multiple'}"] * 2


@job("""
    from mpi4py import MPI
    say("level", MPI.Query_thread() == MPI.THREAD_SERIALIZED)
    dist.init_process_group(timeout=60)
    rank = dist.get_rank()
    g = dist.new_group([0, 1])
    x, y = np.ones(1 << 18), np.ones(1 << 18)
    # Rank 0 waits for a message while its collectives are on their way: a lock that is held while
    # it waits would keep them, and the message, from arriving.
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=g, async_op=True)]
    if rank == 0:
        dist.recv(np.zeros(3), 1)
    for work in works:
        work.wait()
    if rank == 1:
        dist.send(np.ones(3), 0)
    dist.all_reduce(x)
    say("done", x[0], y[0])
    dist.destroy_process_group()
""", environment={"MPI4PY_RC_THREAD_LEVEL": "serialized"})  # fmt: skip
def test_a_wait_keeps_no_other_thread_from_mpi(ended: Ended) -> None:
    assert ended.code == 0, ended
    done = [line for line in ended.lines if line.startswith("done")]
    assert done == ["done 4.0 2.0"] * 2, ended


@job("""
    dist.init_process_group(timeout=20)
    rank = dist.get_rank()
    x, y = np.ones(2000, np.float32), np.zeros(1000, np.float32)
    for _ in range(70):  # the first calls are compared, by a call that keeps no lock
        dist.reduce_scatter_single(y, x)
    if rank == 0:
        work = dist.reduce_scatter_single(y, x, async_op=True)
        time.sleep(0.2)
        dist.send(x, 1)
        work.wait()
    else:
        dist.recv(x, 0)
        dist.reduce_scatter_single(y, x)
    say("done", y[0])
    dist.destroy_process_group()
""", environment={"MPI4PY_RC_THREAD_LEVEL": "serialized"})  # fmt: skip
def test_no_collective_keeps_the_lock(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert [line for line in ended.lines if line.startswith("done")] == ["done 2.0"] * 2, ended


# --- how jobs are started -----------------------------------------------------------------------


@job("""
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    dist.init_process_group("$backend", "$method", rank=comm.rank, world_size=comm.size)
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, 3)
    assert dist.get_backend() == "$backend"
    x = np.ones(1)
    dist.all_reduce(x)
    say(dist.get_node_local_rank(), x[0])
    dist.destroy_process_group()
""", ranks=3)  # fmt: skip
@pytest.mark.parametrize(("backend", "method"), [("gloo", "env://"), ("nccl", "mpi://")])
def test_a_script_written_for_torch(backend: str, method: str, ended: Ended) -> None:
    ended.in_good_order()
    # All on one node; Open MPI may count there in an order of its own.
    assert ended.lines == ["0 3.0", "1 3.0", "2 3.0"]


@job("""
    try:
        dist.init_process_group(rank=5, world_size=2)
    except dist.LaunchError as error:
        say(error)
    try:
        dist.init_process_group(world_size=4)
    except dist.LaunchError as error:
        say(error)
    dist.init_process_group()
    dist.barrier()
    dist.destroy_process_group()
""")
def test_an_init_that_was_refused_can_be_made_again(ended: Ended) -> None:
    ended.in_good_order()
    assert sum("rank=5 disagrees with MPI's own rank, " in line for line in ended.lines) == 2
    assert sum("world_size=4 disagrees with MPI's own world" in line for line in ended.lines) == 2


# --- a part of the world ------------------------------------------------------------------------

#: What a program of mpi4py begins with: even ranks and odd ones.
PARTS = """
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    part = world.Split(world.rank % 2)
    """


@compiled
@pytest.mark.parametrize("end", ["time.sleep(1000)", "time.sleep(8)"])
@job(
    PARTS
    + """
    if world.rank == 2:
        $end
    if world.rank % 2:
        time.sleep(1000)
    dist.init_process_group(comm=part, timeout=3)
    say("not reached")
""",
    ranks=4,
)
def test_a_member_of_a_communicator_does_not_come(end: str, ended: Ended) -> None:
    ended.badly(
        "mpicoll: rank 0 of 2: init_process_group: the other ranks did not all come within 3 s "
        "(missing: 1)"
    )
    assert "not reached" not in ended.out


@job(
    PARTS
    + """
    if world.rank % 2:
        if world.rank == 3:
            part.recv(source=0)
        else:
            part.send("on my own", 1)
        say("done")
    else:
        dist.init_process_group(comm=part, timeout=20)
        x = np.ones(1 << 16)
        dist.all_reduce(x)
        say(dist.get_rank(), x[0])
        if "$destroy":
            dist.destroy_process_group()
    MPI.Finalize() if "$destroy" else None
""",
    ranks=4,
)
@pytest.mark.parametrize("destroy", ["yes", ""])
def test_the_others_just_go_on(destroy: str, ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["0 2.0", "1 2.0", "done", "done"]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise KeyError('mine')", "KeyError: 'mine'"),
        ("sys.exit('for this reason')", "for this reason"),
        ("time.sleep(1000)", "did not come within its timeout of 5 s"),
        ("sys.exit(0)", "rank 1 ended without making this call"),
        ("MPI.COMM_WORLD.Abort(3)", ""),
    ],
)
@job(
    PARTS
    + """
    dist.init_process_group(comm=part, timeout=5)
    dist.barrier()
    if world.rank == 2:
        $end
    if world.rank % 2:
        time.sleep(1000)  # the coupled program's other half
    dist.all_reduce(np.ones(1))
    say("not reached")
""",
    ranks=4,
)
def test_a_lost_rank_of_a_part_ends_the_job(end: str, words: str, ended: Ended) -> None:
    ended.badly(words)
    assert "not reached" not in ended.out


# --- a block ------------------------------------------------------------------------------------


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
    x, y = np.ones(4), np.ones(4)
    with dist.init_process_group(timeout=100):
        if dist.get_rank() == 1:
            $before
            raise KeyError("mine")
        $waiting
        say("not reached")
""")
def test_an_exception_in_a_block_ends_the_job(before: str, waiting: str, ended: Ended) -> None:
    ended.badly("KeyError: 'mine'")
    assert "not reached" not in ended.out


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
def test_the_others_hear_of_a_block_that_was_left(ended: Ended) -> None:
    """By an exception that the program catches, and goes on to its end without them."""
    ended.badly("rank 1 ended without making this call")
    assert "caught" in ended.out and "not reached" not in ended.out


@job("""
    with dist.init_process_group():
        x = np.ones(2)
        work = dist.all_reduce(x, async_op=True)
    say(work.is_completed(), x[0], dist.is_initialized())
""")
def test_a_block_in_good_order(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["True 2.0 False"] * 2


# --- windows --------------------------------------------------------------------------------------

#: How a rank leaves a window in which memory is registered.
LEAVING = {
    "destroy": "dist.destroy_process_group()",
    "nothing": "",
    "abort": "waiting = window.wait_signal(1 - me, True); lifecycle.abandon(dist.group.WORLD)",
}


@pytest.mark.parametrize("leaving", LEAVING.values(), ids=list(LEAVING))
@job("""
    from mpicoll.api import lifecycle
    from mpicoll.api.windows import Window
    dist.init_process_group()
    me = dist.get_rank()
    window, memory = Window(dist.group.WORLD), np.zeros(4)
    window.register(memory)
    window.put(np.full(4, 5.0), 1 - me, 0, False)
    window.signal(1 - me, False)
    window.wait_signal(1 - me, False)
    assert memory[3] == 5
    window.signal(1 - me, False) if "abandon" not in '''$leaving''' else None
    $leaving
    say("end")
""")
def test_windows_at_the_end(leaving: str, ended: Ended) -> None:
    """The MPI library may say that memory is in use; nobody hangs or fails."""
    assert ended.code == 0 and ended.out.count("end\n") == 2, ended
    assert HUNG not in ended.err and "Traceback" not in ended.err, ended
