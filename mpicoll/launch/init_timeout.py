"""The timeout of initialization: report the missing ranks and end the process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpicoll import communicators
from mpicoll.kernels.library import kernels
from mpicoll.launch.host_identity import job_name
from mpicoll.launch.launchers import announced
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


def end_after(limit: float, message: str, code: int) -> contextlib.AbstractContextManager[None]:
    """Return a context that ends this process after ``limit`` seconds, if there is a C library."""
    if kernels is None:
        return contextlib.nullcontext()
    return _limited(limit, message.encode(), b"", None, 0, code)


@contextlib.contextmanager
def _limited(limit: float, *arguments: Any) -> Iterator[None]:
    """End this process from a C thread if the block takes more than ``limit`` seconds."""
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
