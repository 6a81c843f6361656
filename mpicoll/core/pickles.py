"""Objects as bytes: protocol-5 pickles whose large buffers travel beside them, not inside.

Unpickling can run any code that the sender likes. ``restricted_pickle`` limits it to what the
receiver has named.

NumPy's own pickles hand bytes of the sender to ``numpy.dtype`` and ``ndarray.__setstate__``, which
make pointers of them if they are told to. So arrays, their scalars and dtypes are not pickled that
way, but as calls of functions of this module, which check all that they are given.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, cast

import ml_dtypes
import numpy as np

from mpicoll.errors import ArgumentTypeError, RefusedPickleError, UnsupportedError

__all__ = ["decode", "encode", "restricted_pickle"]

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

#: Buffers start at multiples of this many bytes, so that arrays made on them are aligned.
_ALIGNMENT = 64


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def encode(obj: Any) -> Bytes:
    """The bytes of an object: sizes, pickle, and the buffers that the pickle refers to.

    Raises what pickle raises for objects that cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
    pickler.dispatch_table = _reducers()
    pickler.dump(obj)
    chunks: list[Any] = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
    lengths = [len(chunk) for chunk in chunks]
    sizes = np.array([len(chunks), *lengths], np.int64)
    chunks.insert(0, sizes.tobytes())
    lengths.insert(0, sizes.nbytes)
    whole = np.empty(sum(_aligned(length) for length in lengths), np.uint8)
    start = 0
    for chunk, length in zip(chunks, lengths, strict=True):
        whole[start : start + length] = np.frombuffer(chunk, np.uint8)
        start += _aligned(length)
    return whole


def decode(whole: Bytes) -> Any:
    """The object that ``encode`` made into bytes; its arrays stand on the memory of ``whole``.

    Raises RefusedPickleError for bytes that ``encode`` did not make, and for what restricted_pickle
    does not allow. Without a restriction, raises what unpickling raises.
    """
    data, *buffers = _chunks(whole)
    allowed = _allowed  # once: another thread may lift it
    if allowed is None:
        return pickle.loads(data.data, buffers=buffers)
    try:
        return _Restricted(data.tobytes(), buffers, allowed).load()
    except RefusedPickleError:
        raise
    except Exception as error:
        raise RefusedPickleError(
            f"a received object cannot be rebuilt: {type(error).__name__}: {error}"
        ) from error


def _chunks(whole: Bytes) -> list[Bytes]:
    """The pickle and its buffers; no size is believed before it is known to fit."""
    count = int(whole[:8].view(np.int64)[0]) if whole.nbytes >= 8 else 0
    start = 8 * (count + 1)
    chunks = []
    if count >= 1 and start <= whole.nbytes:
        sizes = whole[8:start].view(np.int64).tolist()
        start = _aligned(start)
        for size in sizes:
            if not 0 <= size <= whole.nbytes - start:
                break
            chunks.append(whole[start : start + size])
            start += _aligned(size)
    if len(chunks) != count or not count or start != whole.nbytes:
        raise RefusedPickleError(f"the {whole.nbytes} bytes received are no object of mpicoll's")
    return chunks


# --- arrays -------------------------------------------------------------------------------------


def _native() -> dict[str, np.dtype[Any]]:
    """The dtypes with a fixed size of NumPy and ml_dtypes, by names that tell them apart."""
    codes = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
    found = {np.dtype(code).str: np.dtype(code) for code in codes}
    for one in vars(ml_dtypes).values():
        if isinstance(one, type) and issubclass(one, np.generic):
            found[one.__name__] = np.dtype(one)  # the ``str`` of many is that of a void
    return found


_DTYPES = _native()
_SPECS = {dtype: spec for spec, dtype in _DTYPES.items()}
#: ``str`` of NumPy's dtypes whose elements are nothing but bytes: not of "O", which are pointers.
#: No unit of time has a denominator: NumPy writes none, and divides by what it is sent.
_BYTES_ALONE = re.compile(
    r"[<>|]([biufcSUV][0-9]{1,9}|[Mm]8(\[([1-9][0-9]{0,8})?[A-Za-z]{1,2}\])?)"
)
#: The first number of the dtypes that others than NumPy define (NPY_USERDEF).
_USER_DEFINED = 256
#: Bytes of an element at most: what a C int holds.
_LARGEST = 2**31 - 1


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    spec = _spec(array.dtype)
    if spec is None or not array.itemsize:
        return array.__reduce_ex__(5)
    fortran = array.flags.fnc
    flat = array.ravel("F" if fortran else "C")  # a copy of what is not contiguous
    data: Any = flat.view(np.uint8)
    if not array.flags.writeable:
        data.flags.writeable = False
    return _array, (spec, array.shape, fortran, pickle.PickleBuffer(data))


def _reduce_scalar(scalar: np.generic) -> Any:
    cell = np.asarray(scalar)
    spec = _spec(cell.dtype)
    if spec is None or not cell.itemsize:
        return scalar.__reduce__()
    return _scalar, (spec, cell.tobytes())


def _reduce_dtype(dtype: np.dtype[Any]) -> Any:
    spec = _spec(dtype)
    return dtype.__reduce__() if spec is None else (_dtype, (spec,))


#: How what is NumPy's is pickled. Objects, subclasses and what else is not here go NumPy's way.
_REDUCERS: dict[type, Callable[[Any], Any]] = {np.ndarray: _reduce_array}
for _one in (*_DTYPES.values(), *map(np.dtype, ("S", "U", "V", "M8", "m8", "q", "Q"))):
    _REDUCERS[_one.type] = _reduce_scalar
    _REDUCERS[type(_one)] = _reduce_dtype
_of_others: dict[type, Callable[[Any], Any]] = {}
_of_all = _REDUCERS


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """Those and copyreg's, which a program may add to; a chain of both would be slow."""
    global _of_others, _of_all
    if copyreg.dispatch_table != _of_others:
        others = dict(copyreg.dispatch_table)
        _of_all = {**others, **_REDUCERS}
        _of_others = others  # last, for other threads look at it first
    return _of_all


def _spec(dtype: np.dtype[Any]) -> Any:
    """What ``_dtype`` makes a dtype of; None for one that it does not make."""
    if dtype.metadata is not None:
        return None
    spec = _SPECS.get(dtype)
    if spec is not None:
        return spec
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        spec = _spec(base)
        return None if spec is None else (spec, shape)
    if dtype.names is None:
        own = 0 <= dtype.num < _USER_DEFINED and _BYTES_ALONE.fullmatch(dtype.str)
        return dtype.str if own and np.dtype(dtype.str).type is dtype.type else None
    assert dtype.fields is not None
    fields = [dtype.fields[name] for name in dtype.names]
    specs = tuple(_spec(field[0]) for field in fields)
    if None in specs or dtype.type is not np.void or len(dtype.fields) > len(fields):  # titles
        return None
    offsets = tuple(field[1] for field in fields)
    return dtype.names, specs, offsets, dtype.itemsize, dtype.isalignedstruct


def _dtype(spec: Any) -> np.dtype[Any]:
    """A dtype without objects; raises RefusedPickleError, or what NumPy does, for no ``_spec``."""
    if type(spec) is str:
        found = _DTYPES.get(spec)
        if found is not None:
            return found
        if _BYTES_ALONE.fullmatch(spec):
            return np.dtype(spec)
    elif type(spec) is tuple and len(spec) == 2:
        base, shape = _dtype(spec[0]), spec[1]
        if _elements(shape) * base.itemsize <= _LARGEST:
            return np.dtype((base, shape))
    elif type(spec) is tuple and len(spec) == 5:
        names, specs, offsets, itemsize, aligned = spec
        formats = [_dtype(one) for one in specs]
        ends = [at + one.itemsize for at, one in zip(offsets, formats, strict=True)]
        if all(type(n) is int and n >= 0 for n in (*offsets, itemsize)) and (
            max((0, *ends)) <= itemsize <= _LARGEST
        ):
            fields = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
            return np.dtype(fields, align=bool(aligned))  # type: ignore[call-overload, no-any-return]
    raise RefusedPickleError(f"a received array has no dtype that can be rebuilt: {spec!r:.99}")


def _elements(shape: Any) -> int:
    """Number of elements; raises RefusedPickleError for what is no shape."""
    if type(shape) is tuple:
        for n in shape:
            if type(n) is not int or n < 0:
                break
        else:
            return math.prod(shape)
    raise RefusedPickleError(f"a received array has a shape that cannot be: {shape!r:.99}")


def _array(spec: Any, shape: Any, fortran: Any, data: Any) -> np.ndarray[Any, Any]:
    """The array whose bytes are ``data``, on the same memory."""
    dtype, size = _dtype(spec), memoryview(data).nbytes
    # Where elements had no bytes, a shape of any size would fit.
    if not dtype.itemsize or _elements(shape) * dtype.itemsize != size:
        raise RefusedPickleError(
            f"a received array of shape {shape!r:.99} and dtype {dtype} has {size} bytes"
        )
    made: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, order="F" if fortran else "C")
    return made


def _scalar(spec: Any, data: Any) -> Any:
    """The scalar whose bytes are ``data``."""
    return _array(spec, (), False, bytearray(memoryview(data)))[()]


# --- under a restriction ------------------------------------------------------------------------

#: Classes and functions by module and name, as pickles name them.
Names = dict[tuple[str, str], Any]

#: What received pickles may name; None is everything.
_allowed: Names | None = None

_NUMPY = (np.ndarray, np.generic, np.dtype)
#: What a pickle of those names.
_OF_ARRAYS: Names = {(one.__module__, one.__qualname__): one for one in (_array, _scalar, _dtype)}
#: Builtins that pickles name, and that hold no more than their own elements.
_HARMLESS: Names = {(one.__module__, one.__qualname__): one for one in (complex, range, slice)}


class _Restricted(pickle._Unpickler):
    """Unpickles what the receiver has named, by three rules.

    1. Names mean what the receiver has named, and nothing else; nothing is imported or looked up.
    2. Only what was named is called.
    3. Only what the pickle itself has made is changed, by filling it or setting its state: no
       class, no function, and no object that others hold, such as a member of an Enum. What is
       NumPy's is not changed at all.

    Opcodes are those that protocol 5 writes. Others are refused: one of them, for extensions,
    finds objects without asking for their names.
    """

    # What is inherited, for type checkers.
    dispatch: ClassVar[dict[int, Opcode]]
    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes, buffers: Sequence[Bytes], allowed: Names) -> None:
        super().__init__(io.BytesIO(data), buffers=[buffer.data for buffer in buffers])
        self._names = allowed
        self._named = {id(one) for one in allowed.values()}
        self._made: dict[int, Any] = {}  # by id, and kept, so that no other object has the id

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise RefusedPickleError(_refusal(module, name)) from None

    def made(self, obj: Any) -> None:
        """From now on the pickle may change an object."""
        self._made[id(obj)] = obj

    def check(self, obj: Any) -> None:
        """Raises RefusedPickleError for an object that the pickle may not change."""
        if id(obj) not in self._made:
            what = obj.__name__ if isinstance(obj, type) else f"an object: {type(obj).__name__}"
            raise RefusedPickleError(f"a received pickle changes {what}, which it has not made")

    def call(self, named: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function makes of arguments; ``named`` is what the pickle calls."""
        if id(named) not in self._named or type(args) is not tuple:
            raise RefusedPickleError(
                f"a received pickle calls an object of type {type(named).__name__}; only classes "
                "and functions that restricted_pickle names are called"
            )
        found, references = _called(function, args, kwargs)
        if references <= _alone and not isinstance(found, _NUMPY):
            self.made(found)
        return found

    def load_reduce(self) -> None:
        args = self.stack.pop()
        named = self.stack.pop()
        self.append(self.call(named, named, args, {}))

    def load_newobj(self) -> None:
        args = self.stack.pop()
        cls = self.stack.pop()
        self.append(self.call(cls, partial(cls.__new__, cls), args, {}))

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        cls = self.stack.pop()
        self.append(self.call(cls, partial(cls.__new__, cls), args, kwargs))

    def load_bytearray8(self) -> None:
        """As it is inherited, it makes room for as many bytes as the pickle says there are."""
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    def refuse(self) -> None:
        """An opcode that protocol 5 does not write."""
        raise RefusedPickleError("the bytes received are no pickle of protocol 5")


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
    """What a function returns, and how many hold it."""
    found = function(*args, **kwargs)
    return found, sys.getrefcount(found)


#: How many hold an object that nobody but ``_called`` holds.
_alone = _called(object, (), {})[1]


def _refusal(module: str, name: str) -> str:
    what = f"{module}.{name}"
    if (module, name) in _OF_ARRAYS:
        what = "numpy.ndarray"
    elif module.partition(".")[0] == "numpy":
        return (
            f"a received object needs {what}, which no restriction allows: of NumPy's objects only "
            "arrays of class numpy.ndarray, scalars and dtypes are, where they hold no objects"
        )
    return (
        f"a received object needs {what}, which restricted_pickle does not allow; name it, or do "
        "not trust the sender"
    )


Opcode = Callable[[Any], None]
_INHERITED: dict[int, Opcode] = cast("Any", pickle._Unpickler).dispatch


def _making(opcode: bytes) -> Opcode:
    """The opcode makes an object, on top of the stack."""
    load = _INHERITED[opcode[0]]

    def make(self: _Restricted) -> None:
        load(self)
        self.made(self.stack[-1])

    return make


def _changing(opcode: bytes, target: Callable[[_Restricted], Any]) -> Opcode:
    """The opcode changes an object that is deeper in the stack."""
    load = _INHERITED[opcode[0]]

    def change(self: _Restricted) -> None:
        self.check(target(self))
        load(self)

    return change


_UNCHANGED = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.LONG1, pickle.LONG4, pickle.BINFLOAT,
    pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
    pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8,
    pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.FROZENSET, pickle.STACK_GLOBAL,
)  # fmt: skip
_CONTAINERS = pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET
_Restricted.dispatch = {
    **dict.fromkeys(range(256), _Restricted.refuse),
    **{opcode[0]: _INHERITED[opcode[0]] for opcode in _UNCHANGED},
    **{opcode[0]: _making(opcode) for opcode in _CONTAINERS},
    pickle.APPEND[0]: _changing(pickle.APPEND, lambda self: self.stack[-2]),
    pickle.SETITEM[0]: _changing(pickle.SETITEM, lambda self: self.stack[-3]),
    pickle.APPENDS[0]: _changing(pickle.APPENDS, lambda self: self.metastack[-1][-1]),
    pickle.SETITEMS[0]: _changing(pickle.SETITEMS, lambda self: self.metastack[-1][-1]),
    pickle.ADDITEMS[0]: _changing(pickle.ADDITEMS, lambda self: self.metastack[-1][-1]),
    pickle.BUILD[0]: _changing(pickle.BUILD, lambda self: self.stack[-2]),
    pickle.REDUCE[0]: _Restricted.load_reduce,
    pickle.NEWOBJ[0]: _Restricted.load_newobj,
    pickle.NEWOBJ_EX[0]: _Restricted.load_newobj_ex,
    pickle.BYTEARRAY8[0]: _Restricted.load_bytearray8,
}


class restricted_pickle:
    """Refuse received objects of other types, from now on or inside a with statement.

    types: the classes and functions that received pickles may name. Numbers, strings, bytes, None,
    tuples, lists, dicts, sets, ranges and slices need no name. numpy.ndarray, or any other of
    NumPy's types, allows arrays of class ndarray, scalars and dtypes, as long as they hold no
    objects; arrays of subclasses cannot be allowed.

    ::

        with dist.restricted_pickle(np.ndarray, MyConfig):
            dist.broadcast_object_list(objects, src=0)

    A named function may be called, with any arguments. Of a named class instances may be made, by
    its constructor or without it, and given any state, by its ``__setstate__`` if it has one. What
    is not named is neither imported nor called, and nothing is changed but what a pickle makes:
    not the attributes of classes, not the members of an Enum. A sender can still take the
    receiver's time and memory.

    The restriction holds for all threads, until the with statement ends or ``lift()`` is called.
    Received objects are rebuilt in Python then, which takes longer; arrays do not.

    A refused object, and bytes that are no object, raise RefusedPickleError on the rank that
    received them. restricted_pickle itself raises ArgumentTypeError (a TypeError) for what is no
    class or function, and UnsupportedError (a ValueError) for a subclass of numpy.ndarray.
    """

    def __init__(self, *types: Any) -> None:
        global _allowed
        found = dict(_HARMLESS)
        for one in types:
            module, name = getattr(one, "__module__", None), getattr(one, "__qualname__", None)
            if not (callable(one) and isinstance(module, str) and isinstance(name, str)):
                raise ArgumentTypeError(
                    f"restricted_pickle: expected classes and functions, got {one!r}"
                )
            if not isinstance(one, type) or not issubclass(one, _NUMPY):
                found[module, name] = one
            elif issubclass(one, np.ndarray) and one is not np.ndarray:
                raise UnsupportedError(
                    f"restricted_pickle: {one.__qualname__}: arrays of subclasses of numpy.ndarray "
                    "cannot be rebuilt safely; send them as numpy.ndarray"
                )
            else:
                found.update(_OF_ARRAYS)
        self._before = _allowed
        _allowed = found

    def __enter__(self) -> restricted_pickle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lift()

    def lift(self) -> None:
        """Put back what was allowed before."""
        global _allowed
        _allowed = self._before
