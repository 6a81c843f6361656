"""Fixtures of whole_jobs.py, and folders of which only their own runner collects the tests."""

from __future__ import annotations

import os

from whole_jobs import ended, jobs, pytest_collection_modifyitems

__all__ = ["ended", "jobs", "pytest_collection_modifyitems"]

collect_ignore_glob = [
    f"{folder}/test_*.py"
    for folder, variable in (("slurm", "CLUSTER_FAIL"), ("clients", "TEST_MPICOLL_CLIENTS"))
    if variable not in os.environ
]
