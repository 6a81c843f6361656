"""Invalid arguments raise an mpicoll error and leave the group usable.

One row per public function: a valid call, and invalid values for each argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from conftest import check_usable, on_2_ranks
from driver import NAMES

import mpicoll as dist
from mpicoll.api.windows import Window
from mpicoll.primitives import Layout

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

#: Values that are not integers. (A bool is an int in Python.)
NO_INDEX: list[Any] = [
    "1", b"1", 0.0, 1.7, 1j, np.float32(1), np.array(0.5), np.array([0, 1]), np.array("a"), [0],
    (0,), {0}, {}, object(), len,
]  # fmt: skip
#: Values that are not ranks of a group.
NO_RANK: list[Any] = [*NO_INDEX, -1, 99, 2**70, np.array(99)]
NO_RANKS: list[Any] = [
    5, "01", b"\0\1", bytearray(2), 0.5, [0.5, 1.7], ["0", "1"], [[0], [1]], [None], [0, 0], [99],
    [-1], [2**70], np.array(1), np.array([0.5]), [np.array([0, 1])], object(),
]  # fmt: skip
NO_RANK_LISTS: list[Any] = [
    5, "01", b"\0\1", [], [0, 1], ["01"], [[0.5]], [[0], [0]], [[99]], [[None]], [5], object(),
    np.array(1),
]  # fmt: skip
NO_ARRAY: list[Any] = [
    None, 5, 1.5, "text", object(), {}, len, np.float32(3), np.array(["a"]), np.array([object()]),
    np.array([0], "datetime64[s]"), np.zeros(2, [("a", "f4")]), np.ma.array([1.0, 2.0]),
    np.zeros(2, ">f8"), np.zeros(2, np.longdouble),
    np.array(["a", "b"], np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else None,
]  # fmt: skip
NO_OUTPUT: list[Any] = [
    *NO_ARRAY, bytes(8), np.broadcast_to(np.zeros(1), 2),
    np.lib.stride_tricks.as_strided(np.zeros(3), (2, 2), (8, 8)),
    np.lib.stride_tricks.sliding_window_view(np.zeros(4), 2, writeable=True),
]  # fmt: skip
NO_LIST: list[Any] = [None, 5, "ab", object(), [], [None], [5, 5], np.zeros(2)]
NO_OBJECT_LIST: list[Any] = [None, 5, "ab", object(), (1, 2), {}]
NO_OP: list[Any] = ["sum", None, 0, np.add, object(), [], dist.ReduceOp, dist.ReduceOp.PREMUL_SUM]
NO_GROUP: list[Any] = [5, "world", object(), [], np.array(1), np.zeros(2)]
NO_TAG: list[Any] = [*NO_INDEX, None, -1, 2**70]
NO_TIMEOUT: list[Any] = ["1", -1, object(), [], 1j, float("nan"), np.zeros(2)]
NO_SPLITS: list[Any] = [
    5, "11", b"\1\1", [0.5, 1.5], ["1", "1"], [None, None], [2], [-1, 3], [1, 2], object(),
]  # fmt: skip
if torch is not None:
    NO_OP += [torch.tensor(1), torch.nn.ReLU]
    NO_INDEX += [torch.tensor(0.5), torch.tensor([0, 1]), torch.tensor([])]
    NO_OUTPUT += [
        torch.zeros(1, dtype=torch.float64).expand(2),
        torch.zeros(3, dtype=torch.float64).as_strided((2, 2), (1, 1)),
    ]

ME = 0  # group rank of this process, set by the test
Values = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Row:
    """A function, the arguments of a valid call, and invalid values.

    call:  returns the function and its arguments on this rank.
    wrong: invalid values by argument, passed on all ranks.
    at:    invalid values of arguments that only one rank passes, by rank.
    """

    call: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
    wrong: Values
    at: dict[int, Values] = field(default_factory=dict)


def x() -> Any:
    return np.full(2, 1.0 + ME)


def pair() -> Any:
    return [np.zeros(2), np.zeros(2)]


def of(function: Callable[..., Any], **arguments: Callable[[], Any]) -> Any:
    """Return a row's ``call``, which creates new arguments each time."""
    return lambda: (function, {name: make() for name, make in arguments.items()})


def pair_on_0() -> Any:
    return pair() if ME == 0 else None


def four() -> Any:
    return np.zeros(4)


ROOT = {"src": NO_RANK, "group": NO_GROUP, "group_src": NO_RANK}
TARGET = {"dst": NO_RANK, "group": NO_GROUP, "group_dst": NO_RANK}
FROM_0 = {"src": lambda: 0}
TO_0 = {"dst": lambda: 0}


def row_of(name: str) -> Row:
    """Return the row of a primitive."""
    row = NAMES[name]
    wrong: Values = {"": {"group": NO_GROUP}, "src": ROOT, "dst": TARGET}[row.root]
    wrong = wrong | MORE.get(name, {})
    at: dict[int, Values] = {0: {}, 1: {}}
    valid: dict[str, Callable[[], Any]] = {row.root: lambda: 0} if row.root else {}
    if row.reduces:
        wrong["op"] = NO_OP
    for argument, is_many in ((row.output, row.many_out), (row.input, row.many_in)):
        if is_many and row.listed and row.root:
            valid[argument] = pair_on_0
            at[0][argument], at[1][argument] = NO_LIST, [pair(), 5]
        elif is_many and row.listed:
            valid[argument], wrong[argument] = pair, NO_LIST
        elif argument:
            valid[argument], wrong[argument] = four if is_many else x, NO_ARRAY
    if row.output in wrong and wrong[row.output] is NO_ARRAY:
        for rank in range(2):
            is_read = row.layout is Layout.IN_PLACE and row.root == ("src", "dst")[rank]
            if row.combined(rank, 2) and not is_read:
                at[rank][row.output] = NO_OUTPUT
    return Row(of(getattr(dist, name), **valid), wrong, at)


#: Invalid values of arguments that the table of primitives does not have.
MORE: dict[str, Values] = {
    "all_to_all_single": {"output_split_sizes": NO_SPLITS, "input_split_sizes": NO_SPLITS},
    "barrier": {"timeout": NO_TIMEOUT},
}


def other() -> int:
    return 1 - ME


def only_wrong(function: Callable[..., Any], **needed: Any) -> Callable[..., Any]:
    """Return a function that skips the valid call, because that call would end the group.

    needed: valid values of its required arguments.
    """
    return lambda **arguments: function(**{**needed, **arguments}) if arguments else None


def message(send: Callable[..., Any], recv: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in which rank 0 sends and rank 1 receives."""

    def call(peer: Any = None, group_peer: Any = None, **arguments: Any) -> None:
        if ME == 0:
            send(dst=peer, group_dst=group_peer, **arguments)
        else:
            recv(src=peer, group_src=group_peer, **arguments)

    return call


def window(name: str = "registered") -> Window:
    """Return a window of all ranks. The first call, on all ranks, creates it."""
    if name not in _windows:
        _windows[name] = Window(dist.group.WORLD)
        if name == "registered":
            _windows[name].register(np.zeros(4))
    return _windows[name]


def windowed(name: str, **arguments: Any) -> Any:
    """A call of a method of a registered window."""
    return lambda: (getattr(window(), name), arguments)


_windows: dict[str, Window] = {}

ROWS: dict[str, Row] = {
    **{name: row_of(name) for name in NAMES},
    "all_reduce_coalesced": Row(
        of(dist.all_reduce_coalesced, tensors=lambda: [x(), x()]),
        {"tensors": [*NO_LIST, [x(), np.zeros(2, np.int8)]], "op": NO_OP, "group": NO_GROUP},
    ),
    "all_gather_coalesced": Row(
        of(
            dist.all_gather_coalesced,
            output_tensor_lists=lambda: [[np.zeros(2)] for _ in range(2)],
            input_tensor_list=lambda: [x()],
        ),
        {"output_tensor_lists": NO_LIST, "input_tensor_list": NO_LIST, "group": NO_GROUP},
    ),
    "monitored_barrier": Row(
        of(dist.monitored_barrier), {"group": NO_GROUP, "timeout": NO_TIMEOUT}
    ),
    "all_gather_object": Row(
        of(dist.all_gather_object, object_list=lambda: [0, 0], obj=lambda: ME),
        {"object_list": [*NO_OBJECT_LIST, [0]], "group": NO_GROUP},
    ),
    "gather_object": Row(
        of(
            dist.gather_object, obj=lambda: ME,
            object_gather_list=lambda: [0, 0] if ME == 0 else None, **TO_0,
        ),
        TARGET,
        {0: {"object_gather_list": NO_OBJECT_LIST}, 1: {"object_gather_list": [[0, 0], 5]}},
    ),
    "broadcast_object_list": Row(
        of(dist.broadcast_object_list, object_list=lambda: [ME], **FROM_0),
        {"object_list": NO_OBJECT_LIST, **ROOT},
    ),
    "scatter_object_list": Row(
        of(
            dist.scatter_object_list, scatter_object_output_list=lambda: [None],
            scatter_object_input_list=lambda: [0, 1] if ME == 0 else None, **FROM_0,
        ),
        {"scatter_object_output_list": [*NO_OBJECT_LIST, []], **ROOT},
        {0: {"scatter_object_input_list": [*NO_OBJECT_LIST, [0]]}},
    ),
    "new_group": Row(
        of(dist.new_group, ranks=lambda: np.arange(2)),
        {
            "ranks": NO_RANKS, "timeout": NO_TIMEOUT, "backend": [5, "smoke"],
            "reproducible": [5, "x"], "wire": [5, "x"],
        },
    ),
    "new_subgroups": Row(
        of(dist.new_subgroups, group_size=lambda: np.int8(1)),
        {"group_size": [*NO_INDEX, 0, -1, 99], "group": NO_GROUP, "timeout": NO_TIMEOUT},
    ),
    "new_subgroups_by_enumeration": Row(
        of(dist.new_subgroups_by_enumeration, ranks_per_subgroup_list=lambda: [[0], [1]]),
        {"ranks_per_subgroup_list": NO_RANK_LISTS, "timeout": NO_TIMEOUT},
    ),
    "split_group": Row(
        of(dist.split_group, split_ranks=lambda: [[0], [np.int64(1)]]),
        {"parent_pg": NO_GROUP, "split_ranks": [None, [[]], *NO_RANK_LISTS], "timeout": NO_TIMEOUT},
    ),
    "shrink_group": Row(
        of(only_wrong(dist.shrink_group, ranks_to_exclude=[0])),
        {
            "ranks_to_exclude": [None, *NO_RANKS, [0, 1], (0,)], "group": NO_GROUP,
            "shrink_flags": [2, "x", None],
        },
    ),
    "grow_group": Row(
        of(only_wrong(dist.grow_group)),
        {"count": [*NO_INDEX, 0, -1], "command": ["job.py", [], [5]]},
    ),
    "destroy_process_group": Row(of(only_wrong(dist.destroy_process_group)), {"group": NO_GROUP}),
    "dump_flight_record": Row(
        of(only_wrong(dist.dump_flight_record)), {"path": [5, object(), []]}
    ),
    "set_debug_level": Row(
        of(dist.set_debug_level, level=dist.get_debug_level), {"level": ["x", 99, None, object()]}
    ),
    "supports_complex": Row(
        of(dist.supports_complex, reduceOp=lambda: dist.ReduceOp.SUM),
        {"reduceOp": [op for op in NO_OP if op is not dist.ReduceOp.PREMUL_SUM]},
    ),
    **{
        query.__name__: Row(of(query, group=lambda: None), {"group": NO_GROUP})
        for query in (
            dist.get_rank, dist.get_world_size, dist.get_backend, dist.get_backend_config,
            dist.get_process_group_ranks,
        )
    },
    "get_group_rank": Row(
        of(dist.get_group_rank, group=lambda: None, global_rank=lambda: np.array(1)),
        {"group": NO_GROUP, "global_rank": [*NO_RANK, None]},
    ),
    "get_global_rank": Row(
        of(dist.get_global_rank, group=lambda: None, group_rank=lambda: np.int8(1)),
        {"group": NO_GROUP, "group_rank": [*NO_RANK, None]},
    ),
    "send and recv": Row(
        of(message(dist.send, dist.recv), tensor=x, peer=other, tag=lambda: np.int16(3)),
        {"peer": NO_RANK, "group_peer": NO_RANK, "group": NO_GROUP, "tag": NO_TAG},
        {0: {"tensor": NO_ARRAY}, 1: {"tensor": NO_OUTPUT}},
    ),
    "send_object_list and recv_object_list": Row(
        of(
            message(dist.send_object_list, dist.recv_object_list), object_list=lambda: [ME],
            peer=other,
        ),
        {
            "peer": NO_RANK, "group_peer": NO_RANK, "group": NO_GROUP,
            "object_list": NO_OBJECT_LIST,
        },
    ),
    "isend": Row(
        of(dist.isend, tensor=lambda: np.zeros(0), dst=lambda: ME, tag=lambda: 5),
        {"tensor": NO_ARRAY, "tag": NO_TAG, **TARGET},
    ),
    "irecv": Row(
        of(dist.irecv, tensor=lambda: np.zeros(0), src=lambda: ME, tag=lambda: 5),
        {"tensor": NO_OUTPUT, "tag": NO_TAG, **ROOT},
    ),
    "P2POp": Row(
        of(dist.P2POp, op=lambda: dist.isend, tensor=x, peer=other),
        {
            "op": [5, None, "isend", dist.send], "tensor": NO_ARRAY, "peer": NO_RANK,
            "group_peer": NO_RANK, "tag": NO_TAG, "group": NO_GROUP,
        },
    ),
    "batch_isend_irecv": Row(
        of(
            dist.batch_isend_irecv,
            p2p_op_list=lambda: [
                dist.P2POp(dist.isend, x(), other()), dist.P2POp(dist.irecv, x(), other())
            ],
        ),
        {"p2p_op_list": [None, 5, "ab", [], [5], object()]},
    ),
    "put": Row(
        windowed("put", tensor=np.ones(2), dst=0, offset=1, async_op=False),
        {"tensor": NO_ARRAY, "dst": [*NO_RANK, None], "offset": [*NO_INDEX, None, -1, 3]},
    ),
    "signal": Row(
        windowed("signal", peer=np.array(0), async_op=False), {"peer": [*NO_RANK, None]}
    ),
    "wait_signal": Row(
        lambda: (only_wrong(window().wait_signal, async_op=False), {}), {"peer": [*NO_RANK, None]}
    ),
    "unified": Row(windowed("unified", rank=1), {"rank": [*NO_RANK, None]}),
    "register": Row(
        lambda: (only_wrong(window("bare").register), {}),
        {"tensor": [*NO_OUTPUT, np.zeros((4, 4))[:, 1]]},
    ),
}  # fmt: skip


#: Arguments that are a rank, a list of ranks, a group or an operation.
CHECKED = {
    "src", "dst", "group_src", "group_dst", "peer", "group_peer", "rank", "ranks", "global_rank",
    "group_rank", "ranks_per_subgroup_list", "split_ranks", "ranks_to_exclude", "group",
    "parent_pg", "op", "reduceOp",
}  # fmt: skip
#: Tested with the launchers, because it would create the default group a second time.
WITHOUT_ROW = {"init_process_group"}


def test_every_public_function_has_a_row():
    """Each argument that is a rank, a group or an operation has invalid values in the row."""
    public = {name: getattr(dist, name) for name in dist.__all__}
    public |= {name: made for name, made in vars(Window).items() if not name.startswith("_")}
    functions = {n: f for n, f in public.items() if inspect.isfunction(f) or f is dist.P2POp}
    assert len(functions) > 50
    rows = {part: row for name, row in ROWS.items() for part in name.split(" and ")}
    by_function = {functions[part]: row for part, row in rows.items() if part in functions}
    missing = []
    for name, function in functions.items():
        row = by_function.get(function)
        given = set(row.wrong).union(*row.at.values()) if row else set()
        for peer in (
            ("peer", "group_peer") if row in (rows["send"], rows["send_object_list"]) else ()
        ):
            given |= {peer.replace("peer", end) for end in ("src", "dst")}
        needed = CHECKED.intersection(inspect.signature(function).parameters)
        if name not in WITHOUT_ROW:
            missing += [f"{name}: {argument}" for argument in sorted(needed - given)]
    assert missing == []


@on_2_ranks
@pytest.mark.parametrize("name", ROWS)
def test_wrong_arguments_leave_the_group_usable(world, name):
    global ME
    ME = world.me
    row = ROWS[name]
    function, _ = row.call()
    for async_op in [False, True] if "async_op" in function.__annotations__ else [None]:
        extra = {} if async_op is None else {"async_op": async_op}
        for _ in range(2):  # the second call may use the native fast path
            finish(function(**{**row.call()[1], **extra}))
        for values in (row.wrong, row.at.get(ME, {})):
            for key in values:
                for value in values[key]:
                    given = {**row.call()[1], **extra, key: value}
                    if key.startswith("group_"):  # replaces the global rank
                        given.pop(key.removeprefix("group_"), None)
                    with pytest.raises(dist.MpicollError) as caught:
                        finish(function(**given))
                    what = f"{key}={value!r}: {caught.value!r}"
                    assert isinstance(caught.value, (TypeError, ValueError)), what
                    if name in NAMES and key in (NAMES[name].output, NAMES[name].input, "op"):
                        assert str(caught.value).startswith(f"{NAMES[name]}: {key}"), what
        finish(function(**{**row.call()[1], **extra}))
    check_usable()


def finish(result: Any) -> None:
    """Wait for the Work or Works that a function returns."""
    for one in result if isinstance(result, list) else [result]:
        if hasattr(one, "wait"):
            one.wait()


@on_2_ranks
@pytest.mark.parametrize("root", [np.int8(1), np.array(1), np.uint64(1), True])
def test_ranks_may_be_numpy_integers(world, root):
    for given in ({"src": root}, {"group_src": root}):
        value = np.full(2, 7.0 if world.me == 1 else 0.0)
        dist.broadcast(value, **given)
        assert (value == 7).all()
    if torch is not None:
        value = np.full(2, 7.0 if world.me == 1 else 0.0)
        dist.broadcast(value, src=torch.tensor([3.0, 1.0]).argmin())
        assert (value == 7).all()
