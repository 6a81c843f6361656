"""CUDA driver functions that CuPy does not offer: thread contexts, memory attributes, UUIDs.

https://docs.nvidia.com/cuda/cuda-driver-api
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from mpicoll.errors import MpicollError

#: CUpointer_attribute: IS_LEGACY_CUDA_IPC_CAPABLE, IS_MANAGED, DEVICE_ORDINAL.
EXPORTABLE, MANAGED, ORDINAL = 10, 8, 9
#: BUFFER_ID, RANGE_START_ADDR, RANGE_SIZE.
BUFFER, START, NBYTES = 7, 11, 12
#: CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2
#: The context is already current.
_NO_CHANGE = nullcontext()


class Driver:
    """The driver's library.

    library: the result of ``ctypes.CDLL("libcuda.so.1")``.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; raises MpicollError if it fails."""
        failed = getattr(self._library, name)(*arguments)
        if failed:
            raise MpicollError(f"{name}: the CUDA driver returns error {failed}")

    def on(self, index: int) -> AbstractContextManager[object]:
        """Return a context manager in which the calling thread works on a device.

        Leaving it restores the thread's previous CUDA context, or none. (cudaSetDevice cannot do
        that: restoring a device by number creates a context of half a gigabyte on the thread's
        initial device, even if the program does not use it.)
        """
        context, now = self._context(index), ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(now))
        return _NO_CHANGE if now.value == context else _PushedContext(self, context)

    def _context(self, index: int) -> int:
        """Return and retain a device's primary context, which the CUDA runtime uses."""
        found = self._contexts.get(index)
        if found is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), index)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            assert context.value is not None
            found = self._contexts[index] = context.value
        return found

    def relax_capture(self) -> int:
        """Set the calling thread's capture mode to relaxed, and return its previous mode.

        In the default mode, a thread that allocates, frees or waits for an event invalidates a
        graph capture of this or another thread.
        """
        return self._exchange_capture_mode(_RELAXED)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Context in which ``relax_capture`` applies to the calling thread."""
        before = self.relax_capture()
        try:
            yield
        finally:
            self._exchange_capture_mode(before)

    def _exchange_capture_mode(self, mode: int) -> int:
        value = ctypes.c_int(mode)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(value))
        return value.value

    def load_kernel(self, function: int) -> None:
        """Load a kernel, which CUDA may defer to its first launch. Without effect before CUDA 12.4,
        where a query of its attributes loads it.
        """
        if hasattr(self._library, "cuFuncLoad"):
            self.call("cuFuncLoad", ctypes.c_void_p(function))

    def attribute(self, which: int, address: int) -> int | None:
        """Return an attribute of memory, or None if the driver does not know the memory."""
        value = ctypes.c_int(0)
        failed = self._library.cuPointerGetAttribute(
            ctypes.byref(value), which, ctypes.c_uint64(address)
        )
        return None if failed else value.value

    def attributes(self, which: Sequence[int], address: int) -> list[int]:
        """Return attributes of memory by a single driver call; zeros for unknown memory.

        The driver writes only 4 bytes for some attributes, so the values are initialised to zero.
        """
        n = len(which)
        values = (ctypes.c_uint64 * n)()
        start = ctypes.addressof(values)
        places = (ctypes.c_void_p * n)(*(start + 8 * k for k in range(n)))
        failed = self._library.cuPointerGetAttributes(
            n, (ctypes.c_int * n)(*which), places, ctypes.c_uint64(address)
        )
        return [0] * n if failed else list(values)

    def device_pointer(self, address: int) -> int:
        """Return the address of registered host memory on the current device."""
        found = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), 0)
        return found.value

    def uuid(self, index: int) -> str:
        """Return the UUID of a device; for a MIG device, of the instance."""
        device, found = ctypes.c_int(), (ctypes.c_uint8 * 16)()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return str(uuid.UUID(bytes=bytes(found)))


class _PushedContext:
    """Context manager that pushes and pops a CUDA context."""

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", ctypes.c_void_p(self._context))

    def __exit__(self, *error: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
