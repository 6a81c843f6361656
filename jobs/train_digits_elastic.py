"""Training of a small network on handwritten digits that continues after lost ranks.

    mpirun --with-ft ulfm --prtemca state_base_recoverable 1 -n 4 \
        python jobs/train_digits_elastic.py --kill-at 100 --grow

It trains the network of ``train_digits.py``. Every rank keeps the parameters before and after the
last step in memory. In step 100 (counted from 1) the last rank kills itself. The other ranks raise
``LostRankError``, create a smaller group (``shrink_group``) and repeat that step. They may detect
the loss one step apart, so they agree on the earlier step. The batch size is global, so the losses
are equal, except for rounding, on any number of ranks.

With ``--grow`` the survivors start a process for each lost rank (``grow_group``). A new process
runs this program from the start and receives its state from rank 0.

If MPI does not survive a lost rank, use a launcher that restarts the job, and ``--state FILE.npz``:
rank 0 writes the state after each epoch, and a restarted job continues from the file:

    torchrun --nproc-per-node 4 --max-restarts 3 jobs/train_digits_elastic.py --state state.npz

With ``--state``, SIGTERM and SIGUSR2 stop the job after the current step. Clusters send such a
signal before the time limit or a preemption, to one rank or to several. The ranks agree after each
step whether to stop. Rank 0 then writes the state and an empty FILE.stopped, which tells
``jobs/digits_requeue.sbatch`` to requeue the job.

All options: ``python jobs/train_digits_elastic.py --help``. Exit code: 0 if the accuracy on
held-out digits reaches ``--target`` or if the job was stopped by a signal, else 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from train_digits import MOMENTUM, Layer, backward, forward, load_data, make_layers, scores

import mpicoll as dist


@dataclass
class State:
    """The state before a step.

    step: the number of the next step, from 0. totals: the sum of the losses and the number of right
    answers of the epoch, over all ranks.
    """

    step: int
    layers: list[Layer]
    velocities: list[Layer]
    totals: np.ndarray


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, which is equal on all ranks."""
    parser = argparse.ArgumentParser(
        description="Training on handwritten digits that continues after lost ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128], help="hidden layer widths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.95, help="accuracy to reach")
    parser.add_argument(
        "--kill-at", type=int, nargs="*", default=[], metavar="STEP",
        help="steps, from 1, in which the last rank kills itself",
    )  # fmt: skip
    parser.add_argument("--grow", action="store_true", help="start a process for each lost rank")
    parser.add_argument(
        "--state", type=Path, metavar="FILE.npz",
        help="checkpoint, written after each epoch and at SIGTERM or SIGUSR2",
    )  # fmt: skip
    parser.add_argument("--curve", type=Path, metavar="FILE.npy", help="rank 0 writes the losses")
    return parser.parse_args()


def take_step(
    state: State, images: np.ndarray, labels: np.ndarray, batch: np.ndarray, lr: float, dies: bool
) -> State:
    """Return the state after a step on a batch. dies: kill this rank during the step."""
    share = batch[dist.get_rank() :: dist.get_world_size()]
    activations = forward(state.layers, images[share], np)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    gradients = backward(state.layers, activations, labels[share], len(batch), np)
    mine = scores(activations[-1], labels[share], np)
    dist.all_reduce(mine)
    velocities = [
        tuple(MOMENTUM * speed + slope for speed, slope in zip(*pair, strict=True))
        for pair in zip(state.velocities, gradients, strict=True)
    ]
    layers = [
        tuple(parameter - lr * speed for parameter, speed in zip(*pair, strict=True))
        for pair in zip(state.layers, velocities, strict=True)
    ]
    return State(state.step + 1, layers, velocities, state.totals + mine)


def recover(error: dist.LostRankError, kept: list[State]) -> State:
    """Create a group of the survivors, and return the state from which they continue.

    kept: the states of the last two steps.
    """
    begun, before = time.perf_counter(), dist.get_world_size()
    lost = error.ranks
    while True:
        try:
            dist.shrink_group(list(lost))
            # The last step that all ranks have completed; they differ by at most one.
            step = np.array([kept[-1].step])
            dist.all_reduce(step, op=dist.ReduceOp.MIN)
            break
        except dist.LostRankError as another:  # a further rank was lost
            lost = another.ranks
    if dist.get_rank() == 0:
        took = time.perf_counter() - begun
        print(
            f"lost {before - dist.get_world_size()} of {before} ranks in step {step[0] + 1}; on "
            f"with {dist.get_world_size()} after {took:.3f} s",
            flush=True,
        )
    return next(state for state in kept if state.step == step[0])


Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def share_state(arguments: argparse.Namespace, state: State | None = None) -> tuple[Data, State]:
    """Return the data, and rank 0's state on every rank. All ranks call.

    state: the state of this rank; None for a new process.
    """
    data = load_data(arguments.seed, np)
    layers = make_layers([data[0].shape[1], *arguments.hidden, 10], arguments.seed, np)
    if state is None:
        velocities = [(np.zeros_like(weight), np.zeros_like(bias)) for weight, bias in layers]
        state = State(0, layers, velocities, np.zeros(2))
        if arguments.state and arguments.state.exists():
            state = read(arguments.state)
            if dist.get_rank() == 0:
                print(f"goes on after step {state.step}", flush=True)
    step = np.array([state.step])
    pairs = [*state.layers, *state.velocities]
    for array in (step, state.totals, *(array for pair in pairs for array in pair)):
        dist.broadcast(array, 0)
    state.step = int(step[0])
    return data, state


def remaining_kills(kills: list[int], state: State) -> list[int]:
    """Return the later steps in which a rank kills itself."""
    return [step for step in kills if step > state.step + 2]


def main() -> int:
    """Train, report, and return the exit code, the same on every rank."""
    arguments = parse_arguments()
    asked = stop_on_signals() if arguments.state else np.zeros(1)
    dist.init_process_group()
    data, state = share_state(arguments)
    images, labels, held_out_images, held_out_labels = data
    if state.step:  # continues from a file, or is a new process of a grown job
        arguments.kill_at = [] if arguments.state else remaining_kills(arguments.kill_at, state)
    kept = [state]

    shuffle = np.random.default_rng(arguments.seed)
    orders = [shuffle.permutation(len(labels)) for _ in range(arguments.epochs)]
    cuts = range(arguments.batch_size, len(labels), arguments.batch_size)
    batches = [batch for order in orders for batch in np.split(order, cuts)]
    steps = len(cuts) + 1  # of an epoch
    losses: dict[int, float] = {}
    right = 0.0
    while state.step < len(batches):
        dies = state.step + 1 in arguments.kill_at and dist.get_rank() == dist.get_world_size() - 1
        try:
            if state.step % steps == 0:
                state.totals = np.zeros(2)
            state = take_step(state, images, labels, batches[state.step], arguments.lr, dies)
            # Signals may reach ranks in different steps; one is enough to stop all.
            stop = asked.copy()
            if arguments.state:
                dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        except dist.LostRankError as error:
            before = dist.get_world_size()
            state = recover(error, kept)
            if arguments.grow:
                dist.grow_group(before - dist.get_world_size())
                _, state = share_state(arguments, state)
            kept = [state]
            arguments.kill_at = remaining_kills(arguments.kill_at, state)
            continue
        kept = [kept[-1], state]
        if state.step % steps == 0:
            loss, right = (state.totals / len(labels)).tolist()
            losses[state.step] = loss
            if dist.get_rank() == 0:
                print(
                    f"epoch {state.step // steps:3d}  loss {loss:.6f}  accuracy {right:7.2%}",
                    flush=True,
                )
                if arguments.state:
                    write(arguments.state, state)
        if stop[0]:
            if dist.get_rank() == 0:
                write(arguments.state, state)
                arguments.state.with_suffix(".stopped").touch()
                print(f"stops after step {state.step}", flush=True)
            dist.barrier()  # the state is written before any rank ends
            dist.destroy_process_group()
            return 0

    # There are few held-out digits, so every rank evaluates all of them.
    probabilities = forward(state.layers, held_out_images, np)[-1]
    accuracy = scores(probabilities, held_out_labels, np)[1] / len(held_out_labels)
    if dist.get_rank() == 0:
        verdict = "reached" if accuracy >= arguments.target else "MISSED"
        print(
            f"held-out accuracy {accuracy:.2%} on {dist.get_world_size()} ranks: the target of "
            f"{arguments.target:.2%} is {verdict}",
            flush=True,
        )
        if arguments.curve:
            np.save(arguments.curve, np.array(sorted(losses.items())))
    dist.destroy_process_group()
    return 0 if accuracy >= arguments.target else 1


def stop_on_signals() -> np.ndarray:
    """Return an array of one element that SIGTERM and SIGUSR2 set to 1.

    Not SIGUSR1, which MPICH's mpiexec sends when a rank was lost.
    """
    asked = np.zeros(1)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: asked.fill(1))
    return asked


def write(path: Path, state: State) -> None:
    """Write the state, and replace the file atomically."""
    arrays = {"step": np.array(state.step), "totals": state.totals}
    for index, (layer, speed) in enumerate(zip(state.layers, state.velocities, strict=True)):
        for name, array in zip(
            ("weight", "bias", "weight_speed", "bias_speed"), (*layer, *speed), strict=True
        ):
            arrays[f"{name}{index}"] = array
    draft = path.with_suffix(".draft.npz")
    np.savez(draft, **arrays)
    draft.replace(path)


def read(path: Path) -> State:
    """Read a state that ``write`` has written."""
    with np.load(path) as arrays:
        count = sum(name.startswith("weight") for name in arrays) // 2
        layers = [(arrays[f"weight{i}"], arrays[f"bias{i}"]) for i in range(count)]
        speeds = [(arrays[f"weight_speed{i}"], arrays[f"bias_speed{i}"]) for i in range(count)]
        return State(int(arrays["step"]), layers, speeds, arrays["totals"])


if __name__ == "__main__":
    sys.exit(main())
