"""Jobs with MPICOLL_REPRODUCIBLE or MPICOLL_WIRE, and with torch's pg_options."""

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
    os.environ.update(MPICOLL_REPRODUCIBLE="", MPICOLL_WIRE="BFLOAT16")
    dist.init_process_group()
    say(dist.group.WORLD.wire, dist.new_group().wire, dist.new_group(wire="float32").wire)
    text = "new_group: wire: expected 'float32' together with reproducible='order', got 'bfloat16'"
    error = str(error_of(dist.ArgumentError, dist.new_group, reproducible="order"))
    assert text in error, error
    dist.destroy_process_group()
""", ranks=3, environment={"MPICOLL_REPRODUCIBLE": "EXACT"})  # fmt: skip
def test_variable_is_the_default(ended):
    ended.in_good_order()
    wires = ["bfloat16 bfloat16 float32"]
    assert ended.lines == wires * 3 + ["exact exact order"] * 3 + ["order"] * 3


@pytest.mark.any_mpi
@job("""
    import torch
    import torch.distributed as c10d
    from mpicoll.torch.options import Options

    def options(group):
        return group._get_backend(torch.device("cpu")).options

    c10d.init_process_group("mpicoll", pg_options=Options(wire="bfloat16"))
    assert options(c10d.group.WORLD).wire == options(c10d.new_group()).wire == "bfloat16"
    c10d.destroy_process_group()
    c10d.init_process_group("mpicoll", pg_options=Options("order"))
    ranks = list(range(c10d.get_world_size()))
    plain = c10d.new_group(ranks)
    exact = c10d.new_group(ranks, pg_options=Options(reproducible="exact"))
    say(*(options(each).reproducible for each in (c10d.group.WORLD, plain, exact)))
    x = torch.full((5,), [1e30, 1.0, -1e30][c10d.get_rank()])
    c10d.all_reduce(x, group=exact)
    assert x.tolist() == [1] * 5, x
    say(error_of(ValueError, Options, "exactly"))
    error_of(ValueError, Options, wire="half")
    error_of(ValueError, c10d.new_group, ranks, pg_options=Options(wire="bfloat16"))
    c10d.destroy_process_group()
""", ranks=3)  # fmt: skip
def test_options_of_torch(ended):
    pytest.importorskip("torch")
    ended.in_good_order()
    message = "Options: reproducible: expected 'order' or 'exact', or None for the default, got "
    assert ended.lines == [message + "'exactly'"] * 3 + ["order order exact"] * 3
