"""Simulated CUDA devices with the interface of `mpicoll.cuda.runtime.Runtime`.

Device memory is host memory. Work in a stream runs as late as CUDA allows: when the host waits for
an event, only the work that the event depends on is done. Missing stream order or synchronization
therefore always gives wrong data. New memory contains garbage.

A stream that waits for an event of another process makes that process run its stream up to the
event, even if its program is blocked.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simulated_peers

from mpicoll.cuda.runtime import HANDLE_BYTES, UNKNOWN, Allocation, Memory
from mpicoll.dtypes import by_name
from mpicoll.errors import DeviceMemoryError, UnsupportedError
from mpicoll.kernels import reduction
from mpicoll.kernels.library import kernels

#: The legacy default stream, without its implicit synchronization.
LEGACY = 1

#: Period of the numbers of ``fill``: a prime, so that chunks differ. The sum of 4 numbers fits into
#: 8 bits.
PERIOD = 61

#: Seconds after which a waiting stream counts as hanging.
WAIT_TIMEOUT_S = 60
#: Seconds after which kernels that synchronize with other devices start without the host.
KERNEL_DELAY_S = 0.003


@dataclass(eq=False)
class Event:
    stream: Stream
    place: int


class Stream:
    """Queued work, and the number of completed tasks."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.waiting: deque[Any] = deque()
        self.done = 0
        self.running = False  # the first queued task is running

    @property
    def end(self) -> int:
        return self.done + len(self.waiting)


class Graph:
    """The tasks of a captured stream."""

    def __init__(self, cuda: Simulated, index: int, stream: int) -> None:
        self.cuda, self.index, self.stream = cuda, index, stream
        self.tasks: list[Any] = []

    def launch(self) -> None:
        for task in self.tasks:
            self.cuda.enqueue(self.index, self.stream, task)
        self.cuda.begin_later(self.index, self.stream)


class SharedEvent:
    """An interprocess event, created in this process or opened from another one.

    counts: in shared memory: number of records, and the latest completed record.
    """

    def __init__(self, cuda: Simulated, name: str, counts: mmap.mmap, file: int = -1) -> None:
        self.cuda, self.name, self.file = cuda, name, file
        self.counts = np.frombuffer(counts, np.int64)
        self.places: dict[int, tuple[Stream, int]] = {}  # by record, in the creating process
        self.listener: socket.socket | None = None

    def listen(self) -> None:
        """Run the stream that a record is in when another process asks for it."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.listener.bind(f"\0{self.name}")
        threading.Thread(
            target=_serve, args=(weakref.ref(self), self.listener), daemon=True
        ).start()
        weakref.finalize(self, _close, self.listener, self.file)

    def await_record(self, record: int) -> None:
        """Wait for a record, as a device does."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        if self.counts[1] < record:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
                client.sendto(str(record).encode(), f"\0{self.name}")
        while self.counts[1] < record:
            assert time.monotonic() < deadline, "the event of another process was not recorded"
            time.sleep(2e-5)


def _close(listener: socket.socket, file: int) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    os.close(file)


def _serve(weak: weakref.ref[SharedEvent], listener: socket.socket) -> None:
    while True:
        try:
            request = listener.recv(64)
        except OSError:
            return
        event = weak()
        if event is None or not request:
            return
        stream, place = event.places[int(request)]
        # One thread per request, because streams of several processes may wait for each other.
        threading.Thread(target=event.cuda._run, args=(stream, place), daemon=True).start()
        del event


class Simulated:
    """The simulated devices of this process."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.numbers = itertools.count(16)
        self.streams = {(index, LEGACY): Stream(index) for index in range(devices)}
        self.pool: set[int] = set()  # addresses of memory that is not plain
        self.captured: dict[int, Graph] = {}  # by stream
        self.loaded: set[str] = set()
        self.eager = False  # run all work as early as possible
        self.current = 0
        self.room, self.cached = 1 << 40, 0  # bytes of a device, and in memory pools
        self.settled: dict[int, int] = {}  # by thread
        self.freed: list[Any] = []
        self.allocated: weakref.WeakValueDictionary[int, _Mapped] = weakref.WeakValueDictionary()
        self.opened: weakref.WeakSet[_Mapped] = weakref.WeakSet()
        self.buffers = itertools.count(1)
        self.local = threading.local()

    def _find(self, index: int, stream: int) -> Stream:
        return self.streams[index, stream]

    def enqueue(self, index: int, stream: int, task: Any) -> None:
        with self.lock:
            found = self._find(index, stream)
            if stream in self.captured:
                self.captured[stream].tasks.append(task)
                return
            found.waiting.append(task)
            end = found.end
        if self.eager:
            self._run(found, end)

    def _run(self, stream: Stream, place: int) -> None:
        """Run a stream's tasks in order up to a place. Thread-safe."""
        while True:
            with self.changed:
                while stream.running and stream.done < place:
                    assert self.changed.wait(WAIT_TIMEOUT_S), "the stream hangs"
                if stream.done >= place:
                    return
                task, stream.running = stream.waiting[0], True
            try:
                if isinstance(task, Event):
                    self._run(task.stream, task.place)
                else:
                    task()
            finally:
                with self.changed:
                    stream.waiting.popleft()
                    stream.done += 1
                    stream.running = False
                    self.changed.notify_all()

    # --- the interface of Runtime -------------------------------------------------------------

    def count(self) -> int:
        return self.devices

    def name(self, index: int) -> str:
        return f"simulated {index}"

    def pci_bus_id(self, index: int) -> str:
        return f"0000:0{index}:00.0"

    def identity(self, index: int) -> str:
        return self.pci_bus_id(index)

    def driver_version(self) -> str:
        return "simulated"

    def current_device(self) -> int:
        return self.current

    def device_of(self, address: int) -> int:
        return 0

    def use(self, index: int) -> None:
        self.current = index

    def is_captured(self, index: int, stream: int) -> bool:
        return stream in self.captured

    def check_stream(self, index: int, stream: int, where: str) -> None:
        if stream != UNKNOWN:
            self._find(index, stream)
        if stream in self.captured:
            raise UnsupportedError(f"{where}: the current stream is being captured")

    def create_stream(self, index: int) -> int:
        with self.lock:
            number = next(self.numbers)
            self.streams[index, number] = Stream(index)
            return number

    def current_stream(self, index: int) -> int:
        """Return the thread's current stream, as CuPy does."""
        return getattr(self.local, "stream", LEGACY)

    @contextlib.contextmanager
    def using(self, index: int, stream: int) -> Iterator[None]:
        before, self.local.stream = self.current_stream(index), stream
        try:
            yield
        finally:
            self.local.stream = before

    def destroy_stream(self, stream: int) -> None:
        key = next(key for key in self.streams if key[1] == stream)
        assert not self.streams[key].waiting, "destroyed with queued work"
        del self.streams[key]

    def record(self, index: int, stream: int) -> Event:
        with self.lock:
            assert stream not in self.captured, "the event would be captured"
            found = self._find(index, stream)
            return Event(found, found.end)

    def wait(self, index: int, stream: int, event: Event) -> None:
        if isinstance(event, SharedEvent):
            record = int(event.counts[0])  # the latest record at the time of this call
            self.enqueue(index, stream, lambda: event.await_record(record))
            return
        with self.lock:
            self._find(index, stream).waiting.append(event)

    def is_done(self, event: Event) -> bool:
        """Return False for the first query of a pending event, and run its work."""
        done = event.stream.done >= event.place
        self._run(event.stream, event.place)
        return done

    def synchronize(self, event: Event) -> None:
        self._run(event.stream, event.place)

    def synchronize_device(self, index: int) -> None:
        for (where, _), stream in list(self.streams.items()):
            if where == index:
                self._run(stream, stream.end)

    def free_cached(self, index: int) -> None:
        self.cached = 0

    def allocate(self, index: int, nbytes: int) -> Memory:
        """Allocate an anonymous file, which another process can open."""
        if nbytes > self.room - self.cached:
            raise DeviceMemoryError(f"{nbytes} bytes are too many")
        freed, self.freed = self.freed, []
        if len(freed) < 16:
            self.freed += freed
        else:
            for stream in list(self.streams.values()):
                self._run(stream, stream.end)
            for file, _ in freed:
                os.close(file)
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("simulated")
        os.ftruncate(file, size)
        return _mapped(self, file, size, nbytes, fill=True)

    def allocate_pinned(self, index: int, nbytes: int) -> Memory:
        array = np.full(max(nbytes, 1), 0xCD, np.uint8)
        return Memory(array.ctypes.data, nbytes, array)

    def is_plain(self, address: int) -> bool:
        return address not in self.pool

    def copy(self, index: int, into: int, source: int, nbytes: int, stream: int) -> None:
        self.enqueue(index, stream, lambda: ctypes.memmove(into, source, nbytes))

    def copy_strided(
        self, index: int, into: Any, source: Any, shape: Any, itemsize: int, stream: int
    ) -> None:
        def array(layout: Any) -> Any:
            low = sum(min(0, s) * (n - 1) for s, n in zip(layout.strides, shape, strict=True))
            high = sum(max(0, s) * (n - 1) for s, n in zip(layout.strides, shape, strict=True))
            memory = at(layout.address + low, high - low + itemsize)
            return np.ndarray(shape, f"V{itemsize}", memory, -low, layout.strides)

        if 0 not in shape:
            self.enqueue(index, stream, lambda: np.copyto(array(into), array(source)))

    def load(self, index: int, by: Any, n: int) -> None:
        pass

    def combine(
        self, index: int, by: Any, sources: Any, outs: Any, count: int, divisor: float, stream: int
    ) -> None:
        """Reduce to a temporary buffer and copy it to all outputs, which may be sources."""

        def task() -> None:
            assert kernels is not None, "the simulation computes with the C library"
            between = np.empty(by_name[by.format].itemsize * by.elements * count + 1, np.uint8)
            kernels.combine(
                kernels.format(by.format.encode()), by.operation,
                (ctypes.c_void_p * len(sources))(*sources), len(sources), between.ctypes.data,
                count * by.elements, divisor,
            )  # fmt: skip
            for out in outs:
                ctypes.memmove(out, between.ctypes.data, between.nbytes - 1)

        self.enqueue(index, stream, task)

    def scale(
        self, index: int, dtype: Any, source: int, factor: Any, out: int, count: int, stream: int
    ) -> None:
        given, scaled = elements(source, dtype.numpy, count), elements(out, dtype.accumulate, count)
        self.enqueue(index, stream, lambda: reduction.scale(dtype, given, factor, scaled))

    def narrow(
        self, index: int, dtype: Any, source: int, out: int, count: int, stream: int
    ) -> None:
        wide = elements(source, np.dtype(np.float32), count)
        rounded = elements(out, dtype.numpy, count)
        self.enqueue(index, stream, lambda: reduction.narrow(wide, rounded))

    def settle(self, index: int) -> None:
        self.settled[threading.get_ident()] = index

    def on(self, index: int) -> Any:
        return contextlib.nullcontext()

    def relaxed(self) -> Any:
        return contextlib.nullcontext()

    def has_nccl(self) -> bool:
        return False

    def multiprocessors(self, index: int) -> int:
        return 2

    def has_collective(self, index: int, call: Any) -> bool:
        return call.line() in self.loaded

    def load_collective(self, index: int, call: Any) -> None:
        self.loaded.add(call.line())
        self.load(index, call.by, 0)

    def collective(self, index: int, peers: Any, call: Any, stream: int) -> None:
        """Enqueue a kernel that starts without the host."""
        self.enqueue(index, stream, lambda: simulated_peers.execute(peers, call))
        self.begin_later(index, stream)

    def begin_later(self, index: int, stream: int) -> None:
        with self.lock:
            found = self._find(index, stream)
            begin = threading.Timer(KERNEL_DELAY_S, self._run, (found, found.end))
        begin.daemon = True
        begin.start()

    def export(self, index: int, memory: Memory) -> bytes:
        owner = memory._owner
        words = f"{os.getpid()} {owner.file} {owner.size} {memory.nbytes}"
        return words.encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, index: int, handle: bytes) -> Memory:
        assert len(handle) == HANDLE_BYTES
        process, file, size, nbytes = map(int, handle.rstrip(b"\0").split())
        if process == os.getpid():
            raise RuntimeError("a process cannot open its own handle")
        file = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        memory = _mapped(self, file, size, nbytes, fill=False)
        self.opened.add(memory._owner)
        return memory

    def find_allocation(self, address: int) -> Allocation | None:
        for base, owner in list(self.allocated.items()):
            if base <= address < base + owner.size:
                return None if base in self.pool else Allocation(base, owner.size, owner.buffer)
        return None

    def export_allocation(self, index: int, found: Allocation) -> bytes:
        owner = self.allocated[found.base]
        assert owner.buffer == found.buffer, "the allocation was freed"
        return self.export(index, Memory(found.base, found.nbytes, owner))

    def create_shared_event(self, index: int) -> SharedEvent:
        file = os.memfd_create("event")
        os.ftruncate(file, mmap.PAGESIZE)
        name = f"simulated-{secrets.token_hex(8)}"
        event = SharedEvent(self, name, mmap.mmap(file, mmap.PAGESIZE), file)
        event.listen()
        return event

    def export_event(self, event: SharedEvent) -> bytes:
        words = f"{os.getpid()} {event.file} {event.name}".encode()
        assert len(words) <= HANDLE_BYTES
        return words.ljust(HANDLE_BYTES, b"\0")

    def open_event(self, index: int, handle: bytes) -> SharedEvent:
        process, file, name = handle.rstrip(b"\0").decode().split()
        if int(process) == os.getpid():
            raise RuntimeError("a process cannot open its own event")
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        counts = mmap.mmap(opened, mmap.PAGESIZE)
        os.close(opened)
        return SharedEvent(self, name, counts)

    def record_again(self, index: int, stream: int, event: SharedEvent) -> None:
        assert event.listener is not None, "only the creating process may record the event"
        with self.lock:
            record = int(event.counts[0]) + 1

            def complete(counts: Any = event.counts) -> None:
                counts[1] = max(counts[1], record)

            self._find(index, stream).waiting.append(complete)
            found = self._find(index, stream)
            event.places[record] = found, found.end
            event.counts[0] = record
        if self.eager:
            self._run(found, found.end)

    def register(self, index: int, address: int, nbytes: int) -> object:
        assert address % mmap.PAGESIZE == 0
        return object()

    def reach(self, index: int, address: int) -> int:
        return address


class _Mapped:
    """Device memory. As in CUDA, freeing it synchronizes the device. Closing a mapping does
    not, and later accesses crash the process.
    """

    def __init__(
        self, cuda: Simulated, file: int, memory: mmap.mmap, size: int, allocated: bool
    ) -> None:
        self.cuda, self.file, self.memory, self.size = cuda, file, memory, size
        self.is_allocated = allocated
        self.buffer = next(cuda.buffers)

    def __del__(self) -> None:
        if self.is_allocated:
            self.cuda.freed.append((self.file, self.memory))
        else:
            os.close(self.file)


def _mapped(cuda: Simulated, file: int, size: int, nbytes: int, fill: bool) -> Memory:
    memory = mmap.mmap(file, size)
    array = np.frombuffer(memory, np.uint8)
    if fill:
        array[: 1 << 20] = 0xEE  # untouched pages use no memory
    owner = _Mapped(cuda, file, memory, size, allocated=fill)
    owner.array = array
    if fill:
        cuda.allocated[array.ctypes.data] = owner
        cuda.pool.discard(array.ctypes.data)
    return Memory(array.ctypes.data, nbytes, owner)


def at(address: int, nbytes: int) -> Any:
    return (ctypes.c_uint8 * nbytes).from_address(address)


def elements(address: int, dtype: Any, count: int) -> Any:
    return np.frombuffer(at(address, count * dtype.itemsize), np.uint8).view(dtype)


class DeviceArray:
    """An array on a simulated device, used in one stream.

    given: the argument of calls.
    host:  source of ``upload`` and target of ``download``.
    """

    def __init__(
        self, cuda: Simulated, host: np.ndarray, index: int, stream: int, layout: str, kind: str
    ) -> None:
        self.cuda, self.host, self.index, self.number = cuda, host, index, stream
        self.given = self
        self.dtype, self.shape = host.dtype, host.shape
        self.strides, self.offset, nbytes = laid_out(host, layout)
        self.memory = cuda.allocate(index, nbytes)
        self.device = type("Device", (), {"id": index})()
        if kind == "pool":
            cuda.pool.add(self.memory.address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.memory.address + self.offset, False),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "version": 3,
            "stream": self.number,
        }

    def _numpy(self) -> np.ndarray:
        memory = at(self.memory.address, self.memory.nbytes)
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)

    def _enqueue(self, task: Any) -> None:
        self.cuda.enqueue(self.index, self.number, task)

    def upload(self, long: bool = False) -> None:
        """Enqueue a kernel that writes the values of ``host``."""
        values = self.host.copy()
        self._enqueue(lambda: np.copyto(self._numpy(), values))

    def double(self) -> None:
        self._enqueue(lambda: np.multiply(self._numpy(), 2, self._numpy()))

    def fill(self, slope: int, start: int, long: bool = False) -> None:
        """Enqueue a kernel that sets element i to ``slope * (i % PERIOD) + start``."""

        def task() -> None:
            self._numpy()[...] = (np.arange(self.host.size) % PERIOD * slope + start).astype("f4")

        self._enqueue(task)

    def count_wrong(self, slope: int, start: int, begin: int, end: int, first: int) -> int:
        """Count the elements in [begin, end) that differ from ``fill`` from ``first`` on."""
        found = []

        def task() -> None:
            made = np.arange(first, first + end - begin) % PERIOD * slope + start
            found.append(np.count_nonzero(self._numpy()[begin:end].astype("f4") != made))

        self._enqueue(task)
        self.cuda.synchronize(self.cuda.record(self.index, self.number))
        return int(found[0])

    def download(self) -> None:
        """Copy to ``host`` in the array's stream and synchronize."""
        self._enqueue(lambda: np.copyto(self.host, self._numpy()))
        self.cuda.synchronize(self.cuda.record(self.index, self.number))


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


class Arrays:
    """A library of device arrays. tests/gpu/real.py has the same interface for GPUs.

    devices:  number of devices.
    kinds:    kinds of memory that some MPI libraries do not support.
    streams:  True if each array has its own stream and reports it.
    large:    number of elements of a float32 array that takes long to copy.
    sizes:    sizes in bytes of arrays that need several slots of the default size.
    pooled:   the kind of memory that is freed to a pool.
    """

    devices = 2
    kinds = ("pool",)
    streams = True
    large = 1000
    sizes = (20 << 20,)
    pooled = "plain"

    def __init__(self, devices: int | None = None) -> None:
        self.devices = devices or self.devices
        self.cuda = Simulated(self.devices)

    @classmethod
    def of_route(cls, name: str, ranks: int) -> Arrays:
        """Return the number of devices that a route needs."""
        return cls({"shared_gpu": 1, "peer": ranks}.get(name))

    def serves(self, dtype: Any) -> bool:
        """Return True if the library supports the dtype."""
        return True

    def make(
        self, host: np.ndarray, index: int = 0, layout: str = "C", kind: str = "plain"
    ) -> DeviceArray:
        """Return an array like ``host`` with a layout of ``laid_out`` and a kind of memory."""
        stream = self.cuda.create_stream(index)
        return DeviceArray(self.cuda, host, index, stream, layout, kind)

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that waits for all work at its end."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """Return the free memory of the first device."""
        return 1 << 40

    def release(self) -> None:
        """Release the memory of pools to the driver."""

    @contextlib.contextmanager
    def full(self, left: int) -> Iterator[None]:
        """Limit allocations to ``left`` bytes."""
        allocate = self.cuda.allocate

        def limited(index: int, nbytes: int) -> Memory:
            if nbytes > left:
                raise MemoryError(f"{nbytes} bytes of device memory")
            return allocate(index, nbytes)

        self.cuda.allocate = limited  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.cuda.allocate = allocate  # type: ignore[method-assign]

    @contextlib.contextmanager
    def capturing(self, array: DeviceArray) -> Iterator[Graph]:
        """Capture the array's stream into a graph."""
        graph = self.cuda.captured[array.number] = Graph(self.cuda, array.index, array.number)
        yield graph
        del self.cuda.captured[array.number]


def replace_memory(arrays: Arrays, memory: Memory) -> None:
    """Replace memory by other memory at the same address, as cudaFree and cudaMalloc do."""
    owner, size = memory._owner, memory._owner.size
    file = os.memfd_create("replaced")
    os.ftruncate(file, size)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10  # MAP_FIXED
    libc.mmap(memory.address, size, access, mmap.MAP_SHARED | fixed, file, 0)
    os.close(owner.file)
    owner.file, owner.buffer = file, next(arrays.cuda.buffers)


def record_calls(monkeypatch: Any, cuda: Any, *names: str) -> list[Any]:
    """Record calls of a runtime. Return the list of (name, *arguments)."""
    seen: list[Any] = []

    def recording(name: str, original: Any) -> Any:
        return lambda *arguments: seen.append((name, *arguments)) or original(*arguments)

    for name in names:
        monkeypatch.setattr(cuda, name, recording(name, getattr(cuda, name)))
    return seen


class Fault:
    """Make one call of a runtime function fail: ``with Fault(...) as fault: dist.all_reduce(x)``.

    here:    True on the rank that fails.
    number:  number of the failing call.
    counts:  condition on the arguments; other calls are not counted.
    error:   RuntimeError of the body, which is not raised again.
    failed:  True if the call has failed.
    """

    def __init__(
        self, cuda: Any, name: str, here: bool, number: int = 1,
        counts: Callable[..., bool] = lambda *arguments: True,
    ) -> None:  # fmt: skip
        self.cuda, self.name, self.here, self.number, self.counts = cuda, name, here, number, counts
        self.calls, self.error = 0, None

    @property
    def failed(self) -> bool:
        return self.calls >= self.number

    def __enter__(self) -> Fault:
        self.original = getattr(self.cuda, self.name)
        setattr(self.cuda, self.name, self._call)
        return self

    def _call(self, *arguments: Any) -> Any:
        if self.here and self.counts(*arguments):
            self.calls += 1
            if self.calls == self.number:
                raise RuntimeError("injected failure")
        return self.original(*arguments)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        setattr(self.cuda, self.name, self.original)
        self.error = error
        return isinstance(error, RuntimeError)
