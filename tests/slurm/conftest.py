"""These tests run on the head node of a Slurm cluster that tests/slurm/run.py starts."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "CLUSTER_FAIL" in os.environ else ["test_*.py"]
