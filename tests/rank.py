"""Run pytest on one rank: ``mpiexec -n N python -m mpi4py tests/rank.py LOGS PYTEST_ARGS...``

Writes pytest's output to LOGS/rank-R.log and its results to LOGS/rank-R.xml for ``tests/run.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI


def main() -> int:
    path = Path(sys.argv[1], f"rank-{MPI.COMM_WORLD.rank}")
    with path.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        arguments = ["--with-mpi", f"--junitxml={path.with_suffix('.xml')}", *sys.argv[2:]]
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
