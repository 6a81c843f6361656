"""Fixtures of the GPU tests. `make test-gpu` runs them through tests/gpu/run.py."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from device_arrays import LIBRARIES, ROUTES, devices, forced

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("pytorch", "emulated_gpu")]
if "EMULATED_GPU_CACHE" in os.environ and "torch" in LIBRARIES:
    importlib.import_module("torch_kernels")

# run.py has checked that there are a GPU and CuPy, and finds the helpers of tests/mpi.
collect_ignore_glob = [] if os.environ.get("TEST_MPICOLL_DEVICE") else ["test_*.py"]


@pytest.fixture
def mpi():
    """MPI_COMM_WORLD, which mpicoll does not use."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module", params=LIBRARIES)
def arrays(request):
    """The array library, which determines the devices of this process."""
    with devices(request.param) as made:
        yield made


@pytest.fixture(scope="module", params=ROUTES)
def route(request, arrays):
    """The forced device route."""
    with forced(request.param):
        yield request.param
    gc.collect()


@pytest.fixture(scope="module", params=ROUTES)
def n(request):
    """The number of ranks of a default group. CuPy's current device is this rank's GPU."""
    import mpicoll as dist
    from mpicoll.cuda import binding

    with forced(request.param):
        dist.init_process_group(timeout=60)
        binding.bind()
        yield dist.get_world_size()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def device():
    """torch's device of this rank. Initializes torch's default group."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpicoll", timeout=timedelta(seconds=60))
    found = torch.device("cuda", dist.get_node_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(found)
    yield found
    dist.destroy_process_group()
