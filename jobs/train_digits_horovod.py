"""Training of a small convolutional network on handwritten digits with Horovod's API.

    mpirun -n 4 python jobs/train_digits_horovod.py
    srun --mpi=pmi2 -n 4 python jobs/train_digits_horovod.py
    torchrun --nproc-per-node 4 jobs/train_digits_horovod.py

A script for Horovod, except for its import, with the network and the data of
``train_digits_ddp.py``. The batch size is global, so the losses are equal, except for rounding, on
any number of ranks.

``hvd.elastic.run`` continues after a lost rank if MPI survives it (docs/reliability.md):

    mpirun --with-ft ulfm -n 4 python jobs/train_digits_horovod.py --kill-at 30         # Open MPI

The state is committed in memory every ten steps. The survivors repeat the steps after the last
commit.

Under Slurm: ``JOB=train_digits_horovod sbatch jobs/digits.sbatch``. All options:
``python jobs/train_digits_horovod.py --help``. Exit code: 0 if the accuracy on held-out digits
reaches ``--target``, else 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mpicoll.horovod.torch as hvd


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
    parser.add_argument("--fp16", action="store_true", help="send gradients as float16")
    parser.add_argument(
        "--kill-at", type=int, default=0, metavar="STEP",
        help="step, from 1, in which the last rank kills itself",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FILE.pt", help="where rank 0 writes the parameters")
    arguments = parser.parse_args()
    if arguments.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    return arguments


def choose_device(name: str) -> torch.device:
    """Return the CPU, or this rank's GPU."""
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True
    return device


def load_data(seed: int, device: torch.device) -> list[Tensor]:
    """Return images and labels to train on, then images and labels held out (a fifth)."""
    digits = None
    if hvd.rank() == 0:
        from sklearn.datasets import load_digits  # takes a second, only on rank 0

        digits = load_digits(return_X_y=True)
    images, labels = hvd.broadcast_object(digits)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = torch.tensor(images[order] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels[order])
    split = len(labels) // 5
    arrays = images[split:], labels[split:], images[:split], labels[:split]
    return [array.to(device) for array in arrays]


def make_network(seed: int) -> nn.Module:
    """Return the network."""
    torch.manual_seed(seed)
    # Tanh is smooth. A ReLU near zero would amplify rounding differences.
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.Tanh()),
        nn.Linear(64, 10),
    )


def scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses and the number of right answers."""
    loss = cross_entropy(logits.detach().double(), labels, reduction="sum")
    return torch.stack([loss, (logits.argmax(dim=1) == labels).sum().double()]).cpu()


@hvd.elastic.run
def train(
    state: hvd.elastic.TorchState,
    images: Tensor,
    labels: Tensor,
    batches: list[np.ndarray],
    steps: int,
    kill_at: int,
) -> None:
    """Train on the remaining batches, ``steps`` for each epoch, and print the losses."""
    while state.step < len(batches):
        if state.step % steps == 0:
            state.totals = torch.zeros(2, dtype=torch.float64)
        # Shares may differ by one sample, and may be empty. Gradients are averaged over the ranks,
        # so the loss is scaled to make that average the mean over the batch.
        batch = batches[state.step]
        share = torch.as_tensor(batch[hvd.rank() :: hvd.size()], device=images.device)
        logits = state.model(images[share])
        loss = cross_entropy(logits, labels[share], reduction="sum") * hvd.size() / len(batch)
        state.optimizer.zero_grad()
        if state.step + 1 == kill_at and hvd.rank() == state.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        state.optimizer.step()
        state.totals += hvd.allreduce(scores(logits, labels[share]), op=hvd.Sum)
        state.step += 1
        if state.step % steps == 0 and hvd.rank() == 0:
            mean, right = (state.totals / len(labels)).tolist()
            print(
                f"epoch {state.step // steps:3d}  loss {mean:.4f}  accuracy {right:7.2%}",
                flush=True,
            )
        if state.step % 10 == 0:
            state.commit()


def main() -> int:
    """Train, report, and return the exit code, the same on every rank."""
    arguments = parse_arguments()
    hvd.init()
    device = choose_device(arguments.device)
    images, labels, held_out_images, held_out_labels = load_data(arguments.seed, device)
    network = make_network(arguments.seed).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=arguments.lr, momentum=0.9)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if arguments.fp16 else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=network.named_parameters(), compression=compression
    )
    if hvd.rank() == 0:
        print(f"{len(labels)} digits on {hvd.size()} ranks, Horovod's API")

    shuffle = np.random.default_rng(arguments.seed)
    orders = [shuffle.permutation(len(labels)) for _ in range(arguments.epochs)]
    cuts = range(arguments.batch_size, len(labels), arguments.batch_size)
    batches = [batch for order in orders for batch in np.split(order, cuts)]
    state = hvd.elastic.TorchState(
        network, optimizer, step=0, totals=torch.zeros(2, dtype=torch.float64), ranks=hvd.size()
    )
    train(state, images, labels, batches, len(cuts) + 1, arguments.kill_at)

    # Each rank evaluates a share of the held-out digits; all ranks get the sum.
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        found = scores(network(held_out_images[mine]), held_out_labels[mine])
    accuracy = float(hvd.allreduce(found, op=hvd.Sum)[1]) / len(held_out_labels)
    if hvd.rank() == 0:
        if arguments.save:
            torch.save(network.state_dict(), arguments.save)
        verdict = "reached" if accuracy >= arguments.target else "MISSED"
        print(
            f"held-out accuracy {accuracy:.2%} on {hvd.size()} ranks: the target of "
            f"{arguments.target:.2%} is {verdict}"
        )
    hvd.shutdown()
    return 0 if accuracy >= arguments.target else 1


if __name__ == "__main__":
    sys.exit(main())
