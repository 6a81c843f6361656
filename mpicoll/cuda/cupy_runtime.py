"""The CUDA runtime, through CuPy."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from mpicoll.cuda.runtime import LEGACY, UNKNOWN, Event, Memory, StridedMemory
from mpicoll.dtypes import DType
from mpicoll.errors import UnsupportedError
from mpicoll.kernels.device_kernels import DeviceKernels, external
from mpicoll.kernels.reduction import Loop

__all__ = ["CupyRuntime"]


class _CupyEvent:
    """An event of CuPy, which is destroyed when nobody holds it, and its device."""

    def __init__(self, index: int, event: Any) -> None:
        self.index = index
        self.event = event


#: cuPointerGetAttribute's CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE and ..._IS_MANAGED.
_EXPORTABLE, _MANAGED = 10, 8


class CupyRuntime:
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

    def pci_bus_id(self, index: int) -> str:
        """The device's PCI bus id."""
        return str(self._api.deviceGetPCIBusId(index))

    def driver_version(self) -> str:
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

    def check_stream(self, index: int, stream: int, where: str) -> None:
        """Raises UnsupportedError for a stream that a graph is being captured from."""
        with self.on(index):
            captured = stream not in (UNKNOWN, LEGACY) and self._api.streamIsCapturing(stream)
        if captured:
            raise UnsupportedError(
                f"{where}: the current stream is being captured into a CUDA graph, and MPI cannot "
                "be a part of one; make the call outside the capture"
            )

    def current_stream(self, index: int) -> int:
        """CuPy's current stream of the device, whichever device is current."""
        return int(self._cupy.cuda.get_current_stream(index).ptr) or LEGACY

    def destroy_stream(self, stream: int) -> None:
        """Lets CuPy destroy the stream."""
        del self._streams[stream]

    def create_stream(self, index: int) -> int:
        """A stream that does not wait for the default stream."""
        with self.on(index):
            made = self._cupy.cuda.Stream(non_blocking=True)
        self._streams[made.ptr] = made
        return int(made.ptr)

    def record(self, index: int, stream: int) -> _CupyEvent:
        """An event, recorded in the stream."""
        with self.on(index):
            event = self._cupy.cuda.Event(disable_timing=True)
            self._api.eventRecord(event.ptr, stream)
        return _CupyEvent(index, event)

    def wait(self, index: int, stream: int, event: Event) -> None:
        """Makes the stream wait."""
        assert isinstance(event, _CupyEvent)
        with self.on(index):
            self._api.streamWaitEvent(stream, event.event.ptr)

    def synchronize(self, event: Event) -> None:
        """Waits for the event; other threads run meanwhile."""
        assert isinstance(event, _CupyEvent)
        event.event.synchronize()

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Memory by cudaMalloc."""
        with self.on(index):
            memory = self._cupy.cuda.Memory(nbytes)
        return Memory(memory.ptr, nbytes, memory)

    def allocate_pinned(self, index: int, nbytes: int) -> Memory:
        """Memory by cudaHostAlloc, of CuPy's pool."""
        with self.on(index):
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        return Memory(memory.ptr, nbytes, memory)

    def is_plain(self, address: int) -> bool:
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
        self, index: int, into: StridedMemory, source: StridedMemory, shape: Sequence[int],
        itemsize: int, stream: int,
    ) -> None:  # fmt: skip
        """A copy by CuPy, of unsigned integers of the elements' size, which have no values."""
        cupy = self._cupy
        with self.on(index), external(stream):
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

    def export(self, index: int, memory: Memory) -> bytes:
        """A handle of cudaIpcGetMemHandle."""
        with self.on(index):
            handle: bytes = self._api.ipcGetMemHandle(memory.address)
        return handle

    def open(self, index: int, handle: bytes) -> Memory:
        """The memory behind a handle, by cudaIpcOpenMemHandle with lazy peer access."""
        with self.on(index):
            address = self._api.ipcOpenMemHandle(handle)
        return Memory(address, 0, _MappedMemory(self, index, address))

    def has_nccl(self) -> bool:
        """CuPy finds NCCL's library."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not there
            from cupy.cuda import nccl
        return bool(nccl.available)

    def nccl_unique_id(self) -> Any:
        """ncclGetUniqueId."""
        return self._cupy.cuda.nccl.get_unique_id()

    def create_nccl(self, index: int, n: int, identity: Any, rank: int) -> Any:
        """ncclCommInitRank."""
        with self.on(index):
            return self._cupy.cuda.nccl.NcclCommunicator(n, identity, rank)

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        """Between ncclGroupStart and ncclGroupEnd."""
        self._cupy.cuda.nccl.groupStart()
        try:
            yield
        finally:
            self._cupy.cuda.nccl.groupEnd()


class _MappedMemory:
    """Closes another process's memory with its last holder."""

    def __init__(self, runtime: CupyRuntime, index: int, address: int) -> None:
        self._runtime, self._index, self._address = runtime, index, address

    def __del__(self) -> None:
        if sys.is_finalizing():  # the driver goes as well, and closes it
            return
        with suppress(Exception), self._runtime.on(self._index):
            self._runtime._api.ipcCloseMemHandle(self._address)
