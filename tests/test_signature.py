"""Call signatures: encoding and description."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpicoll.core import signature
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES
from mpicoll.primitives import by_name as primitives

pytestmark = pytest.mark.any_mpi


def test_each_kind_of_call_has_its_own_number() -> None:
    kinds = {
        signature.with_root(signature.encode_kind(primitive, dtype, op, on_device), root)
        for primitive in PRIMITIVES
        for dtype in (None, by_name["float32"], by_name["int8"])
        for op in (None, ReduceOp.SUM, ReduceOp.AVG)
        for root in (0, 1, 70000, signature.LIST)
        for on_device in (False, True)
    }
    assert len(kinds) == len(PRIMITIVES) * 3 * 3 * 4 * 2
    assert len({hash(kind) for kind in kinds}) == len(kinds)


def test_describe_returns_the_sizes_of_a_list_and_the_root_of_a_task() -> None:
    kind = signature.encode_kind(primitives["all_reduce"], by_name["int8"], None)
    kind = signature.with_root(kind, signature.LIST)
    number = signature.encode_list([4, 4, 9])
    assert signature.describe(kind, number).endswith("a list of int8 with 2 x 4, 1 x 9 elements")
    assert signature.describe(kind, number + 1).endswith("a list of int8")
    kind, number = signature.encode_task("gather_object")
    assert signature.describe(signature.with_root(kind, 2), number) == "gather_object with root 2"
    assert signature.describe(signature.with_root(kind, -1), number) == "gather_object"


def test_encode_list_is_thread_safe() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(first: int) -> None:
        for i in range(5000):
            signature.encode_list([first, i])

    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
    finally:
        sys.setswitchinterval(interval)
