"""The native fast path: which calls use it, which arrays it accepts, and fallbacks to Python."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from time import sleep

import numpy as np
import pytest
from conftest import check_usable, needs_2_ranks, pass_first_calls, run_threads
from driver import Call, use_route
from test_shared import sharing_team

import mpicoll as dist
from mpicoll.dispatch import execute
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import ArgumentError, ArgumentTypeError, MismatchError, UnsupportedError
from mpicoll.kernels import calls, library
from mpicoll.routes.host import shared, shared_segment

compiled = pytest.mark.skipif(calls._module is None, reason="needs the compiled module")
SUM, MAX = ReduceOp.SUM, ReduceOp.MAX


@contextmanager
def record_python_calls():
    """Record the calls that run the Python implementation."""
    seen = []

    def counting(inner):
        def run(call, *others):  # find_root takes a name; run_fast and run_all a primitive
            seen.append(call if isinstance(call, str) else call.name)
            return inner(call, *others)

        return run

    before = execute._run_cached, execute._run_all, execute._find_root
    rest = execute.state, type(dist.group.WORLD)
    after = {"finish": execute._finish, "finished": execute._finished_work}
    later = partial(execute.run, may_inline=False)
    counted = counting(before[0]), before[1], counting(before[2])
    calls.bind_fast_path(*counted, *rest, run_later=counting(later), **after)
    try:
        yield seen
    finally:
        calls.bind_fast_path(*before, *rest, run_later=later, **after)


@pytest.fixture(scope="module")
def team(world):
    """A group with shared memory, past its first calls."""
    with pytest.MonkeyPatch.context() as patch:
        use_route(patch, "shared")
        made = sharing_team("short", world)
        yield made
    dist.destroy_process_group(made.group)


def each_call(team, dtype, count):
    """Yield each operation that has a native fast path, with its result and the expected result."""
    n, me, root = team.size, team.me, team.size - 1

    def blocks(rank):
        return ((np.arange(n * count) + rank) % 7).astype(dtype)

    def new(blocks, value=0):
        return np.full(blocks * count, value, dtype)

    mine, ones, array, part, piece = blocks(me), new(1, 1), new(1, me), new(1, 1), new(1)
    own, sent, whole, listed = mine[:count], np.split(mine, n), new(n), new(n)
    into, prefix, before = np.split(listed, n), new(1), new(1, 9)
    firsts = [blocks(rank)[:count] for rank in range(n)]
    received = [np.split(blocks(rank), n)[me] for rank in range(n)]
    gathered, turned, summed = np.concatenate(firsts), np.concatenate(received), sum(received)
    outputs = np.split(whole, n) if me == root else None
    inputs = tuple(sent) if me == root else None
    placed, table, reduced = new(n), new(n), mine.copy()
    rows, parts = np.split(table, n), np.split(mine.copy(), n)
    placed[me * count :][:count] = rows[me][...] = own
    block = reduced[me * count :][:count]
    for name, arrays, options, result, expected in (
        ("all_reduce", (ones,), {}, ones, new(1, n)),
        ("broadcast", (array,), {"group_src": root}, array, new(1, root)),
        ("reduce", (part,), {"group_dst": 0}, part, new(1, n if me == 0 else 1)),
        ("all_gather_single", (whole, own), {}, whole, gathered),
        ("reduce_scatter_single", (piece, mine), {}, piece, summed),
        ("all_to_all_single", (whole, mine), {}, whole, turned),
        ("scan", (prefix, own), {}, prefix, sum(firsts[: me + 1])),
        ("exscan", (before, own), {}, before, sum(firsts[:me]) if me else new(1, 9)),
        ("barrier", (), {}, ones, ones),
        ("all_gather", (into, own), {}, listed, gathered),
        ("gather", (own, outputs), {"group_dst": root}, whole, gathered if me == root else turned),
        ("scatter", (piece, inputs), {"group_src": root}, piece, np.split(blocks(root), n)[me]),
        ("reduce_scatter", (piece, sent), {}, piece, summed),
        ("all_to_all", (into, sent), {}, listed, turned),
        # In place: the smaller array is this rank's block of the larger one.
        ("all_gather_single", (placed, placed[me * count :][:count]), {}, placed, gathered),
        ("reduce_scatter_single", (block, reduced), {}, block, summed),
        ("all_gather", (rows, rows[me]), {}, table, gathered),
        ("reduce_scatter", (parts[me], parts), {}, parts[me], summed),
    ):
        call = partial(getattr(dist, name), *arrays, group=team.group, **options)
        yield name, call, (result, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "float16", "bfloat16"])
def test_repeated_calls_run_without_python(team, dtype):
    """With the results of the first call."""
    for count, turn in itertools.product((1, 3, 1000), range(3)):
        for name, call, (result, expected) in each_call(team, by_name[dtype].numpy, count):
            with record_python_calls() as seen:
                call()
            assert np.array_equal(result, expected), (name, count, turn)
            assert turn < 2 or not seen or calls._module is None, (name, count)


@pytest.mark.parametrize("rows", [1, 5, 40000])
def test_all_to_all_with_and_without_splits(team, rows):
    """One rank passes no split sizes. Then uneven sizes, and sizes that do not match."""
    n, me, group = team.size, team.me, team.group
    sent = np.arange(rows * n, dtype=np.int32) + 1000000 * me
    expected = np.concatenate([sent[me * rows :][:rows] + 1000000 * (r - me) for r in range(n)])
    for splits in ((), ([rows] * n, [rows] * n)) * 2:
        got = np.zeros_like(sent)
        dist.all_to_all_single(got, sent, *(splits if me else ()), group=group)
        assert np.array_equal(got, expected), splits
    for _ in range(3):
        got = [np.zeros(rows * (r + 1), np.int64) for r in range(n)]
        dist.all_to_all(got, [np.full(rows * (me + 1), 10 * me + r) for r in range(n)], group)
        assert all((array == 10 * r + me).all() for r, array in enumerate(got))
    if n == 1:
        return
    wrong = [np.zeros(rows + (r != me == 0), np.int64) for r in range(n)]
    words = f"expected {rows + 1} elements from rank 1, which sends" if me == 0 else "other"
    for _ in range(2):
        with pytest.raises(MismatchError, match=words):
            dist.all_to_all(wrong, [np.zeros(rows, np.int64)] * n, group)
    check_usable(group)


def refused(call, listed, group):
    """Return the type and message of the error of a call, or None."""
    try:
        call(listed, group)
    except (ArgumentError, ArgumentTypeError, UnsupportedError) as error:
        return type(error), str(error)
    return None


def test_invalid_list_entries_raise_the_error_of_the_first_call(team, new_team):
    """No data is sent. Entries that are valid, although unusual, give the right result."""
    n, me, group = team.size, team.me, team.group
    made = new_team("unusual in a list").group
    one = np.arange(4, dtype=np.float32) + me
    fixed = one.copy()
    fixed.flags.writeable = False

    def new():
        return [np.zeros_like(one) for _ in range(n)]

    calls_of = {
        "all_gather": lambda listed, g: dist.all_gather(listed, one, g),
        "gather": lambda listed, g: dist.gather(one, listed, group=g, group_dst=me),
        "scatter": lambda listed, g: dist.scatter(new()[0], listed, group=g, group_src=me),
        "reduce_scatter": lambda listed, g: dist.reduce_scatter(new()[0], listed, group=g),
        "all_to_all output": lambda listed, g: dist.all_to_all(listed, [one] * n, g),
        "all_to_all input": lambda listed, g: dist.all_to_all(new(), listed, g),
    }
    for name in "all_gather", "reduce_scatter", "all_to_all output":
        for _ in range(3):
            calls_of[name](new(), group)
    square = np.ones((2, 2), np.float32)
    for bad in (np.ones(4), square, np.ones(5, np.float32), fixed, None, 3, [one]):
        listed = new()
        listed[me] = bad
        for name, call in calls_of.items():
            reads = name in ("scatter", "reduce_scatter", "all_to_all input")
            if (bad is fixed and reads) or (bad is square and name not in ("gather", "scatter")):
                continue  # this call is valid
            error = refused(call, listed, group)
            assert error is not None and error == refused(call, listed, made), (name, bad)
    # Outputs that are also inputs.
    whole = np.zeros((n, 4), np.float32)
    for _ in range(3):
        whole[me] = one
        dist.all_gather(list(whole), whole[me], group)
        assert np.array_equal(whole, [np.arange(4) + r for r in range(n)])
        square = np.full((n, 4), me, np.float32)
        dist.all_to_all(list(square), list(square), group)
        assert np.array_equal(square, np.repeat(np.arange(n), 4).reshape(n, 4))


@compiled
def test_calls_with_lists_keep_no_references(team):
    one = np.ones(3, np.float32)
    into, out = ([np.ones(3, np.float32) for _ in range(team.size)] for _ in range(2))

    def count():
        return [sys.getrefcount(each) for each in (one, into, out, *into, *out)]

    before = count()
    for _ in range(1000):
        dist.all_gather(into, one, team.group)
        dist.reduce_scatter(one, out, MAX, team.group)
        dist.all_to_all(into, out, team.group)
        dist.gather(one, into if team.me == 0 else None, group=team.group, group_dst=0)
        dist.scatter(one, tuple(out) if team.me == 0 else None, group=team.group, group_src=0)
    assert count() == before


@needs_2_ranks
@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        ("barrier", "sum", "barrier"), ("broadcast", "sum", "broadcast of 3"),
        ("reduce to the last", "reduce to the first", "dst 0"), ("maximum", "sum", "MAX"),
        ("sum with a factor", "sum", "PREMUL_SUM"), ("4", "sum", "4 elements"),
        ("300000", "sum", "300000 elements"), ("int32", "sum", "of int32"),
        ("objects", "sum", "all_gather_object"), ("all_to_all_single", "sum", "all_to_all_single"),
        ("gather to the last", "gather to the first", "dst 0"),
        ("gather to the last", "list", "gather"),
    ],
)  # fmt: skip
def test_collective_mismatch_raises_for_every_path(new_team, one, other, word):
    """In the first calls and in later ones, no rank blocks and the group stays usable."""
    team = new_team(f"{one} against {other}")
    last, group, usual = team.size - 1, team.group, np.ones(3, np.float32)

    def start(name, dtype="float32", count=3, op=None, root=0):
        return lambda: Call(name, team, by_name[dtype], count, op, root).start()

    calls_of = {
        "sum": start("all_reduce", op=SUM),
        "maximum": start("all_reduce", op=MAX),
        "sum with a factor": start("all_reduce", op=ReduceOp.PREMUL_SUM),
        "4": start("all_reduce", count=4, op=SUM),
        "300000": start("all_reduce", count=300000, op=SUM),
        "int32": start("all_reduce", "int32", op=SUM),
        "broadcast": start("broadcast"),
        "reduce to the first": start("reduce", op=SUM),
        "reduce to the last": start("reduce", op=SUM, root=last),
        "gather to the first": start("gather"),
        "gather to the last": start("gather", root=last),
        "all_to_all_single": start("all_to_all_single"),
        "barrier": lambda: dist.barrier(group),
        "list": lambda: dist.all_reduce_coalesced([usual, usual.copy()], group=group),
        "objects": lambda: dist.all_gather_object([None] * team.size, "x", group),
    }
    with pytest.raises(MismatchError, match=r"(?s)collective mismatch.*rank 1:") as caught:
        calls_of[one if team.me == 1 else other]()
    assert word in str(caught.value)
    for name in (one, other):
        calls_of[name]()
    pass_first_calls(group)
    lazy = "broadcast", "reduce to", "gather to"  # tested in test_shared.py
    if not group.compared or one.startswith(lazy) or other.startswith(lazy):
        return  # without shared memory, MPI would block
    for odd in range(team.size):
        for _ in range(3):
            with pytest.raises(MismatchError, match="collective mismatch"):
                calls_of[one if team.me == odd else other]()
        for name in (one, other, one):
            calls_of[name]()


def test_coalesced_call_at_the_start_of_full_comparison(team, new_team):
    group = new_team("a list around the 64th call").group
    for _ in range(60):
        dist.barrier(group)
    dist.all_reduce_coalesced([np.ones(20000, np.float32) for _ in range(10)], group=group)
    pass_first_calls(group)
    assert group.compared


@compiled
def test_python_code_that_runs_during_tensor_inspection(team, new_team):
    """torch may run Python code, which can destroy the group or raise. The call then raises."""
    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode

    made = new_team("gone meanwhile")
    whole, part = torch.zeros(4 * team.size), torch.ones(4)
    for _ in range(70):
        dist.all_gather_single(whole, part, made.group)

    class Mode(TorchFunctionMode):
        def __init__(self, act):
            super().__init__()
            self.looks, self.act = 0, act

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.is_neg:
                self.looks += 1
                if self.looks == 2:
                    self.act()
            return function(*args, **(kwargs or {}))

    def stop():
        raise KeyboardInterrupt

    outputs, ones = [torch.zeros(1000) for _ in range(team.size)], torch.ones(1000)

    def replace():  # frees the memory of an inspected array
        with torch._C.DisableTorchFunction():
            outputs[0].set_(torch.full((1000,), 5.0))

    for _ in range(3):
        dist.all_gather(outputs, ones, made.group)
    with Mode(replace):
        dist.all_gather(outputs, ones, made.group)
    assert all((each == 1).all() for each in outputs)
    with pytest.raises(KeyboardInterrupt), Mode(stop):
        dist.all_gather_single(whole, part, made.group)
    with (
        pytest.raises(ArgumentError, match="destroyed"),
        Mode(lambda: dist.destroy_process_group(made.group)),
    ):
        dist.all_gather_single(whole, part, made.group)


def test_two_threads_may_call_on_one_group(team):
    """Both threads make the same call, so their order does not matter."""
    results = []

    def work():
        for _ in range(200):
            array = np.ones(5, np.float32)
            dist.all_reduce(array, group=team.group)
            results.append(set(array.tolist()))

    run_threads(work, work)
    assert len(results) == 400 and all(each == {team.size} for each in results)


@compiled
def test_fast_path_is_used_again_when_the_progress_thread_is_idle(team):
    """Until then calls are queued behind its work."""
    array, order, waiting = np.ones(3, np.float32), [], threading.Event()
    dist.all_reduce(array, MAX, team.group)
    dist.all_reduce(array, MAX, team.group)
    team.group.give(lambda: (waiting.wait(60), order.append("the thread")))
    threading.Timer(0.05, waiting.set).start()
    with record_python_calls() as seen:
        dist.all_reduce(array, MAX, team.group)
        order.append("the call")
        assert seen == ["all_reduce"] and order == ["the thread", "the call"]
        while team.group.busy():
            sleep(0.001)
        dist.all_reduce(array, MAX, team.group)
        assert len(seen) == 1


@pytest.fixture
def eager(world, monkeypatch):
    """A new group that runs async calls inline once all ranks have called."""
    use_route(monkeypatch, "shared")
    monkeypatch.setattr(shared_segment, "_processors", lambda: set(range(world.size)))
    monkeypatch.setattr(shared, "INLINE_WAIT_S", 30)
    made = sharing_team("eager", world)
    yield made
    dist.destroy_process_group(made.group)


@compiled
def test_inline_async_calls_run_without_python(eager):
    n, me, group = eager.size, eager.me, eager.group
    for count in (3, 50000):
        ones, whole = np.ones(count, "f4"), np.zeros(n * count, "f4")
        part = np.full(count, me, "f4")
        blocks = list(whole.reshape(n, count)) if me == 0 else None
        each = {
            "all_reduce": ((ones,), {}),
            "all_gather_single": ((whole, part), {}),
            "scatter": ((part, blocks), {"group_src": 0}),
            "gather": ((part, blocks), {"group_dst": 0}),
        }
        for name, (arrays, root) in each.items():
            call = partial(getattr(dist, name), *arrays, group=group, async_op=True, **root)
            call().wait()
            call().wait()
            with record_python_calls() as seen:
                work = call()
            assert not seen and work.is_completed() and work.wait(), name
            assert name in repr(work) and work.get_future().done()
        assert len(work.result()) == (n if me == 0 else 0)
        assert (ones == float(n) ** 3).all() and (part == me).all()
        assert (whole.reshape(n, count) == np.arange(n)[:, None]).all()


@contextmanager
def answering(monkeypatch, answer):
    """Make the check whether all ranks have called return ``answer()``."""
    arguments = ctypes.c_void_p, ctypes.c_uint32, *(ctypes.c_uint64,) * 3
    function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(lambda *others: answer())
    native_call = shared.Shared.native_call

    def asked(self, *others):
        return native_call(self, *others)._replace(
            inline_check=(library.address_of(function), 0, 0)
        )

    with monkeypatch.context() as patch:
        patch.setattr(shared.Shared, "native_call", asked)
        yield


@compiled
def test_fast_path_is_dropped_while_ranks_are_checked(eager, monkeypatch):
    """Another thread may destroy the group, which drops its registered calls."""
    group, array = eager.group, np.ones(3, np.uint16)

    def forget():
        group.forget_fast_paths()
        return 1

    with answering(monkeypatch, forget):
        for _ in range(3):
            dist.all_reduce(array, MAX, group)
        with record_python_calls() as seen:
            dist.all_reduce(array, MAX, group, async_op=True).wait()
    assert seen == ["all_reduce"]
    dist.all_reduce(array, group=group)
    assert (array == eager.size).all()


@compiled
@needs_2_ranks
@pytest.mark.parametrize("inline", [False, True])
def test_different_async_calls_raise_in_wait(eager, monkeypatch, inline):
    """A call that differs is queued, unless the check reports equal calls on all ranks."""
    group, array, other = eager.group, np.ones(3, np.float32), np.ones(4, np.float32)
    with answering(monkeypatch, lambda: 1) if inline else nullcontext():
        for x in (array, other):
            for _ in range(2):
                dist.all_reduce(x, MAX, group)
        with record_python_calls() as seen:
            work = dist.all_reduce(other if eager.me == 0 else array, MAX, group, async_op=True)
    assert seen == ([] if inline else ["all_reduce"])
    assert not inline or (work.is_completed() and not work.is_success())
    with pytest.raises(MismatchError, match=r"all_reduce of 4 elements.*of 3 elements"):
        work.wait()
    dist.all_reduce(array, MAX, group)
