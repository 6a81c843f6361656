"""CUDA as the rest of mpicoll sees it: devices, their streams, events and memory.

What is above asks a `Runtime` and knows no CUDA. Addresses and streams are plain numbers, as the
array libraries give them. Nothing here waits for a whole device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpicoll.dtypes import DType
from mpicoll.kernels.reduction import Loop

__all__ = ["LEGACY", "UNKNOWN", "Event", "Memory", "Runtime", "StridedMemory", "get_runtime"]


#: The stream that waits for all others and that all others wait for, but for those made not to;
#: and no stream: its owner does not say which.
LEGACY, UNKNOWN = 1, 0


class Memory:
    """Memory that was asked for here; it is given back when nobody holds it any more.

    address: where it is.
    nbytes:  how much of it there is.
    owner:   what holds it.
    """

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    def on_host(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes as an array, which holds the memory; for memory of the host only."""
        return np.asarray(_OnHost(self))


class _OnHost:
    """Offers memory to NumPy, which holds it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "data": (memory.address, False),
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Event(Protocol):
    """A moment in a stream."""


class StridedMemory(NamedTuple):
    """Elements in memory: where the first is, and how many bytes lie between neighbours."""

    address: int
    strides: Sequence[int]


class Runtime(Protocol):
    """What is asked of devices. ``index`` numbers those that this process sees, from 0."""

    def count(self) -> int:
        """How many devices there are."""

    def name(self, index: int) -> str:
        """What the device is called."""

    def pci_bus_id(self, index: int) -> str:
        """Tells the device from all others of its host, in every process (its PCI bus id)."""

    def driver_version(self) -> str:
        """Versions of the driver and of what speaks to it."""

    def device_of(self, address: int) -> int:
        """The device whose memory it is."""

    def use(self, index: int) -> None:
        """Makes a device the calling thread's current one."""

    def on(self, index: int) -> AbstractContextManager[Any]:
        """In here a device is the calling thread's current one."""

    def check_stream(self, index: int, stream: int, where: str) -> None:
        """Raises UnsupportedError where a call cannot be ordered in a stream: it is captured."""

    def current_stream(self, index: int) -> int:
        """CuPy's current stream of a device."""

    def create_stream(self, index: int) -> int:
        """A new stream, which waits for no other by itself."""

    def destroy_stream(self, stream: int) -> None:
        """Gives such a stream back."""

    def record(self, index: int, stream: int) -> Event:
        """The moment when all that a stream holds so far is done."""

    def wait(self, index: int, stream: int, event: Event) -> None:
        """What the stream gets from now on comes after the event, of whichever device."""

    def synchronize(self, event: Event) -> None:
        """Returns once the event has come."""

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Memory of a device, of a kind that can be exported and that every MPI can take."""

    def allocate_pinned(self, index: int, nbytes: int) -> Memory:
        """Memory of the host that devices copy from and to by themselves. What is given back may
        be had again at once: first wait for the copies.
        """

    def is_plain(self, address: int) -> bool:
        """The memory there is of the same kind as ``allocate``'s: neither managed nor of a pool."""

    def copy(self, index: int, into: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy between any two memories."""

    def copy_strided(
        self, index: int, into: StridedMemory, source: StridedMemory, shape: Sequence[int],
        itemsize: int, stream: int,
    ) -> None:  # fmt: skip
        """Enqueues a copy of elements between two memories of one device."""

    def combine(
        self, index: int, by: Loop, sources: Sequence[int], out: int, count: int, divisor: float,
        stream: int,
    ) -> None:  # fmt: skip
        """Enqueues ``out = (source op source ...) / divisor``; as reduction.combine."""

    def scale(
        self, index: int, dtype: DType, source: int, factor: Any, out: int, count: int, stream: int
    ) -> None:
        """Enqueues ``out = source * factor`` in the dtype that sums are in; as reduction.scale."""

    def narrow(
        self, index: int, dtype: DType, source: int, out: int, count: int, stream: int
    ) -> None:
        """Enqueues a rounding of float32 to ``dtype``; as reduction.narrow."""

    def export(self, index: int, memory: Memory) -> bytes:
        """By what another process of this host opens ``allocate``'s memory."""

    def open(self, index: int, handle: bytes) -> Memory:
        """Another process's memory, seen from a device; closed when nobody holds it any more."""

    def has_nccl(self) -> bool:
        """NCCL is there."""

    def nccl_unique_id(self) -> Any:
        """What the ranks of a new communicator of NCCL share, plain values."""

    def create_nccl(self, index: int, n: int, identity: Any, rank: int) -> Any:
        """A communicator of NCCL, with CuPy's methods; all of its n ranks call."""

    def nccl_group(self) -> AbstractContextManager[Any]:
        """NCCL's messages in here are one operation."""


_runtime: Runtime | None = None


def get_runtime() -> Runtime:
    """CUDA, on this machine; raises UnsupportedError where there is none, or no CuPy."""
    global _runtime
    if _runtime is None:
        from mpicoll.cuda.cupy_runtime import CupyRuntime

        _runtime = CupyRuntime()
    return _runtime
