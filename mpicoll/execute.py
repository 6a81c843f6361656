"""The one way of every call: from checked arguments to its route and, if asked for, its Work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpicoll import arrays, calls
from mpicoll.arrays import Parts
from mpicoll.calls import Call
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import ArgumentError, MpicollError, UnsupportedError
from mpicoll.groups import ProcessGroup, default_group, resolve, state
from mpicoll.primitives import Layout, Primitive
from mpicoll.watch import consistency
from mpicoll.work import Work

__all__ = ["in_order", "outside", "rooted", "run", "run_all", "submit"]


def run(
    primitive: Primitive,
    group: Any,
    async_op: bool,
    output: Any = None,
    input: Any = None,
    op: ReduceOp | None = None,
    root: int = 0,
    splits: calls.Splits | None = None,
) -> Work | None:
    """Checks a collective call and carries it out.

    output, input: the caller's arrays; root: a rank in the group.
    Returns a Work if ``async_op``, else None once the result is there.
    """
    member = state.default if group is None else group
    if member.__class__ is not ProcessGroup:
        member = resolve(group)
        if member is None:
            outside(primitive.name)
            return None
    call = calls.prepare(primitive, member, output, input, op, root, splits)
    call.plan = _plan(call)
    if async_op:
        written = () if output is None else output if isinstance(output, list) else (output,)
        return submit(member, partial(perform, call), primitive.name, written)
    if member.worker.busy:
        submit(member, partial(perform, call), primitive.name, ()).wait()
    else:
        perform(call)
    return None


def run_all(
    name: str,
    primitive: Primitive,
    group: Any,
    pairs: Sequence[tuple[Any, Any]],
    op: ReduceOp | None = None,
) -> Work | None:
    """Checks a collective call on each (output, input), then carries all out as one Work.

    None on a rank outside the group. Raises UnsupportedError where the dtypes differ.
    """
    member = resolve(group)
    if member is None:
        outside(name)
        return None
    ready = [calls.prepare(primitive, member, out, into, op, 0, None) for out, into in pairs]
    for i, call in enumerate(ready):
        if call.dtype is not ready[0].dtype:
            raise UnsupportedError(
                f"{name}: different dtypes in one list: [0] is {ready[0].dtype}, [{i}] is "
                f"{call.dtype}"
            )
        call.plan = _plan(call)

    def perform_all() -> None:
        for call in ready:
            perform(call)

    return submit(member, perform_all, name, [out for out, _ in pairs])


def _plan(call: Call) -> Callable[[Call], None]:
    """The plan for calls of this kind, made when the first one comes."""
    primitive, group, op, dtype = call.primitive, call.group, call.op, call.dtype
    if op is None:
        key: Any = (primitive, dtype)
    else:
        key = (primitive, dtype, op)
    try:
        return group.plans[key]
    except KeyError:
        from mpicoll import routes  # loads MPI, which importing this module must not

        group.check_open()
        if op is not None:
            assert dtype is not None
            calls.check_operation(primitive, op, dtype)
            if op.factor is not None:  # each factor is a new object: no plan to keep
                return routes.plan(primitive, group, op, dtype)
        plan = group.plans[key] = routes.plan(primitive, group, op, dtype)
        return plan


def perform(call: Call) -> None:
    """Carries a call out and returns when this rank's part is done."""
    group = call.group
    try:
        with group.lock:
            group.sequence = sequence = group.sequence + 1
            if sequence >= group.next_check:
                consistency.check(group, *consistency.of_call(call))
            if call.send is None and (call.recv is None or call.recv.buffer is not None):
                call.plan(call)
            else:
                _perform_packed(call)
    except MpicollError:
        raise
    except Exception as error:
        raise _explained(error, call.primitive.name, group) from error


def _perform_packed(call: Call) -> None:
    """Carries out a call whose memory may be scattered, listed, or shared by both sides."""
    send, recv = call.send, call.recv
    # Exchanges send and receive the arrays of a list one by one, where they are.
    listed = call.primitive.layout is Layout.EXCHANGED
    if (
        send is not None
        and not (listed and isinstance(send, Parts))
        and (send.buffer is None or (recv is not None and arrays.overlap(send, recv)))
    ):
        call.send = send.packed()
    if recv is None or recv.buffer is not None or (listed and isinstance(recv, Parts)):
        call.plan(call)
        return
    read = call.primitive.layout is Layout.IN_PLACE
    call.recv = recv.packed() if read else arrays.scratch(recv.dtype, recv.count)
    call.plan(call)
    recv.fill(call.recv)


def _explained(error: Exception, name: str, group: ProcessGroup) -> Exception:
    from mpicoll import routes

    return routes.explained(error, name, group)


def submit(
    group: ProcessGroup, task: Callable[[], None], name: str, outputs: Sequence[Any]
) -> Work:
    """Gives a task to the group's thread, behind what is pending there."""
    work = Work(f"{name} on rank {group.rank()} of {group.group_name}", outputs, group.timeout)
    error: list[BaseException] = []

    def guarded() -> None:
        try:
            task()
        except BaseException as caught:
            error.append(caught)

    group.worker.give(guarded, lambda: work.finish(error[0] if error else None))
    return work


def in_order(
    group: ProcessGroup, name: str, task: Callable[[], Any], root: int | None = None
) -> Any:
    """Runs ``task()``, which uses the group's communicator, in the order of its collectives.

    root: given where all members call: the call is compared with the other ranks', like those of
    primitives (-1 where there is no root). Returns what the task returns.
    """
    group.check_open()
    result: list[Any] = []

    def locked() -> None:
        try:
            with group.lock:
                if root is not None:
                    group.sequence += 1
                    if group.sequence >= group.next_check:
                        consistency.check(group, *consistency.of_task(name, root))
                result.append(task())
        except MpicollError:
            raise
        except Exception as error:
            raise _explained(error, name, group) from error

    if group.worker.busy:
        submit(group, locked, name, ()).wait()
    else:
        locked()
    return result[0]


def outside(name: str) -> None:
    """Warns, as torch does, that a rank outside the group made the call."""
    rank = default_group().rank()
    warnings.warn(
        f"{name}: global rank {rank} is not in the group it was called with; nothing is done",
        stacklevel=4,
    )


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
