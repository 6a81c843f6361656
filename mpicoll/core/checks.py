"""The arguments of a collective call as views, checked before anything is sent.

There is one function for the layouts of the table of primitives that are checked alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpicoll.arrays import adapters
from mpicoll.arrays.protocols import Arrays
from mpicoll.arrays.views import View, ViewList, find_shared
from mpicoll.core.indices import check_indices, describe_value
from mpicoll.core.plan import Blocks, Extent
from mpicoll.dtypes import OPERATIONS, DType, Kind, ReduceOp
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.output import format_count
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "Splits",
    "Views",
    "build_views",
    "check_operation",
    "find_operation",
    "reads",
    "writes",
]  # fmt: skip

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

    Raises ArgumentTypeError (TypeError) for anything but an array or a list, ArgumentError
    (ValueError) for sizes that do not fit and UnsupportedError (ValueError) for what is refused;
    see mpicoll.errors.
    """
    return _LAYOUTS[primitive.layout](primitive, group, output, input, root, splits)


def writes(primitive: Primitive, group: ProcessGroup, root: int) -> bool:
    """Return whether this rank's output is written; a primitive in place may only read it."""
    me = group.rank()
    if primitive.root and primitive.layout is Layout.IN_PLACE:
        return (root == me) is (primitive.root == "dst")
    return not primitive.reduces or bool(primitive.combined(me, group.size()))


def reads(primitive: Primitive, group: ProcessGroup, root: int) -> bool:
    """Return whether this rank's array of a primitive in place is read."""
    return primitive.root != "src" or root == group.rank()


#: The greatest float64.
_LARGEST = int(sys.float_info.max)


def check_operation(primitive: Primitive, op: object, dtype: DType) -> ReduceOp:
    """Return the reduce operation meant by ``op``, see ``row_of``, if it fits a dtype.

    Raises UnsupportedError if it has no meaning for the dtype or its factor does not fit it,
    ArgumentError for a PREMUL_SUM without a factor.
    """
    where = f"{primitive.name}: op"
    found = find_operation(op, where)
    if dtype.kind not in found.kinds:
        legal = ", ".join(sorted(kind.value for kind in found.kinds))
        raise UnsupportedError(
            f"{where}: {found.name} has no meaning for {dtype}; it is defined for dtypes of the "
            f"kinds {legal}"
        )
    if found is ReduceOp.PREMUL_SUM:
        raise ArgumentError(f"{where}: expected ReduceOp.PREMUL_SUM(factor), got no factor")
    factor = found.factor
    if dtype.kind is Kind.INTEGER and isinstance(factor, (float, complex)):
        raise UnsupportedError(f"{where}: PREMUL_SUM of {dtype} needs an integer, got {factor!r}")
    if isinstance(factor, int) and dtype.kind is not Kind.INTEGER and abs(factor) > _LARGEST:
        raise ArgumentError(f"{where}: PREMUL_SUM: {factor!r} is too large for {dtype}")
    if dtype.kind is not Kind.COMPLEX and isinstance(factor, complex):
        raise UnsupportedError(f"{where}: PREMUL_SUM of {dtype} needs a real, got {factor!r}")
    return found


def find_operation(op: object, where: str) -> ReduceOp:
    """Return the ReduceOp for ``op``: mpicoll's, torch.distributed's, or an operation of mpi4py.

    where: operation and argument, for the message.

    Raises ArgumentTypeError for anything else, UnsupportedError for an operation of MPI without a
    counterpart.
    """
    found = op if isinstance(op, ReduceOp) else _of_torch(op) or _of_mpi(op, where)
    if found is None:
        raise ArgumentTypeError(
            f"{where}: expected a mpicoll.ReduceOp such as {_similar(op)!r}, got "
            f"{describe_value(op)}"
        )
    return found


def _similar(op: object) -> ReduceOp:
    """Return the operation that a wrong argument may mean, such as "sum"; else SUM."""
    name = op.upper() if isinstance(op, str) and op else "SUM"
    return next((row for row in OPERATIONS if row.name.startswith(name)), ReduceOp.SUM)


def _of_mpi(op: object, where: str) -> ReduceOp | None:
    """Return the table's first row for an operation of MPI; None for anything else."""
    mpi = sys.modules.get("mpi4py.MPI")  # an operation of it is there only if it is loaded
    if mpi is None or not isinstance(op, mpi.Op):
        return None
    for row in OPERATIONS:
        if op == getattr(mpi, row.mpi):
            return row
    named = (
        f"MPI.{name}" for name, one in vars(mpi).items() if isinstance(one, mpi.Op) and one == op
    )
    raise UnsupportedError(
        f"{where}: {next(named, 'an operation made by MPI.Op.Create')} has no counterpart; "
        "expected a mpicoll.ReduceOp, or one of "
        f"{', '.join(dict.fromkeys(f'MPI.{row.mpi}' for row in OPERATIONS))}"
    )


def _of_torch(op: object) -> ReduceOp | None:
    """Return the row of a ReduceOp or RedOpType of torch.distributed."""
    if type(op).__module__.partition(".")[0] != "torch":
        return None
    name = getattr(getattr(op, "op", op), "name", "")
    row: ReduceOp | None = getattr(ReduceOp, name, None)
    return row(op.factor) if row is ReduceOp.PREMUL_SUM and hasattr(op, "factor") else row


#: Ends the message where arguments would fit the other way round.
_ORDER = " (the output comes first)"


def _same_kind(primitive: Primitive, send: View, recv: View) -> None:
    if send.dtype is not recv.dtype:
        raise UnsupportedError(
            f"{primitive.name}: invalid tensor type: different dtypes: {primitive.output} is "
            f"{recv.dtype}, {primitive.input} is {send.dtype}"
        )
    adapters.check_same_device(primitive.name, primitive.input, send, primitive.output, recv)


def _same_shapes(primitive: Primitive, name: str, parts: ViewList, one: View) -> None:
    for i, part in enumerate(parts.parts):
        if part.shape != one.shape:
            raise ArgumentError(
                f"{primitive.name}: {name}: invalid tensor size: [{i}] has shape {part.shape}, "
                f"this rank's array {one.shape}: different shapes across a list; all must have the "
                "same"
            )


def _check_apart(where: str, outputs: ViewList) -> None:
    if shared := find_shared(outputs.parts):
        raise ArgumentError(
            f"{where}: [{shared[0]}] and [{shared[1]}] share memory, and both are written to; pass "
            "arrays that do not overlap"
        )


def _multiple(primitive: Primitive, whole: View, names: tuple[str, str], one: View, n: int) -> None:
    if whole.count != n * one.count:
        raise ArgumentError(
            f"{primitive.name}: {names[0]} has {format_count(whole.count, 'element')}, {names[1]} "
            f"{one.count}; in a group of {format_count(n, 'rank')} expected {n} x {one.count} = "
            f"{n * one.count}{_ORDER * (one.count == n * whole.count)}"
        )


def _in_place(
    primitive: Primitive,
    group: ProcessGroup,
    output: Arrays,
    input: Arrays,
    root: int,
    splits: Splits | None,
) -> Views:
    recv = adapters.build_view(output, writes(primitive, group, root), primitive.at_output)
    return None, recv, recv.count


def _per_rank(
    primitive: Primitive,
    group: ProcessGroup,
    output: Arrays,
    input: Arrays,
    root: int,
    splits: Splits | None,
) -> Views:
    """Check this rank's block, and the blocks of all ranks where this rank has them."""
    n = group.size()
    gathers = primitive.layout is Layout.GATHERED
    where, whole, side, verb = (
        (primitive.at_output, output, "output", "receives")
        if gathers
        else (primitive.at_input, input, "input", "sends")
    )
    names = primitive.output, primitive.input
    of_whole, of_own = names if gathers else names[::-1]
    block, at_block = (input, primitive.at_input) if gathers else (output, primitive.at_output)
    if isinstance(block, (list, tuple)) and not primitive.root:
        raise ArgumentTypeError(
            f"{at_block}: expected an array, got {type(block).__name__}"
            f"{_ORDER * (not isinstance(whole, (list, tuple)))}"
        )
    own = adapters.build_view(block, not gathers, at_block)

    def in_order(blocks: T) -> tuple[View | T, View | T]:
        return (own, blocks) if gathers else (blocks, own)

    if primitive.root and root != group.rank():
        if whole is not None and not (isinstance(whole, (list, tuple)) and not whole):
            raise ArgumentError(
                f"{where}: requires empty {side} on non-root ranks: to be given only on the rank "
                f"that {verb}, {root}"
            )
        return *in_order(None), own.count
    if not primitive.listed:
        one = adapters.build_view(whole, gathers, where)
        _same_kind(primitive, *in_order(one))
        _multiple(primitive, one, (of_whole, of_own), own, n)
        return *in_order(one), own.count
    if whole is None:
        raise ArgumentError(f"{where}: must be given on the rank that {verb}, {root}")
    listed = adapters.build_view_list(whole, gathers, where, n)
    _same_kind(primitive, *in_order(listed))
    counts: Sequence[int] = ()
    if primitive.root:
        _same_shapes(primitive, of_whole, listed, own)
    else:
        counts = _own_fits(primitive, group, listed, where, own, of_own)
    if gathers:
        _check_apart(where, listed)
    if not counts:
        return *in_order(listed), own.count
    equal = [own.count] * n
    return *in_order(listed), Blocks(equal, counts) if gathers else Blocks(counts, equal)


def _own_fits(
    primitive: Primitive, group: ProcessGroup, listed: ViewList, where: str, own: View, name: str
) -> Sequence[int]:
    """Return the counts of a list's blocks, this rank's that of ``own``; () if all are alike."""
    counts, me = listed.counts, group.rank()
    if counts[me] != own.count:
        raise ArgumentError(
            f"{where}: invalid tensor size: [{me}] has shape {listed.parts[me].shape} and is the "
            f"block of this rank's {name}, which has shape {own.shape}"
        )
    return counts if len(set(counts)) > 1 else ()


def _alike(
    primitive: Primitive,
    group: ProcessGroup,
    output: Arrays,
    input: Arrays,
    root: int,
    splits: Splits | None,
) -> Views:
    recv = adapters.build_view(output, writes(primitive, group, root), primitive.at_output)
    send = adapters.build_view(input, False, primitive.at_input)
    _same_kind(primitive, send, recv)
    if recv.count != send.count:
        raise ArgumentError(
            f"{primitive.name}: {primitive.output} has {format_count(recv.count, 'element')}, "
            f"{primitive.input} {send.count}; expected the same number"
        )
    return send, recv, send.count


def _exchanged(
    primitive: Primitive,
    group: ProcessGroup,
    output: Arrays,
    input: Arrays,
    root: int,
    splits: Splits | None,
) -> Views:
    n = group.size()
    of_output, of_input = primitive.at_output, primitive.at_input
    if primitive.listed:
        to = adapters.build_view_list(output, True, of_output, n)
        out = adapters.build_view_list(input, False, of_input, n)
        _same_kind(primitive, out, to)
        _check_apart(of_output, to)
        return out, to, _agreeing(primitive, group, Blocks(out.counts, to.counts))
    recv = adapters.build_view(output, True, of_output)
    send = adapters.build_view(input, False, of_input)
    _same_kind(primitive, send, recv)
    of_both = splits or (None, None)
    names = f"{of_output}: output_split_sizes", f"{of_input}: input_split_sizes"
    of_recv, of_send = (
        check_indices(() if sizes is None else sizes, name)
        for sizes, name in zip(of_both, names, strict=True)
    )
    fits_swapped = (sum(of_recv), sum(of_send)) == (_rows(send), _rows(recv))
    receives = _blocks(recv, of_recv, n, of_output, "output_split_sizes", fits_swapped)
    sends = _blocks(send, of_send, n, of_input, "input_split_sizes", fits_swapped)
    return send, recv, _agreeing(primitive, group, Blocks(sends, receives))


def _agreeing(primitive: Primitive, group: ProcessGroup, blocks: Blocks) -> Blocks:
    me = group.rank()
    if blocks.sends[me] != blocks.receives[me]:
        raise ArgumentError(
            f"{primitive.name}: rank {me} sends itself {format_count(blocks.sends[me], 'element')} "
            f"and expects {blocks.receives[me]}"
        )
    return blocks


def _rows(view: View) -> int:
    return view.shape[0] if view.shape else 1


def _blocks(
    view: View, sizes: list[int], n: int, where: str, name: str, fits_swapped: bool
) -> list[int]:
    """Return the elements for each rank, from split sizes that count rows of dimension 0.

    fits_swapped: the split sizes would fit if the caller exchanged output and input.
    """
    rows = _rows(view)
    if not sizes:
        if rows % n:
            raise ArgumentError(
                f"{where}: dimension 0 has {format_count(rows, 'row')}, which {n} ranks cannot "
                f"share evenly; give {name}"
            )
        return [view.count // n] * n
    if len(sizes) != n:
        raise ArgumentError(
            f"{where}: {name}: expected {format_count(n, 'size')}, one a rank, got {len(sizes)}"
        )
    if min(sizes) < 0 or sum(sizes) != rows:
        raise ArgumentError(
            f"{where}: {name}: split sizes {sizes} do not add up to the "
            f"{format_count(rows, 'row')} of dimension 0{_ORDER * fits_swapped}"
        )
    row = view.count // rows if rows else 0
    return [size * row for size in sizes]


def _empty(
    primitive: Primitive,
    group: ProcessGroup,
    output: Arrays,
    input: Arrays,
    root: int,
    splits: Splits | None,
) -> Views:
    return None, None, 0


_LAYOUTS: dict[Layout, Callable[..., Views]] = {
    Layout.IN_PLACE: _in_place,
    Layout.GATHERED: _per_rank,
    Layout.SCATTERED: _per_rank,
    Layout.EXCHANGED: _exchanged,
    Layout.ALIKE: _alike,
    Layout.EMPTY: _empty,
}
