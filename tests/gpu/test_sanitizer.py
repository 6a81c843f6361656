"""Reduction kernels under compute-sanitizer.

It may serialize kernels, so those of ``peer`` would wait forever: ``make sanitize`` tests them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def sanitizer() -> str | None:
    places = [os.environ.get("CUDA_HOME", ""), *map(str, Path("/usr/local").glob("cuda*"))]
    found = (shutil.which("compute-sanitizer", path=f"{place}/bin") for place in places)
    return shutil.which("compute-sanitizer") or next(filter(None, found), None)


#: A sample, because compute-sanitizer is slow.
OPERATIONS, DTYPES = ("SUM", "AVG", "MAX"), ("float32", "bfloat16", "e5m2", "complex64", "int16")
CHOSEN = (
    f"(combine and ({' or '.join(OPERATIONS)}) and ({' or '.join(DTYPES)}))"
    " or test_narrow or test_scale"
)


@pytest.mark.skipif(sanitizer() is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
def test_kernels_under_the_sanitizer(tool):
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "77", sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN]
    command += [str(HERE / "test_kernels.py")]
    paths = [str(HERE), str(HERE.parent / "mpi"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout, done.stdout[-5000:]
