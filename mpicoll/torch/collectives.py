"""Methods of torch's ProcessGroup and Backend, implemented by calls of the core.

Old and new names are defined: torch calls ``all_gather_single`` from 2.13 on, and
``_allgather_base`` before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as c10d
from torch import Tensor

from mpicoll import primitives
from mpicoll.api import collectives, lifecycle
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.indices import check_index
from mpicoll.core.work import Work, parse_timeout
from mpicoll.dispatch import execute, point_to_point
from mpicoll.dispatch.execute import run_fast
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import ArgumentError, EmptyListError
from mpicoll.output import format_count
from mpicoll.primitives import Primitive
from mpicoll.torch import NAME, core_groups, sparse
from mpicoll.torch.internals import Event, disable_compile, is_recording
from mpicoll.torch.options import (
    OPERATION_BY_HASH,
    CallOptions,
    DefaultOptions,
    GroupOptions,
    Operation,
    Tensors,
    convert_op,
    fill_options,
    fill_timeout,
    unwrap_list,
    unwrap_tensor,
)
from mpicoll.torch.windows import TorchWindow
from mpicoll.torch.works import (
    CompletedWork,
    Outputs,
    PendingWork,
    ReceiveWork,
    flatten,
    join_works,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import AllgatherOptions

#: Number of rows for each rank, of the output and of the input.
Splits = tuple[Sequence[int], Sequence[int]]

_PREMUL_SUM = ReduceOp.PREMUL_SUM
_ALL_REDUCE_OPTIONS = c10d.AllreduceOptions
_NO_TIMEOUT = timedelta(0)
_NO_EVENT: AbstractContextManager[None] = nullcontext()
#: Number of calls in a batch above which completed calls are dropped.
_LARGE_BATCH_COUNT = 256


@disable_compile
class Collectives:
    """Methods that torch's ProcessGroup and Backend have in common.

    core: the group of the core that runs the calls.
    """

    def __init__(self, core: ProcessGroup) -> None:
        super().__init__(core.rank(), core.size())  # type: ignore[call-arg]  # torch's class
        self.core = core
        self._batch: list[PendingWork] | None = None

    # --- the group -----------------------------------------------------------------------------

    def name(self) -> str:
        """Return the name of the backend, even if the program used an alias."""
        return NAME

    getBackendName = name  # for C++

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all later calls."""
        self.core.timeout = parse_timeout(timeout, None, "set_timeout")

    @property
    def options(self) -> GroupOptions:
        """The options of the group; its timeout can be set."""
        return GroupOptions(self.core)

    def _do_nothing(self, *unused: object) -> None:
        """Methods that torch calls and this backend does not need."""

    eager_connect_single_device = _do_nothing  # the ranks are connected when a group is created
    perform_nocolor_split = _do_nothing  # only members participate in the creation of a group
    _set_sequence_number_for_group = _do_nothing  # every group starts at 0
    _enable_collectives_timing = _do_nothing  # as in Gloo: no Work has a duration

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.core.begun

    def _wait_for_pending_works(self) -> None:
        if self.core.worker is not None:
            execute.submit(self.core, lambda: None, "wait", ()).wait()

    def new_window(self, tensor: Tensor | None = None) -> TorchWindow:
        """Create a window for one-sided communication; every member calls it.

        tensor: registered immediately; None to register later. Not available from C++, where
            windows are C++ objects.
        """
        return TorchWindow(self.core, tensor)

    def shutdown(self) -> None:
        """Wait for pending operations and end the group. For the default group, end all groups.

        Raises CollectiveTimeoutError if other ranks do not join the pending operations.
        """
        core_groups.end(self.core, lifecycle.destroy_process_group)

    def abort(self) -> None:
        """End the group without waiting for pending operations."""
        core_groups.end(self.core, lifecycle.abort)

    # --- the path of every collective ------------------------------------------------------------

    def _call(
        self,
        primitive: Primitive,
        options: CallOptions | None,
        output: Tensor | Tensors | None,
        input: Tensor | Tensors | None = None,
        op: ReduceOp | None = None,
        root: int = 0,
        splits: Splits | None = None,
    ) -> c10d.Work:
        if root.__class__ is not int:
            root = check_index(root, f"{primitive.name}: {primitive.root}")
        if not 0 <= root < self.core.size():
            raise ArgumentError(
                f"{primitive.name}: {primitive.root}: invalid root rank: {root} is not in the "
                f"group of {format_count(self.core.size(), 'rank')}"
            )

        def run(asynchronous: bool) -> Work | None:
            if splits is None:
                return run_fast(primitive, self.core, asynchronous, output, input, op, root)
            return execute.run(primitive, self.core, asynchronous, output, input, op, root, splits)

        # A barrier runs on the progress thread, so that it can time out.
        queued = primitive is primitives.BARRIER
        read = output if input is None else input
        return self._start(primitive.name, run, options, read, output, queued)

    def _call_all(
        self,
        name: str,
        primitive: Primitive,
        options: CallOptions | None,
        outputs: Sequence[Tensor | Tensors],
        inputs: Tensors | None = None,
        op: ReduceOp | None = None,
    ) -> c10d.Work:
        """Run a primitive on each output and its input, as one call."""
        if inputs is not None and len(outputs) != len(inputs):
            raise ArgumentError(
                f"{name}: expected one output for each of the "
                f"{format_count(len(inputs), 'input')}, got {len(outputs)}"
            )
        if not outputs:
            raise EmptyListError(f"{name}: requires non-empty tensor list, got an empty one")

        def run(asynchronous: bool) -> Work | None:
            return execute.run_all(name, primitive, self.core, asynchronous, outputs, inputs, op)

        return self._start(name, run, options, outputs if inputs is None else inputs, list(outputs))

    def _start(
        self,
        name: str,
        run: Callable[[bool], Work | None],
        options: CallOptions | None,
        inputs: Outputs,
        output: Outputs,
        queued: bool = False,
    ) -> c10d.Work:
        """Start a call: ``run(asynchronous)``, which returns None after a synchronous call.

        inputs: the tensors that it reads, whose shapes a profiler records.
        queued: it runs on the progress thread even if it is synchronous.
        """
        options = options or DefaultOptions()
        asynchronous, limit = options.asyncOp, options.timeout
        with self._record_event(name, inputs):
            work = run(asynchronous or limit > _NO_TIMEOUT or queued)
            if work is None:
                return _complete(name, output)
            if limit > _NO_TIMEOUT:
                work.set_limit(limit.total_seconds())
            pending = PendingWork((work,), flatten(work.outputs), name)
            if asynchronous:
                self._add_to_batch(pending)
            else:
                pending.wait()
        return pending

    def _record_event(self, name: str, inputs: Outputs) -> AbstractContextManager[Any]:
        """Return a context manager that records the call if a profiler is active."""
        return Event(name, flatten(inputs)) if is_recording() else _NO_EVENT

    def _add_to_batch(self, pending: PendingWork) -> None:
        """Add a call to the current batch, if any.

        torch does not end a batch after an exception, so completed calls are dropped.
        """
        if self._batch is not None:
            if len(self._batch) >= _LARGE_BATCH_COUNT:
                self._batch = [one for one in self._batch if not one.is_success()]
            self._batch.append(pending)

    def start_coalescing(self) -> None:
        """Start a batch of async calls."""
        self._batch = []

    def end_coalescing(self) -> c10d.Work:
        """Return one Work for all async calls since ``start_coalescing``."""
        if self._batch is None:
            raise ArgumentError("end_coalescing: start_coalescing was not called")
        batch, self._batch = self._batch, None
        return join_works(batch)

    def _start_coalescing(self, device: object) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: object) -> c10d.Work:
        return self.end_coalescing()

    # --- collectives -----------------------------------------------------------------------------

    def broadcast(
        self,
        tensors: Tensor | Tensors,
        opts: c10d.BroadcastOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """Broadcast the tensor of the root."""
        options = fill_options(c10d.BroadcastOptions, opts, "root", root=root, timeout=timeout)
        tensor = unwrap_tensor("broadcast", tensors, options)
        return self._call(primitives.BROADCAST, options, tensor, root=options.rootRank)

    def allreduce(
        self,
        tensors: Tensor | Tensors,
        opts: Any = None,  # AllreduceOptions, an Operation or None
        timeout: timedelta | None = None,
        *,
        op: Operation = c10d.ReduceOp.SUM,
    ) -> c10d.Work:
        """Run all_reduce on one tensor."""
        # Fast path of the most frequent call: without profiler and timeout.
        if (
            opts.__class__ is _ALL_REDUCE_OPTIONS
            and len(tensors) == 1
            and not is_recording()
            and not opts.timeout > _NO_TIMEOUT
        ):
            tensor, row = tensors[0], OPERATION_BY_HASH[hash(opts.reduceOp)]
            if row is not _PREMUL_SUM and not tensor.is_sparse:
                work = run_fast(
                    primitives.ALL_REDUCE, self.core, opts.asyncOp, tensor, None, row, 0
                )
                if work is None:
                    return _complete("all_reduce", tensor)
                pending = PendingWork((work,), [tensor], "all_reduce")
                self._add_to_batch(pending)
                return pending
        options = fill_options(_ALL_REDUCE_OPTIONS, opts, "op", op=op, timeout=timeout)
        tensor, row = unwrap_tensor("allreduce", tensors), convert_op(options.reduceOp)
        if tensor.is_sparse:
            name = "sparse_all_reduce"

            def run(_: bool) -> Work:
                return sparse.all_reduce(self.core, tensor, row)

            return self._start(name, run, options, tensor, tensor)
        return self._call(primitives.ALL_REDUCE, options, tensor, op=row)

    allreduce_sparse = allreduce

    def allreduce_coalesced(
        self, tensors: Tensors, opts: c10d.AllreduceCoalescedOptions | None = None
    ) -> c10d.Work:
        """Run all_reduce on each tensor of a list."""
        opts = opts or DefaultOptions()
        name, op = "all_reduce_coalesced", convert_op(opts.reduceOp)
        return self._call_all(name, primitives.ALL_REDUCE, opts, tensors, op=op)

    def reduce(
        self,
        tensors: Tensor | Tensors,
        opts: c10d.ReduceOptions | int | None = None,
        op: Operation = c10d.ReduceOp.SUM,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """Reduce one tensor to the root."""
        options = fill_options(c10d.ReduceOptions, opts, "root", op=op, root=root, timeout=timeout)
        return self._call(
            primitives.REDUCE,
            options,
            unwrap_tensor("reduce", tensors, options),
            op=convert_op(options.reduceOp),
            root=options.rootRank,
        )

    def allgather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: Tensor | Tensors,
        opts: AllgatherOptions | timedelta | None = None,
        **kwargs: timedelta | None,
    ) -> c10d.Work:
        """Run all_gather into a list of tensors, one per rank."""
        output = unwrap_list("allgather", output_tensors)
        input = unwrap_tensor("allgather", input_tensors)
        return self._call(primitives.ALL_GATHER, fill_timeout(opts, **kwargs), output, input)

    def _allgather_base(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None
    ) -> c10d.Work:
        return self._call(primitives.ALL_GATHER_SINGLE, opts, output, input)

    all_gather_single = _allgather_base

    def allgather_coalesced(
        self,
        output_lists: Sequence[Tensors],
        input_list: Tensors,
        opts: AllgatherOptions | None = None,
    ) -> c10d.Work:
        """Gather each tensor of a list: ``output_lists[rank][i]`` for ``input_list[i]``."""
        name = "all_gather_coalesced"
        outputs = collectives.coalesced_outputs(name, output_lists, input_list, self.core)
        return self._call_all(name, primitives.ALL_GATHER, opts, outputs, input_list)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> c10d.Work:
        """Run all_gather into one tensor for each pair of tensors."""
        name = "all_gather_single_coalesced"
        return self._call_all(name, primitives.ALL_GATHER_SINGLE, opts, outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(
        self,
        output_tensors: Tensors | Sequence[Tensors],
        input_tensors: Tensor | Tensors,
        opts: c10d.GatherOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """Gather to the root; on other ranks the list of outputs is empty."""
        options = fill_options(c10d.GatherOptions, opts, "root", root=root, timeout=timeout)
        output = unwrap_list("gather", output_tensors) if len(output_tensors) else None
        input = unwrap_tensor("gather", input_tensors)
        return self._call(primitives.GATHER, options, output, input, root=options.rootRank)

    def gather_single(
        self, output: Tensor, input: Tensor, opts: c10d.GatherOptions | None = None
    ) -> c10d.Work:
        """Gather to the root into one tensor; on other ranks the output is ignored."""
        opts = opts or c10d.GatherOptions()
        blocks = []
        if opts.rootRank == self.core.rank():
            size = self.core.size()
            if output.numel() != size * input.numel() or not output.is_contiguous():
                raise ArgumentError(
                    f"gather_single: gather_tensor: expected a contiguous tensor of "
                    f"{format_count(size * input.numel(), 'element')}, {size} times the size of "
                    f"tensor, got {list(output.shape)} with strides {list(output.stride())}"
                )
            blocks = [list(output.view(size, *input.shape))]
        return self.gather(blocks, [input], opts)

    gather_into_tensor = gather_single

    def scatter(
        self,
        output_tensors: Tensor | Tensors,
        input_tensors: Tensors | Sequence[Tensors],
        opts: c10d.ScatterOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """Scatter from the root; on other ranks the list of inputs is empty."""
        options = fill_options(c10d.ScatterOptions, opts, "root", root=root, timeout=timeout)
        input = unwrap_list("scatter", input_tensors) if len(input_tensors) else None
        output = unwrap_tensor("scatter", output_tensors)
        return self._call(primitives.SCATTER, options, output, input, root=options.rootRank)

    def reduce_scatter(
        self,
        output_tensors: Tensor | Tensors,
        input_tensors: Tensors | Sequence[Tensors],
        opts: c10d.ReduceScatterOptions | Operation | None = None,
        timeout: timedelta | None = None,
        *,
        op: Operation = c10d.ReduceOp.SUM,
    ) -> c10d.Work:
        """Run reduce_scatter on a list of tensors, one per rank."""
        options = fill_options(c10d.ReduceScatterOptions, opts, "op", op=op, timeout=timeout)
        output = unwrap_tensor("reduce_scatter", output_tensors)
        input = unwrap_list("reduce_scatter", input_tensors)
        return self._call(
            primitives.REDUCE_SCATTER, options, output, input, convert_op(options.reduceOp)
        )

    def _reduce_scatter_base(
        self, output: Tensor, input: Tensor, opts: c10d.ReduceScatterOptions | None = None
    ) -> c10d.Work:
        """Run reduce_scatter on one tensor."""
        opts = opts or DefaultOptions()
        op = convert_op(opts.reduceOp)
        return self._call(primitives.REDUCE_SCATTER_SINGLE, opts, output, input, op)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: c10d.ReduceScatterOptions | None = None
    ) -> c10d.Work:
        """Run reduce_scatter on one tensor for each pair of tensors."""
        opts = opts or DefaultOptions()
        name, op = "reduce_scatter_single_coalesced", convert_op(opts.reduceOp)
        return self._call_all(name, primitives.REDUCE_SCATTER_SINGLE, opts, outputs, inputs, op)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: c10d.AllToAllOptions | timedelta | None = None,
        **kwargs: timedelta | None,
    ) -> c10d.Work:
        """Run all_to_all on one tensor.

        Split sizes count rows of dimension 0. Empty split sizes mean equal parts.
        """
        has_splits = len(output_split_sizes) or len(input_split_sizes)
        splits = (output_split_sizes, input_split_sizes) if has_splits else None
        return self._call(
            primitives.ALL_TO_ALL_SINGLE, fill_timeout(opts, **kwargs), output, input, splits=splits
        )

    all_to_all_single = alltoall_base

    def alltoall(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: c10d.AllToAllOptions | None = None,
    ) -> c10d.Work:
        """Run all_to_all on lists of tensors, one per rank."""
        return self._call(primitives.ALL_TO_ALL, opts, output_tensors, input_tensors)

    def barrier(
        self, opts: c10d.BarrierOptions | timedelta | None = None, **kwargs: timedelta | None
    ) -> c10d.Work:
        """Wait for all ranks."""
        return self._call(primitives.BARRIER, fill_timeout(opts, **kwargs), None)

    def monitored_barrier(
        self,
        timeout: timedelta | c10d.BarrierOptions | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """Wait for all ranks, or raise an error with the missing ranks.

        timeout: a timedelta, or BarrierOptions with one, which C++ passes.
        """
        if isinstance(timeout, c10d.BarrierOptions):
            timeout = timeout.timeout if timeout.timeout > _NO_TIMEOUT else None
        collectives.monitored_barrier(self.core, timeout, wait_all_ranks)

    # --- messages --------------------------------------------------------------------------------

    def send(self, tensors: Tensor | Tensors, dstRank: int, tag: int = 0) -> c10d.Work:
        """Start to send one tensor to a rank in the group."""
        return self._post_message("send", unwrap_tensor("send", tensors), dstRank, tag)

    def recv(self, tensors: Tensor | Tensors, srcRank: int, tag: int = 0) -> c10d.Work:
        """Start to receive one tensor from a rank in the group."""
        return self._post_message("recv", unwrap_tensor("recv", tensors), srcRank, tag)

    def recv_anysource(self, tensors: Tensor | Tensors, tag: int = 0) -> c10d.Work:
        """Start to receive one tensor from any rank."""
        return self._post_message(
            "recvAnySource", unwrap_tensor("recv_anysource", tensors), None, tag
        )

    def _post_message(self, name: str, tensor: Tensor, peer: int | None, tag: int) -> c10d.Work:
        with self._record_event(name, tensor):
            if peer is not None:
                argument = "dst" if name == "send" else "src"
                peer = execute.find_root(name, self.core, argument, None, peer, None)
            work = point_to_point.in_background(
                point_to_point.begin_message(self.core, name, tensor, peer, tag, name != "send")
            )
        pending = ReceiveWork(self.core, work, work.outputs, name)
        self._add_to_batch(pending)
        return pending


def _complete(name: str, output: Outputs) -> CompletedWork:
    work = CompletedWork()
    work.name = name
    work.output = output
    return work
