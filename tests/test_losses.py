"""Jobs that continue after ranks are killed, one after another.

The surviving ranks raise LostRankError in the call that they are in.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
from page_blocks import blocks
from survivable_jobs import launch, needs_survival
from whole_jobs import ERROR_OF

pytest.importorskip("torch")
from mpicoll.torch.backend import HAS_PYTHON_BACKENDS

TIMEOUT_S = 90
ELASTIC = Path(__file__).resolve().parent.parent / "jobs" / "train_digits_elastic.py"

pytestmark = needs_survival

#: The end of every program.
COMPLETED = """
dist.destroy_process_group()
open(sys.argv[1], "w").write("completed")
"""

PREAMBLE = f"""
import os, signal, sys, time
import numpy as np

def die():
    time.sleep(0.3)  # until the other ranks are in the call
    os.kill(os.getpid(), signal.SIGKILL)
{ERROR_OF}"""

#: Kills the last rank in each call until one rank is left.
RECONFIGURE = """
import mpicoll as dist
from mpicoll.api.reconfigure import Reconfigurable

dist.init_process_group(timeout=60)
world, me, n = Reconfigurable(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
handles = [None] * n
dist.all_gather_object(handles, world.handle())
large = np.ones(3_000_000)
calls = [
    lambda group: dist.all_reduce(np.ones(1), group=group),
    lambda group: dist.recv(np.ones(1), group_src=1 - dist.get_rank(group), group=group)
        if dist.get_rank(group) < 2 else dist.barrier(group),
    lambda group: dist.broadcast(large, group_src=group.size() - 1, group=group),
    lambda group: dist.all_reduce(large, group=group, async_op=True).wait(),
]
for turn, call in enumerate(calls):
    left = n - turn
    group = world.reconfigure(turn, handles[:left], 30)
    x = np.ones(5)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [left] * 5, x
    if me == left - 1:
        die()
    error = error_of(dist.LostRankError, call, group)
    assert set(error.ranks) <= {left - 1}, error
    assert "group 0:%d has lost" % turn in str(error), error
    error_of(dist.LostRankError, dist.all_reduce, x, group=group)
group = world.reconfigure(99, handles[:1])
dist.all_reduce(x, group=group)
"""

TORCH_RECONFIGURE = """
from datetime import timedelta
import torch
import torch.distributed as dist
from mpi4py import MPI

dist.init_process_group("mpicoll", init_method="mpi://", enable_reconfigure=True,
                        timeout=timedelta(seconds=60))
me, n = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
handles = MPI.COMM_WORLD.allgather(dist._get_reconfigure_handle())
model = torch.nn.Linear(4, 4)
for left in range(n, 0, -1):
    dist._reconfigure(left, handles[:left]).wait()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    step = lambda: ddp(torch.ones(2, 4)).sum().backward()
    step()
    assert dist.get_world_size() == left
    if left == 1:
        break
    if me == left - 1:
        die()
    assert "has lost" in str(error_of(RuntimeError, step))
"""

#: As RECONFIGURE, with other calls.
SHRINK = """
import mpicoll as dist

dist.init_process_group(timeout=60)
large = np.ones(3_000_000)

def pending():
    works = [dist.all_reduce(np.ones(1000), async_op=True) for _ in range(3)]
    raise [error_of(dist.LostRankError, work.wait) for work in works][0]

calls = [
    lambda: dist.all_reduce(np.ones(1)),
    pending,
    lambda: dist.irecv(np.ones(1), src=(dist.get_rank() + 1) % dist.get_world_size()).wait(),
    lambda: dist.broadcast(large, src=dist.get_world_size() - 1),
]
for call in calls:
    me, n = dist.get_rank(), dist.get_world_size()
    x = np.ones(5)
    dist.all_reduce(x)
    assert x.tolist() == [n] * 5, x
    if me == n - 1:
        die()
    assert error_of(dist.LostRankError, call).ranks == (n - 1,)
    if me != 0:
        error = error_of(ValueError, dist.shrink_group, [0])
        assert f"[{n - 1}], got global ranks [0]" in str(error), error
    group = dist.shrink_group([n - 1])
    assert group is dist.group.WORLD and (dist.get_rank(), dist.get_world_size()) == (me, n - 1)
names = [None]
dist.all_gather_object(names, "the last")
assert names == ["the last"]
"""

#: Loses and replaces two ranks: an original rank and a replacement. The first calls of grow_group
#: fail.
GROW = """
import mpicoll as dist
from mpicoll.api.reconfigure import Reconfigurable
from mpicoll.launch import spawned_ranks

dist.init_process_group(timeout=60)

def refused(error, words, *arguments):
    assert words in str(error_of(error, dist.grow_group, *arguments)), words
    x = np.ones(1)
    dist.all_reduce(x)  # the group is unchanged
    assert x[0] == dist.get_world_size()

turn = np.zeros(1, int)
dist.broadcast(turn, 0)  # 0 in an original rank
for turn in range(int(turn[0]), 2):
    me, n = dist.get_rank(), dist.get_world_size()
    lost = n - 1 - turn
    if me == lost:
        die()
    assert error_of(dist.LostRankError, dist.all_reduce, np.ones(1)).ranks == (lost,)
    dist.shrink_group([lost])
    if turn == 0:
        late = "import os, time; time.sleep(0.3); os._exit(3)"  # MPI has connected it by then
        refused(dist.DistBackendError, "ended before it", 1, ["-c", late])
        find_node, spawned_ranks.node = spawned_ranks.node, lambda: 1 // 0
        failed = ZeroDivisionError if me == 0 else dist.DistBackendError
        refused(failed, "division" if me == 0 else "rank 0: ZeroDivisionError", 1, ["-c", late])
        spawned_ranks.node, here = find_node, os.getcwd()
        os.mkdir(removed := f"{sys.argv[1]}.{me}")
        os.chdir(removed)
        os.rmdir(removed)
        refused(ValueError, "os.chdir", 1, ["-c", late])
        if me == 0:
            os.chdir(here)  # other ranks do not need a working directory
        refused(dist.MismatchError, "count", 1 + dist.get_rank())
        refused(ValueError, "at least 1", 0)
        refused(TypeError, "['job.py', '--option']", 1, "job.py")
    group = dist.grow_group(1)
    assert group is dist.group.WORLD and len(dist.get_process_group_ranks(group)) == n
    dist.broadcast(np.array([turn + 1]), 0)
me, n = dist.get_rank(), dist.get_world_size()
assert n == 3
assert [os.environ[name] for name in ("RANK", "WORLD_SIZE")] == [str(me), str(n)]
large = np.full(300_000, 2.0**me)
dist.all_reduce(large)
assert set(large) == {7.0}
names = [None] * n
dist.all_gather_object(names, me)
assert names == [0, 1, 2]
pair = dist.new_group([0, n - 1])
if me != 1:
    dist.all_reduce(large[:2], group=pair)
    assert large[0] == 14
assert "new_group" in str(error_of(ValueError, Reconfigurable, dist.group.WORLD))
"""


def _run(script: str, folder: Path, ranks: int = 5) -> subprocess.CompletedProcess[str]:
    job, completed = folder / "job.py", folder / "completed"
    job.write_text(PREAMBLE + script + COMPLETED)
    done = launch(ranks, job, completed, timeout_s=TIMEOUT_S)
    assert completed.exists(), done.stdout + done.stderr
    return done


@pytest.mark.parametrize("script", [RECONFIGURE, SHRINK], ids=["reconfigure", "shrink_group"])
def test_group_continues_without_lost_ranks(script: str, tmp_path: Path) -> None:
    _run(script, tmp_path)


def test_grow_group_replaces_lost_ranks(tmp_path: Path) -> None:
    done = _run(GROW, tmp_path, 3)
    assert done.stderr.count("mpicoll: lost: ") == 2


#: Names that the programs of docs/reliability.md use. Rank 1 of 3 is lost in a step.
GIVEN = """
import mpicoll as dist

def step(state):
    if dist.get_rank() == 1:
        die()
    new = state + 1
    dist.all_reduce(new)
    return new

def share(state):
    dist.broadcast(state, src=0)
    return state

dist.init_process_group(timeout=60)
"""

SHRUNK = """
state = np.ones(3)
{block}
dist.all_reduce(state)
assert (dist.get_world_size(), state.tolist()) == (2, [2.0] * 3), state
"""

#: The replacement receives the state of the other ranks, and does not lose a rank.
GROWN = """
state = share(np.zeros(3))
if state[0] == 0:
    state += 1
    try:
        step(state)
    except dist.LostRankError as error:
{block}
dist.all_reduce(state)
assert (dist.get_world_size(), state.tolist()) == (3, [3.0] * 3), state
"""


@pytest.mark.parametrize(("program", "word"), [(SHRUNK, "kept"), (GROWN, "grow_group")])
def test_programs_of_the_reliability_page_run(program: str, word: str, tmp_path: Path) -> None:
    page = (ELASTIC.parent.parent / "docs/reliability.md").read_text(encoding="utf-8")
    (block,) = (block.text for block in blocks(page)
                if block.language == "python" and word in block.text)  # fmt: skip
    if program is GROWN:
        block = textwrap.indent(block, " " * 8)
    _run(GIVEN + program.format(block=block), tmp_path, 3)


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="torch 2.15 is the first to have it")
def test_torch_group_continues_without_lost_ranks(tmp_path: Path) -> None:
    _run(TORCH_RECONFIGURE, tmp_path)


@pytest.mark.slow
def test_training_with_two_lost_and_replaced_ranks_has_the_losses_of_one_rank(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sklearn")
    curves = []
    for ranks, options in (3, ["--grow", "--kill-at", "100", "250"]), (1, []):
        curve = tmp_path / f"{ranks}.npy"
        done = launch(ranks, ELASTIC, "--curve", curve, *options, timeout_s=TIMEOUT_S)
        assert curve.exists(), done.stdout + done.stderr
        assert f"on {ranks} ranks: the target" in done.stdout and "is reached" in done.stdout
        assert done.stdout.count("lost 1 of") == ranks - 1
        curves.append(np.load(curve))
    assert curves[0].shape == (20, 2)
    np.testing.assert_allclose(curves[0], curves[1], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_torchft_job_continues_without_a_lost_replica() -> None:
    pytest.importorskip("torchft")
    pytest.importorskip("sklearn")
    torchft = ELASTIC.with_name("train_digits_torchft.py")
    done = launch(3, torchft, "--kill-at", "30", timeout_s=TIMEOUT_S)
    assert "with 2 of 3 replicas" in done.stdout, done.stdout + done.stderr
    assert "replica 0: step 30 is taken again" in done.stdout
    accuracy = re.search(r"accuracy (.*)%", done.stdout)
    assert accuracy and float(accuracy[1]) > 95.0
