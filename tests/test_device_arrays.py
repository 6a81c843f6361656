"""Views of GPU arrays through DLPack and the CUDA array interface; tests/gpu has real libraries.

The array libraries are fakes that follow the standards. The runtime is a stub that knows the device
of each address. The tests do not read the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
import types

import numpy as np
import pytest

from mpicoll.arrays.adapters import build_view
from mpicoll.arrays.views import DeviceView
from mpicoll.cuda import runtime
from mpicoll.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.any_mpi

CPU, CUDA, CUDA_HOST, METAL, ROCM, ROCM_HOST, MANAGED = 1, 2, 3, 8, 10, 11, 13
READ_ONLY, COPIED = 1, 2
#: An address on device 1 of the stub.
ADDRESS = 0x7000_0000


class StubRuntime:
    """The functions of a runtime that views call."""

    def __init__(self) -> None:
        self.inside: list[int] = []

    def current_device(self) -> int:
        return 1

    def current_stream(self, index: int) -> int:
        return 500 + index

    def device_of(self, address: int) -> int:
        assert address, "the null pointer has no device"
        return 1 if address >= ADDRESS else 0

    @contextlib.contextmanager
    def on(self, index: int):
        self.inside.append(index)
        yield
        self.inside.pop()


@pytest.fixture
def gpus(monkeypatch) -> StubRuntime:
    made = StubRuntime()
    monkeypatch.setattr(runtime, "_runtime", made)
    return made


def view(array, writable=False) -> DeviceView:
    found = build_view(array, writable, "broadcast: tensor")
    assert isinstance(found, DeviceView)
    return found


def assert_raises(array, message, writable=False, error=UnsupportedError) -> None:
    with pytest.raises(error, match=rf"(?s)broadcast: tensor: .*{message}"):
        build_view(array, writable, "broadcast: tensor")


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_held: list[object] = []


class Producer:
    """An array with DLPack, by default of float32.

    version:         (major, minor) of its capsules; None: unversioned.
    device:          device in the capsule.
    reported_device: result of __dlpack_device__, by default ``device``.
    strides:         in elements.
    """

    def __init__(
        self, shape=(2, 3), version=(1, 0), device=(CUDA, 1), reported_device=None, flags=0,
        strides=None, address=ADDRESS, offset=0, dtype=(2, 32, 1), name=None,
    ) -> None:  # fmt: skip
        self.__dict__.update(locals())
        self.calls: list[dict[str, object]] = []
        self.inside: list[int] = []

    def __dlpack_device__(self):
        return self.reported_device or self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.calls.append({"stream": stream, "max_version": max_version, "copy": copy})
        self.inside += runtime._runtime.inside if runtime._runtime else []
        return self._capsule()

    def _capsule(self):
        n = len(self.shape)
        steps = (ctypes.c_int64 * n)(*(self.strides or (0,) * n))
        extents = (ctypes.c_int64 * n)(*self.shape)
        bits = struct.pack(
            "=QiiiBBHQQQ", self.address, *self.device, n, *self.dtype, ctypes.addressof(extents),
            ctypes.addressof(steps) if self.strides else 0, self.offset,
        )  # fmt: skip
        name, bits = b"dltensor", bits + bytes(16)
        if self.version is not None:
            name = b"dltensor_versioned"
            bits = struct.pack("=IIQQQ", *self.version, 0, 0, self.flags) + bits
        memory, name = ctypes.create_string_buffer(bits), self.name or name
        _held.append((extents, steps, memory, name))
        return _new(ctypes.addressof(memory), name, None)


class OldProducer(Producer):
    """``__dlpack__`` without the arguments of DLPack 1.0."""

    def __dlpack__(self, stream=None):
        self.calls.append({"stream": stream})
        return self._capsule()


def test_dlpack_on_a_device(gpus):
    array = Producer(strides=(1, 2), offset=8)
    found = view(array)
    assert (found.device, found.address, found.shape) == (1, ADDRESS + 8, (2, 3))
    assert found.strides == (4, 8) and found.buffer is None and found.stream == runtime.UNKNOWN
    assert array.calls == [{"stream": 1, "max_version": (1, 1), "copy": None}]
    assert array.inside == [1], "the array's device is not current"
    view(array, writable=True)
    assert array.calls[-1]["copy"] is False
    plain = view(Producer(shape=(4,), dtype=(4, 16, 1)))
    assert plain.dtype.name == "bfloat16" and plain.buffer is not None and plain.count == 4


def test_dlpack_of_managed_memory(gpus):
    """The capsule may contain any device, so the driver is asked, except for the null pointer."""
    assert view(Producer(device=(MANAGED, 0))).device == 1
    assert view(Producer(device=(MANAGED, 0), address=0, shape=(0,))).device == 0


def test_dlpack_without_new_arguments(gpus):
    for version in (None, (1, 0)):
        array = OldProducer(version=version)
        assert view(array, writable=True).shape == (2, 3)
        assert array.calls == [{"stream": 1}]


def test_dlpack_read_only_or_copied_arrays_are_inputs_only(gpus):
    for flags, message, error in ((READ_ONLY, "read-only", ArgumentError),
                                (COPIED, "a copy of the array", UnsupportedError)):  # fmt: skip
        assert view(Producer(flags=flags)).count == 6
        assert_raises(Producer(flags=flags), message, True, error)
    assert view(Producer(flags=1 << 2), writable=True).count == 6


def test_dlpack_of_other_devices_is_rejected(gpus):
    array = Producer(device=(CUDA, 1))
    assert view(array).device == 1
    assert array.calls[0]["stream"] == 1, "not the legacy default stream"
    assert_raises(Producer(device=(ROCM, 0)), "rocm:0 are not supported; copy to the host")
    assert_raises(Producer(device=(METAL, 0)), "metal:0 are not supported; copy to the host")
    assert_raises(Producer(device=(CUDA, 0), version=(2, 0)), r"DLPack 2\.0 is not supported")
    assert_raises(Producer(device=(METAL, 0), reported_device=(CUDA, 0)), "capsule is on metal:0")
    assert_raises(Producer(name=b"used_dltensor", device=(CUDA, 0)), "got b'used_dltensor'")


def test_dlpack_errors_of_the_producer(gpus):
    class Sharded(Producer):
        def __dlpack_device__(self):
            raise BufferError("only for unsharded arrays")

    class Graded(Producer):
        def __dlpack__(self, **options):
            raise BufferError("requires grad")

    assert_raises(Sharded(), "Sharded: only for unsharded arrays")
    assert_raises(Graded(), "Graded: requires grad")
    assert_raises(Producer(dtype=(2, 32, 4)), "4 lanes")


@pytest.mark.parametrize("device", [CPU, CUDA_HOST, ROCM_HOST])
def test_dlpack_on_the_host(device):
    """Pinned memory is host memory, with and without a GPU."""
    memory = np.arange(6, dtype=np.float32).reshape(2, 3)

    def made(**more):
        return Producer(address=memory.ctypes.data, device=(device, 0), **more)

    found = build_view(made(), True, "x")
    assert found.device is None and (found.array == memory).all()
    with pytest.raises(UnsupportedError, match="a copy of the array"):
        build_view(made(flags=COPIED), True, "x")
    with pytest.raises(ArgumentError, match="read-only"):
        build_view(made(flags=READ_ONLY), True, "x")
    assert (build_view(made(flags=READ_ONLY | COPIED), False, "x").array == memory).all()
    with pytest.raises(UnsupportedError, match="the capsule is on cuda:0"):
        array = Producer(address=memory.ctypes.data, device=(CUDA, 0), reported_device=(device, 0))
        build_view(array, False, "x")


def test_jax(gpus, monkeypatch):
    """JAX arrays on a GPU are inputs only. Tracers are rejected."""
    jax = types.ModuleType("jax")

    class Array(Producer):
        pass

    class Tracer(Array):
        def __dlpack_device__(self):
            raise AttributeError("DynamicJaxprTracer has no attribute __dlpack_device__")

    jax.Array = Array
    monkeypatch.setitem(sys.modules, "jax", jax)
    array = Array()
    assert view(array).device == 1 and array.calls[0]["stream"] == 1
    assert_raises(array, "JAX array is read-only", True, ArgumentError)
    assert_raises(Tracer(), "Tracer: DynamicJaxprTracer has no attribute")


class Interface:
    """An array with the interface, as Numba's, without the keys in ``missing``."""

    def __init__(self, missing=(), **changed) -> None:
        entries = {"shape": (2, 3), "typestr": "<f4", "data": (ADDRESS, False), "version": 3}
        entries |= changed
        self._entries = {name: value for name, value in entries.items() if name not in missing}

    @property
    def __cuda_array_interface__(self):
        if not self._entries["data"]:
            raise AttributeError("on the host")
        return self._entries


def test_interface(gpus):
    found = view(Interface(strides=[4, 8], shape=[2, 3], descr=[("", "<f4")]), writable=True)
    assert (found.device, found.address, found.shape, found.strides) == (1, ADDRESS, (2, 3), (4, 8))
    assert found.buffer is None and found.dtype.name == "float32"
    assert view(Interface(data=(16, False))).device == 0
    entries = Interface(strides=None).__cuda_array_interface__
    held = types.SimpleNamespace(__cuda_array_interface__=entries)  # not of the object's type
    assert view(held).buffer is not None
    for stream, expected in ((None, runtime.UNKNOWN), (1, 1), (0xABCD0, 0xABCD0)):
        assert view(Interface(stream=stream)).stream == expected
    assert view(Interface()).stream == runtime.UNKNOWN
    # Without elements the address is 0, which has no device.
    empty = view(Interface(shape=(0, 3), data=(0, False)), writable=True)
    assert (empty.device, empty.count) == (1, 0)


def test_interface_errors(gpus):
    assert_raises(Interface(mask=Interface()), "masked arrays")
    assert view(Interface(mask=None)).count == 6
    assert_raises(Interface(stream=0), "has stream 0")
    assert_raises(Interface(version=4), "version 4 .* is not supported")
    assert_raises(Interface(data=(ADDRESS, True)), "read-only", True, ArgumentError)
    assert view(Interface(data=(ADDRESS, True))).count == 6
    assert_raises(Interface(typestr=">f4"), "byte order")
    assert_raises(Interface(typestr="|V2"), "dtype")
    assert_raises(Interface(data=(ADDRESS + 2, False)), "aligned to their size")
    assert_raises(Interface(strides=(0, 4)), "output share memory", True, ArgumentError)
    for name in ("shape", "typestr", "version"):
        assert_raises(Interface(missing=[name]), "must have shape, typestr, data")
    assert_raises(Interface(data=ADDRESS), "must have shape, typestr, data")


def test_arrays_of_one_type_with_and_without_the_interface(gpus):
    """Warp's host arrays have DLPack only."""

    class Both(Interface):
        def __init__(self, host=None) -> None:
            super().__init__(data=(ADDRESS, False) if host is None else None)
            self.host = host

        def __dlpack_device__(self):
            return self.host.__dlpack_device__()

        def __dlpack__(self, **options):
            return self.host.__dlpack__(**options)

    for _ in range(2):
        assert view(Both()).device == 1
        host = np.zeros(5)
        assert build_view(Both(host), True, "x").buffer.ctypes.data == host.ctypes.data


# ---- CuPy that cannot be used --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_hip", "message"),
    [(True, "built for ROCm, which is not supported"), (False, "CUDA driver's library, .*cannot")],
)
def test_cupy_that_cannot_be_used_raises(monkeypatch, is_hip, message):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    cupy, api = types.ModuleType("cupy"), types.SimpleNamespace(is_hip=is_hip)
    cupy.cuda = types.SimpleNamespace(runtime=api, is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(UnsupportedError, match=message):
        runtime.Runtime()
