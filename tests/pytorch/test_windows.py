"""One-sided windows as defined by torch 2.15: torch.distributed._new_window.

Windows behave as with torch's own backends: put, signal and wait_signal, and the tensor
itself from map_remote_tensor of the own rank. (Gloo has no windows in torch 2.15.)
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import members
from inputs import equal

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_new_window"), reason="torch before 2.15 has no windows"
)


def options(kind, seconds):
    from torch._C import _distributed_c10d as c10d

    found = getattr(c10d, kind)()
    found.timeout = timedelta(seconds=seconds)
    return found


def test_windows_are_supported(world):
    assert dist._supports_window()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("async_op", [False, True])
def test_put_and_signal(teams, dtype, async_op):
    """In a ring: each rank puts its block into the next rank's tensor."""
    for team in members(teams):
        n, me, count = team.size, team.me, 16
        memory = torch.zeros(n * count, dtype=dtype)
        window = dist._new_window(memory, group=team.group)
        right, left = (me + 1) % n, (me - 1) % n
        works = [
            window.put(torch.ones(4, 4, dtype=dtype), right, me * count, async_op),
            window.signal(right, async_op),
            window.wait_signal(left, async_op),
        ]
        for work in works:
            assert work.wait()
            assert work.is_completed()
        expected = torch.zeros(n, count, dtype=dtype)
        expected[left] = 1
        mine = window.map_remote_tensor(me)
        assert mine.data_ptr() == memory.data_ptr()
        equal(mine, expected.reshape(-1))
        dist.barrier(team.group)
        window.tensor_deregister()


def test_memory_may_be_registered_later_and_replaced(world):
    window = dist._new_window()
    with pytest.raises(RuntimeError, match="tensor_register"):
        window.signal(0, False)
    for size in 3, 5:
        memory = torch.zeros(size)
        window.tensor_register(memory)
        window.put(torch.full((size,), 2.0), (world.me + 1) % world.size, 0, False)
        window.signal((world.me + 1) % world.size, False)
        window.wait_signal((world.me - 1) % world.size, False)
        equal(memory, torch.full((size,), 2.0))
        window.tensor_deregister()


def test_wait_signal_times_out(world):
    window = dist._new_window(torch.zeros(4))
    short = options("WaitSignalOptions", 0.2)
    with pytest.raises(RuntimeError, match=r"not signalled within 0\.2 s"):
        window.wait_signal(0, False, short)
    with pytest.raises(RuntimeError, match=r"not signalled within 0\.2 s"):
        window.wait_signal(0, True, short).wait(timedelta(seconds=30))
    dist.barrier()
    window.put(torch.ones(2), world.me, 2, False, options("PutOptions", 30))
    window.signal(world.me, False, options("SignalOptions", 30))
    window.wait_signal(world.me, False, opts=options("WaitSignalOptions", 30))
    equal(window.map_remote_tensor(world.me), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    window.tensor_deregister()


def test_tensors_of_other_ranks_are_not_mapped(world):
    window = dist._new_window(torch.zeros(4))
    if world.size > 1:
        with pytest.raises(ValueError, match="map_remote_tensor: mapping the tensor of"):
            window.map_remote_tensor((world.me + 1) % world.size)
    window.tensor_deregister()


def test_window_attributes(world):
    from torch._C._distributed_c10d import WindowAccessType

    window = dist._new_window(torch.zeros(4))
    kinds = WindowAccessType.UNIFIED, WindowAccessType.SEPARATE
    assert window.get_attr(world.size - 1).access_type in kinds
    with pytest.raises(ValueError, match="peer_rank"):
        window.get_attr(world.size)
    window.tensor_deregister()
