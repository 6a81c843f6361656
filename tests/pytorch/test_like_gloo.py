"""Groups return the same values as Gloo's."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpicoll.torch.backend import HAS_PYTHON_BACKENDS

C = torch._C._distributed_c10d
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(world):
    """Two groups of all ranks: mpicoll and Gloo."""
    made = [dist.new_group(backend=name, timeout=timedelta(seconds=77)) for name in ("", "gloo")]
    yield made
    for group in made:
        dist.destroy_process_group(group)


#: Properties and methods of a group and its backend that take no arguments. Excludes features that
#: only mpicoll supports.
ANSWERS = (
    "rank", "size", "bound_device_id", "group_desc", "use_pg_for_symm_mem_rendezvous", "_has_hooks",
    "supports_tensor_alloc", "supports_completion_hooks", "supports_coalescing",
    "supports_splitting", "_enable_collectives_timing", "_set_sequence_number_for_group",
)  # fmt: skip


def answer(asked, name):
    """The value, or the type of the error; None if the object has no such attribute."""
    try:
        found = getattr(asked, name, None)
        if callable(found):
            found = found(CPU) if name == "supports_tensor_alloc" else found()
    except RuntimeError:
        return RuntimeError
    return found


def has(asked, name):
    try:
        return hasattr(asked, name)
    except RuntimeError:  # torch raises it if a backend does not support the attribute
        return False


@pytest.mark.parametrize("name", ANSWERS)
def test_groups_and_backends_return_the_same_values_as_gloo(pair, name):
    own, gloo = pair
    for ours, theirs in ((own, gloo), (own._get_backend(CPU), gloo._get_backend(CPU))):
        if hasattr(type(theirs), name):
            assert answer(ours, name) == answer(theirs, name), type(ours)


def test_groups_and_backends_have_all_attributes_of_gloos(pair):
    own, gloo = pair
    compared = [(dist.ProcessGroup, own, gloo)]
    if HAS_PYTHON_BACKENDS:  # in older versions the group is its own backend
        compared.append((C.Backend, own._get_backend(CPU), gloo._get_backend(CPU)))
    for base, ours, theirs in compared:
        missing = {name for name in dir(base) if has(theirs, name)} - set(dir(ours))
        assert not missing


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="older torch rejects a CPU device_id")
def test_groups_keep_their_device_id(world):
    device = torch.device("cpu:0")
    bound = dist.new_group(device_id=device)
    assert bound.bound_device_id == device
    assert bound._get_backend(CPU).bound_device_id == device
    x = torch.ones(1)
    dist.all_reduce(x, group=bound)
    dist.barrier(bound)
    assert x.item() == world.size
    dist.destroy_process_group(bound)
