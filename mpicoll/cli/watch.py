"""``python -m mpicoll watch``: show the state of the ranks of a running job."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mpicoll import cli, line_protocol
from mpicoll.failures import node_monitor, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Show the state of the ranks of a running job. Run it on a node of the job, as the same "
        "user. It works even if the ranks are blocked."
    )
    parser.add_argument(
        "job", nargs="?", metavar="JOB",
        help="number of the Slurm job, or process id of mpirun or any rank on this node; without "
        "it, list the jobs on this node, or show the only one",
    )  # fmt: skip
    parser.add_argument(
        "--stacks", action="store_true", help="print the whole stack of each Python thread"
    )
    parser.add_argument("--json", action="store_true", help="print all information as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the state; return 0, or 1 if there is not exactly one such job."""
    try:
        found = _find_jobs()
    except OSError as error:
        return cli.refuse("watch", str(error), True, 1)
    if options.job is not None:
        found = {
            path: job
            for path, job in found.items()
            if options.job in [*job["names"], *map(str, job["pids"])]
        }
    heads = {path: job for path, job in found.items() if job["is_head"]} or found
    if len(heads) != 1:
        if options.job is None:
            for job in heads.values():
                pids = ", ".join(map(str, job["pids"][:4])) + ", ..." * (len(job["pids"]) > 4)
                print(f"{job['job']}: {job['size']} ranks, processes {pids}: {job['command']}")
        meant = "" if options.job is None else f" {options.job}"
        why = (
            f"several jobs{meant or ' run on this node'}; pass one of the numbers above" if heads
            else f"no job{meant} of this user with mpicoll runs on this node"
        )  # fmt: skip
        return cli.refuse("watch", why, True, 1)
    path, job = next(iter(heads.items()))
    try:
        # Short reports also need stacks, for ranks outside of calls.
        answer = line_protocol.ask(path, {"ask": "snapshots", "stacks": None})
    except OSError as error:
        return cli.refuse("watch", f"job {job['job']} does not answer: {error}", True, 1)
    if options.json:
        print(json.dumps(answer, indent=1))
        return 0
    part = "" if job["is_head"] else f", those on {job['host']}"
    print(f"job {job['job']}, {job['size']} ranks{part}: {job['command']}")
    print(report.describe_states(answer["ranks"], whole=options.stacks))
    return 0


def _find_jobs() -> dict[Path, dict[str, Any]]:
    """Return the jobs of the node monitors on this node, by socket."""
    found = {}
    for path in sorted(node_monitor.find_folder().glob(f"*{node_monitor.SOCKETS}")):
        try:
            found[path] = line_protocol.ask(path, {"ask": "job"})
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # left by a node monitor that was killed
        except OSError:
            continue
    return found
