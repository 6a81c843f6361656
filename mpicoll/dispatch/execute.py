"""The one way of every call: from checked arguments to its route and, if asked for, its Work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mpicoll.arrays import views
from mpicoll.arrays.libraries import glances
from mpicoll.arrays.views import DeviceView, Parts, View
from mpicoll.core import calls
from mpicoll.core.calls import Blocks, Plan, Task
from mpicoll.core.groups import ProcessGroup, default_group, resolve, state
from mpicoll.core.signature import LIST, list_of, number_of, task_of
from mpicoll.core.work import Work
from mpicoll.cuda import device
from mpicoll.cuda.device import Crossing
from mpicoll.dispatch import fusing
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import (
    ArgumentError,
    MismatchError,
    MpicollError,
    MPIError,
    UnsupportedError,
)
from mpicoll.output import warn
from mpicoll.primitives import Layout, Primitive
from mpicoll.watch import consistency

__all__ = ["in_order", "outside", "rooted", "run", "run_all", "run_plain", "submit"]


def run(
    primitive: Primitive,
    group: Any,
    async_op: bool,
    output: Any = None,
    input: Any = None,
    op: ReduceOp | None = None,
    root: int = 0,
    splits: calls.Splits | None = None,
    at_once: bool = True,
) -> Work | None:
    """Checks a collective call and carries it out.

    output, input: the caller's arrays; root: a rank in the group; at_once: if ``async_op``, on this
    thread where that is best.
    Returns a Work if ``async_op``, else None once the result is there: on a device, for what the
    current stream gets from then on. A Work is done when the result is there for everybody.
    """
    member = state.default if group is None else group
    if member.__class__ is not ProcessGroup:
        member = resolve(group)
        if member is None:
            outside(primitive.name)
            return None
    send, recv, blocks = calls.views(primitive, member, output, input, root, splits)
    first = send if recv is None else recv
    if first is None:
        plan = _plan(primitive, member, op, None, False)
    else:
        plan = _plan(primitive, member, op, first.dtype, first.device is not None)
    crossing = _crossing(plan, send, recv)
    sizes = number_of(calls.counts(primitive, send, recv, blocks))
    how = plan, crossing, blocks
    waits = not async_op and not member.busy()
    return _dispatch(
        plan, async_op, waits, output, sizes, root, _carry_out, send, recv, how, (crossing,),
        at_once,
    )  # fmt: skip


def _dispatch(
    plan: Plan,
    async_op: bool,
    waits: bool,
    output: Any,
    sizes: int,
    root: int,
    carry: Carry,
    send: Any,
    recv: Any,
    how: Any,
    crossings: Sequence[Crossing | None] = (),
    at_once: bool = True,
    name: str = "",
) -> Work | None:
    """Performs a call now where the caller waits for it and nothing is pending, else as a Work.

    A Work goes to the group's thread, behind what is pending there, or, where the plan says that
    this is best, is carried out at once. waits: it is performed now. name: of the operation, where
    it is not the primitive's.
    """
    group = plan.group
    if waits:
        perform(plan, sizes, root, carry, send, recv, how)
        return None
    for crossing in crossings:
        if crossing is not None:
            crossing.asynchronous = True  # the group's thread has no part in the caller's streams
    at_once = at_once and async_op and _is_prompt(plan, root, sizes)
    task = partial(perform, plan, sizes, root, carry, send, recv, how)
    written = () if output is None else output if isinstance(output, (list, tuple)) else (output,)
    work = submit(group, task, name or plan.name, written, at_once)
    if async_op:
        return work
    work.wait()
    return None


def _is_prompt(plan: Plan, root: int, sizes: int) -> bool:
    """An asynchronous call, or a list of them, is best carried out at once."""
    group = plan.group
    if (
        plan.prompt is None
        or group.busy()
        or (group.worker is not None and group.worker.is_current)
    ):
        return False  # the last is a callback, whose calls are carried out at once anyhow
    return plan.prompt(root, sizes)


def run_plain(
    primitive: Primitive,
    group: Any,
    async_op: bool,
    output: Any,
    input: Any = None,
    op: ReduceOp | None = None,
    root: int = 0,
) -> Work | None:
    """The same, and a short way where nothing about the call is unusual.

    For primitives in place, and those of one input and one output. The group has made such a call
    before, nothing is pending, and a glance shows each array to be one block of memory. Everything
    else, errors too, takes the way of all calls.
    """
    member: Any = state.default if group is None else group
    send = direct = None
    glance = glances.get(output.__class__)
    seen = None if glance is None else glance(output)
    try:
        if seen is not None:
            dtype, recv, count = seen
            plan = member.plans[primitive, dtype, op]
            direct = plan.direct
        if direct is not None and primitive.input:
            glance = glances.get(input.__class__)
            seen = None if glance is None else glance(input)
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
                direct = None
            count = block
    except (KeyError, TypeError, AttributeError):
        direct = None  # the first call of its kind, an op without a hash, no group, no dimension
    if direct is None or (member.worker is not None and member.busy()):
        return run(primitive, group, async_op, output, input, op, root)
    sizes = count if plan.even else 0
    if not async_op:
        perform(plan, sizes, root, direct, send, recv, count)
        return None
    if not _is_prompt(plan, root, sizes):  # a glance does not hold the memory of the arrays
        return run(primitive, group, async_op, output, input, op, root, at_once=False)
    task = partial(perform, plan, sizes, root, direct, send, recv, count)
    return submit(member, task, plan.name, (output,), True)


_NOTHING_SEEN = None, None, 0


def run_all(
    name: str,
    primitive: Primitive,
    group: Any,
    async_op: bool,
    outputs: Sequence[Any],
    inputs: Sequence[Any] | None = None,
    op: ReduceOp | None = None,
) -> Work | None:
    """Checks a collective call on each output and its input, then carries all out as one Work.

    inputs: as many as outputs; None for calls in place. Small ones are made together, see
    ``fusing``; the list is compared with the other ranks'. The rest is as ``run`` has it. Raises
    UnsupportedError where dtypes or devices differ in the list.
    """
    member = resolve(group)
    if member is None:
        outside(name)
        return None
    outputs = list(outputs)  # a caller may change his
    waits = not async_op and not member.busy()
    found = fusing.fused(name, primitive, member, outputs, inputs, held=waits)
    plan = _plan(primitive, member, op, found.dtype, found.on_device)
    ready = [
        (_crossing(plan, send, recv), send, recv, blocks) for send, recv, blocks in found.calls
    ]
    sizes = list_of(found.counts)
    how = plan, ready
    crossings = [crossing for crossing, *_ in ready]
    return _dispatch(
        plan, async_op, waits, outputs, sizes, LIST, _carry_out_all, None, None, how, crossings,
        name=name,
    )  # fmt: skip


def _carry_out_all(
    send: None, recv: None, how: tuple[Plan, Sequence[tuple[Any, ...]]], root: int
) -> None:
    """Carries a list of calls out, after comparing the whole list with the other ranks': what is
    fused must be the same on all.
    """
    plan, ready = how
    group = plan.group
    if len(group.recent) > 1:  # it has not been its turn just now
        consistency.check(group)
    for crossing, out, into, blocks in ready:
        group.sequence += 1
        _carry_out(out, into, (plan, crossing, blocks), 0)


#: Carries out a call that is counted and compared, with the group's lock held: what is sent, what
#: is received, what else the function wants to know, and the root.
Carry = Callable[[Any, Any, Any, int], None]


def perform(
    call: Plan | Task, sizes: int, root: int, carry: Carry, send: Any, recv: Any, how: Any
) -> None:
    """The one place where a collective happens: it is put on the group's record, compared with the
    other ranks' where it is its turn, and carried out by ``carry(send, recv, how, root)``.

    sizes, root: what its signature has of them; see mpicoll.core.signature.

    Returns when this rank's part is done; on a device, when the streams that it was called in wait
    for it, or, asynchronous, when it is. Errors of MPI are raised as MPIError.
    """
    group = call.group
    group.lock.acquire()  # a with statement would take three times as long
    try:
        group.sequence = sequence = group.sequence + 1
        group.recent.append((sequence, call.kind, sizes, root))
        if sequence >= group.next_check:
            consistency.check(group)
        carry(send, recv, how, root)
    except Exception as error:
        _look_at(error, call)
        if isinstance(error, MpicollError):
            raise
        raise _explained(error, call.name, group) from error
    finally:
        group.lock.release()


def _look_at(error: Exception, call: Plan | Task) -> None:
    """A call that failed because the ranks' records of it differ has been reported: it is taken off
    them. One that failed for a reason of this rank's stays, for the others have made the same.
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
    """The plan for calls of this kind, made when the first one comes."""
    key: tuple[Any, ...] = (primitive, dtype, op)  # as run_plain has it
    if on_device:
        key = (*key, "device")
    try:
        known: Plan | None = group.plans.get(key)
    except TypeError:  # an operation without a hash, as mpi4py's are
        row = calls.row_of(op, f"{primitive.name}: op")
        return _plan(primitive, group, row, dtype, on_device)
    if known is not None:
        return known
    from mpicoll import routes  # loads MPI, which importing this module must not

    group.check_open()
    meant = None
    if primitive.reduces:
        assert dtype is not None
        meant = calls.operation(primitive, op, dtype)
    way = (routes.devices if on_device else routes.hosts).choose(primitive, group, meant, dtype)
    plan = Plan(primitive, group, meant, dtype, on_device, way)
    if meant is None or meant.factor is None:  # every PREMUL_SUM(factor) is a new object
        group.plans[key] = plan
    return plan


def _crossing(plan: Plan, send: View | None, recv: View | None) -> Crossing | None:
    """The order of a call among what the caller's streams hold now; None on host memory."""
    if not plan.on_device:
        return None
    parts = [part for view in (send, recv) if view is not None for part in view.parts]
    streams = {part.stream for part in parts if isinstance(part, DeviceView)}
    assert parts[0].device is not None
    return Crossing(device.runtime(), parts[0].device, streams)


def _carry_out(
    send: View | None,
    recv: View | None,
    how: tuple[Plan, Crossing | None, Blocks | None],
    root: int,
) -> None:
    """Moves the bytes of a call whose plan, place among the streams, and blocks are known."""
    plan, crossing, blocks = how
    if crossing is not None:
        with _ordered(plan.group, crossing, send, recv):
            _perform_packed(plan, send, recv, root, blocks)
    elif plan.piece is not None and blocks is None:
        _perform_in_pieces(plan, send, recv, root, plan.piece)
    elif send is None and (recv is None or recv.buffer is not None):
        plan.route(None, recv, root, blocks)
    else:
        _perform_packed(plan, send, recv, root, blocks)


@contextmanager
def _ordered(
    group: ProcessGroup, crossing: Crossing, send: View | None, recv: View | None
) -> Iterator[None]:
    """In here views of a device have the lane that the call happens in."""
    lane = group.lane(crossing.index)
    for view in (send, recv):
        for part in () if view is None else view.parts:
            assert isinstance(part, DeviceView)
            part.lane = lane
    lane.begin()
    crossing.enter(lane)
    try:
        yield
    except (ArgumentError, UnsupportedError):
        raise  # refused: the lane's memory is used by its streams alone, in their order
    except BaseException:
        lane.leave_behind()
        raise
    finally:  # after an error, too: what was begun goes on for a while
        crossing.leave(lane)


def _perform_packed(
    plan: Plan, send: View | None, recv: View | None, root: int, blocks: Blocks | None
) -> None:
    """Carries out a call whose memory may be scattered, listed, or shared by both sides."""
    layout = plan.primitive.layout
    # Exchanges send and receive the arrays of a list one by one, where they are; not on a device.
    listed = layout is Layout.EXCHANGED and not plan.on_device
    if (
        send is not None
        and not (listed and isinstance(send, Parts))
        and (send.buffer is None or (recv is not None and views.overlap(send, recv)))
    ):
        send = send.packed()
    if recv is None or recv.buffer is not None or (listed and isinstance(recv, Parts)):
        plan.route(send, recv, root, blocks)
        return
    read = layout is Layout.IN_PLACE
    packed = recv.packed() if read else recv.blank()
    plan.route(send, packed, root, blocks)
    if not read or calls.writes(plan.primitive, plan.group, root):
        recv.fill(packed)


def _perform_in_pieces(
    plan: Plan, send: View | None, recv: View | None, root: int, step: int
) -> None:
    """The same of blocks that are alike, ``step`` elements of each at a time.

    Where this rank, or the root, has a list of arrays on the host, no more of it is packed at once.
    """
    count = min(view.count for view in (send, recv) if view is not None)
    if count <= step:
        _perform_packed(plan, send, recv, root, None)
        return
    if send is not None and recv is not None and _meet(send, recv):
        send = send.packed()  # a piece that is received would be sent on
        if plan.primitive.many_in:
            send = Parts(
                [send.part(r * count, count) for r in range(plan.group.size())], send.dtype
            )
    out = [one if one.buffer is not None else one.packed() for one in _parts(send)]
    into = [one if one.buffer is not None else one.blank() for one in _parts(recv)]
    for start in range(0, count, step):
        size = min(step, count - start)
        _perform_packed(plan, _cut(out, start, size), _cut(into, start, size), root, None)
    for one, filled in zip(_parts(recv), into, strict=True):
        if filled is not one:
            one.fill(filled)


def _parts(view: View | None) -> Sequence[View]:
    return () if view is None else view.parts


def _cut(parts: Sequence[View], start: int, count: int) -> View | None:
    """The same elements of each array, as the view of one array or of a list."""
    cut = [one.part(start, count) for one in parts]
    return None if not cut else cut[0] if len(cut) == 1 else Parts(cut, cut[0].dtype)


def _meet(send: View, recv: View) -> bool:
    """Memory of the two sides overlaps. Arrays that lie apart are copied before that matters."""
    out = [one for one in send.parts if one.buffer is not None]
    into = [one for one in recv.parts if one.buffer is not None]
    return any(views.overlapping(out, into))


def _explained(error: Exception, name: str, group: ProcessGroup) -> Exception:
    from mpicoll import routes

    return routes.explained(error, name, group)


def submit(
    group: ProcessGroup,
    task: Callable[[], None],
    name: str,
    outputs: Sequence[Any],
    at_once: bool = False,
) -> Work:
    """Gives a task to the group's thread, behind what is pending there; ``at_once``: runs it."""
    work = Work(
        f"{name} on rank {group.rank()} of group {group.group_name}", outputs, group.timeout
    )
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


def in_order(
    group: ProcessGroup,
    name: str,
    task: Callable[[], Any],
    root: int | None = None,
    *,
    everybody: bool = True,
    keeps_time: bool = False,
) -> Any:
    """Runs ``task()``, which uses the group's communicator, in the order of its collectives.

    root: given where all members call: the call is compared with the other ranks', like those of
    primitives (-1 where there is no root). everybody: all members call, if not with the same
    arguments. keeps_time: the task sees to its own timeout, and may fail on some ranks alone.
    Returns what the task returns.
    """
    group.check_open()
    result: list[Any] = []

    def carry(send: Any = None, recv: Any = None, how: Any = None, root: int = 0) -> None:
        group.keeps_time = keeps_time
        try:
            result.append(task())
        finally:
            group.keeps_time = False

    if root is None:
        if everybody and not keeps_time:
            group.formed += 1
        whole = partial(_perform_unrecorded, group, name, carry)
    else:
        kind, sizes = task_of(name)
        whole = partial(perform, Task(group, name, kind), sizes, root, carry, None, None, None)
    if group.busy():
        submit(group, whole, name, ()).wait()
    else:
        whole()
    return result[0]


def _perform_unrecorded(group: ProcessGroup, name: str, carry: Callable[[], None]) -> None:
    """The same of a call that some members alone make, or that keeps its own time: the ranks'
    records need not be alike.
    """
    try:
        with group.lock:
            carry()
    except MpicollError:
        raise
    except Exception as error:
        raise _explained(error, name, group) from error


state.in_order = in_order


def outside(name: str) -> None:
    """Warns, as torch does, that a rank outside the group made the call."""
    rank = default_group().rank()
    warn(f"{name}: global rank {rank} is not in the group it was called with; nothing is done")


def rooted(
    name: str,
    group: Any,
    argument: str,
    global_rank: int | None,
    group_rank: int | None,
    default: int | None = None,
) -> int:
    """The root's rank in the group, given as a global or as a group rank.

    default: the global rank where neither is given; None where one must be.
    Raises ArgumentError (a ValueError) for both, for none, and for a rank outside of the group.
    On a rank that is itself outside, only a rank in the group can be given, as in torch.
    """
    member = resolve(group)
    if group_rank is not None:
        if global_rank is not None:
            raise ArgumentError(f"{name}: give {argument} or group_{argument}, not both")
        if member is not None and not 0 <= group_rank < member.size():
            raise ArgumentError(
                f"{name}: group_{argument}: rank {group_rank} is not in the group of "
                f"{member.size()} ranks"
            )
        return group_rank
    if global_rank is None:
        if default is None:
            raise ArgumentError(f"{name}: one of {argument} and group_{argument} must be given")
        global_rank = default
    found = None if member is None else member.group_rank(global_rank)
    if found is None:
        ranks = "a group that this rank is not in" if member is None else list(member.ranks)
        raise ArgumentError(
            f"{name}: {argument}: global rank {global_rank} is not in the group ({ranks})"
        )
    return found
