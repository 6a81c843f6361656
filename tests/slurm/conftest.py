"""The tests here run on the head of a Slurm cluster: tests/slurm/run.py starts one."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "CLUSTER_FAIL" in os.environ else ["test_*.py"]
