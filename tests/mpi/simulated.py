"""CUDA devices that are not there: what `mpicoll.cuda.runtime.Runtime` promises, and no more.

Memory is the host's. What is put into a stream happens as late as the rules allow: when the host
waits for an event, just what that event needs is done, in the order of each stream. So whoever
forgets to order two streams, or to wait before reading on the host, finds old data, every time.
New memory is full of garbage.

Devices go on without their hosts: a stream that has come to wait for an event of another process
has that process run its stream so far, whatever its program is at.
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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simulated_peers

from mpicoll.cuda.runtime import HANDLE_BYTES, UNKNOWN, Allocation, Memory
from mpicoll.dtypes import by_name
from mpicoll.errors import DeviceMemoryError, UnsupportedError
from mpicoll.kernels import reduction

#: The stream that CUDA calls legacy; here it is a stream like others.
LEGACY = 1

#: Elements after which the numbers of ``fill`` begin again: a prime, so that no slot or chunk has
#: the numbers of another. The sum of 4 such numbers is exact in float16 and fits into 8 bits.
PERIOD = 61

#: Seconds after which a stream gives up what it waits for.
PATIENCE = 60
#: Seconds after which a kernel that waits for other devices begins, even if nothing on the host
#: waits for it.
DELAY = 0.003


@dataclass(eq=False)
class Event:
    stream: Stream
    place: int


class Stream:
    """What is still to be done, and how much has been."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.waiting: deque[Any] = deque()
        self.done = 0
        self.running = False  # the first of those that wait is being done

    @property
    def end(self) -> int:
        return self.done + len(self.waiting)


class Graph:
    """What a stream got while it was captured."""

    def __init__(self, cuda: Simulated, index: int, stream: int) -> None:
        self.cuda, self.index, self.stream = cuda, index, stream
        self.tasks: list[Any] = []

    def launch(self) -> None:
        """Do all of it, in that stream; a kernel that waits for other devices does not wait for
        the host.
        """
        for task in self.tasks:
            self.cuda.enqueue(self.index, self.stream, task)
        self.cuda.begin_later(self.index, self.stream)


class SharedEvent:
    """An event that other processes may wait for, of this process or, ``opened``, of another.

    counts: in memory that the processes share: how often it was recorded, and the latest record
            that has come.
    """

    def __init__(self, cuda: Simulated, name: str, counts: mmap.mmap, file: int = -1) -> None:
        self.cuda, self.name, self.file = cuda, name, file
        self.counts = np.frombuffer(counts, np.int64)
        self.places: dict[int, tuple[Stream, int]] = {}  # of each record, in this process
        self.ear: socket.socket | None = None

    def listen(self) -> None:
        """Run the stream that a record is in when another process asks for it."""
        self.ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ear.bind(f"\0{self.name}")
        threading.Thread(target=_serve, args=(weakref.ref(self), self.ear), daemon=True).start()

    def await_record(self, record: int) -> None:
        """Wait for a record, in the place of a device."""
        limit = time.monotonic() + PATIENCE
        if self.counts[1] < record:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
                mouth.sendto(str(record).encode(), f"\0{self.name}")
        while self.counts[1] < record:
            assert time.monotonic() < limit, "another process's event does not come"
            time.sleep(2e-5)

    def __del__(self) -> None:
        if self.ear is not None:
            with contextlib.suppress(OSError):
                self.ear.shutdown(socket.SHUT_RDWR)
            self.ear.close()
            os.close(self.file)


def _serve(weak: weakref.ref[SharedEvent], ear: socket.socket) -> None:
    while True:
        try:
            asked = ear.recv(64)
        except OSError:
            return
        event = weak()
        if event is None or not asked:
            return
        stream, place = event.places[int(asked)]
        # Each in a thread of its own: what comes before may ask other processes, and they this one.
        threading.Thread(target=event.cuda._run, args=(stream, place), daemon=True).start()
        del event


class Simulated:
    """Some devices of this process."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.numbers = itertools.count(16)
        self.streams = {(index, LEGACY): Stream(index) for index in range(devices)}
        self.pool: set[int] = set()  # addresses of memory that is not plain
        self.captured: dict[int, Graph] = {}  # by stream
        self.loaded: set[str] = set()
        self.eager = False  # everything happens as early as can be, instead of as late
        self.current = 0
        self.room, self.cached = 1 << 40, 0  # bytes of a device, and of what libraries keep unused
        self.settled: dict[int, int] = {}  # by thread
        self.given_back: list[Any] = []
        self.allocated: weakref.WeakValueDictionary[int, _Mapped] = weakref.WeakValueDictionary()
        self.opened: weakref.WeakSet[_Mapped] = weakref.WeakSet()
        self.buffers = itertools.count(1)
        self.here = threading.local()

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
        """Do what a stream holds, up to a place. Several threads may, each stream in its order."""
        while True:
            with self.changed:
                while stream.running and stream.done < place:
                    assert self.changed.wait(PATIENCE), "a stream stands still"
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

    # --- what Runtime asks for ----------------------------------------------------------------

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
        """Of each thread, as CuPy's."""
        return getattr(self.here, "stream", LEGACY)

    @contextlib.contextmanager
    def using(self, index: int, stream: int) -> Iterator[None]:
        before, self.here.stream = self.current_stream(index), stream
        try:
            yield
        finally:
            self.here.stream = before

    def destroy_stream(self, stream: int) -> None:
        key = next(key for key in self.streams if key[1] == stream)
        assert not self.streams[key].waiting, "given back before all was done"
        del self.streams[key]

    def record(self, index: int, stream: int) -> Event:
        with self.lock:
            assert stream not in self.captured, "the event would belong to the graph"
            found = self._find(index, stream)
            return Event(found, found.end)

    def wait(self, index: int, stream: int, event: Event) -> None:
        if isinstance(event, SharedEvent):
            record = int(event.counts[0])  # the latest when this is called
            self.enqueue(index, stream, lambda: event.await_record(record))
            return
        with self.lock:
            self._find(index, stream).waiting.append(event)

    def is_done(self, event: Event) -> bool:
        """Asked for the first time, it is not, as a program must expect; then it comes."""
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
        """As a file without a name, which another process may open."""
        if nbytes > self.room - self.cached:
            raise DeviceMemoryError(f"{nbytes} bytes are too many")
        given_back, self.given_back = self.given_back, []
        if len(given_back) < 16:
            self.given_back += given_back
        else:
            for stream in list(self.streams.values()):
                self._run(stream, stream.end)
            for file, _ in given_back:
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
            """The elements, from the lowest address on."""
            low = sum(min(0, s) * (n - 1) for s, n in zip(layout.strides, shape, strict=True))
            high = sum(max(0, s) * (n - 1) for s, n in zip(layout.strides, shape, strict=True))
            memory = at(layout.address + low, high - low + itemsize)
            return np.ndarray(shape, f"V{itemsize}", memory, -low, layout.strides)

        def task() -> None:
            array(into)[...] = array(source)

        if 0 not in shape:
            self.enqueue(index, stream, task)

    def load(self, index: int, by: Any, n: int) -> None:
        pass

    def combine(
        self, index: int, by: Any, sources: Any, out: int, count: int, divisor: float, stream: int
    ) -> None:
        def task() -> None:
            from mpicoll.kernels.library import kernels

            assert kernels is not None, "the simulation computes with the C library"
            addresses = (ctypes.c_void_p * len(sources))(*sources)
            format = kernels.format(by.format.encode())
            kernels.combine(
                format, by.operation, addresses, len(sources), out, count * by.elements, divisor
            )

        self.enqueue(index, stream, task)

    def scale(
        self, index: int, dtype: Any, source: int, factor: Any, out: int, count: int, stream: int
    ) -> None:
        def task() -> None:
            reduction.scale(
                dtype, elements(source, dtype.numpy, count), factor,
                elements(out, dtype.accumulate, count),
            )  # fmt: skip

        self.enqueue(index, stream, task)

    def narrow(
        self, index: int, dtype: Any, source: int, out: int, count: int, stream: int
    ) -> None:
        def task() -> None:
            wide = elements(source, np.dtype(np.float32), count)
            reduction.narrow(wide, elements(out, dtype.numpy, count))

        self.enqueue(index, stream, task)

    def settle(self, index: int) -> None:
        self.settled[threading.get_ident()] = index

    def on(self, index: int) -> Any:
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
        """Devices go on without their hosts, for other devices wait for them."""
        self.enqueue(index, stream, lambda: simulated_peers.carry_out(peers, call))
        self.begin_later(index, stream)

    def begin_later(self, index: int, stream: int) -> None:
        with self.lock:
            found = self._find(index, stream)
            begin = threading.Timer(DELAY, self._run, (found, found.end))
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
            raise RuntimeError("a process cannot open what it has exported itself")
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
        assert owner.buffer == found.buffer, "that allocation is no more"
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
            raise RuntimeError("a process cannot open an event that it has exported itself")
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        counts = mmap.mmap(opened, mmap.PAGESIZE)
        os.close(opened)
        return SharedEvent(self, name, counts)

    def record_again(self, index: int, stream: int, event: SharedEvent) -> None:
        assert event.ear is not None, "only the process that has made it may record it"
        with self.lock:
            record = int(event.counts[0]) + 1

            def come(counts: Any = event.counts) -> None:
                counts[1] = max(counts[1], record)

            self._find(index, stream).waiting.append(come)
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

    def load_for_all(self, index: int, by: Any, n: int) -> None:
        self.load(index, by, n)

    def combine_for_all(
        self, index: int, by: Any, sources: Any, outs: Any, count: int, divisor: float, stream: int
    ) -> None:
        """All sources are read before anything is written, of each element at least."""
        size = np.dtype(by_name[by.format].numpy).itemsize * by.elements * count
        between = np.empty(max(size, 1), np.uint8)
        Simulated.combine(self, index, by, sources, between.ctypes.data, count, divisor, stream)

        def task() -> None:
            for out in outs:
                ctypes.memmove(out, between.ctypes.data, size)

        self.enqueue(index, stream, task)


class _Mapped:
    """Memory of a device; as in CUDA, giving it back waits until all is done. Closing another
    process's does not: what uses it then ends the process.
    """

    def __init__(
        self, cuda: Simulated, file: int, memory: mmap.mmap, size: int, allocated: bool
    ) -> None:
        self.cuda, self.file, self.memory, self.size = cuda, file, memory, size
        self.is_allocated = allocated
        self.buffer = next(cuda.buffers)

    def __del__(self) -> None:
        if self.is_allocated:
            self.cuda.given_back.append((self.file, self.memory))
        else:
            os.close(self.file)


def _mapped(cuda: Simulated, file: int, size: int, nbytes: int, fill: bool) -> Memory:
    memory = mmap.mmap(file, size)
    array = np.frombuffer(memory, np.uint8)
    if fill:
        array[: 1 << 20] = 0xEE  # no more: what nobody touches takes no memory of the machine
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
    """An array on a simulated device, which its program works on in one stream.

    given: what calls get.
    host:  what ``upload`` puts there and what ``download`` gets.
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

    def upload(self, long: bool = False) -> None:
        """A kernel that makes the values; all kernels take as long as they can here."""
        values = self.host.copy()

        def task() -> None:
            self._numpy()[...] = values

        self.cuda.enqueue(self.index, self.number, task)

    def double(self) -> None:
        """A kernel."""

        def task() -> None:
            self._numpy()[...] *= 2

        self.cuda.enqueue(self.index, self.number, task)

    def fill(self, slope: int, start: int, long: bool = False) -> None:
        """A kernel that makes element i ``slope * (i % PERIOD) + start``."""

        def task() -> None:
            self._numpy()[...] = (np.arange(self.host.size) % PERIOD * slope + start).astype("f4")

        self.cuda.enqueue(self.index, self.number, task)

    def count_wrong(self, slope: int, start: int, begin: int, end: int, first: int) -> int:
        """How many elements from begin to end are not those of ``fill`` from ``first`` on."""
        found = []

        def task() -> None:
            made = np.arange(first, first + end - begin) % PERIOD * slope + start
            found.append(np.count_nonzero(self._numpy()[begin:end].astype("f4") != made))

        self.cuda.enqueue(self.index, self.number, task)
        self.cuda.synchronize(self.cuda.record(self.index, self.number))
        return int(found[0])

    def download(self) -> None:
        """A consumer in the same stream, and then the host."""

        def task() -> None:
            self.host[...] = self._numpy()

        self.cuda.enqueue(self.index, self.number, task)
        self.cuda.synchronize(self.cuda.record(self.index, self.number))


def laid_out(host: np.ndarray, layout: str) -> tuple[tuple[int, ...] | None, int, int]:
    """Strides (None: C order), the first element's offset, and bytes of memory for an array.

    layout: "C"; "third": every third element of a greater array; "F": Fortran's order; a number
            in digits: so many elements behind where the memory begins.
    """
    if layout.isdigit():
        behind = int(layout) * host.dtype.itemsize
        return None, behind, behind + host.nbytes
    if layout == "third":
        wide = np.empty((*host.shape, 3), host.dtype)
        return wide.strides[: host.ndim], host.dtype.itemsize, wide.nbytes
    return None if layout == "C" else np.asfortranarray(host).strides, 0, host.nbytes


class Arrays:
    """Where the tests get their arrays on devices from; tests/gpu/real.py has those of a GPU.

    devices:  how many there are.
    kinds:    of memory that not every MPI takes.
    streams:  each array has a stream of its own, and tells it.
    large:    elements of a float32 array whose copies take long.
    sizes:    bytes of arrays that take several slots of the usual size.
    pooled:   the kind of memory that goes back to a pool when it is freed.
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
        """As many devices as a route takes for so many ranks."""
        return cls({"shared_gpu": 1, "peer": ranks}.get(name))

    def serves(self, dtype: Any) -> bool:
        """There are arrays of the dtype."""
        return True

    def make(
        self, host: np.ndarray, index: int = 0, layout: str = "C", kind: str = "plain"
    ) -> DeviceArray:
        """An array like ``host``, of ``laid_out``'s layout, in memory of that kind."""
        stream = self.cuda.create_stream(index)
        return DeviceArray(self.cuda, host, index, stream, layout, kind)

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """In here calls are made; leaving it, nothing is under way any more."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """Of the first device."""
        return 1 << 40

    def release(self) -> None:
        """Give memory that pools keep back to the driver."""

    @contextlib.contextmanager
    def full(self, left: int) -> Iterator[None]:
        """In here the devices have no more than so many bytes in one piece."""
        allocate = self.cuda.allocate

        def refuse(index: int, nbytes: int) -> Memory:
            if nbytes > left:
                raise MemoryError(f"{nbytes} bytes of device memory")
            return allocate(index, nbytes)

        self.cuda.allocate = refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.cuda.allocate = allocate  # type: ignore[method-assign]

    @contextlib.contextmanager
    def capturing(self, array: DeviceArray) -> Iterator[Graph]:
        """In here the array's stream is captured into a graph."""
        graph = self.cuda.captured[array.number] = Graph(self.cuda, array.index, array.number)
        yield graph
        del self.cuda.captured[array.number]
