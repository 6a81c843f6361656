"""The C library of loops that NumPy does not have, or the reason that it is not loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpicoll import settings

__all__ = ["Kernels", "describe", "kernels"]


if TYPE_CHECKING:
    _CType = type[ctypes._SimpleCData[Any]]


class Kernels:
    """The functions of the C library at ``path``; raises OSError or AttributeError if it is not
    this library. They are documented in ``src/*.c``. ``combine_with_gil`` is combine called with
    the GIL held. ``Segment``, ``CallPlan``, ``Processes`` and ``Copies`` are the structures
    ``mpicoll_shared``, ``mpicoll_plan``, ``mpicoll_processes`` and ``mpicoll_copies``.
    """

    def __init__(self, path: str) -> None:
        library, library_with_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        sources = pointer, size, pointer, size, ctypes.c_double
        self.format = _function(library, "format", ctypes.c_char_p, result=integer)
        self.widen = _function(library, "widen", integer, pointer, pointer, size)
        self.narrow = _function(library, "narrow", integer, pointer, pointer, size)
        self.combine = _function(library, "combine", integer, integer, *sources)
        self.combine_with_gil = _function(library_with_gil, "combine", integer, integer, *sources)
        blocks = pointer, pointer, size, size, size, size, pointer
        self.pack = _function(library, "pack", *blocks)
        self.unpack = _function(library, "unpack", *blocks)
        self.latency = _function(
            library, "latency", pointer, pointer, integer, ctypes.c_uint32, ctypes.c_uint64,
            result=ctypes.c_uint32,
        )  # fmt: skip
        self.far_ns = _function(library, "far_ns", result=ctypes.c_uint32)
        self.shared_region = _function(library, "shared_region", size, size, result=size)
        self.shared_all_entered = _function(
            library, "shared_all_entered", pointer, ctypes.c_uint32, ctypes.c_uint64,
            ctypes.c_uint64, ctypes.c_uint64, result=integer,
        )  # fmt: skip
        self.shared_compare = _function(
            library, "shared_compare", pointer, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64,
            result=integer,
        )  # fmt: skip
        self.shared_call = _function(
            library, "shared_call", pointer, ctypes.c_uint32, pointer, pointer
        )
        self.shared_close = _function(library, "shared_close", pointer)
        self.shared_closed_by = _function(library, "shared_closed_by", pointer, result=integer)
        self.shared_last_call = _function(
            library, "shared_last_call", pointer, ctypes.c_uint32, pointer, pointer,
            result=ctypes.c_uint32,
        )  # fmt: skip
        self.shared_set_signal_handler = _function(library, "shared_set_signal_handler", pointer)
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
        self.single_copy_descriptor_size = _function(
            library, "single_copy_descriptor_size", size, result=size
        )
        self.single_copy_histories = _function(library, "single_copy_histories", result=size)
        self.single_copy_record = _function(library, "single_copy_record", pointer, ctypes.c_uint64)
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
        self.Segment = _structure(library, "shared")
        self.CallPlan = _structure(library, "plan")
        self.Processes = _structure(library, "processes")
        self.Copies = _structure(library, "copies")
        text = ctypes.c_char_p
        self.init_timeout = _function(
            library, "init_timeout", integer, integer, ctypes.c_longlong, text, text, text, integer,
            integer,
        )  # fmt: skip


def _function(
    library: ctypes.CDLL, name: str, *arguments: _CType, result: _CType | None = None
) -> Callable[..., Any]:
    function = library[f"mpicoll_{name}"]
    function.argtypes, function.restype = arguments, result
    return function


class _Field(ctypes.Structure):
    """struct mpicoll_field of kernels.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("type", ctypes.c_char))


_TYPES = {
    b"P": ctypes.c_void_p, b"Q": ctypes.c_uint64, b"I": ctypes.c_uint32, b"i": ctypes.c_int32,
    b"d": ctypes.c_double,
}  # fmt: skip


def _structure(library: ctypes.CDLL, name: str) -> Any:
    """Return a structure of the library, as the library describes it: a ctypes.Structure."""
    described = (_Field * 64).in_dll(library, f"mpicoll_{name}_fields")
    fields = list(itertools.takewhile(lambda field: field.name, described))
    made = type(
        name,
        (ctypes.Structure,),
        {
            "__slots__": (),  # no attributes of other names
            "_fields_": [(field.name.decode(), _TYPES[field.type]) for field in fields],
        },
    )
    if any(getattr(made, field.name.decode()).offset != field.offset for field in fields):
        raise OSError(f"struct mpicoll_{name} has a layout that ctypes does not use")
    return made


def _load() -> tuple[Kernels | None, str]:
    if settings.KERNELS.is_set_to("numpy"):
        return None, "numpy (MPICOLL_KERNELS=numpy)"
    # It is built as an extension module, but it is a plain library that is never imported.
    spec = importlib.util.find_spec("mpicoll.kernels._kernels")
    if spec is None or spec.origin is None:
        return None, "numpy (the C library was not built)"
    try:
        return Kernels(spec.origin), f"compiled ({spec.origin})"
    except (OSError, AttributeError) as error:
        return None, f"numpy (the C library does not load: {error})"


kernels, _description = _load()


def describe() -> str:
    """Return whether the loops run in C ("compiled") or in NumPy ("numpy"), with the reason."""
    return _description
