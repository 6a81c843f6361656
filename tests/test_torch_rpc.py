"""torch.distributed.rpc with init_method="mpi://": TensorPipe between ranks of an MPI launcher."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launch_jobs import TORCHRUN
from rank_scripts import MPIEXEC, needs_mpiexec

pytest.importorskip("torch")

pytestmark = [pytest.mark.any_mpi, pytest.mark.waits, pytest.mark.slow]

#: Workers fit y = 2 x - 1. Rank 0 has the parameters and applies the gradients.
SERVER = """
import os

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import mpicoll.torch


class Server:
    def __init__(self):
        self.parameters, self.steps = torch.zeros(2), 0

    def get(self):
        return self.parameters

    def step(self, gradient):
        self.parameters, self.steps = self.parameters - 0.1 * gradient, self.steps + 1
        return self.steps


def get(server):
    return server.local_value().get()


def step(server, gradient):
    return server.local_value().step(gradient)


def work(server, seed):
    torch.manual_seed(seed)
    for _ in range(150):
        x = torch.rand(16)
        slope, start = rpc.rpc_sync(server.owner(), get, args=(server,))
        error = slope * x + start - (2 * x - 1)
        gradient = torch.stack(((2 * error * x).mean(), (2 * error).mean()))
        rpc.rpc_sync(server.owner(), step, args=(server, gradient))
    return rpc.get_worker_info().name


if __name__ == "__main__":
    dist.init_process_group("mpicoll")
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method="mpi://")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        server = rpc.RRef(Server())
        futures = [rpc.rpc_async(f"rank{r}", work, args=(server, r)) for r in range(1, size)]
        names = [future.wait() for future in futures]
        found, steps = server.local_value().get(), server.local_value().steps
        words = *names, steps, *(round(value) for value in found.tolist())
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    rpc.shutdown()
    x = torch.ones(1)
    dist.all_reduce(x)  # shutdown does not destroy mpicoll's group
    assert x.item() == size
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        pytest.param([*MPIEXEC, "-n", "3", sys.executable], "rank1 rank2 300 2 -1\n",
                     marks=needs_mpiexec, id="mpiexec"),
        pytest.param([TORCHRUN, "--nproc-per-node", "2"], "rank1 150 2 -1\n", id="torchrun"),
    ],
)  # fmt: skip
def test_parameter_server_trains(start, expected, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    done = subprocess.run(
        [*start, script],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == expected
