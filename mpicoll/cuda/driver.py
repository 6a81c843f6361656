"""What CUDA's driver offers and CuPy does not: contexts of threads, attributes of memory, UUIDs.

https://docs.nvidia.com/cuda/cuda-driver-api
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpicoll.errors import MpicollError

__all__ = ["BUFFER", "EXPORTABLE", "MANAGED", "NBYTES", "ORDINAL", "START", "Driver"]

#: CUpointer_attribute: IS_LEGACY_CUDA_IPC_CAPABLE, IS_MANAGED, DEVICE_ORDINAL.
EXPORTABLE, MANAGED, ORDINAL = 10, 8, 9
#: BUFFER_ID, RANGE_START_ADDR, RANGE_SIZE.
BUFFER, START, NBYTES = 7, 11, 12
#: CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2
#: What is current already.
_HERE = nullcontext()


class Driver:
    """The driver's library.

    library: what ``ctypes.CDLL("libcuda.so.1")`` returns.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: object) -> None:
        failed = getattr(self._library, name)(*arguments)
        if failed:
            raise MpicollError(f"{name}: CUDA's driver returns error {failed}")

    def on(self, index: int) -> AbstractContextManager[object]:
        """Return a context in which the calling thread works on a device.

        Leaving it gives the thread back the context of CUDA that it had, or none. It does not go
        back to a device by its number, as cudaSetDevice does, which makes a context (half a
        gigabyte) on the device with which a thread begins, whether the program uses that or not.
        """
        context, now = self._context(index), ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(now))
        return _HERE if now.value == context else _On(self, context)

    def _context(self, index: int) -> int:
        """Return a device's primary context, the one of the CUDA runtime, which is kept."""
        found = self._contexts.get(index)
        if found is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            assert context.value is not None
            found = self._contexts[index] = context.value
        return found

    def push(self, context: int) -> None:
        """Make a context the calling thread's current one, above those that it has."""
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))

    def pop(self) -> None:
        """Take back what ``push`` has done."""
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def relax_capture(self) -> None:
        """Let the calling thread do what could disturb the capture of a graph on another thread.

        By default a thread that allocates, or waits for an event, invalidates such a capture.
        """
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def attribute(self, which: int, address: int) -> int | None:
        """Return an attribute of memory, None for memory that the driver does not know."""
        value = ctypes.c_int(0)
        failed = self._library.cuPointerGetAttribute(
            ctypes.byref(value), which, ctypes.c_uint64(address)
        )
        return None if failed else value.value

    def attributes(self, which: Sequence[int], address: int) -> list[int]:
        """Return attributes of memory by one call of the driver's; zeros for what it does not know.

        Some of them are of 4 bytes, and leave the rest of 8 as it was.
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
        """Return where the current device reaches registered memory of the host."""
        found = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), 0)
        return found.value

    def uuid(self, index: int) -> str:
        """Return the UUID of a device; of a MIG device, that of the instance."""
        device, found = ctypes.c_int(), (ctypes.c_uint8 * 16)()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return str(uuid.UUID(bytes=bytes(found)))


class _On:
    """A context of CUDA that is current inside."""

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver.push(self._context)

    def __exit__(self, *error: object) -> None:
        self._driver.pop()
