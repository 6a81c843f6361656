"""Exact sums equal the nearest number to the sum of fractions, in any order of the summands."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mpicoll.dtypes import DTYPES, Kind, ReduceOp, by_name
from mpicoll.kernels import library, reduction

pytestmark = [
    pytest.mark.any_mpi, pytest.mark.skipif(not library.kernels, reason=library.describe()),
]  # fmt: skip

FLOATS = [by_name["float32"], by_name["float64"]]
ROUNDED = [dtype for dtype in DTYPES if dtype.kind not in (Kind.BOOL, Kind.INTEGER)]
by_float = pytest.mark.parametrize("dtype", FLOATS, ids=repr)


def exact_sum(dtype, sources, op=ReduceOp.SUM, divisor=1):
    out = np.empty(len(sources[0]), dtype.numpy)
    reduction.combine(op, dtype, sources, out, divisor, exact=True)
    return out


def bits(array):
    return array.view(f"V{array.itemsize}").tobytes()


def is_nearest(dtype, got, terms):
    """Return True if ``got`` is the sum rounded to nearest, ties to even."""
    special = [term for term in terms if not math.isfinite(term)]
    if special:
        alike = set(special) in ({math.inf}, {-math.inf})
        return bits(got) == bits(dtype.numpy.type(special[0] if alike else math.nan))
    total, greatest = sum(map(Fraction, terms)), np.finfo(dtype.numpy).max
    # The number that would follow the largest finite number.
    beyond = 2 * Fraction(float(greatest)) - Fraction(float(np.nextafter(greatest, 0)))
    limit = (Fraction(float(greatest)) + beyond) / 2
    if math.isinf(got):
        return abs(total) >= limit and (got > 0) == (total > 0)
    if got == 0:
        assert not np.signbit(got)
    error = abs(total - Fraction(float(got)))
    for to in (-math.inf, math.inf):
        with np.errstate(over="ignore"):
            neighbour = np.nextafter(got, dtype.numpy.type(to))
        other = abs(total - (Fraction(float(neighbour)) if np.isfinite(neighbour) else
                             (1 if to > 0 else -1) * beyond))  # fmt: skip
        odd = int(np.array(got).view(f"u{dtype.itemsize}")) % 2
        if other < error or (other == error and odd):
            return False
    return True


def check(dtype, sources):
    got = exact_sum(dtype, sources)
    for i, result in enumerate(got):
        terms = [float(source[i]) for source in sources]
        assert is_nearest(dtype, result, terms), (i, terms, result)
    return got


def any_bits(dtype, count, rng):
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.numpy).copy()


def similar(dtype, count, rng):
    return rng.normal(0, 1, count).astype(dtype.numpy)


def mixed(dtype, count, rng):
    """Return magnitudes over the range of float32."""
    return (rng.normal(0, 1, count) * 2.0 ** rng.integers(-140, 120, count)).astype(dtype.numpy)


def few_bits(dtype, count, rng):
    """Return zeros and powers of two of both signs, so that sums are ties or cancel."""
    digits = np.finfo(dtype.numpy).nmant + 1
    powers = rng.choice([0, 1, 2, digits - 1, digits, digits + 1, 2 * digits, 3 * digits], count)
    return (rng.choice([-1.0, -0.0, 0.0, 1.0], count) * 2.0**-powers).astype(dtype.numpy)


def at_the_ends(dtype, count, rng):
    """Return the largest and smallest numbers and infinities."""
    finite = np.finfo(dtype.numpy)
    greatest, least = finite.max, finite.smallest_subnormal
    ulp = greatest - np.nextafter(greatest, dtype.numpy.type(0))
    ends = [greatest, ulp, ulp / 2, ulp / 4, least, 3 * least, finite.tiny, 1, 0]
    with np.errstate(all="ignore"):
        made = rng.choice(np.array(ends, dtype.numpy), count) * rng.choice([-1, 1], count)
    made[rng.random(count) < 0.02] = np.inf
    made[rng.random(count) < 0.02] = -np.inf
    return made.astype(dtype.numpy)


KINDS = [any_bits, similar, mixed, few_bits, at_the_ends]
by_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)


def made_of(make, dtype, n, count, seed=0):
    rng = np.random.default_rng([seed, n, dtype.code])
    return [make(dtype, count, rng) for _ in range(n)]


@by_float
@by_kind
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 40])
def test_sums_are_the_nearest_numbers(dtype, make, n):
    check(dtype, made_of(make, dtype, n, 600))


@by_float
def test_thousands_of_summands_of_all_alignments(dtype):
    large = (2.0 ** np.arange(80, 112) * (2 - 2.0**-20)).astype(dtype.numpy)
    small = [np.full(32, size, dtype.numpy) for size in (2.0**-60, 2.0**-140)]
    check(dtype, [large] * 6000 + small)


def from_floats(dtype, sources, divisor):
    """Return the result from sums of float32 and float64, which other tests check."""
    if dtype.kind is Kind.COMPLEX:
        part = by_name[f"float{4 * dtype.itemsize}"]
        parts = [source.view(part.numpy) for source in sources]
        return from_floats(part, parts, divisor).view(dtype.numpy)
    wide = by_name[dtype.accumulate.name]
    with np.errstate(all="ignore"):
        total = exact_sum(wide, [source.astype(wide.numpy) for source in sources])
        total /= wide.numpy.type(divisor)
        if wide is dtype:
            return total
        out = np.empty(total.size, dtype.numpy)
        reduction.narrow(total, out)
        return out


@pytest.mark.parametrize("dtype", ROUNDED, ids=repr)
def test_every_dtype_in_any_order(dtype):
    rng = np.random.default_rng(dtype.code)
    sources = [any_bits(dtype, 2000, rng) for _ in range(4)]
    if dtype.kind is Kind.COMPLEX:
        sources = [mixed(by_name["float64"], 4000, rng).view(complex).astype(dtype.numpy)
                   for _ in range(4)]  # fmt: skip
    for op, divisor in ((ReduceOp.SUM, 1), (ReduceOp.AVG, 4), (ReduceOp.AVG, 7)):
        for count in (1, 5, 2000):
            some = [source[:count] for source in sources]
            expected = bits(from_floats(dtype, some, divisor))
            for order in (some, some[::-1], some[1:] + some[:1]):
                assert bits(exact_sum(dtype, order, op, divisor)) == expected
