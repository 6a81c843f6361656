"""The timeout of initialization."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
from whole_jobs import compiled, run_program

from mpicoll.launch.host_identity import node

pytestmark = pytest.mark.waits


def limited(during: str, limit: float = 0.5, **environment: str) -> Any:
    """Run code under ``enforce_timeout`` in a process."""
    script = f"""
import ctypes, time
from mpicoll.launch.init_timeout import enforce_timeout
print("begin")
with enforce_timeout({limit}, None):
    {during}
time.sleep(1)
print("end")
"""
    return run_program(sys.executable, "-c", script, env=os.environ | environment)


#: Like MPI_Init, PyDLL holds the interpreter lock.
BLOCKS = "ctypes.PyDLL(None).sleep(30)"


@compiled
def test_timeout_works_while_the_interpreter_is_locked() -> None:
    done = limited(BLOCKS)
    assert (done.returncode, done.stdout) == (1, "begin\n"), done
    assert done.stderr == (
        "mpicoll: rank ? of ?: init_process_group: timed out after 0.5 s waiting for the other "
        "ranks. Check these ranks or increase the timeout; ending the job\n"
    )


@compiled
@pytest.mark.parametrize(
    ("size", "local_size", "words"),
    [
        (4, 4, "the other ranks (missing: 1, 3). Check"),
        (4, 2, "the other ranks. Check"),  # unknown on several nodes
        (3000, 3000, ", and others). Check these ranks"),
    ],
)
def test_message_names_missing_ranks(size: int, local_size: int, words: str) -> None:
    job = f"mpicoll-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank_0:
        rank_0.bind(f"\0mpicoll/{node()}/{job}/0")
        done = limited(
            BLOCKS, PMIX_NAMESPACE=job, OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE=str(size),
            OMPI_COMM_WORLD_LOCAL_SIZE=str(local_size),
        )  # fmt: skip
    assert done.stderr.startswith(f"mpicoll: rank 2 of {size}: ") and words in done.stderr, done
    assert len(done.stderr) <= 4096 and done.stderr.endswith("ending the job\n"), done
