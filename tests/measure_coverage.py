"""Measure the coverage of mpicoll/ by the plain tests and the tests on two ranks.

    python tests/measure_coverage.py VENV [options of tests/run.py]

``make coverage`` calls this script. Every Python process of the tests writes its own record to
``.cache/coverage``, except killed ranks. The exit code is the exit code of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / ".cache" / "coverage"


def main() -> int:
    venv, *options = sys.argv[1:]
    python = Path(os.path.abspath(venv)) / "bin" / "python"  # noqa: PTH100  # keeps links
    shutil.rmtree(RECORDS, ignore_errors=True)
    RECORDS.mkdir(parents=True)
    environment = os.environ | {"COVERAGE_FILE": str(RECORDS / "record")}
    # With this variable set, every Python process starts coverage with these settings.
    measured = environment | {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml")}
    tests = [sys.executable, "tests/run.py", f"mpich={venv}", "--ranks", "0", "2", "--keep-going"]
    code = subprocess.run([*tests, *options], cwd=ROOT, env=measured, check=False).returncode
    for command in (["combine", "--quiet"], ["report", "--skip-covered"]):
        subprocess.run([python, "-m", "coverage", *command], cwd=ROOT, env=environment, check=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
