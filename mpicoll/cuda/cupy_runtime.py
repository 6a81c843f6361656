"""The CUDA runtime, or ROCm's, through CuPy."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from mpicoll.cuda import hip
from mpicoll.cuda.driver import BUFFER, EXPORTABLE, MANAGED, NBYTES, ORDINAL, START, Driver
from mpicoll.cuda.runtime import (
    CUDA,
    LEGACY,
    ROCM,
    UNKNOWN,
    Allocation,
    Event,
    Memory,
    NcclCommunicator,
    StridedMemory,
)
from mpicoll.dtypes import DType, Factor
from mpicoll.errors import DeviceMemoryError, UnsupportedError
from mpicoll.kernels.device_kernels import DeviceKernels, external_stream
from mpicoll.kernels.peers import Collective, Peers
from mpicoll.kernels.reduction import Loop

__all__ = ["CupyRuntime"]

#: cudaErrorMemoryAllocation.
_OUT_OF_MEMORY = 2
#: cudaErrorNotReady.
_NOT_READY = 600
#: cudaHostRegisterPortable, cudaHostRegisterMapped.
_PORTABLE, _MAPPED = 1, 2


class CupyRuntime:
    """CUDA or ROCm through CuPy; raises UnsupportedError without CuPy, and without a GPU.

    What differs on ROCm is in hip.py, behind the same names.
    """

    def __init__(self) -> None:
        try:
            import cupy
        except (ImportError, OSError) as error:  # the latter where its cache cannot be written
            raise UnsupportedError(
                f"arrays on a GPU need CuPy, which cannot be loaded: {error}. Install it with "
                "'pip install cupy-cuda13x[ctk]' (or cupy-cuda12x[ctk], cupy-rocm-7-0)"
            ) from error
        if not cupy.cuda.is_available():
            raise UnsupportedError("arrays on a GPU: CuPy finds no GPU on this host")
        self._cupy, self._api = cupy, cupy.cuda.runtime
        self._driver: Driver | hip.Driver
        try:
            if self._api.is_hip:
                self._driver = hip.Driver(hip.load())
                self._api = hip.Api(self._api, self._driver)
            else:
                self._driver = Driver(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise UnsupportedError(
                f"arrays on a GPU need the library of {self.kind()}, for which CuPy is built, and "
                f"it cannot be loaded: {error}. Install the CuPy of your GPUs, and their driver"
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
        if self._api.is_hip:
            texts = [f"{one // 10**7}.{one // 10**5 % 100}" for one in versions]
        else:
            texts = [f"{one // 1000}.{one % 1000 // 10}" for one in versions]
        driver, here = texts
        return f"{self.kind()} {driver} (driver), {here} (runtime), CuPy {self._cupy.__version__}"

    def kind(self) -> str:
        """Return what CuPy is built for."""
        return ROCM if self._api.is_hip else CUDA

    def current_device(self) -> int:
        """Return the current device, which this does not set up."""
        return int(self._api.getDevice())

    def device_of(self, address: int) -> int:
        """Return the device that the driver says the memory belongs to."""
        found = self._driver.attribute(ORDINAL, address)
        if found is None:
            raise UnsupportedError(
                f"the driver of {self.kind()} does not know the memory at {address:#x}"
            )
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
