"""Measure which share of mpicoll/ the tests run: the plain tests, and those on two ranks.

    python tests/measure_coverage.py VENV [options of tests/run.py]

``make coverage`` calls it. Every Python process of the tests, rank or not, keeps its own record in
``.cache/coverage``; a rank that is killed leaves none. Ends with the exit code of the tests.
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
    python = Path(os.path.abspath(venv)) / "bin" / "python"  # noqa: PTH100  # a link stays one
    shutil.rmtree(RECORDS, ignore_errors=True)
    RECORDS.mkdir(parents=True)
    environment = os.environ | {"COVERAGE_FILE": str(RECORDS / "record")}
    # coverage has Python start it wherever this names its settings.
    measured = environment | {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml")}
    tests = [sys.executable, "tests/run.py", f"mpich={venv}", "--ranks", "0", "2", "--keep-going"]
    code = subprocess.run([*tests, *options], cwd=ROOT, env=measured, check=False).returncode
    for command in (["combine", "--quiet"], ["report", "--skip-covered"]):
        subprocess.run([python, "-m", "coverage", *command], cwd=ROOT, env=environment, check=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
