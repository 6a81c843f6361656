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
from mpicoll.core.plan import CallKind, Extent, Implementation, Plan, Run
from mpicoll.cuda import runtime
from mpicoll.cuda.streams import DeviceContext, StreamOrder
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.primitives import Layout

__all__ = ["in_stream_order", "on_views", "stream_order"]

#: Bytes of the arrays of a list that are packed at a time, all of them together.
LISTED = 4 * 1024 * 1024


def on_views(kind: CallKind, route: Implementation, on_device: bool) -> Run:
    """Return the implementation of a kind of call on views: a route in the wrappers it needs."""
    primitive = kind.primitive
    if primitive.layout is Layout.EMPTY:
        return route
    if on_device or not primitive.listed:
        return _packed(kind, route, on_device)
    if primitive.layout is Layout.EXCHANGED:
        return _one_by_one(route)
    assert kind.dtype is not None
    step = max(1, LISTED // (kind.group.size() * kind.dtype.itemsize))
    return _in_chunks(kind, _packed(kind, route, on_device), step)


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
        assert send is not None and recv is not None
        into = [one if one.buffer is not None else one.empty_like() for one in recv.parts]
        out = [one if one.buffer is not None else one.contiguous() for one in send.parts]
        overlaps = views.find_overlapping(out, into)
        out = [one.contiguous() if both else one for one, both in zip(out, overlaps, strict=True)]
        route([one.buffer for one in out], [one.buffer for one in into], extent, root)
        for one, packed in zip(recv.parts, into, strict=True):
            if packed is not one:
                one.copy_from(packed)

    return run


def _in_chunks(kind: CallKind, whole: Run, step: int) -> Run:
    """Return calls with equal blocks, in chunks of ``step`` elements of each block.

    If this rank, or the root, has a list of arrays, no more of it is packed at once.
    """
    n, many_in = kind.group.size(), kind.primitive.many_in

    def run(send: View | None, recv: View | None, extent: Extent, root: int) -> None:
        if not isinstance(extent, int) or extent <= step:
            whole(send, recv, extent, root)
            return
        if send is not None and recv is not None and _meet(send, recv):
            send = send.contiguous()  # a chunk that is received would be sent on
            if many_in:
                send = ViewList([send.part(r * extent, extent) for r in range(n)], send.dtype)
        out = [one if one.buffer is not None else one.contiguous() for one in _parts(send)]
        into = [one if one.buffer is not None else one.empty_like() for one in _parts(recv)]
        for start in range(0, extent, step):
            size = min(step, extent - start)
            whole(_cut(out, start, size), _cut(into, start, size), size, root)
        for one, filled in zip(_parts(recv), into, strict=True):
            if filled is not one:
                one.copy_from(filled)

    return run


def _parts(view: View | None) -> Sequence[View]:
    return () if view is None else view.parts


def _cut(parts: Sequence[View], start: int, count: int) -> View | None:
    """Return the same elements of each array, as the view of one array or of a list."""
    cut = [one.part(start, count) for one in parts]
    return None if not cut else cut[0] if len(cut) == 1 else ViewList(cut, cut[0].dtype)


def _meet(send: View, recv: View) -> bool:
    """Return whether the two sides' memory overlaps. Arrays that lie apart are copied anyway."""
    out = [one for one in send.parts if one.buffer is not None]
    into = [one for one in recv.parts if one.buffer is not None]
    return any(views.find_overlapping(out, into))


def stream_order(send: View | None, recv: View | None) -> StreamOrder:
    """Return the place of a call on a device among what the caller's streams hold now."""
    parts = [part for view in (send, recv) if view is not None for part in view.parts]
    streams = {part.stream for part in parts if isinstance(part, DeviceView)}
    assert parts[0].device is not None
    return StreamOrder(runtime.get_runtime(), parts[0].device, streams)


def in_stream_order(
    plan: Plan, order: StreamOrder, send: View | None, recv: View | None, extent: Extent, root: int
) -> None:
    """Carry out a call on a device in its place among the streams."""
    context = _context(plan.group, order.index)
    for view in (send, recv):
        for part in () if view is None else view.parts:
            assert isinstance(part, DeviceView)
            part.context = context
    context.begin()
    order.enter(context)
    try:
        plan.run(send, recv, extent, root)
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
        close=lambda context, _: context.close(),
        abandon=DeviceContext.leave_behind,
    )
