"""Training steps of DistributedDataParallel and FSDP2, over Gloo and mpicoll and on one rank.

The model has 25 MB of parameters. It is on CPUs or GPUs.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

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

#: Sizes of DDP's buckets in MB: torch's default, which holds the whole model, and a small one.
BUCKETS = [25.0, 4.0]
#: Factor on the duration of a measurement, because steps vary more than calls.
LONGER = 10


def make_step(network: nn.Module, batch: Tensor, divisor: int = 1) -> Call:
    """Return a training step. The learning rate is tiny, so that all steps compute the same."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-9)

    def step() -> None:
        optimizer.zero_grad()
        loss = network(batch).square().mean()
        (loss / divisor).backward()
        optimizer.step()

    return step


def reduce_at_once(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    """A communication hook that reduces synchronously, with SUM as DDP."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def reduce_nothing(_, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that sends nothing, to measure the overhead of DDP."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the gradients are equal except for rounding."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-10) for a, b in pairs)


def make_network(session: Session) -> nn.Sequential:
    """Return the model, the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers).to(session.world.device)


def make_batch(session: Session) -> Tensor:
    """Return the batch of this rank."""
    torch.manual_seed(1 + session.world.me)
    return torch.randn(16, 1024).to(session.world.device)


def bytes_of(network: nn.Module) -> int:
    """Return the size of the parameters in bytes."""
    return sum(each.nbytes for each in network.parameters())


def ddp(session: Session) -> None:
    """Measure a step of DDP for each size of buckets.

    ``how`` in the file: "alone", one rank without DDP; "DDP"; "synchronous", DDP with blocking
    collectives in the backward pass; "silent", DDP that sends nothing.
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
            # DDP divides gradients while it copies them into the bucket. A hook would need another
            # pass, so the loss is divided instead.
            (TORCH, "synchronous"): make_step(synchronous, batch, session.world.n),
            (TORCH, "silent"): make_step(silent, batch),
        }
        times = session.measure({", ".join(k): s for k, s in steps.items()}, effort)
        for other in (over_gloo, synchronous):
            if not same_gradients(over_mpicoll, other):
                raise SystemExit("the gradients differ")
        for (caller, how), label in zip(steps, times, strict=True):
            more: dict[str, Any] = {"label": label, "how": how, "bucket": bucket}
            session.record("ddp", caller, "step", nbytes, "float32", times, **more)
        session.report(f"step of {nbytes / 1e6:.1f} MB, buckets of {bucket:g} MB", times)


def fsdp(session: Session) -> None:
    """Measure a step of FSDP2, with one unit per layer.

    ``how`` in the file: "alone", one rank without FSDP2; "FSDP2"; "collectives", only the
    collectives of a step. Gloo does not support all of them on GPUs.
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
            session.leave_out(f"fsdp: {', '.join(key)}: not supported")
            del steps[key]
    effort = session.effort._replace(seconds=LONGER * session.effort.seconds)
    times = session.measure({", ".join(k): s for k, s in steps.items()}, effort)
    both = [models[caller, "FSDP2"] for caller in (GLOO, TORCH) if (caller, "FSDP2") in steps]
    if len(both) == 2 and not same_shards(*both):
        raise SystemExit("the gradients differ")
    for (caller, how), label in zip(steps, times, strict=True):
        session.record("fsdp", caller, "step", nbytes, "float32", times, label=label, how=how)
    session.report(f"step of {nbytes / 1e6:.1f} MB, FSDP2", times)


def make_collectives(network: nn.Sequential, group: dist.ProcessGroup) -> Call:
    """Return the collectives of a step.

    For each layer: two all-gathers of parameters (forward, backward), one reduce-scatter of
    gradients.
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
    """Return whether this rank's shards of the gradients are equal except for rounding."""
    parts = [[each.grad.to_local() for each in model.parameters()] for model in (one, other)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-10) for a, b in zip(*parts, strict=True))
