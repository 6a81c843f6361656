"""ROCm, where CuPy is built for it: what HIP's library offers and CuPy does not.

CuPy's functions have CUDA's names there and call HIP's. What they cannot do is done here, by the
library itself: https://rocm.docs.amd.com/projects/HIP/en/latest/doxygen/html/
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpicoll.cuda.runtime import LEGACY
from mpicoll.errors import MpicollError, UnsupportedError

__all__ = ["Api", "Driver", "load"]

#: hipStreamCaptureModeRelaxed.
_RELAXED = 2
#: hipErrorNotSupported.
_NOT_SUPPORTED = 801
#: Names of HIP's library, of ROCm 7, 6 and 5.
_NAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so")
#: What is current already.
_HERE = nullcontext()


def load() -> Any:
    """Return HIP's library, the one that CuPy has loaded; raises OSError if there is none."""
    for name in _NAMES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # of another version of ROCm
            continue
    return ctypes.CDLL(_NAMES[-1])


class _Handle(ctypes.Structure):
    """The type hipIpcEventHandle_t."""

    _fields_ = (("reserved", ctypes.c_uint8 * 64),)


class Driver:
    """What `driver.Driver` is for CUDA.

    library: what ``load`` returns.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.call("hipInit", 0)

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            f"mpicoll has no {name} on ROCm; MPICOLL_DEVICE_ROUTE=staged takes a route that needs "
            "less"
        )

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; raises UnsupportedError if this ROCm has it not, else MpicollError."""
        function = getattr(self._library, name, None)
        failed = _NOT_SUPPORTED if function is None else function(*arguments)
        if failed == _NOT_SUPPORTED:
            raise UnsupportedError(
                f"{name}: this ROCm does not support it; MPICOLL_DEVICE_ROUTE=staged takes a route "
                "that needs less"
            )
        if failed:
            raise MpicollError(f"{name}: HIP returns error {failed}")

    def on(self, index: int) -> AbstractContextManager[object]:
        """Return a context in which the calling thread works on a device, and has afterwards the
        one that it had. A device of HIP is set up when it is used, not when it is current.
        """
        now = ctypes.c_int()
        self.call("hipGetDevice", ctypes.byref(now))
        return _HERE if now.value == index else _On(self, index, now.value)

    def relax_capture(self) -> None:
        """Let the calling thread do what could disturb the capture of a graph on another thread."""
        self.call("hipThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def attribute(self, which: int, address: int) -> int | None:
        """Return an attribute of memory, None for memory, or attributes, that HIP does not know.

        which: the number of CUDA's attribute, which is HIP's, too.
        """
        value = ctypes.c_uint64(0)  # some are of 4 bytes
        failed = self._library.hipPointerGetAttribute(
            ctypes.byref(value), which, ctypes.c_uint64(address)
        )
        return None if failed else value.value

    def attributes(self, which: Sequence[int], address: int) -> list[int]:
        """Return attributes of memory; zeros for what HIP does not know."""
        return [self.attribute(one, address) or 0 for one in which]

    def uuid(self, index: int) -> str:
        """Return the UUID of a device."""
        device, found = ctypes.c_int(), (ctypes.c_uint8 * 16)()
        self.call("hipDeviceGet", ctypes.byref(device), index)
        self.call("hipDeviceGetUuid", ctypes.byref(found), device)
        return str(uuid.UUID(bytes=bytes(found)))


class _On:
    """A device that is current inside."""

    def __init__(self, driver: Driver, index: int, before: int) -> None:
        self._driver, self._index, self._before = driver, index, before

    def __enter__(self) -> None:
        self._driver.call("hipSetDevice", self._index)

    def __exit__(self, *error: object) -> None:
        self._driver.call("hipSetDevice", self._before)


class Api:
    """CuPy's functions of the runtime, but for those that differ on ROCm.

    HIP's legacy default stream is 0; that 1 means it is new, and not in every ROCm.
    """

    def __init__(self, api: Any, driver: Driver) -> None:
        self._api, self._driver = api, driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def eventRecord(self, event: int, stream: int) -> None:
        """Record an event in a stream."""
        self._api.eventRecord(event, _number(stream))

    def streamWaitEvent(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        self._api.streamWaitEvent(_number(stream), event)

    def streamIsCapturing(self, stream: int) -> bool:
        """Return whether a stream is captured."""
        return bool(self._api.streamIsCapturing(_number(stream)))

    def memcpyAsync(self, into: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        """Enqueue a copy."""
        self._api.memcpyAsync(into, source, nbytes, kind, _number(stream))

    def ipcGetEventHandle(self, event: int) -> bytes:
        """Return the handle of an event, for which CuPy has an error alone."""
        handle = _Handle()
        self._driver.call("hipIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(handle)

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        """Open another process's event."""
        event = ctypes.c_void_p()
        self._driver.call(
            "hipIpcOpenEventHandle", ctypes.byref(event), _Handle.from_buffer_copy(handle)
        )
        return event.value or 0


def _number(stream: int) -> int:
    return 0 if stream == LEGACY else stream
