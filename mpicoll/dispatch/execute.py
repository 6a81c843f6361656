"""The path of every call, from checked arguments to its route and the Work of an async call."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

from mpicoll.arrays.adapters import fast_views
from mpicoll.arrays.protocols import Arrays
from mpicoll.core import checks
from mpicoll.core.groups import (
    NO_TASK,
    ProcessGroup,
    RunningTask,
    check_group_rank,
    default_group,
    resolve,
    state,
)
from mpicoll.core.indices import check_index
from mpicoll.core.plan import CallKind, Plan, Run, Task, agreed_sizes
from mpicoll.core.signature import (
    LIST,
    encode_list,
    encode_sizes,
    encode_task,
    parts_per_element,
    with_root,
)
from mpicoll.core.work import Work
from mpicoll.cuda.streams import StreamOrder
from mpicoll.dispatch import fusing, packing
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import ArgumentError, MismatchError, MpicollError, MPIError
from mpicoll.failures import consistency, flight_record, group_failure
from mpicoll.kernels.calls import bind_fast_path
from mpicoll.output import warn
from mpicoll.primitives import Primitive


def run(
    primitive: Primitive,
    group: ProcessGroup | None,
    async_op: bool,
    output: Arrays = None,
    input: Arrays = None,
    op: ReduceOp | None = None,
    root: int = 0,
    splits: checks.Splits | None = None,
    may_inline: bool = True,
) -> Work | None:
    """Check the arguments of a collective call and run it.

    output, input: the caller's arrays. root: a rank in the group. may_inline: an async call may run
    on this thread.
    Returns a Work if ``async_op``; else None after the call, on a device once the current stream is
    ordered after it.
    """
    member: Any = state.default if group is None else group
    if member.__class__ is not ProcessGroup:
        member = resolve_or_warn(group, primitive.name)
        if member is None:
            return None
    send, recv, extent = checks.build_views(primitive, member, output, input, root, splits)
    first = send if recv is None else recv
    if first is None:
        plan = _plan(primitive, member, op, None, False)
    else:
        plan = _plan(primitive, member, op, first.dtype, first.device is not None)
    execute, orders = packing.in_stream_order(plan, send, recv)
    sizes = encode_sizes(agreed_sizes(primitive, extent))
    if not (plan.on_device or plan.fast_path_registered):
        _register_fast_path(plan, op)
    if not async_op and not member.busy():
        perform(plan, sizes, root, execute, send, recv, extent)
        return None
    call = _Call(plan, sizes, root, execute, send, recv, extent)
    return _start(call, async_op, plan.name, output, orders, may_inline)


class _Call(NamedTuple):
    """The arguments of ``perform``."""

    plan: Plan
    sizes: int
    root: int
    execute: Run
    send: Any
    recv: Any
    extent: Any


def _start(
    call: _Call,
    async_op: bool,
    name: str,
    output: object,
    orders: Sequence[StreamOrder],
    may_inline: bool = True,
) -> Work | None:
    """Run a call as a Work, behind pending calls or inline. Wait for it unless ``async_op``."""
    for order in orders:
        order.asynchronous = True  # the streams that will use the result are not known yet
    inline = may_inline and async_op and _should_run_inline(call)
    group = call.plan.group
    scheduled = group.schedule(call.plan.kind, call.sizes, call.root)
    task = partial(perform, *call, scheduled)
    return wait_unless(async_op, submit(group, task, name, _as_output_list(output), inline, orders))


def wait_unless(async_op: bool, work: Work) -> Work | None:
    """Return a Work if ``async_op``; else wait for it and return None."""
    if async_op:
        return work
    work.wait()
    return None


def _as_output_list(output: Any) -> Sequence[Any]:
    return () if output is None else output if isinstance(output, (list, tuple)) else (output,)


def _should_run_inline(call: _Call) -> bool:
    """Return whether an async call or list of calls should run inline: the queue is empty, and it
    only enqueues work on streams, or every rank has already entered it.
    """
    plan, sizes, root, *_, extent = call
    group = plan.group
    if plan.dtype is None or group.busy() or (group.worker is not None and group.worker.is_current):
        return False  # calls of callbacks, on the progress thread, run inline anyway
    if plan.on_device:
        compares = consistency.is_due(group) or (root == LIST and not group.compared)
        known = None if root == LIST else extent
        return plan.implementation.only_enqueues(known) and not compares
    if group.size() == 1:  # the call does not wait
        return True
    shared = group.resources.find("shared")
    return bool(shared and shared.should_run_inline(with_root(plan.kind, root), sizes))


def _run_cached(
    primitive: Primitive,
    group: ProcessGroup | None,
    async_op: bool,
    output: Any,
    input: Any,
    op: ReduceOp | None,
    root: int,
) -> Work | None:
    """Run a call as ``run`` does, with fewer steps for a synchronous call if its plan exists,
    nothing is pending, and a fast view shows that each array is one block of memory.

    Registers the native calls of the plan. Anything else, errors included, falls back to ``run``.
    """
    member: Any = state.default if group is None else group
    send = implementation = None
    fast_view = None if async_op or primitive.listed else fast_views.get(output.__class__)
    seen = None if fast_view is None else fast_view(output)
    try:
        if seen is not None:
            dtype, recv, count = seen
            plan = member.plans[primitive, dtype, op]
            implementation = plan.implementation
        if implementation is not None and primitive.input:
            fast_view = fast_views.get(input.__class__)
            seen = None if fast_view is None else fast_view(input)
            input_dtype, send, sent = seen or _NO_VIEW
            n = member.size()
            blocks_in = n if primitive.many_in else 1
            blocks_out = n if primitive.many_out else 1
            block = sent // blocks_in
            address = sys.modules["mpi4py.MPI"].Get_address  # MPI is loaded: there is a plan
            if (
                input_dtype is not dtype
                or sent != block * blocks_in
                or count != block * blocks_out
                or -sent * dtype.itemsize < address(send) - address(recv) < count * dtype.itemsize
                or not (primitive.even or (len(output) % n == 0 and len(input) % n == 0))
            ):
                implementation = None
            count = block
    except (KeyError, TypeError, AttributeError):
        implementation = None  # no plan yet, an unhashable op, no group, or a 0-d array
    if implementation is None or (member.worker is not None and member.busy()):
        return run(primitive, group, async_op, output, input, op, root)
    sizes = count if plan.even else 0
    if not plan.fast_path_registered:
        _register_fast_path(plan, op)
    perform(plan, sizes, root, implementation.run, send, recv, count)
    return None


_NO_VIEW = None, None, 0


def _register_fast_path(plan: Plan, op: ReduceOp | None) -> None:
    """Register the native calls of a plan with its group, unless its next call compares the ranks'
    records, as each of its first calls does. op: as the caller passed it, part of the key.
    """
    if plan.group.sequence + 1 >= plan.group.next_check or not isinstance(op, Hashable):
        return
    primitive, native_calls = plan.primitive, plan.implementation.native_calls()
    plan.fast_path_registered = native_calls is not None
    new = [call for call in native_calls or () if call not in plan.native_calls]
    plan.native_calls += new
    for call in new:
        plan.group.register_fast_path(
            primitive, plan.dtype, op, call.owner, plan.kind, call.min_count, call.end_count,
            plan.group.size(), plan.group.rank(), call.function, call.argument, call.shape,
            primitive.many_in, primitive.many_out, primitive.listed, bool(primitive.input),
            plan.even, bool(primitive.root), parts_per_element(plan.kind), *call.inline_check,
        )  # fmt: skip
    if plan.group.error is not None:  # it may have failed meanwhile; native calls do not check
        plan.group.forget_fast_paths()


def _finish(
    group: ProcessGroup, owner: Any, result: int, primitive: Primitive, output: Any, input: Any,
    root: int,
) -> None:  # fmt: skip
    """Complete a native call whose function returned another result than 1, or raise its error; see
    NativeCall. The caller holds the group's lock. All ranks take part, also one whose arrays have
    become invalid.
    """
    send = recv = None
    extent: Any = 0
    try:
        if root == LIST:
            with contextlib.suppress(MpicollError):  # the sizes are only for the message
                encode_list(fusing.Entries("", primitive, group, output, input, True).counts)
        else:
            with contextlib.suppress(*() if result else (MpicollError,)):
                send, recv, extent = checks.build_views(primitive, group, output, input, root, None)
        owner.finish(result, packing.buffers_of(send), packing.buffers_of(recv), extent)
    except MpicollError as error:
        _to_raised(error, primitive.name, primitive.even, group)
        raise
    except Exception as error:
        raise _to_raised(error, primitive.name, primitive.even, group) from error


def _finished_work(
    group: ProcessGroup, primitive: Primitive, output: Any, error: BaseException | None
) -> Work:
    """Return the Work of an async call that ran natively."""
    outputs = _as_output_list(output)
    return Work(describe(primitive.name, group), outputs, group.timeout, finished=True, error=error)


def _run_all(
    name: str,
    primitive: Primitive,
    group: ProcessGroup | None,
    async_op: bool,
    outputs: Sequence[Arrays],
    inputs: Sequence[Arrays] | None,
    op: ReduceOp | None,
) -> Work | None:
    """Check a collective call on each output and its input, then run all of them as one Work.

    name:   the public function, for messages.
    inputs: one per output; None for calls in place. See ``run`` for the other arguments, and
            ``fusing`` for which calls run as one. The ranks compare the list as a whole.

    Raises UnsupportedError if dtypes or devices differ in the list.
    """
    member = resolve_or_warn(group, name)
    if member is None:
        return None
    outputs = list(outputs)  # the caller may change its list
    waits = not async_op and not member.busy()
    entries = fusing.Entries(name, primitive, member, outputs, inputs, held=waits)
    plan = _plan(primitive, member, op, entries.dtype, entries.on_device)
    calls = entries.packed() if plan.on_device else []
    ordered = [packing.in_stream_order(plan, send, recv) for send, recv, _ in calls]
    if not (plan.on_device or plan.fast_path_registered):
        _register_fast_path(plan, op)

    def execute(*unused: object) -> None:
        # All ranks must fuse the same calls, so the list is compared if it has not just been.
        if not member.compared and len(member.recent) > 1:
            group_failure.check(member)
        if not plan.on_device:
            entries.run(plan)
        for (run_call, _), (send, recv, extent) in zip(ordered, calls, strict=True):
            member.sequence += 1
            run_call(send, recv, extent, 0)

    call = _Call(plan, encode_list(entries.counts), LIST, execute, None, None, None)
    if waits:
        perform(*call)
        return None
    return _start(call, async_op, name, outputs, [order for _, own in ordered for order in own])


def _find_root(
    name: str,
    group: ProcessGroup | None,
    argument: str,
    global_rank: int | None,
    group_rank: int | None,
    default: int | None,
) -> int:
    """Return the root's rank in the group, given as a global or as a group rank.

    default: the global rank if neither is given; None if one must be.
    Raises ArgumentTypeError (a TypeError) for a rank that is not an int, and ArgumentError (a
    ValueError) if both or neither are given, or the rank is not in the group. A rank outside the
    group can only pass a group rank, as in torch.
    """
    member = resolve(group)
    if group_rank is not None:
        if global_rank is not None:
            raise ArgumentError(f"{name}: give {argument} or group_{argument}, not both")
        where = f"{name}: group_{argument}"
        if member is None:
            return check_index(group_rank, where)
        return check_group_rank(member, group_rank, where)
    if global_rank is None:
        if default is None:
            raise ArgumentError(f"{name}: one of {argument} and group_{argument} must be given")
        global_rank = default
    global_rank = check_index(global_rank, f"{name}: {argument}")
    found = None if member is None else member.group_rank(global_rank)
    if found is None:
        ranks = "a group that this rank is not in" if member is None else list(member.ranks)
        raise ArgumentError(
            f"{name}: {argument}: global rank {global_rank} is not in the group ({ranks})"
        )
    return found


#: Run a call as ``run`` does, or a list of calls as ``_run_all`` does: without Python if the group
#: has a native call for it (``kernels/src/calls.c``), else by ``_run_cached`` or ``_run_all``.
run_fast, run_all, find_root = bind_fast_path(
    _run_cached, _run_all, _find_root, state, ProcessGroup,
    run_later=partial(run, may_inline=False), finish=_finish, finished=_finished_work,
)  # fmt: skip


def perform(
    call: Plan | Task, sizes: int, root: int, execute: Run, send: object, recv: object, extent: Any,
    scheduled: int = 0,
) -> None:  # fmt: skip
    """Run a collective. Every collective that is not native runs here: record the call, compare the
    record with the other ranks if due, then call ``execute(send, recv, extent, root)``.

    sizes, root: of the call's signature; see mpicoll.core.signature.
    scheduled:   id of the call in the flight record, if it was recorded when queued.

    Returns when this rank's part is done; on a device, when it is enqueued, and the streams of a
    synchronous call wait for it. Raises errors of MPI as MPIError.
    """
    group = call.group
    if not group.lock.acquire(False):  # a with statement takes three times as long
        group.check_outside(call.name)
        group.lock.acquire()
    try:
        if group.device_error is not None:
            group.check_device_errors()
        if group.begin(call.kind, sizes, root, scheduled):
            _check(group)
        elif group.agree is not None and (root == LIST or not call.compares):
            known = None if root == LIST else extent
            if call.implementation is not None and call.implementation.only_enqueues(known):
                consistency.agree_later(group, call.kind, sizes, root)
            else:
                group.agree(with_root(call.kind, root), sizes)
        execute(send, recv, extent, root)
        group.complete()
    except MpicollError as error:
        _to_raised(error, call.name, call.even, group)
        raise
    except Exception as error:
        raise _to_raised(error, call.name, call.even, group) from error
    finally:
        group.end()


def _to_raised(error: Exception, name: str, even: bool, group: ProcessGroup) -> Exception:
    """Return the exception to raise in place of an exception in a call. After an error of MPI, the
    group fails. (No frame of the traceback keeps a reference to the exception.)

    even: see ``Plan``. The caller holds the group's lock.
    """
    found = error
    if not isinstance(error, MpicollError):
        found = to_mpi_error(error, name, group)
        if isinstance(found, MPIError):
            found = group_failure.fail_after_mpi_error(group, found)
    # Remove the call from the record if it failed because the ranks' calls differ, which was
    # reported. A call that failed on this rank alone stays: the other ranks have made it.
    if even and isinstance(error, (MismatchError, MPIError, sys.modules["mpi4py.MPI"].Exception)):
        consistency.drop_last_call(group)
    flight_record.record_error(found, group)
    if isinstance(found, (MismatchError, MPIError)):
        group.expects_messages = True
    return found


def _check(group: ProcessGroup) -> None:
    """Compare the group's recorded calls with the other ranks at the same call number."""
    if group.error is not None:  # before all ranks make shared memory
        raise group.failure()
    if group.sequence >= consistency.FIRST:
        from mpicoll.routes import select  # loads MPI, which importing this module must not

        select.share_memory(group)
    group_failure.check(group)


def _plan(
    primitive: Primitive,
    group: ProcessGroup,
    op: ReduceOp | None,
    dtype: Any,  # a DType; None for a barrier
    on_device: bool,
) -> Plan:
    """Return the plan of a kind of call; the first call makes it."""
    key: tuple[Any, ...] = (primitive, dtype, op)  # as in _run_cached
    if on_device:
        key = (*key, "device")
    try:
        known: Plan | None = group.plans.get(key)
    except TypeError:  # an unhashable op, such as one of mpi4py
        row = checks.find_operation(op, f"{primitive.name}: op")
        return _plan(primitive, group, row, dtype, on_device)
    if known is not None:
        return known
    from mpicoll.routes import select  # loads MPI, which importing this module must not

    group.check_open()
    found = None
    if primitive.reduces:
        found = checks.check_operation(primitive, op, dtype)
    # Ranks may name the same op differently; they must choose its implementation together once.
    by_row = (primitive, dtype, found, *key[3:])
    known = group.plans.get(by_row)
    kind = CallKind(primitive, group, found, dtype)
    implementation = select.choose(kind, on_device) if known is None else known.implementation
    plan = Plan(kind, on_device, implementation, packing.on_views(kind, implementation, on_device))
    if found is None or found.factor is None:  # every PREMUL_SUM(factor) is a new object
        group.plans[key] = plan
        group.plans.setdefault(by_row, plan)
    return plan


def to_mpi_error(error: Exception, name: str, group: ProcessGroup) -> Exception:
    """Convert an exception of MPI as ``wire.translate_error`` does; return others unchanged."""
    from mpicoll.routes.wire import translate_error

    return translate_error(error, name, group)


def describe(name: str, group: ProcessGroup) -> str:
    """Return the description of a Work for messages."""
    return f"{name} {group.place}"


def submit(
    group: ProcessGroup,
    task: Callable[[], None],
    name: str,
    outputs: Sequence[Any],
    inline: bool = False,
    orders: Sequence[StreamOrder] = (),
) -> Work:
    """Queue a task on the group's progress thread, or run it now if ``inline``; return its Work."""
    group.check_outside(name)
    expire = partial(group_failure.fail_late_call, group)
    work = Work(describe(name, group), outputs, group.timeout, orders, expire)

    def run_task(catches: type[BaseException] = BaseException) -> None:
        error: BaseException | None = None
        try:
            task()
        except catches as caught:
            error = caught
        group.pending.discard(work)
        # Calls of callbacks run right after the task, before calls queued behind it.
        work.finish(error)

    if inline or (group.worker is not None and group.worker.is_current):
        # A callback of an earlier Work, on the progress thread, runs its calls right away.
        run_task(Exception)  # Ctrl-C is for the program
        return work
    group.pending.add(work)
    work.worker = group.give(run_task)
    return work


def run_in_order(
    group: ProcessGroup,
    name: str,
    task: Callable[[], Any],
    root: int | None = None,
    *,
    everybody: bool = True,
    keeps_time: bool = False,
) -> Any:
    """Run ``task()``, which uses the group's communicator, in the order of its collectives.

    root: given if the ranks' calls are to be compared: the root's rank, or -1 without a root.
    everybody:  all ranks call, maybe with different arguments.
    keeps_time: the task checks its own timeout, and may fail on some ranks only.
    Returns the result of the task.
    """
    group.check_whole()
    result: list[Any] = []

    def execute(*_: object) -> None:
        result.append(task())

    if root is None:
        if everybody and not keeps_time:
            group.formed += 1
        whole = partial(_perform_uncompared, group, name, execute, keeps_time)
    else:
        kind, sizes = encode_task(name)
        whole = partial(perform, Task(group, name, kind), sizes, root, execute, None, None, None)
    if group.busy():
        submit(group, whole, name, ()).wait()
    else:
        whole()
    return result[0]


def _perform_uncompared(
    group: ProcessGroup, name: str, task: Callable[[], None], keeps_time: bool
) -> None:
    """Run a task that is not compared: only some members call, or it checks its own timeout."""
    group.check_outside(name)
    try:
        with group.lock:
            group.task = RunningTask(name, get_ident(), keeps_time)
            try:
                if keeps_time:  # else not in the flight record, whose positions all ranks share
                    group.begin_uncompared(*encode_task(name), -1)
                task()
                if keeps_time:
                    group.complete()
            finally:
                group.task = NO_TASK
    except MpicollError as error:
        flight_record.record_error(error, group)
        raise
    except Exception as error:
        raise to_mpi_error(error, name, group) from error


def resolve_or_warn(group: object, name: str) -> ProcessGroup | None:
    """Return the group of an argument. On a rank outside it, warn as torch does; return None."""
    member = resolve(group)
    if member is None:
        rank = default_group().rank()
        warn(f"{name}: global rank {rank} is not in the group it was called with; nothing is done")
    return member
