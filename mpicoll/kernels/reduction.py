"""Local reductions: combine arrays of one rank, scale an array, round an array.

MPI has no half and 8-bit floats, and a ring that rounds them at every step loses digits at every
step. Here they are accumulated in float32 and rounded once, by the C library if it was built
(``src/reduction.c``) and by NumPy otherwise, with the same bits. Other dtypes are combined as they
are, also in C except for products of complex numbers, which NumPy rounds differently.

The bits of a result depend only on the operands and their order, not on how a message is split into
blocks or on which library computes them. For narrow floats this needs a rule for NaN, because
processors and compilers keep either of two NaN operands: **a NaN that is rounded to a narrow float
becomes the NaN that** ``float32("nan")`` **becomes**, without its sign and payload.

Exact sums (``src/exact.c``) are also independent of the order, and of zeros among the operands: the
exact sum is rounded once. A sum that is zero is 0.0, and NaN has a single form in all dtypes.

All functions may be called from several threads at once.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpicoll.dtypes import DType, Factor, Kind, ReduceOp, by_numpy
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.kernels.library import kernels

Array = npt.NDArray[Any]

_FLOAT32 = np.dtype(np.float32)

#: The C library; None: NumPy does its work.
_compiled = kernels

# Size in bytes of one temporary: small enough for all temporaries to fit into a second-level cache,
# and large enough to make the overhead of NumPy's calls negligible.
_SCRATCH_BYTES = 1 << 17

# Up to this number of elements the C library is called with the GIL held: releasing and reacquiring
# it would take longer. Sources are copied to bytes, because NumPy needs longer to return an array's
# address.
_GIL_MAX_COUNT = 1 << 10


def combine(
    op: ReduceOp,
    dtype: DType,
    sources: Sequence[Array],
    out: Array,
    divisor: int = 1,
    exact: bool = False,
) -> None:
    """Reduce ``sources`` into ``out``: ``((s0 op s1) op s2) ...``, then divide by ``divisor``.

    op:      the operation. PREMUL_SUM means SUM here: its factor has already been applied.
    sources: one or more arrays of ``dtype`` and shape (count,), C-contiguous.
    out:     the same, writeable. It may be the memory of one source; it must not partially overlap
             any.
    divisor: the number of ranks for AVG; it divides before the rounding.
    exact:   round sums of floats and complex numbers correctly, in C only; narrow floats are summed
             to a correctly rounded float32 first. A divisor divides the rounded sum.

    Narrow floats are accumulated in float32 and rounded once, to nearest even. Integers wrap. bool
    uses the logical operations. MIN and MAX propagate NaN; of 0.0 and -0.0 they return the later
    (for float32 and float64 the one that NumPy returns, which is the same on x86-64).

    Raises ArgumentError or ArgumentTypeError for an invalid array, and UnsupportedError if ``op``,
    or a divisor, is not supported for ``dtype``, or if exact sums need the C library.
    """
    if dtype.kind not in op.kinds:
        raise UnsupportedError(f"ReduceOp.{op.name} is not defined for {dtype}")
    if divisor != 1 and dtype.kind not in ReduceOp.AVG.kinds:
        raise UnsupportedError(f"ReduceOp.AVG is not defined for {dtype}")
    if not sources:
        raise ArgumentError("expected at least one array to combine, got none")
    count = _check_out(out, dtype.numpy)
    for source in sources:
        _check(source, dtype.numpy, count)
    exact = exact and rounds_sums(op, dtype)
    loop = find_loop(op, dtype, exact)
    if _compiled is not None and loop is not None:
        _combine_in_c(loop, sources, out, divisor)
    elif exact:
        if _compiled is None:
            raise UnsupportedError("exact sums need the C library; see python -m mpicoll doctor")
        total = np.empty(count, _FLOAT32)  # only float8_e8m0fnu has no loop
        wide = [source.astype(_FLOAT32) for source in sources]
        combine(op, by_numpy[_FLOAT32], wide, total, divisor, exact)
        _narrow(dtype, total, out)
    elif dtype.kind is Kind.NARROW_FLOAT:
        _combine_narrow(op, dtype, sources, out, divisor)
    else:
        _combine_wide(op, dtype, sources, out, divisor)


def scale(dtype: DType, source: Array, factor: Factor, out: Array) -> None:
    """``out = source * factor``, for PREMUL_SUM.

    source: shape (count,), C-contiguous, of ``dtype``.
    factor: a number. For integers an integer, and the product wraps; otherwise it is first rounded
            to ``dtype.accumulate``. Only complex arrays accept a complex factor.
    out:    as source, writeable, of ``dtype`` or of ``dtype.accumulate``: products of narrow floats
            are float32, and are rounded if ``out`` is narrow. It may be the memory of ``source`` if
            it has its dtype; it must not overlap it otherwise.

    Raises errors as ``combine`` does, and ArgumentTypeError for an invalid factor.
    """
    if dtype.kind not in ReduceOp.PREMUL_SUM.kinds:
        raise UnsupportedError(f"{dtype} cannot be scaled")
    rounds = out.dtype == dtype.numpy != dtype.accumulate
    count = _check_out(out, dtype.numpy if rounds else dtype.accumulate)
    _check(source, dtype.numpy, count)
    with np.errstate(all="ignore"):
        number = factor_of(dtype, factor)
        if dtype.kind is Kind.NARROW_FLOAT and number == 1 and not rounds:
            _widen(dtype, source, out)
        elif dtype.kind is Kind.NARROW_FLOAT:
            scratch = _scratch(_ACCUMULATOR)
            for block in _blocks(count):
                target = scratch[: block.stop - block.start] if rounds else out[block]
                _widen(dtype, source[block], target)
                np.multiply(target, number, out=target)
                if rounds:
                    _narrow(dtype, target, out[block])
        elif dtype.kind is Kind.COMPLEX and not np.iscomplexobj(number):
            # A real factor must not multiply the imaginary part's zeros: inf * 0 is NaN.
            np.multiply(_parts(source), number, out=_parts(out))
        else:
            np.multiply(source, number, out=out)


def narrow(source: Array, out: Array) -> None:
    """Round float32 to the narrow float of ``out``: to nearest even, NaN without its sign. Both
    have shape (count,), are C-contiguous and do not overlap. Raises errors as ``combine`` does.
    """
    dtype = by_numpy.get(out.dtype)
    if dtype is None or dtype.kind is not Kind.NARROW_FLOAT:
        raise ArgumentTypeError(f"{out.dtype} is not a narrow float")
    _check(source, _FLOAT32, _check_out(out, dtype.numpy))
    with np.errstate(all="ignore"):
        _narrow(dtype, source, out)


def _check(array: Array, dtype: np.dtype[Any], count: int) -> None:
    if array.dtype != dtype:
        raise ArgumentTypeError(f"expected an array of {dtype}, got one of {array.dtype}")
    if array.ndim != 1 or array.size != count:
        raise ArgumentError(f"expected an array of shape ({count},), got {array.shape}")
    if not array.flags.c_contiguous:
        raise ArgumentError("expected a contiguous array")


def _check_out(out: Array, dtype: np.dtype[Any]) -> int:
    _check(out, dtype, out.size)
    if not out.flags.writeable:
        raise ArgumentError("the output array is read-only")
    return out.size


def _blocks(count: int, dtype: np.dtype[Any] = _FLOAT32) -> Iterator[slice]:
    step = _SCRATCH_BYTES // dtype.itemsize
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


class _Scratch(threading.local):
    """An accumulator and an operand of each thread, reused because fresh memory is slow."""

    def __init__(self) -> None:
        self._memory = np.empty((2, _SCRATCH_BYTES), np.uint8)

    def __call__(self, which: int, dtype: np.dtype[Any] = _FLOAT32) -> Array:
        memory: Array = self._memory[which]
        return memory.view(dtype)


_scratch = _Scratch()
_ACCUMULATOR, _OPERAND = range(2)


def _parts(array: Array) -> Array:
    return array.view(array.real.dtype)


def factor_of(dtype: DType, factor: Factor) -> Any:
    """Return a factor in the type that multiplies numbers of ``dtype``; or ArgumentTypeError."""
    try:
        if dtype.kind is Kind.INTEGER:
            # Multiplying by the residue wraps in the same way.
            residue = operator.index(factor) % (1 << 8 * dtype.itemsize)  # type: ignore[arg-type]
            return np.array(residue, f"u{dtype.itemsize}").view(dtype.numpy)
        if dtype.kind is Kind.COMPLEX and not np.iscomplexobj(factor):
            return np.finfo(dtype.numpy).dtype.type(factor)
        return dtype.accumulate.type(factor)
    except TypeError as error:
        raise ArgumentTypeError(f"{dtype} cannot be scaled by {factor!r}") from error


def _combine_wide(
    op: ReduceOp, dtype: DType, sources: Sequence[Array], out: Array, divisor: int
) -> None:
    """``combine`` in NumPy, for dtypes that accumulate in their own format."""
    ufunc = op.logical if dtype.kind is Kind.BOOL else op.ufunc
    assert ufunc is not None  # bool has no other operations
    one_pass = len(sources) <= 2 and divisor == 1
    blocks = [slice(0, out.size)] if one_pass else _blocks(out.size, dtype.numpy)
    scratch = _scratch(_ACCUMULATOR, dtype.numpy)
    with np.errstate(all="ignore"):
        for block in blocks:
            accumulator, *operands = (source[block] for source in sources)
            target = out[block]
            # Only the last step may write to the result, which may be any source. And NumPy treats
            # an in-place multiplication of one element as a reduction, which rounds complex numbers
            # differently: then no step is in place.
            in_place = target.size > 1
            temporary = scratch[: target.size] if in_place else None
            for operand in operands[:-1]:
                accumulator = ufunc(accumulator, operand, out=temporary)
            if operands:
                accumulator = ufunc(accumulator, operands[-1], out=target if in_place else None)
            if accumulator is not target:
                np.copyto(target, accumulator)
            if divisor != 1:
                # By parts: a complex division would multiply by the reciprocal.
                parts = _parts(target) if dtype.kind is Kind.COMPLEX else target
                np.divide(parts, parts.dtype.type(divisor), out=parts)


def rounds_sums(op: ReduceOp, dtype: DType) -> bool:
    """Return whether ``op`` adds elements of ``dtype`` and may round."""
    return op.ufunc is np.add and dtype.kind not in (Kind.BOOL, Kind.INTEGER)


def _combine_narrow(
    op: ReduceOp, dtype: DType, sources: Sequence[Array], out: Array, divisor: int
) -> None:
    """``combine`` in NumPy, for narrow floats."""
    with np.errstate(all="ignore"):
        for block in _blocks(out.size):
            length = block.stop - block.start
            accumulator, operand = _scratch(_ACCUMULATOR)[:length], _scratch(_OPERAND)[:length]
            _widen(dtype, sources[0][block], accumulator)
            for source in sources[1:]:
                _widen(dtype, source[block], operand)
                op.ufunc(accumulator, operand, out=accumulator)
            if divisor != 1:
                np.divide(accumulator, np.float32(divisor), out=accumulator)
            _narrow(dtype, accumulator, out[block])


def _widen(dtype: DType, source: Array, out: Array) -> None:
    if _compiled is None or dtype.name not in FORMATS:
        np.copyto(out, source, casting="unsafe")
    else:
        _compiled.widen(_format(dtype.name), source.ctypes.data, out.ctypes.data, out.size)


def _narrow(dtype: DType, source: Array, out: Array) -> None:
    """Round float32 to a narrow float, with a single form of NaN."""
    if _compiled is not None and dtype.name in FORMATS:
        _compiled.narrow(_format(dtype.name), source.ctypes.data, out.ctypes.data, out.size)
        return
    for block in _blocks(out.size):
        some = source[block]
        np.copyto(out[block], np.where(some != some, _FLOAT32.type(np.nan), some), casting="unsafe")


def _combine_in_c(loop: Loop, sources: Sequence[Array], out: Array, divisor: int) -> None:
    assert _compiled is not None
    n, count, which = len(sources), out.size * loop.elements, (_format(loop.format), loop.operation)
    if count <= _GIL_MAX_COUNT:
        copies = (ctypes.c_char_p * n)(*[source.tobytes() for source in sources])
        _compiled.combine_with_gil(*which, copies, n, out.ctypes.data, count, divisor)
    else:
        addresses = struct.pack(f"{n}P", *[source.ctypes.data for source in sources])
        _compiled.combine(*which, addresses, n, out.ctypes.data, count, divisor)


@cache
def _format(name: str) -> int:
    assert kernels is not None
    index: int = kernels.format(name.encode())
    return index


class Loop(NamedTuple):
    """A loop of the C library: dtype of its numbers, operation, numbers per element."""

    format: str
    operation: int
    elements: int


@cache
def find_loop(op: ReduceOp, dtype: DType, exact: bool = False) -> Loop | None:
    """Return the C library's loop for ``op`` on ``dtype``, also without the library; None: NumPy
    combines them. exact: see ``combine``.
    """
    operation = _OPERATIONS.get(op.logical if dtype.kind is Kind.BOOL else op.ufunc)
    if exact and rounds_sums(op, dtype):
        operation = _EXACT_SUM
    if operation is None:
        return None
    if dtype.kind is Kind.COMPLEX:
        part = {8: "float32", 16: "float64"}.get(dtype.itemsize)
        return Loop(part, operation, 2) if part and op.ufunc is np.add else None
    return Loop(dtype.name, operation, 1) if dtype.name in FORMATS else None


#: The formats of ``src/formats.h``. float8_e8m0fnu is not supported: it is a scale rather than a
#: number, and ml_dtypes has changed how it rounds to it.
FORMATS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32",
    "float64", "float16", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip


#: The C library's indices of operations; bitwise operations on bool are logical.
_OPERATIONS: dict[np.ufunc | None, int] = {
    np.add: 0,
    np.multiply: 1,
    np.minimum: 2,
    np.maximum: 3,
    np.bitwise_and: 4,
    np.logical_and: 4,
    np.bitwise_or: 5,
    np.logical_or: 5,
    np.bitwise_xor: 6,
    np.logical_xor: 6,
}
_EXACT_SUM = 7
