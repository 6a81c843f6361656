"""Fixtures of whole_jobs.py, paths of modules, and folders with a runner of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from whole_jobs import ended, jobs, no_launcher, pytest_collection_modifyitems

__all__ = ["ended", "jobs", "no_launcher", "pytest_collection_modifyitems"]

# Modules of other folders that tests import.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("benchmarks", "docs")]

collect_ignore_glob = [
    f"{folder}/test_*.py"
    for folder, variable in (("slurm", "CLUSTER_FAIL"), ("clients", "TEST_MPICOLL_CLIENTS"))
    if variable not in os.environ
]
