"""A call's signature: what all ranks must have alike of it, as numbers and in words.

``kind`` packs primitive, dtype, operation and root; ``number`` stands for the sizes. Every
comparison of the ranks' calls, whatever carries it, compares these, and every message that lists
calls is made from them.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from mpicoll.dtypes import DTYPES, OPERATIONS, DType, Kind, ReduceOp
from mpicoll.primitives import PRIMITIVES, Primitive

__all__ = [
    "LIST",
    "decode_primitive",
    "describe",
    "encode_comparison",
    "encode_kind",
    "encode_list",
    "encode_sizes",
    "encode_task",
    "is_comparison",
    "is_list",
    "parts_per_element",
    "with_root",
]

#: The root of a list of calls.
LIST = 0xFFFFFFFF
#: No dtype, no operation, and no primitive but a task with a name, among their codes.
_NONE = 0xFF
#: Where the parts of a kind are. (An int's hash is its remainder by 2**61 - 1: all are below.)
_DTYPE, _PRIMITIVE, _ROOT, _DEVICE, _COMPARED, _LEVEL = 8, 16, 24, 56, 57, 58


def encode_kind(
    primitive: Primitive,
    dtype: DType | None,
    op: ReduceOp | None,
    root: int,
    on_device: bool = False,
) -> int:
    """The kind of a call; root -1 or LIST: of a list of calls."""
    return (
        on_device << _DEVICE
        | (root & 0xFFFFFFFF) << _ROOT
        | primitive.code << _PRIMITIVE
        | (_NONE if dtype is None else dtype.code) << _DTYPE
        | (_NONE if op is None else op.code)
    )


def encode_sizes(counts: Sequence[int]) -> int:
    """The number of a call's sizes: nothing is 0, one count itself, and more of them a hash."""
    return counts[0] if len(counts) == 1 else encode_list(counts) if counts else 0


def encode_list(counts: Sequence[Any]) -> int:
    """The number of the sizes of a list of calls, each a count or a tuple of counts: a hash.

    The same on every rank: the hash of ints and of tuples of them does not depend on the process.
    """
    number = hash(tuple(counts)) & _HASHED | _HASH
    with _lock:  # threads have groups of their own, and these in common
        while len(_sizes) >= _KEPT:
            _sizes.pop(next(iter(_sizes)), None)
        _sizes[number] = counts
    return number


#: Marks a number that is a hash: no count is as great.
_HASH, _HASHED = 1 << 59, (1 << 59) - 1
#: The latest sizes that numbers stand for, and names of tasks, to put them in words.
_sizes: dict[int, Sequence[Any]] = {}
_KEPT = 256
_lock = threading.Lock()
_names: dict[int, str] = {}


def encode_task(name: str) -> tuple[int, int]:
    """Kind, without the root, and number of a call that is no primitive, such as of objects."""
    number = zlib.crc32(name.encode())
    _names[number] = name
    return _NONE << _PRIMITIVE | _NONE << _DTYPE | _NONE, number


def with_root(kind: int, root: int) -> int:
    """The kind with its root, of one without."""
    return kind | (root & 0xFFFFFFFF) << _ROOT


def encode_comparison(kind: int, root: int, level: int) -> int:
    """What stands for the comparison before a call, at a debug level, where calls are expected."""
    return with_root(kind, root) | 1 << _COMPARED | level << _LEVEL


def is_comparison(kind: int) -> bool:
    """It stands for a comparison."""
    return bool(kind >> _COMPARED & 1)


def is_list(kind: int) -> bool:
    """It is that of a list of calls."""
    return kind >> _ROOT & 0xFFFFFFFF == LIST


def decode_primitive(kind: int) -> Primitive:
    """Return the primitive of such a call, which is no task."""
    return PRIMITIVES[kind >> _PRIMITIVE & 0xFF]


def parts_per_element(kind: int) -> int:
    """The numbers that make up an element of such a call, where they are combined one by one."""
    dtype = kind >> _DTYPE & 0xFF
    is_complex = dtype != _NONE and DTYPES[dtype].kind is Kind.COMPLEX
    return 2 if is_complex and kind & 0xFF != _NONE else 1


def describe(kind: int, number: int) -> str:
    """The call in words; of a list of calls with its sizes if this process has seen them lately."""
    root = kind >> _ROOT & 0xFFFFFFFF
    if kind >> _PRIMITIVE & 0xFF == _NONE:
        name = _names.get(number, "a call that is no collective of arrays")
        return name if root == LIST else f"{name} with root {root}"
    primitive = decode_primitive(kind)
    words = [str(primitive)]
    if kind >> _DTYPE & 0xFF != _NONE:
        dtype = DTYPES[kind >> _DTYPE & 0xFF]
        # In a comparison the number is another one; where blocks differ by rank there is none.
        known = primitive.even and not is_comparison(kind)
        sizes = _sizes.get(number) if known else None
        if is_list(kind):
            words[0] += f" of a list of {dtype}"
            if sizes is not None:
                runs = (f"{len(list(run))} x {size}" for size, run in groupby(sizes))
                words[0] += f" with {', '.join(runs)} elements"
        else:
            size = " + ".join(map(str, sizes or (number,))) if known else "some"
            words[0] += f" of {size} elements of {dtype}"
    if kind & 0xFF != _NONE:
        words.append(OPERATIONS[kind & 0xFF].name)
    if primitive.root:
        words.append(f"{primitive.root} {root}")
    if kind >> _DEVICE & 1:
        words.append("on a device")
    return ", ".join(words)
