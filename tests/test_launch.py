"""Ranks that no launcher of MPI started: how they become one world, and how they end.

The jobs are small scripts. Each is started as plain processes, with RANK and WORLD_SIZE as its test
says, by torchrun, or by mpiexec. No job may hang: a process that is still there after LIMIT seconds
prints where it is and goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from whole_jobs import made_by

from mpicoll.errors import ArgumentError, LaunchError, UnsupportedError
from mpicoll.kernels.library import kernels
from mpicoll.launch import server, session
from mpicoll.launch.environment import Way, by_mpi, choose, fill_environment
from mpicoll.launch.meeting import NotThere, Place
from mpicoll.launch.methods import Agent, File, Port, meeting, told

pytest_plugins = ["whole_jobs"]

pytestmark = pytest.mark.waits

MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))
TORCHRUN = Path(sys.executable).with_name("torchrun")
#: Seconds after which a job counts as hanging. Most take two.
LIMIT = 40

VENDOR = subprocess.run(
    [sys.executable, "-c", "import mpi4py; mpi4py.rc.initialize = False\n"
     "from mpi4py import MPI; print(MPI.get_vendor()[0])"],
    stdout=subprocess.PIPE, text=True, check=False,
).stdout.strip()  # fmt: skip

compiled = pytest.mark.skipif(kernels is None, reason="the limit is the C library's")
mpich = pytest.mark.skipif(VENDOR == "Open MPI", reason="Open MPI does not speak PMI-1")

PREAMBLE = f"""
import faulthandler, os, signal, sys, threading, time
faulthandler.register(signal.SIGALRM, chain=True)  # print where all threads are, then die
signal.alarm({LIMIT})
import numpy as np
import mpicoll as dist

def say(*words):  # one write, so that ranks do not print into each other's lines
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def total(value):
    x = np.full(3, value, np.float64)
    dist.all_reduce(x)
    return x[0]
"""


@dataclass(frozen=True)
class Job:
    """A script and how it is started.

    ranks:       the ranks that are started, of ``size``.
    by:          "hand", "torchrun", "mpiexec" or "one" (a process that starts its ranks).
    environment: $PORT and $FOLDER are replaced; None takes a variable away.
    later:       these ranks start a second later.
    nodes:       what starts a command on another node, in the order of the ranks.
    """

    script: str
    ranks: tuple[int, ...] = (0, 1)
    size: int = 0
    by: str = "hand"
    environment: Mapping[str, str | None] = field(default_factory=dict)
    later: tuple[int, ...] = ()
    nodes: tuple[list[str], ...] = ()


@dataclass
class Ended:
    """How a job ended: the exit codes by rank, and all that was printed."""

    codes: list[int]
    out: str
    err: str
    seconds: float
    folder: Path

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.splitlines())

    def in_good_order(self, *lines: str) -> None:
        assert not any(self.codes), self
        assert self.lines == sorted(lines), self

    def badly(self, *codes: int) -> None:
        assert "(most recent call first)" not in self.err, f"a rank hung\n{self}"
        assert self.codes == list(codes), self

    def __str__(self) -> str:
        return (
            f"exit codes {self.codes} after {self.seconds:.1f} s\n---- stdout\n{self.out}"
            f"---- stderr\n{self.err}"
        )


job = made_by(Job)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run(task: Job, parameters: Mapping[str, Any], folder: Path) -> Ended:
    port = str(free_port())

    def fill(text: str) -> str:
        for name, value in {**parameters, "PORT": port, "FOLDER": folder}.items():
            text = text.replace(f"${name}", str(value))
        return text

    script = folder / "script.py"
    script.write_text(PREAMBLE + fill(task.script))
    size = task.size or len(task.ranks)
    common: dict[str, str | None] = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TEST_MPICOLL_FOLDER": str(folder),
    }
    commands = [([sys.executable, str(script)], common)]
    if task.by == "hand":
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        nodes = task.nodes or ([],) * len(task.ranks)
        commands = [
            ([*node, *commands[0][0]], common | {"RANK": str(rank)})
            for node, rank in zip(nodes, task.ranks, strict=True)
        ]
    elif task.by == "torchrun":
        options = ["--nproc-per-node", str(size), "--master-port", port, "--max-restarts", "1"]
        commands = [([str(TORCHRUN), *options, str(script)], common)]
    elif task.by == "mpiexec":
        commands = [([*MPIEXEC, "-n", str(size), *commands[0][0]], common)]
    start = time.monotonic()
    processes = []
    for rank, (command, variables) in enumerate(commands):
        environment = {
            name: fill(value)
            for name, value in {**os.environ, **variables, **task.environment}.items()
            if value is not None
        }
        if rank in task.later:
            time.sleep(1)
        with (folder / f"out-{rank}").open("w") as out, (folder / f"err-{rank}").open("w") as err:
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                )
            )  # fmt: skip
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, start + LIMIT + 10 - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    out, err = (
        "".join(path.read_text() for path in sorted(folder.glob(f"{kind}-*")))
        for kind in ("out", "err")
    )
    codes = [process.returncode for process in processes]
    return Ended(codes, out, err, time.monotonic() - start, folder)


# --- one world ----------------------------------------------------------------------------------

ROUND = """
    dist.init_process_group(timeout=30, $how)
    say(dist.get_rank(), dist.get_world_size(), total(dist.get_rank() + 1))
    dist.destroy_process_group()
"""
PLACE = "rank=int(os.environ['R']), world_size=2"
#: How the façade is told where to meet, by name.
METHODS = {
    "nothing": "",
    "env": "init_method='env://'",
    "tcp": "init_method='tcp://127.0.0.1:$PORT'",
    "host": "init_method='tcp://localhost:$PORT', rank=int(os.environ['RANK'])",
    "query": "init_method=f'tcp://127.0.0.1:$PORT?rank={os.environ[\"RANK\"]}&world_size=2'",
    "file": "init_method='file://$FOLDER/meet'",
}


@mpich
@pytest.mark.parametrize("how", METHODS.values(), ids=list(METHODS))
@job(ROUND)
def test_methods(how: str, ended: Ended) -> None:
    ended.in_good_order("0 2 3.0", "1 2 3.0")
    assert ended.err == ""
    assert not (ended.folder / "meet").exists() and not list(ended.folder.glob(".meet*"))


@mpich
@pytest.mark.parametrize("how", ["", "init_method='file://$FOLDER/meet'"], ids=["env", "file"])
@job(ROUND, ranks=(3, 0, 1, 2), later=(2,))
def test_four_ranks_that_come_one_by_one(how: str, ended: Ended) -> None:
    ended.in_good_order("0 4 10.0", "1 4 10.0", "2 4 10.0", "3 4 10.0")


@mpich
@job("""
    dist.init_process_group()
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    here = [os.environ[name] for name in names]
    assert dist.is_torchelastic_launched()
    assert dist.get_node_local_rank() == int(here[2])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        assert total(1) == 2
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()
    say(dist.get_rank(), total(1), *here[:4], here[5] == "$PORT")
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group()
    say("again", total(1))
    dist.destroy_process_group()
""", by="torchrun")  # fmt: skip
@pytest.mark.skipif(not TORCHRUN.exists(), reason="there is no torchrun")
def test_torchrun_that_starts_the_ranks_twice(ended: Ended) -> None:
    ended.in_good_order("0 2.0 0 2 0 2 True", "1 2.0 1 2 1 2 True", "again 2.0", "again 2.0")


@pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")
@job("""
    before = dict(os.environ)
    dist.init_process_group()
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
    assert not set(names) & set(before)
    node = dist.get_node_local_rank()
    here = [os.environ[name] for name in names]
    assert here == [str(dist.get_rank()), "2", str(node), "2"], here
    with open(f"$FOLDER/master-{node}", "w") as file:
        file.write(os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"])
    dist.destroy_process_group()
    dist.init_process_group("mpi", "env://")
    assert os.environ["MASTER_PORT"] and not dist.is_torchelastic_launched()
    say(total(1))
    dist.destroy_process_group()
""", size=2, by="mpiexec")  # fmt: skip
def test_the_variables_under_mpiexec(ended: Ended) -> None:
    ended.in_good_order("2.0", "2.0")
    one, other = ((ended.folder / f"master-{rank}").read_text() for rank in range(2))
    assert one == other and one.startswith("127.0.0.1:")


#: A process that starts its ranks with multiprocessing.
SPAWN = """
    import multiprocessing
    def work(rank):
        $work
    if __name__ == "__main__":
        context = multiprocessing.get_context("$start")
        ranks = [context.Process(target=work, args=(rank,)) for rank in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        say("codes", *[one.exitcode for one in ranks])
"""
#: Says at the very end that MPI was finalised.
AFTER = (
    "import multiprocessing.util, mpi4py.MPI as m; multiprocessing.util.Finalize(None, "
    "lambda: say('finalized', m.Is_finalized()), exitpriority=-9)"
)
BEGIN = "dist.init_process_group('mpi', 'tcp://127.0.0.1:$PORT', 30, 2, rank)"


@mpich
@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("work", "codes"),
    [
        (f"{BEGIN}; say(total(1)); dist.destroy_process_group()", "0 0"),
        (f"{BEGIN}; say(total(1)); dist.destroy_process_group(); rank or os._exit(0)", "0 0"),
        (f"{BEGIN}; say(total(1)); {AFTER}", "0 0"),
        (f"{BEGIN}; say(total(1)); sys.exit(5)", "5 5"),
    ],
    ids=["destroy", "a rank without MPI_Finalize", "none", "exit"],
)
@job(SPAWN, by="one")
def test_multiprocessing(start: str, work: str, codes: str, ended: Ended) -> None:
    more = ["finalized True"] * 2 if "finalized" in work else []
    ended.in_good_order("2.0", "2.0", *more, f"codes {codes}")
    assert "Traceback" not in ended.err, ended


@mpich
@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("work", [f"{BEGIN}; rank == 1 and 1 / 0; dist.barrier()"])
@job(SPAWN, by="one")
def test_an_exception_in_a_child_of_multiprocessing(start: str, work: str, ended: Ended) -> None:
    ended.in_good_order("codes 1 1")
    assert ended.err.count("ZeroDivisionError") == 1, ended
    assert "rank 0: rank 1 of 2 ended the job with exit code 1" in ended.err
    assert ended.seconds < LIMIT / 2


@mpich
@pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")
@pytest.mark.parametrize("start", ["spawn"])
@pytest.mark.parametrize("work", [f"{BEGIN}; say(total(1)); dist.destroy_process_group()"])
@job(SPAWN, size=1, by="mpiexec")
def test_multiprocessing_under_mpiexec(start: str, work: str, ended: Ended) -> None:
    ended.in_good_order("2.0", "2.0", "codes 0 0")


@job("""
    dist.init_process_group($how)
    told = os.environ["RANK"], os.environ["WORLD_SIZE"]
    say(dist.get_rank(), dist.get_world_size(), total(5), *told)
    dist.destroy_process_group()
    dist.init_process_group($how)
    dist.barrier()
""", ranks=(0,), environment={"MASTER_PORT": None})  # fmt: skip
@pytest.mark.parametrize("how", ["", "init_method='env://'", "rank=0, world_size=1"])
def test_alone(how: str, ended: Ended) -> None:
    ended.in_good_order("0 1 5.0 0 1")


@pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")
@job("""
    dist.init_process_group(init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
    say(dist.get_rank(), dist.get_world_size(), total(5))
""", size=2, by="mpiexec")  # fmt: skip
def test_each_rank_of_mpiexec_may_be_alone(ended: Ended) -> None:
    ended.in_good_order("0 1 5.0", "0 1 5.0")


@mpich
@job("""
    before = set(os.listdir("/proc/self/fd")), threading.enumerate(), dict(os.environ)
    for i in range(3):
        dist.init_process_group(timeout=20)
        assert total(i) == 2 * i
        g = dist.new_group([0, 1])
        dist.all_reduce(np.ones(3), group=g, async_op=True).wait()
        dist.destroy_process_group()
        opened = len(os.listdir("/proc/self/fd"))
        assert i == 0 or opened == previous, (opened, previous)
        previous = opened
        assert threading.enumerate() == before[1]
    assert not any(name.startswith("PMI") for name in os.environ)
    say("done")
""")
def test_cycles_in_one_process(ended: Ended) -> None:
    ended.in_good_order("done", "done")
    assert ended.err == ""


# --- several nodes ------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[tuple[list[str], list[str]]]:
    """What starts a command on each of two nodes: network namespaces with host names of their own,
    at 10.77.0.1 and 10.77.0.2.
    """
    names = [f"mpicoll-{os.getpid()}-{node}" for node in range(2)]
    links = [f"mc{os.getpid()}{node}" for node in "ab"]
    made = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", links[0], "netns", names[0], "type", "veth",
         "peer", "name", links[1], "netns", names[1]],
    ]  # fmt: skip
    for node, (name, link) in enumerate(zip(names, links, strict=True)):
        made += [
            ["ip", "-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", link],
            ["ip", "-n", name, "link", "set", "lo", "up"],
            ["ip", "-n", name, "link", "set", link, "up"],
        ]
    starts = tuple(
        ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c",
         f'hostname node-{node} && exec "$@"', "sh"]
        for node, name in enumerate(names)
    )  # fmt: skip
    try:
        for command in [*made, *([*start, "true"] for start in starts)]:
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
            except (OSError, subprocess.SubprocessError) as error:
                why = getattr(error, "stderr", "") or error
                pytest.skip(f"no network namespaces here: {command[0]}: {why}")
        yield starts
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@mpich
@pytest.mark.parametrize(
    "how", ["'tcp://10.77.0.1:$PORT'", "'file://$FOLDER/meet'"], ids=["tcp", "file"]
)
def test_two_nodes(how: str, nodes: tuple[list[str], list[str]], tmp_path: Path) -> None:
    script = f"""
    import socket
    dist.init_process_group(init_method={how}, timeout=30)
    rank = dist.get_rank()
    x = np.full(1 << 18, rank + 1.0)
    dist.all_reduce(x)
    assert (x == 10).all()
    node = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    say(rank, socket.gethostname(), *node, os.environ["MASTER_ADDR"])
    dist.destroy_process_group()
    dist.init_process_group(init_method={how}, timeout=30)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    """
    place = {"MASTER_ADDR": None, "MASTER_PORT": None}
    task = Job(
        textwrap.dedent(script), (0, 1, 2, 3), environment=place,
        nodes=(nodes[0], nodes[0], nodes[1], nodes[1]),
    )  # fmt: skip
    ended = run(task, {}, tmp_path)
    ended.badly(1, 1, 1, -signal.SIGKILL)
    assert ended.lines == [
        f"{rank} node-{rank // 2} {rank % 2} 2 10.77.0.1" for rank in range(4)
    ], ended
    assert ended.err.count("rank 3 of 4 was lost") == 3, ended


# --- ends ---------------------------------------------------------------------------------------


@mpich
@job("""
    dist.init_process_group()
    say(total(1))
    $end
""", ranks=(0, 1, 2))  # fmt: skip
@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "sys.exit(0)",
        "time.sleep(dist.get_rank())",
        "dist.destroy_process_group(); os._exit(0)",
        "rank = dist.get_rank(); dist.destroy_process_group(); os._exit(0) if rank != 1 else 0",
        "rank = dist.get_rank(); dist.destroy_process_group(); time.sleep(2 - rank)",
        "os.fork() or os._exit(0)",
    ],
)
def test_ends_in_good_order(end: str, ended: Ended) -> None:
    ended.in_good_order(*["3.0"] * 3)
    assert ended.err == "", ended


@mpich
@job("""
    dist.init_process_group()
    total(1)
    sys.exit(73)
""", ranks=(0, 1, 2))  # fmt: skip
def test_exit_codes(ended: Ended) -> None:
    ended.badly(73, 73, 73)


@mpich
@job("""
    from mpicoll.launch import world
    start = world._initialize
    def initialize(mpi):
        if os.environ["RANK"] == "1":
            time.sleep(1)
            os._exit(3)
        start(mpi)
    world._initialize = initialize
    dist.init_process_group()
    say("not reached")
""", ranks=(0, 1, 2))  # fmt: skip
def test_a_rank_that_is_lost_while_others_are_inside_mpi_init(ended: Ended) -> None:
    ended.badly(-signal.SIGIO, 3, -signal.SIGIO)
    assert ended.seconds < LIMIT / 2


@mpich
@job("""
    import threading
    from mpicoll.launch import session
    os.environ["MASTER_PORT"] = "$PORT"
    connect = session._connect
    def die(*what):  # the server runs, and rank 0 goes without a word
        os._exit(0)
    session._connect = die
    dist.init_process_group()
""", ranks=(0,), size=2)  # fmt: skip
def test_no_server_is_left_of_a_rank_0_that_never_came(ended: Ended) -> None:
    for _ in range(50):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{ended.folder}".encode() in path.with_name("cmdline").read_bytes():
                    found.append(path)
                if f"TEST_MPICOLL_FOLDER={ended.folder}\0".encode() in path.read_bytes():
                    found.append(path)
        if not found:
            return
        time.sleep(0.1)
    pytest.fail(f"{found} are still there")


#: What a rank does that goes badly, its exit code, that of the others, and what they say.
BADLY = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -9, 1, "rank 1 of 3 was lost"),
    "_exit": ("os._exit(0)", 0, 1, "rank 1 of 3 was lost"),
    "exception": ("1 / 0", 1, 1, "rank 1 of 3 ended the job with exit code 1"),
    "exit": ("sys.exit(7)", 7, 7, "rank 1 of 3 ended the job with exit code 7"),
    "abort": (
        "from mpi4py import MPI; MPI.COMM_WORLD.Abort(9); time.sleep(100)", 9, 9,
        "rank 1 of 3 ended the job with exit code 9",
    ),
}  # fmt: skip


@mpich
@pytest.mark.parametrize(("end", "own", "others", "words"), BADLY.values(), ids=list(BADLY))
@job("""
    dist.init_process_group()
    total(1)
    if dist.get_rank() == 1:
        child = os.fork()  # keeps nobody from noticing
        if child == 0:
            time.sleep(100)
        with open("$FOLDER/child", "w") as file:
            file.write(str(child))
        say(time.time())
        $end
    if dist.get_rank() == 2:
        time.sleep(100)  # in Python
    dist.barrier()  # in MPI
    say("not reached")
""", ranks=(0, 1, 2))  # fmt: skip
def test_a_rank_that_goes_badly(end: str, own: int, others: int, words: str, ended: Ended) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((ended.folder / "child").read_text()), signal.SIGKILL)
    ended.badly(others, own, others)
    for rank in 0, 2:
        assert f"rank {rank}: {words}" in ended.err, ended
    assert ended.err.count("Traceback") == ("1 / 0" in end), ended
    # The time that it took, from the end of rank 1 on.
    left = max((ended.folder / name).stat().st_mtime for name in ("err-0", "err-2"))
    assert left - float(ended.lines[0]) < 5 and len(ended.lines) == 1, ended


@mpich
@job("""
    dist.init_process_group()
    dist.destroy_process_group()
    if os.environ["RANK"] == "1":
        os._exit(0)
    time.sleep(1)
    dist.init_process_group()
    say("not reached")
""")
def test_a_second_cycle_without_a_rank_that_left(ended: Ended) -> None:
    ended.badly(1, 0)
    assert "rank 0: rank 1 of 2 was lost" in ended.err or "rank 0 of 2: rank 1" in ended.err
    assert ended.out == ""


@mpich
@job("""
    dist.init_process_group()
    import io
    def collects(*what, before=sys.excepthook):  # as torch.distributed's hook does
        kept, sys.stderr = sys.stderr, io.StringIO()
        try:
            before(*what)
        finally:
            held, sys.stderr = sys.stderr.getvalue(), kept
        sys.stderr.write(held)
    sys.excepthook = collects
    if $destroy:
        dist.destroy_process_group()
    raise ValueError("lost my way")
""", ranks=(0,))  # fmt: skip
@pytest.mark.parametrize("destroy", [False, True])
def test_a_hook_that_collects_what_is_printed(destroy: bool, ended: Ended) -> None:
    ended.badly(1)
    assert ended.err.count("ValueError: lost my way") == 1, ended


#: The process of this job's server.
SERVER = """
    def server():
        for _ in range(200):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    said = [open(f"/proc/{pid}/{what}").read() for what in ("environ", "cmdline")]
                except OSError:
                    continue
                if "TEST_MPICOLL_FOLDER=$FOLDER\\0" in said[0] and "server.py" in said[1]:
                    return int(pid)
            time.sleep(0.05)
"""


@mpich
@pytest.mark.parametrize("end", ["pass", "dist.destroy_process_group()"])
@job(
    SERVER
    + """
    dist.init_process_group()
    total(1)
    if dist.get_rank() == 0:
        with open("$FOLDER/server", "w") as file:
            file.write(str(server()))
        os.kill(server(), signal.SIGSTOP)
    dist.barrier()
    $end
"""
)
def test_a_server_that_has_stopped_keeps_nobody(end: str, ended: Ended) -> None:
    os.kill(int((ended.folder / "server").read_text()), signal.SIGKILL)
    ended.in_good_order()
    for rank in range(2):
        assert f"rank {rank} of 2: the server that rank 0 started has not answered" in ended.err


@mpich
@job(
    SERVER
    + """
    from mpicoll import launch
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    stopped = server()
    os.kill(stopped, signal.SIGSTOP)
    for _ in range(1000):  # more than the connection holds
        launch.current().say("free" * 1000)
    say("not blocked")
    os.kill(stopped, signal.SIGKILL)
    sys.exit(5)
"""
)
def test_a_server_that_has_stopped_blocks_nobody_who_speaks(ended: Ended) -> None:
    assert ended.lines == ["not blocked"] and ended.codes[0] != 0, ended
    assert "(most recent call first)" not in ended.err, ended


# --- ranks that do not come, or do not agree ----------------------------------------------------

TELL = """
    start = time.monotonic()
    try:
        dist.init_process_group(init_method="$method", timeout=$limit)
    except dist.MpicollError as error:
        say(f"{os.environ['RANK']} {type(error).__name__} {error}")
        say("seconds", time.monotonic() - start < $limit + 6)
    else:
        say("not reached")
"""


@mpich
@pytest.mark.parametrize("method", ["env://", "file://$FOLDER/meet"])
@pytest.mark.parametrize("limit", [3])
@job(TELL, ranks=(0, 2), size=4)
def test_ranks_that_do_not_come(method: str, limit: int, ended: Ended) -> None:
    assert ended.codes == [0, 0], ended
    for rank, line in zip((0, 2), ended.lines, strict=False):
        assert f"{rank} CollectiveTimeoutError" in line, ended
        assert f"rank {rank} of 4: ranks 1, 3 did not come within 3 s" in line, ended
    assert ended.lines[2:] == ["seconds True"] * 2
    assert not (ended.folder / "meet").exists()


@mpich
@pytest.mark.parametrize("method", ["env://", "file://$FOLDER/meet"])
@pytest.mark.parametrize("limit", [2])
@job(TELL, ranks=(1,), size=2)
def test_rank_0_does_not_come(method: str, limit: int, ended: Ended) -> None:
    line = ended.lines[0]
    assert "1 CollectiveTimeoutError" in line and "did not reach rank 0's server" in line, ended
    assert ended.lines[1:] == ["seconds True"]


@mpich
@job(
    TELL.replace('"$method"', '"$method"').replace("    start", """
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = "3"
    start"""),
)  # fmt: skip
@pytest.mark.parametrize("method", ["env://"])
@pytest.mark.parametrize("limit", [20])
def test_ranks_that_disagree_about_their_number(method: str, limit: int, ended: Ended) -> None:
    for rank in range(2):
        assert f"{rank} LaunchError" in ended.lines[rank], ended
        assert "rank 1 has world_size=3, and rank 0 has world_size=2" in ended.lines[rank], ended


@mpich
@job(TELL, ranks=(0, 1, 1), size=3, later=(2,))
@pytest.mark.parametrize("method", ["env://"])
@pytest.mark.parametrize("limit", [14])
def test_a_rank_twice(method: str, limit: int, ended: Ended) -> None:
    assert "another process says that it is rank 1 of this job" in ended.out, ended
    assert ended.out.count("rank 2 did not come") == 2, ended


@mpich
@job("""
    os.environ["MPICOLL_SECRET"] = "the same" if "$own" == "no" else os.environ["RANK"]
    """ + textwrap.indent(textwrap.dedent(TELL), "    ").strip() + """
    if dist.is_initialized():
        say("sum", total(1))
""")  # fmt: skip
@pytest.mark.parametrize("method", ["env://"])
@pytest.mark.parametrize(("own", "limit"), [("no", 20), ("yes", 3)])
def test_a_secret_that_was_given(method: str, own: str, limit: int, ended: Ended) -> None:
    if own == "no":
        assert ended.lines.count("sum 2.0") == 2, ended
    else:
        assert "rank 1 did not come" in ended.out, ended
        assert "does not have this job's secret" in ended.out or "closed the conn" in ended.out


@job("""
    from mpi4py import MPI
    try:
        dist.init_process_group()
    except dist.LaunchError as error:
        say(error)
""")
def test_mpi_was_started_before(ended: Ended) -> None:
    assert len(ended.lines) == 2
    assert all("before anything imports mpi4py.MPI" in line for line in ended.lines), ended


@pytest.mark.skipif(VENDOR != "Open MPI", reason="for Open MPI")
@pytest.mark.parametrize("method", ["env://", "tcp://127.0.0.1:$PORT", "file://$FOLDER/meet"])
@pytest.mark.parametrize("limit", [20])
@job(TELL)
def test_open_mpi_says_what_to_do(method: str, limit: int, ended: Ended) -> None:
    assert ended.codes == [0, 0]
    for rank in range(2):
        line = ended.lines[rank]
        assert f"{rank} LaunchError" in line and "mpirun -n 2 python" in line, ended
        assert "pip install mpich" in line


@mpich
@job("""
    import json, socket
    place = {"hosts": ["127.0.0.1"], "port": 1, "secret": "old", "machine": ""}
    if os.environ["RANK"] == "1":
        with open("$FOLDER/meet", "w") as file:
            json.dump(place, file)
    else:
        time.sleep(3)
    dist.init_process_group(init_method="file://$FOLDER/meet", timeout=20)
    say(total(1))
""")
def test_a_file_of_an_earlier_job(ended: Ended) -> None:
    ended.in_good_order("2.0", "2.0")


#: What is no place of rank 0's, and was once found where one was expected.
LEFTOVERS = {
    "text": b"hello",
    "binary": b"\x80\x04\x95\xff\x00",
    "a FileStore of torch's": b"\x03\x00\x00\x00\x00\x00\x00\x00/0/init/\x01",
    "deep": b"[" * 60000,
    "a list": b"[1, 2]",
    "a number": b"7",
    "nothing": b"{}",
    "other keys": b'{"hosts": [], "port": 1, "secret": "", "machine": "", "version": 2}',
    "a host": b'{"hosts": "here", "port": 1, "secret": "", "machine": ""}',
    "hosts by number": b'{"hosts": [1], "port": 1, "secret": "", "machine": ""}',
    "a port in words": b'{"hosts": [], "port": "1", "secret": "", "machine": ""}',
    "no port": b'{"hosts": [], "port": 70000, "secret": "", "machine": ""}',
    "no secret": b'{"hosts": [], "port": 1, "secret": null, "machine": ""}',
}


@pytest.mark.parametrize("value", LEFTOVERS.values(), ids=list(LEFTOVERS))
def test_what_is_no_place_is_not_there_yet(value: bytes) -> None:
    with pytest.raises(NotThere, match="rank 0 has not written") as caught:
        Place.read(value)
    assert caught.value.wrong


def test_a_place_is_read_as_it_was_written() -> None:
    place = Place(["h", "::1"], 7, "s", "m")
    assert Place.read(place.text().encode()) == place


@mpich
@pytest.mark.parametrize(
    "left", [LEFTOVERS["binary"], LEFTOVERS["nothing"],
             b'{"hosts": ["..."], "port": 1, "secret": "", "machine": ""}'],
    ids=["binary", "nothing", "no host"],
)  # fmt: skip
@job("""
    if os.environ["RANK"] == "1":
        with open("$FOLDER/meet", "wb") as file:
            file.write($left)
    else:
        time.sleep(2)
    dist.init_process_group(init_method="file://$FOLDER/meet", timeout=20)
    say(total(1))
""")
def test_a_file_with_something_else_in_it(left: bytes, ended: Ended) -> None:
    ended.in_good_order("2.0", "2.0")


@mpich
@pytest.mark.parametrize(("method", "limit"), [("file://$FOLDER/meet", 2)])
@job("""
    with open("$FOLDER/meet", "w") as file:
        file.write("a letter")
""" + TELL, ranks=(1,), size=2)  # fmt: skip
def test_a_file_with_something_else_in_it_for_good(method: str, limit: int, ended: Ended) -> None:
    line = ended.lines[0]
    assert "1 CollectiveTimeoutError" in line and "did not reach rank 0's server" in line, ended
    assert "rank 0 has not written what is there: b'a letter'" in line, ended


# --- the limit of a beginning -------------------------------------------------------------------


def limited(during: str, limit: float = 0.5, **environment: str) -> Any:
    """A process that is inside the limit while it does something."""
    script = f"""
import ctypes, time
from mpicoll.launch.limit import limited
print("begins")
with limited({limit}, None):
    {during}
time.sleep(1)
print("goes on")
"""
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


#: As MPI_Init does it: PyDLL keeps the interpreter's lock.
BLOCKS = "ctypes.PyDLL(None).sleep(30)"


@compiled
def test_the_limit_needs_no_interpreter() -> None:
    done = limited(BLOCKS)
    assert (done.returncode, done.stdout) == (1, "begins\n"), done
    assert done.stderr == (
        "mpicoll: rank ? of ?: init_process_group: the other ranks did not all come within 0.5 s: "
        "see what became of them, or give a longer timeout; ending the job\n"
    )


@compiled
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_a_limit_that_is_kept(limit: float) -> None:
    done = limited("pass", limit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begins\ngoes on\n", ""), done


@compiled
@pytest.mark.parametrize(
    ("size", "here", "there", "words"),
    [
        (4, 4, [0], "within 0.5 s (missing: 1, 3): see"),
        (4, 2, [0], "within 0.5 s: see"),  # on several nodes nobody knows
        (3000, 3000, [0], ", and others): see what became of them"),
    ],
)
def test_who_is_missing_on_a_node(size: int, here: int, there: list[int], words: str) -> None:
    job = f"mpicoll-test-{os.getpid()}"
    with contextlib.ExitStack() as held:
        for rank in there:
            name = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            name.bind(f"\0mpicoll/{session.node()}/{job}/{rank}")
        done = limited(
            BLOCKS, PMIX_NAMESPACE=job, OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE=str(size),
            OMPI_COMM_WORLD_LOCAL_SIZE=str(here),
        )  # fmt: skip
    assert done.stderr.startswith(f"mpicoll: rank 2 of {size}: ") and words in done.stderr, done
    assert len(done.stderr) <= 4096 and done.stderr.endswith("ending the job\n"), done


# --- the server ---------------------------------------------------------------------------------

#: Tells at which addresses the server listens, before all ranks have come.
LISTENS = (
    SERVER
    + """
    import glob
    def listens():
        inodes, pid = set(), server()
        for path in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                inodes.add(os.readlink(path))
            except OSError:
                pass
        for path in "/proc/net/tcp", "/proc/net/tcp6":
            for line in open(path).read().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                    yield words[1].partition(":")[0]
    if os.environ["RANK"] == "1":
        while not (found := list(listens())):  # it is about to
            time.sleep(0.05)
        say("listens", *found)
    $begin
    say("done")
"""
)
LOOPBACK, ALL = "0100007F", "0" * 32


@mpich
@pytest.mark.parametrize(
    ("method", "where"),
    [("env://", LOOPBACK), ("tcp://localhost:$PORT", LOOPBACK), ("file://$FOLDER/meet", ALL)],
)
@pytest.mark.parametrize("begin", ["dist.init_process_group('mpi', '$method', 30)"])
@job(LISTENS)
def test_where_the_server_listens(method: str, where: str, begin: str, ended: Ended) -> None:
    ended.in_good_order("done", "done", f"listens {where}")


@mpich
@pytest.mark.parametrize(
    "begin",
    [
        "dist.init_process_group(timeout=30)",
        "import torch; torch.distributed.init_process_group('mpicoll')",
    ],
    ids=["mpicoll", "torch"],
)
@job(LISTENS, size=2, by="torchrun")
@pytest.mark.skipif(not TORCHRUN.exists(), reason="there is no torchrun")
def test_where_the_server_listens_under_torchrun(begin: str, ended: Ended) -> None:
    ended.in_good_order("done", "done", f"listens {LOOPBACK}")


class Peer:
    """A connection to a server under test."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 5)
        self.file = self.sock.makefile("rwb")

    def say(self, line: str) -> None:
        self.file.write(line.encode() + b"\n")
        self.file.flush()

    def hear(self) -> str:
        try:
            return self.file.readline().decode().rstrip("\n")
        except ConnectionError:
            return ""

    def introduce(
        self, role: str, rank: int, size: int = 2, secret: str = "s", node: str = "n"
    ) -> str:
        nonce = self.hear().removeprefix(server.GREETING + " ")
        words = [role, rank, size, node, "mine"]
        self.say(" ".join(map(str, [*words, server.mac(secret, "rank", nonce, *words)])))
        answer = self.hear()
        if answer.startswith("ok"):
            assert answer == f"ok {server.mac(secret, 'server', nonce, 'mine')}"
        return answer.partition(" ")[0]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server of two ranks in a thread; its port."""
    monkeypatch.setattr(server, "_PATIENCE", 1.0)
    monkeypatch.setattr(server, "_GRACE", 0.5)
    listener = server.listen("127.0.0.1", 0)
    reader, writer = os.pipe()  # rank 0 is on its way
    one = server.Server(listener, "s", 2, 3.0, starter=reader)
    thread = threading.Thread(target=one.serve)
    thread.start()
    yield listener.getsockname()[1]
    os.close(writer)
    thread.join(10)
    os.close(reader)
    assert not thread.is_alive(), "the server did not end"


def all_of(port: int) -> dict[tuple[str, int], Peer]:
    peers = {}
    for role in "pmi", "watch":
        for rank in range(2):
            peers[role, rank] = Peer(port)
            assert peers[role, rank].introduce(role, rank, node="ab"[rank]) == "ok"
    assert [peers["watch", rank].hear() for rank in range(2)] == ["go", "go"]
    return peers


def test_strangers_are_refused_and_disturb_nobody(served: int) -> None:
    wrong = Peer(served)
    assert wrong.introduce("pmi", 0, secret="another") == ""
    for garbage in (
        "GET / HTTP/1.1",
        "secret",
        "pmi 0 2 n",
        "pmi 0 2 n mine 0",
        "x" * 5000,
        "\0\xff",
    ):
        one = Peer(served)
        one.hear()
        with contextlib.suppress(ConnectionError):
            one.say(garbage)
        assert one.hear() == "", garbage
    cut = Peer(served)
    cut.sock.sendall(b"pmi 0")
    silent = Peer(served)
    assert silent.hear().startswith(server.GREETING)
    peers = all_of(served)
    start = time.monotonic()
    assert silent.hear() == "" and time.monotonic() - start < 3
    for peer in peers.values():
        peer.sock.close()
        peer.file.close()


def test_a_rank_comes_once_and_agrees_on_the_size(served: int) -> None:
    first = Peer(served)
    assert first.introduce("watch", 0) == "ok"
    assert Peer(served).introduce("watch", 0) == "taken"
    assert Peer(served).introduce("watch", 2) == "refused"
    assert first.hear() == "refused there is no rank 2 in a world of 2"
    late = Peer(served)
    assert late.introduce("watch", 1) == "ok"
    assert late.hear() == "refused there is no rank 2 in a world of 2"


def test_pmi(served: int) -> None:
    peers = all_of(served)
    zero, one = peers["pmi", 0], peers["pmi", 1]

    def ask(line: str, peer: Peer = zero) -> str:
        peer.say(line)
        return peer.hear()

    peers["watch", 0].say("there")
    assert peers["watch", 0].hear() == "here"
    answer = ask("cmd=init pmi_version=1 pmi_subversion=1")
    assert answer == "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
    assert ask("cmd=get_universe_size") == "cmd=universe_size rc=0 size=2"
    assert "vallen_max=" in ask("cmd=get_maxes") and "appnum=0" in ask("cmd=get_appnum")
    name = ask("cmd=get_my_kvsname").rpartition("=")[2]
    assert ask(f"cmd=put kvsname={name} key=k value=a=b c ") == "cmd=put_result rc=0 msg=success"
    found = ask(f"cmd=get kvsname={name} key=k", one)
    assert found == "cmd=get_result rc=0 msg=success value=a=b c "
    assert "rc=-1" in ask(f"cmd=get kvsname={name} key=other")
    mapping = ask(f"cmd=get kvsname={name} key=PMI_process_mapping")
    assert mapping.endswith("value=(vector,(0,1,1),(1,1,1))")
    assert "rc=-1" in ask("cmd=publish_name service=x port=y")
    zero.say("mcmd=spawn\nnprocs=1\nendcmd")
    assert "rc=-1" in zero.hear()
    zero.say("cmd=barrier_in")
    zero.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        zero.sock.recv(1)
    assert ask("cmd=barrier_in", one) == "cmd=barrier_out rc=0"
    zero.sock.settimeout(5)
    assert zero.sock.recv(100) == b"cmd=barrier_out rc=0\n"
    one.say("cmd=abort exitcode=5 message=abort job")
    assert [peers["watch", rank].hear() for rank in range(2)] == ["abort 1 5"] * 2


def test_ends_as_the_server_tells_them(served: int) -> None:
    peers = all_of(served)
    zero, one = peers["watch", 0], peers["watch", 1]
    zero.say("busy\nfree\nend")
    one.say("busy\nfree")
    peers["pmi", 0].say("cmd=barrier_in")
    for role in "pmi", "watch":  # without MPI_Finalize
        peers[role, 1].sock.close()
        peers[role, 1].file.close()
    assert zero.hear() == "end some"
    assert peers["pmi", 0].hear() == "cmd=barrier_out rc=0"


def test_a_rank_is_lost(served: int) -> None:
    peers = all_of(served)
    peers["watch", 0].say("busy")
    peers["watch", 1].sock.close()
    peers["watch", 1].file.close()
    assert peers["watch", 0].hear() == "lost 1"
    assert peers["pmi", 0].hear() == "", "who is inside MPI has to come out"


def test_a_server_that_nobody_comes_to_ends(served: int) -> None:
    assert served


def test_mapping() -> None:
    assert server.mapping(["a"] * 4) == "(vector,(0,1,4))"
    assert server.mapping(["a", "a", "b", "b"]) == "(vector,(0,1,2),(1,1,2))"
    assert server.mapping(["b", "a", "b"]) == "(vector,(0,1,1),(1,1,1),(0,1,1))"


def test_the_server_needs_the_standard_library_alone() -> None:
    settings = {
        "host": "127.0.0.1",
        "port": 0,
        "secret": "s",
        "size": 1,
        "limit": 0.1,
        "open": False,
    }
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(server.__file__)], input=json.dumps(settings) + "\n",
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["port"] > 0 and done.stderr == ""
    assert time.monotonic() - start < 10, "whoever waits for what it prints waits for the server"


# --- decisions ----------------------------------------------------------------------------------

TORCH = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "7"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("world_size", "openmpi", "environment", "inherited", "way"),
    [
        (4, False, ENV, False, Way.MEETING),
        (4, False, ENV | TORCH, False, Way.MEETING),
        (4, False, PMI, False, Way.OWN),
        (4, False, PMI | ENV | TORCH, False, Way.MEETING),  # torchrun inside a job of mpiexec
        (4, False, PMI, True, Way.MEETING),  # started by a rank of mpiexec
        (4, False, PMI | {"PMI_SIZE": "1"}, False, Way.MEETING),
        (8, False, PMI, False, Way.OWN),  # and MPI then disagrees
        (4, False, SRUN, False, Way.MEETING),  # --mpi=none
        (4, False, SRUN | {"PMIX_RANK": "1"}, False, Way.MEETING),  # not for this library
        (4, False, OMPI, False, Way.MEETING),  # likewise
        (4, True, OMPI, False, Way.OWN),
        (4, True, SRUN | {"PMIX_RANK": "1"}, False, Way.OWN),
        (4, True, SRUN, False, Way.MEETING),
        (4, True, PMI, False, Way.MEETING),
        (1, False, {}, False, Way.ALONE),
        (1, False, PMI, False, Way.ALONE),
        (1, False, PMI | {"PMI_SIZE": "1"}, False, Way.OWN),
        (1, True, OMPI, False, Way.ALONE),
        (1, False, TORCH, False, Way.ALONE),
    ],
)
def test_which_way(
    world_size: int, openmpi: bool, environment: dict[str, str], inherited: bool, way: Way
) -> None:
    assert choose(world_size, openmpi, environment, inherited) is way


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False), (ENV, False), (SRUN, False), (PMI, True), (OMPI, True), (PMI | TORCH, False),
        ({"PMIX_RANK": "0"}, True), ({"PMI_RANK": "0"}, False),
        (PMI | {"PMI_FD": "987"}, False),  # a descriptor that this process does not have
    ],
)  # fmt: skip
def test_by_mpi(environment: dict[str, str], expected: bool) -> None:
    assert by_mpi(environment) is expected


@pytest.mark.parametrize(
    ("method", "rank", "size", "environment", "store"),
    [
        (None, None, None, {}, None),
        (None, None, None, PMI | ENV, None),
        (None, None, None, ENV, Port),
        (None, None, None, ENV | TORCH, Agent),
        (None, None, None, PMI | ENV | TORCH, Agent),
        (None, 0, 4, {}, None),  # nowhere to meet: MPI has to know
        ("mpi://", None, None, ENV, None),
        ("env://", None, None, {}, None),
        ("env://", None, None, ENV, Port),
        ("env://", 2, 4, {"MASTER_ADDR": "h", "MASTER_PORT": "7"}, Port),
        ("env://", 2, 4, PMI, None),
        ("tcp://h:7", 0, 2, {}, Port),
        ("tcp://[::1]:7", 0, 2, {}, Port),
        ("tcp://h:7?rank=1&world_size=2", None, None, {}, Port),
        ("tcp://h:7", None, None, ENV, Port),
        ("tcp://h:7", None, None, PMI, None),
        ("file:///x/y", 0, 2, {}, File),
    ],
)
def test_where_to_meet(
    method: str | None, rank: int | None, size: int | None, environment: dict[str, str], store: Any
) -> None:
    found = meeting(method, told(method, rank, size, environment), 1.0, environment)
    assert type(None if found is None else found.store) is (store or type(None))


@pytest.mark.parametrize(
    ("method", "rank", "size", "environment", "error", "words"),
    [
        ("http://x", None, None, {}, UnsupportedError, "'tcp://HOST:PORT'"),
        ("tcp://h:7", None, 2, {}, ArgumentError, "needs rank and world_size"),
        ("tcp://h", 0, 2, {}, ArgumentError, "a port that is free"),
        ("tcp://h:x", 0, 2, {}, ArgumentError, "a port that is free"),
        ("tcp://h:7", 2, 2, {}, ArgumentError, "rank=2, world_size=2"),
        ("tcp://h:7?rank=1", 0, 2, {}, ArgumentError, "rank=0 disagrees"),
        ("file:///x", 0, None, {}, ArgumentError, "needs rank and world_size"),
        ("env://", None, None, ENV | {"RANK": "a"}, ArgumentError, "RANK: expected a number"),
        ("env://", 0, 2, {}, ArgumentError, "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_meetings_that_cannot_be(
    method: str, rank: int | None, size: int | None, environment: dict[str, str],
    error: type[Exception], words: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=words.replace("(", r"\(")):
        meeting(method, told(method, rank, size, environment), 1.0, environment)


def test_missing_variables_are_filled_in() -> None:
    environment = {"RANK": "7", "MASTER_ADDR": "there"}
    fill_environment(1, 4, 0, 2, "here", 99, environment)
    assert environment == {
        "RANK": "7", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "there", "MASTER_PORT": "99",
    }  # fmt: skip


def test_a_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = File(tmp_path / "meet")
    with pytest.raises(NotThere):
        file.get("k")
    (tmp_path / "meet").touch()
    with pytest.raises(NotThere):
        file.get("k")
    file.set("k", "v")
    assert file.get("k") == b"v" and (tmp_path / "meet").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["meet"]
    if os.geteuid() == 0:
        os.chown(tmp_path / "meet", 12345, -1)
        with pytest.raises(LaunchError, match="belongs to user 12345"):
            file.get("k")
    file.remove()
    file.remove()
