"""Objects as bytes: protocol-5 pickles, with large buffers next to the pickle, not inside.

Unpickling can run any code that the sender chooses. ``restricted_pickle`` limits it to classes and
functions that the receiver allows.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from mpicoll.arrays.views import Bytes
from mpicoll.core.array_pickles import (
    get_reducers,
    rebuild_array,
    rebuild_dtype,
    rebuild_scalar,
)
from mpicoll.errors import ArgumentTypeError, RefusedPickleError, UnsupportedError

#: Alignment of buffers, so that arrays on them are aligned.
_ALIGNMENT_BYTES = 64


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def encode(obj: object) -> Bytes:
    """Return an object as bytes: sizes, pickle, and the buffers that the pickle refers to.

    Raises any exception of pickle.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
    pickler.dispatch_table = get_reducers()
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
    """Return the object for bytes of ``encode``. Its arrays use the memory of ``whole``.

    Raises RefusedPickleError for other bytes, and for objects that restricted_pickle does not
    allow. Without a restriction, raises any exception of unpickling.
    """
    data, *buffers = _split(whole)
    allowed = _allowed  # read once: another thread may lift it
    if allowed is None:
        return pickle.loads(data.data, buffers=buffers)
    try:
        return _RestrictedUnpickler(data.tobytes(), buffers, allowed).load()
    except RefusedPickleError:
        raise
    except Exception as error:
        raise RefusedPickleError(
            f"a received object cannot be rebuilt: {type(error).__name__}: {error}"
        ) from error


def _split(whole: Bytes) -> list[Bytes]:
    """Return the pickle and its buffers. Every size is checked before it is used."""
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
        raise RefusedPickleError(f"the {whole.nbytes} bytes received are not an object of mpicoll")
    return chunks


#: Classes and functions by module and name.
Names = dict[tuple[str, str], Any]

#: Allowed names of received pickles; None without a restriction.
_allowed: Names | None = None

_NUMPY = (np.ndarray, np.generic, np.dtype)
#: Names in pickles of NumPy's types.
_ARRAY_NAMES: Names = {
    (one.__module__, one.__qualname__): one
    for one in (rebuild_array, rebuild_scalar, rebuild_dtype)
}
#: Builtins in pickles that are always allowed.
_SAFE_BUILTINS: Names = {(one.__module__, one.__qualname__): one for one in (complex, range, slice)}


class _RestrictedUnpickler(pickle._Unpickler):
    """An unpickler for allowed types, with three rules.

    1. Names are looked up only among the allowed ones; nothing is imported.
    2. Only allowed classes and functions are called.
    3. Only objects that the pickle has created are changed (filled, or their state set). Classes,
    functions, NumPy objects and objects with other references, such as members of an Enum, are
    never changed.

    Only the opcodes that mpicoll's pickles need are allowed. Those for extensions (copyreg) would
    look up objects without ``find_class``.
    """

    # Inherited attributes, for type checkers.
    dispatch: ClassVar[dict[int, Opcode]]
    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes, buffers: Sequence[Bytes], allowed: Names) -> None:
        super().__init__(io.BytesIO(data), buffers=[buffer.data for buffer in buffers])
        self._names = allowed
        self._callable_ids = {id(one) for one in allowed.values()}
        self._created: dict[int, Any] = {}  # by id; held, so that no other object gets the id

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise RefusedPickleError(_describe_refusal(module, name)) from None

    def add_created(self, obj: object) -> None:
        self._created[id(obj)] = obj

    def check(self, obj: object) -> None:
        """Raise RefusedPickleError for an object that the pickle must not change."""
        if id(obj) not in self._created:
            what = obj.__name__ if isinstance(obj, type) else f"an object: {type(obj).__name__}"
            raise RefusedPickleError(f"a received pickle changes {what}, which it has not created")

    def load_call(self, creates: bool = False, has_kwargs: bool = False) -> None:
        """Load the result of an allowed function, or of ``__new__`` of a class if ``creates``."""
        kwargs = self.stack.pop() if has_kwargs else {}
        args = self.stack.pop()
        named = self.stack.pop()
        if id(named) not in self._callable_ids or type(args) is not tuple:
            raise RefusedPickleError(
                f"a received pickle calls an object of type {type(named).__name__}; only classes "
                "and functions that restricted_pickle allows are called"
            )
        function = partial(named.__new__, named) if creates else named
        result, references = _call(function, args, kwargs)
        if references <= _SOLE_REFERENCE and not isinstance(result, _NUMPY):
            self.add_created(result)
        self.append(result)

    def load_bytearray8(self) -> None:
        """Load a bytearray. The inherited method allocates the size that the pickle claims."""
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    def refuse(self) -> None:
        """Reject an opcode that mpicoll's pickles do not need."""
        raise RefusedPickleError(
            "a received pickle has an opcode that restricted_pickle does not allow"
        )


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> tuple[Any, int]:
    """Return the result of a function, and the number of references to it."""
    result = function(*args, **kwargs)
    return result, sys.getrefcount(result)


#: The number of references to an object that only ``_call`` refers to.
_SOLE_REFERENCE = _call(object, (), {})[1]


def _describe_refusal(module: str, name: str) -> str:
    what = f"{module}.{name}"
    if (module, name) in _ARRAY_NAMES:
        what = "numpy.ndarray"
    elif module.partition(".")[0] == "numpy":
        return (
            f"a received object needs {what}, which cannot be allowed; of NumPy, only arrays of "
            "class numpy.ndarray, scalars and dtypes without objects can be received"
        )
    return (
        f"a received object needs {what}, which restricted_pickle does not allow; add it if you "
        "trust the sender"
    )


Opcode = Callable[[Any], None]
_LOADERS: dict[int, Opcode] = cast("Any", pickle._Unpickler).dispatch


def _build_creating(opcode: bytes) -> Opcode:
    """Build the loader of an opcode that creates the object on top of the stack."""
    load = _LOADERS[opcode[0]]

    def create(self: _RestrictedUnpickler) -> None:
        load(self)
        self.add_created(self.stack[-1])

    return create


def _build_changing(opcode: bytes, children: int) -> Opcode:
    """Build the loader of an opcode that puts objects on top of the stack into the one below.

    children: number of objects; 0 means all since the last mark.
    """
    load = _LOADERS[opcode[0]]

    def change(self: _RestrictedUnpickler) -> None:
        self.check(self.stack[-1 - children] if children else self.metastack[-1][-1])
        load(self)

    return change


_SAFE_OPCODES = (
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
#: Opcodes that change an object, and the number of objects above it on the stack (0: since a mark).
_CHANGING = {
    pickle.APPEND: 1, pickle.SETITEM: 2, pickle.BUILD: 1,
    pickle.APPENDS: 0, pickle.SETITEMS: 0, pickle.ADDITEMS: 0,
}  # fmt: skip
_RestrictedUnpickler.dispatch = {
    **dict.fromkeys(range(256), _RestrictedUnpickler.refuse),
    **{opcode[0]: _LOADERS[opcode[0]] for opcode in _SAFE_OPCODES},
    **{opcode[0]: _build_creating(opcode) for opcode in _CONTAINERS},
    **{opcode[0]: _build_changing(opcode, n) for opcode, n in _CHANGING.items()},
    pickle.REDUCE[0]: _RestrictedUnpickler.load_call,
    pickle.NEWOBJ[0]: lambda self: self.load_call(creates=True),
    pickle.NEWOBJ_EX[0]: lambda self: self.load_call(creates=True, has_kwargs=True),
    pickle.BYTEARRAY8[0]: _RestrictedUnpickler.load_bytearray8,
}


class restricted_pickle(AbstractContextManager["restricted_pickle"]):
    """Reject received objects of types not listed here, from now on or inside a with statement.

    types: classes and functions that received pickles may name. Numbers, strings, bytes, None,
        tuples, lists, dicts, sets, ranges and slices are always allowed. numpy.ndarray, or any
        other NumPy type, allows arrays of class ndarray, scalars and dtypes, unless they hold
        objects. Arrays of subclasses cannot be allowed.

    ::

        with dist.restricted_pickle(np.ndarray, MyConfig):
            dist.broadcast_object_list(objects, src=0)

    A pickle may call an allowed function with any arguments. It may create instances of an allowed
    class, with or without its constructor, and set any state, with ``__setstate__`` if the class
    has it. Other names are neither imported nor called. The pickle changes only objects that it has
    created: no attributes of classes, no members of an Enum. A sender can still waste time and
    memory of the receiver, or end its process with very deeply nested objects.

    The restriction applies to all threads, until the with statement ends or ``lift()`` is called.
    Received objects other than arrays are then rebuilt in Python, which is slower.

    Rejected objects, and bytes that are not an object, raise RefusedPickleError on the receiving
    rank. restricted_pickle itself raises ArgumentTypeError (a TypeError) for a type that is neither
    class nor function, and UnsupportedError (a ValueError) for a subclass of numpy.ndarray.
    """

    def __init__(self, *types: Callable[..., Any]) -> None:
        global _allowed
        allowed = dict(_SAFE_BUILTINS)
        for one in types:
            module, name = getattr(one, "__module__", None), getattr(one, "__qualname__", None)
            if not (callable(one) and isinstance(module, str) and isinstance(name, str)):
                raise ArgumentTypeError(
                    f"restricted_pickle: expected classes and functions, got {one!r}"
                )
            if not isinstance(one, type) or not issubclass(one, _NUMPY):
                allowed[module, name] = one
            elif issubclass(one, np.ndarray) and one is not np.ndarray:
                raise UnsupportedError(
                    f"restricted_pickle: {one.__qualname__}: arrays of subclasses of numpy.ndarray "
                    "cannot be rebuilt safely; send them as numpy.ndarray"
                )
            else:
                allowed.update(_ARRAY_NAMES)
        self._before = _allowed
        _allowed = allowed

    def __exit__(self, *error: object) -> None:
        self.lift()

    def lift(self) -> None:
        """Restore the previous restriction."""
        global _allowed
        _allowed = self._before
