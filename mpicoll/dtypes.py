"""Tables of dtypes and reduce operations, one row each.

This module does not load MPI. MPI datatypes and operations are stored by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from mpicoll.errors import ArgumentTypeError


class Kind(Enum):
    """Arithmetic of a dtype."""

    BOOL = "bool"
    INTEGER = "integer"
    FLOAT = "float"
    #: 8-bit and 16-bit floats: reduced in float32 and rounded once.
    NARROW_FLOAT = "narrow float"
    COMPLEX = "complex"


@dataclass(frozen=True, eq=False, slots=True)
class DType:
    """One element type."""

    name: str  # the name in NumPy, ml_dtypes and torch ("float32", "bfloat16", ...)
    numpy: np.dtype[Any]  # NumPy dtype
    kind: Kind  # arithmetic
    accumulate: np.dtype[Any]  # NumPy dtype in which reductions are computed
    #: MPI datatype of messages (an attribute of mpi4py.MPI). A narrow float is sent as the unsigned
    #: integer of its width; MPI never reduces it.
    mpi: str
    dlpack: tuple[int, int]  # (type code, bits) of DLPack 1.1
    buffers: bool  # NumPy supports the buffer protocol for it
    code: int  # index in the table, the same on all ranks
    itemsize: int  # bytes per element

    def __repr__(self) -> str:
        return self.name


# name, kind, MPI datatype, DLPack type code (kDLInt 0, kDLUInt 1, kDLFloat 2, kDLBfloat 4,
# kDLComplex 5, kDLBool 6, float8 and narrower from 7, in the order of dlpack.h).
_TABLE: tuple[tuple[str, Kind, str, int], ...] = (
    ("bool", Kind.BOOL, "UINT8_T", 6),
    ("int8", Kind.INTEGER, "INT8_T", 0),
    ("int16", Kind.INTEGER, "INT16_T", 0),
    ("int32", Kind.INTEGER, "INT32_T", 0),
    ("int64", Kind.INTEGER, "INT64_T", 0),
    ("uint8", Kind.INTEGER, "UINT8_T", 1),
    ("uint16", Kind.INTEGER, "UINT16_T", 1),
    ("uint32", Kind.INTEGER, "UINT32_T", 1),
    ("uint64", Kind.INTEGER, "UINT64_T", 1),
    ("float16", Kind.NARROW_FLOAT, "UINT16_T", 2),
    ("float32", Kind.FLOAT, "FLOAT", 2),
    ("float64", Kind.FLOAT, "DOUBLE", 2),
    ("bfloat16", Kind.NARROW_FLOAT, "UINT16_T", 4),
    ("complex64", Kind.COMPLEX, "C_FLOAT_COMPLEX", 5),
    ("complex128", Kind.COMPLEX, "C_DOUBLE_COMPLEX", 5),
    ("float8_e3m4", Kind.NARROW_FLOAT, "UINT8_T", 7),
    ("float8_e4m3", Kind.NARROW_FLOAT, "UINT8_T", 8),
    ("float8_e4m3b11fnuz", Kind.NARROW_FLOAT, "UINT8_T", 9),
    ("float8_e4m3fn", Kind.NARROW_FLOAT, "UINT8_T", 10),
    ("float8_e4m3fnuz", Kind.NARROW_FLOAT, "UINT8_T", 11),
    ("float8_e5m2", Kind.NARROW_FLOAT, "UINT8_T", 12),
    ("float8_e5m2fnuz", Kind.NARROW_FLOAT, "UINT8_T", 13),
    ("float8_e8m0fnu", Kind.NARROW_FLOAT, "UINT8_T", 14),
)


def _row(code: int, name: str, kind: Kind, mpi: str, dlpack_code: int) -> DType:
    native = not hasattr(ml_dtypes, name)
    dtype = np.dtype(name if native else getattr(ml_dtypes, name))
    accumulate = np.dtype(np.float32) if kind is Kind.NARROW_FLOAT else dtype
    size = dtype.itemsize
    return DType(name, dtype, kind, accumulate, mpi, (dlpack_code, 8 * size), native, code, size)


DTYPES: tuple[DType, ...] = tuple(_row(code, *entry) for code, entry in enumerate(_TABLE))

by_name: dict[str, DType] = {row.name: row for row in DTYPES}
by_numpy: dict[np.dtype[Any], DType] = {row.numpy: row for row in DTYPES}
by_dlpack: dict[tuple[int, int], DType] = {row.dlpack: row for row in DTYPES}

_LOGIC = frozenset({Kind.BOOL, Kind.INTEGER})
_ORDERED = frozenset({Kind.BOOL, Kind.INTEGER, Kind.FLOAT, Kind.NARROW_FLOAT})
_DIVISIBLE = frozenset({Kind.FLOAT, Kind.NARROW_FLOAT, Kind.COMPLEX})


#: Factor of PREMUL_SUM.
Factor = int | float | complex


@dataclass(eq=False, repr=False, slots=True)
class ReduceOp:
    """A reduce operation: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM(factor).

    ``ReduceOp.PREMUL_SUM(factor)`` multiplies the input of each rank by its factor, then sums.
    """

    #: Name in torch.
    name: str
    #: Supported kinds of dtypes.
    kinds: frozenset[Kind]
    #: NumPy function that combines two elements; the one for bool (True + True is True).
    ufunc: np.ufunc
    logical: np.ufunc | None
    #: MPI operation (an attribute of mpi4py.MPI); the one for bool, on bytes that are 0 or 1.
    mpi: str
    mpi_logical: str | None
    #: Index in the table, the same on all ranks and the same as in torch.
    code: int
    #: Factor of PREMUL_SUM, a plain number; None for other operations.
    factor: Factor | None = None
    #: Row of the table (for PREMUL_SUM(factor): PREMUL_SUM).
    op: ReduceOp = None  # type: ignore[assignment]

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]
    RedOpType: ClassVar[type[ReduceOp]]

    def __post_init__(self) -> None:
        self.op = self.op or self

    def __call__(self, factor: Any) -> ReduceOp:
        """Make PREMUL_SUM with a factor.

        factor: a number, or an array of one element; an integer for integer dtypes. Ranks may have
            different factors.

        Returns the ReduceOp. Raises ArgumentTypeError (a TypeError) for any other operation, and if
        the factor is not a number.
        """
        if self is not ReduceOp.PREMUL_SUM:
            raise ArgumentTypeError(f"ReduceOp.{self.name} takes no factor; only PREMUL_SUM does")
        try:
            number = factor.item() if hasattr(factor, "item") else factor
        except (ValueError, RuntimeError):  # more than one element
            number = None
        if not isinstance(number, (int, float, complex)):
            raise ArgumentTypeError(
                f"ReduceOp.PREMUL_SUM: expected a number or an array of one, got {factor!r}"
            )
        return replace(self, factor=number)

    def __repr__(self) -> str:
        factor = "" if self.factor is None else f"({self.factor!r})"
        return f"ReduceOp.{self.name}{factor}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce_op, (self.name, self.factor)


def _reduce_op(name: str, factor: Factor | None) -> ReduceOp:
    row: ReduceOp = getattr(ReduceOp, name)
    return row if factor is None else row(factor)


OPERATIONS: tuple[ReduceOp, ...] = (
    ReduceOp("SUM", frozenset(Kind), np.add, np.logical_or, "SUM", "BOR", 0),
    ReduceOp("AVG", _DIVISIBLE, np.add, None, "SUM", None, 1),
    ReduceOp("PRODUCT", frozenset(Kind), np.multiply, np.logical_and, "PROD", "BAND", 2),
    ReduceOp("MIN", _ORDERED, np.minimum, np.logical_and, "MIN", "BAND", 3),
    ReduceOp("MAX", _ORDERED, np.maximum, np.logical_or, "MAX", "BOR", 4),
    ReduceOp("BAND", _LOGIC, np.bitwise_and, np.logical_and, "BAND", "BAND", 5),
    ReduceOp("BOR", _LOGIC, np.bitwise_or, np.logical_or, "BOR", "BOR", 6),
    ReduceOp("BXOR", _LOGIC, np.bitwise_xor, np.logical_xor, "BXOR", "BXOR", 7),
    ReduceOp("PREMUL_SUM", frozenset(Kind) - {Kind.BOOL}, np.add, None, "SUM", None, 8),
)
for _row_of_table in OPERATIONS:
    setattr(ReduceOp, _row_of_table.name, _row_of_table)
ReduceOp.RedOpType = ReduceOp
