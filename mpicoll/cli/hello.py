"""``python -m mpicoll hello``: print one line from each rank, in order."""

from __future__ import annotations

import argparse
import os
import socket

from mpicoll import cli, control_messages
from mpicoll.machine import format_ranges
from mpicoll.output import write_lines

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --binding."""
    parser.add_argument(
        "--binding",
        action="store_true",
        help="also print the processors on which each rank may run",
    )


def run(options: argparse.Namespace) -> int:
    """Print the lines; return 0, or 1 for a failed init."""
    wrong = cli.start_group()
    if wrong:
        if cli.is_first_rank():
            write_lines(f"mpicoll hello: {wrong}")
        return 1
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
    gpu = "no GPU" if index is None else f"GPU {index} ({own.gpus[index]}), device route {route}"
    if index is not None:
        far = describe_far_gpu(own, index, os.sched_getaffinity(0))
        gpu += "".join(f"; {text}" for text in far)
    line = (
        f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}, "
        f"local rank {local} of {node_size()}, {own.vendor} {own.version}, {gpu}"
    )
    if options.binding:
        line += f", {_describe_binding()}"
    lines = control_messages.allgather(comm, line, str)
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    cli.end_group()
    return 0


def _describe_binding() -> str:
    """Describe the processors on which this process may run."""
    allowed, count = os.sched_getaffinity(0), os.cpu_count() or 1
    if len(allowed) == count:
        return f"bound to none of {count} processors"
    return f"bound to processor{'s' * (len(allowed) > 1)} {format_ranges(allowed)} of {count}"
