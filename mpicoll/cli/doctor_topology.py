"""What ``python -m mpicoll doctor`` says of how GPUs, network cards and processors are joined."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpicoll import control_messages
from mpicoll.machine import format_ranges

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.cuda.capabilities import Capabilities

__all__ = ["Joined", "Row", "examine_topology", "format_table"]


@dataclass(frozen=True)
class Row:
    """A GPU and what it is joined to.

    name:  its PCI address.
    ranks: those that work on it.
    processors: those near it, as ranges.
    to:    by the names of the GPUs and cards of its node: NVLink, or how far on PCIe.
    """

    name: str
    ranks: tuple[int, ...]
    processors: str
    to: dict[str, str]


@dataclass(frozen=True)
class Joined:
    """The GPUs of a host and its network cards, by name; none if /sys does not tell."""

    host: str
    gpus: tuple[Row, ...] = ()
    cards: tuple[str, ...] = ()


def examine_topology(
    comm: MPI.Intracomm, all_ranks: Sequence[Capabilities], used: Sequence[int | None], host: str
) -> tuple[list[Joined], list[list[str]]]:
    """Return how the GPUs of each node are joined, and by rank what is far though it need not be.

    All ranks call. all_ranks: what each can do; used: the number of the GPU that each works on.
    """
    from mpicoll.cuda import topology

    me = comm.Get_rank()
    own = all_ranks[me]
    place = {
        rank: one.gpus[index].partition(" ")[0]
        for rank, (one, index) in enumerate(zip(all_ranks, used, strict=True))
        if index is not None and one.node == own.node
    }
    seen = [gpu.partition(" ")[0] for one in all_ranks if one.node == own.node for gpu in one.gpus]
    known = topology.find(seen)
    rows = []
    for gpu in known.gpus:
        others = [one for one in (*known.gpus, *known.cards) if one is not gpu]
        ranks = tuple(rank for rank, name in place.items() if known.gpu(name) is gpu)
        to = {one.name: known.between(gpu, one) for one in others}
        rows.append(Row(gpu.name, ranks, format_ranges(gpu.processors), to))
    far = []
    if me in place:
        others_seen = [gpu.partition(" ")[0] for gpu in own.gpus]
        far = topology.find_far(known, place[me], os.sched_getaffinity(0), os.environ, others_seen)
    mine = Joined(host, tuple(rows), tuple(card.name for card in known.cards))
    said = control_messages.allgather(comm, (mine, far), tuple[Joined, list[str]])
    nodes = [one.node for one in all_ranks]
    firsts = [said[rank][0] for rank, node in enumerate(nodes) if nodes.index(node) == rank]
    return [one for one in firsts if one.gpus], [texts for _, texts in said]


def format_table(one: Joined) -> list[str]:
    """Return the lines of a table like that of ``nvidia-smi topo -m``."""
    names = [*(row.name for row in one.gpus), *one.cards]
    heads = [f"GPU{i}" for i in range(len(one.gpus))] + list(one.cards)
    table = [["", *heads, "near processors", "ranks"]]
    for i, row in enumerate(one.gpus):
        cells = ["X" if name == row.name else row.to[name] for name in names]
        ranks = format_ranges(row.ranks) or "none"
        table.append([f"GPU{i} {row.name}", *cells, row.processors or "unknown", ranks])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
