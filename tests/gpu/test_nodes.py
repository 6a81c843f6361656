"""Device memory in MPI messages between nodes, which are probed before use. Each rank is a node.

Every rank runs every test. They run on the emulated device only, whose memory any MPI can read.
"""

from __future__ import annotations

import re

import pytest
import real
from device_arrays import forced
from mpi4py import MPI

import mpicoll as dist
from mpicoll.cuda import capabilities, probe
from mpicoll.errors import UnsupportedError

LAST = MPI.COMM_WORLD.size - 1


@pytest.fixture(params=["auto", "direct"])
def route(request, monkeypatch):
    """The forced route, or "auto"."""
    if not real.is_emulated() or not LAST:
        pytest.skip("needs the emulated device and two ranks")
    with forced(request.param):
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", "1")
        monkeypatch.setattr(capabilities, "node", lambda: f"node {MPI.COMM_WORLD.rank}")
        dist.init_process_group(timeout=60)
        yield request.param
        dist.destroy_process_group()


def check_all_reduce():
    """Return the group's routes after a call."""
    array = real.made(1000, dist.get_rank())
    dist.all_reduce(array)
    assert (array == sum(range(dist.get_world_size()))).all()
    return dist.group.WORLD.resources.find("devices").names


def test_messages_are_probed_once(route, monkeypatch):
    sizes, fill = [], probe.ProbeDevice.fill
    monkeypatch.setattr(
        probe.ProbeDevice, "fill",
        lambda place, values: sizes.append(values.nbytes) or fill(place, values),
    )  # fmt: skip
    assert check_all_reduce()[0] == "direct" and set(sizes) == {64, 4 << 20}
    sizes.clear()
    check_all_reduce()
    assert not sizes


@pytest.mark.parametrize(
    ("how", "message"),
    [("wrong", "moved wrong data"), ("failed", f"no such link (rank {LAST})"), ("hung", "hung")],
)
def test_failed_messages(route, monkeypatch, how, message):
    """All ranks use another route, or raise an error that names the rank if the route is forced."""
    monkeypatch.setattr(capabilities, "BETWEEN_NODES_TIMEOUT_S", 1.0)
    exchange, values, me = probe.exchange_messages, probe._values, dist.get_rank()

    def wrong(nbytes, rank):
        found = values(nbytes, rank)
        if nbytes > 64 and rank == me:
            found[-1] += 1
        return found

    def failing(place, partners, limit):
        if how == "failed":
            raise RuntimeError("no such link")
        return "hung" if how == "hung" else exchange(place, partners, limit)

    if me == LAST:
        monkeypatch.setattr(probe, "exchange_messages", failing)
        if how == "wrong":
            monkeypatch.setattr(probe, "_values", wrong)
    if route == "auto":
        assert check_all_reduce() == ("staged",)
    else:
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            check_all_reduce()
