"""What each rank brings to a call, known to all ranks, and what it comes to."""

from __future__ import annotations

import functools
import operator
import zlib

import torch
import torch.distributed as dist

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]

NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]

#: What PREMUL_SUM multiplies by.
FACTOR = 0.5


def legal(name: str, dtype: torch.dtype) -> bool:
    """Tell whether the operation means something for the dtype."""
    if name in ("BAND", "BOR", "BXOR"):
        return dtype in INTEGERS or dtype is torch.bool
    if name in ("AVG", "PREMUL_SUM"):
        return dtype in FLOATS or (name == "AVG" and dtype.is_complex)
    return not dtype.is_complex or name == "SUM"


def generator(*key: object) -> torch.Generator:
    """Random numbers that follow from the key alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def whole(dtype: torch.dtype, rank: int, *shape: int, key: object = 0) -> torch.Tensor:
    """Whole numbers so small that sums and products of four ranks are exact in any dtype."""
    made = torch.randint(-3, 4, shape, generator=generator(rank, shape, key))
    if dtype is torch.bool:
        return made > 0
    if dtype is torch.uint8:
        made = made.abs()
    if dtype.is_complex:
        return torch.complex(made.float(), made.flip(0).float()).to(dtype)
    return made.to(dtype)


def normal(rank: int, *shape: int, key: object = 0, dtype=torch.float32) -> torch.Tensor:
    """Real numbers."""
    return torch.randn(shape, generator=generator(rank, shape, key)).to(dtype)


def reduce_op(name: str):
    op = getattr(dist.ReduceOp, name)
    return op(FACTOR) if name == "PREMUL_SUM" else op


FOLDS = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def combined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """What the operation makes of the ranks' parts; bool counts as truth."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if name == "AVG":
        return (sum(part.to(wide) for part in parts) / len(parts)).to(dtype)
    if name == "PREMUL_SUM":
        return sum(FACTOR * part.to(wide) for part in parts).to(dtype)
    if dtype is torch.bool and name in ("SUM", "PRODUCT"):
        name = {"SUM": "BOR", "PRODUCT": "BAND"}[name]
    return functools.reduce(FOLDS[name], parts)


def said(found: torch.Tensor):
    """Names what was compared, where a test compares many."""
    return lambda text: f"{text}\n\n{found.dtype}, {tuple(found.shape)}"


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every bit."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=said(found))


def near(found: torch.Tensor, wanted: torch.Tensor, **tolerance: float) -> None:
    """To the rounding of the dtype."""
    torch.testing.assert_close(found, wanted, **tolerance, msg=said(found))
