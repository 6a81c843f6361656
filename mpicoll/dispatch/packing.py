"""The layer between the caller's arrays and a route: packing, chunks, the order of streams.

A route takes contiguous buffers. The wrappers here make them of any views: of arrays whose elements
lie apart, of lists of arrays, of memory that both sides share. They are composed when a plan is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpicoll.arrays import views
from mpicoll.arrays.views import DeviceView, View, ViewList
from mpicoll.core import checks
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import (
    CallKind,
    Extent,
    Implementation,
    Plan,
    Run,
    can_be_captured,
    take_leave,
)
from mpicoll.cuda import runtime
from mpicoll.cuda.streams import CapturedOrder, DeviceContext, StreamOrder
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.primitives import Layout

__all__ = ["buffers_of", "in_stream_order", "on_views", "stream_order"]


def on_views(kind: CallKind, route: Implementation, on_device: bool) -> Run:
    """Return the implementation of a kind of call on views: a route in the wrappers it needs."""
    primitive = kind.primitive
    if primitive.layout is Layout.EMPTY:
        return route
    if on_device or not primitive.listed:
        return _packed(kind, route, on_device)
    return _one_by_one(route)


def _packed(kind: CallKind, route: Implementation, on_device: bool) -> Run:
    """Return a route that copies views which are not contiguous, or both read and written."""
    primitive, group = kind.primitive, kind.group
    in_place = primitive.layout is Layout.IN_PLACE

    def buffer(view: View | None) -> Any:
        return view if on_device or view is None else view.buffer

    def run(send: View | None, recv: View | None, extent: Extent, root: int) -> None:
        if send is not None and (
            send.buffer is None or (recv is not None and views.overlaps(send, recv))
        ):
            send = send.contiguous()
        if recv is None or recv.buffer is not None:
            route(buffer(send), buffer(recv), extent, root)
            return
        packed = recv.contiguous() if in_place else recv.empty_like()
        route(buffer(send), buffer(packed), extent, root)
        if checks.writes(primitive, group, root):
            recv.copy_from(packed)

    return run


def _one_by_one(route: Implementation) -> Run:
    """Return a route for lists of buffers: the arrays of a list, in place where possible."""

    def run(send: View | None, recv: View | None, extent: Extent, root: int) -> None:
        to = () if recv is None else recv.parts
        into = [one if one.buffer is not None else one.empty_like() for one in to]
        out = [
            one if one.buffer is not None else one.contiguous()
            for one in (() if send is None else send.parts)
        ]
        overlaps = views.find_overlapping(out, into)
        out = [one.contiguous() if both else one for one, both in zip(out, overlaps, strict=True)]
        route(_buffers(send, out), _buffers(recv, into), extent, root)
        for one, packed in zip(to, into, strict=True):
            if packed is not one:
                one.copy_from(packed)

    return run


def _buffers(view: View | None, parts: Sequence[View]) -> Any:
    """Return what a route gets of a view that was made contiguous: a list if it was one."""
    buffers = [part.buffer for part in parts]
    return None if view is None else buffers if isinstance(view, ViewList) else buffers[0]


def buffers_of(view: View | None) -> Any:
    """Return what a route gets of a view that is contiguous on the host."""
    return _buffers(view, () if view is None else view.parts)


def stream_order(plan: Plan, send: View | None, recv: View | None) -> StreamOrder:
    """Return the place of a call on a device among what the caller's streams hold now.

    Raises UnsupportedError if a stream is being captured into a graph, and the call cannot be.
    """
    cuda = runtime.get_runtime()
    both = [part for view in (send, recv) if view is not None for part in view.parts]
    parts = [part for part in both if isinstance(part, DeviceView)]
    streams = {part.stream for part in parts}
    if len(streams) == 1 and can_be_captured(plan.route):
        (stream,) = streams
        if cuda.is_captured(parts[0].device, stream):
            plan.group.let_callbacks_end()  # such a call cannot queue behind them
            return CapturedOrder(cuda, parts[0].device, stream, plan.name)
    order = StreamOrder(
        cuda,
        parts[0].device,
        streams,
        {part.library for part in parts if part.library is not None},
        {part.stream for part in parts if part.library is None},
        held=(send, recv),
        where=plan.name,
    )
    order.find_failure = plan.group.find_failure
    return order


def in_stream_order(
    plan: Plan, order: StreamOrder, send: View | None, recv: View | None, extent: Extent, root: int
) -> None:
    """Carry out a call on a device in its place among the streams."""
    context = _context(plan.group, order.index)
    for view in (send, recv):
        for part in () if view is None else view.parts:
            assert isinstance(part, DeviceView)
            part.context = context
    with context.runtime.on(context.index):  # for MPI, too
        try:
            try:
                order.enter(context)
                context.begin()
                plan.run(send, recv, extent, root)
            except Exception as error:
                take_leave(plan.route, error, context, extent)
                raise
        except (ArgumentError, UnsupportedError):
            raise  # refused: the context's memory is used by its streams alone, in their order
        except BaseException:
            context.leave_behind()
            raise
        finally:  # after an error, too: what was begun goes on for a while
            order.leave(context)


def _context(group: ProcessGroup, index: int) -> DeviceContext:
    """Return the device context of a group's collectives."""
    return group.resources.get_or_create(
        ("device", index),
        lambda: DeviceContext(runtime.get_runtime(), index),
        # Once all ranks have ended a whole group, MPI has nothing of its calls any more.
        close=lambda context, limit: context.close(limit, keep=group.error is not None),
        abandon=DeviceContext.abandon,
    )
