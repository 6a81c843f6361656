"""Collectives of torch.distributed: dtypes, operations, layouts, sizes, invalid arguments."""

from __future__ import annotations

import itertools
from functools import partial

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import members
from driver import NAMES, Call
from inputs import DTYPES, check_usable, equal, factor, legal, reduce_op, whole

from mpicoll.dtypes import OPERATIONS, ReduceOp, by_name

ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def done(work, async_op):
    """Wait for a synchronous or asynchronous call."""
    if not async_op:
        assert work is None
        return
    assert isinstance(work, dist.Work)
    work.wait()
    assert torch.get_default_device().type == "cuda" or work.is_completed()


class TorchCall(Call):
    """A call of torch.distributed with contiguous tensors."""

    api = dist

    def operation(self):
        name = self.op.name
        return reduce_op(name, getattr(torch, self.dtype.name))

    def result(self):
        if self.op is not ReduceOp.PREMUL_SUM:
            return super().result()
        by = [factor(getattr(torch, self.dtype.name))] * self.team.size
        return oracle.reduced(self.op, self.dtype, [self.given(r) for r in self.terms], by)


def tensor(pairs, shape, dtype):
    """Return a tensor and NumPy's view of its host memory. Append both tensors to ``pairs``."""
    host = torch.zeros(shape, dtype=getattr(torch, dtype.name), device="cpu")
    pairs.append((host.to(torch.get_default_device()), host))
    carrier = host.view(torch.int16) if dtype.name == "bfloat16" else host
    return pairs[-1][0], carrier.numpy().view(dtype.numpy)


#: Functions that torch.distributed also has.
SHARED = [name for name in NAMES if hasattr(dist, name) and name != "barrier"]


@ASYNC
@pytest.mark.parametrize("name", SHARED)
def test_results_equal_the_oracle(teams, name, async_op):
    """Every dtype, operation and root. Blocks are stacked in some calls, or concatenated."""
    row = NAMES[name]
    for team in members(teams):
        for kind in DTYPES:
            dtype = by_name[str(kind).removeprefix("torch.")]
            for op in [op for op in OPERATIONS if legal(op.name, kind)] if row.reduces else [None]:
                for root in range(team.size if row.root else 1):
                    stacked = name.startswith("all_gather") and (dtype.code + root) % 2 == 0
                    pairs = []
                    make = partial(tensor, pairs)
                    call = TorchCall(name, team, dtype, 6, op, root, make, (3, 2), stacked)
                    for made, host in pairs:
                        made.copy_(host)
                    done(call.start(async_op, by_group_rank=root % 2 == 1), async_op)
                    for made, host in pairs:
                        host.copy_(made)
                    call.check()


def block(sender, receiver, dtype=torch.float32):
    """A rank's block for another rank. Its length depends on both ranks and may be 0."""
    return whole(dtype, sender, (sender + 2 * receiver) % 4, 2, key=receiver)


@ASYNC
def test_uneven_blocks(teams, async_op):
    for team, dtype in itertools.product(members(teams), DTYPES):
        ranks = range(team.size)
        sent = [block(team.me, other, dtype) for other in ranks]
        received = [block(other, team.me, dtype) for other in ranks]
        outputs = [torch.zeros_like(one) for one in received]
        done(dist.all_to_all(outputs, sent, team.group, async_op), async_op)
        whole_output, splits = torch.zeros_like(torch.cat(received)), [*map(len, received)]
        arguments = whole_output, torch.cat(sent), splits, [*map(len, sent)]
        done(dist.all_to_all_single(*arguments, team.group, async_op), async_op)
        equal(whole_output, torch.cat(received))
        parts = [block(other, other, dtype) for other in ranks]
        gathered = [torch.zeros_like(one) for one in parts]
        done(dist.all_gather(gathered, parts[team.me], team.group, async_op), async_op)
        for found, wanted in zip([*outputs, *gathered], [*received, *parts], strict=True):
            equal(found, wanted)


def refusals(n):
    """Calls that every rank rejects."""
    four, large = torch.zeros(4), torch.zeros(4 * n + 1)
    return {
        "all_gather, too few outputs": lambda: dist.all_gather([four] * (n - 1), four),
        "all_gather_single, output too small": lambda: dist.all_gather_single(large[:-2], four),
        "all_to_all_single, not divisible": lambda: dist.all_to_all_single(large, large.clone()),
        "all_to_all_single, wrong sum": lambda: dist.all_to_all_single(
            four, four, [1] * (n - 1) + [9], [1] * (n - 1) + [9]
        ),
        # On ranks other than the root, any list is rejected.
        "scatter, too few inputs": lambda: dist.scatter(four, [four] * (n - 1)),
        "gather, too few outputs": lambda: dist.gather(four, [four] * (n - 1)),
        "all_reduce, BAND of floats": lambda: dist.all_reduce(four, dist.ReduceOp.BAND),
        "all_reduce, MAX of complex": lambda: dist.all_reduce(four.cfloat(), dist.ReduceOp.MAX),
        "all_gather, mixed dtypes": lambda: dist.all_gather([four.double()] * n, four),
    }


@pytest.mark.parametrize("name", list(refusals(2)))
def test_invalid_arguments_raise_on_every_rank(world, name):
    """The group stays usable."""
    call = refusals(world.size)[name]
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    assert str(caught.value)
    check_usable()
