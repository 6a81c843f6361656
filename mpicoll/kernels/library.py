"""The small C library for loops that NumPy lacks: loaded, or why not."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpicoll import settings

__all__ = ["Kernels", "describe", "kernels"]


if TYPE_CHECKING:
    _CType = type[ctypes._SimpleCData[Any]]


class Kernels:
    """The functions of the C library at ``path``; OSError or AttributeError if it is not ours.

    See ``src/reduction.c``, ``exact.c``, ``packing.c``, ``shared.c``, ``single_copy.c``,
    ``latency.c`` and ``limit.c`` for what they do. ``short_combine`` is combine with the GIL held.
    """

    def __init__(self, path: str) -> None:
        library, library_with_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        sources = pointer, size, pointer, size, ctypes.c_double
        self.format = _function(library, "format", ctypes.c_char_p, result=integer)
        self.widen = _function(library, "widen", integer, pointer, pointer, size)
        self.narrow = _function(library, "narrow", integer, pointer, pointer, size)
        self.combine = _function(library, "combine", integer, integer, *sources)
        self.short_combine = _function(library_with_gil, "combine", integer, integer, *sources)
        blocks = pointer, pointer, size, size, size, size, pointer
        self.pack = _function(library, "pack", *blocks)
        self.unpack = _function(library, "unpack", *blocks)
        self.latency = _function(
            library, "latency", pointer, pointer, integer, ctypes.c_uint32, ctypes.c_uint64,
            result=ctypes.c_uint32,
        )  # fmt: skip
        self.far = _function(library, "far", result=ctypes.c_uint32)
        self.shared_region = _function(library, "shared_region", size, size, result=size)
        self.shared_ask = _function(
            library, "shared_ask", pointer, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64,
            ctypes.c_uint64, result=integer,
        )  # fmt: skip
        self.shared_agree = _function(
            library, "shared_agree", pointer, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64,
            result=integer,
        )  # fmt: skip
        self.shared_call = _function(
            library, "shared_call", pointer, ctypes.c_uint32, pointer, pointer
        )
        self.shared_close = _function(library, "shared_close", pointer)
        self.shared_closer = _function(library, "shared_closer", pointer, result=integer)
        self.shared_last_call = _function(
            library, "shared_last_call", pointer, ctypes.c_uint32, pointer, pointer,
            result=ctypes.c_uint32,
        )  # fmt: skip
        self.shared_attend = _function(library, "shared_attend", pointer)
        self.shared_measure = _function(library, "shared_measure", pointer, pointer)
        self.shared_all_reduce = _function(
            library, "shared_all_reduce", pointer, pointer, size, ctypes.c_uint32, result=integer
        )
        self.shared_blocks = _function(
            library, "shared_blocks", pointer, pointer, pointer, size, ctypes.c_uint32,
            ctypes.c_uint32, result=integer,
        )  # fmt: skip
        lists = pointer, pointer, pointer, size, ctypes.c_uint32, ctypes.c_uint32
        self.shared_lists = _function(library, "shared_lists", *lists, result=integer)
        self.shared_all_to_all = _function(library, "shared_all_to_all", *lists, result=integer)
        self.shared_fused = _function(
            library, "shared_fused", pointer, pointer, pointer, pointer, size, ctypes.c_uint64,
            ctypes.c_uint32, result=integer,
        )  # fmt: skip
        self.shared_exchange = _function(
            library, "shared_exchange", pointer, size, size, pointer, size, pointer, size,
            ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, result=integer,
        )  # fmt: skip
        self.shared_sizes = _function(
            library, "shared_sizes", pointer, ctypes.c_uint64, pointer, pointer, pointer,
            ctypes.c_uint32, result=ctypes.c_int64,
        )  # fmt: skip
        self.single_copy_board = _function(library, "single_copy_board", size, result=size)
        self.single_copy_histories = _function(library, "single_copy_histories", result=size)
        self.single_copy_took = _function(library, "single_copy_took", pointer, ctypes.c_uint64)
        self.single_copy_try = _function(
            library, "single_copy_try", ctypes.c_int64, integer, pointer, pointer, size,
            result=integer,
        )  # fmt: skip
        self.single_copy_blocks = _function(
            library, "single_copy_blocks", pointer, pointer, pointer, size, ctypes.c_uint32,
            ctypes.c_uint32, result=integer,
        )  # fmt: skip
        self.single_copy_lists = _function(library, "single_copy_lists", *lists, result=integer)
        self.single_copy_all_to_all = _function(
            library, "single_copy_all_to_all", *lists, result=integer
        )
        self.single_copy_spans = _function(
            library, "single_copy_spans", pointer, pointer, ctypes.c_uint32, ctypes.c_uint64,
            ctypes.c_uint32, result=integer,
        )  # fmt: skip
        text = ctypes.c_char_p
        self.limit = _function(
            library,
            "limit",
            integer,
            integer,
            ctypes.c_longlong,
            text,
            text,
            text,
            integer,
            integer,
        )


def _function(
    library: ctypes.CDLL, name: str, *arguments: _CType, result: _CType | None = None
) -> Callable[..., Any]:
    function = library[f"mpicoll_{name}"]
    function.argtypes, function.restype = arguments, result
    return function


def _load() -> tuple[Kernels | None, str]:
    if settings.KERNELS.is_set_to("numpy"):
        return None, "numpy (MPICOLL_KERNELS=numpy)"
    # It was built as an extension module, but is a plain library and is not imported.
    spec = importlib.util.find_spec("mpicoll.kernels._kernels")
    if spec is None or spec.origin is None:
        return None, "numpy (the C library was not built)"
    try:
        return Kernels(spec.origin), f"compiled ({spec.origin})"
    except (OSError, AttributeError) as error:
        return None, f"numpy (the C library does not load: {error})"


kernels, _description = _load()


def describe() -> str:
    """Return what runs the loops, "compiled" or "numpy", and why."""
    return _description
