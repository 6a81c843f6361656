"""The timeout of initialisation: a rank whose peers do not come reports it, and ends."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpicoll import communicators
from mpicoll.kernels.library import kernels
from mpicoll.launch.host_identity import node
from mpicoll.launch.launchers import announced
from mpicoll.launch.pmi import manager_socket
from mpicoll.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["await_others", "end_after", "enforce_timeout", "job_name"]


@contextlib.contextmanager
def enforce_timeout(
    limit: float | None, rendezvous: Rendezvous | None, comm: MPI.Intracomm | None = None
) -> Iterator[None]:
    """End this process with a message if the other ranks do not come in time.

    limit: seconds; None: no timeout.
    comm:  the others are those of this communicator; None: of the whole job.

    MPI_Init keeps the interpreter's lock, so the thread that waits is inside the C library; without
    that there is no timeout.
    """
    if limit is None or kernels is None:
        yield
        return
    rank, size, on_one_node = announced()
    if rendezvous is not None:
        rank, size = str(rendezvous.rank), str(rendezvous.world_size)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()  # what was printed is not lost
    job = job_name() if on_one_node else None
    if comm is not None:
        rank, size = str(comm.Get_rank()), str(comm.Get_size())
        job = job and _part_name(job, comm)
    before = (
        f"mpicoll: rank {rank} of {size}: init_process_group: the other ranks did not all come "
        f"within {limit:g} s"
    )
    after = ": see what became of them, or give a longer timeout; ending the job\n"
    with contextlib.ExitStack() as stack:
        if job is not None:
            name = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):
                name.bind(f"\0{job}/{rank}")
        here = job and job.encode(), int(size) if job else 0
        stack.enter_context(_limited(limit, before.encode(), after.encode(), *here, 1))
        yield


@contextlib.contextmanager
def await_others(limit: float) -> Iterator[bool]:
    """Yield whether all ranks of MPI's launcher wait for this one in MPI_Init within ``limit``.

    limit: seconds.

    This is known if all of them are on this node, and have a timeout. Meanwhile, and until the
    context ends, this rank counts as waiting.
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
            missing = {other for other in missing if not _is_bound(f"\0{job}/{other}")}
            time.sleep(_PAUSE_S if missing else 0)
        yield not missing


#: Seconds between two looks for ranks that do not wait yet.
_PAUSE_S = 0.01


def _is_bound(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(name)
        except OSError:
            return False
    return True


def end_after(limit: float, message: str, code: int) -> contextlib.AbstractContextManager[None]:
    """Return a context that ends this process with a message if it takes so many seconds."""
    if kernels is None:
        return contextlib.nullcontext()
    return _limited(limit, message.encode(), b"", None, 0, code)


@contextlib.contextmanager
def _limited(limit: float, *arguments: Any) -> Iterator[None]:
    """Have the C library end this process after so many seconds; see ``limit.c``."""
    assert kernels is not None
    with contextlib.ExitStack() as stack:
        (reader, writer), (started, starts) = os.pipe(), os.pipe()
        for each in (reader, writer, started, starts):
            stack.callback(os.close, each)
        thread = threading.Thread(
            target=kernels.limit,
            args=(starts, reader, int(1000 * limit), *arguments),
            name="mpicoll-limit",
            daemon=True,
        )
        thread.start()
        stack.callback(thread.join)
        stack.callback(os.write, writer, b"\0")
        os.read(started, 1)  # the thread has left Python for good
        yield


def _part_name(job: str, comm: MPI.Intracomm) -> str | None:
    """Name the ranks of a communicator among those of the job, alike on all of them."""
    from mpi4py import MPI

    ranks = communicators.translate_ranks(comm, MPI.COMM_WORLD)
    return None if None in ranks else f"{job}/{zlib.crc32(repr(ranks).encode())}"


def job_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Name this job among those of its node, alike on all of its ranks there; None without a name.

    A PMIx manager gives a job a name. A PMI manager has one process on a node, at the other end of
    each rank's connection.
    """
    job = environment.get("PMIX_NAMESPACE", "")
    if not job:
        with contextlib.suppress(OSError), manager_socket(environment.get("PMI_FD", "")) as manager:
            found = manager.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            job = str(struct.unpack("3i", found)[0] or "")
    return f"mpicoll/{node()}/{job}" if job else None
