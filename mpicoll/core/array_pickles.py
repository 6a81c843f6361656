"""Pickles of NumPy arrays, scalars and dtypes that are safe to load.

NumPy's own pickles pass bytes of the sender to ``numpy.dtype`` and ``ndarray.__setstate__``, which
can turn them into pointers. Here they are pickled as calls of ``rebuild_array``, ``rebuild_scalar``
and ``rebuild_dtype``, which check all their arguments.
"""

from __future__ import annotations

import copyreg
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from mpicoll.errors import RefusedPickleError

#: The dtypes of fixed size of NumPy and ml_dtypes, by unique names.
_DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(code).str: np.dtype(code)
    for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
} | {
    one.__name__: np.dtype(one)  # its ``str`` is often a void type
    for one in vars(ml_dtypes).values()
    if isinstance(one, type) and issubclass(one, np.generic)
}
_SPECS = {dtype: spec for spec, dtype in _DTYPES.items()}
#: ``str`` of NumPy's dtypes whose elements are plain bytes, not pointers ("O"). Units of time have
#: no denominator: NumPy never writes one, but divides by one that it reads.
_PLAIN_DTYPE = re.compile(
    r"[<>|]([biufcSUV][0-9]{1,9}|[Mm]8(\[([1-9][0-9]{0,8})?[A-Za-z]{1,2}\])?)"
)
#: First number of dtypes that are not NumPy's own (NPY_USERDEF).
_USER_DEFINED = 256
#: Maximum size of an element, the range of a C int.
_MAX_ITEM_BYTES = 2**31 - 1


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    spec = _describe_dtype(array.dtype)
    if spec is None or not array.itemsize:
        return array.__reduce_ex__(5)
    fortran = array.flags.fnc
    flat = array.ravel("F" if fortran else "C")  # a copy if the array is not contiguous
    data: Any = flat.view(np.uint8)
    if not array.flags.writeable:
        data.flags.writeable = False
    return rebuild_array, (spec, array.shape, fortran, pickle.PickleBuffer(data))


def _reduce_scalar(scalar: np.generic) -> Any:
    cell = np.asarray(scalar)
    spec = _describe_dtype(cell.dtype)
    if spec is None or not cell.itemsize:
        return scalar.__reduce__()
    return rebuild_scalar, (spec, cell.tobytes())


def _reduce_dtype(dtype: np.dtype[Any]) -> Any:
    spec = _describe_dtype(dtype)
    return dtype.__reduce__() if spec is None else (rebuild_dtype, (spec,))


#: Reducers for NumPy's types. Objects, subclasses and other types are pickled as by NumPy.
_REDUCERS: dict[type, Callable[[Any], Any]] = {np.ndarray: _reduce_array}
for _one in (*_DTYPES.values(), *map(np.dtype, ("S", "U", "V", "M8", "m8", "q", "Q"))):
    _REDUCERS[_one.type] = _reduce_scalar
    _REDUCERS[type(_one)] = _reduce_dtype


def get_reducers() -> dict[type, Callable[[Any], Any]]:
    """Return a dispatch table for a pickler: copyreg's reducers, replaced by this module's for
    NumPy types. A dict, because a pickler is slower with a ChainMap.
    """
    return {**copyreg.dispatch_table, **_REDUCERS}


def _describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the argument of ``rebuild_dtype`` for a dtype, or None if it cannot be rebuilt."""
    if dtype.metadata is not None:
        return None
    spec = _SPECS.get(dtype)
    if spec is not None:
        return spec
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        spec = _describe_dtype(base)
        return None if spec is None else (spec, shape)
    if dtype.names is None:
        own = 0 <= dtype.num < _USER_DEFINED and _PLAIN_DTYPE.fullmatch(dtype.str)
        return dtype.str if own and np.dtype(dtype.str).type is dtype.type else None
    assert dtype.fields is not None
    fields = [dtype.fields[name] for name in dtype.names]
    specs = tuple(_describe_dtype(field[0]) for field in fields)
    if None in specs or dtype.type is not np.void or len(dtype.fields) > len(fields):  # titles
        return None
    offsets = tuple(field[1] for field in fields)
    return dtype.names, specs, offsets, dtype.itemsize, dtype.isalignedstruct


def rebuild_dtype(spec: object) -> np.dtype[Any]:
    """Convert a result of ``_describe_dtype`` to a dtype, which holds no objects.

    Raises RefusedPickleError, or NumPy's errors, for any other ``spec``.
    """
    if type(spec) is str:
        dtype = _DTYPES.get(spec)
        if dtype is not None:
            return dtype
        if _PLAIN_DTYPE.fullmatch(spec):
            return np.dtype(spec)
    elif type(spec) is tuple and len(spec) == 2:
        base, shape = rebuild_dtype(spec[0]), spec[1]
        if _count_elements(shape) * base.itemsize <= _MAX_ITEM_BYTES:
            return np.dtype((base, shape))
    elif type(spec) is tuple and len(spec) == 5:
        names, specs, offsets, itemsize, aligned = spec
        formats = [rebuild_dtype(one) for one in specs]
        ends = [at + one.itemsize for at, one in zip(offsets, formats, strict=True)]
        if all(type(n) is int and n >= 0 for n in (*offsets, itemsize)) and (
            max((0, *ends)) <= itemsize <= _MAX_ITEM_BYTES
        ):
            fields = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
            return np.dtype(fields, align=bool(aligned))  # type: ignore[call-overload, no-any-return]
    raise RefusedPickleError(f"a received array has an invalid dtype: {spec!r:.99}")


def _count_elements(shape: object) -> int:
    """Return the number of elements of a shape. Raises RefusedPickleError if it is not a shape."""
    if type(shape) is tuple:
        for n in shape:
            if type(n) is not int or n < 0:
                break
        else:
            return math.prod(shape)
    raise RefusedPickleError(f"a received array has an invalid shape: {shape!r:.99}")


def rebuild_array(spec: object, shape: Any, fortran: object, data: Any) -> np.ndarray[Any, Any]:
    """Return an array on the memory of ``data``. Raises RefusedPickleError for a wrong argument."""
    dtype, size = rebuild_dtype(spec), memoryview(data).nbytes
    # If elements had no bytes, a shape of any size would fit.
    if not dtype.itemsize or _count_elements(shape) * dtype.itemsize != size:
        raise RefusedPickleError(
            f"a received array of shape {shape!r:.99} and dtype {dtype} has {size} bytes"
        )
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, order="F" if fortran else "C")
    return array


def rebuild_scalar(spec: object, data: Any) -> Any:
    """Return the scalar whose bytes are ``data``."""
    return rebuild_array(spec, (), False, bytearray(memoryview(data)))[()]
