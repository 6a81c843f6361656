"""Training of a small convolutional network on handwritten digits with PyTorch's own DDP or FSDP2.

    mpirun -n 4 python jobs/train_digits_ddp.py
    srun --mpi=pmi2 -n 4 python jobs/train_digits_ddp.py --fsdp
    torchrun --nproc-per-node 4 jobs/train_digits_ddp.py

mpicoll is only the backend: ``--backend gloo`` gives the same losses. Every rank processes its
share of each batch. The batch size is global, so the losses are equal, except for rounding, on any
number of ranks.

Under Slurm: ``JOB=train_digits_ddp sbatch jobs/digits.sbatch``. All options:
``python jobs/train_digits_ddp.py --help``. Exit code: 0 if the accuracy on held-out digits
reaches ``--target``, else 1.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, which is equal on all ranks."""
    parser = argparse.ArgumentParser(
        description="Training of a small convolutional network on handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.95, help="accuracy to reach")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu")
    parser.add_argument("--backend", default="mpicoll", help="of torch.distributed")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--save", metavar="FILE.pt", help="where rank 0 writes the parameters")
    arguments = parser.parse_args()
    if arguments.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    return arguments


def start(backend: str) -> None:
    """Create the default group.

    torchrun sets the addresses that Gloo and NCCL need. Under mpirun and srun mpi:// provides them.
    """
    has_address = backend == "mpicoll" or "RANK" in os.environ
    dist.init_process_group(backend, init_method=None if has_address else "mpi://")


def choose_device(name: str) -> torch.device:
    """Return the CPU, or this rank's GPU."""
    if name == "cpu":
        return torch.device("cpu")
    local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank())
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True
    return device


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels, which rank 0 reads and broadcasts."""
    digits = [None]
    if dist.get_rank() == 0:
        from sklearn.datasets import load_digits  # takes a second, only on rank 0

        digits = [load_digits(return_X_y=True)]
    dist.broadcast_object_list(digits)
    return digits[0]


def load_data(seed: int, device: torch.device) -> list[Tensor]:
    """Return images and labels to train on, then images and labels held out (a fifth)."""
    images, labels = read_digits()
    order = np.random.default_rng(seed).permutation(len(labels))
    images = torch.tensor(images[order] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels[order])
    split = len(labels) // 5
    arrays = images[split:], labels[split:], images[:split], labels[:split]
    return [array.to(device) for array in arrays]


def make_model(seed: int, device: torch.device, fsdp: bool) -> nn.Module:
    """Return the network, the same on every rank, in the wrapper that averages the gradients."""
    torch.manual_seed(seed)
    # Tanh is smooth. A ReLU near zero turns a difference in the last digit into another course.
    network = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.Tanh()),
        nn.Linear(64, 10),
    ).to(device)
    if not fsdp:
        return DistributedDataParallel(network)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses and the number of right answers."""
    loss = cross_entropy(logits.detach().double(), labels, reduction="sum")
    return torch.stack([loss, (logits.argmax(dim=1) == labels).sum().double()])


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batches: list[np.ndarray],
) -> tuple[Tensor, int]:
    """Train on each batch once; return the scores and the number of samples of this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    totals, samples = torch.zeros(2, dtype=torch.float64, device=images.device), 0
    for batch in batches:
        # Shares may differ by one sample, and may be empty. DDP and FSDP average over the ranks,
        # so the loss is scaled to make that average the mean over the batch.
        share = torch.as_tensor(batch[rank::world_size], device=images.device)
        logits = model(images[share])
        loss = cross_entropy(logits, labels[share], reduction="sum") * world_size / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals += scores(logits, labels[share])
        samples += len(share)
    return totals, samples


def main() -> int:
    """Train, report, and return the exit code, the same on every rank."""
    arguments = parse_arguments()
    start(arguments.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = choose_device(arguments.device)

    images, labels, held_out_images, held_out_labels = load_data(arguments.seed, device)
    model = make_model(arguments.seed, device, arguments.fsdp)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    if rank == 0:
        way = "FSDP2" if arguments.fsdp else "DDP"
        print(f"{len(labels)} digits on {world_size} ranks, {way} over {dist.get_backend()}")

    shuffle = np.random.default_rng(arguments.seed)
    samples, seconds = 0, 0.0
    for epoch in range(1, arguments.epochs + 1):
        order = shuffle.permutation(len(labels))
        cuts = range(arguments.batch_size, len(order), arguments.batch_size)
        begin = time.perf_counter()
        totals, share = train_epoch(model, optimizer, images, labels, np.split(order, cuts))
        dist.reduce(totals, dst=0)
        loss, right = (totals / len(labels)).tolist()  # of all ranks on rank 0
        elapsed = time.perf_counter() - begin
        samples, seconds = samples + share, seconds + elapsed
        if rank == 0:
            speed = len(labels) / elapsed
            print(
                f"epoch {epoch:3d}  loss {loss:.4f}  accuracy {right:7.2%}  {speed:8.0f} samples/s",
                flush=True,
            )

    # Each rank evaluates a share of the held-out digits; all ranks get the sum.
    mine = slice(rank, None, world_size)
    with torch.no_grad():
        right = int(scores(model(held_out_images[mine]), held_out_labels[mine])[1])
    report = {"host": socket.gethostname(), "samples": samples, "seconds": seconds, "right": right}
    reports: list[Any] = [None] * world_size
    dist.all_gather_object(reports, report)
    accuracy = sum(each["right"] for each in reports) / len(held_out_labels)

    if arguments.save:  # with FSDP every rank has a part of it
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        parameters = get_model_state_dict(model, options=whole)
        if rank == 0:
            torch.save(parameters, arguments.save)

    if rank == 0:
        for index, each in enumerate(reports):
            speed = each["samples"] / max(each["seconds"], 1e-9)
            print(f"rank {index} on {each['host']}: {each['samples']} samples, {speed:.0f}/s")
        verdict = "reached" if accuracy >= arguments.target else "MISSED"
        print(
            f"held-out accuracy {accuracy:.2%}: the target of {arguments.target:.2%} is {verdict}"
        )

    if dist.get_backend() == "gloo":
        # Its threads let go of the last tensors a little later, for which they need Python; torch
        # 2.13 waits for them without letting them have it, and hangs.
        time.sleep(0.5)
    dist.destroy_process_group()
    return 0 if accuracy >= arguments.target else 1


if __name__ == "__main__":
    sys.exit(main())
