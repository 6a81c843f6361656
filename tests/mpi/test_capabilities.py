"""How ranks exchange capabilities, and which rank probes MPI for CUDA support."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpicoll.cuda import capabilities, mpi_support, probe, runtime
from mpicoll.cuda.capabilities import exchange
from mpicoll.cuda.probe import OK, ProbeOutcome
from mpicoll.errors import ArgumentError
from mpicoll.routes.device.eligibility import eligible_routes, forced_route


def two_gpus(model):
    """A runtime with two GPUs of the same model."""
    return SimpleNamespace(
        count=lambda: 2, name=lambda index: model, driver_version=lambda: "1",
        pci_bus_id="0000:0{}:00.0".format, identity="0000:0{}:00.0".format, has_nccl=lambda: False,
    )  # fmt: skip


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Clear cached capabilities and make MPI claim CUDA support. Yields the list of probes."""
    monkeypatch.setattr(capabilities, "_known", None)
    monkeypatch.setattr(mpi_support, "QUERIES", {"query": lambda: 1})
    monkeypatch.setattr(mpi_support, "SWITCHES", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tries = []

    def attempt(*what):
        tries.append(what)
        return ProbeOutcome(2, OK, "hung")

    monkeypatch.setattr(probe, "run_probe", attempt)
    return tries


def of_kind(monkeypatch, kind):
    monkeypatch.setattr(runtime, "get_runtime", lambda: two_gpus(kind))


def test_one_rank_probes_for_each_gpu_model(mpi, fresh, monkeypatch):
    of_kind(monkeypatch, f"kind {mpi.rank % 2}")
    before = exchange(mpi)
    assert all(each.cuda for each in before)
    assert not fresh and not any(each.settled for each in before)
    found = exchange(mpi, probes=True)
    assert len(fresh) == (mpi.rank < 2), "one probe per GPU model, by its first rank"
    assert all(each.settled and not each.cuda for each in found)
    assert all("transfer hung" in each.problem for each in found)
    assert (
        mpi.allgather([each._asdict() for each in found])
        == [[each._asdict() for each in found]] * mpi.size
    )
    exchange(mpi, probes=True)
    assert len(fresh) == (mpi.rank < 2), "cached results are not probed again"
    exchange(mpi, probes=True, again=True)
    assert len(fresh) == 2 * (mpi.rank < 2), "again=True probes again"


def test_probe_result_is_cached_on_disk(mpi, fresh, monkeypatch):
    of_kind(monkeypatch, "kind")
    exchange(mpi, probes=True)
    monkeypatch.setattr(capabilities, "_known", None)
    found = exchange(mpi)
    assert found[0].settled and not found[0].cuda
    assert len(fresh) == (mpi.rank == 0)


def test_ranks_without_a_gpu_do_not_probe(mpi, fresh, monkeypatch):
    if mpi.rank == 0:
        of_kind(monkeypatch, "kind")
    found = exchange(mpi, probes=True)
    assert [bool(each.gpus) for each in found] == [rank == 0 for rank in range(mpi.size)]
    assert not any(each.cuda for each in found)
    assert len(fresh) == (mpi.rank == 0)
    assert len({each.node for each in found}) == 1
    expected = ("ipc", "staged") if mpi.size == 1 else ("staged",)
    assert eligible_routes(found, forced_route(found)) == expected


def test_cuda_aware_setting_overrides_the_probe(mpi, fresh, monkeypatch):
    of_kind(monkeypatch, "kind")
    if mpi.rank == mpi.size - 1:
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", "1")
    found = exchange(mpi, probes=True)
    assert [each.cuda for each in found] == [False] * (mpi.size - 1) + [True]
    assert all(each.settled for each in found)


def test_invalid_setting_on_one_rank_raises_on_all_ranks(mpi, fresh, monkeypatch):
    if mpi.rank == mpi.size - 1:
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", "perhaps")
    with pytest.raises(ArgumentError, match=rf"rank {mpi.size - 1}: .*got 'perhaps'"):
        exchange(mpi)


def test_partners():
    """Partners are mutual and on different nodes."""
    for nodes in ("ab", "aab", "abab", "aabb", "aaabbc", "abbb", "abcabcab"):
        found = [capabilities.find_partners(nodes, rank) for rank in range(len(nodes))]
        for rank, partners in enumerate(found):
            assert partners, nodes
            assert all(nodes[one] != nodes[rank] and rank in found[one] for one in partners)
        if len(set(map(nodes.count, nodes))) == 1:
            assert max(map(len, found)) <= 2
