"""The timeout of initialisation."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from launch_jobs import compiled

from mpicoll.launch.host_identity import node

pytestmark = pytest.mark.waits


def limited(during: str, limit: float = 0.5, **environment: str) -> Any:
    """A process that is inside the limit while it does something."""
    script = f"""
import ctypes, time
from mpicoll.launch.init_timeout import enforce_timeout
print("begins")
with enforce_timeout({limit}, None):
    {during}
time.sleep(1)
print("goes on")
"""
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


#: As MPI_Init does it: PyDLL keeps the interpreter's lock.
BLOCKS = "ctypes.PyDLL(None).sleep(30)"


@compiled
def test_the_limit_needs_no_interpreter() -> None:
    done = limited(BLOCKS)
    assert (done.returncode, done.stdout) == (1, "begins\n"), done
    assert done.stderr == (
        "mpicoll: rank ? of ?: init_process_group: timed out after 0.5 s waiting for the other "
        "ranks. Check these ranks or increase the timeout; ending the job\n"
    )


@compiled
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_a_limit_that_is_kept(limit: float) -> None:
    done = limited("pass", limit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begins\ngoes on\n", ""), done


@compiled
@pytest.mark.parametrize(
    ("size", "here", "there", "words"),
    [
        (4, 4, [0], "the other ranks (missing: 1, 3). Check"),
        (4, 2, [0], "the other ranks. Check"),  # unknown on several nodes
        (3000, 3000, [0], ", and others). Check these ranks"),
    ],
)
def test_who_is_missing_on_a_node(size: int, here: int, there: list[int], words: str) -> None:
    job = f"mpicoll-test-{os.getpid()}"
    with contextlib.ExitStack() as held:
        for rank in there:
            name = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            name.bind(f"\0mpicoll/{node()}/{job}/{rank}")
        done = limited(
            BLOCKS, PMIX_NAMESPACE=job, OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE=str(size),
            OMPI_COMM_WORLD_LOCAL_SIZE=str(here),
        )  # fmt: skip
    assert done.stderr.startswith(f"mpicoll: rank 2 of {size}: ") and words in done.stderr, done
    assert len(done.stderr) <= 4096 and done.stderr.endswith("ending the job\n"), done
