"""The timeout of initialization: report the missing ranks and end the process."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpicoll import communicators
from mpicoll.kernels.library import kernels
from mpicoll.launch.host_identity import node
from mpicoll.launch.launchers import announced
from mpicoll.launch.pmi import open_manager
from mpicoll.launch.rendezvous import Rendezvous
from mpicoll.output import flush_streams

if TYPE_CHECKING:
    from mpi4py import MPI


@contextlib.contextmanager
def enforce_timeout(
    limit: float | None, rendezvous: Rendezvous | None, comm: MPI.Intracomm | None = None
) -> Iterator[None]:
    """End this process with a message if the block takes longer than the timeout.

    limit: timeout in seconds; None: none.
    comm:  the communicator whose ranks are expected; None: the whole job.

    MPI_Init holds the interpreter lock, so the timer is a C thread. Without the C library the
    timeout is not enforced.
    """
    if limit is None or kernels is None:
        yield
        return
    rank, size, on_one_node = announced()
    if rendezvous is not None:
        rank, size = str(rendezvous.rank), str(rendezvous.world_size)
    flush_streams()  # the C library exits without flushing
    job = job_name() if on_one_node else None
    if comm is not None:
        from mpi4py import MPI

        rank, size = str(comm.Get_rank()), str(comm.Get_size())
        ranks = communicators.translate_ranks(comm, MPI.COMM_WORLD)
        is_known = job is not None and None not in ranks
        job = f"{job}/{zlib.crc32(repr(ranks).encode())}" if is_known else None
    before = (
        f"mpicoll: rank {rank} of {size}: init_process_group: timed out after {limit:g} s waiting "
        "for the other ranks"
    )
    after = ". Check these ranks or increase the timeout; ending the job\n"
    with contextlib.ExitStack() as stack:
        if job is not None:
            name = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):
                name.bind(f"\0{job}/{rank}")
        here = job and job.encode(), int(size) if job else 0
        stack.enter_context(_limited(limit, before.encode(), after.encode(), *here, 1))
        yield


@contextlib.contextmanager
def await_peers(limit: float) -> Iterator[bool]:
    """Yield whether all other ranks of the job enter ``enforce_timeout`` within ``limit`` seconds.

    Yields False if the ranks are on several nodes or have no timeout. Until the context ends, this
    rank counts as waiting.
    """
    rank, size, on_one_node = announced()
    job = job_name() if on_one_node else None
    if job is None:
        yield False
        return
    end = time.monotonic() + limit
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        name.bind(f"\0{job}/{rank}")
        missing = {other for other in range(int(size)) if str(other) != rank}
        while missing and time.monotonic() < end:
            missing = {other for other in missing if not is_bound(f"\0{job}/{other}")}
            time.sleep(_CHECK_INTERVAL_S if missing else 0)
        yield not missing


#: Seconds between checks for missing ranks.
_CHECK_INTERVAL_S = 0.01


def is_bound(name: str) -> bool:
    """Return whether a process of this node holds an abstract socket address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(name)
        except OSError:
            return False
    return True


def end_after(limit: float, message: str, code: int) -> contextlib.AbstractContextManager[None]:
    """Return a context that ends this process with a message after ``limit`` seconds."""
    if kernels is None:
        return contextlib.nullcontext()
    return _limited(limit, message.encode(), b"", None, 0, code)


@contextlib.contextmanager
def _limited(limit: float, *arguments: Any) -> Iterator[None]:
    """Have the C library end this process after ``limit`` seconds; see ``init_timeout.c``."""
    assert kernels is not None
    (reader, writer), (started, starts) = os.pipe(), os.pipe()  # starts: written by the C thread
    with contextlib.ExitStack() as stack:
        for each in (reader, writer, started, starts):
            stack.callback(os.close, each)
        thread = threading.Thread(
            target=kernels.init_timeout,
            args=(starts, reader, int(1000 * limit), *arguments),
            name="mpicoll-limit",
            daemon=True,
        )
        thread.start()
        stack.callback(thread.join)
        stack.callback(os.write, writer, b"\0")
        os.read(started, 1)  # the thread no longer needs the interpreter lock
        yield


def job_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a name of this job, unique on its node and the same on its ranks; None if unknown.

    A PMIx manager names the job. A PMI manager is one process per node, the peer of each rank's
    PMI_FD, so its process ID is used.
    """
    job = environment.get("PMIX_NAMESPACE", "")
    if not job:
        with contextlib.suppress(OSError), open_manager(environment.get("PMI_FD", "")) as manager:
            found = manager.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            job = str(struct.unpack("3i", found)[0] or "")
    return f"mpicoll/{node()}/{job}" if job else None
