"""Call signatures: encoding and description."""

from __future__ import annotations

import sys
import threading

import pytest

from mpicoll.core import signature
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES
from mpicoll.primitives import by_name as primitives

pytestmark = pytest.mark.any_mpi


def test_each_kind_of_call_has_its_own_number() -> None:
    kinds = {
        signature.encode_kind(primitive, dtype, op, root, on_device)
        for primitive in PRIMITIVES
        for dtype in (None, by_name["float32"], by_name["int8"])
        for op in (None, ReduceOp.SUM, ReduceOp.AVG)
        for root in (0, 1, 70000, signature.LIST)
        for on_device in (False, True)
    }
    assert len(kinds) == len(PRIMITIVES) * 3 * 3 * 4 * 2
    assert len({hash(kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_reduce", "all_reduce of 5 elements of int8, SUM"),
        ("broadcast", "broadcast of 5 elements of int8, src 3"),
        ("barrier", "barrier"),
        ("all_to_all", "all_to_all of some elements of int8"),
    ],
)
def test_describe_returns_the_arguments_of_a_call(name: str, expected: str) -> None:
    row = primitives[name]
    op = ReduceOp.SUM if row.reduces else None
    dtype = None if name == "barrier" else by_name["int8"]
    kind = signature.encode_kind(row, dtype, op, 3)
    assert signature.describe(kind, signature.encode_sizes([5])) == expected


def test_describe_returns_the_sizes_of_a_list_and_the_root_of_a_task() -> None:
    kind = signature.encode_kind(primitives["all_reduce"], by_name["int8"], None, signature.LIST)
    number = signature.encode_list([4, 4, 9])
    assert signature.describe(kind, number).endswith("a list of int8 with 2 x 4, 1 x 9 elements")
    assert signature.describe(kind, number + 1).endswith("a list of int8")
    kind, number = signature.encode_task("gather_object")
    assert signature.describe(signature.with_root(kind, 2), number) == "gather_object with root 2"
    assert signature.describe(signature.with_root(kind, -1), number) == "gather_object"


def test_encode_list_is_thread_safe() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(30000):
                signature.encode_list([first, i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_describe_knows_tasks_that_this_process_has_not_called() -> None:
    kind, number = signature.encode_task("broadcast_object_list")
    signature._names.clear()
    assert signature.describe(kind | signature.LIST << 24, number) == "broadcast_object_list"
    assert "not a collective" in signature.describe(kind | signature.LIST << 24, number + 1)
