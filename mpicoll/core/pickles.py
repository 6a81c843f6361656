"""Objects as bytes: protocol-5 pickles, with large buffers next to the pickle, not inside.

Unpickling can run any code that the sender chooses; ``unpickling.restricted_pickle`` limits it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from mpicoll.arrays.views import Bytes
from mpicoll.core import unpickling
from mpicoll.core.array_pickles import get_reducers
from mpicoll.errors import RefusedPickleError

__all__ = ["decode", "encode"]


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
    return unpickling.load(data, buffers)


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
