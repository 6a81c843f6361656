"""CuPy built for ROCm, as a stub: the runtime gives HIP what it wants, and refuses by name."""

from __future__ import annotations

import ctypes
import os
import sys
import types
from typing import Any

import numpy as np
import pytest

from mpicoll.arrays.adapters import build_view
from mpicoll.cuda import mpi_support, runtime
from mpicoll.cuda.cupy_runtime import CupyRuntime
from mpicoll.cuda.runtime import LEGACY
from mpicoll.errors import DeviceMemoryError, MpicollError, UnsupportedError

pytestmark = pytest.mark.any_mpi

#: An address of device 1, and one of a pool.
PLACE, POOLED = 0x7000_0000, 0x8000_0000


class Hip:
    """HIP's library, and CuPy's functions of the runtime, which call it.

    calls: of functions that take streams.
    """

    is_hip = True
    streamNonBlocking, eventDisableTiming, memcpyDefault = 1, 2, 4

    def __init__(self) -> None:
        self.device, self.mode, self.lacks = 0, 0, set[str]()
        self.calls: list[tuple[Any, ...]] = []

    # --- the library

    def hipInit(self, flags):
        return 0

    def hipGetDevice(self, into):
        into._obj.value = self.device
        return 0

    def hipSetDevice(self, index):
        if index > 1:
            return 101  # hipErrorInvalidDevice
        self.device = index
        return 0

    def hipThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def hipPointerGetAttribute(self, into, which, address):
        known = {9: 1, 10: int(address.value < POOLED), 8: 0, 11: PLACE}
        if address.value < PLACE or which not in known or (which == 10 and "ipc" in self.lacks):
            return 1
        size = 8 if which == 11 else 4
        ctypes.memmove(into, known[which].to_bytes(size, "little"), size)
        return 0

    def hipDeviceGet(self, into, index):
        into._obj.value = index
        return 0

    def hipDeviceGetUuid(self, into, device):
        into._obj[:] = [0xA0 + device.value] * 16
        return 0

    def hipIpcGetEventHandle(self, handle, event):
        if "events" in self.lacks:
            return 801  # hipErrorNotSupported
        ctypes.memmove(handle, event.value.to_bytes(4, "little") * 16, 64)
        return 0

    def hipIpcOpenEventHandle(self, into, handle):
        into._obj.value = int.from_bytes(bytes(handle)[:4], "little") + 1
        return 0

    # --- cupy.cuda.runtime

    def streamCreateWithFlags(self, flags):
        return 0x5000

    def eventCreateWithFlags(self, flags):
        return 0x6000

    def streamDestroy(self, stream):
        pass

    eventDestroy = free = streamDestroy

    def eventRecord(self, event, stream):
        self.calls.append(("record", self.device, stream))

    def streamWaitEvent(self, stream, event):
        self.calls.append(("wait", self.device, stream))

    def streamIsCapturing(self, stream):
        self.calls.append(("capturing", self.device, stream))
        return stream == 0x5000

    def memcpyAsync(self, into, source, nbytes, kind, stream):
        assert kind == self.memcpyDefault
        self.calls.append(("copy", self.device, stream))

    def ipcGetEventHandle(self, event):
        raise RuntimeError("hipErrorUnknown")

    ipcOpenEventHandle = ipcGetEventHandle

    def ipcGetMemHandle(self, address):
        return b"handle"

    class CUDARuntimeError(RuntimeError):
        status = 2

    def malloc(self, nbytes):
        if nbytes > 1 << 40:
            raise self.CUDARuntimeError
        return PLACE

    def memGetInfo(self):
        return 1 << 20, 1 << 30

    def getDeviceCount(self):
        return 2

    def getDevice(self):
        return self.device

    def deviceGetPCIBusId(self, index):
        return f"0000:c{index}:00.0"

    def getDeviceProperties(self, index):
        return {"name": b"AMD Instinct"}

    def driverGetVersion(self):
        return 70125424

    def runtimeGetVersion(self):
        return 60443483


@pytest.fixture
def hip(monkeypatch) -> Hip:
    made = Hip()
    cupy = types.ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    cupy.cuda = types.SimpleNamespace(
        runtime=made,
        is_available=lambda: True,
        get_current_stream=lambda index: types.SimpleNamespace(ptr=0),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    real = ctypes.CDLL

    def load(name, mode=0):
        if "amdhip64" not in str(name):
            return real(name, mode)
        if mode & os.RTLD_NOLOAD and not name.endswith(".6"):
            raise OSError(f"{name}: there is none")
        made.loaded = name
        return made

    monkeypatch.setattr(ctypes, "CDLL", load)
    return made


@pytest.fixture
def rocm(hip, monkeypatch) -> CupyRuntime:
    made = CupyRuntime()
    monkeypatch.setattr(runtime, "_runtime", made)
    return made


def test_what_it_is(rocm, hip):
    assert hip.loaded == "libamdhip64.so.6", "the one that CuPy has loaded"
    assert rocm.kind() == "ROCm" and rocm.count() == 2 and rocm.name(1) == "AMD Instinct"
    assert rocm.driver_version() == "ROCm 7.1 (driver), 6.4 (runtime), CuPy 14.2.0"
    assert rocm.identity(1) == "0000:c1:00.0 a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1"


def test_without_its_library(hip, monkeypatch):
    def absent(name, mode=0):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(UnsupportedError, match=r"library of ROCm, .*libamdhip64\.so: cannot open"):
        CupyRuntime()


def test_the_default_stream_has_another_name(rocm, hip):
    """What is 1 for all code here is 0 for HIP; the device of each call is current."""
    assert rocm.current_stream(1) == LEGACY
    for stream, number in ((LEGACY, 0), (0x4000, 0x4000)):
        hip.calls.clear()
        event = rocm.record(1, stream)
        rocm.wait(1, stream, event)
        rocm.copy(1, 1, 2, 3, stream)
        rocm.check_stream(1, stream, "x")
        expected = [("record", 1, number), ("wait", 1, number), ("copy", 1, number)]
        assert hip.calls[:3] == expected and hip.device == 0
    with pytest.raises(UnsupportedError, match=r"x: .* captured"):
        rocm.check_stream(1, 0x5000, "x")


def test_devices_and_threads(rocm, hip):
    with rocm.on(1):
        assert hip.device == 1
        with rocm.on(1), rocm.on(0):
            assert hip.device == 0
        assert hip.device == 1
    assert hip.device == 0
    with pytest.raises(MpicollError, match=r"hipSetDevice: HIP returns error 101"), rocm.on(5):
        pass
    rocm.current_device()
    rocm._driver.relax_capture()
    assert hip.mode == 2


def test_memory(rocm, hip):
    assert rocm.device_of(PLACE) == 1
    with pytest.raises(UnsupportedError, match="driver of ROCm does not know the memory at 0x10"):
        rocm.device_of(16)
    assert rocm.is_plain(PLACE) and not rocm.is_plain(POOLED)
    hip.lacks.add("ipc")  # as before ROCm 7.12: MPI gets a copy
    assert not rocm.is_plain(PLACE)
    memory = rocm.allocate(1, 100)
    assert memory.address == PLACE and rocm.export(1, memory) == b"handle"
    with pytest.raises(DeviceMemoryError, match="GPU 1 has too little memory"):
        rocm.allocate(1, 1 << 50)
    assert rocm._driver.attributes((9, 11, 99), PLACE) == [1, PLACE, 0]


def test_events_of_other_processes(rocm, hip):
    """By HIP itself: CuPy has an error for it."""
    handle = rocm._api.ipcGetEventHandle(0x6000)
    assert len(handle) == 64 and rocm._api.ipcOpenEventHandle(handle) == 0x6001
    hip.lacks.add("events")
    with pytest.raises(UnsupportedError, match=r"hipIpcGetEventHandle: this ROCm .*=staged"):
        rocm._api.ipcGetEventHandle(0x6000)


def test_what_is_not_there_is_refused_by_name(rocm, hip):
    with pytest.raises(UnsupportedError, match=r"no stream_wait_value on ROCm; .*=staged"):
        rocm._driver.stream_wait_value(1, 2, 3)
    with pytest.raises(UnsupportedError, match=r"hipNothing: this ROCm does not support it"):
        rocm._driver.call("hipNothing")
    assert rocm._api.getDeviceCount() == 2, "all else is CuPy's"


def test_tensors_of_torch(rocm, monkeypatch):
    """torch's word for AMD's devices is cuda as well."""
    torch = pytest.importorskip("torch")
    host = torch.zeros(6)

    class Tensor(torch.Tensor):
        is_cpu, is_cuda = False, True

        def get_device(self):
            return 1

        def data_ptr(self):
            return PLACE

        def detach(self):
            return self

    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    found = build_view(host.as_subclass(Tensor), True, "x")
    assert (found.device, found.address, found.stream) == (1, PLACE, LEGACY)


def test_the_interface_of_cuda(rocm):
    """Objects with it may be on AMD's devices; these have no stream."""

    class Interface:
        __cuda_array_interface__ = {  # noqa: RUF012
            "data": (PLACE, False), "shape": (3,), "typestr": "<f8", "version": 2,
        }  # fmt: skip

    found = build_view(Interface(), True, "x")
    assert (found.device, found.count, found.dtype.numpy) == (1, 3, np.float64)


# ---- What MPI says of it -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["CUDA", "ROCm"])
def test_mpi_is_asked_for_the_right_kind(monkeypatch, kind):
    """Each library has a function, or a number, for each kind."""
    asked = []

    class Function:
        def __init__(self, name):
            self.name = name

        def __call__(self, number=None, into=None):
            asked.append((self.name, number))
            if into is None:
                return 1
            into._obj.value = 1
            return 0

    monkeypatch.setattr(mpi_support, "find_function", Function)
    queries = mpi_support.find_queries(kind)
    for name in list(queries)[:2]:
        assert queries[name]() == 1
    own = "MPIX_Query_rocm_support" if kind == "ROCm" else "MPIX_Query_cuda_support"
    number = {"CUDA": 0, "ROCm": 2}[kind]
    assert asked == [(own, None), ("MPIX_GPU_query_support", number)]


def test_switches_of_rocm():
    assert (
        mpi_support.find_switch("Open MPI v5.0.1", {"OMPI_MCA_accelerator": "rocm"}, "ROCm") is None
    )
    found = mpi_support.find_switch("Open MPI v5.0.1", {"OMPI_MCA_accelerator": "cuda"}, "ROCm")
    assert found is not None and found.name == "OMPI_MCA_accelerator"
    assert mpi_support.find_switch("Open MPI v5.0.1", {"OMPI_MCA_accelerator": "rocm"}, "CUDA")
    found = mpi_support.find_switch("CRAY MPICH version 8", {}, "ROCm")
    assert found is not None and "craype-accel-amd" in found.remedy
    assert mpi_support.find_switch("MVAPICH2-GDR", {}, "ROCm").name == "MV2_USE_ROCM"
