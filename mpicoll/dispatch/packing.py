"""The layer between the caller's arrays and a route: packing, lists and stream order.

Routes take contiguous buffers. The wrappers here make such buffers from strided arrays, lists of
arrays, and outputs that overlap inputs. They are composed when a plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mpicoll.arrays import views
from mpicoll.arrays.views import DeviceView, View, ViewList
from mpicoll.core import checks
from mpicoll.core.plan import CallKind, Extent, Implementation, Plan, Run, RunOnViews
from mpicoll.cuda import runtime
from mpicoll.cuda.streams import CapturedOrder, DeviceContext, StreamOrder
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.primitives import Layout


def on_views(kind: CallKind, implementation: Implementation, on_device: bool) -> RunOnViews:
    """Return a function that runs an implementation on views, and packs them if necessary."""
    primitive, run = kind.primitive, implementation.run
    if primitive.layout is Layout.EMPTY:
        return run
    if on_device or not primitive.listed:
        return _packed(kind, run, on_device)
    return _one_by_one(run)


def _packed(kind: CallKind, inner: Run, on_device: bool) -> RunOnViews:
    """Return a function for views that calls ``inner`` with buffers, and copies where needed."""
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
            inner(buffer(send), buffer(recv), extent, root)
            return
        packed = recv.contiguous() if in_place else recv.empty_like()
        inner(buffer(send), buffer(packed), extent, root)
        if checks.writes(primitive, group, root):
            recv.copy_from(packed)

    return run


def _one_by_one(inner: Run) -> RunOnViews:
    """Return a function as ``_packed`` does, for an ``inner`` that takes lists of buffers."""

    def run(send: View | None, recv: View | None, extent: Extent, root: int) -> None:
        to = () if recv is None else recv.parts
        into = [one if one.buffer is not None else one.empty_like() for one in to]
        out = [
            one if one.buffer is not None else one.contiguous()
            for one in (() if send is None else send.parts)
        ]
        overlaps = views.find_overlapping(out, into)
        out = [one.contiguous() if both else one for one, both in zip(out, overlaps, strict=True)]
        inner(_buffers(send, out), _buffers(recv, into), extent, root)
        for one, packed in zip(to, into, strict=True):
            if packed is not one:
                one.copy_from(packed)

    return run


def _buffers(view: View | None, parts: Sequence[View]) -> Any:
    """Return the buffers of a view whose parts were made contiguous: a list if it was a list."""
    buffers = [part.buffer for part in parts]
    return None if view is None else buffers if isinstance(view, ViewList) else buffers[0]


def buffers_of(view: View | None) -> Any:
    """Return the buffers of a contiguous view on the host, as implementations get them."""
    return _buffers(view, () if view is None else view.parts)


def in_stream_order(
    plan: Plan, send: View | None, recv: View | None
) -> tuple[Run, Sequence[StreamOrder]]:
    """Return the function that runs a call and, on a device, the stream order that it keeps."""
    if not plan.on_device:
        return plan.run, ()
    order = _stream_order(plan, send, recv)
    return partial(_run_in_order, plan, order), (order,)


def _stream_order(plan: Plan, send: View | None, recv: View | None) -> StreamOrder:
    """Return the stream order of a call on a device: after all work now on the caller's streams.

    Raises UnsupportedError if a stream is being captured into a graph and the call cannot be.
    """
    cuda = runtime.get_runtime()
    both = [part for view in (send, recv) if view is not None for part in view.parts]
    parts = [part for part in both if isinstance(part, DeviceView)]
    streams = {part.stream for part in parts}
    if len(streams) == 1 and plan.implementation.capturable:
        (stream,) = streams
        if cuda.is_captured(parts[0].device, stream):
            plan.group.let_callbacks_end()  # a captured call cannot queue behind them
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


def _run_in_order(
    plan: Plan, order: StreamOrder, send: View | None, recv: View | None, extent: Extent, root: int
) -> None:
    """Run a call on a device in its stream order."""
    group = plan.group
    context = group.resources.get_or_create(
        ("device", order.index),
        lambda: DeviceContext(runtime.get_runtime(), order.index),
        # After all ranks have closed an unbroken group, MPI holds no buffer of its calls.
        close=lambda context, limit: context.close(limit, keep=group.error is not None),
        abandon=DeviceContext.abandon,
    )
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
                plan.implementation.notify_failure(error, context, extent)
                raise
        except (ArgumentError, UnsupportedError):
            raise  # rejected before other streams could use the context's memory
        except BaseException:
            context.retain_scratch()
            raise
        finally:  # also after an error: enqueued work continues
            order.leave(context)
