"""Pickles of object collectives: round trips, restricted_pickle, and hostile senders.

Hostile pickles are assembled from opcodes, because picklers do not write them.
"""

from __future__ import annotations

import collections
import copyreg
import datetime
import enum
import fractions
import io
import pickle
import random
import struct
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import mpicoll as dist
from mpicoll.core.array_pickles import rebuild_array
from mpicoll.core.pickles import decode, encode
from mpicoll.dtypes import DTYPES

pytestmark = pytest.mark.any_mpi


class Config:
    limit = 10
    registry: list = []  # noqa: RUF012

    def __init__(self, value=None):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None

    def __repr__(self):
        return f"Config({self.value!r})"

    @classmethod
    def append(cls, value):
        cls.registry.append(value)

    extend = append

    def __call__(self, value):
        self.append(value)


class Slotted:
    __slots__ = ("a", "b")


class WithState(Config):
    def __getstate__(self):
        return [self.value]

    def __setstate__(self, state):
        (self.value,) = state


class Table(dict):
    pass


class WithNew(tuple):
    def __new__(cls, *, first):
        return super().__new__(cls, (first,))

    def __getnewargs_ex__(self):
        return (), {"first": self[0]}


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class ArraySubclass(np.ndarray):
    pass


GLOBAL_LIST = [1]


def the_list():
    return GLOBAL_LIST


def twice(value=1):
    return 2 * value


#: The names that are allowed.
ALLOWED = (np.ndarray, Config, Slotted, WithState, Color, the_list, twice)


@pytest.fixture(params=["unrestricted", "restricted"])
def restriction(request):
    if request.param == "unrestricted":
        yield
    else:
        with dist.restricted_pickle(*ALLOWED, WithNew, Table, fractions.Fraction, ValueError):
            yield


# --- round trips --------------------------------------------------------------------------------

STRUCTURED = [
    np.dtype([("a", "<f4"), ("b", ">i8", (2, 3)), ("c", "S3")]),
    np.dtype([("a", "u1"), ("b", "<f8")], align=True),
    np.dtype({"names": ["x", "y"], "formats": ["<f4", "<u4"], "offsets": [4, 0], "itemsize": 20}),
    np.dtype({"names": ["x", "y"], "formats": ["<f4", "<u4"], "offsets": [0, 0]}),  # a union
    np.dtype([("in", [("z", ml_dtypes.bfloat16), ("t", "M8[25s]")])]),
]
PLAIN = [
    *(dtype.numpy for dtype in DTYPES),
    *map(np.dtype, (">f4", ">c16", ">i2", "g", "G", "S5", "U3", ">U3", "V7", "M8[ns]", "m8[D]")),
    np.dtype(ml_dtypes.int4),
    np.dtype(ml_dtypes.float4_e2m1fn),
]


def filled(dtype, shape, order="C"):
    """Return an array of random bytes, or of valid text."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(count).integers(0, 2 if dtype.kind in "bU" else 256, count, "u1")
    if dtype.kind == "U":
        return np.full(shape, "añ", dtype, order=order)
    return np.ndarray(shape, dtype, data.tobytes(), order=order)


def assert_same(got, array):
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.dtype.isalignedstruct == array.dtype.isalignedstruct
    if array.dtype.names is None:
        assert got.tobytes() == array.tobytes()
    else:  # ignores the padding between fields
        for field in array.dtype.names:
            assert got[field].tobytes() == array[field].tobytes()


@pytest.mark.parametrize("dtype", [*PLAIN, *STRUCTURED], ids=str)
def test_arrays_are_restored(restriction, dtype):
    for shape in ((3, 4, 2), (5,), (), (0,), (2, 0, 3)):
        for order in "CF":
            array = filled(dtype, shape, order).copy(order)
            got = decode(encode([array]))[0]
            assert_same(got, array)
            assert got.flags.writeable and got.flags.aligned
            assert got.flags.c_contiguous == array.flags.c_contiguous
            assert got.flags.f_contiguous == array.flags.f_contiguous
    array = filled(dtype, (6, 4, 4))
    views = array[::2, 1:3, ::-1], array.transpose(1, 0, 2), array[0, 0, ::2]
    for view in (*views, np.broadcast_to(array[0, 0, 0], 3)):
        assert_same(decode(encode(view)), view)
    for view in (array[::2], array.transpose(2, 1, 0), array):
        view.flags.writeable = False
        assert not decode(encode(view)).flags.writeable
    assert decode(encode(dtype)) == dtype


SCALARS = [filled(dtype, (2,))[1] for dtype in (*PLAIN, *STRUCTURED)]
SCALARS += [*(np.dtype(code).type(7) for code in "lLqQ"), np.str_(""), np.bytes_(b"a")]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda one: str(one.dtype))
def test_scalars_are_restored(restriction, scalar):
    got = decode(encode({"x": scalar}))["x"]
    assert isinstance(got, np.generic) and got.dtype == scalar.dtype
    if scalar.dtype.char in "gG":  # a long double has padding
        assert repr(got) == repr(scalar)
    else:
        assert got.tobytes() == scalar.tobytes()


def test_objects_are_restored(restriction):
    slotted = Slotted()
    slotted.a, slotted.b = 1, [2]
    error = ValueError("words")
    error.extra = 3
    inner = np.arange(3.0)
    table = Table(a=1)
    table.extra = 2
    obj = {
        "numbers": [0, -1, 2**40, -(2**80), 1.5, 1j, True, None, 2**3000],
        "text": ("", "é" * 300, b"", b"x" * 300, bytearray(b"y" * 300)),
        "sets": [{1, 2}, frozenset({3, "x"}), range(3), slice(1, None, 2)],
        "instances": [Config([1]), WithState((1, 2)), fractions.Fraction(1, 3), WithNew(first=1)],
        "alike": (inner, inner),
        "color": Color.BLUE,
        "class": Config,
        "many": [[i] for i in range(3000)],
    }
    got = decode(encode(obj))
    alike = got.pop("alike"), obj.pop("alike")
    assert got == obj and alike[0][0] is alike[0][1] and alike[0][0].tolist() == [0, 1, 2]
    assert got["color"] is Color.BLUE and got["class"] is Config
    got = decode(encode([slotted, error, table]))
    assert (got[0].a, got[0].b) == (1, [2])
    assert (repr(got[1]), got[1].extra) == (repr(error), 3)
    assert (got[2], got[2].extra) == ({"a": 1}, 2)
    circle: list = []
    circle.append((circle, Config(circle)))
    got = decode(encode(circle))
    assert got[0][0] is got and got[0][1].value is got


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_types_that_only_unrestricted_pickle_supports():
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    objects = np.array([{"a": 1}, None, Config(2)], object)
    record = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    subclass = np.arange(6.0).reshape(2, 3).view(ArraySubclass)
    described = np.zeros(2, np.dtype("f8", metadata={"unit": "m"}))
    titled = np.zeros(2, [(("title", "a"), "f8")])
    holds_objects = np.array([(1, "x")], [("a", "i4"), ("b", "O")])
    given = [masked, objects, record, np.matrix([[1, 2]]), subclass, described, titled]
    for one in [*given, holds_objects, record[0], holds_objects[0]]:
        got = decode(encode({"x": one}))["x"]
        assert type(got) is type(one) and got.dtype == one.dtype
        assert repr(got) == repr(one)
        assert got.dtype.metadata == one.dtype.metadata
        with dist.restricted_pickle(np.ndarray, Config), pytest.raises(dist.RefusedPickleError):
            decode(encode({"x": one}))
    other = collections.deque([datetime.date(2020, 2, 2)], 3)
    assert decode(encode(other)) == other


def test_tensors_need_unrestricted_pickle():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(2, 3)
    got = decode(encode({"x": tensor}))["x"]
    assert torch.equal(got, tensor)
    with dist.restricted_pickle(np.ndarray), pytest.raises(dist.RefusedPickleError, match="torch"):
        decode(encode({"x": tensor}))


def test_registered_reducers_are_used(monkeypatch):
    class Local:
        pass

    monkeypatch.setitem(copyreg.dispatch_table, Local, lambda one: (fractions.Fraction, (1, 7)))
    assert decode(encode([Local(), np.float32(2)])) == [fractions.Fraction(1, 7), 2]
    monkeypatch.delitem(copyreg.dispatch_table, Local)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        encode(Local())


def test_large_arrays_are_not_copied_into_the_pickle():
    array = np.ones((1000, 1000))
    for sent in (array, array.T):
        data = encode({"x": sent})
        assert array.nbytes < data.nbytes < array.nbytes + 1024
        assert np.shares_memory(decode(data)["x"], data)


def test_restricted_pickle_rejects_other_arguments():
    for wrong in ("builtins.eval", 3, np, Config(1)):
        with pytest.raises(TypeError, match="restricted_pickle: expected classes and functions"):
            dist.restricted_pickle(wrong)
    for wrong in (ArraySubclass, np.matrix, np.ma.MaskedArray):
        with pytest.raises(dist.UnsupportedError, match=wrong.__name__):
            dist.restricted_pickle(Config, wrong)
    assert decode(encode(fractions.Fraction(1, 2)))  # the failed calls have no effect


def test_error_has_the_name_that_is_not_allowed():
    for obj, words in (
        (np.arange(3), ["numpy.ndarray", "add it"]),
        (np.float32(1), ["numpy.ndarray"]),
        (fractions.Fraction(1, 2), ["fractions.Fraction", "add it"]),
        (np.array([None]), ["numpy", "_reconstruct", "cannot be allowed"]),
    ):
        with dist.restricted_pickle(Config), pytest.raises(dist.RefusedPickleError) as caught:
            decode(encode(obj))
        for word in words:
            assert word in str(caught.value)


# --- hostile pickles ----------------------------------------------------------------------------

STOP = pickle.STOP
ARRAYS = "mpicoll.core.array_pickles"


def message(data, *buffers):
    """Return the message that ``encode`` would send for this pickle."""
    chunks = [data, *buffers]
    header = struct.pack(f"{len(chunks) + 1}q", len(chunks), *map(len, chunks))
    padded = b"".join(one + bytes(-len(one) % 64) for one in (header, *chunks))
    return np.frombuffer(padded, np.uint8).copy()


def plain(obj):
    """Return the opcodes of a plain value."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.fast = True  # no memo
    pickler.dump(obj)
    data = file.getvalue()[2:-1]
    return data[9:] if data[:1] == pickle.FRAME else data


def name(module, qualname):
    return plain(module) + plain(qualname) + pickle.STACK_GLOBAL


def named(obj):
    return name(obj.__module__, obj.__qualname__)


def tuple_of(*parts):
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def call(function, *args):
    return function + tuple_of(*args) + pickle.REDUCE


def built(target, state):
    """Set the state of an object."""
    return target + state + pickle.BUILD


def with_attributes(target, **items):
    """Set attributes of an object beside its __dict__, as of an object with slots."""
    return built(target, tuple_of(NONE, dict_of(**items)))


def dict_of(**items):
    inside = b"".join(plain(key) + value for key, value in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + inside + pickle.SETITEMS


ARRAY, SCALAR, DTYPE = (name(ARRAYS, f"rebuild_{one}") for one in ("array", "scalar", "dtype"))


def array_of(spec, shape, data=b"", fortran=False):
    return call(ARRAY, plain(spec), plain(shape), plain(fortran), plain(data))


def old_text(opcode, *lines):
    return opcode + b"".join(line.encode() + b"\n" for line in lines)


NONE, TRUE = pickle.NONE, pickle.NEWTRUE
STRUCT = (("a",), ("<f8",), (0,), 8, False)
#: State of a dtype of objects with the flag "has no objects", which NumPy does not check.
POINTERS = plain((3, "|", None, None, None, -1, -1, 0))
OBJECTS = built(call(name("numpy", "dtype"), plain("O8"), plain(False), TRUE), POINTERS)
SHELL = "touch {}"

HOSTILE = {
    # Names that are not allowed.
    "a shell command of os": call(name("os", "system"), plain(SHELL)),
    "eval": call(name("builtins", "eval"), plain("GLOBAL_LIST.append(2)")),
    "getattr": call(name("builtins", "getattr"), named(Config), plain("registry")),
    "a dotted name": name(__name__, "Config.__init__.__globals__"),
    "a method": call(name(__name__, "Config.append"), plain(1)),
    "another global": name(__name__, "GLOBAL_LIST"),
    "another name of this module's": call(name(ARRAYS, "get_reducers"), plain(1)),
    "pickle within pickle": call(name("pickle", "loads"), plain(b"N.")),
    "the class of arrays": call(name("numpy", "ndarray"), plain((1,)), plain("O")),
    # Objects that are created from bytes.
    "dtype of objects": OBJECTS,
    "array of objects of numpy": call(
        name("numpy._core.numeric", "_frombuffer"), plain(struct.pack("P", id(GLOBAL_LIST))),
        OBJECTS, plain((1,)), plain("C"),
    ),
    **{
        f"unit {spec}": array_of(spec, (1,), bytes(8))
        for spec in ("<M8[s/0]", "<m8[s/0]", "<M8[0s]", "<M8[25s/3]", "<f8[s]", "<M4[s]")
    },
    "state of a dtype": built(call(DTYPE, plain("<f8")), POINTERS),
    "state of an array": built(
        array_of("<f8", (1,), bytes(8)),
        tuple_of(plain(1), plain((1,)), call(DTYPE, plain("<f8")), plain(False), plain(bytes(8))),
    ),
    "state of a scalar": built(
        call(SCALAR, plain(STRUCT), plain(bytes(8))), dict_of(a=plain(1))
    ),
    "an element of an array": array_of("<f8", (1,), bytes(8)) + plain(0) + plain(1.0)
    + pickle.SETITEM,
    # Changes to objects that exist already.
    "attributes of a class": with_attributes(named(Config), limit=plain(99)),
    "the state of a class": built(named(WithState), plain([99])),
    "defaults of a function": with_attributes(named(twice), __defaults__=plain((99,))),
    "defaults of our own function": with_attributes(ARRAY, __defaults__=plain((99,))),
    "a member of an Enum": built(call(named(Color), plain(1)), dict_of(_value_=plain(99))),
    "a class kept aside": named(Config) + pickle.MEMOIZE + pickle.POP + plain(1) + pickle.POP
    + with_attributes(pickle.BINGET + b"\0", limit=plain(99)),
    "an element of an existing list": call(named(the_list)) + plain(99) + pickle.APPEND,
    "elements of an existing list": call(named(the_list)) + pickle.MARK + plain(99)
    + pickle.APPENDS,
    "the lists of a class": named(Config) + pickle.MARK + plain(99) + pickle.APPENDS,
    "more items of a class": named(Config) + pickle.MARK + plain("a") + plain(99)
    + pickle.SETITEMS,
    "elements of a class": named(Config) + pickle.MARK + plain(99) + pickle.ADDITEMS,
    # Calls of objects that are not allowed.
    "a call of an instance": call(call(named(Config), plain(1)), plain(2)),
    "a call of text": call(plain("eval"), plain("1")),
    "an instance of a function": named(twice) + plain(()) + pickle.NEWOBJ,
    "keywords that are a list": named(Config) + plain(()) + plain([1]) + pickle.NEWOBJ_EX,
    "arguments that are a list": named(Config) + plain([1]) + pickle.REDUCE,
    # Opcodes of old protocols.
    "GLOBAL": old_text(pickle.GLOBAL, "os", "system") + tuple_of(plain(SHELL)) + pickle.REDUCE,
    "INST": pickle.MARK + plain(SHELL) + old_text(pickle.INST, "os", "system"),
    "OBJ": pickle.MARK + named(Config) + plain(1) + pickle.OBJ,
    "EXT1": pickle.EXT1 + b"\xf0" + tuple_of(plain("GLOBAL_LIST.append(2)")) + pickle.REDUCE,
    "EXT2": pickle.EXT2 + b"\xf0\0" + tuple_of(plain("GLOBAL_LIST.append(2)")) + pickle.REDUCE,
    "EXT4": pickle.EXT4 + b"\xf0\0\0\0" + tuple_of(plain("1")) + pickle.REDUCE,
    "PERSID": old_text(pickle.PERSID, "1"),
    "BINPERSID": plain(1) + pickle.BINPERSID,
    "STRING": old_text(pickle.STRING, "'x'"),
    # Invalid arrays.
    "a dtype of objects by its name": array_of("|O", (1,), bytes(8)),
    "objects in a field": array_of((("a",), ("|O",), (0,), 8, False), (1,), bytes(8)),
    "objects in a subarray": array_of(("|O", (2,)), (1,), bytes(16)),
    "a dtype by its own class": call(
        ARRAY, named(Config), plain((1,)), plain(False), plain(bytes(8))
    ),
    "a field beyond the end": array_of((("a",), ("<f8",), (8,), 8, False), (1,), bytes(8)),
    "a field far away": array_of((("a",), ("<f8",), (2**31 - 4,), 8, False), (1,), bytes(8)),
    "a bool as an offset": array_of((("a",), ("<f8",), (False,), 8, False), (1,), bytes(8)),
    "more names than fields": array_of((("a", "b"), ("<f8",), (0,), 8, False), (1,), bytes(8)),
    "a huge subarray": array_of(("|V9", (2**31,)), (0,)),
    "a negative dimension": array_of("<f8", (-1,), bytes(8)),
    "two negative dimensions": array_of("<f8", (-1, -1), bytes(8)),
    "dimensions whose product overflows": array_of("<f8", (2**32, 2**32), b""),
    "dimensions whose bytes overflow": array_of("<f8", (2**61 + 1,), bytes(8)),
    "too many dimensions": array_of("<f8", (1,) * 100, bytes(8)),
    "a dimension that is true": array_of("<f8", (True,), bytes(8)),
    "a shape that is a list": array_of("<f8", [1], bytes(8)),
    "too many bytes": array_of("<f8", (2,), bytes(17)),
    "bytes that are a number": array_of("<f8", (2,), 16),
    "elements of 0 bytes": array_of("|V0", (2**40,)),
    "a scalar of too few bytes": call(SCALAR, plain("<f8"), plain(bytes(7))),
    "a deeply nested dtype": DTYPE + plain("f8")
    + (plain(1) + pickle.TUPLE1 + pickle.TUPLE2) * 20_000 + pickle.TUPLE1 + pickle.REDUCE,
    # Invalid pickles.
    "nothing": b"",
    "an empty stack": pickle.REDUCE,
    "a missing buffer": pickle.NEXT_BUFFER,
    "a future protocol": pickle.PROTO + b"\x63",
    "bytes without an end": pickle.BINBYTES8 + struct.pack("<Q", 2**62),
    "a bytearray beyond any": pickle.BYTEARRAY8 + struct.pack("<Q", 2**64 - 1) + NONE,
    "invalid UTF-8": pickle.SHORT_BINUNICODE + b"\1\xff",
    "a key without a hash": pickle.EMPTY_DICT + plain([]) + plain(1) + pickle.SETITEM,
}  # fmt: skip


#: Words of the errors that the library detects itself, because NumPy versions differ in checks.
DETECTED = {
    "a field beyond the end": "dtype", "a field far away": "dtype",
    "a bool as an offset": "dtype", "a huge subarray": "dtype", "a negative dimension": "shape",
    "two negative dimensions": "shape", "a dimension that is true": "shape",
    "dimensions whose product overflows": "0 bytes", "dimensions whose bytes overflow": "8 bytes",
}  # fmt: skip


@pytest.fixture
def unchanged():
    """Fail if one of the targets of hostile pickles has changed."""

    def state():
        return repr(
            (
                *(sorted(vars(one).items(), key=str) for one in (Config, WithState)),
                twice.__defaults__, vars(twice), rebuild_array.__defaults__, GLOBAL_LIST,
                *((one.value, one.name, sorted(vars(one).items(), key=str)) for one in Color),
            )
        )  # fmt: skip

    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickle_is_refused(case, unchanged, tmp_path):
    made = tmp_path / "made"
    data = HOSTILE[case].replace(plain(SHELL), plain(f"touch {made}"))
    with dist.restricted_pickle(*ALLOWED), pytest.raises(dist.RefusedPickleError) as caught:
        decode(message(pickle.PROTO + b"\5" + data + STOP))
    assert DETECTED.get(case, "") in str(caught.value)
    assert not made.exists()


def test_announced_sizes_do_not_allocate_memory():
    data = pickle.BYTEARRAY8 + struct.pack("<Q", 2**28) + NONE + STOP
    tracemalloc.start()
    try:
        with dist.restricted_pickle(), pytest.raises(dist.RefusedPickleError):
            decode(message(data))
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_shell_command_runs_without_restriction(tmp_path):
    """Proves that the hostile pickles work."""
    made = tmp_path / "made"
    data = HOSTILE["a shell command of os"].replace(plain(SHELL), plain(f"touch {made}"))
    decode(message(pickle.PROTO + b"\5" + data + STOP))
    assert made.exists()


def test_cached_extensions_are_refused(unchanged):
    """Unpicklers read the extension cache before they call find_class."""
    copyreg.add_extension("builtins", "eval", 0xF0)
    try:
        assert pickle.loads(pickle.EXT1 + b"\xf0.") is eval  # fills the cache
        for case in ("EXT1", "EXT2", "EXT4"):
            with dist.restricted_pickle(*ALLOWED), pytest.raises(dist.RefusedPickleError):
                decode(message(HOSTILE[case] + STOP))
    finally:
        copyreg.remove_extension("builtins", "eval", 0xF0)
        copyreg._extension_cache.pop(0xF0, None)


def test_allowed_name_means_the_object_that_was_passed(monkeypatch):
    with dist.restricted_pickle(twice):
        monkeypatch.setattr(sys.modules[__name__], "twice", None)
        assert decode(message(call(name(__name__, "twice"), plain(4)) + STOP)) == 8


def test_unpickling_does_not_import_modules():
    module = "this"  # prints a poem
    sys.modules.pop(module, None)
    with dist.restricted_pickle(*ALLOWED), pytest.raises(dist.RefusedPickleError, match=r"this\.s"):
        decode(message(name(module, "s") + STOP))
    assert module not in sys.modules


def test_state_of_a_new_instance_is_set():
    for make in (named(Config) + plain(()) + pickle.NEWOBJ, call(named(Config), plain(1))):
        with dist.restricted_pickle(Config):
            got = decode(message(make + dict_of(limit=plain(99)) + pickle.BUILD + STOP))
        assert (got.limit, Config.limit) == (99, 10)


GOOD = {"a": [np.arange(3.0), Config((1, "x"))], "b": {2**70, 1.5}, "c": np.float32(1)}


def test_truncated_messages_and_pickles_are_refused():
    sent = encode(GOOD)
    data = pickle.dumps(["x" * 300, Config(1), {"a": b"y" * 300, "b": {3}}], 5)
    with dist.restricted_pickle(*ALLOWED):
        for size in range(0, sent.nbytes):
            with pytest.raises(dist.RefusedPickleError):
                decode(sent[:size].copy())
        for size in range(len(data)):
            with pytest.raises(dist.RefusedPickleError):
                decode(message(data[:size]))


def test_random_bytes_give_an_object_or_a_refused_pickle_error(unchanged):
    # With another seed a BUILD may become an APPEND, which calls Config.append.
    rng = random.Random(7)
    sent = encode(GOOD).tobytes()
    start = 64 + sent[64:].index(pickle.PROTO)
    kinds = []
    with dist.restricted_pickle(*ALLOWED):
        for _ in range(4000):
            garbled = bytearray(sent)
            for _ in range(rng.choice((1, 2, 20))):
                garbled[rng.randrange(start, start + 200)] = rng.randrange(256)
            for data in (
                np.frombuffer(garbled, np.uint8),
                message(rng.randbytes(rng.randrange(60))),
                np.frombuffer(rng.randbytes(rng.randrange(300)), np.uint8),
            ):
                try:
                    kinds.append(type(decode(data)))
                except dist.RefusedPickleError:
                    kinds.append(None)
    assert {None, dict} <= set(kinds)


@pytest.mark.parametrize(
    "header",
    [
        (), (0,), (-1,), (1,), (2**62,), (-(2**63),), (1, -1), (1, 2**62), (2, 64, -64),
        (2, 2**63 - 1, 2**63 - 1), (1, 129), (3, 64, -64, 64), (3, 1, 1), (1, 0),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_sizes_in_the_header_are_refused(header):
    sizes = struct.pack(f"{len(header)}q", *header)
    for length in (len(sizes), 128, 192):
        data = np.frombuffer(sizes + pickle.NONE * (length - len(sizes)), np.uint8)
        for _ in range(2):
            with pytest.raises(dist.RefusedPickleError, match=f"{length} bytes"):
                decode(data)
