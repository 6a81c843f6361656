"""torch.distributed.rpc with init_method="mpi://": TensorPipe between ranks of an MPI launcher."""

from __future__ import annotations

import sys

import pytest
from launch_jobs import TORCHRUN
from whole_jobs import MPIEXEC, needs_mpiexec, run_program

pytest.importorskip("torch")

pytestmark = [pytest.mark.any_mpi, pytest.mark.waits, pytest.mark.slow]

#: Every rank sends a tensor to the next rank, which changes it.
RPC = """
import os

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import mpicoll.torch


def double(tensor):
    return 2 * tensor, rpc.get_worker_info().name


if __name__ == "__main__":
    dist.init_process_group("mpicoll")
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method="mpi://")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    there = f"rank{(rank + 1) % size}"
    for i in range(20):
        doubled, name = rpc.rpc_sync(there, double, args=(torch.full((1000,), i + 0.5),))
        assert name == there and (doubled == 2 * i + 1).all()
    rpc.shutdown()
    x = torch.ones(1)
    dist.all_reduce(x)  # shutdown does not destroy mpicoll's group
    os.write(1, f"{x.item()}\\n".encode())
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        pytest.param([*MPIEXEC, "-n", "3", sys.executable], "3.0\n" * 3,
                     marks=needs_mpiexec, id="mpiexec"),
        pytest.param([TORCHRUN, "--nproc-per-node", "2"], "2.0\n" * 2, id="torchrun",
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_ranks_call_functions_of_each_other(start, expected, tmp_path):
    script = tmp_path / "calls.py"
    script.write_text(RPC)
    done = run_program(*start, script, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == expected
