"""Reduction kernels on a GPU, compared with ``reduction.py`` on the host.

tests/test_device_kernels.py compares the assert_same source, compiled for the host, with NumPy.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("oracle", reason="run it with make test-gpu")
from oracle import any_bits, operands

from mpicoll.dtypes import DTYPES, OPERATIONS, Kind, ReduceOp
from mpicoll.kernels import reduction
from mpicoll.kernels.device_kernels import DeviceKernels

pytestmark = pytest.mark.on_a_gpu

PAIRS = [
    pytest.param(op, dtype, id=f"{op.name}-{dtype}")
    for op in OPERATIONS
    for dtype in DTYPES
    if op is not ReduceOp.PREMUL_SUM
    and dtype.kind in op.kinds
    and reduction.find_loop(op, dtype) is not None
]
NARROW = [
    row
    for row in DTYPES
    if row.kind is Kind.NARROW_FLOAT and reduction.find_loop(ReduceOp.SUM, row) is not None
]
#: More elements than a device has threads. The emulated device has fewer threads.
MANY = 100_003 if "EMULATED_GPU_CACHE" in os.environ else 1_000_003
#: Less than a vector, with a remainder, and many.
COUNTS = [1, 7, 1000, MANY]


@pytest.fixture(scope="module")
def kernels():
    return DeviceKernels(0)


class OnDevice:
    """A copy of an array on the device, ``offset`` bytes after a multiple of 256."""

    def __init__(self, array, offset=0):
        self.memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(array.nbytes + 256), 0)
        self.bytes = cupy.ndarray(array.nbytes, "u1", self.memory + offset)
        self.bytes.set(np.frombuffer(array.tobytes(), np.uint8))
        cupy.cuda.get_current_stream().synchronize()  # the tests' streams are not ordered after it
        self.address = self.bytes.data.ptr
        self.dtype = array.dtype

    def got(self):
        return self.bytes.get().view(self.dtype)


def assert_same(got, expected, kind, case):
    """Compare bits. All NaN are equal, and complex products may be rounded differently."""
    if kind is Kind.COMPLEX:
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=case)
        return
    if kind in (Kind.FLOAT, Kind.NARROW_FLOAT):
        nan = np.isnan(expected)
        assert (np.isnan(got) == nan).all(), case
        got, expected = got[~nan], expected[~nan]
    assert got.tobytes() == expected.tobytes(), case


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_combine(kernels, op, dtype):
    """Outputs with the alignment of the sources or another one, then in place."""
    by, stream = reduction.find_loop(op, dtype), cupy.cuda.Stream(non_blocking=True)
    size = dtype.itemsize
    for count in COUNTS:
        for n, outputs, step, shift in (
            (2, 1, 0, 0), (3, 1, size, 0), (17, 1, 0, 0), (2, 2, 0, 0), (3, 3, 0, size),
            (4, 4, size, 0),
        ):  # fmt: skip
            if n == 17 and count > 1000:
                continue
            arrays = [operands(op, dtype, count, rank) for rank in range(n)]
            sources = [OnDevice(array, step * rank) for rank, array in enumerate(arrays)]
            outs = [
                OnDevice(np.zeros(count, dtype.numpy), step * rank + shift)
                for rank in range(outputs)
            ]
            divisor = n if op is ReduceOp.AVG else 1
            expected = np.empty(count, dtype.numpy)
            with np.errstate(all="ignore"):
                reduction.combine(op, dtype, arrays, expected, divisor)
            addresses = [each.address for each in sources]
            for into in ([each.address for each in outs], addresses[:outputs]):
                kernels.combine(by, addresses, into, count, divisor, stream.ptr)
            stream.synchronize()
            case = f"{count} of {n}, step {step}"
            for each in (*outs, *sources[:outputs]):
                assert_same(each.got(), expected, dtype.kind, case)


@pytest.mark.parametrize("dtype", NARROW, ids=repr)
def test_narrow(kernels, dtype):
    stream = cupy.cuda.Stream(non_blocking=True)
    wide = any_bits(next(row for row in DTYPES if row.name == "float32"), MANY, 0)
    sources, out = OnDevice(wide), OnDevice(np.zeros(wide.size, dtype.numpy))
    expected = np.empty(wide.size, dtype.numpy)
    with np.errstate(all="ignore"):
        reduction.narrow(wide, expected)
    kernels.narrow(dtype, sources.address, out.address, wide.size, stream.ptr)
    stream.synchronize()
    assert_same(out.got(), expected, dtype.kind, str(dtype))


@pytest.mark.parametrize(
    "dtype", [row for row in DTYPES if row.kind in ReduceOp.PREMUL_SUM.kinds], ids=repr
)
def test_scale(kernels, dtype):
    if reduction.find_loop(ReduceOp.PREMUL_SUM, dtype) is None:
        pytest.skip("no kernel for this dtype")
    stream = cupy.cuda.Stream(non_blocking=True)
    array = operands(ReduceOp.PREMUL_SUM, dtype, 1003, 0)
    factor = 3 if dtype.kind is Kind.INTEGER else 0.5
    sources, out = OnDevice(array), OnDevice(np.zeros(array.size, dtype.accumulate))
    expected = np.empty(array.size, dtype.accumulate)
    with np.errstate(all="ignore"):
        reduction.scale(dtype, array, factor, expected)
    kernels.scale(dtype, sources.address, factor, out.address, array.size, stream.ptr)
    stream.synchronize()
    assert_same(out.got(), expected, Kind.FLOAT if dtype.kind is Kind.NARROW_FLOAT else dtype.kind,
         str(dtype))  # fmt: skip
