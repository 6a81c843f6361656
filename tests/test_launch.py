"""Ranks without an MPI launcher become one MPI world."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_jobs import LIMIT, TORCHRUN, Ended, Job, job, job_on_any_mpi, mpich, run
from whole_jobs import needs_mpiexec, run_program

pytestmark = pytest.mark.waits


ROUND = """
    dist.init_process_group(timeout=30, $how)
    say(dist.get_rank(), dist.get_world_size(), total(dist.get_rank() + 1))
    dist.destroy_process_group()
"""
#: Arguments of init_process_group.
METHODS = {
    "nothing": "",
    "env": "init_method='env://'",
    "tcp": "init_method='tcp://127.0.0.1:$PORT'",
    "host": "init_method='tcp://localhost:$PORT', rank=int(os.environ['RANK'])",
    "query": "init_method=f'tcp://127.0.0.1:$PORT?rank={os.environ[\"RANK\"]}&world_size=2'",
    "file": "init_method='file://$FOLDER/meet'",
}


@pytest.mark.parametrize("how", METHODS.values(), ids=list(METHODS))
@job(ROUND)
def test_init_methods(how: str, ended: Ended) -> None:
    ended.in_good_order("0 2 3.0", "1 2 3.0")
    assert not (ended.folder / "meet").exists() and not list(ended.folder.glob(".meet*"))


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
def test_torchrun_restarts_the_ranks(ended: Ended) -> None:
    ended.printed("0 2.0 0 2 0 2 True", "1 2.0 1 2 1 2 True", "again 2.0", "again 2.0")


@needs_mpiexec
@job_on_any_mpi("""
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
def test_init_sets_torch_variables_under_mpiexec(ended: Ended) -> None:
    ended.printed("2.0", "2.0")
    first, second = ((ended.folder / f"master-{rank}").read_text() for rank in range(2))
    assert first == second and first.startswith("127.0.0.1:")


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
#: Prints at the end of the process whether MPI was finalized.
AFTER = (
    "import multiprocessing.util, mpi4py.MPI as m; multiprocessing.util.Finalize(None, "
    "lambda: say('finalized', m.Is_finalized()), exitpriority=-9)"
)
BEGIN = "dist.init_process_group('mpi', 'tcp://127.0.0.1:$PORT', 30, 2, rank)"
DESTROYS = f"{BEGIN}; say(total(1)); dist.destroy_process_group()"


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("work", "codes"),
    [
        (DESTROYS, "0 0"),
        (f"{BEGIN}; say(total(1)); {AFTER}", "0 0"),
        (f"{BEGIN}; say(total(1)); sys.exit(5)", "5 5"),
        (f"{BEGIN}; say(total(1)); rank == 1 and 1 / 0; dist.barrier()", "1 1"),
    ],
    ids=["destroy", "none", "exit", "exception"],
)
@job(SPAWN, by="one")
def test_multiprocessing_children_are_ranks(
    start: str, work: str, codes: str, ended: Ended
) -> None:
    more = ["finalized True"] * 2 if "finalized" in work else []
    ended.printed("2.0", "2.0", *more, f"codes {codes}")
    fails = "1 / 0" in work
    assert ended.err.count("Traceback") == ended.err.count("ZeroDivisionError") == fails, ended
    assert ("rank 0: rank 1 of 2 ended the job with exit code 1" in ended.err) == fails, ended
    assert ended.seconds < LIMIT / 2


#: Workers of a pool join several groups with different ranks.
POOL = """
    import multiprocessing
    def work(port, worker, members):
        rank, size = members.index(worker), len(members)
        x = np.array([2.0**worker])
        if "$front" == "facade":
            dist.init_process_group("mpi", f"tcp://127.0.0.1:{port}", 30, size, rank)
            dist.all_reduce(x)
            dist.destroy_process_group()
        else:
            import torch, torch.distributed as c10d
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            c10d.init_process_group("mpicoll", rank=rank, world_size=size)
            c10d.all_reduce(torch.from_numpy(x))
            c10d.destroy_process_group()
        return int(x[0])
    if __name__ == "__main__":
        pools = [multiprocessing.get_context("spawn").Pool(1) for _ in range(2)]
        port = $PORT
        for turn, members in enumerate([(0, 1), (0,), (1,), (1, 0), (0, 1)]):
            calls = [pools[worker].apply_async(work, (port, worker, members))
                     for worker in members]
            say(turn, *[call.get() for call in calls])
        for one in pools:
            one.close()
        for one in pools:
            one.join()
"""


@pytest.mark.parametrize("front", ["facade", *["torch"] * bool(importlib.util.find_spec("torch"))])
@job(POOL, by="one")
def test_pool_workers_join_groups_with_different_ranks(front: str, ended: Ended) -> None:
    ended.printed("0 3 3", "1 1", "2 2", "3 3 3", "4 3 3")


@needs_mpiexec
@job(SPAWN, {"start": "spawn", "work": DESTROYS}, size=1, by="mpiexec")
def test_multiprocessing_under_mpiexec(ended: Ended) -> None:
    ended.printed("2.0", "2.0", "codes 0 0")


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
def test_repeated_init_and_destroy_leave_nothing(ended: Ended) -> None:
    ended.in_good_order("done", "done")


# --- several nodes --------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[tuple[list[str], ...]]:
    """Commands that run their arguments on one of two nodes (network namespaces with different host
    names, at 10.77.0.1 and 10.77.0.2).
    """
    names = [f"mpicoll-{os.getpid()}-{node}" for node in range(2)]
    one, two = (f"mc{os.getpid()}{node}" for node in "ab")
    lines = [f"ip netns add {name}" for name in names]
    lines += [f"ip link add {one} netns {names[0]} type veth peer name {two} netns {names[1]}"]
    for node, (name, link) in enumerate(zip(names, (one, two), strict=True)):
        lines += [
            f"ip -n {name} addr add 10.77.0.{node + 1}/24 dev {link}",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set {link} up",
        ]
    starts = tuple(
        [*f"ip netns exec {name} unshare --uts sh -c".split(),
         f'hostname node-{node} && exec "$@"', "sh"]
        for node, name in enumerate(names)
    )  # fmt: skip
    try:
        for command in [*map(str.split, lines), *([*start, "true"] for start in starts)]:
            done = run_program(*command)
            if done.returncode:
                pytest.skip(f"network namespaces not available: {command[0]}: {done.stderr}")
        yield starts
    finally:
        for name in names:
            run_program("ip", "netns", "del", name)


@mpich
@pytest.mark.skipif(not shutil.which("ip"), reason="needs the command ip")
@pytest.mark.parametrize(
    "how", ["'tcp://10.77.0.1:$PORT'", "'file://$FOLDER/meet'"], ids=["tcp", "file"]
)
def test_lost_rank_on_two_nodes(how: str, nodes: tuple[list[str], ...], tmp_path: Path) -> None:
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
    task = Job(
        textwrap.dedent(script), (0, 1, 2, 3),
        environment={"MASTER_ADDR": None, "MASTER_PORT": None},
        nodes=(nodes[0], nodes[0], nodes[1], nodes[1]),
    )  # fmt: skip
    ended = run(task, {}, tmp_path)
    ended.with_codes(1, 1, 1, -signal.SIGKILL)
    assert ended.lines == [
        f"{rank} node-{rank // 2} {rank % 2} 2 10.77.0.1" for rank in range(4)
    ], ended
    assert ended.err.count("rank 3 of 4 was lost") == 3, ended
