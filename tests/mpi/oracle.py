"""Expected results of calls, computed in plain NumPy from the inputs of all ranks.

Inputs are seeded, so every rank can compute the input of every other rank. The only import from
mpicoll is its tables, and the arithmetic differs from mpicoll's: wide floats are summed in wider
floats, integers modulo 2**64, bools are counted, and narrow floats are folded as float32 arrays and
rounded once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpicoll.dtypes import DType, Kind, ReduceOp

Array = np.ndarray[Any, Any]


def frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


@lru_cache(maxsize=1024)
def any_bits(dtype: DType, count: int, rank: int) -> Array:
    """Random bits: NaN with any payload and subnormals for floats, True and False for bool."""
    rng = np.random.default_rng([dtype.code, count, rank])
    if dtype.kind is Kind.BOOL:
        return frozen(rng.integers(0, 2, count).astype(bool))
    return frozen(np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.numpy).copy())


@lru_cache(maxsize=1024)
def operands(op: ReduceOp, dtype: DType, count: int, rank: int) -> Array:
    """Random operands suited to an operation."""
    if op is ReduceOp.AVG:
        return operands(ReduceOp.SUM, dtype, count, rank)
    if dtype.kind in (Kind.BOOL, Kind.INTEGER):
        return any_bits(dtype, count, rank)
    rng = np.random.default_rng([dtype.code, op.code, count, rank])
    if dtype.kind is Kind.NARROW_FLOAT:
        made = rng.normal(1, 0.5, count).astype(np.float32)
        made *= rng.choice(np.float32([0.25, 1, 3]), count)
        if op is ReduceOp.PREMUL_SUM or dtype.name == "float8_e8m0fnu":
            made = abs(made)
        narrow = rounded(made, dtype)
        if op is not ReduceOp.PREMUL_SUM:
            narrow[::2] = any_bits(dtype, count, rank)[::2]
        return frozen(narrow)
    if op is ReduceOp.PRODUCT:
        made = rng.normal(1, 0.3, count)
    else:
        made = rng.normal(0, 1, count) * 2.0 ** rng.integers(-8, 9, count)
    if dtype.kind is Kind.COMPLEX:
        return frozen((made + 1j * rng.normal(1, 1, count)).astype(dtype.numpy))
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        made = made.round(1)  # rounding makes some values equal
    places = np.arange(count) % 29
    made[places == 3 + 5 * rank] = np.nan
    made[places == 4 + rank] = np.inf
    made[places == 27] = -0.0 if rank % 2 else 0.0
    return frozen(made.astype(dtype.numpy))


def factors(dtype: DType, n: int) -> list[Any]:
    """PREMUL_SUM factors for n ranks: Python numbers, NumPy scalars and one-element arrays."""
    if dtype.kind is Kind.INTEGER:
        return [3, np.int64(-2), np.array([7]), 2**40 + 1, 5][:n]
    if dtype.kind is Kind.COMPLEX:
        return [1 + 2j, np.float32(0.5), np.array(-1.5 + 0.25j), 3, 2j][:n]
    return [0.5, np.float64(3.1), np.array([[1.25]], np.float32), 2, 0.75][:n]


def number(factor: Any) -> Any:
    """Convert a factor to a Python number."""
    return factor.item() if hasattr(factor, "item") else factor


@dataclass(frozen=True)
class Between:
    """Accepted results: ``low`` to ``high``, or the exact bits of ``low`` if ``high`` is None.

    NaN is accepted where a bound is NaN. Real and imaginary parts are compared separately.
    """

    low: Array
    high: Array | None = None

    def part(self, start: int, count: int) -> Between:
        chosen = slice(start, start + count)
        return Between(self.low[chosen], None if self.high is None else self.high[chosen])

    def check(self, got: Array, what: str) -> None:
        low, high = self.low, self.high
        if high is None:
            same_bits(got, low, what)
            return
        assert (got.dtype, got.shape) == (low.dtype, low.shape), what
        if low.dtype.kind == "c":
            low, high, got = (one.view(one.real.dtype) for one in (low, high, got))
        # Dtypes without infinity overflow to NaN, so a bound that overflows is NaN.
        below, above = np.isnan(low), np.isnan(high)
        with np.errstate(invalid="ignore"):
            inside = ((low <= got) | below & ~above) & ((got <= high) | above & ~below)
            inside |= (below | above) & np.isnan(got)
        complain(~inside, got, (low, high), what)


def same_bits(got: Array, expected: Array, what: str) -> None:
    """Raise AssertionError unless all bits are equal."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    if got.tobytes() != expected.tobytes():
        words = f"V{got.itemsize}"
        complain(got.view(words) != expected.view(words), got, (expected,), what)


def complain(wrong: Array, got: Array, expected: tuple[Array, ...], what: str) -> None:
    where = np.flatnonzero(wrong)[:5]
    assert not where.size, (
        f"{what}: {np.count_nonzero(wrong)} of {wrong.size} differ: at {where} {got[where]}, "
        f"expected {' to '.join(str(e[where]) for e in expected)}"
    )


def rounded(values: Array, dtype: DType) -> Array:
    """Round float32 values to a narrow float, with a canonical NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.where(np.isnan(values), np.float32("nan"), values).astype(dtype.numpy)


def reduced(op: ReduceOp, dtype: DType, arrays: list[Array], by: list[Any] | None) -> Between:
    """Reduce the arrays in rank order. ``by`` holds the factors of PREMUL_SUM."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if dtype.kind is Kind.BOOL:
            exact = _counted(op.name, arrays)
        elif dtype.kind is Kind.INTEGER:
            exact = _modular(op.name, dtype, arrays, by)
        elif dtype.kind is Kind.NARROW_FLOAT and by is None:
            exact = _folded(op.name, dtype, arrays)
        elif op.name in ("MIN", "MAX"):
            exact = _extreme(op.name, arrays)
            return Between(exact, exact)  # numbers, as 0.0 and -0.0 are equal
        else:
            return _bounds(op.name, dtype, arrays, by)
    return Between(exact)


def _counted(name: str, arrays: list[Array]) -> Array:
    true = np.stack(arrays).astype(int).sum(axis=0)
    if name in ("SUM", "MAX", "BOR"):
        return true > 0
    if name in ("PRODUCT", "MIN", "BAND"):
        return true == len(arrays)
    assert name == "BXOR"
    return true % 2 == 1


def _modular(name: str, dtype: DType, arrays: list[Array], by: list[Any] | None) -> Array:
    if name in ("MIN", "MAX"):
        return np.sort(np.stack(arrays), axis=0)[0 if name == "MIN" else -1]
    total, *others = [one.astype(np.uint64) for one in arrays]
    if by is not None:
        weights = [np.uint64(int(number(factor)) % 2**64) for factor in by]
        total = total * weights[0]
        others = [one * weight for one, weight in zip(others, weights[1:], strict=True)]
    for one in others:
        if name in ("SUM", "PREMUL_SUM"):
            total = total + one
        elif name == "PRODUCT":
            total = total * one
        elif name == "BAND":
            total = ~(~total | ~one)
        elif name == "BOR":
            total = ~(~total & ~one)
        else:
            assert name == "BXOR"
            total = (total | one) & ~(total & one)
    return total.astype(dtype.numpy)


def _extreme(name: str, arrays: list[Array]) -> Array:
    """Minimum or maximum. NaN propagates; of two equal zeros the later one is returned."""
    found = arrays[0]
    for one in arrays[1:]:
        keep = found < one if name == "MIN" else found > one
        found = np.where(keep | np.isnan(found), found, one)
    return found


def _folded(name: str, dtype: DType, arrays: list[Array]) -> Array:
    wide = [one.astype(np.float32) for one in arrays]
    if name in ("MIN", "MAX"):
        return rounded(_extreme(name, wide), dtype)
    total = wide[0]
    for one in wide[1:]:
        total = total * one if name == "PRODUCT" else total + one
    return rounded(total / np.float32(len(arrays)) if name == "AVG" else total, dtype)


def _bounds(name: str, dtype: DType, arrays: list[Array], by: list[Any] | None) -> Between:
    """Bounds for n roundings in any order of the ranks."""
    complex_ = dtype.kind is Kind.COMPLEX
    widest = np.clongdouble if complex_ else np.longdouble
    accumulate = np.dtype(dtype.accumulate)
    n = len(arrays)
    total = np.array(1 if name == "PRODUCT" else 0, widest)
    size = total.real
    for one, factor in zip(arrays, by or [1] * n, strict=True):
        if by is not None and not complex_:
            factor = accumulate.type(number(factor))
        term = one.astype(widest) * widest(number(factor))
        total = total * term if name == "PRODUCT" else total + term
        size = size * abs(term) if name == "PRODUCT" else size + abs(term)
    if name == "AVG":
        total, size = total / n, size / n
    # A complex product takes four products and two sums, each part as large as the number.
    eps = np.finfo(accumulate).eps
    slack = (8 if complex_ else 2) * n * eps * size
    if complex_:
        slack = slack + 1j * slack
    finite = np.isfinite(size)
    low, high = (np.where(finite, total + sign * slack, total) for sign in (-1, 1))
    ends = low.astype(accumulate), high.astype(accumulate)
    if dtype.kind is Kind.NARROW_FLOAT:
        ends = rounded(ends[0], dtype), rounded(ends[1], dtype)
    return Between(*ends)
