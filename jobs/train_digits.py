"""Data-parallel training of a small network on handwritten digits.

    mpirun -n 4 python jobs/train_digits.py

Every rank has the whole network and processes its share of each batch. The gradients are summed
over the ranks during the backward pass. The batch size is global, so the parameters are equal,
except for rounding, on any number of ranks.

Under Slurm: ``sbatch jobs/digits.sbatch``. All options: ``python jobs/train_digits.py --help``.
Exit code: 0 if the accuracy on held-out digits reaches ``--target``, else 1.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np

import mpicoll as dist

Array = Any  # numpy.ndarray, or cupy.ndarray with --device cuda
Layer = tuple[Array, Array]  # weight (inputs x outputs) and bias (outputs)

MOMENTUM = 0.9


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, which is equal on all ranks."""
    parser = argparse.ArgumentParser(
        description="Data-parallel training of a small network on handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128], help="hidden layer widths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.95, help="accuracy to reach")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu")
    parser.add_argument("--save", metavar="FILE.npz", help="where rank 0 writes the parameters")
    arguments = parser.parse_args()
    if arguments.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    return arguments


def array_module(device: str) -> Any:
    """NumPy, or CuPy on the GPU of this rank."""
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError:
        if device == "auto":
            return np
        sys.exit("--device cuda needs CuPy: pip install 'cupy-cuda13x[ctk]'")
    if not cupy.cuda.is_available():
        if device == "auto":
            return np
        sys.exit("--device cuda: CuPy finds no GPU")
    gpus = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(dist.get_node_local_rank(fallback_rank=0) % gpus).use()
    return cupy


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels, which rank 0 reads and broadcasts."""
    digits = [None]
    if dist.get_rank() == 0:
        from sklearn.datasets import load_digits  # takes a second, only on rank 0

        digits = [load_digits(return_X_y=True)]
    dist.broadcast_object_list(digits)
    return digits[0]


def load_data(seed: int, xp: Any) -> list[Array]:
    """Return images and labels to train on, then images and labels held out (a fifth)."""
    images, labels = read_digits()
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = images[order] / 16.0, labels[order]
    split = len(labels) // 5
    arrays = images[split:], labels[split:], images[:split], labels[:split]
    return [xp.asarray(array) for array in arrays]


def make_layers(widths: list[int], seed: int, xp: Any) -> list[Layer]:
    """Draw the weights on rank 0 and broadcast them."""
    rng = np.random.default_rng(seed)
    layers = []
    for inputs, outputs in pairwise(widths):
        weight, bias = xp.zeros((inputs, outputs)), xp.zeros(outputs)
        if dist.get_rank() == 0:
            weight += xp.asarray(rng.normal(0.0, np.sqrt(2.0 / inputs), weight.shape))
        dist.broadcast(weight, src=0)
        dist.broadcast(bias, src=0)
        layers.append((weight, bias))
    return layers


def forward(layers: list[Layer], images: Array, xp: Any) -> list[Array]:
    """Return the input of each layer and, last, the probabilities of the ten digits."""
    activations = [images]
    for weight, bias in layers[:-1]:
        activations.append(xp.maximum(activations[-1] @ weight + bias, 0.0))
    weight, bias = layers[-1]
    logits = activations[-1] @ weight + bias
    exponentials = xp.exp(logits - logits.max(axis=1, keepdims=True))
    activations.append(exponentials / exponentials.sum(axis=1, keepdims=True))
    return activations


def backward(
    layers: list[Layer], activations: list[Array], labels: Array, batch_size: int, xp: Any
) -> list[Layer]:
    """Return the gradient of the mean loss over the batch of all ranks.

    The gradient of a layer is reduced while the layers below it are computed.
    """
    delta = activations[-1].copy()
    delta[xp.arange(len(labels)), labels] -= 1.0
    delta /= batch_size

    gradients: list[Layer] = []
    works = []
    for index in reversed(range(len(layers))):
        gradient = activations[index].T @ delta, delta.sum(axis=0)
        works += [dist.all_reduce(array, async_op=True) for array in gradient]
        gradients.insert(0, gradient)
        if index > 0:
            weight, _ = layers[index]
            delta = (delta @ weight.T) * (activations[index] > 0.0)
    for work in works:
        work.wait()
    return gradients


def scores(probabilities: Array, labels: Array, xp: Any) -> Array:
    """Return the sum of the losses and the number of right answers."""
    loss = -xp.log(probabilities[xp.arange(len(labels)), labels] + 1e-12).sum()
    return xp.stack([loss, (probabilities.argmax(axis=1) == labels).sum().astype(loss.dtype)])


def train_epoch(
    layers: list[Layer],
    velocities: list[Layer],
    images: Array,
    labels: Array,
    batches: list[np.ndarray],
    lr: float,
    xp: Any,
) -> tuple[Array, int]:
    """Train on each batch once; return the scores and the number of samples of this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    totals, samples = xp.zeros(2), 0
    for batch in batches:
        # Shares may differ by one sample, and may be empty.
        share = batch[rank::world_size]
        activations = forward(layers, images[share], xp)
        gradients = backward(layers, activations, labels[share], len(batch), xp)
        for layer, velocity, gradient in zip(layers, velocities, gradients, strict=True):
            for parameter, speed, slope in zip(layer, velocity, gradient, strict=True):
                speed *= MOMENTUM
                speed += slope
                parameter -= lr * speed
        totals += scores(activations[-1], labels[share], xp)
        samples += len(share)
    return totals, samples


def save(path: str, layers: list[Layer]) -> None:
    """Write weight0, bias0, weight1, ... to an .npz file."""
    arrays = {}
    for index, (weight, bias) in enumerate(layers):
        arrays[f"weight{index}"], arrays[f"bias{index}"] = weight, bias
    np.savez(path, **{n: a.get() if hasattr(a, "get") else a for n, a in arrays.items()})


def main() -> int:
    """Train, report, and return the exit code, the same on every rank."""
    arguments = parse_arguments()
    xp = array_module(arguments.device)

    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels, held_out_images, held_out_labels = load_data(arguments.seed, xp)
    layers = make_layers([images.shape[1], *arguments.hidden, 10], arguments.seed, xp)
    velocities = [(xp.zeros_like(weight), xp.zeros_like(bias)) for weight, bias in layers]
    if rank == 0:
        print(f"{len(labels)} digits on {world_size} ranks, {xp.__name__} arrays")

    shuffle = np.random.default_rng(arguments.seed)
    samples, seconds = 0, 0.0
    for epoch in range(1, arguments.epochs + 1):
        order = shuffle.permutation(len(labels))
        cuts = range(arguments.batch_size, len(order), arguments.batch_size)
        start = time.perf_counter()
        totals, share = train_epoch(
            layers, velocities, images, labels, np.split(order, cuts), arguments.lr, xp
        )
        dist.reduce(totals, dst=0)
        elapsed = time.perf_counter() - start
        samples, seconds = samples + share, seconds + elapsed
        if rank == 0:
            loss, right = (totals / len(labels)).tolist()
            speed = len(labels) / elapsed
            print(
                f"epoch {epoch:3d}  loss {loss:.4f}  accuracy {right:7.2%}  {speed:8.0f} samples/s",
                flush=True,
            )

    # Each rank evaluates a share of the held-out digits; all ranks get the sum.
    mine = slice(rank, None, world_size)
    probabilities = forward(layers, held_out_images[mine], xp)[-1]
    right = int(scores(probabilities, held_out_labels[mine], xp)[1])
    report = {"host": socket.gethostname(), "samples": samples, "seconds": seconds, "right": right}
    reports: list[Any] = [None] * world_size
    dist.all_gather_object(reports, report)
    accuracy = sum(each["right"] for each in reports) / len(held_out_labels)

    if rank == 0:
        for index, each in enumerate(reports):
            speed = each["samples"] / max(each["seconds"], 1e-9)
            print(f"rank {index} on {each['host']}: {each['samples']} samples, {speed:.0f}/s")
        verdict = "reached" if accuracy >= arguments.target else "MISSED"
        print(
            f"held-out accuracy {accuracy:.2%}: the target of {arguments.target:.2%} is {verdict}"
        )
        if arguments.save:
            save(arguments.save, layers)

    dist.destroy_process_group()
    return 0 if accuracy >= arguments.target else 1


if __name__ == "__main__":
    sys.exit(main())
