"""CUDA devices: their streams, events and memory. The one place that knows CUDA, through CuPy.

What is above asks a `Runtime` and knows no CUDA. Addresses and streams are plain numbers, as the
array libraries give them. Nothing here waits for a whole device.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpicoll.dtypes import DType
from mpicoll.errors import UnsupportedError
from mpicoll.kernels.device_kernels import DeviceKernels, external_stream
from mpicoll.kernels.reduction import Loop

__all__ = [
    "LEGACY",
    "UNKNOWN",
    "Crossing",
    "Event",
    "Lane",
    "Layout",
    "Memory",
    "Runtime",
    "runtime",
]


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


class Layout(NamedTuple):
    """Elements in memory: where the first is, and how many bytes lie between neighbours."""

    address: int
    strides: Sequence[int]


class Runtime(Protocol):
    """What is asked of devices. ``index`` numbers those that this process sees, from 0."""

    def count(self) -> int:
        """How many devices there are."""

    def name(self, index: int) -> str:
        """What the device is called."""

    def identity(self, index: int) -> str:
        """Tells the device from all others of its host, in every process (its PCI bus id)."""

    def driver(self) -> str:
        """Versions of the driver and of what speaks to it."""

    def device_of(self, address: int) -> int:
        """The device whose memory it is."""

    def use(self, index: int) -> None:
        """Makes a device the calling thread's current one."""

    def on(self, index: int) -> AbstractContextManager[Any]:
        """In here a device is the calling thread's current one."""

    def check(self, index: int, stream: int, where: str) -> None:
        """Raises UnsupportedError where a call cannot be ordered in a stream: it is captured."""

    def current(self, index: int) -> int:
        """CuPy's current stream of a device."""

    def stream(self, index: int) -> int:
        """A new stream, which waits for no other by itself."""

    def end_stream(self, stream: int) -> None:
        """Gives such a stream back."""

    def record(self, index: int, stream: int) -> Event:
        """The moment when all that a stream holds so far is done."""

    def wait(self, index: int, stream: int, event: Event) -> None:
        """What the stream gets from now on comes after the event, of whichever device."""

    def synchronize(self, event: Event) -> None:
        """Returns once the event has come."""

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Memory of a device, of a kind that can be exported and that every MPI can take."""

    def pinned(self, index: int, nbytes: int) -> Memory:
        """Memory of the host that devices copy from and to by themselves. What is given back may
        be had again at once: first wait for the copies.
        """

    def plain(self, address: int) -> bool:
        """The memory there is of the same kind as ``allocate``'s: neither managed nor of a pool."""

    def copy(self, index: int, into: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy between any two memories."""

    def copy_strided(
        self, index: int, into: Layout, source: Layout, shape: Sequence[int], itemsize: int,
        stream: int,
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

    def exported(self, index: int, memory: Memory) -> bytes:
        """By what another process of this host opens ``allocate``'s memory."""

    def opened(self, index: int, handle: bytes) -> Memory:
        """Another process's memory, seen from a device; closed when nobody holds it any more."""

    def has_nccl(self) -> bool:
        """NCCL is there."""

    def nccl_identity(self) -> Any:
        """What the ranks of a new communicator of NCCL share, plain values."""

    def nccl(self, index: int, n: int, identity: Any, rank: int) -> Any:
        """A communicator of NCCL, with CuPy's methods; all of its n ranks call."""

    def nccl_together(self) -> AbstractContextManager[Any]:
        """NCCL's messages in here are one operation."""


class Lane:
    """What a group has of one device: streams, and memory that calls use one after another.

    work: the stream in which things happen.
    """

    #: Bytes of a piece of scratch that is kept for later calls.
    KEPT = 64 * 1024 * 1024

    def __init__(self, cuda: Runtime, index: int) -> None:
        self.runtime = cuda
        self.index = index
        self._streams = [cuda.stream(index)]
        self.work = self._streams[0]
        self._blocks: list[Memory] = []
        self._taken = 0
        self._pinned: Memory | None = None

    @cached_property
    def to_host(self) -> int:
        """A stream for copies to the host."""
        return self._another()

    @cached_property
    def to_device(self) -> int:
        """A stream for copies to the device."""
        return self._another()

    def _another(self) -> int:
        self._streams.append(self.runtime.stream(self.index))
        return self._streams[-1]

    def begin(self) -> None:
        """A new call: the scratch of the one before is free again."""
        self._taken = 0
        self._blocks = [one for one in self._blocks if one.nbytes <= self.KEPT]

    def scratch(self, nbytes: int) -> Memory:
        """Memory of the device for the rest of the call; the work stream may use it at once."""
        place = self._taken
        self._taken += 1
        if place == len(self._blocks):
            self._blocks.append(self.runtime.allocate(self.index, max(nbytes, 1)))
        elif self._blocks[place].nbytes < nbytes:
            # Giving memory back waits until nothing uses it any more.
            self._blocks[place] = self.runtime.allocate(self.index, nbytes)
        return self._blocks[place]

    def pinned(self, nbytes: int) -> Memory:
        """Pinned memory for the rest of the call; there is one such piece."""
        if self._pinned is None or self._pinned.nbytes < nbytes:
            if self._pinned is not None:
                self._settle_all()
            self._pinned = None  # before there is another
            self._pinned = self.runtime.pinned(self.index, max(nbytes, 1))
        return self._pinned

    def after(self, later: int, earlier: int) -> None:
        """What one stream of the device gets from now on comes after what another holds so far."""
        self.runtime.wait(self.index, later, self.runtime.record(self.index, earlier))

    def follow(self, other: Lane) -> None:
        """Work here, from now on, comes after what the other lane's work stream holds so far."""
        event = self.runtime.record(other.index, other.work)
        self.runtime.wait(self.index, self.work, event)

    def settle(self, stream: int) -> None:
        """Returns when all is done that a stream of this lane holds so far."""
        self.runtime.synchronize(self.runtime.record(self.index, stream))

    def _settle_all(self) -> None:
        for stream in self._streams:
            self.settle(stream)

    def leave_behind(self) -> None:
        """After an error: memory that MPI or copies may still use is not used for anything else."""
        _left_behind.append((self._blocks, self._pinned))
        self._blocks, self._pinned = [], None

    def close(self) -> None:
        """Gives everything back, when nothing uses it any more."""
        self._settle_all()
        self._blocks, self._pinned = [], None
        for stream in self._streams:
            self.runtime.end_stream(stream)


_left_behind: list[Any] = []


class Crossing:
    """The order of one call among what the caller's streams hold.

    The call comes after what they hold when it is made, and before what they get once it has
    ended. Made on the caller's thread; the rest may happen on another.

    asynchronous: the call ends when all is done, for nobody knows the streams that are to see it.
    """

    def __init__(
        self, cuda: Runtime, index: int, streams: Iterable[int], asynchronous: bool = False
    ) -> None:
        self._runtime = cuda
        self.index = index
        self._streams = tuple(streams)
        self.asynchronous = asynchronous or UNKNOWN in self._streams
        self._before = [cuda.record(index, one or LEGACY) for one in self._streams]

    def enter(self, lane: Lane) -> None:
        """From here on the lane may work."""
        for event in self._before:
            self._runtime.wait(lane.index, lane.work, event)

    def leave(self, lane: Lane) -> None:
        """What the caller's streams get from now on finds the result."""
        if self.asynchronous:
            lane.settle(lane.work)
            return
        done = self._runtime.record(lane.index, lane.work)
        for stream in self._streams:
            self._runtime.wait(self.index, stream, done)


# --- CUDA ---------------------------------------------------------------------------------------

_runtime: Runtime | None = None


def runtime() -> Runtime:
    """CUDA, on this machine; raises UnsupportedError where there is none, or no CuPy."""
    global _runtime
    if _runtime is None:
        _runtime = Cuda()
    return _runtime


class _Moment:
    """An event of CuPy, which is destroyed when nobody holds it, and its device."""

    def __init__(self, index: int, event: Any) -> None:
        self.index = index
        self.event = event


#: cuPointerGetAttribute's CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE and ..._IS_MANAGED.
_EXPORTABLE, _MANAGED = 10, 8


class Cuda:
    """CUDA through CuPy; raises UnsupportedError without CuPy, and without a GPU."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise UnsupportedError(
                f"arrays on a GPU need CuPy, which cannot be loaded: {error}. Install it with "
                "'pip install mpicoll[cuda13]' (or [cuda12])"
            ) from error
        if not cupy.cuda.is_available():
            raise UnsupportedError("arrays on a GPU: CuPy finds no GPU on this host")
        self._cupy = cupy
        self._api = cupy.cuda.runtime
        self._streams: dict[int, Any] = {}  # ours, by their numbers: CuPy ends those nobody holds
        self._kernels: dict[int, DeviceKernels] = {}
        self._driver = ctypes.CDLL("libcuda.so.1")

    def count(self) -> int:
        """How many devices there are."""
        return int(self._api.getDeviceCount())

    def name(self, index: int) -> str:
        """What the device is called."""
        found: bytes = self._api.getDeviceProperties(index)["name"]
        return found.decode()

    def identity(self, index: int) -> str:
        """The device's PCI bus id."""
        return str(self._api.deviceGetPCIBusId(index))

    def driver(self) -> str:
        """Versions of the driver's and of the runtime's CUDA, and of CuPy."""
        versions = [self._api.driverGetVersion(), self._api.runtimeGetVersion()]
        driver, here = (f"{one // 1000}.{one % 1000 // 10}" for one in versions)
        return f"CUDA {driver} (driver), {here} (runtime), CuPy {self._cupy.__version__}"

    def device_of(self, address: int) -> int:
        """The device whose memory it is, as the driver knows."""
        return int(self._api.pointerGetAttributes(address).device)

    def use(self, index: int) -> None:
        """Makes a device the calling thread's current one."""
        self._cupy.cuda.Device(index).use()

    def on(self, index: int) -> AbstractContextManager[Any]:
        """In here a device is the calling thread's current one; on our own threads for longer."""
        current: Any = self._cupy.cuda.Device(index)
        if threading.current_thread().name.startswith("mpicoll-"):
            # Going back to device 0, where threads begin, would set that up for every rank.
            current.use()
            return nullcontext()
        return current  # type: ignore[no-any-return]

    def check(self, index: int, stream: int, where: str) -> None:
        """Raises UnsupportedError for a stream that a graph is being captured from."""
        with self.on(index):
            captured = stream not in (UNKNOWN, LEGACY) and self._api.streamIsCapturing(stream)
        if captured:
            raise UnsupportedError(
                f"{where}: the current stream is being captured into a CUDA graph, and MPI cannot "
                "be a part of one; make the call outside the capture"
            )

    def current(self, index: int) -> int:
        """CuPy's current stream of the device, whichever device is current."""
        return int(self._cupy.cuda.get_current_stream(index).ptr) or LEGACY

    def end_stream(self, stream: int) -> None:
        """Lets CuPy destroy the stream."""
        del self._streams[stream]

    def stream(self, index: int) -> int:
        """A stream that does not wait for the default stream."""
        with self.on(index):
            made = self._cupy.cuda.Stream(non_blocking=True)
        self._streams[made.ptr] = made
        return int(made.ptr)

    def record(self, index: int, stream: int) -> _Moment:
        """An event, recorded in the stream."""
        with self.on(index):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._api.eventRecord(event.ptr, stream)
        return _Moment(index, event)

    def wait(self, index: int, stream: int, event: Event) -> None:
        """Makes the stream wait."""
        assert isinstance(event, _Moment)
        with self.on(index):
            self._api.streamWaitEvent(stream, event.event.ptr)

    def synchronize(self, event: Event) -> None:
        """Waits for the event; other threads run meanwhile."""
        assert isinstance(event, _Moment)
        event.event.synchronize()

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Memory by cudaMalloc."""
        with self.on(index):
            memory = self._cupy.cuda.Memory(nbytes)
        return Memory(memory.ptr, nbytes, memory)

    def pinned(self, index: int, nbytes: int) -> Memory:
        """Memory by cudaHostAlloc, of CuPy's pool."""
        with self.on(index):
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        return Memory(memory.ptr, nbytes, memory)

    def plain(self, address: int) -> bool:
        """Whether the driver would export the memory by a handle of cudaIpcGetMemHandle."""
        return self._attribute(_EXPORTABLE, address) and not self._attribute(_MANAGED, address)

    def _attribute(self, which: int, address: int) -> bool:
        value = ctypes.c_uint(0)
        failed = self._driver.cuPointerGetAttribute(
            ctypes.byref(value), which, ctypes.c_uint64(address)
        )
        return not failed and bool(value.value)

    def copy(self, index: int, into: int, source: int, nbytes: int, stream: int) -> None:
        """A cudaMemcpyAsync of whatever kind the addresses tell."""
        if nbytes:
            with self.on(index):
                self._api.memcpyAsync(into, source, nbytes, self._api.memcpyDefault, stream)

    def copy_strided(
        self, index: int, into: Layout, source: Layout, shape: Sequence[int], itemsize: int,
        stream: int,
    ) -> None:  # fmt: skip
        """A copy by CuPy, of unsigned integers of the elements' size, which have no values."""
        cupy = self._cupy
        with self.on(index), external_stream(stream):
            arrays = []
            for address, strides in (into, source):
                # Whoever made the view of the memory holds it.
                memory = cupy.cuda.UnownedMemory(address, 1, self, index)
                place = cupy.cuda.MemoryPointer(memory, 0)
                kind = f"u{itemsize}" if itemsize <= 8 else "c16"
                arrays.append(cupy.ndarray(tuple(shape), kind, place, tuple(strides)))
            target, given = arrays
            target[...] = given

    def combine(
        self, index: int, by: Loop, sources: Sequence[int], out: int, count: int, divisor: float,
        stream: int,
    ) -> None:  # fmt: skip
        """A kernel."""
        if count:
            self._kernels_of(index).combine(by, sources, out, count, divisor, stream)

    def scale(
        self, index: int, dtype: DType, source: int, factor: Any, out: int, count: int, stream: int
    ) -> None:
        """A kernel."""
        if count:
            self._kernels_of(index).scale(dtype, source, factor, out, count, stream)

    def narrow(
        self, index: int, dtype: DType, source: int, out: int, count: int, stream: int
    ) -> None:
        """A kernel."""
        if count:
            self._kernels_of(index).narrow(dtype, source, out, count, stream)

    def _kernels_of(self, index: int) -> DeviceKernels:
        if index not in self._kernels:
            self._kernels[index] = DeviceKernels(index)
        return self._kernels[index]

    def exported(self, index: int, memory: Memory) -> bytes:
        """A handle of cudaIpcGetMemHandle."""
        with self.on(index):
            handle: bytes = self._api.ipcGetMemHandle(memory.address)
        return handle

    def opened(self, index: int, handle: bytes) -> Memory:
        """The memory behind a handle, by cudaIpcOpenMemHandle with lazy peer access."""
        with self.on(index):
            address = self._api.ipcOpenMemHandle(handle)
        return Memory(address, 0, _Opened(self, index, address))

    def has_nccl(self) -> bool:
        """CuPy finds NCCL's library."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not there
            from cupy.cuda import nccl
        return bool(nccl.available)

    def nccl_identity(self) -> Any:
        """ncclGetUniqueId."""
        return self._cupy.cuda.nccl.get_unique_id()

    def nccl(self, index: int, n: int, identity: Any, rank: int) -> Any:
        """ncclCommInitRank."""
        with self.on(index):
            return self._cupy.cuda.nccl.NcclCommunicator(n, identity, rank)

    @contextmanager
    def nccl_together(self) -> Iterator[None]:
        """Between ncclGroupStart and ncclGroupEnd."""
        self._cupy.cuda.nccl.groupStart()
        try:
            yield
        finally:
            self._cupy.cuda.nccl.groupEnd()


class _Opened:
    """Closes another process's memory with its last holder."""

    def __init__(self, cuda: Cuda, index: int, address: int) -> None:
        self._cuda, self._index, self._address = cuda, index, address

    def __del__(self) -> None:
        if sys.is_finalizing():  # the driver goes as well, and closes it
            return
        with suppress(Exception), self._cuda.on(self._index):
            self._cuda._api.ipcCloseMemHandle(self._address)
