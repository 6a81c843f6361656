"""From the arguments of a collective call to its views, checked before anything is sent.

There is one function for each layout of the table of primitives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll.arrays import adapters
from mpicoll.arrays.views import View, ViewList
from mpicoll.core.signature import kind_of
from mpicoll.dtypes import OPERATIONS, DType, Kind, ReduceOp
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "Blocks",
    "Direct",
    "Plan",
    "Prompt",
    "Route",
    "Task",
    "Way",
    "counts",
    "operation",
    "reads",
    "row_of",
    "views",
    "writes",
]


#: Bytes of the arrays of a list that are packed at a time, all of them together.
LISTED = 4 * 1024 * 1024


class Plan:
    """What all calls of one kind in one group share.

    primitive: the row of the table, of that name.
    group:     the group that calls.
    op:        the reduce operation; None where nothing is combined.
    dtype:     the dtype of the elements; None where there are none.
    on_device: they are on a CUDA device, on every rank on one of its own.
    route, direct, prompt: how it is carried out; see Way.
    piece:     elements of a block that go at a time where an array is a list; None for all.
    kind:      the signature of such calls, without the root; see mpicoll.core.signature.
    even:      the count of a block is the same on all ranks, and part of the signature.
    """

    __slots__ = (
        "direct", "dtype", "even", "group", "kind", "name", "on_device", "op", "piece",
        "primitive", "prompt", "route",
    )  # fmt: skip

    def __init__(
        self,
        primitive: Primitive,
        group: ProcessGroup,
        op: ReduceOp | None,
        dtype: DType | None,
        on_device: bool,
        way: Way,
    ) -> None:
        self.primitive = primitive
        self.name = primitive.name
        self.group = group
        self.op = op
        self.dtype = dtype
        self.on_device = on_device
        self.route, self.direct, self.prompt = way
        self.kind = kind_of(primitive, dtype, op, 0, on_device)
        self.even = primitive.even
        self.piece: int | None = None
        if primitive.listed and primitive.even and not on_device:
            assert dtype is not None
            self.piece = max(1, LISTED // (group.size() * dtype.itemsize))


class Task(NamedTuple):
    """What is carried out among a group's collectives and is no primitive, as a Plan has it."""

    group: ProcessGroup
    name: str
    kind: int
    even: bool = False


class Blocks(NamedTuple):
    """Elements for and from each rank, where they may differ from rank to rank."""

    sends: Sequence[int]
    receives: Sequence[int]


#: The input, the output, the root's rank in the group, and the blocks: what a route gets to carry
#: out. The input is None where it is the output, or where there is none; the output is None on
#: ranks that receive nothing; blocks are None where all are alike.
Route = Callable[["View | None", "View | None", int, "Blocks | None"], None]

#: The same for contiguous arrays, where all ranks' blocks are alike: the buffers of the input and
#: the output, as mpi4py takes them, the elements of a block, and the root.
Direct = Callable[[Any, Any, int, int], None]

#: Whether an asynchronous call is best carried out at once: asked with the root, or -1 for a list
#: of calls, and a number that stands for what all ranks must have alike of the sizes.
Prompt = Callable[[int, int], bool]


class Way(NamedTuple):
    """What carries out calls of one kind.

    route:  carries a call out.
    direct: the same for the calls of which no more is to be known; None where there are none.
    prompt: asked of an asynchronous call that nothing is pending before whether to carry it out at
            once instead of on the group's thread; None for never.
    """

    route: Route
    direct: Direct | None = None
    prompt: Prompt | None = None


#: The views of a call, and its blocks.
Views = tuple[View | None, View | None, Blocks | None]

#: Split sizes of all_to_all_single: of the output and of the input, in rows of dimension 0.
Splits = tuple[Sequence[int] | None, Sequence[int] | None]


def views(
    primitive: Primitive,
    group: ProcessGroup,
    output: Any,
    input: Any,
    root: int,
    splits: Splits | None,
) -> Views:
    """The views on the caller's arrays, checked against each other.

    Raises ArgumentTypeError (TypeError) for what is no array or no list, ArgumentError
    (ValueError) for sizes that do not fit and UnsupportedError (ValueError) for what is refused;
    see mpicoll.errors.
    """
    return _LAYOUTS[primitive.layout](primitive, group, output, input, root, splits)


def writes(primitive: Primitive, group: ProcessGroup, root: int) -> bool:
    """This rank's array of a primitive in place is written to, not only read."""
    if primitive.root == "src":
        return root != group.rank()
    return not primitive.root or root == group.rank()


def reads(primitive: Primitive, group: ProcessGroup, root: int) -> bool:
    """This rank's array of a primitive in place is read."""
    return primitive.root != "src" or root == group.rank()


def counts(
    primitive: Primitive, send: View | None, recv: View | None, blocks: Blocks | None
) -> Sequence[int]:
    """What all ranks must agree on of the sizes of a call."""
    if not primitive.even:
        return ()  # each size is between two ranks
    if blocks is not None:
        return blocks.sends if primitive.many_in else blocks.receives
    # The smaller side is one block, which every rank has, roots and others.
    sides = [view.count for view in (send, recv) if view is not None]
    return (min(sides),) if sides else ()


#: The greatest float64.
_LARGEST = int(sys.float_info.max)


def operation(primitive: Primitive, op: Any, dtype: DType) -> ReduceOp:
    """The reduce operation meant by ``op``, see ``row_of``, which fits a dtype.

    Raises UnsupportedError for one that has no meaning for the dtype or whose factor does not fit
    it, ArgumentError for a PREMUL_SUM without a factor.
    """
    where = f"{primitive.name}: op"
    found = row_of(op, where)
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


def row_of(op: Any, where: str) -> ReduceOp:
    """The ReduceOp that is meant: mpicoll's, torch.distributed's, or an operation of mpi4py.

    where: operation and argument, for the message.

    Raises ArgumentTypeError for anything else, UnsupportedError for an operation of MPI that has no
    counterpart.
    """
    found = op if isinstance(op, ReduceOp) else _of_torch(op) or _of_mpi(op, where)
    if found is None:
        raise ArgumentTypeError(f"{where}: expected a mpicoll.ReduceOp, got {type(op).__name__}")
    return found


def _of_mpi(op: Any, where: str) -> ReduceOp | None:
    """The row that MPI's operation combines elements for: of the table, the first of its name."""
    mpi = sys.modules.get("mpi4py.MPI")  # who has an operation has loaded it
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


def _of_torch(op: Any) -> ReduceOp | None:
    """The row of a ReduceOp or RedOpType of torch.distributed."""
    if type(op).__module__.partition(".")[0] != "torch":
        return None
    name = getattr(getattr(op, "op", op), "name", "")
    row: ReduceOp | None = getattr(ReduceOp, name, None)
    return row(op.factor) if row is ReduceOp.PREMUL_SUM and hasattr(op, "factor") else row


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


def _multiple(primitive: Primitive, whole: View, names: tuple[str, str], one: View, n: int) -> None:
    if whole.count != n * one.count:
        raise ArgumentError(
            f"{primitive.name}: {names[0]} has {whole.count} elements, {names[1]} {one.count}; in "
            f"a group of {n} ranks expected {n} x {one.count} = {n * one.count}"
        )


def _in_place(
    primitive: Primitive,
    group: ProcessGroup,
    output: Any,
    input: Any,
    root: int,
    splits: Splits | None,
) -> Views:
    return (
        None,
        adapters.build_view(output, writes(primitive, group, root), primitive.at_output),
        None,
    )


def _gathered(
    primitive: Primitive,
    group: ProcessGroup,
    output: Any,
    input: Any,
    root: int,
    splits: Splits | None,
) -> Views:
    n = group.size()
    send = adapters.build_view(input, False, primitive.at_input)
    receiving = not primitive.root or root == group.rank()
    where = primitive.at_output
    if not receiving:
        if output is not None and not (isinstance(output, (list, tuple)) and not output):
            raise ArgumentError(
                f"{where}: requires empty output on non-root ranks: to be given only on the rank "
                f"that receives, {root}"
            )
        return send, None, None
    if not primitive.listed:
        recv = adapters.build_view(output, True, where)
        _same_kind(primitive, send, recv)
        _multiple(primitive, recv, (primitive.output, primitive.input), send, n)
        return send, recv, None
    if output is None:
        raise ArgumentError(f"{where}: must be given on the rank that receives, {root}")
    listed = adapters.build_view_list(output, True, where, n)
    _same_kind(primitive, send, listed)
    if primitive.root:
        _same_shapes(primitive, primitive.output, listed, send)
        return send, listed, None
    blocks = _own_fits(primitive, group, listed, where, send, primitive.input)
    return send, listed, Blocks([send.count] * n, blocks) if blocks else None


def _own_fits(
    primitive: Primitive, group: ProcessGroup, listed: ViewList, where: str, own: View, name: str
) -> Sequence[int]:
    """The counts of a list's blocks, of which this rank's is that of ``own``; () if all alike."""
    counts, me = listed.counts, group.rank()
    if counts[me] != own.count:
        raise ArgumentError(
            f"{where}: invalid tensor size: [{me}] has shape {listed.parts[me].shape} and is the "
            f"block of this rank's {name}, which has shape {own.shape}"
        )
    return counts if len(set(counts)) > 1 else ()


def _scattered(
    primitive: Primitive,
    group: ProcessGroup,
    output: Any,
    input: Any,
    root: int,
    splits: Splits | None,
) -> Views:
    n = group.size()
    recv = adapters.build_view(output, True, primitive.at_output)
    where = primitive.at_input
    if primitive.root and root != group.rank():
        if input is not None and not (isinstance(input, (list, tuple)) and not input):
            raise ArgumentError(
                f"{where}: requires empty input on non-root ranks: to be given only on the rank "
                f"that sends, {root}"
            )
        return None, recv, None
    if not primitive.listed:
        send = adapters.build_view(input, False, where)
        _same_kind(primitive, send, recv)
        _multiple(primitive, send, (primitive.input, primitive.output), recv, n)
        return send, recv, None
    if input is None:
        raise ArgumentError(f"{where}: must be given on the rank that sends, {root}")
    listed = adapters.build_view_list(input, False, where, n)
    _same_kind(primitive, listed, recv)
    if primitive.root:
        _same_shapes(primitive, primitive.input, listed, recv)
        return listed, recv, None
    blocks = _own_fits(primitive, group, listed, where, recv, primitive.output)
    return listed, recv, Blocks(blocks, [recv.count] * n) if blocks else None


def _exchanged(
    primitive: Primitive,
    group: ProcessGroup,
    output: Any,
    input: Any,
    root: int,
    splits: Splits | None,
) -> Views:
    n = group.size()
    of_output, of_input = primitive.at_output, primitive.at_input
    if primitive.listed:
        to = adapters.build_view_list(output, True, of_output, n)
        out = adapters.build_view_list(input, False, of_input, n)
        _same_kind(primitive, out, to)
        return out, to, _agreeing(primitive, group, Blocks(out.counts, to.counts))
    recv = adapters.build_view(output, True, of_output)
    send = adapters.build_view(input, False, of_input)
    _same_kind(primitive, send, recv)
    of_both = splits or (None, None)
    receives = _blocks(recv, of_both[0], n, of_output, "output_split_sizes")
    sends = _blocks(send, of_both[1], n, of_input, "input_split_sizes")
    return send, recv, _agreeing(primitive, group, Blocks(sends, receives))


def _agreeing(primitive: Primitive, group: ProcessGroup, blocks: Blocks) -> Blocks:
    me = group.rank()
    if blocks.sends[me] != blocks.receives[me]:
        raise ArgumentError(
            f"{primitive.name}: rank {me} sends itself {blocks.sends[me]} elements and expects "
            f"{blocks.receives[me]}"
        )
    return blocks


def _blocks(view: View, splits: Sequence[int] | None, n: int, where: str, name: str) -> list[int]:
    """Elements for each rank, from split sizes that count rows of dimension 0."""
    shape = view.shape
    rows = shape[0] if shape else 1
    if splits is None or len(splits) == 0:
        if rows % n:
            raise ArgumentError(
                f"{where}: dimension 0 has {rows} rows, which {n} ranks cannot share evenly; give "
                f"{name}"
            )
        return [view.count // n] * n
    sizes = [int(size) for size in splits]
    if len(sizes) != n:
        raise ArgumentError(f"{where}: {name}: expected {n} sizes, one a rank, got {len(sizes)}")
    if min(sizes) < 0 or sum(sizes) != rows:
        raise ArgumentError(
            f"{where}: {name}: split sizes {sizes} do not add up to the {rows} rows of dimension 0"
        )
    row = view.count // rows if rows else 0
    return [size * row for size in sizes]


def _empty(
    primitive: Primitive,
    group: ProcessGroup,
    output: Any,
    input: Any,
    root: int,
    splits: Splits | None,
) -> Views:
    return None, None, None


_LAYOUTS: dict[Layout, Callable[..., Views]] = {
    Layout.IN_PLACE: _in_place,
    Layout.GATHERED: _gathered,
    Layout.SCATTERED: _scattered,
    Layout.EXCHANGED: _exchanged,
    Layout.EMPTY: _empty,
}
