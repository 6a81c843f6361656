"""The step of a model with 25 MB of parameters under torch's DistributedDataParallel: over Gloo and
over mpicoll, beside the step of one rank alone.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from aims import GLOO, TORCH
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpicoll.cli.timing import Call

if TYPE_CHECKING:
    from session import Session

#: Sizes of DDP's buckets in MB: torch's default, which takes the whole model, and small ones.
BUCKETS = [25.0, 4.0]
#: A step varies more than a call does: so many times as long is measured.
LONGER = 10


def make_step(network: nn.Module, batch: Tensor, divisor: int = 1) -> Call:
    """Return a training step; it learns next to nothing, so that its numbers stay as they are."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-9)

    def step() -> None:
        optimizer.zero_grad()
        loss = network(batch).square().mean()
        (loss / divisor).backward()
        optimizer.step()

    return step


def reduce_at_once(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses text as annotations
    """Reduce, as a communication hook, before returning. It adds, as DDP's own does."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the gradients are the same to rounding."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-10) for a, b in pairs)


def training(session: Session) -> None:
    """Measure the step, for each size of buckets.

    ``how`` in the file: "alone"; "DDP"; "synchronous", DDP with collectives that end before the
    backward pass goes on.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)]
    network = nn.Sequential(*layers)
    torch.manual_seed(1 + session.world.me)
    batch = torch.randn(16, 1024)
    nbytes = sum(each.nbytes for each in network.parameters())
    effort = session.effort._replace(seconds=LONGER * session.effort.seconds)
    for bucket in BUCKETS:

        def spread(group: dist.ProcessGroup | None, bucket: float = bucket) -> nn.Module:
            return DistributedDataParallel(
                copy.deepcopy(network), process_group=group, bucket_cap_mb=bucket
            )

        over_gloo, over_mpicoll, synchronous = (
            spread(session.world.gloo),
            spread(None),
            spread(None),
        )
        synchronous.register_comm_hook(None, reduce_at_once)
        steps = {
            ("local", "alone"): make_step(copy.deepcopy(network), batch),
            (GLOO, "DDP"): make_step(over_gloo, batch),
            (TORCH, "DDP"): make_step(over_mpicoll, batch),
            # DDP's own collective adds gradients that it has divided on the way into the bucket,
            # for which a hook would need one more pass. So the loss is divided here.
            (TORCH, "synchronous"): make_step(synchronous, batch, session.world.n),
        }
        times = session.world.timer.measure({", ".join(k): s for k, s in steps.items()}, effort)
        for other in (over_gloo, synchronous):
            if not same_gradients(over_mpicoll, other):
                raise SystemExit("the gradients differ")
        for (caller, how), each in zip(steps, times.values(), strict=True):
            session.record("ddp", caller, "step", nbytes, "float32", each, how=how, bucket=bucket)
        session.report(f"step of {nbytes / 1e6:.1f} MB, buckets of {bucket:g} MB", times)
