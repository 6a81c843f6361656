"""Inputs of calls, which every rank can compute for all ranks, and expected results."""

from __future__ import annotations

import functools
import operator
import zlib

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpicoll.dtypes import ReduceOp, by_name

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]


def legal(name: str, dtype: torch.dtype) -> bool:
    """Return True if the table defines the operation for the dtype and torch allows it."""
    if dtype.is_complex and not distributed_c10d.supports_complex(getattr(dist.ReduceOp, name)):
        return False
    row = by_name[str(dtype).removeprefix("torch.")]
    return row.kind in getattr(ReduceOp, name).kinds


def generator(*key: object) -> torch.Generator:
    """A random generator seeded by the key."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def whole(dtype: torch.dtype, rank: int, *shape: int, key: object = 0) -> torch.Tensor:
    """Integers small enough that sums and products of four ranks are exact in any dtype."""
    made = torch.randint(-3, 4, shape, generator=generator(rank, shape, key), device="cpu")
    made = made.to(torch.get_default_device())
    if dtype is torch.bool:
        return made > 0
    if dtype is torch.uint8:
        made = made.abs()
    if dtype.is_complex:
        return torch.complex(made.float(), made.flip(0).float()).to(dtype)
    return made.to(dtype)


def normal(rank: int, *shape: int, key: object = 0, dtype=torch.float32) -> torch.Tensor:
    """Normally distributed values."""
    made = torch.randn(shape, generator=generator(rank, shape, key), device="cpu")
    return made.to(torch.get_default_device(), dtype)


def factor(dtype: torch.dtype) -> float:
    """The PREMUL_SUM factor: an integer for integer dtypes."""
    return 3 if dtype in INTEGERS else 0.5


def reduce_op(name: str, dtype: torch.dtype):
    op = getattr(dist.ReduceOp, name)
    if name != "PREMUL_SUM":
        return op
    by = factor(dtype)
    return premultiplied(
        torch.tensor(by) if dtype in INTEGERS else by
    )  # torch converts an int to a float


def premultiplied(by: float | torch.Tensor):
    """PREMUL_SUM with a factor. Before torch 2.13 it has another name."""
    op = dist.ReduceOp.PREMUL_SUM
    return op(by) if callable(op) else torch._C._distributed_c10d._make_nccl_premul_sum(by)


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
    """The expected result of a reduction; bool values are True or False, not numbers."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if name == "AVG":
        return (sum(part.to(wide) for part in parts) / len(parts)).to(dtype)
    if name == "PREMUL_SUM":
        return sum(factor(dtype) * part.to(wide) for part in parts).to(dtype)
    if dtype is torch.bool and name in ("SUM", "PRODUCT"):
        name = {"SUM": "BOR", "PRODUCT": "BAND"}[name]
    return functools.reduce(FOLDS[name], parts)


def collectives(n: int, me: int) -> dict[str, tuple[tuple, list[torch.Tensor]]]:
    """Positional arguments of each collective, with root 0, and this rank's outputs."""
    one, part, whole_in, whole_out = (torch.zeros(count) for count in (4, 4, 4 * n, 4 * n))
    many_in, many_out = ([torch.zeros(4) for _ in range(n)] for _ in range(2))
    at_root = me == 0
    return {
        "all_reduce": ((one,), [one]),
        "broadcast": ((one, 0), [one]),
        "reduce": ((one, 0), [one]),
        "all_gather": ((many_out, one), many_out),
        "all_gather_single": ((whole_out, one), [whole_out]),
        "gather": ((one, many_out if at_root else None), many_out if at_root else []),
        "scatter": ((part, many_in if at_root else None), [part]),
        "reduce_scatter": ((part, many_in), [part]),
        "reduce_scatter_single": ((part, whole_in), [part]),
        "all_to_all": ((many_out, many_in), many_out),
        "all_to_all_single": ((whole_out, whole_in), [whole_out]),
        "barrier": ((), []),
    }


def said(found: torch.Tensor):
    """Return a message function that names the compared tensor."""
    return lambda text: f"{text}\n\n{found.dtype}, {tuple(found.shape)}"


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bit by bit."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=said(found))


def check_usable(group=None) -> None:
    """Check that the ranks of a group make the same calls and get the right sum."""
    one = torch.ones(3)
    dist.all_reduce(one, group=group)
    equal(one, torch.full((3,), float(dist.get_world_size(group))))


def near(found: torch.Tensor, wanted: torch.Tensor, **tolerance: float) -> None:
    """Compare within the tolerance of the dtype."""
    torch.testing.assert_close(found, wanted, **tolerance, msg=said(found))
