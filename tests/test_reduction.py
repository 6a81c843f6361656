"""The local reduction gives the same bits as independent reference implementations."""

import functools
import itertools
import operator
import warnings
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from mpicoll.dtypes import DTYPES, Kind, ReduceOp, by_name
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.kernels import library, reduction

pytestmark = pytest.mark.any_mpi

NARROW = [dtype for dtype in DTYPES if dtype.kind is Kind.NARROW_FLOAT]
WIDE = [dtype for dtype in DTYPES if dtype.kind is not Kind.NARROW_FLOAT]
NARROW_OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
COUNTS = [0, 1, 7, 1000, 100003]

by_dtype = pytest.mark.parametrize("dtype", NARROW, ids=repr)


@pytest.fixture(params=["compiled", "numpy"], name="kernels")
def kernels_fixture(request, monkeypatch):
    """Run the test with the C library and with NumPy."""
    if request.param == "numpy":
        monkeypatch.setattr(reduction, "_compiled", None)
    elif not library.kernels:
        pytest.skip(library.describe())
    return request.param


def bits(array):
    return array.view(f"u{array.itemsize}")


def assert_same_bits(got, expected):
    differ = np.flatnonzero(bits(got) != bits(expected))
    where = differ[:5]
    assert not differ.size, f"{differ.size} differ: {where}: {got[where]}, {expected[where]}"


def astype(values, dtype):
    """Convert as NumPy and ml_dtypes do, with one NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.where(values != values, np.float32("nan"), values).astype(dtype.numpy)


def choose(better):
    return lambda a, b: np.where(better(a, b) | (a != a), a, b)


FOLDS = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PREMUL_SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": choose(operator.lt),
    "MAX": choose(operator.gt),
}


def reference(op, dtype, sources, divisor=1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = [source.astype(np.float32) for source in sources]
        return astype(functools.reduce(FOLDS[op.name], wide) / np.float32(divisor), dtype)


def random_bits(dtype, count, seed):
    """Return numbers of random bits, including NaN, infinities, subnormals and both zeros."""
    words = np.random.default_rng(seed).integers(0, 1 << 8 * dtype.itemsize, count)
    return words.astype(f"u{dtype.itemsize}").view(dtype.numpy)


def near_one(dtype, count, seed):
    """Return numbers whose sums and products need rounding and stay finite."""
    values = np.random.default_rng(seed).normal(1, 0.5, count)
    return abs(values).astype(np.float32).astype(dtype.numpy)


@pytest.mark.slow
@by_dtype
@pytest.mark.parametrize("op", NARROW_OPS, ids=repr)
def test_combine(kernels, dtype, op):
    cases = [*itertools.product([random_bits], range(1, 6), COUNTS)]
    # With finite numbers, the order of additions affects the result. One long array is enough.
    cases += [*itertools.product([near_one], range(1, 6), COUNTS[:-1]), (near_one, 5, COUNTS[-1])]
    for make, n, count in cases:
        sources = [make(dtype, count, seed) for seed in range(n)]
        kept = [source.tobytes() for source in sources]
        out = np.empty(count, dtype.numpy)
        for divisor in (1, n, 7) if op is ReduceOp.AVG else (1,):
            reduction.combine(op, dtype, sources, out, divisor)
            assert_same_bits(out, reference(op, dtype, sources, divisor))
        assert kept == [source.tobytes() for source in sources]


@by_dtype
def test_all_pairs_of_8_bits(kernels, dtype):
    """All pairs of 8-bit floats; a sample of 65,536 pairs of 16-bit floats."""
    if dtype.itemsize == 1:
        a, b = (side.ravel() for side in np.mgrid[0:256, 0:256].astype(np.uint8))
    else:
        a = np.arange(1 << 16, dtype=np.uint16)
        b = a * np.uint16(40503)
    sources = [np.ascontiguousarray(side).view(dtype.numpy) for side in (a, b)]
    out = np.empty(1 << 16, dtype.numpy)
    for op in NARROW_OPS:
        reduction.combine(op, dtype, sources, out)
        assert_same_bits(out, reference(op, dtype, sources))


@by_dtype
def test_all_roundings(kernels, dtype):
    """Numbers at, just above and just below each dtype value and each midpoint; and random bits."""
    everything = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype.numpy)
    numbers = everything.astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    beyond = 2 * numbers[-1].astype(np.float64) - numbers[-2]
    grid = np.append(numbers.astype(np.float64), beyond)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, -grid])
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)
    up, down = (np.nextafter(points, np.float32(end)) for end in (np.inf, -np.inf))
    extremes = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, np.inf, -np.inf, np.nan])
    random = np.random.default_rng(1).integers(0, 1 << 32, 300001, np.uint32).view(np.float32)
    source = np.concatenate([points, up, down, extremes.astype(np.float32), random])
    kept = source.tobytes()
    out = np.empty(source.size, dtype.numpy)
    reduction.narrow(source, out)
    assert_same_bits(out, astype(source, dtype))
    assert source.tobytes() == kept


def test_combine_is_thread_safe(kernels):
    dtype = by_name["bfloat16"]
    sources = [random_bits(dtype, 100003, seed) for seed in range(3)]
    outs = [np.empty(100003, dtype.numpy) for _ in range(4)]

    def work(out):
        for _ in range(5):
            reduction.combine(ReduceOp.SUM, dtype, sources, out)

    with ThreadPoolExecutor(len(outs)) as pool:
        list(pool.map(work, outs))  # raises their errors
    for out in outs:
        assert_same_bits(out, reference(ReduceOp.SUM, dtype, sources))


@by_dtype
@pytest.mark.parametrize("count", COUNTS)
def test_scale_narrow(kernels, dtype, count):
    source = random_bits(dtype, count, 0)
    with np.errstate(all="ignore"):
        expected = source.astype(np.float32) * np.float32(1 / 3)
    wide, out = np.empty(count, np.float32), np.empty(count, dtype.numpy)
    reduction.scale(dtype, source, 1 / 3, wide)
    np.testing.assert_array_equal(wide, expected)
    reduction.scale(dtype, source, 1 / 3, out)
    assert_same_bits(out, astype(expected, dtype))
    reduction.scale(dtype, source, 1 / 3, source)
    assert_same_bits(source, out)


@pytest.mark.parametrize("factor", [0, 3, -1, 255, -(1 << 70) - 5])
@pytest.mark.parametrize("name", [dtype.name for dtype in WIDE if dtype.kind is Kind.INTEGER])
def test_scale_integers_wraps(name, factor):
    dtype = by_name[name]
    info = np.iinfo(dtype.numpy)
    source = np.array([0, 1, 2, 77, info.max, info.min], dtype.numpy)
    out = np.empty_like(source)
    reduction.scale(dtype, source, factor, out)
    for number, got in zip(source.tolist(), out.tolist(), strict=True):
        assert (number * factor - got) % (info.max - info.min + 1) == 0


def wide_values(dtype, count, seed):
    rng = np.random.default_rng(seed)
    if dtype.kind is Kind.BOOL:
        return rng.random(count) < 0.5
    if dtype.kind is Kind.INTEGER:
        return rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype.numpy).ravel()
    parts = rng.standard_normal(count * (2 if dtype.kind is Kind.COMPLEX else 1))
    return parts.astype(np.finfo(dtype.numpy).dtype).view(dtype.numpy)


def by_element(op, dtype, elements):
    """Reduce one element in Python. Floats use NumPy scalars of the dtype."""
    if dtype.kind is Kind.BOOL:
        folds = {"SUM": any, "BOR": any, "MAX": any, "BXOR": lambda x: sum(x) % 2 == 1}
        return folds.get(op.name, all)([bool(x) for x in elements])
    if dtype.kind is Kind.INTEGER:
        folds = dict(FOLDS, MIN=min, MAX=max, BAND=operator.and_, BOR=operator.or_)
        folds["BXOR"] = operator.xor
        number = functools.reduce(folds[op.name], [int(x) for x in elements])
        modulus = 1 << 8 * dtype.itemsize
        number %= modulus
        signed = np.iinfo(dtype.numpy).min < 0
        return number - modulus if signed and number >= modulus // 2 else number
    return functools.reduce(FOLDS[op.name], elements)


@pytest.mark.parametrize("dtype", WIDE, ids=repr)
def test_combine_wide(kernels, dtype):
    with np.errstate(all="ignore"):
        ops = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
        for name, n, count in itertools.product(ops, range(1, 6), (0, 1, 7, 300)):
            op = getattr(ReduceOp, name)
            if dtype.kind not in op.kinds:
                continue
            sources = [wide_values(dtype, count, seed) for seed in range(n)]
            if dtype.kind is Kind.COMPLEX:  # NumPy rounds scalars and arrays differently
                expected = functools.reduce(FOLDS[op.name], sources)
            else:
                elements = zip(*sources, strict=True)
                expected = [by_element(op, dtype, each) for each in elements]
            for aliased in (None, *range(n)):
                inputs = [source.copy() for source in sources]
                out = np.empty(count, dtype.numpy) if aliased is None else inputs[aliased]
                reduction.combine(op, dtype, inputs, out)
                assert out.tobytes() == np.array(expected, dtype.numpy).tobytes()


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_special_values_of_wide(kernels, name):
    """NaN, infinities and signed zeros give the same results as in NumPy."""
    dtype = by_name[name]
    special = np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan], dtype.numpy)
    a, b = (side.ravel() for side in np.meshgrid(special, special))
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        out = np.empty_like(a)
        reduction.combine(op, dtype, [a, b], out)
        with np.errstate(all="ignore"):
            expected = op.ufunc(a, b)
        np.testing.assert_array_equal(out, expected)
        zero = expected == 0
        assert_same_bits(out[zero], expected[zero])


def test_every_nonzero_byte_is_true(kernels):
    a, b = (side.ravel() for side in np.meshgrid(*2 * [np.uint8([0, 1, 2, 254])]))
    folds = {"PRODUCT": np.logical_and, "SUM": np.logical_or, "BXOR": np.logical_xor}
    for name, logical in folds.items():
        out = np.empty(16, bool)
        sources = [a.view(bool), b.view(bool)]
        reduction.combine(getattr(ReduceOp, name), by_name["bool"], sources, out)
        assert out.tobytes() == logical(a != 0, b != 0).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_long_and_unaligned_arrays(kernels, dtype):
    """Arrays longer than a block, at odd addresses. The result replaces each source in turn."""
    narrow = dtype.kind is Kind.NARROW_FLOAT
    for n, aliased in itertools.product((2, 3), (0, 1)):
        memory = [np.zeros(5003 * dtype.itemsize + 8, np.uint8) for _ in range(n)]
        sources = [m[1 : 1 + 5003 * dtype.itemsize].view(dtype.numpy) for m in memory]
        for seed, source in enumerate(sources):
            source[:] = (random_bits if narrow else wide_values)(dtype, 5003, seed)
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BXOR):
            if dtype.kind not in op.kinds:
                continue
            inputs = [source.copy() for source in sources]
            fold = op.logical if dtype.kind is Kind.BOOL else op.ufunc
            expected = reference(op, dtype, inputs) if narrow else functools.reduce(fold, inputs)
            inputs[aliased] = sources[aliased]
            kept = sources[aliased].copy()
            reduction.combine(op, dtype, inputs, sources[aliased])
            assert sources[aliased].tobytes() == expected.tobytes()
            sources[aliased][:] = kept


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_block_size_does_not_affect_the_result(kernels, name):
    """A long in-place product equals products of 1 and 3 elements at block boundaries."""
    dtype = by_name[name]
    sources = [wide_values(dtype, 20001, seed) for seed in range(3)]
    last = sources[2].copy()
    reduction.combine(ReduceOp.PRODUCT, dtype, [*sources[:2], last], last)
    for length in (1, 3):
        for start in (0, 8191, 8192, 16383, 16384, 20000):
            pieces = [source[start : start + length] for source in sources]
            out = np.empty_like(pieces[0])
            reduction.combine(ReduceOp.PRODUCT, dtype, pieces, out)
            assert out.tobytes() == last[start : start + length].tobytes()


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
def test_long_average_of_wide(kernels, name):
    dtype = by_name[name]
    sources = [wide_values(dtype, 100003, seed) for seed in range(4)]
    sources[0][0] = np.inf  # the other part of a complex number stays finite
    a, b, c, d = (source.view(np.finfo(dtype.numpy).dtype) for source in sources)
    expected = (((a + b) + c) + d) / np.array(3, a.dtype)
    reduction.combine(ReduceOp.AVG, dtype, sources, sources[3], 3)
    assert_same_bits(sources[3].view(a.dtype), expected)


def test_no_warnings(kernels):
    big = np.array([3e38, np.inf, np.nan], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduction.combine(ReduceOp.SUM, by_name["float32"], [big, -big, big], np.empty_like(big))
        half = np.array([6e4, np.inf, np.nan], np.float16)
        reduction.combine(ReduceOp.PRODUCT, by_name["float16"], [half, -half], half)
        reduction.narrow(big, half)
        reduction.scale(by_name["float32"], big, 1e300, big)


def test_invalid_arguments_raise():
    bfloat16, int32 = by_name["bfloat16"], by_name["int32"]
    good, numbers = np.zeros(4, ml_dtypes.bfloat16), np.zeros(4, np.int32)
    for error, sources, out, op, dtype in (
        (ArgumentError, [], good, ReduceOp.SUM, bfloat16),
        (ArgumentError, [good, good[:3]], good, ReduceOp.SUM, bfloat16),
        (ArgumentError, [np.zeros(8, good.dtype)[::2]], good, ReduceOp.SUM, bfloat16),
        (ArgumentTypeError, [good], np.zeros(4, np.float16), ReduceOp.SUM, bfloat16),
        (UnsupportedError, [good], good, ReduceOp.BAND, bfloat16),
        (UnsupportedError, [numbers], numbers, ReduceOp.AVG, int32),
    ):
        with pytest.raises(error):
            reduction.combine(op, dtype, sources, out)
    with pytest.raises(ArgumentTypeError):
        reduction.scale(int32, numbers, 0.5, numbers)
    with pytest.raises(ArgumentTypeError):
        reduction.scale(bfloat16, good, 1j, good)
    with pytest.raises(UnsupportedError):
        reduction.scale(by_name["bool"], np.zeros(1, bool), 1, np.zeros(1, bool))
    with pytest.raises(ArgumentTypeError):
        reduction.narrow(np.zeros(4), good)


def test_environment_variable_selects_numpy(monkeypatch):
    monkeypatch.setenv("MPICOLL_KERNELS", "numpy")
    assert library._load() == (None, "numpy (MPICOLL_KERNELS=numpy)")


def test_broken_library_is_not_used(monkeypatch, tmp_path):
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"nothing")
    spec = type("Spec", (), {"origin": str(broken)})
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.delenv("MPICOLL_KERNELS", raising=False)
    assert "does not load" in library._load()[1]
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: None)
    assert "not built" in library._load()[1]
