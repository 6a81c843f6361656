"""Check the results of a call: any rank can compute any other's input, and the right results, with
NumPy alone.

An array is a pattern of ``PERIOD`` elements, repeated. The period is prime, so an element from a
place some pieces away is another one, unless their distance is a multiple of it. Only one period
has to be computed, however large the message.

- Moves: random bits, and every bit has to arrive.
- Integers: random bits, combined modulo 2**64. Bools are counted. Both are exact.
- MIN and MAX: exact.
- Sums and products of floating point: magnitudes from 1/2 to 2 with random signs (complex numbers:
  directions), combined as long doubles. n numbers added in any order, each addition rounding by
  half an eps, err by at most (n - 1) eps / 2 times the sum of their magnitudes, to first order
  (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2). The same holds for
  products with the product of the magnitudes, and for complex ones with sqrt(5) times as much
  (Brent, Percival, Zimmermann, Math. Comp. 76, 2007). AVG adds one division. So **2 n eps** times
  that magnitude, eps that of the dtype in which the reduction is computed, is never too strict. A
  result is right between the two ends, each rounded to the dtype as the result is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpicoll.cli.bench_calls import Case, PlacedArray
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.primitives import Layout

__all__ = ["PERIOD", "Expected", "contents", "expected", "fill", "wrong"]

Array = npt.NDArray[Any]

#: Elements after which inputs repeat.
PERIOD = 8191
#: The layouts with a block for each rank.
_FOR_EACH = (Layout.SCATTERED, Layout.EXCHANGED)
#: Periods compared at a time.
_AT_A_TIME = 64


class Expected(NamedTuple):
    """The right results of one period: from ``low`` to ``high``, or the dtype's infinity where
    those are too large for it; without ``high``, the bits of ``low``.
    """

    low: Array
    high: Array | None = None


# --- inputs -------------------------------------------------------------------------------------


def _pattern(op: ReduceOp | None, dtype: DType, source: int, block: int, count: int) -> Array:
    """Return the contents of rank ``source``'s block: at most one period."""
    length = min(count, PERIOD)
    rng = np.random.default_rng([dtype.code, source, block])
    if dtype.kind is Kind.BOOL:
        return rng.integers(0, 2, length).astype(np.bool_)
    if op is None or dtype.kind is Kind.INTEGER:
        bits: Array = np.frombuffer(rng.bytes(length * dtype.itemsize), dtype.numpy)
        return bits
    size = np.exp2(rng.uniform(-1, 1, length))
    if dtype.kind is Kind.COMPLEX:
        number: Array = size * np.exp(2j * np.pi * rng.uniform(0, 1, length))
        return number.astype(dtype.numpy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pattern: Array = (size * rng.choice([-1.0, 1.0], length)).astype(dtype.numpy)
        unsigned = np.isnan(pattern.astype(float))  # float8_e8m0fnu
    pattern[unsigned] = size[unsigned].astype(dtype.numpy)
    return pattern


def contents(case: Case) -> Iterator[Array]:
    """Yield the contents of each block that this rank reads."""
    assert case.dtype is not None
    if case.row.layout is Layout.IN_PLACE and case.row.root == "src" and not case.at_root:
        return
    for block in range(case.n if case.row.layout in _FOR_EACH and case.at_root else 1):
        yield _pattern(case.op, case.dtype, case.me, block, case.count)


def expected(case: Case) -> Iterator[Expected]:
    """Yield the right contents of each block of this rank's output after the call."""
    row, op, dtype = case.row, case.op, case.dtype
    assert dtype is not None
    block = case.me if row.layout in _FOR_EACH else 0
    if op is not None and case.at_root:
        ranks = row.combined(case.me, case.n)
        terms = (_pattern(op, dtype, rank, block, case.count) for rank in ranks)
        if ranks:
            yield _reduced(op, dtype, terms)
        else:  # the output, which was filled with zeros, stays as it is
            nothing = np.zeros(min(case.count, PERIOD) * dtype.itemsize, np.uint8)
            yield Expected(nothing.view(dtype.numpy))
        return
    if row.layout in (Layout.GATHERED, Layout.EXCHANGED):
        sources = list(range(case.n)) if case.at_root else []
    else:  # on the other ranks a reduction changes nothing
        sources = [case.root if op is None else case.me]
    for source in sources:
        yield Expected(_pattern(op, dtype, source, block, case.count))


# --- reductions ---------------------------------------------------------------------------------

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}

_COUNTED: dict[str, Callable[[Array, int], Array]] = {
    **dict.fromkeys(("SUM", "MAX", "BOR"), lambda true, n: true > 0),
    **dict.fromkeys(("PRODUCT", "MIN", "BAND"), lambda true, n: true == n),
    "BXOR": lambda true, n: true % 2 == 1,
}


def _reduced(op: ReduceOp, dtype: DType, terms: Iterable[Array]) -> Expected:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if dtype.kind is Kind.BOOL:
            counts = [term.astype(int) for term in terms]
            return Expected(_COUNTED[op.name](np.sum(counts, axis=0), len(counts)))
        if dtype.kind is not Kind.INTEGER and op.name not in ("MIN", "MAX"):
            return _between(op, dtype, terms)
        exact: Array | None = None
        for term in terms:
            if op.name not in ("MIN", "MAX"):
                term = term.astype(np.uint64)
            exact = term if exact is None else _COMBINE[op.name](exact, term)
        assert exact is not None
        return Expected(exact.astype(dtype.numpy))


def _between(op: ReduceOp, dtype: DType, terms: Iterable[Array]) -> Expected:
    wide: Any = np.clongdouble if dtype.kind is Kind.COMPLEX else np.longdouble
    combine = _COMBINE[op.name]
    n, total, size = 0, np.array(op.name == "PRODUCT", wide), np.longdouble(op.name == "PRODUCT")
    for term in terms:
        operand = term.astype(dtype.accumulate).astype(wide)
        n, total, size = n + 1, combine(total, operand), combine(size, abs(operand))
    if op.name == "AVG":
        total, size = total / n, size / n
    slack = (2 * n * np.finfo(dtype.accumulate).eps * size).astype(wide)
    if dtype.kind is Kind.COMPLEX:
        slack = slack * wide(1 + 1j)
    low, high = (end.astype(dtype.accumulate).astype(dtype.numpy)
                 for end in (total - slack, total + slack))  # fmt: skip
    return Expected(low, high)


# --- arrays -------------------------------------------------------------------------------------


def _words(array: PlacedArray, dtype: DType) -> PlacedArray:
    """Return the array's memory as unsigned integers."""
    return array.view(np.dtype(f"u{min(dtype.itemsize, 8)}"))


def fill(
    array: PlacedArray, pattern: Array, dtype: DType, put: Callable[[Array], PlacedArray]
) -> None:
    """Fill the array with the pattern; ``put`` copies it to the array's memory."""
    words, period = _words(array, dtype), put(_words(pattern, dtype))
    if not len(period):
        return
    whole = len(words) - len(words) % len(period)
    words[:whole].reshape(-1, len(period))[:] = period
    words[whole:] = period[: len(words) - whole]


def wrong(
    array: PlacedArray, right: Expected, dtype: DType, get: Callable[[PlacedArray], Array]
) -> int:
    """Return the number of wrong elements; ``get`` copies a part of the array to the host."""
    step = _AT_A_TIME * PERIOD
    found = 0
    for start in range(0, len(array), step):
        part = get(_words(array[start : start + step], dtype)).view(dtype.numpy)
        whole = len(part) - len(part) % PERIOD
        if whole:
            found += _different(part[:whole].reshape(-1, PERIOD), right, dtype)
        if whole < len(part):
            rest = len(part) - whole
            high = None if right.high is None else right.high[:rest]
            found += _different(part[None, whole:], Expected(right.low[:rest], high), dtype)
    return found


def _different(got: Array, right: Expected, dtype: DType) -> int:
    """Return the number of wrong elements of an array of shape (periods, elements)."""
    if right.high is None:
        shape = (*got.shape, -1)
        bits = np.ascontiguousarray(got).view(np.uint8).reshape(shape)
        differs = bits != np.ascontiguousarray(right.low).view(np.uint8).reshape(shape[1:])
        return int(np.count_nonzero(differs.any(axis=-1)))
    got, low, high = (_numbers(one, dtype) for one in (got, right.low, right.high))
    with np.errstate(invalid="ignore"):
        beyond = np.isnan(low) | np.isnan(high)  # of dtypes that have NaN where others have inf
        inside: Any = (np.where(np.isnan(low), -np.inf, low) <= got) & (
            got <= np.where(np.isnan(high), np.inf, high)
        )
        inside |= beyond & np.isnan(got)
    if dtype.kind is Kind.COMPLEX:
        inside = inside.reshape(*inside.shape[:-1], -1, 2).all(axis=-1)
    return int(np.count_nonzero(~inside))


def _numbers(array: Array, dtype: DType) -> Array:
    """Return comparable numbers: complex ones as two parts, narrow floats as float32."""
    array = np.ascontiguousarray(array)
    if dtype.kind is Kind.COMPLEX:
        return array.view(array.real.dtype)
    return array.astype(dtype.accumulate) if dtype.kind is Kind.NARROW_FLOAT else array
