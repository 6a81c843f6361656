"""Beginning and ending again in one process."""

from __future__ import annotations

import numpy as np

import mpicoll as dist


def test_the_default_group_may_have_any_name():
    for _ in range(2):
        dist.init_process_group(group_name="1", timeout=60)
        group = dist.new_group()
        assert dist.get_pg_count() == 2
        x = np.ones(1)
        dist.all_reduce(x, group=group)
        assert x[0] == dist.get_world_size()
        dist.destroy_process_group()
        assert dist.get_pg_count() == 0
