"""Arguments of collective calls as views, checked before anything is sent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

from mpicoll.arrays import adapters
from mpicoll.arrays.protocols import Arrays
from mpicoll.arrays.views import View, ViewList, find_conflict
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.indices import check_indices, describe_value
from mpicoll.core.plan import Blocks, Extent
from mpicoll.dtypes import OPERATIONS, DType, Kind, ReduceOp
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.output import format_count
from mpicoll.primitives import Layout, Primitive

T = TypeVar("T")

#: The views of a call's input and output, and its extent.
Views = tuple[View | None, View | None, Extent]

#: Split sizes of all_to_all_single: of the output and of the input, in rows of dimension 0.
Splits = tuple[Sequence[int] | None, Sequence[int] | None]


def build_views(
    primitive: Primitive,
    group: ProcessGroup,
    output: Arrays,
    input: Arrays,
    root: int,
    splits: Splits | None,
) -> Views:
    """Return the views of the caller's arrays, checked against each other, and the call's extent.

    Raises ArgumentTypeError (TypeError) if an argument is not an array or a list, ArgumentError
    (ValueError) for a wrong size, and UnsupportedError (ValueError) for a dtype, layout or device
    that is not supported.
    """
    layout = primitive.layout
    if layout is Layout.EMPTY:
        return None, None, 0
    if layout in (Layout.GATHERED, Layout.SCATTERED):
        return _blocks_of_ranks(primitive, group, output, input, root)
    if layout is Layout.EXCHANGED:
        return _exchanged(primitive, group, output, input, splits or (None, None))
    recv = adapters.build_view(output, writes(primitive, group, root), primitive.at_output)
    if layout is Layout.IN_PLACE:
        return None, recv, recv.count
    send = adapters.build_view(input, False, primitive.at_input)
    _check_same_dtype(primitive, send, recv)
    if recv.count != send.count:
        raise ArgumentError(
            f"{primitive.name}: {primitive.output} has {format_count(recv.count, 'element')}, "
            f"{primitive.input} {send.count}; expected the same number"
        )
    return send, recv, send.count


def writes(primitive: Primitive, group: ProcessGroup, root: int) -> bool:
    """Return whether the call writes this rank's output: for example not on a broadcast's root."""
    me = group.rank()
    if primitive.root and primitive.layout is Layout.IN_PLACE:
        return (root == me) is (primitive.root == "dst")
    return not primitive.reduces or bool(primitive.combined(me, group.size()))


def reads(primitive: Primitive, group: ProcessGroup, root: int) -> bool:
    """Return whether an in-place primitive reads the array of this rank."""
    return primitive.root != "src" or root == group.rank()


_MAX_FLOAT64 = int(sys.float_info.max)


def check_operation(primitive: Primitive, op: object, dtype: DType) -> ReduceOp:
    """Return the reduce operation for ``op`` (see ``find_operation``), checked against a dtype.

    Raises UnsupportedError if the operation or its factor does not support the dtype, and
    ArgumentError for a PREMUL_SUM without a factor or with one too large for the dtype.
    """
    where = f"{primitive.name}: op"
    found = find_operation(op, where)
    if dtype.kind not in found.kinds:
        legal = ", ".join(sorted(kind.value for kind in found.kinds))
        raise UnsupportedError(
            f"{where}: {found.name} is not supported for {dtype}, only for dtypes of kinds {legal}"
        )
    if found is ReduceOp.PREMUL_SUM:
        raise ArgumentError(f"{where}: expected ReduceOp.PREMUL_SUM(factor), got no factor")
    factor = found.factor
    if dtype.kind is Kind.INTEGER and isinstance(factor, (float, complex)):
        raise UnsupportedError(f"{where}: PREMUL_SUM of {dtype} needs an integer, got {factor!r}")
    if isinstance(factor, int) and dtype.kind is not Kind.INTEGER and abs(factor) > _MAX_FLOAT64:
        raise ArgumentError(f"{where}: PREMUL_SUM: {factor!r} is too large for {dtype}")
    if dtype.kind is not Kind.COMPLEX and isinstance(factor, complex):
        raise UnsupportedError(f"{where}: PREMUL_SUM of {dtype} needs a real, got {factor!r}")
    return found


def find_operation(op: object, where: str) -> ReduceOp:
    """Return the ReduceOp for ``op``: a ReduceOp of mpicoll or torch.distributed, or an mpi4py Op.

    where: operation and argument, for error messages.

    Raises ArgumentTypeError for anything else.
    """
    found = op if isinstance(op, ReduceOp) else _of_torch(op) or _of_mpi(op)
    if found is None:
        raise ArgumentTypeError(
            f"{where}: expected a mpicoll.ReduceOp such as ReduceOp.SUM, or an operation of mpi4py "
            f"that has a counterpart, such as MPI.SUM, got {describe_value(op)}"
        )
    return found


def _of_mpi(op: object) -> ReduceOp | None:
    """Return the first ReduceOp that corresponds to an Op of mpi4py, or None."""
    mpi = sys.modules.get("mpi4py.MPI")  # if it is not loaded, ``op`` is not an MPI operation
    if mpi is None or not isinstance(op, mpi.Op):
        return None
    return next((row for row in OPERATIONS if op == getattr(mpi, row.mpi)), None)


def _of_torch(op: object) -> ReduceOp | None:
    """Return mpicoll's ReduceOp for a ReduceOp or RedOpType of torch.distributed, or None."""
    if type(op).__module__.partition(".")[0] != "torch":
        return None
    name = getattr(getattr(op, "op", op), "name", "")
    if not isinstance(name, str):  # a torch tensor has a name, which is None
        return None
    row: ReduceOp | None = getattr(ReduceOp, name, None)
    return row(op.factor) if row is ReduceOp.PREMUL_SUM and hasattr(op, "factor") else row


#: Hint of messages if the arguments would fit when exchanged.
_ORDER = " (the output comes first)"


def _check_same_dtype(primitive: Primitive, send: View, recv: View) -> None:
    if send.dtype is not recv.dtype:
        raise UnsupportedError(
            f"{primitive.name}: invalid tensor type: different dtypes: {primitive.output} is "
            f"{recv.dtype}, {primitive.input} is {send.dtype}"
        )
    adapters.check_same_device(primitive.name, primitive.input, send, primitive.output, recv)


def _check_disjoint(where: str, outputs: ViewList) -> None:
    if shared := find_conflict(list(enumerate(outputs.parts)), ()):
        raise ArgumentError(
            f"{where}: outputs [{shared[0]}] and [{shared[1]}] share memory; pass arrays that do "
            "not overlap"
        )


def _blocks_of_ranks(
    primitive: Primitive, group: ProcessGroup, output: Arrays, input: Arrays, root: int
) -> Views:
    """Build the views if one side is this rank's block, and the other the blocks of all ranks."""
    n, me = group.size(), group.rank()
    gathers = primitive.layout is Layout.GATHERED
    of_output = output, primitive.at_output, primitive.output
    of_input = input, primitive.at_input, primitive.input
    (whole, where, of_whole), (block, at_block, of_own) = (
        (of_output, of_input) if gathers else (of_input, of_output)
    )
    if isinstance(block, (list, tuple)) and not primitive.root:
        raise ArgumentTypeError(
            f"{at_block}: expected an array, got {type(block).__name__}"
            f"{_ORDER * (not isinstance(whole, (list, tuple)))}"
        )
    own = adapters.build_view(block, not gathers, at_block)

    def in_order(blocks: T) -> tuple[View | T, View | T]:
        return (own, blocks) if gathers else (blocks, own)

    if primitive.root and root != me:
        if whole is not None and not (isinstance(whole, (list, tuple)) and not whole):
            raise ArgumentError(
                f"{where}: requires empty {'output' if gathers else 'input'} on non-root ranks: "
                f"expected None, because the root is rank {root}"
            )
        return *in_order(None), own.count
    if not primitive.listed:
        one = adapters.build_view(whole, gathers, where)
        _check_same_dtype(primitive, *in_order(one))
        if one.count != n * own.count:
            raise ArgumentError(
                f"{primitive.name}: {of_whole} has {format_count(one.count, 'element')}, {of_own} "
                f"{own.count}; in a group of {format_count(n, 'rank')} expected {n} x {own.count} "
                f"= {n * own.count}{_ORDER * (own.count == n * one.count)}"
            )
        return *in_order(one), own.count
    if whole is None:
        raise ArgumentError(f"{where}: must be given on the root, rank {root}")
    listed = adapters.build_view_list(whole, gathers, where, n)
    _check_same_dtype(primitive, *in_order(listed))
    counts = listed.counts
    if primitive.root:
        for i, part in enumerate(listed.parts):
            if part.shape != own.shape:
                raise ArgumentError(
                    f"{primitive.name}: {of_whole}: invalid tensor size: [{i}] has shape "
                    f"{part.shape}, this rank's array {own.shape}; different shapes are not "
                    "supported"
                )
    elif counts[me] != own.count:
        raise ArgumentError(
            f"{where}: invalid tensor size: [{me}] has shape {listed.parts[me].shape}, expected "
            f"{own.shape}, the shape of this rank's {of_own}"
        )
    if gathers:
        _check_disjoint(where, listed)
    if primitive.root or len(set(counts)) == 1:
        return *in_order(listed), own.count
    equal = [own.count] * n
    return *in_order(listed), Blocks(equal, counts) if gathers else Blocks(counts, equal)


def _exchanged(
    primitive: Primitive, group: ProcessGroup, output: Arrays, input: Arrays, splits: Splits
) -> Views:
    """Build the views if this rank sends a block to each rank and receives one from each."""
    n, me = group.size(), group.rank()
    of_output, of_input = primitive.at_output, primitive.at_input
    send: View
    recv: View
    if primitive.listed:
        recv = listed = adapters.build_view_list(output, True, of_output, n)
        send = sent = adapters.build_view_list(input, False, of_input, n)
        _check_same_dtype(primitive, send, recv)
        _check_disjoint(of_output, listed)
        blocks = Blocks(sent.counts, listed.counts)
    else:
        recv = adapters.build_view(output, True, of_output)
        send = adapters.build_view(input, False, of_input)
        _check_same_dtype(primitive, send, recv)
        names = f"{of_output}: output_split_sizes", f"{of_input}: input_split_sizes"
        of_recv, of_send = (
            check_indices(() if sizes is None else sizes, name)
            for sizes, name in zip(splits, names, strict=True)
        )
        receives = _blocks(recv, of_recv, n, names[0])
        blocks = Blocks(_blocks(send, of_send, n, names[1]), receives)
    if blocks.sends[me] != blocks.receives[me]:
        raise ArgumentError(
            f"{primitive.name}: rank {me} sends {format_count(blocks.sends[me], 'element')} to "
            f"itself, but receives {blocks.receives[me]} from itself; pass equal sizes for both"
        )
    return send, recv, blocks


def _blocks(view: View, sizes: list[int], n: int, name: str) -> list[int]:
    """Return the number of elements for each rank, from split sizes in rows of dimension 0.

    name: operation, array and argument.
    """
    rows = view.shape[0] if view.shape else 1
    if not sizes:
        if rows % n:
            where, _, argument = name.rpartition(": ")
            raise ArgumentError(
                f"{where}: dimension 0 has {format_count(rows, 'row')}, which is not divisible by "
                f"{n} ranks; pass {argument}"
            )
        return [view.count // n] * n
    if len(sizes) != n:
        raise ArgumentError(
            f"{name}: expected {format_count(n, 'size')}, one for each rank, got {len(sizes)}"
        )
    if min(sizes) < 0 or sum(sizes) != rows:
        raise ArgumentError(
            f"{name}: split sizes {sizes} do not add up to the "
            f"{format_count(rows, 'row')} of dimension 0"
        )
    row = view.count // rows if rows else 0
    return [size * row for size in sizes]
