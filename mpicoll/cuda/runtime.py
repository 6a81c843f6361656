"""CUDA as the rest of mpicoll sees it: devices, their streams, events and memory.

All other code asks a `Runtime` and knows nothing of CUDA. Addresses and streams are plain numbers,
as array libraries give them. ``synchronize_device`` alone waits for a whole device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpicoll.dtypes import DType, Factor
from mpicoll.errors import DeviceMemoryError
from mpicoll.kernels.peers import Collective, Peers
from mpicoll.kernels.reduction import Loop

__all__ = [
    "CUDA",
    "HANDLE",
    "LEGACY",
    "PER_THREAD",
    "ROCM",
    "UNKNOWN",
    "Allocation",
    "Event",
    "Memory",
    "NcclCommunicator",
    "Runtime",
    "StridedMemory",
    "allocate",
    "get_runtime",
]

#: CUDA's legacy default stream, which is ordered with all others but the non-blocking ones; the
#: default stream of each thread, another one on each; and the number that stands for a stream that
#: the array's library does not name.
LEGACY, PER_THREAD, UNKNOWN = 1, 2, 0

#: Kinds of runtime.
CUDA, ROCM = "CUDA", "ROCm"

#: Bytes of a handle by which another process opens memory, or an event.
HANDLE = 64


class Memory:
    """Memory that the runtime has allocated or mapped; it is freed with its last reference.

    owner: frees it.
    """

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    def on_host(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes as an array that keeps the memory; host memory only."""
        return np.asarray(_OnHost(self))


class _OnHost:
    """Offers host memory to NumPy, which keeps it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "data": (memory.address, False),
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Event(Protocol):
    """A point in a stream."""


class StridedMemory(NamedTuple):
    """Elements in memory: the address of the first, and the bytes between neighbours."""

    address: int
    strides: Sequence[int]


class Allocation(NamedTuple):
    """Memory as it was allocated, of which an array may be a part.

    base, nbytes: where it begins, and its size.
    buffer: the driver's number for it, which no other allocation of the process ever gets; memory
            that is freed and allocated again may be at the same address.
    """

    base: int
    nbytes: int
    buffer: int


class NcclCommunicator(Protocol):
    """A communicator of NCCL, with CuPy's methods: addresses, counts, NCCL's numbers, a stream."""

    def send(self, address: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Enqueue a message to a rank."""

    def recv(self, address: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Enqueue the receipt of a message from a rank."""

    def broadcast(
        self, send: int, recv: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """Enqueue a broadcast."""

    def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        """Enqueue an all-gather of ``count`` elements from each rank."""

    def allReduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Enqueue an all-reduce."""

    def reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """Enqueue a reduction to a root."""

    def reduceScatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Enqueue a reduce-scatter of ``count`` elements to each rank."""

    def check_async_error(self) -> None:
        """Raise the error of what was enqueued, as far as it is known."""

    def destroy(self) -> None:
        """Destroy the communicator, when what was enqueued is done."""

    def abort(self) -> None:
        """End what is enqueued, and destroy the communicator."""


class Runtime(Protocol):
    """What is asked of devices. ``index`` numbers those that this process sees, from 0."""

    def count(self) -> int:
        """Return the number of devices."""

    def name(self, index: int) -> str:
        """Return the name of a device's model."""

    def pci_bus_id(self, index: int) -> str:
        """Return the PCI bus id of the GPU that the device is, or is a part of (MIG)."""

    def identity(self, index: int) -> str:
        """Return what names the device in every process of its host."""

    def driver_version(self) -> str:
        """Return the versions of the driver and of the libraries above it, as text."""

    def kind(self) -> str:
        """Return what the devices are programmed by: CUDA or ROCM."""

    def current_device(self) -> int:
        """Return the calling thread's current device."""

    def device_of(self, address: int) -> int:
        """Return the device that the memory belongs to."""

    def use(self, index: int) -> None:
        """Make a device the calling thread's current one."""

    def settle(self, index: int) -> None:
        """Let the calling thread, one of mpicoll's, work on a device for good; it may do so while
        another captures a graph.
        """

    def on(self, index: int) -> AbstractContextManager[object]:
        """Return a context in which a device is the calling thread's current one.

        Afterwards the thread has what it had, and no device is set up that it did not use.
        """

    def is_captured(self, index: int, stream: int) -> bool:
        """Return whether a stream is being captured into a graph."""

    def check_stream(self, index: int, stream: int, where: str) -> None:
        """Raise UnsupportedError if a stream is captured: no call can be ordered in it."""

    def current_stream(self, index: int) -> int:
        """Return CuPy's current stream on a device."""

    def using(self, index: int, stream: int) -> AbstractContextManager[object]:
        """Return a context in which a stream is CuPy's current one on a device."""

    def create_stream(self, index: int) -> int:
        """Return a new non-blocking stream."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of ``create_stream``."""

    def record(self, index: int, stream: int) -> Event:
        """Return the event of all being done that a stream holds so far."""

    def wait(self, index: int, stream: int, event: Event) -> None:
        """Order what the stream gets from now on after an event of any device."""

    def is_done(self, event: Event) -> bool:
        """Return whether an event has come."""

    def synchronize(self, event: Event) -> None:
        """Wait on the host for an event."""

    def synchronize_device(self, index: int) -> None:
        """Wait on the host for all that a device holds so far, in any stream of this process."""

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Allocate device memory of the kind that can be exported and that every MPI takes.

        Raises DeviceMemoryError if there is too little.
        """

    def free_cached(self, index: int) -> None:
        """Give memory back that array libraries keep unused."""

    def allocate_pinned(self, index: int, nbytes: int) -> Memory:
        """Allocate pinned host memory.

        Freed memory may be handed out again at once: wait for its copies first.
        """

    def is_plain(self, address: int) -> bool:
        """Return whether memory is of ``allocate``'s kind: neither managed nor from a pool."""

    def copy(self, index: int, into: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two memories."""

    def copy_strided(
        self, index: int, into: StridedMemory, source: StridedMemory, shape: Sequence[int],
        itemsize: int, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue a copy of elements between two memories of one device."""

    def load(self, index: int, by: Loop, n: int) -> None:
        """Compile what ``combine`` needs for n sources, unless it is there."""

    def combine(
        self, index: int, by: Loop, sources: Sequence[int], out: int, count: int, divisor: float,
        stream: int,
    ) -> None:  # fmt: skip
        """Enqueue ``out = (source op source ...) / divisor``; as reduction.combine."""

    def scale(
        self, index: int, dtype: DType, source: int, factor: Factor, out: int, count: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Enqueue ``out = source * factor`` in the dtype of sums; as reduction.scale."""

    def narrow(
        self, index: int, dtype: DType, source: int, out: int, count: int, stream: int
    ) -> None:
        """Enqueue a rounding of float32 to ``dtype``; as reduction.narrow."""

    def multiprocessors(self, index: int) -> int:
        """Return the number of a device's multiprocessors."""

    def load_collective(self, index: int, call: Collective) -> None:
        """Compile what ``collective`` needs, unless it is there."""

    def has_collective(self, index: int, call: Collective) -> bool:
        """Return whether what ``collective`` needs is compiled."""

    def collective(self, index: int, peers: Peers, call: Collective, stream: int) -> None:
        """Enqueue a rank's part of a collective by one kernel on each rank's device."""

    def export(self, index: int, memory: Memory) -> bytes:
        """Return the handle by which another process of this host opens ``allocate``'s memory."""

    def open(self, index: int, handle: bytes) -> Memory:
        """Map another process's memory on a device; it is unmapped with its last reference."""

    def find_allocation(self, address: int) -> Allocation | None:
        """Return the allocation that an address is in; None if it cannot be exported: it is
        managed, from a pool, made of mapped pieces, or another process's.
        """

    def export_allocation(self, index: int, found: Allocation) -> bytes:
        """Return the handle by which another process opens an allocation, from its base on."""

    def create_shared_event(self, index: int) -> Event:
        """Return an event that other processes of this host may wait for."""

    def export_event(self, event: Event) -> bytes:
        """Return the handle by which another process opens an event of ``create_shared_event``."""

    def open_event(self, index: int, handle: bytes) -> Event:
        """Return another process's event: a stream that waits for it waits for what the latest
        ``record_again`` before the wait stands for.
        """

    def record_again(self, index: int, stream: int, event: Event) -> None:
        """Let an event of ``create_shared_event`` be that of all being done that a stream holds so
        far.
        """

    def register(self, index: int, address: int, nbytes: int) -> object:
        """Pin memory of the host that is there already, whole pages, until the last reference to
        what this returns is gone.
        """

    def reach(self, index: int, address: int) -> int:
        """Return where a device reaches memory of the host that ``register`` has pinned."""

    def load_for_all(self, index: int, by: Loop, n: int) -> None:
        """Compile what ``combine_for_all`` needs for n sources and outputs in all."""

    def combine_for_all(
        self, index: int, by: Loop, sources: Sequence[int], outs: Sequence[int], count: int,
        divisor: float, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue what ``combine`` does, with the same result for several outputs; each may be one
        of the sources.
        """

    def has_nccl(self) -> bool:
        """Return whether NCCL is available."""

    def nccl_unique_id(self) -> bytes:
        """Return what the ranks of a new NCCL communicator share."""

    def create_nccl(self, index: int, n: int, identity: bytes, rank: int) -> NcclCommunicator:
        """Create an NCCL communicator; all of its n ranks call."""

    def nccl_group(self) -> AbstractContextManager[None]:
        """Return a context in which NCCL's messages are one operation."""


def allocate(runtime: Runtime, index: int, nbytes: int) -> Memory:
    """Allocate device memory, if need be after freeing what array libraries keep unused.

    Raises DeviceMemoryError if that is too little.
    """
    try:
        return runtime.allocate(index, nbytes)
    except DeviceMemoryError:
        runtime.free_cached(index)
    return runtime.allocate(index, nbytes)


_runtime: Runtime | None = None


def get_runtime() -> Runtime:
    """Return CUDA on this machine; raises UnsupportedError if there is none, or no CuPy."""
    global _runtime
    if _runtime is None:
        from mpicoll.cuda.cupy_runtime import CupyRuntime

        _runtime = CupyRuntime()
    return _runtime
