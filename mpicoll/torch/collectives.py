"""What PyTorch calls: torch's options and tensors to calls of the core.

Both generations of names are here: from torch 2.13 on the front end calls ``all_gather_single``,
before ``_allgather_base``. Most methods of torch's ProcessGroup take either an Options object or,
in short, what would be in it: ``pg.broadcast([tensor], opts)`` and ``pg.broadcast(tensor, root)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch import Tensor
from torch.autograd import _profiler_enabled

from mpicoll.api import collectives, point_to_point
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import Work, seconds
from mpicoll.dispatch import execute
from mpicoll.dispatch.execute import run_plain
from mpicoll.dtypes import OPERATIONS, ReduceOp
from mpicoll.errors import ArgumentError, EmptyListError
from mpicoll.primitives import PRIMITIVES, Primitive
from mpicoll.torch import NAME, cores, profiling, sparse
from mpicoll.torch.compilation import uncompiled
from mpicoll.torch.options import Options
from mpicoll.torch.works import Done, Pending, Received, flat, joined

__all__ = ["Collectives"]

Tensors = Sequence[Tensor]

(
    _BROADCAST, _ALL_REDUCE, _REDUCE, _ALL_GATHER, _ALL_GATHER_SINGLE, _GATHER, _SCATTER,
    _REDUCE_SCATTER, _REDUCE_SCATTER_SINGLE, _ALL_TO_ALL, _ALL_TO_ALL_SINGLE, _BARRIER,
) = PRIMITIVES  # fmt: skip

#: Those for which there is a short way.
_PLAIN = {row for row in PRIMITIVES if row.output and not row.listed}
#: The core's operation of each of torch's. A ReduceOp and its RedOpType hash to their number, and
#: looking a number up takes a tenth of the time that comparing two of torch's enums takes.
_OPERATIONS = {hash(getattr(c10d.ReduceOp.RedOpType, row.name)): row for row in OPERATIONS}
_PREMUL_SUM = ReduceOp.PREMUL_SUM
_ALL_REDUCE_OPTIONS = c10d.AllreduceOptions
_NOW = timedelta(0)
_NO_EVENT: AbstractContextManager[None] = nullcontext()
#: Calls in a batch from which on those that are done leave it.
_BATCH = 256


class _Options:
    """Options that a caller gave in short, or left out."""

    __slots__ = ("asyncOp", "reduceOp", "rootRank", "timeout")

    def __init__(
        self, *, op: Any = c10d.ReduceOp.SUM, root: int = 0, timeout: timedelta | None = None
    ) -> None:
        self.asyncOp = True
        self.reduceOp = op
        self.rootRank = root
        self.timeout = timedelta(milliseconds=-1) if timeout is None else timeout


@uncompiled
class Collectives:
    """What torch's ProcessGroup and its Backend have in common, carried out by a group of the core.

    core:  the group that carries everything out.
    """

    def __init__(self, core: ProcessGroup) -> None:
        super().__init__(core.rank(), core.size())  # type: ignore[call-arg]  # torch's class
        self.core = core
        self._batch: list[Pending] | None = None

    # --- who and how ---------------------------------------------------------------------------

    def name(self) -> str:
        """The name of the backend, whatever name of another was asked for."""
        return NAME

    getBackendName = name  # for C++

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of all calls to come."""
        self.core.timeout = seconds(timeout, None, "set_timeout")

    @property
    def options(self) -> Options:
        """What the group was made with; its timeout can be set."""
        return Options(self.core)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives begun, the same on every rank at the same place."""
        return self.core.begun

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every group begins at 0."""

    def _wait_for_pending_works(self) -> None:
        if self.core.worker is not None:
            execute.submit(self.core, lambda: None, "wait", ()).wait()

    def shutdown(self) -> None:
        """Waits for what is pending and ends the group; the default group ends everything.

        Raises CollectiveTimeoutError where other ranks do not join what is pending.
        """
        cores.end(self.core)

    def abort(self) -> None:
        """Ends the group without waiting for anything, which other ranks may never join."""
        cores.abort(self.core)

    # --- the one way of a collective -------------------------------------------------------------

    def _call(
        self,
        primitive: Primitive,
        options: Any,
        output: Any,
        input: Any = None,
        op: ReduceOp | None = None,
        root: int = 0,
        splits: Any = None,
    ) -> c10d.Work:
        if not 0 <= root < self.core.size():
            raise ArgumentError(
                f"{primitive.name}: {primitive.root}: invalid root rank: {root} is not in the "
                f"group of {self.core.size()} ranks"
            )
        asynchronous, limit = options.asyncOp, options.timeout
        if (
            asynchronous
            or limit > _NOW
            or primitive is _BARRIER  # on the group's thread: a timeout of it can be survived
        ):
            return self._begin(
                primitive.name,
                lambda: self._run(primitive, True, output, input, op, root, splits),
                asynchronous,
                limit,
                output if input is None else input,
            )
        with self._event(primitive.name, output if input is None else input):
            self._run(primitive, False, output, input, op, root, splits)
        return _done(output)

    def _run(
        self,
        primitive: Primitive,
        asynchronous: bool,
        output: Any,
        input: Any,
        op: ReduceOp | None,
        root: int,
        splits: Any,
    ) -> Work | None:
        if splits is None and primitive in _PLAIN:
            return run_plain(primitive, self.core, asynchronous, output, input, op, root)
        return execute.run(primitive, self.core, asynchronous, output, input, op, root, splits)

    def _call_all(
        self,
        name: str,
        primitive: Primitive,
        options: Any,
        outputs: Sequence[Any],
        inputs: Tensors | None = None,
        op: ReduceOp | None = None,
    ) -> c10d.Work:
        """A primitive on each output and its input, carried out together."""
        if inputs is not None and len(outputs) != len(inputs):
            raise ArgumentError(
                f"{name}: expected one output for each of the {len(inputs)} inputs, got "
                f"{len(outputs)}"
            )
        if not outputs:
            raise EmptyListError(f"{name}: requires non-empty tensor list, got an empty one")
        asynchronous, limit = options.asyncOp, options.timeout
        read = outputs if inputs is None else inputs
        if asynchronous or limit > _NOW:
            return self._begin(
                name,
                lambda: execute.run_all(name, primitive, self.core, True, outputs, inputs, op),
                asynchronous,
                limit,
                read,
            )
        with self._event(name, read):
            execute.run_all(name, primitive, self.core, False, outputs, inputs, op)
        return _done(list(outputs))

    def _begin(
        self,
        name: str,
        begin: Callable[[], Work | None],
        asynchronous: bool,
        limit: timedelta,
        inputs: Any,
    ) -> c10d.Work:
        """Begins a call whose Work is asked for, timed or batched.

        inputs: the tensors that it reads, whose shapes a profiler gets.
        """
        with self._event(name, inputs):
            work = begin()
            assert work is not None  # None is for ranks outside, which have no group object
            if limit > _NOW:
                work.limit = limit.total_seconds()
            pending = Pending((work,), flat(work.outputs))
            if asynchronous:
                self._coalesce(pending)
            else:
                pending.wait()
        return pending

    def _event(self, name: str, inputs: Any) -> AbstractContextManager[Any]:
        """The call as an event of the profiler, if there is one."""
        if not _profiler_enabled():
            return _NO_EVENT
        return profiling.event(name, flat(inputs))

    def _coalesce(self, pending: Pending) -> None:
        """Puts what was begun into the batch, if there is one.

        torch does not end a batch in which an exception was raised: what is done leaves it.
        """
        if self._batch is not None:
            if len(self._batch) >= _BATCH:
                self._batch = [one for one in self._batch if not one.is_success()]
            self._batch.append(pending)

    def start_coalescing(self) -> None:
        """From here on asynchronous calls are ``end_coalescing``'s too."""
        self._batch = []

    def end_coalescing(self) -> c10d.Work:
        """One Work for all asynchronous calls since ``start_coalescing``."""
        if self._batch is None:
            raise ArgumentError("end_coalescing: start_coalescing was not called")
        batch, self._batch = self._batch, None
        return joined(batch)

    # --- collectives -----------------------------------------------------------------------------

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> c10d.Work:
        """The root's tensor to all."""
        opts = _options(c10d.BroadcastOptions, opts, "root", root=root, timeout=timeout)
        return self._call(_BROADCAST, opts, _one("broadcast", tensors, opts), root=opts.rootRank)

    def allreduce(
        self,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = c10d.ReduceOp.SUM,
    ) -> c10d.Work:
        """all_reduce of one tensor."""
        # The short way of the most frequent call: synchronous, and nothing unusual about it.
        if (
            opts.__class__ is _ALL_REDUCE_OPTIONS
            and not opts.asyncOp
            and len(tensors) == 1
            and not _profiler_enabled()
            and not opts.timeout > _NOW
        ):
            tensor, row = tensors[0], _OPERATIONS[hash(opts.reduceOp)]
            if row is not _PREMUL_SUM and not tensor.is_sparse:
                run_plain(_ALL_REDUCE, self.core, False, tensor, None, row)
                return _done(tensor)
        opts = _options(_ALL_REDUCE_OPTIONS, opts, "op", op=op, timeout=timeout)
        tensor, row = _one("allreduce", tensors), _operation(opts.reduceOp)
        if tensor.is_sparse:
            return self._begin(
                "all_reduce",
                lambda: sparse.all_reduce(self.core, tensor, row),
                opts.asyncOp,
                opts.timeout,
                tensor,
            )
        return self._call(_ALL_REDUCE, opts, tensor, op=row)

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> c10d.Work:
        """all_reduce of each tensor of a list."""
        opts = opts or _Options()
        return self._call_all(
            "all_reduce_coalesced", _ALL_REDUCE, opts, tensors, op=_operation(opts.reduceOp)
        )

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = c10d.ReduceOp.SUM,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """reduce of one tensor to the root."""
        opts = _options(c10d.ReduceOptions, opts, "root", op=op, root=root, timeout=timeout)
        return self._call(
            _REDUCE,
            opts,
            _one("reduce", tensors, opts),
            op=_operation(opts.reduceOp),
            root=opts.rootRank,
        )

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, **short: Any
    ) -> c10d.Work:
        """all_gather into a list of tensors, one a rank."""
        output, input = _nested("allgather", output_tensors), _one("allgather", input_tensors)
        return self._call(_ALL_GATHER, _timed(opts, **short), output, input)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        """all_gather into one tensor."""
        return self._call(_ALL_GATHER_SINGLE, opts or _Options(), output, input)

    all_gather_single = _allgather_base

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> c10d.Work:
        """all_gather of each tensor of a list: ``output_lists[rank][i]`` for ``input_list[i]``."""
        name = "all_gather_coalesced"
        outputs = collectives.coalesced_outputs(name, output_lists, input_list, self.core)
        return self._call_all(name, _ALL_GATHER, opts or _Options(), outputs, input_list)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> c10d.Work:
        """all_gather into one tensor, for each pair of tensors."""
        name = "all_gather_single_coalesced"
        return self._call_all(name, _ALL_GATHER_SINGLE, opts or _Options(), outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """gather to the root; elsewhere the list of outputs is empty."""
        opts = _options(c10d.GatherOptions, opts, "root", root=root, timeout=timeout)
        output = _nested("gather", output_tensors) if len(output_tensors) else None
        return self._call(_GATHER, opts, output, _one("gather", input_tensors), root=opts.rootRank)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        """gather to the root into one tensor; elsewhere the output is not looked at."""
        opts = opts or _Options()
        blocks: Any = None
        if opts.rootRank == self.core.rank():
            size = self.core.size()
            if output.numel() != size * input.numel() or not output.is_contiguous():
                raise ArgumentError(
                    f"gather_single: gather_tensor: expected a contiguous tensor of "
                    f"{size * input.numel()} elements, {size} times those of tensor, got "
                    f"{list(output.shape)} with strides {list(output.stride())}"
                )
            blocks = list(output.view(size, *input.shape))
        return self._call(_GATHER, opts, blocks, input, root=opts.rootRank)

    gather_into_tensor = gather_single

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> c10d.Work:
        """scatter from the root; elsewhere the list of inputs is empty."""
        opts = _options(c10d.ScatterOptions, opts, "root", root=root, timeout=timeout)
        input = _nested("scatter", input_tensors) if len(input_tensors) else None
        output = _one("scatter", output_tensors)
        return self._call(_SCATTER, opts, output, input, root=opts.rootRank)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = c10d.ReduceOp.SUM,
    ) -> c10d.Work:
        """reduce_scatter of a list of tensors, one a rank."""
        opts = _options(c10d.ReduceScatterOptions, opts, "op", op=op, timeout=timeout)
        output = _one("reduce_scatter", output_tensors)
        input = _nested("reduce_scatter", input_tensors)
        return self._call(_REDUCE_SCATTER, opts, output, input, _operation(opts.reduceOp))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        """reduce_scatter of one tensor."""
        opts = opts or _Options()
        op = _operation(opts.reduceOp)
        return self._call(_REDUCE_SCATTER_SINGLE, opts, output, input, op)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> c10d.Work:
        """reduce_scatter of one tensor, for each pair of tensors."""
        opts = opts or _Options()
        return self._call_all(
            "reduce_scatter_single_coalesced",
            _REDUCE_SCATTER_SINGLE,
            opts,
            outputs,
            inputs,
            _operation(opts.reduceOp),
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        **short: Any,
    ) -> c10d.Work:
        """all_to_all of one tensor; split sizes count rows of dimension 0, none means evenly."""
        given = len(output_split_sizes) or len(input_split_sizes)
        splits = (output_split_sizes, input_split_sizes) if given else None
        return self._call(_ALL_TO_ALL_SINGLE, _timed(opts, **short), output, input, splits=splits)

    all_to_all_single = alltoall_base

    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None
    ) -> c10d.Work:
        """all_to_all of lists of tensors, one a rank."""
        return self._call(_ALL_TO_ALL, opts or _Options(), output_tensors, input_tensors)

    def barrier(self, opts: Any = None, **short: Any) -> c10d.Work:
        """Waits for all ranks."""
        return self._call(_BARRIER, _timed(opts, **short), None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who is missing.

        timeout: a timedelta, or torch's BarrierOptions with one, as C++ gives them.
        """
        if isinstance(timeout, c10d.BarrierOptions):
            timeout = timeout.timeout if timeout.timeout > _NOW else None
        collectives.monitored_barrier(self.core, timeout, wait_all_ranks)

    # --- messages --------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> c10d.Work:
        """Begins to send one tensor to a rank in the group."""
        tensor = _one("send", tensors)
        return self._message("send", tensor, dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> c10d.Work:
        """Begins to receive one tensor from a rank in the group."""
        return self._message("recv", _one("recv", tensors), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> c10d.Work:
        """Begins to receive one tensor from whoever sends it."""
        return self._message("recvAnySource", _one("recv_anysource", tensors), None, tag)

    def _message(self, name: str, tensor: Tensor, peer: int | None, tag: int) -> c10d.Work:
        with self._event(name, tensor):
            work = point_to_point.post(self.core, name, tensor, peer, tag, name != "send")
        pending = Received(self.core, work, work.outputs)
        self._coalesce(pending)
        return pending


def _done(output: Any) -> Done:
    """The Work of a call that is over."""
    work = Done()
    work.output = output
    return work


def _operation(op: Any) -> ReduceOp:
    """The core's row of torch's ReduceOp, or of its RedOpType."""
    row = _OPERATIONS[hash(op)]
    return row if row is not ReduceOp.PREMUL_SUM else row(op.factor)


def _options(kind: type, opts: Any, first: str, **short: Any) -> Any:
    """Options as they are, or what was given in short; ``first`` is what stands in their place."""
    if isinstance(opts, kind):
        return opts
    return _Options(**(short if opts is None else short | {first: opts}))


def _timed(opts: Any, timeout: timedelta | None = None) -> Any:
    """Options, or in short a timeout."""
    if opts is None or isinstance(opts, timedelta):
        return _Options(timeout=timeout if opts is None else opts)
    return opts


def _one(name: str, tensors: Any, opts: Any = None) -> Any:
    """The tensor of a list of one, or the tensor itself; ``opts`` may say which one of a list."""
    if isinstance(tensors, (list, tuple)):
        if len(tensors) != 1:
            raise ArgumentError(
                f"{name}: requires a single-element tensor list (one device a process), got "
                f"{len(tensors)}; call {name} for each, or its coalesced form"
            )
        (tensors,) = tensors
    which = getattr(opts, "rootTensor", 0)
    if which != 0:
        raise ArgumentError(f"{name}: invalid root tensor: {which}; there is one, number 0")
    return tensors


def _nested(name: str, lists: Any) -> Any:
    """The list of tensors of a list of one list, or the list itself."""
    if lists and isinstance(lists[0], (list, tuple)):
        return _one(name, lists)
    return lists
