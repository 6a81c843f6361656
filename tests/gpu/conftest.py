"""The tests here are for ranks on GPUs: run.py starts them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "TEST_MPICOLL_DEVICE" in os.environ else ["test_*.py"]
