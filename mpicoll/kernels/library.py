"""The C library of loops that NumPy does not have, or the reason that it is not loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpicoll import settings

#: The C types of struct mpicoll_field in kernels.h, by code of Python's struct module.
_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p, "N": ctypes.c_size_t, "Q": ctypes.c_uint64, "q": ctypes.c_int64,
    "I": ctypes.c_uint32, "i": ctypes.c_int32, "d": ctypes.c_double, "s": ctypes.c_char_p,
}  # fmt: skip

#: The functions of the library: the types of the arguments and of the result; see ``src/*.c``.
_FUNCTIONS = {
    "format": ("s", "i"),
    "widen": ("iPPN", ""),
    "narrow": ("iPPN", ""),
    "combine": ("iiPNPNd", ""),
    "pack": ("PPNNNNP", ""),
    "unpack": ("PPNNNNP", ""),
    "init_timeout": ("iiqsssii", ""),
    "choices_size": ("", "N"),
    "choice_read": ("PNIPP", "i"),
    "choice_set": ("PNiI", ""),
    "shared_region": ("NN", "N"),
    "shared_all_entered": ("PIQQQ", "i"),
    "shared_compare": ("PIQQ", "i"),
    "shared_mismatch": ("P", "I"),
    "shared_call": ("PIIPP", "i"),
    "shared_is_mismatched": ("P", "i"),
    "shared_close": ("P", ""),
    "shared_closed_by": ("P", "i"),
    "shared_set_signal_handler": ("P", ""),
    "shared_blocks": ("PPPNII", "i"),
    "shared_lists": ("PPPNII", "i"),
    "shared_all_to_all": ("PPPNII", "i"),
    "shared_small_all_to_all": ("PPPNII", "i"),
    "shared_fused": ("PPPPNQI", "i"),
    "shared_exchange": ("PNNPNPNIIQ", "i"),
    "mpi_call": ("PPPNII", "i"),
    "single_copy_descriptor_size": ("N", "N"),
    "single_copy_bytes": ("qiPPN", "i"),
}


class Kernels:
    """The functions of the C library at ``path``; raises OSError or AttributeError if it is not
    this library. ``combine_with_gil`` is combine called with the GIL held. ``CallPlan``,
    ``MpiPlan`` and ``Processes`` are the structures ``mpicoll_plan``, ``mpicoll_mpi_plan`` and
    ``mpicoll_processes``.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name in _FUNCTIONS:
            setattr(self, name, _function(library, name))
        self.combine_with_gil = _function(ctypes.PyDLL(path), "combine")
        self._Channel = _structure(library, "shared")
        self.CallPlan = _structure(library, "plan")
        self.MpiPlan = _structure(library, "mpi_plan")
        self.Processes = _structure(library, "processes")

    def make_channels(
        self, base: int, slot: int, n: int, me: int, flat_max_ranks: int = 0, count: int = 1
    ) -> Any:
        """Return the handles of ``count`` channels at address ``base``: C structures, an array."""
        channels, region = (self._Channel * count)(), self.shared_region(slot, n)
        for number, channel in enumerate(channels):
            channel.base, channel.stride = base + number * region, count * region
            channel.first, channel.channels = ctypes.addressof(channels), count
            channel.slot, channel.n, channel.me = slot, n, me
            channel.flat_max_ranks = flat_max_ranks
        return channels

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


def _function(library: ctypes.CDLL, name: str) -> Callable[..., Any]:
    function = library[f"mpicoll_{name}"]
    arguments, result = _FUNCTIONS[name]
    function.argtypes = [_TYPES[code] for code in arguments]
    function.restype = _TYPES[result] if result else None
    return function


class _Field(ctypes.Structure):
    """struct mpicoll_field of kernels.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("type", ctypes.c_char))


def _structure(library: ctypes.CDLL, name: str) -> Any:
    """Return a structure of the library, as the library describes it: a ctypes.Structure."""
    described = (_Field * 64).in_dll(library, f"mpicoll_{name}_fields")
    fields = list(itertools.takewhile(lambda field: field.name, described))
    members = [(field.name.decode(), _TYPES[field.type.decode()]) for field in fields]
    made = type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": members})
    if any(getattr(made, field.name.decode()).offset != field.offset for field in fields):
        raise OSError(f"struct mpicoll_{name} has a layout that ctypes does not use")
    return made


def address_of(function: Any) -> int:
    """Return the address of a function of a library."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


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
