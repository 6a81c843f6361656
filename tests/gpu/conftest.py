"""What the tests here share. tests/gpu/run.py starts them, on ranks: `make test-gpu`.

TEST_MPICOLL_DEVICE is where arrays are, by torch's name: "cuda"; or "cpu", to try the tests where
there is no GPU, those at least that do not need one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from machine import no_gpu

KIND = os.environ.get("TEST_MPICOLL_DEVICE", "")


def pytest_collection_modifyitems(items):
    """Skip all that have not been started on a GPU, or to be tried without one."""
    missing = "" if KIND == "cpu" else no_gpu()
    reason = f"there is no GPU: {missing}" if missing else "make test-gpu starts it"
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if missing or not KIND:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif KIND == "cpu" and item.get_closest_marker("on_a_gpu"):
            item.add_marker(pytest.mark.skip(reason="it has nothing to show without a GPU"))


@pytest.fixture(scope="module")
def device():
    """torch's device of this rank, with torch's default group of all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpicoll", timeout=timedelta(seconds=60))
    found = torch.device(KIND)
    if KIND == "cuda":
        found = torch.device("cuda", dist.get_node_local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(found)
    yield found
    dist.destroy_process_group()
