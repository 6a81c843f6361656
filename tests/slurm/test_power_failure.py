"""Power failure of a node. Runs last, because the cluster cannot be used afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from test_jobs import ALL, CALLS, processes

from jobs import MPI, NODES, command, start, wait_until


def test_power_failure_of_a_node_ends_the_job(tmp_path: Path) -> None:
    job = tmp_path / "calls_of_a_node.py"
    job.write_text(CALLS)
    step = start(*ALL, f"--mpi={MPI}", sys.executable, job)
    assert step.stdout is not None
    while "begins" not in (line := step.stdout.readline()):
        assert line, "it ended"
    command(os.environ["CLUSTER_FAIL"], str(NODES))
    wait_until(lambda: not processes(job.name), 60)
    out, _ = step.communicate(timeout=60)
    assert step.returncode != 0 and "Node failure" in out, out
