"""Collectives of torch.distributed, plus ``scan`` and ``exscan``.

Arrays are NumPy arrays, CuPy arrays, torch tensors, or any object with DLPack or the buffer
protocol. They may be non-contiguous. Supported dtypes are listed in ``mpicoll.dtypes``. Outputs are
written in place. Unless noted otherwise, the dtype and the number of elements must be the same on
all ranks.

group: the process group; None is the default group. On a rank outside the group, a call warns and
    returns None.
async_op: if True, return a Work immediately. The arrays must stay unchanged until it completes.
src, dst: root rank, as a global rank; 0 by default, except in reduce.
group_src, group_dst: root rank, as a rank in the group. Use instead of ``src`` or ``dst``.
op: ReduceOp.SUM (default), AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or PREMUL_SUM(factor). float16,
    bfloat16 and float8 types accumulate in float32 and round once.

Returns None, or a Work if ``async_op`` is True.

Raises, before any data is sent: NotInitializedError (a ValueError) before init_process_group;
ArgumentTypeError (a TypeError) for an argument of the wrong type; ArgumentError (a ValueError) for
a wrong size, a root outside the group or a read-only output; UnsupportedError (a ValueError) for a
dtype, layout, device or operation that is not supported.

Raises, during the call: MismatchError for a collective mismatch, CollectiveTimeoutError if it timed
out, MPIError for an error of MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mpicoll import primitives
from mpicoll.arrays.protocols import AnyArray
from mpicoll.core.checks import find_operation
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import Future, Work, parse_timeout
from mpicoll.dispatch.execute import (
    describe,
    find_root,
    resolve_or_warn,
    run,
    run_all,
    run_fast,
    run_in_order,
    wait_unless,
)  # fmt: skip
from mpicoll.dtypes import Kind, ReduceOp
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    EmptyListError,
)
from mpicoll.output import format_count

__all__ = [
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "exscan", "gather", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scan", "scatter", "supports_complex",
]  # fmt: skip


def broadcast(
    tensor: AnyArray,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy the array of the root to all ranks.

    tensor: array of any shape; input on the root, output on the other ranks.
    """
    root = find_root("broadcast", group, "src", src, group_src, 0)
    return run_fast(primitives.BROADCAST, group, async_op, tensor, None, None, root)


def all_reduce(
    tensor: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of all ranks, elementwise. All ranks get the same bits.

    tensor: input and output; array of any shape.
    """
    return run_fast(primitives.ALL_REDUCE, group, async_op, tensor, None, op, 0)


def scan(
    output: AnyArray,
    input: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of ranks 0 to this rank, elementwise (MPI_Scan).

    output, input: arrays of any shape, of the same dtype and size. May be the same array.
    op: AVG divides by the number of ranks that were reduced.
    """
    return run_fast(primitives.SCAN, group, async_op, output, input, op, 0)


def exscan(
    output: AnyArray,
    input: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of all ranks before this rank, elementwise (MPI_Exscan).

    output, input: as in scan. Rank 0 of the group leaves ``output`` unchanged.
    op: AVG divides by the number of ranks that were reduced.
    """
    return run_fast(primitives.EXSCAN, group, async_op, output, input, op, 0)


def reduce(
    tensor: AnyArray,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce the arrays of all ranks, elementwise, into the array of the root.

    tensor: array of any shape; input on all ranks, output on the root. The arrays of other ranks
        are not changed and may be read-only.
    dst, group_dst: root; required.
    """
    root = find_root("reduce", group, "dst", dst, group_dst, None)
    return run_fast(primitives.REDUCE, group, async_op, tensor, None, op, root)


def all_gather(
    tensor_list: Sequence[AnyArray],
    tensor: AnyArray,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the arrays of all ranks into a list, on every rank.

    tensor_list: output; one array for each rank, in rank order. Sizes may differ between ranks if
        each output has the size of the input of its rank.
    tensor: input; array of any shape. All arrays have the same dtype.
    """
    return run_fast(primitives.ALL_GATHER, group, async_op, tensor_list, tensor, None, 0)


def all_gather_single(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the arrays of all n ranks into one array in rank order, on every rank.

    output_tensor: n times the elements of ``input_tensor``: concatenated along the first dimension,
        or stacked along a new one.
    input_tensor: input; the same shape on all ranks.
    """
    return run_fast(
        primitives.ALL_GATHER_SINGLE, group, async_op, output_tensor, input_tensor, None, 0
    )


#: The older name in torch.
all_gather_into_tensor = all_gather_single


def gather(
    tensor: AnyArray,
    gather_list: Sequence[AnyArray] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the arrays of all ranks into a list on the root.

    tensor: input; the same shape on all ranks.
    gather_list: on the root, one output for each rank, in rank order, with the shape of ``tensor``.
        None on other ranks.
    """
    root = find_root("gather", group, "dst", dst, group_dst, 0)
    return run_fast(primitives.GATHER, group, async_op, gather_list, tensor, None, root)


def scatter(
    tensor: AnyArray,
    scatter_list: Sequence[AnyArray] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Send each rank one array from a list on the root.

    tensor: output; the same shape on all ranks.
    scatter_list: on the root, one input for each rank, in rank order, with the shape of ``tensor``.
        None on other ranks.
    """
    root = find_root("scatter", group, "src", src, group_src, 0)
    return run_fast(primitives.SCATTER, group, async_op, tensor, scatter_list, None, root)


def reduce_scatter(
    output: AnyArray,
    input_list: Sequence[AnyArray],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the lists of all ranks, elementwise, and give each rank its entry.

    output: the entry of this rank, of any size.
    input_list: one input for each rank, in rank order, with the size of the output of that rank.
        The same sizes on all ranks, and the dtype of ``output``.
    """
    return run_fast(primitives.REDUCE_SCATTER, group, async_op, output, input_list, op, 0)


def reduce_scatter_single(
    output: AnyArray,
    input: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of all n ranks, elementwise, and give each rank its block.

    output: the block of this rank; the same shape on all ranks.
    input: n times the elements of ``output``: one block for each rank, in rank order, concatenated
        or stacked.
    """
    return run_fast(primitives.REDUCE_SCATTER_SINGLE, group, async_op, output, input, op, 0)


#: The older name in torch.
reduce_scatter_tensor = reduce_scatter_single


def all_to_all_single(
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send one block of the input to each of the n ranks, and receive one from each.

    output, input: the received blocks, and the blocks to send, of one dtype. In rank order,
        concatenated along dimension 0.
    output_split_sizes, input_split_sizes: number of rows (dimension 0) to receive from each rank,
        and to send to it. None or empty: n equal blocks.

    Raises ArgumentError (a ValueError) if the split sizes do not add up to the number of rows.
    """
    if output_split_sizes is None and input_split_sizes is None:
        return run_fast(primitives.ALL_TO_ALL_SINGLE, group, async_op, output, input, None, 0)
    splits = (output_split_sizes, input_split_sizes)
    return run(primitives.ALL_TO_ALL_SINGLE, group, async_op, output, input, splits=splits)


def all_to_all(
    output_tensor_list: Sequence[AnyArray],
    input_tensor_list: Sequence[AnyArray],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send one array to each rank, and receive one array from each.

    output_tensor_list: one output for each rank, in rank order, with the size that the rank sends.
    input_tensor_list: one input for each rank, in rank order. Sizes may differ; all arrays have the
        same dtype.
    """
    return run_fast(
        primitives.ALL_TO_ALL, group, async_op, output_tensor_list, input_tensor_list, None, 0
    )


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until all ranks of the group have called barrier.

    device_ids: ignored.
    timeout: seconds or a timedelta; None is the timeout of the group.
    """
    if timeout is None:
        return run_fast(primitives.BARRIER, group, async_op, None, None, None, 0)
    limit = parse_timeout(timeout, None, "barrier")
    work = run(primitives.BARRIER, group, True)
    if work is None:
        return None
    work.set_limit(limit)
    return wait_unless(async_op, work)


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks of the group have called it, and report missing ranks.

    timeout: seconds or a timedelta; None is the timeout of the group.
    wait_all_ranks: report all missing ranks instead of the first one only.

    Returns None on all ranks.

    Raises CollectiveTimeoutError on all ranks if a rank is missing. The message of rank 0 of the
    group has the global ranks that are missing.
    """
    name = "monitored_barrier"
    given = parse_timeout(timeout, None, name)
    member = resolve_or_warn(group, name)
    if member is not None:
        limit = given if given is not None else member.timeout
        run_in_order(
            member, name, lambda: _wait_for_ranks(member, limit, wait_all_ranks), keeps_time=True
        )


def _wait_for_ranks(group: ProcessGroup, limit: float | None, wait_all: bool) -> None:
    from mpicoll.api.handshakes import COMPLETE, Handshakes

    found = group.resources.get_or_create("handshakes", lambda: Handshakes(group.inner))
    found.count += 1
    outcome, ranks = found.join(found.count, range(group.size()), 0, limit)
    if outcome == COMPLETE:
        return
    missing = [group.ranks[rank] for rank in ranks]
    seconds = float("inf") if limit is None else limit
    if group.rank() == 0:
        # The text includes torch's messages, because programs search logs for them.
        named = missing if wait_all else missing[:1]
        text = (
            f"{'Ranks' if len(named) > 1 else 'Rank'} {', '.join(map(str, named))} failed to pass "
            f"monitoredBarrier: did not arrive within {seconds:g} s, or timed out before"
            + ("" if wait_all else "; wait_all_ranks=True names every missing rank")
            + ("" if seconds else "; Rank 0 timed out in monitoredBarrier before it could check")
        )
    elif missing:
        text = f"rank 0 (global rank {missing[0]}) did not arrive within {seconds:g} s"
    else:
        text = (
            f"Rank {group.ranks[group.rank()]} successfully reached monitoredBarrier, but received "
            "errors while waiting for send/recv from rank 0: a rank did not arrive in time; rank "
            "0's error names it"
        )
    raise CollectiveTimeoutError(f"{describe('monitored_barrier', group)}: {text}")


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether a reduce operation supports complex dtypes.

    reduceOp: a ReduceOp.
    """
    return Kind.COMPLEX in find_operation(reduceOp, "supports_complex: reduceOp").kinds


def check_list(where: str, value: object, items: str = "array") -> None:
    """Raise ArgumentTypeError unless a value is a list or tuple, EmptyListError if it is empty."""
    if not isinstance(value, (list, tuple)):
        raise ArgumentTypeError(f"{where}: expected a list of {items}s, got {type(value).__name__}")
    if not value:
        raise EmptyListError(f"{where}: expected at least one {items}")


def all_reduce_coalesced(
    tensors: Sequence[AnyArray],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future | None:
    """All-reduce each array of a list. Small arrays are combined into one call.

    tensors: inputs and outputs, of one dtype and on one device, that do not share memory. The same
        sizes in the same order on all ranks.

    Returns None, or a Future of the arrays if ``async_op`` is True.

    Raises EmptyListError (a ValueError and an IndexError) for an empty list. If one array is
    rejected, nothing is sent.
    """
    name = "all_reduce_coalesced"
    check_list(f"{name}: tensors", tensors)
    work = run_all(name, primitives.ALL_REDUCE, group, async_op, tensors, None, op)
    return None if work is None else work.get_future()


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[AnyArray]],
    input_tensor_list: Sequence[AnyArray],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future | None:
    """All-gather each array of a list. Small arrays are combined into one call.

    output_tensor_lists: one list for each rank, in rank order; ``output_tensor_lists[rank][i]``
        receives ``input_tensor_list[i]`` of that rank.
    input_tensor_list: inputs of one dtype and on one device. The same sizes in the same order on
        all ranks.

    Returns None, or a Future of the outputs if ``async_op`` is True.

    Raises EmptyListError (a ValueError and an IndexError) for an empty list.
    """
    name = "all_gather_coalesced"
    member = resolve_or_warn(group, name)
    if member is None:
        return None
    outputs = coalesced_outputs(name, output_tensor_lists, input_tensor_list, member)
    work = run_all(name, primitives.ALL_GATHER, member, async_op, outputs, input_tensor_list, None)
    return None if work is None else work.get_future()


def coalesced_outputs(
    name: str,
    output_lists: Sequence[Sequence[AnyArray]],
    inputs: Sequence[AnyArray],
    group: ProcessGroup,
) -> list[list[AnyArray]]:
    """Check and transpose ``output_lists``: return, for each input, its outputs of all ranks."""
    check_list(f"{name}: input_tensor_list", inputs)
    check_list(f"{name}: output_tensor_lists", output_lists)
    if len(output_lists) != group.size():
        raise ArgumentError(
            f"{name}: output_tensor_lists: expected one list for each of the group's "
            f"{format_count(group.size(), 'rank')}, got {len(output_lists)}"
        )
    for rank, outputs in enumerate(output_lists):
        check_list(f"{name}: output_tensor_lists[{rank}]", outputs)
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"{name}: output_tensor_lists[{rank}]: expected one array for each of the "
                f"{format_count(len(inputs), 'input')}, got {len(outputs)}"
            )
    return [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
