"""The results of ``make bench``, from the files that host.py wrote, and the aims for two ranks.

Needs no MPI.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpicoll.cli.distance import DISTANCES, UNKNOWN
from mpicoll.cli.timing import Sample, Times
from mpicoll.output import format_bytes

KIB, MIB = 1 << 10, 1 << 20
#: The contestants (contestants.py), and a copy of as many bytes.
MPI4PY, FACADE, TORCH, GLOO, COPY = "mpi4py", "mpicoll", "mpicoll torch", "Gloo", "copy"

Measurement = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """An aim, and what was measured.

    measured: None where nothing was, and ``note`` may say why.
    spread:   half the distance between the quartiles of what was measured.
    note:     where in what was measured the figure comes from.
    """

    name: str
    limit: float
    measured: float | None
    unit: str
    at_least: bool = False
    spread: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is met, by the figures as they are printed; None where that is unknown."""
        if self.measured is None:
            return None
        limit, measured = round(self.limit, 2), round(self.measured, 2)
        return measured >= limit if self.at_least else measured <= limit

    @property
    def asked(self) -> str:
        """The limit in words."""
        return f"at {'least' if self.at_least else 'most'} {self.limit:g} {self.unit}"

    @property
    def verdict(self) -> str:
        """Whether it is met, in words."""
        return {None: "not measured", True: "met", False: "MISSED"}[self.met]


def times_of(measurement: Measurement) -> Times:
    """Return the samples of a measurement."""
    seconds = measurement["seconds"]
    turns = measurement.get("turns", range(len(seconds)))
    return Times(
        [Sample(*each, measurement["distance"]) for each in zip(seconds, turns, strict=True)]
    )


class Results:
    """What was measured with one MPI.

    records:  the contents of the files.
    distance: how far the ranks were apart in it; None for all of it.
    """

    def __init__(self, records: Sequence[dict[str, Any]], distance: str | None = None) -> None:
        self.records = records
        self.distance = distance
        every = [
            {"distance": UNKNOWN, **each}
            for record in records
            for each in record.get("measurements", ())
        ]
        self.measurements: list[Measurement] = [
            each for each in every if distance in (None, each["distance"])
        ]
        self.mpi: str = records[0]["mpi"]
        self.name = self.mpi.rpartition(" ")[0]

    def split(self) -> dict[str, Results]:
        """Return what was measured by how far the ranks were apart, of each that occurred."""
        occurred = {each["distance"] for each in self.measurements}
        return {each: Results(self.records, each) for each in DISTANCES if each in occurred}

    @property
    def left_out(self) -> list[str]:
        """What could not be measured."""
        return list(dict.fromkeys(w for record in self.records for w in record.get("left out", ())))

    def find(self, **keys: Any) -> list[Measurement]:
        """Return the measurements that have these values."""
        wanted = keys.items()
        return [each for each in self.measurements if wanted <= each.items()]

    def by_size(self, **keys: Any) -> dict[int, Times]:
        """Return the times of measurements that have these values, by their bytes."""
        return {each["bytes"]: times_of(each) for each in self.find(**keys)}

    def has_spare_processors(self, section: str, ranks: int) -> bool:
        """Whether each of so many ranks had a second processor, in this section's launch."""
        for record in self.records:
            measured = record.get("measurements", ())
            if record["ranks"] == ranks and any(each["section"] == section for each in measured):
                machine: dict[str, int] = record["machine"]
                return machine["processors"] >= 2 * ranks and machine["processors of a rank"] >= 2
        return False


def read(folder: Path) -> list[Results]:
    """Return the results in each folder of this folder, in the order of their names."""
    found = []
    for each in sorted(folder.iterdir()):
        records = [json.loads(path.read_text()) for path in sorted(each.glob("*.json"))]
        if records:
            found.append(Results(records))
    return found


# --- the aims -----------------------------------------------------------------------------------


def aims(found: Results) -> list[Aim]:
    """Return all of them, met or not or not measured, of results of one distance of the ranks."""
    return [*_routes(found), *_many(found), *_memory(found), *_overlap(found), *_torch(found)]


def _worst(
    name: str, limit: float, figures: Mapping[str, Times], at_least: bool = True,
    unit: str = "x", scale: float = 1.0,
) -> Aim:  # fmt: skip
    """Return an aim with the worst of the figures; their names say where each comes from.

    Where ranks moved so often that hardly two samples of a turn can be compared, there is none.
    """
    figures = {where: times for where, times in figures.items() if times.is_enough}
    if not figures:
        return Aim(name, limit, None, unit, at_least)
    where = (min if at_least else max)(figures, key=lambda each: figures[each].median)
    worst, note = figures[where], where if len(figures) > 1 else ""
    return Aim(name, limit, scale * worst.median, unit, at_least, scale * worst.spread, note)


def _per(
    above: Mapping[int, Times], below: Mapping[int, Times], least: int = 0, most: float = math.inf
) -> dict[str, Times]:
    """Return the ratio at each size that both have, from ``least`` to ``most``."""
    return {
        format_bytes(size): above[size].over(below[size])
        for size in above
        if size in below and least <= size <= most
    }


def _routes(found: Results) -> list[Aim]:
    """Compare one call of mpicoll with one of MPI and of Gloo."""

    def times(caller: str, primitive: str, section: str = "sizes", **more: Any) -> dict[int, Times]:
        return found.by_size(section=section, case=caller, primitive=primitive, **more)

    collected = []
    for other, name, limit, own in (
        (MPI4PY, "MPI_Allreduce", 1.7, FACADE), (GLOO, "Gloo", 4.0, TORCH),
    ):  # fmt: skip
        for size in (64 * MIB, 256 * MIB):
            ratios = _per(times(other, "all_reduce"), times(own, "all_reduce"), size, size)
            collected.append(
                _worst(f"all_reduce {format_bytes(size)}: {name} / {own}", limit, ratios)
            )

    raw = times(MPI4PY, "all_reduce")
    limits = {size: raw[size].map(lambda took: 1.05 * took + 1.5e-6) for size in raw}
    ratios = _per(times(FACADE, "all_reduce"), limits, most=16 * MIB)
    name = "all_reduce up to 16 MiB: mpicoll / (1.05 mpi4py + 1.5 us)"
    collected.append(_worst(name, 1.0, ratios, at_least=False))

    wide = times(FACADE, "all_reduce", "dtypes", dtype="float32")
    for dtype in ("bfloat16", "float16"):
        narrow = times(FACADE, "all_reduce", "dtypes", dtype=dtype)
        name = f"all_reduce from 1 MiB on: {dtype} / float32 of as many bytes"
        collected.append(_worst(name, 1.3, _per(narrow, wide, least=MIB), at_least=False))

    def moved(primitive: str, what: str, limit: float, least: int, most: float = math.inf) -> Aim:
        ratios = _per(times(MPI4PY, primitive), times(FACADE, primitive), least, most)
        return _worst(f"{primitive} {what}: MPI's / mpicoll", limit, ratios)

    collected.append(moved("reduce_scatter_single", "of all sizes", 1.0, 0))
    if found.mpi.startswith("Open MPI"):
        collected.append(moved("reduce_scatter_single", "16 MiB", 5.0, 16 * MIB, 16 * MIB))
    for primitive in ("broadcast", "all_gather_single", "all_to_all_single"):
        collected.append(moved(primitive, "from 16 MiB on", 1.0, 16 * MIB))

    four: dict[str, Any] = {"section": "growth", "ranks": 4, "bytes": 64 * MIB}
    ratios = _per(times(MPI4PY, "all_reduce", **four), times(FACADE, "all_reduce", **four))
    return [
        *collected,
        _worst("all_reduce 64 MiB, four ranks: MPI_Allreduce / mpicoll", 1.7, ratios),
    ]


def _many(found: Results) -> list[Aim]:
    """Compare many calls with one."""
    collected = []
    for count, size, limit in ((1000, 4 * KIB, 2.5), (16, 256 * KIB, 1.0)):
        keys = {"section": "many", "case": FACADE, "count": count, "bytes": size}
        one_by_one, coalesced = (
            found.by_size(**keys, how=how) for how in ("one by one", "coalesced")
        )
        name = f"{count} all_reduces of {format_bytes(size)}: one by one / coalesced"
        collected.append(_worst(name, limit, _per(one_by_one, coalesced)))
    return collected


def _memory(found: Results) -> list[Aim]:
    """Find the memory besides the arrays, of the collective that takes most."""
    taken = found.find(section="memory", case=FACADE)
    most = max(taken, key=lambda each: each["extra"], default=None)
    name, limit = "memory of a rank besides arrays of 256 MiB", 64.0
    if most is None:
        return [Aim(name, limit, None, "MiB")]
    return [Aim(name, limit, most["extra"] / MIB, "MiB", note=most["primitive"])]


def hidden(found: Results, caller: str, primitive: str, ranks: int) -> dict[int, Times]:
    """Return the share of a call that is hidden behind computation, by size, as the OSU benchmarks
    define it: 1 - (beside - compute) / pure.
    """
    pure, compute, beside = (
        found.by_size(section="overlap", case=caller, primitive=primitive, ranks=ranks, part=part)
        for part in ("pure", "compute", "beside")
    )
    return {
        size: beside[size].minus(compute[size]).over(pure[size]).map(lambda shown: 1 - shown)
        for size in pure
    }


def _overlap(found: Results) -> list[Aim]:
    """Find how well calls go on beside computation."""
    free: dict[str, Times] = {}
    gains: dict[str, Times] = {}
    totals: dict[str, Times] = {}
    points = {(each["primitive"], each["ranks"]): None for each in found.find(section="overlap")}
    for primitive, ranks in points:
        own, raw = (hidden(found, caller, primitive, ranks) for caller in (FACADE, MPI4PY))
        keys = {"section": "overlap", "case": FACADE, "primitive": primitive, "ranks": ranks}
        beside, in_turn = (found.by_size(**keys, part=part) for part in ("beside", "in turn"))
        for size, share in own.items():
            point = f"{primitive} {format_bytes(size)}, {ranks} ranks"
            totals[point] = beside[size].over(in_turn[size])
            if size in raw:
                gains[point] = share.minus(raw[size])
            if found.has_spare_processors("overlap", ranks):
                free[point] = share
    collected = [
        _worst("overlap: mpicoll's less that of MPI's own call", 0.0, gains, True, "%", 100.0),
        _worst("begun, computed, waited for / called, then computed", 1.0, totals, False),
    ]
    aim = _worst("overlap where each rank has a processor to spare", 80.0, free, True, "%", 100.0)
    if points and not free:
        aim = replace(aim, note="needs 2 processors a rank")
    return [*collected, aim]


def _torch(found: Results) -> list[Aim]:
    """Compare the backend of torch.distributed with Gloo."""
    collected = []
    for section, dtype, size, limit in (
        ("sizes", "float32", 4, 15.0), ("sizes", "float32", 16 * MIB, 6.0),
        ("dtypes", "bfloat16", 16 * MIB, 6.0),
    ):  # fmt: skip
        keys = {"section": section, "primitive": "all_reduce", "dtype": dtype, "bytes": size}
        ratios = _per(found.by_size(**keys, case=GLOO), found.by_size(**keys, case=TORCH))
        name = f"all_reduce {format_bytes(size)} of {dtype}: Gloo / mpicoll torch"
        collected.append(_worst(name, limit, ratios))
    for bucket in (25.0, 4.0):
        local, gloo, own, at_once = (
            found.by_size(section="ddp", bucket=bucket, case=caller, how=how)
            for caller, how in (
                ("local", "alone"), (GLOO, "DDP"), (TORCH, "DDP"), (TORCH, "synchronous"),
            )
        )  # fmt: skip
        if bucket == 25.0:
            above, other = (
                {size: each.minus(local[size]) for size, each in times.items()}
                for times in (own, gloo)
            )
            name = "DDP step above the local step: mpicoll torch / Gloo"
            collected.append(_worst(name, 0.45, _per(above, other), at_least=False))
        name = f"DDP step, buckets of {bucket:g} MB: asynchronous / synchronous"
        collected.append(_worst(name, 1.0, _per(own, at_once), at_least=False))
    return collected
