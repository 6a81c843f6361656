"""CUDA as the rest of mpicoll sees it: devices, their streams, events and memory.

All other code asks a `Runtime` and knows nothing of CUDA. Addresses and streams are plain numbers,
as array libraries give them. ``synchronize_device`` alone waits for a whole device.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpicoll.cuda.driver import BUFFER, EXPORTABLE, MANAGED, NBYTES, ORDINAL, START, Driver
from mpicoll.dtypes import DType, Factor
from mpicoll.errors import DeviceMemoryError, UnsupportedError
from mpicoll.kernels.device_kernels import DeviceKernels, external_stream
from mpicoll.kernels.peers import Collective, Peers
from mpicoll.kernels.reduction import Loop

__all__ = [
    "HANDLE",
    "LEGACY",
    "PER_THREAD",
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

#: Bytes of a handle by which another process opens memory, or an event.
HANDLE = 64

#: cudaErrorMemoryAllocation.
_OUT_OF_MEMORY = 2
#: cudaErrorNotReady.
_NOT_READY = 600
#: cudaHostRegisterPortable, cudaHostRegisterMapped.
_PORTABLE, _MAPPED = 1, 2


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


class CupyRuntime:
    """CUDA through CuPy; raises UnsupportedError without CuPy or without a GPU."""

    def __init__(self) -> None:
        try:
            import cupy
        except (ImportError, OSError) as error:  # OSError: CuPy cannot write to its cache
            raise UnsupportedError(
                f"arrays on a GPU need CuPy, which cannot be loaded: {error}. Install it with "
                "'pip install cupy-cuda13x[ctk]' (or cupy-cuda12x[ctk])"
            ) from error
        self._cupy, self._api = cupy, cupy.cuda.runtime
        if self._api.is_hip:
            raise UnsupportedError(
                "arrays on a GPU: CuPy is built for ROCm, which is not supported; install a CuPy "
                "that is built for CUDA"
            )
        if not cupy.cuda.is_available():
            raise UnsupportedError("arrays on a GPU: CuPy finds no GPU on this host")
        try:
            self._driver = Driver(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise UnsupportedError(
                f"arrays on a GPU need the CUDA driver's library, which cannot be loaded: {error}. "
                "Install NVIDIA's driver"
            ) from error
        self._streams: dict[int, _Handle] = {}  # by number
        self._kernels: dict[int, DeviceKernels] = {}

    def count(self) -> int:
        """Return the number of devices."""
        return int(self._api.getDeviceCount())

    def name(self, index: int) -> str:
        """Return the name of a device's model."""
        found: bytes = self._api.getDeviceProperties(index)["name"]
        return found.decode()

    def pci_bus_id(self, index: int) -> str:
        """Return the device's PCI bus id."""
        return str(self._api.deviceGetPCIBusId(index))

    def identity(self, index: int) -> str:
        """Return the device's PCI bus id, which MIG devices share, and its UUID."""
        return f"{self.pci_bus_id(index)} {self._driver.uuid(index)}"

    def driver_version(self) -> str:
        """Return the driver's and the runtime's version, and CuPy's."""
        versions = [self._api.driverGetVersion(), self._api.runtimeGetVersion()]
        driver, runtime = (f"{one // 1000}.{one % 1000 // 10}" for one in versions)
        return f"CUDA {driver} (driver), {runtime} (runtime), CuPy {self._cupy.__version__}"

    def current_device(self) -> int:
        """Return the current device, which this does not set up."""
        return int(self._api.getDevice())

    def device_of(self, address: int) -> int:
        """Return the device that the driver says the memory belongs to."""
        found = self._driver.attribute(ORDINAL, address)
        if found is None:
            raise UnsupportedError(f"the CUDA driver does not know the memory at {address:#x}")
        return found

    def use(self, index: int) -> None:
        """Make a device the calling thread's current one."""
        self._cupy.cuda.Device(index).use()

    def settle(self, index: int) -> None:
        """Make a device current and relax what captures forbid."""
        self.use(index)
        self._driver.relax_capture()

    def on(self, index: int) -> AbstractContextManager[object]:
        """Return a context in which a device's primary context is current."""
        return self._driver.on(index)

    def is_captured(self, index: int, stream: int) -> bool:
        """Call cudaStreamIsCapturing."""
        with self.on(index):
            asked = stream not in (UNKNOWN, LEGACY)
            return asked and bool(self._api.streamIsCapturing(stream))

    def check_stream(self, index: int, stream: int, where: str) -> None:
        """Raise UnsupportedError for a stream that is being captured into a graph."""
        if self.is_captured(index, stream):
            raise UnsupportedError(
                f"{where}: the current stream is being captured into a CUDA graph, and MPI cannot "
                "be a part of one; make the call outside the capture"
            )

    def current_stream(self, index: int) -> int:
        """Return CuPy's current stream on the device, whichever device is current."""
        return int(self._cupy.cuda.get_current_stream(index).ptr) or LEGACY

    @contextmanager
    def using(self, index: int, stream: int) -> Iterator[None]:
        """Make a stream CuPy's current one."""
        with self.on(index), external_stream(stream):
            yield

    def destroy_stream(self, stream: int) -> None:
        """Drop the stream, which destroys it once all that it holds is done."""
        del self._streams[stream]

    def create_stream(self, index: int) -> int:
        """Return a new non-blocking stream."""
        with self.on(index):
            made = self._api.streamCreateWithFlags(self._api.streamNonBlocking)
        self._streams[made] = _Handle(self, index, made, self._api.streamDestroy)
        return int(made)

    def record(self, index: int, stream: int) -> _Handle:
        """Record an event in the stream."""
        with self.on(index):
            made = self._api.eventCreateWithFlags(self._api.eventDisableTiming)
            event = _Handle(self, index, made, self._api.eventDestroy)
            self._api.eventRecord(made, stream)
        return event

    def wait(self, index: int, stream: int, event: Event) -> None:
        """Make the stream wait for the event."""
        assert isinstance(event, _Handle)
        with self.on(index):
            self._api.streamWaitEvent(stream, event.number)

    def is_done(self, event: Event) -> bool:
        """Query the event.

        "Not ready" stays the thread's last error in the library that CuPy calls, which its wheels
        for CUDA have to themselves; CuPy resets it only where it raises, which takes microseconds.
        """
        assert isinstance(event, _Handle)
        with self.on(event.index):
            status = int(self._api.eventQuery(event.number))
            if status not in (0, _NOT_READY):  # CuPy raises nothing here
                self._api.check_status(status)
        return status == 0

    def synchronize(self, event: Event) -> None:
        """Wait for the event; other threads run meanwhile."""
        assert isinstance(event, _Handle)
        with self.on(event.index):
            self._api.eventSynchronize(event.number)

    def synchronize_device(self, index: int) -> None:
        """Call cudaDeviceSynchronize; other threads run meanwhile."""
        with self.on(index):
            self._api.deviceSynchronize()

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Allocate by cudaMalloc."""
        with self.on(index):
            try:
                address = self._api.malloc(nbytes)
            except self._api.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                free, total = self._api.memGetInfo()
                raise DeviceMemoryError(
                    f"GPU {index} has too little memory: {nbytes >> 20} MiB are needed, "
                    f"{free >> 20} of {total >> 20} MiB are free; end groups that are not needed, "
                    "or keep less"
                ) from error
        return Memory(address, nbytes, _Handle(self, index, address, self._api.free))

    def free_cached(self, index: int) -> None:
        """Empty the caches of torch and CuPy."""
        torch = sys.modules.get("torch")
        with self.on(index):
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._cupy.get_default_memory_pool().free_all_blocks()

    def allocate_pinned(self, index: int, nbytes: int) -> Memory:
        """Allocate by cudaHostAlloc, from CuPy's pool."""
        with self.on(index):
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        return Memory(memory.ptr, nbytes, memory)

    def is_plain(self, address: int) -> bool:
        """Return whether the driver would export the memory by cudaIpcGetMemHandle."""
        attribute = self._driver.attribute
        return bool(attribute(EXPORTABLE, address)) and not attribute(MANAGED, address)

    def copy(self, index: int, into: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a cudaMemcpyAsync; the addresses tell its kind."""
        if nbytes:
            with self.on(index):
                self._api.memcpyAsync(into, source, nbytes, self._api.memcpyDefault, stream)

    def copy_strided(
        self, index: int, into: StridedMemory, source: StridedMemory, shape: Sequence[int],
        itemsize: int, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue a copy by CuPy, as unsigned integers of the elements' size."""
        cupy = self._cupy
        with self.on(index), external_stream(stream):
            arrays = []
            for address, strides in (into, source):
                # The view keeps the memory.
                memory = cupy.cuda.UnownedMemory(address, 1, self, index)
                place = cupy.cuda.MemoryPointer(memory, 0)
                kind = f"u{itemsize}" if itemsize <= 8 else "c16"
                arrays.append(cupy.ndarray(tuple(shape), kind, place, tuple(strides)))
            target, given = arrays
            target[...] = given

    def load(self, index: int, by: Loop, n: int) -> None:
        """Compile a kernel."""
        with self.on(index):
            self._kernels_of(index).load(by, n)

    def combine(
        self, index: int, by: Loop, sources: Sequence[int], out: int, count: int, divisor: float,
        stream: int,
    ) -> None:  # fmt: skip
        """Enqueue a kernel."""
        if count:
            with self.on(index):
                self._kernels_of(index).combine(by, sources, out, count, divisor, stream)

    def scale(
        self, index: int, dtype: DType, source: int, factor: Factor, out: int, count: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Enqueue a kernel."""
        if count:
            with self.on(index):
                self._kernels_of(index).scale(dtype, source, factor, out, count, stream)

    def narrow(
        self, index: int, dtype: DType, source: int, out: int, count: int, stream: int
    ) -> None:
        """Enqueue a kernel."""
        if count:
            with self.on(index):
                self._kernels_of(index).narrow(dtype, source, out, count, stream)

    def multiprocessors(self, index: int) -> int:
        """Return the number of multiprocessors."""
        return int(self._cupy.cuda.Device(index).attributes["MultiProcessorCount"])

    def load_collective(self, index: int, call: Collective) -> None:
        """Compile a kernel."""
        with self.on(index):
            self._kernels_of(index).load_collective(call)

    def has_collective(self, index: int, call: Collective) -> bool:
        """Look for a kernel."""
        return self._kernels_of(index).has_collective(call)

    def collective(self, index: int, peers: Peers, call: Collective, stream: int) -> None:
        """Enqueue a kernel."""
        with self.on(index):
            self._kernels_of(index).collective(peers, call, stream)

    def _kernels_of(self, index: int) -> DeviceKernels:
        if index not in self._kernels:
            self._kernels[index] = DeviceKernels(index)
        return self._kernels[index]

    def export(self, index: int, memory: Memory) -> bytes:
        """Return a handle of cudaIpcGetMemHandle."""
        with self.on(index):
            handle: bytes = self._api.ipcGetMemHandle(memory.address)
        return handle

    def open(self, index: int, handle: bytes) -> Memory:
        """Map memory by cudaIpcOpenMemHandle, with lazy peer access."""
        with self.on(index):
            address = self._api.ipcOpenMemHandle(handle)
        return Memory(address, 0, _Handle(self, index, address, self._api.ipcCloseMemHandle))

    def find_allocation(self, address: int) -> Allocation | None:
        """Ask the driver for the range and the buffer id."""
        exportable, managed, base, nbytes, buffer = self._driver.attributes(
            (EXPORTABLE, MANAGED, START, NBYTES, BUFFER), address
        )
        if not exportable or managed or not base:
            return None
        return Allocation(base, nbytes, buffer)

    def export_allocation(self, index: int, found: Allocation) -> bytes:
        """Return a handle of cudaIpcGetMemHandle."""
        with self.on(index):
            handle: bytes = self._api.ipcGetMemHandle(found.base)
        return handle

    def create_shared_event(self, index: int) -> _Handle:
        """Create an event with cudaEventInterprocess, which has to be without times."""
        flags = self._api.eventDisableTiming | self._api.eventInterprocess
        with self.on(index):
            made = self._api.eventCreateWithFlags(flags)
        return _Handle(self, index, made, self._api.eventDestroy)

    def export_event(self, event: Event) -> bytes:
        """Return a handle of cudaIpcGetEventHandle."""
        assert isinstance(event, _Handle)
        with self.on(event.index):
            handle: bytes = self._api.ipcGetEventHandle(event.number)
        return handle

    def open_event(self, index: int, handle: bytes) -> _Handle:
        """Open an event by cudaIpcOpenEventHandle."""
        with self.on(index):
            opened = self._api.ipcOpenEventHandle(handle)
        return _Handle(self, index, opened, self._api.eventDestroy)

    def record_again(self, index: int, stream: int, event: Event) -> None:
        """Record the event in the stream."""
        assert isinstance(event, _Handle)
        with self.on(index):
            self._api.eventRecord(event.number, stream)

    def register(self, index: int, address: int, nbytes: int) -> _Handle:
        """Pin memory by cudaHostRegister, for all devices, which reach it as well."""
        with self.on(index):
            self._api.hostRegister(address, nbytes, _PORTABLE | _MAPPED)
        return _Handle(self, index, address, self._api.hostUnregister)

    def reach(self, index: int, address: int) -> int:
        """Ask the driver: on some machines it is another address than the host's."""
        with self.on(index):
            return self._driver.device_pointer(address)

    def load_for_all(self, index: int, by: Loop, n: int) -> None:
        """Compile a kernel."""
        with self.on(index):
            self._kernels_of(index).load_for_all(by, n)

    def combine_for_all(
        self, index: int, by: Loop, sources: Sequence[int], outs: Sequence[int], count: int,
        divisor: float, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue a kernel."""
        if count:
            with self.on(index):
                self._kernels_of(index).combine_for_all(by, sources, outs, count, divisor, stream)

    def has_nccl(self) -> bool:
        """Return whether CuPy finds NCCL's library."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not there
            from cupy.cuda import nccl
        return bool(nccl.available)

    def nccl_unique_id(self) -> bytes:
        """Call ncclGetUniqueId."""
        identity: bytes = self._cupy.cuda.nccl.get_unique_id()
        return identity

    def create_nccl(self, index: int, n: int, identity: bytes, rank: int) -> NcclCommunicator:
        """Call ncclCommInitRank."""
        with self.on(index):
            comm: NcclCommunicator = self._cupy.cuda.nccl.NcclCommunicator(n, identity, rank)
        return comm

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        """Call ncclGroupStart, and ncclGroupEnd at the end."""
        self._cupy.cuda.nccl.groupStart()
        try:
            yield
        finally:
            self._cupy.cuda.nccl.groupEnd()


class _Handle:
    """A stream, an event or memory of a device: given back with its last reference.

    number: the handle, or the address. give_back: takes it, with the device current.
    """

    def __init__(
        self, runtime: CupyRuntime, index: int, number: int, give_back: Callable[[int], object]
    ) -> None:
        self.index, self.number = index, number
        self._runtime, self._give_back = runtime, give_back

    def __del__(self) -> None:
        if sys.is_finalizing():  # the driver goes as well, and takes it back
            return
        with suppress(Exception), self._runtime.on(self.index):
            self._give_back(self.number)


_runtime: Runtime | None = None


def get_runtime() -> Runtime:
    """Return CUDA on this machine; raises UnsupportedError if there is none, or no CuPy."""
    global _runtime
    if _runtime is None:
        _runtime = CupyRuntime()
    return _runtime
