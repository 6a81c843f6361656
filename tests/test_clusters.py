"""Which ranks are near each other, by what the system says and by what is measured."""

from __future__ import annotations

import pytest

from mpicoll.errors import ArgumentError
from mpicoll.routes.host import clusters
from mpicoll.routes.host.clusters import Seen, choose, find_domain

pytestmark = pytest.mark.any_mpi

FAR = 80


@pytest.fixture
def system(tmp_path):
    """Two nodes with 8 processors, two hardware threads a core; caches of 4 processors."""
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
def test_domains(system, processors, domain):
    assert find_domain(processors, system) == domain


def test_a_system_that_says_nothing(tmp_path):
    (tmp_path / "node/node0").mkdir(parents=True)
    (tmp_path / "node/node0/cpulist").write_text("\n")
    assert find_domain({0}, tmp_path) == find_domain({0}, tmp_path / "none") == ""


def ranks(n, domain=lambda rank: "", together=None, forced=""):
    """What n ranks see: latencies by who is ``together``, if anything is measured."""

    def latency(rank, partner):
        if together is None or partner >= n:
            return 0
        return 45 if together(rank) == together(partner) else 170

    bits = range((n - 1).bit_length())
    return [
        Seen(forced, domain(rank), [latency(rank, rank ^ 1 << bit) for bit in bits])
        for rank in range(n)
    ]


def socket(rank):
    return f"cache {rank // 8}"


@pytest.mark.parametrize(
    ("everybody", "expected"),
    [
        (ranks(16, socket), [8, 8]),  # nothing is measured
        (ranks(16, socket, socket), [8, 8]),
        (ranks(15, socket, socket), [8, 7]),
        (ranks(16, lambda rank: f"cache {rank // 2}"), [16]),  # too small to be worth it
        (ranks(16, lambda rank: "cache 0"), [16]),
        (ranks(16, lambda rank: f"cache {rank % 2}"), [16]),  # in turn
        # What is measured contradicts: all are near, or others are; or one rank does not know.
        (ranks(16, socket, lambda rank: 0), [16]),
        (ranks(16, lambda rank: f"cache {rank // 4}", socket), [8, 8]),
        (ranks(16, lambda rank: "" if rank == 3 else socket(rank), socket), [8, 8]),
        # Nothing is described.
        (ranks(16, together=socket), [8, 8]),
        (ranks(16, together=lambda rank: rank // 4), [4, 4, 4, 4]),
        (ranks(12, together=lambda rank: rank // 4), [4, 4, 4]),
        (ranks(16, together=lambda rank: rank % 2), [16]),
        (ranks(16, together=lambda rank: rank), [16]),
        (ranks(16), [16]),
        (ranks(16, socket, socket, forced="0"), [16]),
        (ranks(5, forced="2"), [2, 2, 1]),
        (ranks(9, forced="3,1"), [3, 1, 3, 1, 1]),
        (ranks(1), [1]),
    ],
)
def test_choice(everybody, expected):
    assert choose(everybody, crowded=False, far=FAR) == expected


def test_crowds_have_none_unless_told():
    assert choose(ranks(16, socket), crowded=True, far=FAR) == [16]
    assert choose(ranks(16, socket, forced="8"), crowded=True, far=FAR) == [8, 8]


@pytest.mark.parametrize("forced", ["x", "2,", "-1", "2,0", "1.5"])
def test_settings_that_make_no_sense(forced):
    with pytest.raises(ArgumentError, match="MPICOLL_CLUSTERS: expected"):
        choose(ranks(4, forced=forced), crowded=False, far=FAR)


def test_ranks_that_nothing_is_known_of_are_one(tmp_path):
    assert choose([Seen("", find_domain({0}, tmp_path), [])] * 9, False, FAR) == [9]
    assert clusters.LEAST > 1
