"""These tests need libraries that only ``make test-clients`` installs."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "TEST_MPICOLL_CLIENTS" in os.environ else ["test_*.py"]
