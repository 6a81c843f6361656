"""Reductions by kernels on a CUDA device, with the same bits as ``reduction.py`` on the host.

The kernels are in ``device.cu``, the kernels of collectives in ``device_peers.cu``. NVRTC compiles
them at first use, in about half a second each, through CuPy, which caches them on disk
(``CUPY_CACHE_DIR``): usually one process of a node compiles a kernel, and its other
processes load it.

Bits that ``reduction.py`` leaves undefined may differ: which NaN a sum or product of float32 and
float64 is, and how products of complex numbers are rounded (here each product once, then their
sum).
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpicoll.dtypes import DType, Factor, Kind, ReduceOp, by_name
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.kernels.peers import PIECE as PIECE
from mpicoll.kernels.peers import RANKS, Collective, Peers
from mpicoll.kernels.reduction import Loop, factor_of, find_loop
from mpicoll.processes import claim, release

#: Threads per block.
_THREADS = 256

#: Maximum number of blocks per multiprocessor, which runs 8 of them at once. More blocks than that
#: balance the load.
_BLOCKS = 32

#: Number of addresses for which a kernel's arguments have space. Most calls have few. All devices
#: accept 4 KiB of arguments, from CUDA 12.1 on 32 KiB.
_CAPACITIES = (17, 500, 4000)

_SOURCES = ("formats.h", "device.cu")
#: Source files of kernels that several devices run together, and threads per block of these
#: kernels.
_PEERS = (*_SOURCES, "device_peers.cu")
_PEER_THREADS = 512

#: Seconds to wait for another process to compile a kernel, and between two checks.
COMPILE_TIMEOUT_S, _CHECK_INTERVAL_S = 2.0, 0.01

# CuPy appends -ftz=true, and the last option wins: device.cu works with it.
_OPTIONS = ("--fmad=false", "--std=c++17")


class DeviceKernels:
    """The kernels of one CUDA device; callers make it current.

    device: CuPy's number of the device.
    load:   loads the kernel with a handle of the driver, which CUDA may defer to its first launch.

    Addresses are numbers, of memory that the device can access; ArgumentError if one is not a
    multiple of the size of a number. Streams are handles of cudaStream_t; work is only enqueued.
    Methods may be called from several threads at once.
    """

    def __init__(self, device: int, load: Callable[[int], object] | None = None) -> None:
        self._device, self._load = device, load
        self._kernels: dict[str, Any] = {}

    def combine(
        self, by: Loop, sources: Sequence[int], outs: Sequence[int], count: int, divisor: float,
        stream: int,
    ) -> None:  # fmt: skip
        """Enqueue ``out = ((s0 op s1) op s2 ...) / divisor`` for each output, as
        ``reduction.combine``. Each element is read once.

        by:      the result of ``reduction.find_loop`` for the operation and the dtype.
        sources: addresses of ``count`` elements each. If they have the same alignment, they are
                 read in pieces.
        outs:    addresses of the outputs; each may be one of the sources, and overlaps no other
                 array.

        Raises UnsupportedError for more than 4000 arrays in total.
        """
        dtype, n = by_name[by.format], len(sources) + len(outs)
        if not sources or not outs:
            raise ArgumentError("expected at least one array to combine and one output")
        if divisor != 1 and dtype.kind not in ReduceOp.AVG.kinds:
            raise UnsupportedError(f"ReduceOp.AVG is not defined for {dtype}")
        numbers, size = count * by.elements, dtype.itemsize
        cut = _cut(numbers, [(one, size) for one in (*sources, *outs)])
        alike = cut.pieces > 0
        if not alike:
            cut = _cut(numbers, [(source, size) for source in sources])
        addresses = struct.pack(f"{n}Q{8 * (_capacity(n) - n)}x", *sources, *outs)
        counts = np.int32(len(sources)), np.int32(n), np.int32(alike)
        arguments = _by_value(addresses), *counts, np.float64(divisor)
        self._launch("combine", _combine(by, n), arguments, cut, stream)

    def load(self, by: Loop, n: int) -> None:
        """Compile the kernel of ``combine`` for n sources and outputs in total."""
        self._kernel("combine", _combine(by, n))

    def scale(
        self, dtype: DType, source: int, factor: Factor, out: int, count: int, stream: int
    ) -> None:
        """Enqueue ``out = source * factor``, as ``reduction.scale``, for ``count`` elements.

        out: address of elements of ``dtype.accumulate``; it may be ``source`` if that is ``dtype``,
             and does not overlap it otherwise.
        """
        has_meaning = dtype.kind in ReduceOp.PREMUL_SUM.kinds
        by = find_loop(ReduceOp.PREMUL_SUM, dtype) if has_meaning else None
        if by is None:
            raise UnsupportedError(f"no kernel scales {dtype}")
        with np.errstate(all="ignore"):
            number = factor_of(dtype, factor)[()]
        given, result = dtype.itemsize, dtype.accumulate.itemsize
        if np.iscomplexobj(number):
            line = f"SCALE_COMPLEX({by.format})"
            factors: tuple[Any, ...] = (number.real, number.imag)
            cut = _cut(count, [(source, given), (out, result)], by.elements)
        else:  # the two parts of a complex number are scaled separately
            line, factors = f"SCALE({by.format})", (number,)
            arrays = [(source, given // by.elements), (out, result // by.elements)]
            cut = _cut(count * by.elements, arrays)
        self._launch("scale", line, (source, *factors, out), cut, stream)

    def narrow(self, dtype: DType, source: int, out: int, count: int, stream: int) -> None:
        """Enqueue the rounding of ``count`` float32 to ``dtype``, as ``reduction.narrow``."""
        by = find_loop(ReduceOp.SUM, dtype)
        if dtype.kind is not Kind.NARROW_FLOAT or by is None:
            raise UnsupportedError(f"no kernel rounds to {dtype}")
        cut = _cut(count, [(source, dtype.accumulate.itemsize), (out, dtype.itemsize)])
        self._launch("narrow", f"NARROW({by.format})", (source, out), cut, stream)

    def load_collective(self, collective: Collective) -> None:
        """Compile the kernel of a collective."""
        self._kernel(collective.name, collective.line(), _PEERS)

    def has_collective(self, collective: Collective) -> bool:
        """Return whether the kernel of a collective is compiled."""
        return collective.line() in self._kernels

    def collective(self, peers: Peers, collective: Collective, stream: int) -> None:
        """Enqueue this rank's part of a collective; all ranks call."""
        cut = collective.cut(peers)
        if not cut.blocks:
            return
        arguments: list[Any] = [_by_value(peers.pack(collective.call))]
        arguments += [collective.send] if collective.starts else []
        arguments.append(collective.recv)
        if collective.by is not None:
            arguments.append(np.float64(collective.divisor))
        if collective.starts:
            starts = list(collective.starts)
            most = max(end - start for start, end in pairwise(starts))
            starts += starts[-1:] * (RANKS + 1 - len(starts))
            arguments += [_by_value(struct.pack(f"={RANKS + 1}q", *starts)), cut.chunk, most]
        else:
            counts = np.int32(collective.root), np.int32(cut.shots)
            arguments += [*counts, cut.chunk, collective.count]
        kernel = self._kernel(collective.name, collective.line(), _PEERS)
        grid, block = (cut.blocks,), (_PEER_THREADS,)
        kernel(grid, block, tuple(arguments), stream=external_stream(stream))

    def _launch(
        self, name: str, line: str, arguments: Sequence[Any], cut: _Cut, stream: int
    ) -> None:
        import cupy

        if not cut.elements:
            return
        device = cupy.cuda.Device(self._device)
        most = _BLOCKS * device.attributes["MultiProcessorCount"]
        grid, block = (min(-(-cut.steps // _THREADS), most),), (_THREADS,)
        arguments = (*arguments, cut.head, cut.pieces, cut.elements)
        self._kernel(name, line)(grid, block, arguments, stream=external_stream(stream))

    def _kernel(self, name: str, line: str, sources: Sequence[str] = _SOURCES) -> Any:
        """Return the kernel that ``line`` defines after the source files."""
        import cupy

        kernel = self._kernels.get(line)
        if kernel is None:
            code = f"{_source(*sources)}\n{line}\n"
            with _first_on_node(code):
                kernel = cupy.RawModule(code=code, options=_OPTIONS).get_function(name)
                # The first launch may be in a capture, or beside kernels that wait for it.
                kernel.compile()
            if self._load is not None:
                self._load(kernel.kernel.ptr)
            self._kernels[line] = kernel
        return kernel


def _capacity(n: int) -> int:
    """Return the capacity of the kernel that combines n arrays, with its outputs."""
    for most in _CAPACITIES:
        if n <= most:
            return most
    raise UnsupportedError(
        f"a kernel combines {_CAPACITIES[-1]} arrays at most, got {n}; combine them in smaller "
        "groups"
    )


def _by_value(packed: bytes) -> Any:
    """Return a structure in the form that CuPy passes by value: a NumPy array of one element."""
    return np.frombuffer(packed, f"V{len(packed)}")


def _combine(by: Loop, n: int) -> str:
    return f"COMBINE({by.format}, {by.operation}, {_capacity(n)})"


def external_stream(stream: int) -> Any:
    """Return CuPy's stream for a borrowed handle; 1: the legacy default stream."""
    import cupy

    return cupy.cuda.Stream.from_external(_Handle(stream))


class _Handle:
    """A stream handle in the form that CuPy accepts."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class _Cut(NamedTuple):
    """How a kernel splits its elements."""

    head: int  # elements before the first piece
    pieces: int  # number of pieces, each read and written at once
    elements: int  # total number; elements outside the pieces are processed one by one
    steps: int  # iterations of the longer of the kernel's two loops


def _cut(count: int, arrays: Sequence[tuple[int, int]], parts: int = 1) -> _Cut:
    """Split ``count`` elements into pieces, which have 16 bytes in the array with the largest
    elements; into none if the alignments of the arrays differ.

    arrays: address and element size in bytes of each array.
    parts:  numbers that make up an element.
    """
    length = PIECE // max(size for _, size in arrays)
    heads = set()
    for address, size in arrays:
        if address % (size // parts):
            raise ArgumentError(
                f"expected a device address that is a multiple of {size // parts} bytes, the size "
                f"of a number, got {address:#x}; copy the array"
            )
        between, beyond = address % size, address // size
        heads.add(None if between else -beyond % length)
    (head,) = heads if len(heads) == 1 else (None,)
    if head is None or head >= count:
        return _Cut(0, 0, count, count)
    pieces = (count - head) // length
    return _Cut(head, pieces, count, max(pieces, count - pieces * length))


@contextmanager
def _first_on_node(code: str) -> Iterator[None]:
    """Run the block. If another process of this node and user is running it for the same code, wait
    until it has ended, and the kernel is in CuPy's cache; at most COMPILE_TIMEOUT_S.

    The ranks cannot agree on who compiles: most kernels are compiled in calls that exchange no
    messages, and the alignment of a rank's own arrays can select a kernel. The timeout is needed
    because CuPy also loads the module, and the driver may load it after kernels that wait for this
    rank.
    """
    name = f"mpicoll/{os.getuid()}/kernel/{hashlib.sha256(code.encode()).hexdigest()[:32]}"
    end, waited = time.monotonic() + COMPILE_TIMEOUT_S, False
    while not claim(name) and time.monotonic() < end:
        waited = True
        time.sleep(_CHECK_INTERVAL_S)
    if waited:  # the kernel is in the cache, from which all can load it at the same time
        release(name)
    try:
        yield
    finally:
        release(name)


@cache
def _source(*names: str) -> str:
    from importlib.resources import files

    folder = files("mpicoll.kernels") / "src"
    return "".join((folder / name).read_text("utf-8") for name in names or _SOURCES)
