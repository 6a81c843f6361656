"""Jobs with MPICOLL_REPRODUCIBLE and with torch's pg_options."""

from __future__ import annotations

import pytest
from rank_scripts import job


@job("""
    dist.init_process_group()
    group = dist.new_group()
    other = dist.new_group(reproducible="order")
    say(dist.group.WORLD.reproducible, group.reproducible, other.reproducible)
    me, n = dist.get_rank(), dist.get_world_size()
    x = np.full(5, [1e30, 1.0, -1e30][me], np.float32)
    dist.all_reduce(x)
    assert x.tolist() == [1] * 5, x
    dist.all_reduce_coalesced([x, x.copy()], group=other)
    error = str(error_of(dist.UnsupportedError, dist.all_reduce, x, dist.ReduceOp.PRODUCT))
    assert "reproducible='exact'" in error, error
    dist.destroy_process_group()
    dist.init_process_group(reproducible="order")  # takes precedence
    say(dist.group.WORLD.reproducible)
    dist.destroy_process_group()
""", ranks=3, environment={"MPICOLL_REPRODUCIBLE": "EXACT"})  # fmt: skip
def test_variable_is_the_default(ended):
    ended.in_good_order()
    assert ended.lines == ["exact exact order"] * 3 + ["order"] * 3


@pytest.mark.any_mpi
@job("""
    import torch
    import torch.distributed as c10d
    from mpicoll.torch.options import Options

    c10d.init_process_group("mpicoll", pg_options=Options("order"))

    def level(group):
        return group._get_backend(torch.device("cpu")).options.reproducible

    ranks = list(range(c10d.get_world_size()))
    plain = c10d.new_group(ranks)
    exact = c10d.new_group(ranks, pg_options=Options(reproducible="exact"))
    say(level(c10d.group.WORLD), level(plain), level(exact))
    x = torch.full((5,), [1e30, 1.0, -1e30][c10d.get_rank()])
    c10d.all_reduce(x, group=exact)
    assert x.tolist() == [1] * 5, x
    say(error_of(ValueError, Options, "exactly"))
    c10d.destroy_process_group()
""", ranks=3)  # fmt: skip
def test_options_of_torch(ended):
    pytest.importorskip("torch")
    ended.in_good_order()
    message = "Options: reproducible: expected 'order' or 'exact', or None for the default, got "
    assert ended.lines == [message + "'exactly'"] * 3 + ["order order exact"] * 3
