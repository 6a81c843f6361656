"""The collectives of torch.distributed on arrays.

Every array is a NumPy array, a torch CPU tensor, or an object with the buffer protocol or DLPack,
contiguous or not, of any dtype in ``mpicoll.dtypes``. Outputs are written in place. Ranks named
``src`` and ``dst`` are global, ``group_src`` and ``group_dst`` ranks in the group. With
``async_op=True`` a Work is returned at once, and the arrays belong to the operation until it is
done. A rank outside ``group`` does nothing, is warned, and gets None.

Every function raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no
array, list or ReduceOp; ArgumentError (a ValueError) for sizes and ranks that do not fit and for
read-only outputs; UnsupportedError (a ValueError) for dtypes, operations, devices and layouts that
are refused. MismatchError, MPIError and CollectiveTimeoutError report what went wrong between the
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpicoll.dtypes import ReduceOp
from mpicoll.errors import ArgumentError, ArgumentTypeError, EmptyListError
from mpicoll.execute import in_order, outside, rooted, run, run_all, run_plain
from mpicoll.groups import ProcessGroup, resolve
from mpicoll.primitives import by_name
from mpicoll.work import Future, Work, seconds

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "supports_complex",
]

_ALL_GATHER = by_name["all_gather"]
_ALL_GATHER_SINGLE = by_name["all_gather_single"]
_ALL_REDUCE = by_name["all_reduce"]
_ALL_TO_ALL = by_name["all_to_all"]
_ALL_TO_ALL_SINGLE = by_name["all_to_all_single"]
_BARRIER = by_name["barrier"]
_BROADCAST = by_name["broadcast"]
_GATHER = by_name["gather"]
_REDUCE = by_name["reduce"]
_REDUCE_SCATTER = by_name["reduce_scatter"]
_REDUCE_SCATTER_SINGLE = by_name["reduce_scatter_single"]
_SCATTER = by_name["scatter"]


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies the root's array to all ranks.

    tensor: read on the root, written on the others; the same dtype and number of elements
    everywhere. src: the root, global rank 0 where neither src nor group_src is given.
    """
    root = rooted("broadcast", group, "src", src, group_src, default=0)
    return run_plain(_BROADCAST, group, async_op, tensor, root=root)


def all_reduce(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combines the arrays of all ranks, element by element; all ranks get the same bits.

    tensor: read and written; the same dtype and number of elements everywhere. float16, bfloat16
    and the float8 types are accumulated in float32 and rounded once.
    """
    return run_plain(_ALL_REDUCE, group, async_op, tensor, None, op)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combines the arrays of all ranks, element by element, on the root.

    tensor: read, and on the root written; on the others its content does not change.
    """
    root = rooted("reduce", group, "dst", dst, group_dst)
    return run_plain(_REDUCE, group, async_op, tensor, None, op, root)


def all_gather(
    tensor_list: Sequence[Any],
    tensor: Any,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gives every rank the arrays of all ranks.

    tensor_list: one output for each rank, in rank order. tensor: this rank's input, of the shape
    of its output; ranks may have different sizes, if all know them all.
    """
    return run(_ALL_GATHER, group, async_op, tensor_list, tensor)


def all_gather_single(
    output_tensor: Any,
    input_tensor: Any,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gives every rank the arrays of all n ranks, one after another in one array.

    output_tensor: n times as many elements as input_tensor, concatenated or stacked.
    """
    return run_plain(_ALL_GATHER_SINGLE, group, async_op, output_tensor, input_tensor)


def all_gather_into_tensor(
    output_tensor: Any,
    input_tensor: Any,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """The older name of all_gather_single."""
    return all_gather_single(output_tensor, input_tensor, group, async_op)


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gives the root the arrays of all ranks.

    gather_list: on the root one output for each rank, all of the shape of tensor; elsewhere None.
    dst: the root, global rank 0 where neither dst nor group_dst is given.
    """
    root = rooted("gather", group, "dst", dst, group_dst, default=0)
    return run(_GATHER, group, async_op, gather_list, tensor, root=root)


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Gives each rank its array of the root's list.

    tensor: the output. scatter_list: on the root one input for each rank, all of the shape of
    tensor; elsewhere None. src: the root, global rank 0 where neither is given.
    """
    root = rooted("scatter", group, "src", src, group_src, default=0)
    return run(_SCATTER, group, async_op, tensor, scatter_list, root=root)


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combines the ranks' lists element by element and gives each rank its entry.

    input_list: one input for each rank, all of the shape of output.
    """
    return run(_REDUCE_SCATTER, group, async_op, output, input_list, op)


def reduce_scatter_single(
    output: Any,
    input: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combines the ranks' arrays element by element and gives each of the n ranks its block.

    input: n times as many elements as output, one block for each rank, in rank order.
    """
    return run_plain(_REDUCE_SCATTER_SINGLE, group, async_op, output, input, op)


def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """The older name of reduce_scatter_single."""
    return reduce_scatter_single(output, input, op, group, async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends a block of the input to each rank and gets one from each.

    Split sizes: rows of dimension 0 for and from each rank; where None or empty, all alike.
    """
    if output_split_sizes is None and input_split_sizes is None:
        return run_plain(_ALL_TO_ALL_SINGLE, group, async_op, output, input)
    splits = (output_split_sizes, input_split_sizes)
    return run(_ALL_TO_ALL_SINGLE, group, async_op, output, input, splits=splits)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends an array to each rank and gets one from each.

    Lists of one array for each rank; sizes may differ, as long as what a rank expects from
    another is what that one sends.
    """
    return run(_ALL_TO_ALL, group, async_op, output_tensor_list, input_tensor_list)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Returns when all ranks of the group have called.

    timeout: seconds or a timedelta, the group's where None. device_ids has no effect.
    """
    limit = seconds(timeout, None, "barrier")
    if limit is None:
        return run(_BARRIER, group, async_op)
    work = run(_BARRIER, group, True)
    if work is None:
        return None
    work.limit = limit
    if async_op:
        return work
    work.wait()
    return None


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that names who is missing.

    timeout: seconds or a timedelta, the group's where None. Rank 0 of the group raises
    CollectiveTimeoutError with the global ranks that did not arrive in time, the first of them or
    with ``wait_all_ranks`` all; the others raise too.
    """
    from mpicoll.watch.arrivals import monitored_barrier as arrive

    given = seconds(timeout, None, "monitored_barrier")
    member = resolve(group)
    if member is None:
        outside("monitored_barrier")
        return
    limit = given if given is not None else member.timeout
    in_order(
        member,
        "monitored_barrier",
        lambda: arrive(member, float("inf") if limit is None else limit, wait_all_ranks),
        keeps_time=True,
    )


def supports_complex(reduceOp: ReduceOp) -> bool:
    """True where the operation has a meaning for complex numbers."""
    from mpicoll.dtypes import Kind

    return Kind.COMPLEX in reduceOp.kinds


# --- many at once -------------------------------------------------------------------------------


def _tensors(name: str, argument: str, tensors: Any) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(
            f"{name}: {argument}: expected a list, got {type(tensors).__name__}"
        )
    if not tensors:
        raise EmptyListError(f"{name}: {argument}: expected at least one array")


def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future | None:
    """all_reduce of each array of a list, of one dtype. With ``async_op`` a Future is returned.

    tensors: arrays that do not share memory; the same sizes in the same order on all ranks. Small
    ones are reduced together.
    """
    name = "all_reduce_coalesced"
    _tensors(name, "tensors", tensors)
    return _future(run_all(name, _ALL_REDUCE, group, async_op, tensors, None, op))


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future | None:
    """all_gather of each array of a list, of one dtype. With ``async_op`` a Future is returned.

    output_tensor_lists[rank][i] is what rank ``rank`` has as input_tensor_list[i]. The same sizes
    in the same order on all ranks; small arrays are gathered together.
    """
    name = "all_gather_coalesced"
    member = resolve(group)
    if member is None:
        outside(name)
        return None
    outputs = coalesced_outputs(name, output_tensor_lists, input_tensor_list, member)
    return _future(run_all(name, _ALL_GATHER, member, async_op, outputs, input_tensor_list))


def coalesced_outputs(
    name: str, output_lists: Any, inputs: Any, group: ProcessGroup
) -> list[list[Any]]:
    """The outputs of each input: of ``output_lists[rank][i]`` the [i] of all ranks."""
    _tensors(name, "input_tensor_list", inputs)
    _tensors(name, "output_tensor_lists", output_lists)
    if len(output_lists) != group.size():
        raise ArgumentError(
            f"{name}: output_tensor_lists: expected one list for each of the group's "
            f"{group.size()} ranks, got {len(output_lists)}"
        )
    for rank, outputs in enumerate(output_lists):
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"{name}: output_tensor_lists[{rank}]: expected one array for each of the "
                f"{len(inputs)} inputs, got {len(outputs)}"
            )
    return [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]


def _future(work: Work | None) -> Future | None:
    """What torch returns of the coalesced calls: a Future instead of a Work."""
    return None if work is None else work.get_future()
