"""Fixtures of the GPU tests. `make test-gpu` runs them through tests/gpu/run.py.

TEST_MPICOLL_DEVICE is torch's device type: "cuda", or "cpu" for the tests that also run without a
GPU.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from machine import no_gpu

sys.path.append(str(Path(__file__).parents[1]))  # tests/whole_jobs.py

KIND = os.environ.get("TEST_MPICOLL_DEVICE", "")


def pytest_collection_modifyitems(items):
    """Skip tests without a GPU, unless TEST_MPICOLL_DEVICE is "cpu"."""
    missing = "" if KIND == "cpu" else no_gpu()
    reason = f"no GPU: {missing}" if missing else "run it with make test-gpu"
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if missing or not KIND:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif KIND == "cpu" and item.get_closest_marker("on_a_gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module")
def device():
    """torch's device of this rank. Initializes torch's default group."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpicoll", timeout=timedelta(seconds=60))
    found = torch.device(KIND)
    if KIND == "cuda":
        found = torch.device("cuda", dist.get_node_local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(found)
    yield found
    dist.destroy_process_group()
