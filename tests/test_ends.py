"""How jobs end: by exceptions, exits and Ctrl-C, in good order or not."""

from __future__ import annotations

import ast
import os
import re
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rank_scripts import HUNG, WAITING, Ended, job, needs_mpiexec, run

import mpicoll
from mpicoll.failures import termination
from mpicoll.launch import error_output, exit_hooks

pytest_plugins = ["whole_jobs"]

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

pytestmark = needs_mpiexec

__all__ = ["run"]  # for whole_jobs


# --- a rank that goes ---------------------------------------------------------------------------


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

#: How rank 1 fails, the job's exit code, and what rank 1 prints.
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
def test_a_failure_without_a_group_ends_the_job(
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
def test_a_failed_child_of_a_rank_does_not_end_the_job(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["alive", "alive"]


# --- what is printed ------------------------------------------------------------------------------

MISMATCH = """
    from mpicoll.launch import error_output
    if "$front" == "torch":
        import torch, torch.distributed as dist
    else:
        import numpy as torch
    error_output._LOWER_RANK_TIMEOUT_S = 20.0  # on a busy machine ranks may raise late
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
        pytest.param("torch", 0, marks=needs_torch),
        pytest.param(
            "torch", 2, marks=needs_torch
        ),  # hooks of torch and the program over mpicoll's
    ],
)
@job(MISMATCH, limit=90)  # torch takes long to load
def test_an_error_of_all_ranks_is_printed_once(front: str, cycles: int, ended: Ended) -> None:
    ended.badly("MismatchError", "rank 1: all_reduce of 4 elements", "in step")
    shown = re.split("(?m)^mpicoll: ", ended.err)[0].splitlines()
    assert shown[0] == "[rank 0] Traceback (most recent call last):", ended  # the lowest
    assert all(line.startswith("[rank 0]") for line in shown), ended
    assert "script.py" in shown[1] and len(shown) <= 7, ended  # no frame of a library
    assert ended.err.count("collective mismatch") == 1, ended


def test_hooks_of_torch_do_not_add_up() -> None:
    """Each init_process_group of torch installs one, and Python limits the depth of calls."""

    def wrap(old_hook: exit_hooks.Hook) -> exit_hooks.Hook:
        def _distributed_excepthook(*error: Any) -> None:  # as torch has it
            old_hook(*error)

        return _distributed_excepthook

    def program(*error: object) -> None:
        pass

    hook: exit_hooks.Hook = program
    for _ in range(2000):
        hook = wrap(hook)
    assert exit_hooks._skip_own(hook) is program


@pytest.mark.parametrize(("front", "cycles"), [("numpy", 0)])
@job(MISMATCH, environment={"MPICOLL_DEBUG": "INFO"})
def test_mpicoll_debug_shows_the_frames_of_mpicoll(front: str, cycles: int, ended: Ended) -> None:
    ended.badly("MismatchError", "consistency.py", "in step")


@job("""
    dist.init_process_group()
    if dist.get_rank() == 0:
        dist.all_reduce(np.ones(3))
    dist.all_reduce(np.ones(4))
""")
def test_a_rank_that_fails_alike_elsewhere_says_where(ended: Ended) -> None:
    ended.badly("MismatchError")
    assert ended.err.count("collective mismatch") == 1, ended
    assert len({*re.findall(r"script\.py., line (\d+)", ended.err)}) == 2, ended


def test_an_error_is_printed_by_somebody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the rank that claimed it does not end the job, the next rank prints it."""
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{os.getpid()}")
    monkeypatch.setattr(error_output, "_PRINTING_TIMEOUT_S", 0.2)
    error = ValueError("rank 1 of 3 lost its way")
    assert error_output.claim("ValueError: lost its way")
    held = error_output._claims.pop("ValueError: lost its way")  # as by another process
    with held:
        error_output.print_once(error, "1", list)
    assert "[rank 1] ValueError: rank 1 of 3 lost its way\n" in capsys.readouterr().err
    start = time.monotonic()
    error_output.print_once(error, "1", list)
    assert "[rank 1] ValueError: rank 1 of 3 lost its way\n" in capsys.readouterr().err
    assert time.monotonic() - start < 0.2  # a claim goes with its process


def test_a_rank_leaves_an_error_to_a_lower_rank_that_raises_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{os.getpid()}-lower")
    for name in ("_RAISING_TIMEOUT_S", "_PRINTING_TIMEOUT_S"):
        monkeypatch.setattr(error_output, name, 1000.0)
    monkeypatch.setattr(error_output, "_ENDING_TIMEOUT_S", 0.0)
    error, message = mpicoll.LaunchError("lost"), "LaunchError: lost"
    assert error_output.claim(f"{message}\nrank 1")
    thread = threading.Thread(target=error_output.print_once, args=(error, "2", list), daemon=True)
    with error_output._claims.pop(f"{message}\nrank 1"):  # rank 1 raises, and will print
        thread.start()
        thread.join(0.5)
        assert message not in error_output._claims
        assert error_output.claim(message)
    with error_output._claims.pop(message):  # rank 1 prints
        thread.join(0.5)
        assert thread.is_alive()
        assert f"errors.{message}" not in capsys.readouterr().err
    thread.join(60)  # rank 1 has ended alone
    assert not thread.is_alive()
    assert f"[rank 2] mpicoll.errors.{message}" in capsys.readouterr().err


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


# --- last words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("raise ValueError('lost my way')", ["Traceback", "script.py", "ValueError: lost my way"]),
        (
            "dist.barrier()",
            ["Traceback", "dist.barrier()", "on rank 0", "the other ranks of group"],
        ),
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
    dist.init_process_group(timeout=8)
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


class Aborted:
    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def abort(self, code: int) -> None:
        self.happened.append("aborted")
        raise KeyboardInterrupt


def test_the_launcher_reads_what_was_written_before_the_job_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Open MPI's mpirun prints MPI's own words first if it did not get to the rank's."""
    read, write = os.pipe()
    standard_error = os.dup(2)
    os.write(write, b"our words")
    happened = []

    def sleep(seconds: float) -> None:
        happened.append(f"{seconds}")
        if len(happened) == 3:
            happened.append(os.read(read, 100).decode())

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(exit_hooks, "current", lambda: Aborted(happened))
    try:
        os.dup2(write, 2)
        with pytest.raises(KeyboardInterrupt):
            termination.end_job(1)
    finally:
        os.dup2(standard_error, 2)
        for file in (read, write, standard_error):
            os.close(file)
    assert happened == ["0.01", "0.01", "0.01", "our words", "0.1", "aborted"]
