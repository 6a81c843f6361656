"""The one way of every call: from checked arguments to its route and, if asked for, its Work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

from mpicoll.arrays.adapters import fast_views
from mpicoll.arrays.protocols import Arrays
from mpicoll.arrays.views import View
from mpicoll.core import checks
from mpicoll.core.groups import ProcessGroup, default_group, resolve, state
from mpicoll.core.indices import check_index
from mpicoll.core.plan import CallKind, Plan, Task, agreed_sizes, find_short, only_enqueues
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
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import (
    ArgumentError,
    MismatchError,
    MpicollError,
    MPIError,
)
from mpicoll.failures import consistency, flight_record, timeouts
from mpicoll.failures.group_failure import fail_all_ranks
from mpicoll.kernels.calls import Ways, short_ways
from mpicoll.output import format_count, warn
from mpicoll.primitives import Primitive

__all__ = ["find_root", "run", "run_all", "run_fast", "run_in_order", "submit", "warn_outside"]


def run(
    primitive: Primitive,
    group: ProcessGroup | None,
    async_op: bool,
    output: Arrays = None,
    input: Arrays = None,
    op: ReduceOp | None = None,
    root: int = 0,
    splits: checks.Splits | None = None,
    at_once: bool = True,
) -> Work | None:
    """Check a collective call and carry it out.

    output, input: the caller's arrays; root: a rank in the group; at_once: if ``async_op``, on this
    thread where that is best.
    Returns a Work if ``async_op``, else None once the result is there: on a device, for what the
    current stream gets from then on.
    """
    member: Any = state.default if group is None else group
    if member.__class__ is not ProcessGroup:
        member = resolve(group)
        if member is None:
            warn_outside(primitive.name)
            return None
    send, recv, extent = checks.build_views(primitive, member, output, input, root, splits)
    first = send if recv is None else recv
    if first is None:
        plan = _plan(primitive, member, op, None, False)
    else:
        plan = _plan(primitive, member, op, first.dtype, first.device is not None)
    carry, orders = _placed(plan, send, recv)
    sizes = encode_sizes(agreed_sizes(primitive, extent))
    waits = not async_op and not member.busy()
    if (
        (first is None or (primitive.listed and not plan.on_device))
        and member.compared
        and not plan.learnt
        and isinstance(op, Hashable)  # by which calls are known
    ):
        _teach(plan, op)
    return _dispatch(
        plan, async_op, waits, output, sizes, root, carry, send, recv, extent, orders, at_once
    )


def _placed(
    plan: Plan, send: View | None, recv: View | None
) -> tuple[Carry, Sequence[StreamOrder]]:
    """Return the implementation: on a device, in its place in the caller's stream order."""
    if not plan.on_device:
        return plan.run, ()
    order = packing.stream_order(plan, send, recv)
    return partial(packing.in_stream_order, plan, order), (order,)


def _dispatch(
    plan: Plan,
    async_op: bool,
    waits: bool,
    output: object,
    sizes: int,
    root: int,
    carry: Carry,
    send: object,
    recv: object,
    how: object,
    orders: Sequence[StreamOrder] = (),
    at_once: bool = True,
    name: str = "",
) -> Work | None:
    """Perform a call now if the caller waits for it and nothing is pending, else as a Work.

    A Work goes to the group's thread, behind what is pending there, or, if the plan says that this
    is best, is carried out at once. waits: it is performed now. name: of the operation, if it is
    not the primitive's.
    """
    group = plan.group
    if waits:
        perform(plan, sizes, root, carry, send, recv, how)
        return None
    for order in orders:
        order.asynchronous = True  # the streams that will use the result are not known yet
    at_once = at_once and async_op and _should_run_inline(plan, root, sizes, how)
    scheduled = group.schedule(plan.kind, sizes, root)
    task = partial(perform, plan, sizes, root, carry, send, recv, how, scheduled)
    work = submit(group, task, name or plan.name, _written(output), at_once, orders)
    if async_op:
        return work
    work.wait()
    return None


def _written(output: Any) -> Sequence[Any]:
    """Return the arrays that a call fills, of its argument."""
    return () if output is None else output if isinstance(output, (list, tuple)) else (output,)


def _should_run_inline(plan: Plan, root: int, sizes: int, how: Any) -> bool:
    """Return whether an asynchronous call, or a list of them, is best carried out at once: nothing
    is pending, and either it only puts work into streams, or the ranks are all here, as the memory
    that they share shows.
    """
    group = plan.group
    if plan.dtype is None or group.busy() or (group.worker is not None and group.worker.is_current):
        return False  # the last is a callback, whose calls are carried out at once anyhow
    if plan.on_device:
        meets = consistency.is_due(group) or (root == LIST and not group.compared)
        return only_enqueues(plan.route, None if root == LIST else how) and not meets
    shared = group.resources.find("shared")
    return bool(shared and shared.should_run_inline(with_root(plan.kind, root), sizes))


def _run_fast(
    primitive: Primitive,
    group: ProcessGroup | None,
    async_op: bool,
    output: Any,
    input: Any,
    op: ReduceOp | None,
    root: int,
) -> Work | None:
    """Carry out a call as ``run`` does, with little Python if nothing about it is unusual.

    For primitives in place, and those of one input and one output. The group has made such a call
    before, nothing is pending, and a fast view shows each array to be one block of memory.
    Everything else, errors too, goes by ``run``. The group learns how such calls are carried out
    without Python, where they can be.
    """
    member: Any = state.default if group is None else group
    send = route = None
    fast_view = None if primitive.listed else fast_views.get(output.__class__)
    seen = None if fast_view is None else fast_view(output)
    try:
        if seen is not None:
            dtype, recv, count = seen
            plan = member.plans[primitive, dtype, op]
            route = plan.route
        if route is not None and primitive.input:
            fast_view = fast_views.get(input.__class__)
            seen = None if fast_view is None else fast_view(input)
            other, send, sent = seen or _NOTHING_SEEN
            n = member.size()
            blocks_in = n if primitive.many_in else 1
            blocks_out = n if primitive.many_out else 1
            block = sent // blocks_in
            address = sys.modules["mpi4py.MPI"].Get_address  # MPI is loaded: there is a plan
            if (
                other is not dtype
                or sent != block * blocks_in
                or count != block * blocks_out
                or -sent * dtype.itemsize < address(send) - address(recv) < count * dtype.itemsize
                or not (primitive.even or (len(output) % n == 0 and len(input) % n == 0))
            ):
                route = None
            count = block
    except (KeyError, TypeError, AttributeError):
        route = None  # the first call of its kind, an op without a hash, no group, no dimension
    if route is None or (member.worker is not None and member.busy()):
        return run(primitive, group, async_op, output, input, op, root)
    sizes = count if plan.even else 0
    if not plan.learnt and member.compared:
        _teach(plan, op)
    if not async_op:
        perform(plan, sizes, root, route, send, recv, count)
        return None
    if not _should_run_inline(
        plan, root, sizes, count
    ):  # a fast view does not hold the memory of the arrays
        return run(primitive, group, async_op, output, input, op, root, at_once=False)
    task = partial(perform, plan, sizes, root, route, send, recv, count)
    return submit(member, task, plan.name, (output,), True)


_NOTHING_SEEN = None, None, 0


def _teach(plan: Plan, op: ReduceOp | None) -> None:
    """Let the plan's group carry out such calls without Python; op: as callers give it."""
    if plan.group.error is not None:
        return
    primitive, ways = plan.primitive, find_short(plan.route)
    plan.learnt = ways is not None
    for short in ways or ():
        plan.group.learn(
            primitive, plan.dtype, op, short.owner, plan.kind, short.fewest, short.end,
            plan.group.size(), plan.group.rank(), short.function, short.argument, short.shape,
            primitive.many_in, primitive.many_out, primitive.listed, bool(primitive.input),
            plan.even, bool(primitive.root), parts_per_element(plan.kind), *short.ask,
        )  # fmt: skip


def _finish(
    group: ProcessGroup, owner: Any, result: int, primitive: Primitive, output: Any, input: Any,
    root: int,
) -> None:  # fmt: skip
    """End a call that was begun without Python, see ``Short``, or raise why it failed; with the
    group's lock held. A rank whose arrays are no more takes part in that with the others, too.
    """
    send = recv = None
    extent: Any = 0
    try:
        if root == LIST:
            with contextlib.suppress(MpicollError):  # for the message
                encode_list(fusing.Entries("", primitive, group, output, input, True).counts)
        else:
            with contextlib.suppress(*() if result else (MpicollError,)):
                send, recv, extent = checks.build_views(primitive, group, output, input, root, None)
        owner.finish(result, packing.buffers_of(send), packing.buffers_of(recv), extent)
    except MpicollError as error:
        flight_record.dump_after(error, group)
        raise
    except Exception as error:
        raise _explained(error, primitive.name, group) from error


def _run_later(
    primitive: Primitive,
    group: ProcessGroup | None,
    async_op: bool,
    output: Any,
    input: Any,
    op: ReduceOp | None,
    root: int,
) -> Work | None:
    """Carry out an asynchronous call that is not best carried out at once."""
    return run(primitive, group, async_op, output, input, op, root, at_once=False)


def _finished(
    group: ProcessGroup, primitive: Primitive, output: Any, error: BaseException | None
) -> Work:
    """Return the Work of an asynchronous call that was carried out without Python."""
    outputs = _written(output)
    work = Work(_describe(primitive.name, group), outputs, group.timeout)
    work.finish(error)
    return work


def _run_all(
    name: str,
    primitive: Primitive,
    group: ProcessGroup | None,
    async_op: bool,
    outputs: Sequence[Arrays],
    inputs: Sequence[Arrays] | None,
    op: ReduceOp | None,
) -> Work | None:
    """Check a collective call on each output and its input, then carry all out as one Work.

    inputs: as many as outputs; None for calls in place. They are made together, see ``fusing``; the
            list is compared with the other ranks'. The rest is as in ``run``.
            Raises UnsupportedError if dtypes or devices differ in the list.
    """
    member = resolve(group)
    if member is None:
        warn_outside(name)
        return None
    outputs = list(outputs)  # a caller may change its list
    waits = not async_op and not member.busy()
    entries = fusing.Entries(name, primitive, member, outputs, inputs, held=waits)
    plan = _plan(primitive, member, op, entries.dtype, entries.on_device)
    orders: list[StreamOrder] = []
    task: Callable[[], None] = partial(entries.carry_out, plan)
    if plan.on_device:
        task, orders = _placed_all(plan, entries.packed())
    elif member.compared and not plan.learnt and isinstance(op, Hashable):
        _teach(plan, op)
    return _dispatch(
        plan, async_op, waits, outputs, encode_list(entries.counts), LIST, _carry_out_all, None,
        None, (member, task), orders, name=name,
    )  # fmt: skip


def _placed_all(
    plan: Plan, calls: Sequence[checks.Views]
) -> tuple[Callable[[], None], list[StreamOrder]]:
    """Return what carries out calls on a device, each in its place in the caller's stream order."""
    placed = [_placed(plan, send, recv) for send, recv, _ in calls]

    def carry_out() -> None:
        for (carry, _), (send, recv, extent) in zip(placed, calls, strict=True):
            plan.group.sequence += 1
            carry(send, recv, extent, 0)

    return carry_out, [order for _, some in placed for order in some]


def _carry_out_all(
    send: None, recv: None, how: tuple[ProcessGroup, Callable[[], None]], root: int
) -> None:
    """Carry a list of calls out, after comparing the whole list with the other ranks': what is made
    together must be the same on all.
    """
    group, task = how
    if not group.compared and len(group.recent) > 1:  # it has not just been compared
        timeouts.check(group)
    task()


#: Carries a call out: ``run_fast(primitive, group, async_op, output, input, op, root)``, and a list
#: of calls: ``run_all(name, primitive, group, async_op, outputs, inputs, op)``; without Python
#: where the group has learnt how, and as ``_run_fast`` and ``_run_all`` do.
run_fast, run_all = short_ways(
    Ways(_run_fast, _run_later, _run_all, _finish, _finished), state, ProcessGroup
)


#: Carries out a call that is counted and compared, with the group's lock held. Takes what is sent,
#: what is received, the extent or whatever else the function needs, and the root.
Carry = Callable[[Any, Any, Any, int], None]


def perform(
    call: Plan | Task, sizes: int, root: int, carry: Carry, send: object, recv: object, how: Any,
    scheduled: int = 0,
) -> None:  # fmt: skip
    """Carry out a collective, in the one place where that happens: put it on the group's record,
    compare it with the other ranks' when that is due, and call ``carry(send, recv, how, root)``.

    sizes, root: of its signature; see mpicoll.core.signature. scheduled: its id in the group's
    history, if it is there already.

    Returns when this rank's part is done; on a device, when it is in streams, and those that a
    synchronous call was made in wait for it. Errors of MPI are raised as MPIError.
    """
    group = call.group
    if not group.lock.acquire(False):  # a with statement would take three times as long
        group.check_outside(call.name)
        group.lock.acquire()
    try:
        if group.device_error is not None:
            group.check_device_errors()
        if group.begin(call.kind, sizes, root, scheduled):
            _check(group)
        elif group.agree is not None and (root == LIST or not call.compares):
            if only_enqueues(call.route, None if root == LIST else how):
                consistency.agree_later(group, call.kind, sizes, root)
            else:
                group.agree(with_root(call.kind, root), sizes)
        carry(send, recv, how, root)
        group.complete()
    except Exception as error:
        if isinstance(error, MpicollError):
            _look_at(error, call)
            flight_record.dump_after(error, group)
            raise
        told = timeouts.compare_after(_explained(error, call.name, group), group)
        _look_at(error, call)
        flight_record.dump_after(told, group)
        if isinstance(told, MismatchError):
            fail_all_ranks(group, told)
        raise told from error
    finally:
        group.end()


def _check(group: ProcessGroup) -> None:
    """Compare the group's latest calls with the other ranks'; all are in a call of that number."""
    if group.error is not None:  # before this makes memory, with the others
        raise group.failure()
    if group.sequence >= consistency.FIRST:
        from mpicoll.routes import select  # loads MPI, which importing this module must not

        select.share_memory(group)
    timeouts.check(group)


def _look_at(error: Exception, call: Plan | Task) -> None:
    """Take a call off the record if it failed because the ranks' records differ: that was reported.
    One that failed for a reason of this rank's stays, for the others have made the same.
    """
    differs = MismatchError, MPIError, sys.modules["mpi4py.MPI"].Exception
    if call.even and isinstance(error, differs):
        consistency.drop_last_call(call.group)


def _plan(
    primitive: Primitive,
    group: ProcessGroup,
    op: ReduceOp | None,
    dtype: DType | None,
    on_device: bool,
) -> Plan:
    """Return the plan for calls of this kind, made when the first one comes."""
    key: tuple[Any, ...] = (primitive, dtype, op)  # as run_fast has it
    if on_device:
        key = (*key, "device")
    try:
        known: Plan | None = group.plans.get(key)
    except TypeError:  # an operation without a hash, as mpi4py's are
        row = checks.find_operation(op, f"{primitive.name}: op")
        return _plan(primitive, group, row, dtype, on_device)
    if known is not None:
        return known
    from mpicoll.routes import select  # loads MPI, which importing this module must not

    group.check_open()
    meant = None
    if primitive.reduces:
        assert dtype is not None
        meant = checks.check_operation(primitive, op, dtype)
    # Ranks may give the same operation by other names: what is chosen with other ranks is one.
    by_row = (primitive, dtype, meant, *key[3:])
    known = group.plans.get(by_row)
    kind = CallKind(primitive, group, meant, dtype)
    route = select.choose(kind, on_device) if known is None else known.route
    plan = Plan(kind, on_device, route, packing.on_views(kind, route, on_device))
    if meant is None or meant.factor is None:  # every PREMUL_SUM(factor) is a new object
        group.plans[key] = plan
        group.plans.setdefault(by_row, plan)
    return plan


def _explained(error: Exception, name: str, group: ProcessGroup) -> Exception:
    from mpicoll.routes.wire import translate_error

    return translate_error(error, name, group)


def _describe(name: str, group: ProcessGroup) -> str:
    """Return what a Work is called in messages."""
    return f"{name} on rank {group.rank()} of group {group.group_name}"


def submit(
    group: ProcessGroup,
    task: Callable[[], None],
    name: str,
    outputs: Sequence[Any],
    at_once: bool = False,
    orders: Sequence[StreamOrder] = (),
) -> Work:
    """Give a task to the group's thread, behind what is pending there; ``at_once``: run it."""
    group.check_outside(name)
    expire = partial(timeouts.fail_late_call, group)
    work = Work(_describe(name, group), outputs, group.timeout, orders, expire)
    if at_once or (group.worker is not None and group.worker.is_current):
        # The latter is a callback of an earlier work: right behind that work, not behind itself.
        try:
            task()
        except Exception as caught:  # Ctrl-C is for the program
            work.finish(caught)
        else:
            work.finish()
        return work

    def carry() -> None:
        error: BaseException | None = None
        try:
            task()
        except BaseException as caught:
            error = caught
        group.pending.discard(work)
        # What callbacks call comes right behind the task, before what callers queue behind it.
        work.finish(error)

    group.pending.add(work)
    work.worker = group.give(carry)
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

    root: given if all members call: the call is compared with the other ranks', like those of
          primitives (-1 if there is no root). everybody: all members call, if not with the same
          arguments. keeps_time: the task watches its own timeout, and may fail on some ranks alone.
    Returns what the task returns.
    """
    group.check_whole()
    result: list[Any] = []

    def carry(send: object = None, recv: object = None, how: object = None, root: int = 0) -> None:
        group.keeps_time = keeps_time
        try:
            result.append(task())
        finally:
            group.keeps_time = False

    kind, sizes = encode_task(name)
    if root is None:
        if everybody and not keeps_time:
            group.formed += 1
        # Groups are made by their members alone, and calls in the history have the same places.
        logged = (kind, sizes, -1) if keeps_time else None
        whole = partial(_perform_unrecorded, group, name, carry, logged)
    else:
        whole = partial(perform, Task(group, name, kind), sizes, root, carry, None, None, None)
    if group.busy():
        submit(group, whole, name, ()).wait()
    else:
        whole()
    return result[0]


def _perform_unrecorded(
    group: ProcessGroup, name: str, carry: Callable[[], None], logged: tuple[int, int, int] | None
) -> None:
    """Perform a call that only some members make, or that keeps its own time: the ranks' records
    need not be alike.

    logged: kind, sizes and root for the group's history; None: only some make it.
    """
    group.check_outside(name)
    try:
        with group.lock:
            group.doing_on, group.doing = get_ident(), name  # others look whether something is done
            try:
                if logged is not None:
                    group.begin_uncompared(*logged)
                carry()
                if logged is not None:
                    group.complete()
            finally:
                group.doing = ""
    except MpicollError as error:
        flight_record.dump_after(error, group)
        raise
    except Exception as error:
        raise _explained(error, name, group) from error


state.run_in_order = run_in_order


def warn_outside(name: str) -> None:
    """Warn, as torch does, that a rank outside the group made the call."""
    rank = default_group().rank()
    warn(f"{name}: global rank {rank} is not in the group it was called with; nothing is done")


def find_root(
    name: str,
    group: ProcessGroup | None,
    argument: str,
    global_rank: int | None,
    group_rank: int | None,
    default: int | None = None,
) -> int:
    """Return the root's rank in the group, given as a global or as a group rank.

    default: the global rank if neither is given; None if one must be.
    Raises ArgumentTypeError (a TypeError) for a rank that is not an int, ArgumentError (a
    ValueError) for both, for none, and for a rank outside the group. On a rank that is itself
    outside, only a rank in the group can be given, as in torch.
    """
    member = resolve(group)
    if group_rank is not None:
        if global_rank is not None:
            raise ArgumentError(f"{name}: give {argument} or group_{argument}, not both")
        group_rank = check_index(group_rank, f"{name}: group_{argument}")
        if member is not None and not 0 <= group_rank < member.size():
            raise ArgumentError(
                f"{name}: group_{argument}: rank {group_rank} is not in the group of "
                f"{format_count(member.size(), 'rank')}"
            )
        return group_rank
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
