"""The collectives of torch.distributed on arrays.

Every array is a NumPy array, a torch CPU tensor, or an object with the buffer protocol or DLPack,
contiguous or not, of any dtype in ``mpicoll.dtypes``. Outputs are written in place. Ranks named
``src`` and ``dst`` are global, ``group_src`` and ``group_dst`` ranks in the group. With
``async_op=True`` a Work is returned at once, and the arrays belong to the operation until it is
done. A rank outside ``group`` does nothing, is warned, and gets None. Every function raises
NotInitializedError (a ValueError) before init_process_group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mpicoll.arrays.protocols import AnyArray
from mpicoll.core.checks import find_operation
from mpicoll.core.groups import ProcessGroup, resolve
from mpicoll.core.work import Future, Work, parse_timeout
from mpicoll.dispatch.execute import find_root, run, run_all, run_fast, run_in_order, warn_outside
from mpicoll.dtypes import Kind, ReduceOp
from mpicoll.errors import ArgumentError, ArgumentTypeError, EmptyListError
from mpicoll.output import format_count
from mpicoll.primitives import by_name

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
    "exscan",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scan",
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
_EXSCAN = by_name["exscan"]
_GATHER = by_name["gather"]
_REDUCE = by_name["reduce"]
_REDUCE_SCATTER = by_name["reduce_scatter"]
_REDUCE_SCATTER_SINGLE = by_name["reduce_scatter_single"]
_SCAN = by_name["scan"]
_SCATTER = by_name["scatter"]


def broadcast(
    tensor: AnyArray,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy the root's array to all ranks.

    tensor: an array of any shape, read on the root and written on the others; the same dtype and
        number of elements on all ranks.
    src: the root as a global rank; rank 0 of all where neither src nor group_src is given.
    group_src: the root as a rank in the group; one of the two is given at most.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array;
    ArgumentError (a ValueError) for a root that is not in the group and read-only outputs;
    UnsupportedError (a ValueError) for a dtype, layout or device that is refused. MismatchError,
    MPIError and CollectiveTimeoutError report what goes wrong between the ranks.
    """
    root = find_root("broadcast", group, "src", src, group_src, default=0)
    return run_fast(_BROADCAST, group, async_op, tensor, None, None, root)


def all_reduce(
    tensor: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of all ranks, element by element; every rank gets the same bits.

    tensor: an array of any shape, read and written in place; the same dtype and number of elements
        on all ranks. float16, bfloat16 and float8 types are accumulated in float32 and rounded
        once.
    op: ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or PREMUL_SUM(factor).
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array, or no
    ReduceOp; ArgumentError (a ValueError) for read-only arrays; UnsupportedError (a ValueError) for
    a dtype, layout or device that is refused, and an operation that has no meaning for the dtype.
    MismatchError, MPIError and CollectiveTimeoutError report what goes wrong between the ranks.
    """
    return run_fast(_ALL_REDUCE, group, async_op, tensor, None, op, 0)


def scan(
    output: AnyArray,
    input: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of rank 0 to this rank, element by element (MPI_Scan, MPI-4.1 6.11).

    output: an array of any shape, written; the same dtype and number of elements as the input,
        which it may be.
    input: an array of any shape; the same dtype and count on all ranks.
    op: as for all_reduce; the result is what all_reduce of ranks 0 to this one alone would give.
        AVG divides by their number.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array, or no
    ReduceOp; ArgumentError (a ValueError) for sizes that do not fit and read-only outputs;
    UnsupportedError (a ValueError) for a dtype, layout or device that is refused, and an operation
    that has no meaning for the dtype. MismatchError, MPIError and CollectiveTimeoutError report
    what goes wrong between the ranks.
    """
    return run_fast(_SCAN, group, async_op, output, input, op, 0)


def exscan(
    output: AnyArray,
    input: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of the ranks before this one (MPI_Exscan, MPI-4.1 6.11.2).

    output: an array of any shape, written on all ranks but rank 0 of the group, where it stays as
        it is; the same dtype and number of elements as the input, which it may be.
    input: an array of any shape; the same dtype and count on all ranks.
    op: as for all_reduce; the result is what all_reduce of the ranks before this one alone would
        give. AVG divides by their number.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array, or no
    ReduceOp; ArgumentError (a ValueError) for sizes that do not fit and read-only outputs;
    UnsupportedError (a ValueError) for a dtype, layout or device that is refused, and an operation
    that has no meaning for the dtype. MismatchError, MPIError and CollectiveTimeoutError report
    what goes wrong between the ranks.
    """
    return run_fast(_EXSCAN, group, async_op, output, input, op, 0)


def reduce(
    tensor: AnyArray,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce the arrays of all ranks, element by element, into the root's.

    tensor: an array of any shape, read, and on the root written in place; the same dtype and number
        of elements on all ranks. The other ranks' arrays do not change, and may be read-only.
    dst: the root as a global rank.
    group_dst: the root as a rank in the group; one of the two is given.
    op: ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or PREMUL_SUM(factor).
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array, or no
    ReduceOp; ArgumentError (a ValueError) for a root that is not in the group, or not given, and a
    read-only output; UnsupportedError (a ValueError) for a dtype, layout or device that is refused,
    and an operation that has no meaning for the dtype. MismatchError, MPIError and
    CollectiveTimeoutError report what goes wrong between the ranks.
    """
    root = find_root("reduce", group, "dst", dst, group_dst)
    return run_fast(_REDUCE, group, async_op, tensor, None, op, root)


def all_gather(
    tensor_list: Sequence[AnyArray],
    tensor: AnyArray,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the arrays of all ranks in a list, on every rank.

    tensor_list: one output array for each rank, in rank order, of the shape that this rank sends.
        Ranks may send different sizes, if all of them know them all.
    tensor: this rank's input; all arrays have one dtype.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array or list;
    ArgumentError (a ValueError) for a list of another length, sizes that do not fit and read-only
    outputs; UnsupportedError (a ValueError) for a dtype, layout or device that is refused.
    MismatchError, MPIError and CollectiveTimeoutError report what goes wrong between the ranks.
    """
    return run_fast(_ALL_GATHER, group, async_op, tensor_list, tensor, None, 0)


def all_gather_single(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the arrays of all n ranks in one array, in rank order, on every rank.

    output_tensor: n times as many elements as input_tensor: the inputs concatenated along the first
        dimension, or stacked along a new one.
    input_tensor: this rank's input; the same dtype and shape on all ranks.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array;
    ArgumentError (a ValueError) for sizes that do not fit and a read-only output; UnsupportedError
    (a ValueError) for a dtype, layout or device that is refused. MismatchError, MPIError and
    CollectiveTimeoutError report what goes wrong between the ranks.
    """
    return run_fast(_ALL_GATHER_SINGLE, group, async_op, output_tensor, input_tensor, None, 0)


def all_gather_into_tensor(
    output_tensor: AnyArray,
    input_tensor: AnyArray,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do all_gather_single, of which this is the older name.

    output_tensor, input_tensor, group, async_op: as there.

    Returns what all_gather_single returns.

    Raises what it raises, such as ArgumentError (a ValueError) for sizes that do not fit.
    """
    return all_gather_single(output_tensor, input_tensor, group, async_op)


def gather(
    tensor: AnyArray,
    gather_list: Sequence[AnyArray] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the arrays of all ranks in a list on the root.

    tensor: this rank's input; the same dtype and shape on all ranks.
    gather_list: on the root one output for each rank, in rank order, of the shape of tensor;
        elsewhere None.
    dst: the root as a global rank; rank 0 of all where neither dst nor group_dst is given.
    group_dst: the root as a rank in the group; one of the two is given at most.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array or list;
    ArgumentError (a ValueError) for a list that is missing, or given on another rank, sizes that do
    not fit and read-only outputs; UnsupportedError (a ValueError) for a dtype, layout or device
    that is refused. MismatchError, MPIError and CollectiveTimeoutError report what goes wrong
    between the ranks.
    """
    root = find_root("gather", group, "dst", dst, group_dst, default=0)
    return run_fast(_GATHER, group, async_op, gather_list, tensor, None, root)


def scatter(
    tensor: AnyArray,
    scatter_list: Sequence[AnyArray] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Send each rank its array of the root's list.

    tensor: this rank's output; the same dtype and shape on all ranks.
    scatter_list: on the root one input for each rank, in rank order, of the shape of tensor;
        elsewhere None.
    src: the root as a global rank; rank 0 of all where neither src nor group_src is given.
    group_src: the root as a rank in the group; one of the two is given at most.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array or list;
    ArgumentError (a ValueError) for a list that is missing, or given on another rank, sizes that do
    not fit and a read-only output; UnsupportedError (a ValueError) for a dtype, layout or device
    that is refused. MismatchError, MPIError and CollectiveTimeoutError report what goes wrong
    between the ranks.
    """
    root = find_root("scatter", group, "src", src, group_src, default=0)
    return run_fast(_SCATTER, group, async_op, tensor, scatter_list, None, root)


def reduce_scatter(
    output: AnyArray,
    input_list: Sequence[AnyArray],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the ranks' lists, element by element, and give each rank its entry.

    output: this rank's entry of the result, of any size.
    input_list: one input for each rank, in rank order, of the size of that rank's output, and of
        the dtype of output; the same sizes on all ranks.
    op: ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or PREMUL_SUM(factor).
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array, list or
    ReduceOp; ArgumentError (a ValueError) for a list of another length, sizes that do not fit and a
    read-only output; UnsupportedError (a ValueError) for a dtype, layout or device that is refused,
    and an operation that has no meaning for the dtype. MismatchError, MPIError and
    CollectiveTimeoutError report what goes wrong between the ranks.
    """
    return run_fast(_REDUCE_SCATTER, group, async_op, output, input_list, op, 0)


def reduce_scatter_single(
    output: AnyArray,
    input: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the arrays of all n ranks, element by element, and give each rank its block.

    output: this rank's block of the result; the same dtype and shape on all ranks.
    input: n times as many elements as output: one block for each rank, in rank order, concatenated
        or stacked.
    op: ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or PREMUL_SUM(factor).
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array, or no
    ReduceOp; ArgumentError (a ValueError) for sizes that do not fit and a read-only output;
    UnsupportedError (a ValueError) for a dtype, layout or device that is refused, and an operation
    that has no meaning for the dtype. MismatchError, MPIError and CollectiveTimeoutError report
    what goes wrong between the ranks.
    """
    return run_fast(_REDUCE_SCATTER_SINGLE, group, async_op, output, input, op, 0)


def reduce_scatter_tensor(
    output: AnyArray,
    input: AnyArray,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do reduce_scatter_single, of which this is the older name.

    output, input, op, group, async_op: as there.

    Returns what reduce_scatter_single returns.

    Raises what it raises, such as ArgumentError (a ValueError) for sizes that do not fit.
    """
    return reduce_scatter_single(output, input, op, group, async_op)


def all_to_all_single(
    output: AnyArray,
    input: AnyArray,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send a block of the input to each of the n ranks, and receive a block from each.

    output: the blocks received, in rank order, one after another along dimension 0.
    input: the blocks to send, in rank order; of the dtype of output.
    output_split_sizes: how many rows of dimension 0 come from each rank; None or empty: all alike,
        and n divides the rows.
    input_split_sizes: how many rows go to each rank; None or empty: the same.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array or list;
    ArgumentError (a ValueError) for splits that do not add up and a read-only output;
    UnsupportedError (a ValueError) for a dtype, layout or device that is refused. MismatchError,
    MPIError and CollectiveTimeoutError report what goes wrong between the ranks.
    """
    if output_split_sizes is None and input_split_sizes is None:
        return run_fast(_ALL_TO_ALL_SINGLE, group, async_op, output, input, None, 0)
    splits = (output_split_sizes, input_split_sizes)
    return run(_ALL_TO_ALL_SINGLE, group, async_op, output, input, splits=splits)


def all_to_all(
    output_tensor_list: Sequence[AnyArray],
    input_tensor_list: Sequence[AnyArray],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send an array to each rank, and receive an array from each.

    output_tensor_list: one output for each rank, in rank order, of the size that this one sends.
    input_tensor_list: one input for each rank, in rank order. Sizes may differ; all arrays have one
        dtype.
    group: the process group, None for the default group.
    async_op: return a Work at once; the arrays belong to the operation until it is done.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises, before anything is sent: ArgumentTypeError (a TypeError) for what is no array or list;
    ArgumentError (a ValueError) for lists of another length and read-only outputs; UnsupportedError
    (a ValueError) for a dtype, layout or device that is refused. MismatchError, MPIError and
    CollectiveTimeoutError report what goes wrong between the ranks.
    """
    return run_fast(_ALL_TO_ALL, group, async_op, output_tensor_list, input_tensor_list, None, 0)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Wait until all ranks of the group have called.

    group: the process group, None for the default group.
    async_op: return a Work at once.
    device_ids: has no effect.
    timeout: seconds or a timedelta, None for the group's.

    Returns None, with async_op a Work, and None on a rank outside the group.

    Raises CollectiveTimeoutError where a rank does not come in time, MismatchError where the ranks'
    calls differ, ArgumentTypeError (a TypeError) and ArgumentError (a ValueError) for a timeout
    that is none.
    """
    limit = parse_timeout(timeout, None, "barrier")
    if limit is None:
        return run_fast(_BARRIER, group, async_op, None, None, None, 0)
    work = run(_BARRIER, group, True)
    if work is None:
        return None
    work.set_limit(limit)
    if async_op:
        return work
    work.wait()
    return None


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks of the group have called, or name those that have not.

    group: the process group, None for the default group.
    timeout: seconds or a timedelta, None for the group's.
    wait_all_ranks: name all ranks that are missing, not the first one alone.

    Raises CollectiveTimeoutError where ranks are missing: on rank 0 of the group with their global
    ranks, on the others as well. Raises ArgumentTypeError (a TypeError) and ArgumentError (a
    ValueError) for a timeout that is none.
    """
    from mpicoll.api.monitored_barrier import wait_for_ranks

    given = parse_timeout(timeout, None, "monitored_barrier")
    member = resolve(group)
    if member is None:
        warn_outside("monitored_barrier")
        return
    limit = given if given is not None else member.timeout
    run_in_order(
        member,
        "monitored_barrier",
        lambda: wait_for_ranks(member, float("inf") if limit is None else limit, wait_all_ranks),
        keeps_time=True,
    )


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Tell whether a reduce operation has a meaning for complex numbers.

    reduceOp: a ReduceOp.

    Returns True or False.

    Raises ArgumentTypeError (a TypeError) if it is not a ReduceOp.
    """
    return Kind.COMPLEX in find_operation(reduceOp, "supports_complex: reduceOp").kinds


# --- many at once -------------------------------------------------------------------------------


def _tensors(name: str, argument: str, tensors: object) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(
            f"{name}: {argument}: expected a list, got {type(tensors).__name__}"
        )
    if not tensors:
        raise EmptyListError(f"{name}: {argument}: expected at least one array")


def all_reduce_coalesced(
    tensors: Sequence[AnyArray],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future | None:
    """Reduce each array of a list as all_reduce does; small ones together.

    tensors: arrays of one dtype, read and written, on the host or on one device, that do not share
        memory; the same sizes in the same order on all ranks.
    op: ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or PREMUL_SUM(factor).
    group: the process group, None for the default group.
    async_op: return a Future of the arrays at once.

    Returns None, with async_op a Future, and None on a rank outside the group.

    Raises EmptyListError (a ValueError and an IndexError) for an empty list, what all_reduce
    raises, and MismatchError where the ranks' lists differ; where one array is refused, nothing is
    sent.
    """
    name = "all_reduce_coalesced"
    _tensors(name, "tensors", tensors)
    return _future(run_all(name, _ALL_REDUCE, group, async_op, tensors, None, op))


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[AnyArray]],
    input_tensor_list: Sequence[AnyArray],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future | None:
    """Gather each array of a list as all_gather does; small ones together.

    output_tensor_lists: one list for each rank, in rank order; output_tensor_lists[rank][i] gets
        what that rank has as input_tensor_list[i].
    input_tensor_list: arrays of one dtype, on the host or on one device; the same sizes in the same
        order on all ranks.
    group: the process group, None for the default group.
    async_op: return a Future of the outputs at once.

    Returns None, with async_op a Future, and None on a rank outside the group.

    Raises EmptyListError (a ValueError and an IndexError) for an empty list, ArgumentError (a
    ValueError) for lists of other lengths, what all_gather raises, and MismatchError where the
    ranks' lists differ.
    """
    name = "all_gather_coalesced"
    member = resolve(group)
    if member is None:
        warn_outside(name)
        return None
    outputs = coalesced_outputs(name, output_tensor_lists, input_tensor_list, member)
    return _future(run_all(name, _ALL_GATHER, member, async_op, outputs, input_tensor_list, None))


def coalesced_outputs(
    name: str,
    output_lists: Sequence[Sequence[AnyArray]],
    inputs: Sequence[AnyArray],
    group: ProcessGroup,
) -> list[list[AnyArray]]:
    """The outputs of each input: of ``output_lists[rank][i]`` the [i] of all ranks."""
    _tensors(name, "input_tensor_list", inputs)
    _tensors(name, "output_tensor_lists", output_lists)
    if len(output_lists) != group.size():
        raise ArgumentError(
            f"{name}: output_tensor_lists: expected one list for each of the group's "
            f"{format_count(group.size(), 'rank')}, got {len(output_lists)}"
        )
    for rank, outputs in enumerate(output_lists):
        _tensors(name, f"output_tensor_lists[{rank}]", outputs)
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"{name}: output_tensor_lists[{rank}]: expected one array for each of the "
                f"{format_count(len(inputs), 'input')}, got {len(outputs)}"
            )
    return [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]


def _future(work: Work | None) -> Future | None:
    """What torch returns of the coalesced calls: a Future instead of a Work."""
    return None if work is None else work.get_future()
