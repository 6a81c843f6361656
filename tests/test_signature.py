"""Signatures of calls: what is compared, and what is said of it."""

from __future__ import annotations

import sys
import threading

import pytest

from mpicoll.core import signature
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES
from mpicoll.primitives import by_name as primitives

pytestmark = pytest.mark.any_mpi


def test_every_kind_has_its_own_number() -> None:
    dtypes = [None, by_name["float32"], by_name["int8"]]
    kinds = {
        signature.encode_kind(primitive, dtype, op, root, on_device)
        for primitive in PRIMITIVES
        for dtype in dtypes
        for op in (None, ReduceOp.SUM, ReduceOp.AVG)
        for root in (0, 1, 70000, signature.LIST)
        for on_device in (False, True)
    }
    assert len(kinds) == len(PRIMITIVES) * 3 * 3 * 4 * 2
    assert len({hash(kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "barrier", "all_to_all"])
def test_words(name: str) -> None:
    row = primitives[name]
    op = ReduceOp.SUM if row.reduces else None
    dtype = None if name == "barrier" else by_name["int8"]
    told = signature.describe(signature.encode_kind(row, dtype, op, 3), signature.encode_sizes([5]))
    assert (
        told
        == {
            "all_reduce": "all_reduce of 5 elements of int8, SUM",
            "broadcast": "broadcast of 5 elements of int8, src 3",
            "barrier": "barrier",
            "all_to_all": "all_to_all of some elements of int8",
        }[name]
    )


def test_words_of_lists_and_tasks() -> None:
    kind = signature.encode_kind(primitives["all_reduce"], by_name["int8"], None, signature.LIST)
    number = signature.encode_list([4, 4, 9])
    assert signature.describe(kind, number).endswith("a list of int8 with 2 x 4, 1 x 9 elements")
    assert signature.describe(kind, number + 1).endswith("a list of int8")
    kind, number = signature.encode_task("gather_object")
    assert signature.describe(signature.with_root(kind, 2), number) == "gather_object with root 2"
    assert signature.describe(signature.with_root(kind, -1), number) == "gather_object"


def test_threads_have_the_sizes_of_lists_in_common() -> None:
    """Each thread may have a group of its own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(30000):
                signature.encode_list([first, i])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_a_function_that_this_process_has_not_called_has_its_name() -> None:
    kind, number = signature.encode_task("broadcast_object_list")
    signature._names.clear()
    assert signature.describe(kind | signature.LIST << 24, number) == "broadcast_object_list"
    assert "not a collective" in signature.describe(kind | signature.LIST << 24, number + 1)
