"""Object collectives and messages: every operation, every root, and restricted pickle."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
from conftest import members, needs_2_ranks, on_2_ranks
from test_large import free

import mpicoll as dist


class Named:
    """An object of a user-defined type."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Named) and self.value == other.value

    __hash__ = None


def thing(rank):
    """A different object per rank: sizes differ by orders of magnitude, and one is empty."""
    return [
        {"rank": rank, "text": "é" * (10**rank)},
        None,
        np.arange(100000 * rank, dtype=np.int64),
        Named((rank, b"x" * rank)),
    ][rank % 4]


def same(one, other):
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    return type(one) is type(other) and one == other


def test_all_gather_object(teams):
    for team in members(teams):
        found = ["old"] * team.size
        dist.all_gather_object(found, thing(dist.get_rank()), group=team.group)
        assert all(same(a, thing(r)) for a, r in zip(found, team.ranks, strict=True))


@pytest.mark.parametrize("by_group_rank", [False, True])
def test_object_collectives_with_every_root(teams, by_group_rank):
    for team in members(teams):
        for i, root in enumerate(team.ranks):
            src, dst = (
                {f"group_{end}": i, "group": team.group} if by_group_rank
                else {end: root, "group": team.group}
                for end in ("src", "dst")
            )  # fmt: skip
            found = ["old"] * team.size if team.me == i else None
            dist.gather_object(thing(dist.get_rank()), found, **dst)
            if found is not None:
                assert all(same(a, thing(r)) for a, r in zip(found, team.ranks, strict=True))
            mine = [thing(r) if team.me == i else "old" for r in range(3)]
            dist.broadcast_object_list(mine, **src)
            assert all(same(a, thing(r)) for r, a in enumerate(mine))
            given = [thing(r) for r in team.ranks] if team.me == i else None
            found = ["old", "kept"]
            dist.scatter_object_list(found, given, **src)
            assert same(found[0], thing(dist.get_rank())) and found[1] == "kept"


@needs_2_ranks
def test_send_and_recv_object_list(world):
    left, right = (world.me - 1) % world.size, (world.me + 1) % world.size
    for batch in (False, True):
        found = ["old", "old"]
        sent = [thing(world.me), {"from": world.me}]
        if world.me % 2:
            assert dist.recv_object_list(found, src=left, use_batch=batch) == left
            dist.send_object_list(sent, dst=right, use_batch=batch)
        else:
            dist.send_object_list(sent, dst=right, use_batch=batch)
            assert dist.recv_object_list(found, group_src=left, use_batch=batch) == left
        assert same(found[0], thing(left)) and found[1] == {"from": left}


def test_recv_object_list_from_any_source(world):
    if world.me == 0:
        seen = set()
        for _ in range(world.size - 1):
            found = [None]
            source = dist.recv_object_list(found)
            assert same(found[0], thing(source))
            seen.add(source)
        assert seen == set(range(1, world.size))
    else:
        dist.send_object_list([thing(world.me)], dst=0)


def test_arrays_inside_objects_arrive_writable_and_aligned(world):
    sent = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(5, dtype=np.complex128)}
    found = [None] * world.size
    dist.all_gather_object(found, sent)
    for one in found:
        for name, array in one.items():
            assert np.array_equal(array, sent[name]) and array.flags.aligned
            array += 1  # writable, and not shared with another object
    # A rank's own entry is also a copy, so the sent object is unchanged.
    assert np.array_equal(sent["a"], np.arange(3)) and np.array_equal(sent["b"], np.arange(5))


def test_pickling_errors_are_raised_before_data_is_sent(world):
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        dist.all_gather_object([None] * world.size, lambda: None)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        dist.gather_object(lambda: None, [None] * world.size if world.me == 0 else None)
    found = [None] * world.size
    dist.all_gather_object(found, world.me)
    assert found == list(range(world.size))


def test_object_lists_of_the_wrong_length_are_rejected(world):
    if world.size > 1:
        objects = [1, 2] if world.me == 0 else [None]
        if world.me == 0:
            dist.broadcast_object_list(objects)
        else:
            with pytest.raises(dist.MismatchError, match=r"1 object.*sent 2"):
                dist.broadcast_object_list(objects)
    objects = []
    dist.broadcast_object_list(objects)
    assert objects == []


def test_object_collectives_reject_cuda_devices(world):
    with pytest.raises(ValueError, match="device"):
        dist.broadcast_object_list([1], device="cuda:0")
    objects = [world.me]
    dist.broadcast_object_list(objects, device="cpu")
    assert objects == [0]


def test_restricted_pickle_nests(world):
    found = [None] * world.size
    outer = dist.restricted_pickle(Fraction)
    try:
        with dist.restricted_pickle(Named):
            with pytest.raises(pickle.UnpicklingError, match="Fraction") as caught:
                dist.all_gather_object(found, Fraction(1, 2))
            assert caught.type is dist.RefusedPickleError
            dist.all_gather_object(found, Named(1))
        dist.all_gather_object(found, Fraction(1, 2))
        with pytest.raises(dist.RefusedPickleError):
            dist.all_gather_object(found, Named(1))
    finally:
        outer.lift()
    dist.all_gather_object(found, Named(1))
    assert found == [Named(1)] * world.size


@on_2_ranks
@pytest.mark.nightly
def test_object_of_more_than_2_gib(world):
    if free() < 14:
        pytest.skip(f"needs 14 GiB of free memory, got {free():.0f}")
    size = 2**31 + 16
    found = [np.full(size, 7, np.uint8) if world.me == 0 else None]
    if world.me == 0:
        found[0][-1] = 9
    dist.broadcast_object_list(found, src=0)
    (array,) = found
    assert len(array) == size
    assert (array[0], array[size // 2], array[-2], array[-1]) == (7, 7, 7, 9)
