"""Objects as bytes: protocol-5 pickles whose large buffers travel beside them, not inside.

Unpickling can run any code that the sender likes. ``restricted_pickle`` limits what received
objects may be made of.
"""

from __future__ import annotations

import builtins
import io
import pickle
from types import TracebackType
from typing import Any

import numpy as np

from mpicoll.errors import ArgumentTypeError, RefusedPickleError

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
    data = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    chunks: list[Any] = [data, *(buffer.raw() for buffer in buffers)]
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

    Raises RefusedPickleError where restricted_pickle does not allow a type.
    """
    count = int(whole[:8].view(np.int64)[0])
    sizes = whole[: 8 * (count + 1)].view(np.int64)[1:].tolist()
    start = _aligned(8 * (count + 1))
    chunks = []
    for size in sizes:
        chunks.append(whole[start : start + size])
        start += _aligned(size)
    data, buffers = chunks[0].tobytes(), [chunk.data for chunk in chunks[1:]]
    if _allowed is None:
        return pickle.loads(data, buffers=buffers)
    return _Restricted(io.BytesIO(data), buffers=buffers).load()


#: (module, name) of what received pickles may refer to; None is everything.
_allowed: frozenset[tuple[str, str]] | None = None

# What pickles of well-known types refer to besides the type itself.
_NUMPY = (
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *(
        (f"numpy.{core}.{module}", name)
        for core in ("_core", "core")
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    ),
)
_HELPERS: dict[type, tuple[tuple[str, str], ...]] = {np.ndarray: _NUMPY, np.generic: _NUMPY}


#: Builtins that pickles refer to by name, and that hold no more than their own elements.
_HARMLESS = ("bytearray", "complex", "frozenset", "range", "set", "slice")


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert _allowed is not None
        if (module, name) not in _allowed:
            raise RefusedPickleError(
                f"a received object needs {module}.{name}, which restricted_pickle does not allow; "
                f"name it, or do not trust the sender"
            )
        return super().find_class(module, name)


class restricted_pickle:
    """From now on, or inside a with statement, refuses received objects of other types.

    types: the classes and functions that received pickles may refer to. Numbers, strings, bytes,
    None, tuples, lists, dicts and sets never need a name. numpy.ndarray allows arrays of NumPy's
    own dtypes.

    ::

        with dist.restricted_pickle(np.ndarray, MyConfig):
            dist.broadcast_object_list(objects, src=0)

    A refused object raises RefusedPickleError on the rank that received it. The restriction holds
    for all threads. Raises ArgumentTypeError for what is no class or function.
    """

    def __init__(self, *types: Any) -> None:
        global _allowed
        self._before = _allowed
        found: set[tuple[str, str]] = set()
        for one in types:
            if not hasattr(one, "__qualname__") or not hasattr(one, "__module__"):
                raise ArgumentTypeError(
                    f"restricted_pickle: expected classes and functions, got {one!r}"
                )
            found.add((one.__module__, one.__qualname__))
            for base, helpers in _HELPERS.items():
                if isinstance(one, type) and issubclass(one, base):
                    found.update(helpers)
        found.update((builtins.__name__, name) for name in _HARMLESS)
        _allowed = frozenset(found)

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
        """Puts back what was allowed before."""
        global _allowed
        _allowed = self._before
