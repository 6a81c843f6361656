"""Call signatures: the properties of a call that must match on all ranks, as numbers and as text.

``kind`` packs primitive, dtype, operation and root; ``number`` encodes the sizes. All comparisons
of calls between ranks use these two numbers, and all messages that list calls are made from them.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpicoll.dtypes import DType, ReduceOp
    from mpicoll.primitives import Primitive

#: Root of a list of calls.
LIST = 0xFFFFFFFF
#: Code for "no dtype", "no operation", and for a named task instead of a primitive.
_NONE = 0xFF
#: First bits of the fields of a kind. All kinds are below 2**61 - 1, so each is its own hash.
_DTYPE, _PRIMITIVE, _ROOT, _DEVICE, _COMPARED, _LEVEL = 8, 16, 24, 56, 57, 58


def encode_kind(
    primitive: Primitive, dtype: DType | None, op: ReduceOp | None, on_device: bool = False
) -> int:
    """Return the kind of a call without its root."""
    return (
        on_device << _DEVICE
        | primitive.code << _PRIMITIVE
        | (_NONE if dtype is None else dtype.code) << _DTYPE
        | (_NONE if op is None else op.code)
    )


def encode_sizes(counts: int | Sequence[int]) -> int:
    """Return the number for the sizes of a call: 0 if it has none, the count, or a hash."""
    if isinstance(counts, int):
        return counts
    return counts[0] if len(counts) == 1 else _keep(_hash(counts), counts) if counts else 0


def encode_list(counts: Sequence[Any]) -> int:
    """Return the number for the sizes of a list of calls: a hash of counts or tuples of counts.

    The sum of all counts, each mixed with its index by the function of SplitMix64 (G. Steele, D.
    Lea, C. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014), modulo 2**59.
    ``kernels/src/calls.c`` implements the same function.
    """
    import numpy as np

    flat = [count if count.__class__ is int else _hash(count) for count in counts]
    mixed = np.array(flat, np.uint64)
    mixed += np.arange(1, len(flat) + 1, dtype=np.uint64) * np.uint64(_STEP)
    for shift, factor in _MIX:
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(_LAST)
    return _keep(int(mixed.sum()) & _HASHED | _HASH, counts)


def _hash(counts: Sequence[int]) -> int:
    """Return a hash of several counts, the same in every process."""
    return hash(tuple(counts)) & _HASHED | _HASH


def _keep(number: int, counts: Sequence[Any]) -> int:
    """Store the sizes for a number, for messages; return the number."""
    with _lock:  # threads have separate groups, but share these
        while len(_sizes) >= _MAX_SIZES_COUNT:
            _sizes.pop(next(iter(_sizes)), None)
        _sizes[number] = counts
    return number


_STEP, _LAST = 0x9E3779B97F4A7C15, 31
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


#: Bit of a number that is a hash; counts are smaller.
_HASH, _HASHED = 1 << 59, (1 << 59) - 1
#: Latest sizes by number, and names of tasks, for messages.
_sizes: dict[int, Sequence[Any]] = {}
_MAX_SIZES_COUNT = 256
_lock = threading.Lock()
_names: dict[int, str] = {}


def encode_task(name: str) -> tuple[int, int]:
    """Return kind (without root) and number of a call without a primitive, such as of objects."""
    number = zlib.crc32(name.encode())
    _names[number] = name
    return _NONE << _PRIMITIVE | _NONE << _DTYPE | _NONE, number


def with_root(kind: int, root: int) -> int:
    """Return a kind with a root added: -1 without a root, LIST for a list of calls."""
    return kind | (root & 0xFFFFFFFF) << _ROOT


def encode_comparison(kind: int, root: int, level: int) -> int:
    """Return the kind of the comparison that a debug level makes before a call."""
    return with_root(kind, root) | 1 << _COMPARED | level << _LEVEL


def is_comparison(kind: int) -> bool:
    """Return whether a kind is a comparison."""
    return bool(kind >> _COMPARED & 1)


def is_list(kind: int) -> bool:
    """Return whether a kind is a list of calls."""
    return kind >> _ROOT & 0xFFFFFFFF == LIST


def decode_primitive(kind: int) -> Primitive:
    """Return the primitive of a kind that is not a task."""
    from mpicoll.primitives import PRIMITIVES

    return PRIMITIVES[kind >> _PRIMITIVE & 0xFF]


class Call(NamedTuple):
    """Decoded kind and number: a primitive, or a task with a name ("" if unknown)."""

    primitive: Primitive | None
    task: str
    dtype: DType | None
    is_list: bool
    on_device: bool


def read_call(kind: int, number: int) -> Call:
    """Decode a kind and a number of sizes."""
    from mpicoll.dtypes import DTYPES

    dtype = kind >> _DTYPE & 0xFF
    is_task = kind >> _PRIMITIVE & 0xFF == _NONE
    return Call(
        None if is_task else decode_primitive(kind),
        _names.get(number, "") if is_task else "",
        None if dtype == _NONE else DTYPES[dtype],
        not is_task and is_list(kind),
        bool(kind >> _DEVICE & 1),
    )


def parts_per_element(kind: int) -> int:
    """Return how many numbers per element are reduced separately: 2 if complex, else 1."""
    dtype = read_call(kind, 0).dtype
    is_complex = dtype is not None and dtype.name.startswith("complex")
    return 2 if is_complex and kind & 0xFF != _NONE else 1


def describe(kind: int, number: int) -> str:
    """Return a description of a call. A list has its sizes if this process has stored them."""
    root = kind >> _ROOT & 0xFFFFFFFF
    primitive, name, dtype, listed, on_device = read_call(kind, number)
    if primitive is None:
        public = sys.modules["mpicoll"].__all__  # if this process has not called the task
        names = (one for one in public if zlib.crc32(one.encode()) == number)
        name = name or next(names, "a call that is not a collective of arrays")
        return name if root == LIST else f"{name} with root {root}"
    words = [str(primitive)]
    if dtype is not None:
        # A comparison has another number. If blocks differ by rank, the number is unknown.
        known = primitive.even and not is_comparison(kind)
        sizes = _sizes.get(number) if known else None
        if listed:
            words[0] += f" of a list of {dtype}"
            if sizes is not None:
                runs = (f"{len(list(run))} x {size}" for size, run in groupby(sizes))
                words[0] += f" with {', '.join(runs)} elements"
        else:
            if sizes is None:  # a hash that another process has stored
                known = known and not number & _HASH
            size = " + ".join(map(str, sizes or (number,))) if known else "some"
            words[0] += f" of {size} element{'s' * (size != '1')} of {dtype}"
    if kind & 0xFF != _NONE:
        from mpicoll.dtypes import OPERATIONS

        words.append(OPERATIONS[kind & 0xFF].name)
    if primitive.root:
        words.append(f"{primitive.root} {root}")
    if on_device:
        words.append("on a device")
    return ", ".join(words)
