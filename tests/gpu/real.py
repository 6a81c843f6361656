"""Arrays on the GPUs of this machine, for the tests of tests/mpi/test_devices.py.

They have the face of tests/mpi/simulated.py's. Values are made by a kernel that takes a while, in
a stream that waits for no other; so who forgets to order two streams finds garbage.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
from device_arrays import OWN_GPU
from simulated import PERIOD, laid_out

from mpicoll.cuda import runtime
from mpicoll.dtypes import by_numpy

#: Nanoseconds that it takes to make values, and where nothing else delays them.
SHORT, LONG = 200_000, 20_000_000

SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
}
"""

spin = cupy.RawKernel(SPIN, "spin")

fill = cupy.ElementwiseKernel(
    "float32 slope, float32 start", "T out", f"out = (T)(slope * (i % {PERIOD}) + start)", "fill"
)
count_wrong = cupy.ElementwiseKernel(
    "T given, float32 slope, float32 start, int64 first", "raw uint64 wrong",
    f"if ((float)given != slope * ((i + first) % {PERIOD}) + start) atomicAdd(&wrong[0], 1ull)",
    "count_wrong",
)  # fmt: skip

#: What CuPy copies in place of elements that it has no dtype for, by their size.
CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class RealArray:
    """An array on a GPU, which its program works on in one stream.

    given:  what calls get.
    host:   what ``upload`` puts there and what ``download`` gets.
    places: CuPy's array of the same elements, as unsigned integers.
    """

    def __init__(
        self, host: np.ndarray, index: int, stream: cupy.cuda.Stream, memory: Any, layout: str
    ) -> None:
        self.host, self.index, self.stream, self.number = host, index, stream, stream.ptr
        strides, offset, _ = laid_out(host, layout)
        self.places = cupy.ndarray(
            host.shape, CARRIERS[host.itemsize], memory + offset, strides or host.strides
        )
        self.given: Any = None
        self._values: Any = None

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with cupy.cuda.Device(self.index), self.stream:
            yield

    def _carried(self) -> np.ndarray:
        return self.host.view(CARRIERS[self.host.itemsize])

    def upload(self, long: bool = False) -> None:
        """A kernel that takes a while, then the values, where garbage was."""
        with cupy.cuda.Device(self.index), quiet(self.index) as stream:
            room = plain(max(self.host.nbytes, 1))
            self._values = cupy.ndarray(self.host.shape, self.places.dtype, room)
            self._values.set(np.ascontiguousarray(self._carried()))
            self.places.fill(0xEE)
            stream.synchronize()
        with self._working():
            spin((1,), (1,), (np.uint64(LONG if long else SHORT),))
            self.places[...] = self._values

    def double(self) -> None:
        """A kernel."""
        with self._working():
            numbers = self.places.view(self.host.dtype)
            numbers *= 2

    def fill(self, slope: int, start: int, long: bool = False) -> None:
        """Two kernels: one takes a while, one makes element i ``slope * (i % PERIOD) + start``."""
        with self._working():
            spin((1,), (1,), (np.uint64(LONG if long else SHORT),))
            fill(np.float32(slope), np.float32(start), self.places.view(self.host.dtype))

    def count_wrong(self, slope: int, start: int, begin: int, end: int, first: int) -> int:
        """How many elements from begin to end are not those of ``fill`` from ``first`` on."""
        with self._working():
            wrong = cupy.zeros(1, cupy.uint64)
            part = self.places.view(self.host.dtype)[begin:end]
            count_wrong(part, np.float32(slope), np.float32(start), np.int64(first), wrong)
            return int(wrong.get()[0])  # waits for the stream

    def download(self) -> None:
        """A consumer in the same stream, and then the host."""
        with self._working():
            seen = self.places.copy()
            found = seen.get()  # waits for the stream
        self._carried()[...] = found


class Interface:
    """Speaks the CUDA array interface, and tells the stream of its array."""

    def __init__(self, array: RealArray) -> None:
        self.array = array
        self.dtype = array.host.dtype
        self.device = type("Device", (), {"id": array.index})()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        places = self.array.places
        return {
            "data": (places.data.ptr, False),
            "shape": places.shape,
            "strides": places.strides,
            "typestr": self.dtype.str,
            "version": 3,
            "stream": self.array.number,
        }


def plain(nbytes: int) -> Any:
    """Memory by cudaMalloc, of no pool; giving it back waits until it is not used any more."""
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)


_quiet: dict[int, cupy.cuda.Stream] = {}


def quiet(index: int) -> cupy.cuda.Stream:
    """A stream of a device that is empty whenever nobody is at work in it."""
    if index not in _quiet:
        with cupy.cuda.Device(index):
            _quiet[index] = cupy.cuda.Stream(non_blocking=True)
    return _quiet[index]


class Arrays:
    """Where the tests get their arrays from, as in tests/mpi/simulated.py.

    library: "interface": objects that speak the CUDA array interface, each with a stream of its
             own; "cupy"; "torch". Those have the stream that is current when the call is made,
             and the tests use them on one device.
    """

    #: Elements of a float32 array whose copies take long.
    large = 4 << 20
    #: Bytes of arrays, each several slots of the usual size.
    sizes = (64 << 20, 256 << 20, 1 << 30, 4 << 30)

    def __init__(self, library: str) -> None:
        self.library = library
        self.streams = library == "interface"
        several = self.streams and not OWN_GPU
        self.devices = cupy.cuda.runtime.getDeviceCount() if several else 1
        self.kinds = ("expandable",) if library == "torch" else ("async", "managed")
        #: torch's plain memory is of its pool.
        self.pooled = "plain" if library == "torch" else "pool"
        self._side = {
            index: [self._new_stream(index) for _ in range(8 if self.streams else 1)]
            for index in range(self.devices)
        }
        self._next = 0
        self._expandable: dict[int, Any] = {}

    def _new_stream(self, index: int) -> cupy.cuda.Stream:
        with cupy.cuda.Device(index):
            return cupy.cuda.Stream(non_blocking=True)

    def serves(self, dtype: Any) -> bool:
        """The library has arrays of the dtype."""
        if self.library == "torch":
            import torch

            return hasattr(torch, dtype.name)
        if self.library == "interface":
            return True
        try:
            cupy.empty(1, dtype.numpy)
        except (TypeError, ValueError, KeyError, NotImplementedError):
            return False
        return True

    def make(
        self, host: np.ndarray, index: int = 0, layout: str = "C", kind: str = "plain"
    ) -> RealArray:
        """An array like ``host``, of ``laid_out``'s layout, in memory of that kind."""
        self._next += 1
        streams = self._side[index]
        stream = streams[self._next % len(streams)]
        nbytes = max(laid_out(host, layout)[2], 1)
        with cupy.cuda.Device(index), stream:
            if self.library == "torch":
                return self._tensor(host, index, stream, layout, nbytes, kind)
            make = {
                "plain": plain,
                "pool": cupy.get_default_memory_pool().malloc,
                "async": cupy.cuda.malloc_async,
                "managed": cupy.cuda.malloc_managed,
            }[kind]
            array = RealArray(host, index, stream, make(nbytes), layout)
            check_kind(array.places.data.ptr, kind)
            if self.streams:
                array.given = Interface(array)
            else:
                array.given = array.places.view(host.dtype)
            return array

    def _tensor(
        self, host: np.ndarray, index: int, stream: Any, layout: str, nbytes: int, kind: str
    ) -> RealArray:
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, index)):
            if kind == "expandable":
                held = self._of_expandable(index, nbytes)
            else:
                held = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{index}")
        check_kind(held.data_ptr(), kind)
        memory = cupy.cuda.UnownedMemory(held.data_ptr(), nbytes, held, index)
        array = RealArray(host, index, stream, cupy.cuda.MemoryPointer(memory, 0), layout)
        row = by_numpy[host.dtype]
        size = row.itemsize
        whole = held[: nbytes // size * size].view(getattr(torch, row.name))
        steps = [step // size for step in array.places.strides]
        start = whole.storage_offset() + (array.places.data.ptr - held.data_ptr()) // size
        array.given = whole.as_strided(host.shape, steps, start)
        return array

    def _of_expandable(self, index: int, nbytes: int) -> Any:
        """A piece of one great tensor of torch's expandable segments, one after another."""
        import torch

        if index not in self._expandable:
            torch.cuda.empty_cache()
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
            great = torch.empty(256 << 20, dtype=torch.uint8, device=f"cuda:{index}")
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
            self._expandable[index] = [great, 0]
        great, start = self._expandable[index]
        if start + nbytes > great.numel():
            start = 0
        self._expandable[index][1] = start + -(-nbytes // 512) * 512
        return great[start : start + nbytes]

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """In here calls are made, in the library's current stream; in the end all is done."""
        with contextlib.ExitStack() as stack:
            if not self.streams:
                stream = self._side[0][0]
                stack.enter_context(stream)
                if self.library == "torch":
                    import torch

                    external = torch.cuda.ExternalStream(stream.ptr, 0)
                    stack.enter_context(torch.cuda.stream(external))
            yield
        for index in range(self.devices):
            cupy.cuda.Device(index).synchronize()

    def free_bytes(self) -> int:
        """Of the first device."""
        with cupy.cuda.Device(0):
            return int(cupy.cuda.runtime.memGetInfo()[0])

    def release(self) -> None:
        """Give memory that pools keep back to the driver, from under whoever still uses it."""
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        if self.library == "torch":
            import torch

            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def full(self, left: int) -> Iterator[None]:
        """In here the first device has no more than so many bytes in one piece."""
        self.release()
        held, size = [], 16 << 30
        with cupy.cuda.Device(0):
            while size >= left:
                try:
                    held.append(cupy.cuda.Memory(size))
                except cupy.cuda.runtime.CUDARuntimeError:
                    size //= 2
        try:
            yield
        finally:
            held.clear()

    @contextlib.contextmanager
    def capturing(self, array: RealArray) -> Iterator[None]:
        """In here the array's stream is captured into a graph."""
        with array._working():
            array.stream.synchronize()
            array.stream.begin_capture()
        try:
            yield
        finally:
            with array._working():
                array.stream.end_capture()


def check_kind(address: int, kind: str) -> None:
    """Memory of another kind than plain is recognised; that of CuPy's pool is plain."""
    assert kind in ("plain", "pool") or not runtime.get_runtime().is_plain(address), (
        f"{kind} memory is called plain"
    )
