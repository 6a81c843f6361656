"""The kernels that reduce, and those that GPUs carry out together, under compute-sanitizer."""

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


#: One of each way through the kernels; compute-sanitizer takes its time for each. Of kernels that
#: wait for each other all are one launch: how many launches run at once is its affair.
OPERATIONS, DTYPES = ("SUM", "AVG", "MAX"), ("float32", "bfloat16", "e5m2", "complex64", "int16")
CHOSEN = {
    "test_kernels.py": (
        f"(combine and ({' or '.join(OPERATIONS)}) and ({' or '.join(DTYPES)}))"
        " or test_narrow or test_scale"
    ),
    "test_peer_kernels.py": "together and (SUM or test_moves)",
}


@pytest.mark.on_a_gpu
@pytest.mark.skipif(sanitizer() is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tests", CHOSEN)
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
def test_kernels_under_the_sanitizer(tool, tests):
    """Nothing is read or written that is not the arrays', nor read before it is written. Of races
    it sees those in memory that a block shares; tests/test_device_peers.py has ThreadSanitizer.
    """
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "77", sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN[tests]]
    command += [str(HERE / tests)]
    paths = [str(HERE), str(HERE.parent / "mpi"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip(
            "compute-sanitizer does not support this device, or what the machine makes of it"
        )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout, done.stdout[-5000:]
