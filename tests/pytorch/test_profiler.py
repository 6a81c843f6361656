"""Profiler events: ``mpicoll:all_reduce``, like ``gloo:all_reduce``."""

from __future__ import annotations

import json
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from inputs import collectives
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

from mpicoll.torch.backend import HAS_PYTHON_BACKENDS


def message(world):
    """Send a message to the partner and receive one."""
    partner = world.me ^ 1
    work = dist.irecv(torch.zeros(4), partner)
    dist.send(torch.ones(4), partner)
    work.wait()


def names(profiler):
    return [event.name for event in profiler.events() if event.name.startswith("mpicoll:")]


@pytest.mark.parametrize("name", [*collectives(2, 0), "send", "recv"])
def test_profiler_shows_every_operation(world, name):
    call = partial(message, world)
    if name not in ("send", "recv"):
        call = partial(getattr(dist, name), *collectives(world.size, world.me)[name][0])
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
        call()
    found = names(profiler)
    assert len([one for one in found if one == f"mpicoll:{name}"]) == 2, found
    dist.barrier()


def test_event_duration_is_that_of_the_call(world):
    """A synchronous call ends after the last rank has called; an async call returns immediately."""
    dist.all_reduce(torch.ones(3, 5))
    for async_op in (False, True):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            dist.barrier()
            if world.me == world.size - 1:
                time.sleep(0.1)
            with record_function("before"):
                pass
            work = dist.all_reduce(torch.ones(3, 5), async_op=async_op)
            with record_function("after"):
                pass
            if async_op:
                work.wait()
        events = {event.name: event for event in profiler.events()}
        event = events["mpicoll:all_reduce"]
        assert event.input_shapes == [[3, 5]]
        assert events["before"].time_range.end <= event.time_range.start
        assert event.time_range.end <= events["after"].time_range.start
        if world.me == 0 and not async_op:
            assert event.time_range.elapsed_us() > 80_000


def test_profile_all_threads_shows_calls_of_other_threads(world):
    """Without it, a profiler records only the thread that started it."""
    dist.barrier()
    for everywhere in (True, False):
        settings = _ExperimentalConfig(profile_all_threads=everywhere)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=settings) as profiler:
            dist.all_reduce(torch.ones(4))
            thread = threading.Thread(target=dist.broadcast, args=(torch.ones(4), 0))
            thread.start()
            thread.join()
        found = names(profiler)
        assert found.count("mpicoll:all_reduce") == 1
        assert found.count("mpicoll:broadcast") == everywhere


def test_execution_trace_has_the_nodes_of_gloo(world, folder):
    """Equal tensors and names except for the backend.

    From torch 2.15 on torch creates the nodes.
    """
    groups = {name: dist.new_group(backend=name) for name in ("mpicoll", "gloo")}
    found = {}
    for name, group in groups.items():
        dist.all_reduce(torch.ones(3, 5), group=group)
        observer = ExecutionTraceObserver()
        observer.register_callback(str(folder / f"{name}-{world.me}.json"))
        observer.start()
        dist.all_reduce(torch.ones(3, 5), group=group)
        dist.broadcast(torch.ones(2), 0, group=group, async_op=True).wait()
        dist.barrier(group)
        observer.stop()
        observer.unregister_callback()
        nodes = json.loads((folder / f"{name}-{world.me}.json").read_text())["nodes"]
        found[name] = sorted(
            (node["name"].replace(name, "backend"), node["inputs"]["shapes"])
            for node in nodes
            if node["name"].startswith((f"{name}:", "c10d::"))
        )
    calls = [node for node in found["gloo"] if node[0].startswith("backend:")]
    assert calls and [node for node in found["mpicoll"] if node in calls] == calls
    if HAS_PYTHON_BACKENDS:
        assert found["mpicoll"] == found["gloo"]
