"""The step of a model with 25 MB of parameters under torch's DistributedDataParallel and under its
FSDP2: over Gloo and over mpicoll, beside the step of one rank alone. On the host, or on GPUs.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from aims import GLOO, TORCH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mpicoll.cli.bench_others import works_on_all
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


def reduce_nothing(_, bucket):  # type: ignore[no-untyped-def]
    """Leave the gradients as they are, as a communication hook: what is left is DDP's own part."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the gradients are the same to rounding."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-10) for a, b in pairs)


def make_network(session: Session) -> nn.Sequential:
    """Return the model, the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers).to(session.world.device)


def make_batch(session: Session) -> Tensor:
    """Return what this rank learns from."""
    torch.manual_seed(1 + session.world.me)
    return torch.randn(16, 1024).to(session.world.device)


def bytes_of(network: nn.Module) -> int:
    """Return the bytes of its parameters."""
    return sum(each.nbytes for each in network.parameters())


def ddp(session: Session) -> None:
    """Measure the step of DDP, for each size of buckets.

    ``how`` in the file: "alone"; "DDP"; "synchronous", DDP with collectives that end before the
    backward pass goes on; "silent", DDP that sends nothing.
    """
    network, batch = make_network(session), make_batch(session)
    nbytes = bytes_of(network)
    effort = session.effort._replace(seconds=LONGER * session.effort.seconds)
    for bucket in BUCKETS:

        def spread(group: dist.ProcessGroup | None, bucket: float = bucket) -> nn.Module:
            return DistributedDataParallel(
                copy.deepcopy(network), process_group=group, bucket_cap_mb=bucket
            )

        over_gloo, over_mpicoll = spread(session.world.gloo), spread(None)
        synchronous, silent = spread(None), spread(None)
        synchronous.register_comm_hook(None, reduce_at_once)
        silent.register_comm_hook(None, reduce_nothing)
        steps = {
            ("local", "alone"): make_step(copy.deepcopy(network), batch),
            (GLOO, "DDP"): make_step(over_gloo, batch),
            (TORCH, "DDP"): make_step(over_mpicoll, batch),
            # DDP's own collective adds gradients that it has divided on the way into the bucket,
            # for which a hook would need one more pass. So the loss is divided here.
            (TORCH, "synchronous"): make_step(synchronous, batch, session.world.n),
            (TORCH, "silent"): make_step(silent, batch),
        }
        times = session.world.timer.measure({", ".join(k): s for k, s in steps.items()}, effort)
        for other in (over_gloo, synchronous):
            if not same_gradients(over_mpicoll, other):
                raise SystemExit("the gradients differ")
        for (caller, how), each in zip(steps, times.values(), strict=True):
            session.record("ddp", caller, "step", nbytes, "float32", each, how=how, bucket=bucket)
        session.report(f"step of {nbytes / 1e6:.1f} MB, buckets of {bucket:g} MB", times)


def fsdp(session: Session) -> None:
    """Measure the step of FSDP2, of which each layer is a unit.

    ``how`` in the file: "alone"; "FSDP2"; "collectives", those of a step alone. Gloo may lack some
    of them on GPUs.
    """
    network, batch = make_network(session), make_batch(session)
    nbytes = bytes_of(network)

    def shard(group: dist.ProcessGroup) -> nn.Module:
        sharded, mesh = copy.deepcopy(network), DeviceMesh.from_group(group, batch.device.type)
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        return fully_shard(sharded, mesh=mesh)

    models = {
        ("local", "alone"): copy.deepcopy(network),
        (GLOO, "FSDP2"): shard(session.world.gloo),
        (TORCH, "FSDP2"): shard(dist.group.WORLD),
    }
    steps = {key: make_step(model, batch) for key, model in models.items()}
    for caller, group in ((GLOO, session.world.gloo), (TORCH, dist.group.WORLD)):
        steps[caller, "collectives"] = make_collectives(network, group)
    for key in [key for key in steps if key[0] == GLOO]:
        if not works_on_all(steps[key], session.world.mpi):
            session.leave_out(f"fsdp: {', '.join(key)}: it is refused")
            del steps[key]
    effort = session.effort._replace(seconds=LONGER * session.effort.seconds)
    times = session.world.timer.measure({", ".join(k): s for k, s in steps.items()}, effort)
    both = [models[caller, "FSDP2"] for caller in (GLOO, TORCH) if (caller, "FSDP2") in steps]
    if len(both) == 2 and not same_shards(*both):
        raise SystemExit("the gradients differ")
    for (caller, how), each in zip(steps, times.values(), strict=True):
        session.record("fsdp", caller, "step", nbytes, "float32", each, how=how)
    session.report(f"step of {nbytes / 1e6:.1f} MB, FSDP2", times)


def make_collectives(network: nn.Sequential, group: dist.ProcessGroup) -> Call:
    """Return the collectives of a step: of each layer, its parameters are gathered for the forward
    and for the backward pass, and the gradients reduced and scattered.
    """
    count, n = sum(each.numel() for each in network[0].parameters()), dist.get_world_size(group)
    part = next(network.parameters()).new_zeros(-(-count // n))
    whole = part.new_zeros(n * len(part))

    def collectives() -> None:
        for _ in network:
            dist.all_gather_single(whole, part, group=group)
            dist.all_gather_single(whole, part, group=group)
            dist.reduce_scatter_single(part, whole, group=group)

    return collectives


def same_shards(one: nn.Module, other: nn.Module) -> bool:
    """Return whether this rank's parts of the gradients are the same to rounding."""
    parts = [[each.grad.to_local() for each in model.parameters()] for model in (one, other)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-10) for a, b in zip(*parts, strict=True))
