"""Arrays on GPUs, of several libraries.

A kernel writes the values with delay, in a non-blocking stream, so that missing stream order gives
wrong values.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
from device_arrays import OWN_GPU

from mpicoll.cuda import runtime
from mpicoll.dtypes import by_numpy

#: Period of the numbers of ``fill``: a prime, so that chunks differ. The sum of 4 numbers fits into
#: 8 bits.
PERIOD = 61

#: Delay in nanoseconds before values are written.
SHORT_NS, LONG_NS = 200_000, 20_000_000

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

#: Dtypes that CuPy copies instead of dtypes that it does not support, by size in bytes.
CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def laid_out(host: np.ndarray, layout: str) -> tuple[tuple[int, ...] | None, int, int]:
    """Return strides (None: C order), offset of the first element and size in bytes of an array.

    layout: "C", "F" (Fortran order), "third" (every third element of a larger array), or an offset
            in elements, such as "2".
    """
    if layout.isdigit():
        offset = int(layout) * host.dtype.itemsize
        return None, offset, offset + host.nbytes
    if layout == "third":
        wide = np.empty((*host.shape, 3), host.dtype)
        return wide.strides[: host.ndim], host.dtype.itemsize, wide.nbytes
    return None if layout == "C" else np.asfortranarray(host).strides, 0, host.nbytes


def is_emulated() -> bool:
    """Return True on the device of tests/emulated_gpu."""
    return b"Emulated" in cupy.cuda.runtime.getDeviceProperties(0)["name"]


class RealArray:
    """An array on a GPU, used in one stream.

    given:  the argument of calls.
    host:   source of ``upload`` and target of ``download``.
    places: CuPy array of the same memory, with a dtype of CARRIERS.
    """

    def __init__(
        self, host: np.ndarray, index: int, stream: cupy.cuda.Stream, memory: Any, layout: str
    ) -> None:
        self.host, self.index, self.stream = host, index, stream
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

    def _as_carrier(self) -> np.ndarray:
        return self.host.view(CARRIERS[self.host.itemsize])

    def upload(self, long: bool = False) -> None:
        """Fill with garbage. Enqueue a delay and a copy of ``host``."""
        with cupy.cuda.Device(self.index), quiet(self.index) as stream:
            memory = plain(max(self.host.nbytes, 1))
            self._values = cupy.ndarray(self.host.shape, self.places.dtype, memory)
            self._values.set(np.ascontiguousarray(self._as_carrier()))
            self.places.fill(0xEE)
            stream.synchronize()
        with self._working():
            spin((1,), (1,), (np.uint64(LONG_NS if long else SHORT_NS),))
            self.places[...] = self._values

    def double(self) -> None:
        with self._working():
            numbers = self.places.view(self.host.dtype)
            numbers *= 2

    def fill(self, slope: int, start: int, long: bool = False) -> None:
        """Enqueue a delay and a kernel that sets element i to ``slope * (i % PERIOD) + start``."""
        with self._working():
            spin((1,), (1,), (np.uint64(LONG_NS if long else SHORT_NS),))
            fill(np.float32(slope), np.float32(start), self.places.view(self.host.dtype))

    def count_wrong(self, slope: int, start: int, begin: int, end: int, first: int) -> int:
        """Count the elements in [begin, end) that differ from ``fill`` from ``first`` on."""
        with self._working():
            wrong = cupy.zeros(1, cupy.uint64)
            part = self.places.view(self.host.dtype)[begin:end]
            count_wrong(part, np.float32(slope), np.float32(start), np.int64(first), wrong)
            return int(wrong.get()[0])  # waits for the stream

    def download(self) -> np.ndarray:
        """Copy to ``host`` in the array's stream and synchronize. Return ``host``."""
        with self._working():
            found = self.places.copy().get()  # waits for the stream
        self._as_carrier()[...] = found
        return self.host


class Interface:
    """An object with the CUDA array interface, including the stream."""

    def __init__(self, array: RealArray) -> None:
        self.array = array
        self.dtype = array.host.dtype
        self.device = type("Device", (), {"id": array.index})()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        places, stream = self.array.places, self.array.stream.ptr
        entries = {"strides": places.strides, "typestr": self.dtype.str, "stream": stream}
        return {**places.__cuda_array_interface__, **entries}


def plain(nbytes: int) -> Any:
    """Allocate with cudaMalloc, without a pool. Freeing it synchronizes the device."""
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)


def new_stream(index: int) -> cupy.cuda.Stream:
    """Return a new stream of a device."""
    with cupy.cuda.Device(index):
        return cupy.cuda.Stream(non_blocking=True)


#: The stream of a device that is only used for uploads.
quiet = functools.cache(new_stream)


class Arrays:
    """A library of device arrays.

    library: "interface" (CUDA array interface, with one stream per array), "cupy" or "torch" (with
             the current stream, on one device).
    large:   number of elements of a float32 array that takes long to copy.
    sizes:   sizes in bytes of arrays that need several chunks.
    kinds:   kinds of memory that some MPI libraries do not support.
    pooled:  the kind of memory that is freed to a pool.
    """

    large = 1 << 20
    sizes = (64 << 20, 256 << 20, 1 << 30, 4 << 30)

    def __init__(self, library: str) -> None:
        self.library = library
        self.streams = library == "interface"
        several = self.streams and not OWN_GPU
        self.devices = cupy.cuda.runtime.getDeviceCount() if several else 1
        self.kinds = ("expandable",) if library == "torch" else ("async", "managed")
        if is_emulated():
            self.sizes = (20 << 20,)
            self.kinds = ("plain",) if library == "torch" else self.kinds
        self.pooled = "plain" if library == "torch" else "pool"
        self._side = {
            index: [new_stream(index) for _ in range(8 if self.streams else 1)]
            for index in range(self.devices)
        }
        self._next = 0
        self._expandable: dict[int, Any] = {}

    def serves(self, dtype: Any) -> bool:
        """Return True if the library supports the dtype."""
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
        """Return an array like ``host`` with a layout of ``laid_out`` and a kind of memory."""
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
            if kind == "async":
                stream.synchronize()  # uploads use another stream, which is not ordered after it
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
        """Return the next part of a large tensor in torch's expandable segments."""
        import torch

        if index not in self._expandable:
            torch.cuda.empty_cache()
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
            whole = torch.empty(256 << 20, dtype=torch.uint8, device=f"cuda:{index}")
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
            self._expandable[index] = [whole, 0]
        whole, start = self._expandable[index]
        if start + nbytes > whole.numel():
            start = 0
        self._expandable[index][1] = start + -(-nbytes // 512) * 512
        return whole[start : start + nbytes]

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Set the library's current stream, and synchronize all devices at the end."""
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
        """Return the free memory of the first device."""
        with cupy.cuda.Device(0):
            return int(cupy.cuda.runtime.memGetInfo()[0])

    def release(self) -> None:
        """Release the memory of pools to the driver, even if a kernel still uses it."""
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        if self.library == "torch":
            import torch

            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def full(self, left: int) -> Iterator[None]:
        """Allocate memory until about ``left`` bytes, from half to one and a half times as many,
        can be allocated on the first device.
        """
        self.release()
        held, size = [], 16 << 30
        with cupy.cuda.Device(0):
            reserve = cupy.cuda.Memory(left // 2)
            while size >= left:
                try:
                    held.append(cupy.cuda.Memory(size))
                except cupy.cuda.runtime.CUDARuntimeError:
                    size //= 2
        del reserve
        try:
            yield
        finally:
            held.clear()

    @contextlib.contextmanager
    def capturing(self, array: RealArray) -> Iterator[None]:
        """Capture the array's stream into a graph."""
        with array._working():
            array.stream.synchronize()
            array.stream.begin_capture()
        try:
            yield
        finally:
            with array._working():
                array.stream.end_capture()


def check_kind(address: int, kind: str) -> None:
    """Check that the runtime recognizes memory that is not plain. Pool memory is plain."""
    assert kind in ("plain", "pool") or not runtime.get_runtime().is_plain(address), (
        f"{kind} memory is reported as plain"
    )


def late(array: cupy.ndarray, value: Any, nanoseconds: int = LONG_NS) -> cupy.ndarray:
    """Fill an array with garbage, then with a value after a delay, in the current stream."""
    array.fill(77)
    spin((1,), (1,), (np.uint64(nanoseconds),))
    array[...] = value
    return array


def made(count: int, value: Any) -> cupy.ndarray:
    """Return an array of float32 that is filled with delay."""
    return late(cupy.empty(count, cupy.float32), value)


class Fault:
    """Make one call of a function of the runtime fail: ``with Fault(...): dist.all_reduce(x)``.

    here:   True on the rank that fails.
    number: number of the failing call; the body counts from 1.
    error:  RuntimeError of the body, which is not raised again.
    """

    def __init__(self, name: str, here: bool, number: int = 1) -> None:
        self.name, self.here, self.left = name, here, number
        self.cuda, self.error = runtime.get_runtime(), None

    @property
    def failed(self) -> bool:
        return self.left <= 0

    def __enter__(self) -> Fault:
        self.original = getattr(self.cuda, self.name)
        setattr(self.cuda, self.name, self._call)
        return self

    def _call(self, *arguments: Any) -> Any:
        if self.here:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("injected failure")
        return self.original(*arguments)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        delattr(self.cuda, self.name)
        self.error = error
        return isinstance(error, RuntimeError)
