"""``python -m mpicoll hello``: print one line from each rank, in order."""

from __future__ import annotations

import argparse
import os
import socket

from mpicoll import cli, control_messages
from mpicoll.machine import format_ranges


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print the lines; return 0, or 1 for a failed init."""
    return cli.run_in_group("hello", _hello)


def _hello() -> int:
    import mpicoll as dist
    from mpicoll.api.lifecycle import node_size
    from mpicoll.core.groups import default_group
    from mpicoll.cuda.binding import describe_far_gpu, device_for
    from mpicoll.cuda.capabilities import exchange
    from mpicoll.routes.device.eligibility import eligible_routes, forced_route, with_used

    comm = default_group().inner
    all_ranks = exchange(comm)
    own, local = all_ranks[dist.get_rank()], dist.get_node_local_rank()
    index = device_for(local, len(own.gpus))
    all_ranks = with_used(all_ranks, control_messages.allgather(comm, index, int | None))
    route = eligible_routes(all_ranks, forced_route(all_ranks))[0]
    allowed = format_ranges(os.sched_getaffinity(0))
    gpu = "no GPU" if index is None else f"GPU {index} ({own.gpus[index]}), device route {route}"
    line = (
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}, "
        f"local rank {local} of {node_size()}, on processors {allowed} of {os.cpu_count()}, "
        f"{own.vendor} {own.version}, {'; '.join([gpu, *describe_far_gpu(own, index)])}"
    )
    lines = control_messages.allgather(comm, line, str)
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    return 0
