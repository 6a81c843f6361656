"""CUDA through CuPy: devices, streams, events and memory.

All other code uses a `Runtime`, without any CUDA-specific calls. The tests replace it. ``index`` is
the number of a device that this process sees. Addresses and streams are plain numbers, as array
libraries return them. Only ``synchronize_device`` waits for a whole device.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from mpicoll.cuda.driver import BUFFER, EXPORTABLE, MANAGED, NBYTES, ORDINAL, START, Driver
from mpicoll.dtypes import DType, Factor
from mpicoll.errors import DeviceMemoryError, UnsupportedError
from mpicoll.kernels.device_kernels import DeviceKernels, external_stream
from mpicoll.kernels.peers import Collective, Peers
from mpicoll.kernels.reduction import Loop

#: Stream numbers: CUDA's legacy default stream, which is ordered with all other streams except
#: non-blocking ones; the per-thread default stream; and a stream that the array's library does not
#: name.
LEGACY, PER_THREAD, UNKNOWN = 1, 2, 0

#: Size in bytes of an IPC handle of memory or of an event.
HANDLE_BYTES = 64

#: cudaErrorMemoryAllocation.
_OUT_OF_MEMORY = 2
#: cudaErrorNotReady.
_NOT_READY = 600
#: cudaHostRegisterPortable, cudaHostRegisterMapped.
_PORTABLE, _MAPPED = 1, 2


class Memory:
    """Memory that the runtime has allocated or mapped; freed with its last reference.

    owner: object that frees the memory.
    """

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    def on_host(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes as an array that keeps the memory alive; host memory only."""
        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"data": data, "shape": (self.nbytes,), "typestr": "|u1", "version": 3}


class StridedMemory(NamedTuple):
    """Elements in memory: the address of the first, and the strides in bytes."""

    address: int
    strides: Sequence[int]


class Allocation(NamedTuple):
    """An allocation of memory, of which an array may be a part."""

    #: Its first address and size.
    base: int
    nbytes: int
    #: The driver's id, which no other allocation of the process ever gets; a later allocation may
    #: have the same address.
    buffer: int


def allocate(runtime: Runtime, index: int, nbytes: int) -> Memory:
    """Allocate device memory; if it is exhausted, free the caches of array libraries and retry.

    Raises DeviceMemoryError if that is not enough.
    """
    try:
        return runtime.allocate(index, nbytes)
    except DeviceMemoryError:
        runtime.free_cached(index)
    return runtime.allocate(index, nbytes)


class _Handle:
    """A stream or an event of a device; released with its last reference.

    number: the handle. give_back: releases it, with the device current.
    """

    def __init__(
        self, runtime: Runtime, index: int, number: int, give_back: Callable[[int], object]
    ) -> None:
        self.index, self.number = index, number
        self._runtime, self._give_back = runtime, give_back

    def __del__(self) -> None:
        if sys.is_finalizing():  # the driver releases it at exit
            return
        with suppress(Exception), self._runtime.on(self.index):
            self._release()

    def _release(self) -> None:
        self._give_back(self.number)


Event = _Handle


class _HeldMemory(_Handle):
    """Memory of a device, by its address. The garbage collector may release it on a thread that
    captures a graph, which the release must not disturb.
    """

    def _release(self) -> None:
        with self._runtime.relaxed():
            self._give_back(self.number)


class Runtime:
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
        """Return the PCI bus id of the GPU that the device is, or is a part of (MIG)."""
        return str(self._api.deviceGetPCIBusId(index))

    def identity(self, index: int) -> str:
        """Return a name of the device that is the same in every process of its host."""
        return f"{self.pci_bus_id(index)} {self._driver.uuid(index)}"

    def driver_version(self) -> str:
        """Return the versions of the driver and of the libraries above it, as text."""
        versions = self._api.driverGetVersion(), self._api.runtimeGetVersion()
        driver, runtime = (f"{one // 1000}.{one % 1000 // 10}" for one in versions)
        return f"CUDA {driver} (driver), {runtime} (runtime), CuPy {self._cupy.__version__}"

    def current_device(self) -> int:
        """Return the calling thread's current device."""
        return int(self._api.getDevice())

    def device_of(self, address: int) -> int:
        """Return the device that the memory belongs to."""
        found = self._driver.attribute(ORDINAL, address)
        if found is None:
            raise UnsupportedError(f"the CUDA driver does not know the memory at {address:#x}")
        return found

    def use(self, index: int) -> None:
        """Make a device the calling thread's current one."""
        self._cupy.cuda.Device(index).use()

    def settle(self, index: int) -> None:
        """Make a device current on the calling thread, which belongs to mpicoll, and permanently
        keep the thread's calls from disturbing graph captures of other threads.
        """
        self.use(index)
        self._driver.relax_capture()

    def relaxed(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread's calls do not disturb graph captures."""
        return self._driver.relaxed()

    def on(self, index: int) -> AbstractContextManager[object]:
        """Return a context in which a device is the calling thread's current one.

        Leaving it restores the previous state, without initialising devices that the thread did not
        use.
        """
        return self._driver.on(index)

    def is_captured(self, index: int, stream: int) -> bool:
        """Return whether a stream is being captured into a graph."""
        with self.on(index):
            asked = stream not in (UNKNOWN, LEGACY)
            return asked and bool(self._api.streamIsCapturing(stream))

    def check_stream(self, index: int, stream: int, where: str) -> None:
        """Raise UnsupportedError if a stream is captured: a call cannot be ordered in it."""
        if self.is_captured(index, stream):
            raise UnsupportedError(
                f"{where}: the current stream is being captured into a CUDA graph, and MPI cannot "
                "be a part of one; make the call outside the capture"
            )

    def current_stream(self, index: int) -> int:
        """Return CuPy's current stream on a device."""
        return int(self._cupy.cuda.get_current_stream(index).ptr) or LEGACY

    @contextmanager
    def using(self, index: int, stream: int) -> Iterator[None]:
        """Return a context in which a stream is CuPy's current one on a device.

        Leaving it restores the previous stream, also if Stream.use() has set it. CuPy's own context
        would restore the stream of an outer ``with``.
        """
        before = self._cupy.cuda.get_current_stream(index)
        try:
            with self.on(index), external_stream(stream):
                yield
        finally:
            with self.on(index):
                before.use()

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of ``create_stream`` once its work is done."""
        del self._streams[stream]

    def create_stream(self, index: int) -> int:
        """Return a new non-blocking stream."""
        with self.on(index):
            made = self._api.streamCreateWithFlags(self._api.streamNonBlocking)
        self._streams[made] = _Handle(self, index, made, self._api.streamDestroy)
        return int(made)

    def record(self, index: int, stream: int) -> Event:
        """Return an event for the present work of a stream."""
        with self.on(index):
            made = self._api.eventCreateWithFlags(self._api.eventDisableTiming)
            event = _Handle(self, index, made, self._api.eventDestroy)
            self._api.eventRecord(made, stream)
        return event

    def wait(self, index: int, stream: int, event: Event) -> None:
        """Make later work of a stream wait for an event of any device."""
        with self.on(index):
            self._api.streamWaitEvent(stream, event.number)

    def is_done(self, event: Event) -> bool:
        """Return whether an event has completed."""
        # "Not ready" remains the thread's last error in the runtime library that CuPy calls, and
        # that CuPy's CUDA wheels do not share. CuPy clears it only when it raises, which takes
        # microseconds.
        with self.on(event.index):
            status = int(self._api.eventQuery(event.number))
            if status not in (0, _NOT_READY):  # CuPy does not raise here
                self._api.check_status(status)
        return status == 0

    def synchronize(self, event: Event) -> None:
        """Block until an event has completed, without the GIL."""
        with self.on(event.index):
            self._api.eventSynchronize(event.number)

    def synchronize_device(self, index: int) -> None:
        """Block, without the GIL, until the present work of this process on a device is done."""
        with self.on(index):
            self._api.deviceSynchronize()

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Allocate device memory that can be exported and that every MPI accepts.

        Raises DeviceMemoryError if the device is out of memory.
        """
        with self.on(index):
            try:
                address = self._api.malloc(nbytes)
            except self._api.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                free, total = self._api.memGetInfo()
                raise DeviceMemoryError(
                    f"GPU {index} has too little memory: {nbytes >> 20} MiB are needed, "
                    f"{free >> 20} of {total >> 20} MiB are free; destroy unused groups or free "
                    "memory"
                ) from error
        return Memory(address, nbytes, _HeldMemory(self, index, address, self._api.free))

    def free_cached(self, index: int) -> None:
        """Free unused memory in the caches of array libraries."""
        torch = sys.modules.get("torch")
        with self.on(index):
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._cupy.get_default_memory_pool().free_all_blocks()

    def allocate_pinned(self, index: int, nbytes: int) -> Memory:
        """Allocate pinned host memory.

        Freed memory may be reused at once: wait for copies before freeing it.
        """
        with self.on(index):
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        return Memory(memory.ptr, nbytes, memory)

    def is_plain(self, address: int) -> bool:
        """Return whether memory, as that of ``allocate``, is neither managed nor of a CUDA pool."""
        attribute = self._driver.attribute
        return bool(attribute(EXPORTABLE, address)) and not attribute(MANAGED, address)

    def copy(self, index: int, into: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two memories."""
        if nbytes:
            with self.on(index):
                self._api.memcpyAsync(into, source, nbytes, self._api.memcpyDefault, stream)

    def copy_strided(
        self, index: int, into: StridedMemory, source: StridedMemory, shape: Sequence[int],
        itemsize: int, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue a copy of elements between two memories of one device."""
        cupy = self._cupy
        with self.using(index, stream):
            arrays = []
            for address, strides in (into, source):
                # The view keeps the memory alive.
                memory = cupy.cuda.UnownedMemory(address, 1, self, index)
                place = cupy.cuda.MemoryPointer(memory, 0)
                kind = f"u{itemsize}" if itemsize <= 8 else "c16"
                arrays.append(cupy.ndarray(tuple(shape), kind, place, tuple(strides)))
            arrays[0][...] = arrays[1]

    def load(self, index: int, by: Loop, n: int) -> None:
        """Compile the kernel of ``combine`` for n sources and outputs, unless it is compiled."""
        with self.on(index):
            self._kernels_of(index).load(by, n)

    def combine(
        self, index: int, by: Loop, sources: Sequence[int], outs: Sequence[int], count: int,
        divisor: float, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue ``out = (source op ...) / divisor`` for each output; see DeviceKernels."""
        if count:
            with self.on(index):
                self._kernels_of(index).combine(by, sources, outs, count, divisor, stream)

    def scale(
        self, index: int, dtype: DType, source: int, factor: Factor, out: int, count: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Enqueue ``out = source * factor`` in the dtype of sums; see reduction.scale."""
        if count:
            with self.on(index):
                self._kernels_of(index).scale(dtype, source, factor, out, count, stream)

    def narrow(
        self, index: int, dtype: DType, source: int, out: int, count: int, stream: int
    ) -> None:
        """Enqueue the rounding of float32 to ``dtype``; see reduction.narrow."""
        if count:
            with self.on(index):
                self._kernels_of(index).narrow(dtype, source, out, count, stream)

    def multiprocessors(self, index: int) -> int:
        """Return the number of a device's multiprocessors."""
        return int(self._cupy.cuda.Device(index).attributes["MultiProcessorCount"])

    def load_collective(self, index: int, call: Collective) -> None:
        """Compile the kernel that ``collective`` runs for a call, unless it is compiled."""
        with self.on(index):
            self._kernels_of(index).load_collective(call)

    def has_collective(self, index: int, call: Collective) -> bool:
        """Return whether the kernel that ``collective`` runs for a call is compiled."""
        return self._kernels_of(index).has_collective(call)

    def collective(self, index: int, peers: Peers, call: Collective, stream: int) -> None:
        """Enqueue this rank's kernel of a collective. Each rank runs one such kernel on its GPU."""
        with self.on(index):
            self._kernels_of(index).collective(peers, call, stream)

    def _kernels_of(self, index: int) -> DeviceKernels:
        if index not in self._kernels:
            self._kernels[index] = DeviceKernels(index, self._driver.load_kernel)
        return self._kernels[index]

    def export(self, index: int, memory: Memory) -> bytes:
        """Return the IPC handle of memory of ``allocate``."""
        with self.on(index):
            handle: bytes = self._api.ipcGetMemHandle(memory.address)
        return handle

    def open(self, index: int, handle: bytes) -> Memory:
        """Map another process's memory on a device; it is unmapped with its last reference."""
        with self.on(index):
            address = self._api.ipcOpenMemHandle(handle)
        return Memory(address, 0, _HeldMemory(self, index, address, self._api.ipcCloseMemHandle))

    def find_allocation(self, address: int) -> Allocation | None:
        """Return the allocation that contains an address; None if it cannot be exported: it is
        managed, from a CUDA pool, made of mapped pieces, or another process's.
        """
        exportable, managed, base, nbytes, buffer = self._driver.attributes(
            (EXPORTABLE, MANAGED, START, NBYTES, BUFFER), address
        )
        if not exportable or managed or not base:
            return None
        return Allocation(base, nbytes, buffer)

    def export_allocation(self, index: int, found: Allocation) -> bytes:
        """Return the IPC handle of an allocation, from its base on."""
        with self.on(index):
            handle: bytes = self._api.ipcGetMemHandle(found.base)
        return handle

    def create_shared_event(self, index: int) -> Event:
        """Return an event that other processes of this host can open."""
        flags = self._api.eventDisableTiming | self._api.eventInterprocess
        with self.on(index):
            made = self._api.eventCreateWithFlags(flags)
        return _Handle(self, index, made, self._api.eventDestroy)

    def export_event(self, event: Event) -> bytes:
        """Return the IPC handle of an event of ``create_shared_event``."""
        with self.on(event.index):
            handle: bytes = self._api.ipcGetEventHandle(event.number)
        return handle

    def open_event(self, index: int, handle: bytes) -> Event:
        """Return another process's event. A stream that waits for it waits for the latest
        ``record_again`` before the wait.
        """
        with self.on(index):
            opened = self._api.ipcOpenEventHandle(handle)
        return _Handle(self, index, opened, self._api.eventDestroy)

    def record_again(self, index: int, stream: int, event: Event) -> None:
        """Record an event of ``create_shared_event`` after the present work of a stream."""
        with self.on(index):
            self._api.eventRecord(event.number, stream)

    def register(self, index: int, address: int, nbytes: int) -> object:
        """Pin whole pages of host memory, until the returned object is deleted."""
        with self.on(index):
            self._api.hostRegister(address, nbytes, _PORTABLE | _MAPPED)
        return _HeldMemory(self, index, address, self._api.hostUnregister)

    def reach(self, index: int, address: int) -> int:
        """Return the address on a device of host memory that ``register`` has pinned."""
        with self.on(index):
            return self._driver.device_pointer(address)

    def has_nccl(self) -> bool:
        """Return whether NCCL is available."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if NCCL is missing
            from cupy.cuda import nccl
        return bool(nccl.available)

    def nccl_unique_id(self) -> bytes:
        """Return the unique id for the ranks of a new NCCL communicator."""
        return bytes(self._cupy.cuda.nccl.get_unique_id())

    def create_nccl(self, index: int, n: int, identity: bytes, rank: int) -> Any:
        """Create an NCCL communicator; all of its n ranks call."""
        with self.on(index):
            return self._cupy.cuda.nccl.NcclCommunicator(n, identity, rank)

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        """Return a context for ncclGroupStart and ncclGroupEnd."""
        self._cupy.cuda.nccl.groupStart()
        try:
            yield
        finally:
            self._cupy.cuda.nccl.groupEnd()


_runtime: Runtime | None = None


def get_runtime() -> Runtime:
    """Return the CUDA runtime; raises UnsupportedError without a GPU or without CuPy."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime()
    return _runtime
