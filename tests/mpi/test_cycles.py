"""Repeated initialization in one process."""

from __future__ import annotations

import numpy as np

import mpicoll as dist


def test_default_group_can_be_recreated_with_the_same_name():
    for _ in range(2):
        dist.init_process_group(group_name="1", timeout=60)
        group = dist.new_group()
        assert dist.get_pg_count() == 2
        x = np.ones(1)
        dist.all_reduce(x, group=group)
        assert x[0] == dist.get_world_size()
        dist.destroy_process_group()
        assert dist.get_pg_count() == 0
