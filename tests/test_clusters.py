"""Clusters of near ranks, from the caches of /sys and from measured latencies."""

from __future__ import annotations

import pytest

from mpicoll.errors import ArgumentError
from mpicoll.routes.host.clusters import Seen, choose, find_domain

pytestmark = pytest.mark.any_mpi

#: Minimum latency in nanoseconds between far ranks.
FAR_NS = 80


@pytest.fixture
def system(tmp_path):
    """Two NUMA nodes with 8 processors each, two hardware threads per core, caches of 4."""
    for cpu in range(16):
        first, core = cpu // 4 * 4, cpu // 2 * 2
        for index, shared in enumerate((f"{core}-{core + 1}", f"{first}-{first + 3}")):
            folder = tmp_path / f"cpu/cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "shared_cpu_list").write_text(shared + "\n")
    for node, shared in enumerate(("0-6,7", "8-15")):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(shared + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("processors", "domain"),
    [
        ({5}, "cache 4"),
        ({4, 7}, "cache 4"),
        ({3, 4}, "node 0"),
        (set(range(8, 16)), "node 8"),
        (set(range(16)), ""),
        ({77}, ""),
    ],
)
def test_domain_of_a_set_of_processors(system, processors, domain):
    assert find_domain(processors, system) == domain


def test_domain_is_empty_if_the_system_has_no_description(tmp_path):
    (tmp_path / "node/node0").mkdir(parents=True)
    (tmp_path / "node/node0/cpulist").write_text("\n")
    assert find_domain({0}, tmp_path) == find_domain({0}, tmp_path / "none") == ""


def ranks(n, domain=lambda rank: "", cluster=None, forced=""):
    """Return the observations of n ranks. cluster: the measured cluster of a rank, if any."""

    def latency(rank, partner):
        if cluster is None or partner >= n:
            return 0
        return 45 if cluster(rank) == cluster(partner) else 170

    bits = range((n - 1).bit_length())
    return [
        Seen(forced, domain(rank), [latency(rank, rank ^ 1 << bit) for bit in bits])
        for rank in range(n)
    ]


def socket(rank):
    return f"cache {rank // 8}"


@pytest.mark.parametrize(
    ("all_ranks", "expected"),
    [
        (ranks(16, socket), [8, 8]),  # no latencies
        (ranks(16, socket, socket), [8, 8]),
        (ranks(15, socket, socket), [8, 7]),
        (ranks(16, lambda rank: f"cache {rank // 2}"), [16]),  # clusters too small
        (ranks(16, lambda rank: "cache 0"), [16]),
        (ranks(16, lambda rank: f"cache {rank % 2}"), [16]),  # not consecutive
        # Latencies contradict the domains, or one rank has no domain.
        (ranks(16, socket, lambda rank: 0), [16]),
        (ranks(16, lambda rank: f"cache {rank // 4}", socket), [8, 8]),
        (ranks(16, lambda rank: "" if rank == 3 else socket(rank), socket), [8, 8]),
        # No domains.
        (ranks(16, cluster=socket), [8, 8]),
        (ranks(16, cluster=lambda rank: rank // 4), [4, 4, 4, 4]),
        (ranks(12, cluster=lambda rank: rank // 4), [4, 4, 4]),
        (ranks(16, cluster=lambda rank: rank % 2), [16]),
        (ranks(16, cluster=lambda rank: rank), [16]),
        (ranks(16), [16]),
        (ranks(16, socket, socket, forced="0"), [16]),
        (ranks(5, forced="2"), [2, 2, 1]),
        (ranks(9, forced="3,1"), [3, 1, 3, 1, 1]),
        (ranks(1), [1]),
    ],
)
def test_clusters_from_domains_and_latencies(all_ranks, expected):
    assert choose(all_ranks, crowded=False, far=FAR_NS) == expected


def test_oversubscribed_ranks_have_no_clusters_unless_forced():
    assert choose(ranks(16, socket), crowded=True, far=FAR_NS) == [16]
    assert choose(ranks(16, socket, forced="8"), crowded=True, far=FAR_NS) == [8, 8]


@pytest.mark.parametrize("forced", ["x", "2,", "-1", "2,0", "1.5"])
def test_invalid_setting_raises(forced):
    with pytest.raises(ArgumentError, match="MPICOLL_CLUSTERS: expected"):
        choose(ranks(4, forced=forced), crowded=False, far=FAR_NS)
