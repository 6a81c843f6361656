"""Control messages between ranks: JSON in MPI's buffer calls, never pickle.

Unpickling runs code that the sender chooses. Ranks therefore exchange control data as JSON with a
length limit, and check the types of the received values. mpi4py's lowercase methods use pickle;
``tests/test_control_messages.py`` rejects them. Only object collectives send pickles.

A message has a ``kind``: a type as in an annotation, such as ``tuple[str, list[int]]``. It may
consist of bool, int, float, str, bytes, None, Any (any JSON value), list, tuple, set, dict with
keys of str or int, unions, enums and NamedTuples. The receiver gets values of these types.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from mpicoll.errors import DistBackendError

if TYPE_CHECKING:
    from mpi4py import MPI

#: Maximum length of the message of one rank.
MAX_MESSAGE_BYTES = 16 * 2**20

#: Size of the first part of a message, which holds most messages as a whole.
_FIRST_BYTES = 248

#: Sent instead of a length by a rank that cannot encode its value.
_NOT_ENCODED = -1

T = TypeVar("T")


@overload
def allgather(comm: MPI.Comm, value: object, kind: type[T]) -> list[T]: ...
@overload
def allgather(comm: MPI.Comm, value: object, kind: UnionType) -> list[Any]: ...
def allgather(comm: MPI.Comm, value: object, kind: object) -> list[Any]:
    """Return the values of all ranks, by rank. All ranks call it, with the same ``kind``.

    Raises DistBackendError on all ranks if the message of a rank is too long, is not JSON or has
    another type, or if a value cannot be encoded. On the rank of that value, its cause is the
    TypeError or ValueError.
    """
    data, cause = _try_encode(value)
    first = bytearray(_FIRST.size * comm.Get_size())
    comm.Allgather(_pack_first(data), first)
    sizes, firsts = zip(*_FIRST.iter_unpack(first), strict=True)
    check_sizes(sizes, cause)
    rests = [max(size - _FIRST_BYTES, 0) for size in sizes]
    starts = list(accumulate(rests, initial=0))
    whole = bytearray(starts[-1])
    if whole:
        comm.Allgatherv((data or b"")[_FIRST_BYTES:], [whole, (rests, starts[:-1])])
    return [
        decode(firsts[rank][: sizes[rank]] + whole[start:end], kind, rank)
        for rank, (start, end) in enumerate(pairwise(starts))
    ]


@overload
def bcast(comm: MPI.Comm, value: object, root: int, kind: type[T]) -> T: ...
@overload
def bcast(comm: MPI.Comm, value: object, root: int, kind: UnionType) -> Any: ...
def bcast(comm: MPI.Comm, value: object, root: int, kind: object) -> Any:
    """Return the value of the root on all ranks. All ranks call it, with the same ``kind``.

    value: ignored on ranks other than the root.

    Raises the errors of ``allgather``.
    """
    is_root = comm.Get_rank() == root
    data, cause = _try_encode(value) if is_root else (b"", None)
    first = bytearray(_pack_first(data))
    comm.Bcast(first, root)
    size, start = _FIRST.unpack(first)
    check_sizes([size], cause, first_rank=root)
    rest = bytearray((data or b"")[_FIRST_BYTES:] if is_root else max(size - _FIRST_BYTES, 0))
    if rest:
        comm.Bcast(rest, root)
    return decode(start[:size] + rest, kind, root)


def check_sizes(
    sizes: Iterable[int], cause: Exception | None = None, *, first_rank: int = 0
) -> None:
    """Raise DistBackendError for an invalid message length.

    sizes: lengths in bytes of consecutive ranks, starting at ``first_rank``. cause: the error of
        encoding this rank's value.
    """
    for rank, size in enumerate(sizes, first_rank):
        if size == _NOT_ENCODED:
            reason = "see its error" if cause is None else f"{type(cause).__name__}: {cause}"
            raise DistBackendError(
                f"control message: rank {rank} cannot encode its value as JSON ({reason})"
            ) from cause
        if not 0 <= size <= MAX_MESSAGE_BYTES:
            raise DistBackendError(
                f"control message: rank {rank} announced {size} bytes; expected at most "
                f"{MAX_MESSAGE_BYTES}. {_REMEDY}"
            )


def encode(value: object) -> bytes:
    """Return a value as a control message. Raises TypeError or ValueError if it cannot be JSON."""
    return json.dumps(value, default=_to_json, separators=(",", ":")).encode()


def decode(data: bytes | bytearray, kind: object, rank: int) -> Any:
    """Return the value of a control message, of the type ``kind``.

    rank: rank of the sender. Raises DistBackendError for invalid bytes.
    """
    try:
        return _read(kind, json.loads(data))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"[:200]
    raise DistBackendError(
        f"control message: rank {rank} sent {len(data)} bytes that are not JSON of the expected "
        f"type ({problem}). {_REMEDY}"
    )


_REMEDY = "Run the same version of mpicoll on all ranks, and only programs that you trust"


#: The first part: the length of the message, and its beginning.
_FIRST = struct.Struct(f"<q{_FIRST_BYTES}s")


def _pack_first(data: bytes | None) -> bytes:
    return _FIRST.pack(_NOT_ENCODED if data is None else len(data), (data or b"")[:_FIRST_BYTES])


def _try_encode(value: object) -> tuple[bytes | None, Exception | None]:
    try:
        return encode(value), None
    except (TypeError, ValueError, RecursionError) as error:
        return None, error


def _to_json(value: object) -> Any:
    """Return the JSON for a value that the json module does not support; see ``_read``."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"an object of type {type(value).__name__} cannot be JSON")


def _read(kind: Any, value: Any) -> Any:
    """Convert parsed JSON to a value of type ``kind``; raise TypeError or ValueError."""
    origin: Any = get_origin(kind) or kind
    arguments = get_args(kind)
    if origin in _READERS:
        return _READERS[origin](arguments, value)
    if origin in (bool, int, str, NoneType):
        return _expect(value, origin)
    if issubclass(origin, enum.Enum):
        return origin(value)
    return origin(*_read_each([*_hints(origin).values()], value))  # a NamedTuple


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _read_each(kinds: Sequence[Any], value: Any) -> list[Any]:
    """Convert a list of values of these types; ``kinds`` may be one type and ``...``."""
    count = len(_expect(value, list))
    kinds = [kinds[0]] * count if kinds[1:] == (...,) else kinds
    if count != len(kinds):
        raise TypeError(f"expected {len(kinds)} values, got {count}")
    return [_read(kind, each) for kind, each in zip(kinds, value, strict=True)]


def _read_union(arguments: Sequence[Any], value: Any) -> Any:
    for kind in arguments:
        try:
            return _read(kind, value)
        except (TypeError, ValueError):
            continue
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in arguments)
    raise TypeError(f"expected {names}, got {type(value).__name__}")


_hints = lru_cache(get_type_hints)

_READERS: dict[Any, Any] = {
    Any: lambda _, value: value,
    float: lambda _, value: float(value if type(value) is int else _expect(value, float)),
    bytes: lambda _, value: bytes.fromhex(_expect(value, str)),
    list: lambda arguments, value: _read_each((*arguments, ...), value),
    set: lambda arguments, value: set(_read_each((*arguments, ...), value)),
    tuple: lambda arguments, value: tuple(_read_each(arguments, value)),
    dict: lambda arguments, value: {
        arguments[0](name): _read(arguments[1], each) for name, each in _expect(value, dict).items()
    },
    Union: _read_union,
    UnionType: _read_union,
}
