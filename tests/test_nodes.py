"""Two nodes of two ranks. The nodes are namespaces that do not share memory; MPI uses TCP. Needs
permission to create namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import VENDOR
from whole_jobs import ERROR_OF, MPIEXEC, run_program

LIMIT = 60
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


def _can() -> bool:
    if not MPIEXEC or not all(map(shutil.which, ("unshare", "nsenter"))):
        return False
    return run_program(*NAMESPACE, "true").returncode == 0


pytestmark = pytest.mark.skipif(not _can(), reason="needs mpiexec and the right to make namespaces")

#: Disables shared memory in MPI.
APART = {
    "MPIR_CVAR_NOLOCAL": "1",
    "UCX_TLS": "tcp,self",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
}

#: Each rank enters its namespace. Ranks 0 and 1 share the first one.
ENTER = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
inside = sys.argv[1 + rank // 2]
os.execvp("nsenter", ["nsenter", "-t", inside, "--pid", "--mount", sys.executable, *sys.argv[3:]])
"""

JOB = """
import json, sys
import numpy as np
import ml_dtypes
import mpicoll as dist
from mpicoll.routes.host import hierarchy, select

dist.init_process_group(timeout=30)
rank, n = dist.get_rank(), dist.get_world_size()
for count in (3, 10**4, 3 * 10**6):
    for dtype in (np.float32, ml_dtypes.bfloat16):
        mine = (np.arange(count) % 7 + rank).astype(dtype)
        total = (n * (np.arange(count) % 7) + n * (n - 1) // 2).astype(dtype)
        array = mine.copy()
        dist.all_reduce(array)
        assert (array == total).all(), (count, dtype)
        part, whole = np.empty(count, dtype), np.concatenate([mine] * n)
        dist.reduce_scatter_single(part, whole)
        assert (part == total).all(), (count, dtype)
        dist.all_gather_single(whole, mine)
        assert (whole.reshape(n, count)[1] == np.arange(count) % 7 + 1).all()
        dist.broadcast(mine, 3)
        assert (mine == whole[3 * count :]).all()
group = dist.group.WORLD
nodes = hierarchy.get_or_create(group)
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    json.dump([select.place(group), nodes and nodes.nodes, bool(nodes._memory)], file)
dist.destroy_process_group()
"""


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """The process IDs of the first processes of two namespaces."""
    holders = [
        subprocess.Popen([*NAMESPACE, "sh", "-c", "echo; read line"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]  # fmt: skip
    inside = []
    for holder in holders:
        assert holder.stdout is not None and holder.stdout.readline()  # it has started
        inside += Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    yield inside
    for holder in holders:
        holder.communicate(b"\n", timeout=LIMIT)


def run(job: str, namespaces: list[str], folder: Path, *options: str) -> Any:
    """Run a script with the argument ``folder`` on four ranks. options: of mpiexec."""
    (folder / "job.py").write_text(job)
    program = [sys.executable, "-c", ENTER, *namespaces, str(folder / "job.py"), str(folder)]
    return run_program(*MPIEXEC, *options, "-n", "4", *program, env=os.environ | APART)


def test_hierarchical_route_on_two_nodes(namespaces: list[str], tmp_path: Path) -> None:
    done = run(JOB, namespaces, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert found == [["nodes", [[0, 1], [2, 3]], True]] * 4


HANG = """
import os, sys, time
import mpicoll as dist

os.environ["MPICOLL_REPORT_AFTER"] = "3"
dist.init_process_group(timeout=7)
def sleep():
    time.sleep(100)
dist.barrier() if dist.get_rank() < 3 else sleep()
"""


@pytest.mark.any_mpi
def test_hang_on_another_node_is_reported(namespaces: list[str], tmp_path: Path) -> None:
    """The node monitor of rank 0's node queries the other node monitor."""
    done = run(HANG, namespaces, tmp_path)
    assert done.returncode != 0
    assert "mpicoll: ranks 0-2 of group 0 (4 ranks) wait for 3 s in call 1" in done.stderr
    assert "  rank 3: in Python, after no call of group 0" in done.stderr
    assert "job.py:8 in sleep" in done.stderr


LOSS = """
import os, signal, sys, time
import numpy as np
import mpicoll as dist

dist.init_process_group(timeout=30)
me, many = dist.get_rank(), np.ones(300_000)
for _ in range(70):  # after 64 calls they use shared memory on each node, and rails
    many.fill(1)
    dist.all_reduce(many)
if me == 3:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
assert error_of(dist.LostRankError, dist.all_reduce, many).ranks == (3,)
dist.shrink_group([3])
many = np.full(300_000, 2.0**me)
dist.all_reduce(many)
assert set(many) == {7.0}
open(f"{sys.argv[1]}/{me}", "w").close()
dist.destroy_process_group()
"""


def test_ranks_continue_after_a_lost_rank_on_another_node(
    namespaces: list[str], tmp_path: Path
) -> None:
    if VENDOR != "Open MPI":
        pytest.skip("needs ULFM of Open MPI")
    done = run(ERROR_OF + LOSS, namespaces, tmp_path, "--with-ft", "ulfm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((tmp_path / str(rank)).exists() for rank in range(3)), done.stdout + done.stderr
    assert done.stderr.count("mpicoll: lost: rank 3 of 4") == 1
