"""Training on handwritten digits with torchft's Manager over mpicoll, with lost ranks.

    mpirun --with-ft ulfm -n 3 python jobs/train_digits_torchft.py --kill-at 30

Every rank is a replica with the whole network. Rank 0 runs torchft's lighthouse, which tracks the
live replicas; a real job runs it on a separate host. A step is committed if all replicas of its
quorum have completed it. The batch is divided among the live replicas. Needs torch and torchft.

Exit code: 0 if the accuracy on held-out digits reaches ``--target``, else 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.functional import cross_entropy
from torchft import Manager
from torchft.coordination import LighthouseServer
from train_digits import load_data

import mpicoll as dist
from mpicoll.torch.torchft import ProcessGroupMpicoll


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas together")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--target", type=float, default=0.95, help="accuracy to reach")
    parser.add_argument("--kill-at", type=int, default=-1, help="step, from 1, of the last rank")
    return parser.parse_args()


def main() -> int:
    """Train, report, and return the exit code."""
    arguments = parse_arguments()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels, held_out_images, held_out_labels = (
        torch.from_numpy(array) for array in load_data(0, np)
    )
    address = [None]
    if rank == 0:
        lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=500,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=1000,
        )
        address = [lighthouse.address()]
    dist.broadcast_object_list(address)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    def load(states: dict[str, Any]) -> None:
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])

    store = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupMpicoll(timedelta(seconds=20)),
        load,
        lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{rank}",
        lighthouse_addr=address[0],
        timeout=timedelta(seconds=20),
    )
    while manager.current_step() < arguments.steps:
        manager.start_quorum()
        shuffle = np.random.default_rng(manager.current_step())
        batch = torch.from_numpy(shuffle.integers(len(labels), size=arguments.batch_size))
        share = batch[manager.participating_rank() :: manager.num_participants()]
        optimizer.zero_grad()
        loss = cross_entropy(model(images[share]), labels[share], reduction="sum")
        (loss / len(batch)).backward()
        if manager.current_step() + 1 == arguments.kill_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
        manager.allreduce(gradients).wait()
        gradients *= manager.num_participants()  # torchft averages; the step needs the sum
        if not manager.should_commit():
            print(f"replica {rank}: step {manager.current_step() + 1} is taken again", flush=True)
            continue
        offset = 0
        for each in model.parameters():
            each.grad.copy_(gradients[offset : offset + each.numel()].view_as(each))
            offset += each.numel()
        optimizer.step()

    with torch.no_grad():
        right = (model(held_out_images).argmax(1) == held_out_labels).double().mean().item()
    if rank == 0:
        print(
            f"held-out accuracy {right:.2%} with {manager.num_participants()} of {size} replicas",
            flush=True,
        )
    manager.shutdown(wait=False)
    return 0 if right >= arguments.target else 1


if __name__ == "__main__":
    sys.exit(main())
