"""The results of ``make bench``, read from the files of host.py, and the aims.

Does not need MPI.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub, truediv
from pathlib import Path
from typing import Any

from mpicoll.cli.timing import Times
from mpicoll.output import format_bytes

KIB, MIB = 1 << 10, 1 << 20
#: Cases: the contestants (contestants.py), and a copy of the same number of bytes.
MPI4PY, FACADE, TORCH, GLOO, COPY = "mpi4py", "mpicoll", "mpicoll torch", "Gloo", "copy"
#: The two parts of the limit of an all_reduce on two ranks (host.py).
READ, OWN = "read", "own"

Measurement = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """An aim, and the measured value.

    measured: None without a measurement; ``note`` may have the reason.
    spread:   half the distance between the quartiles of the measured value.
    note:     the point of the measurement, such as a primitive and a size.
    within:   the aim is also met if the limit is within the spread.
    """

    name: str
    limit: float
    measured: float | None
    unit: str
    at_least: bool = False
    spread: float | None = None
    note: str = ""
    within: bool = False

    @property
    def met(self) -> bool | None:
        """Return whether the aim is met, by the rounded figures; None if it is not measured."""
        if self.measured is None:
            return None
        limit, measured = round(self.limit, 2), round(self.measured, 2)
        slack = round(self.spread or 0.0, 2) if self.within else 0.0
        return measured + slack >= limit if self.at_least else measured - slack <= limit

    @property
    def asked(self) -> str:
        """The limit as text."""
        text = f"at {'least' if self.at_least else 'most'} {self.limit:g} {self.unit}"
        return f"{text}, or within its spread" if self.within else text

    @property
    def verdict(self) -> str:
        """The result as text."""
        return {None: "not measured", True: "met", False: "MISSED"}[self.met]


def times_of(measurement: Measurement) -> Times:
    """Return the samples of a measurement."""
    return Times(measurement["seconds"])


def format_seconds(seconds: float) -> str:
    """Format a time in a suitable unit."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


class Results:
    """The measurements with one MPI, on one machine.

    records: the contents of the files.
    label:   the MPI, and the other libraries of its environment.
    name:    the MPI without its version.
    cpu:     the model of the processors.
    """

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.records = records
        self.measurements: list[Measurement] = [
            each for record in records for each in record.get("measurements", ())
        ]
        first = next(record for record in records if "mpi" in record)
        self.label = " with ".join([first["mpi"], *first.get("others", ())])
        self.name: str = first["mpi"].rpartition(" ")[0]
        self.cpu: str = first["machine"]["processor"]

    @property
    def left_out(self) -> list[str]:
        """The cases that could not be measured, with the reasons."""
        return list(dict.fromkeys(w for record in self.records for w in record.get("left out", ())))

    def find(self, **keys: Any) -> list[Measurement]:
        """Return the measurements with these values."""
        wanted = keys.items()
        return [each for each in self.measurements if wanted <= each.items()]

    def by_size(self, **keys: Any) -> dict[int, Times]:
        """Return the times of the measurements with these values, by size in bytes."""
        return {each["bytes"]: times_of(each) for each in self.find(**keys)}

    def has_spare_processors(self, section: str, ranks: int) -> bool:
        """Return whether each rank had a second processor in the launch of this section."""
        for record in self.records:
            measured = record.get("measurements", ())
            if (
                "machine" in record
                and record["ranks"] == ranks
                and any(each["section"] == section for each in measured)
            ):
                machine: dict[str, int] = record["machine"]
                return machine["processors"] >= 2 * ranks and machine["processors of a rank"] >= 2
        return False


def read(folder: Path) -> list[Results]:
    """Return the results of each subfolder, sorted by name."""
    found = []
    for each in sorted(folder.iterdir()):
        records = [json.loads(path.read_text()) for path in sorted(each.glob("*.json"))]
        if any("mpi" in record for record in records):
            found.append(Results(records))
    return found


# --- the aims -----------------------------------------------------------------------------------


def aims(found: Results) -> list[Aim]:
    """Return all aims."""
    parts = (
        _contest, _limit, _cells, _start, _asynchronous, _torch,
        _dtypes, _many, _reproducible, _memory, _overlap,
    )  # fmt: skip
    return [aim for part in parts for aim in part(found)]


def _worst(
    name: str, limit: float, figures: Mapping[str, Times], at_least: bool = True,
    unit: str = "x", scale: float = 1.0, within: bool = False,
) -> Aim:  # fmt: skip
    """Return an aim with the worst of the figures, which are named by their point."""
    if not figures:
        return Aim(name, limit, None, unit, at_least, within=within)

    def figure(where: str) -> float:
        own = figures[where].figure
        slack = own.spread if within else 0.0
        return -own.median - slack if at_least else own.median - slack

    where = max(figures, key=figure)
    worst, note = figures[where].figure, where if len(figures) > 1 else ""
    measured, spread = scale * worst.median, scale * worst.spread
    return Aim(name, limit, measured, unit, at_least, spread, note, within)


def _per(
    above: Mapping[int, Times], below: Mapping[int, Times], least: int = 0, most: float = math.inf
) -> dict[str, Times]:
    """Return the ratios at the common sizes from ``least`` to ``most`` bytes."""
    return {
        format_bytes(size): above[size].pair(below[size], truediv)
        for size in above
        if size in below and least <= size <= most
    }


def _contest(found: Results) -> list[Aim]:
    """Compare all_reduce with the fastest of the other libraries, at each size."""
    collected = []
    for name, least, most, limit in (
        ("4 KiB to 1 MiB", 4 * KIB, MIB, 1.25), ("from 4 MiB on", 4 * MIB, 64 * MIB, 1.15),
    ):  # fmt: skip
        ratios: dict[str, Times] = {}
        for section in ("sizes", "contest"):
            keys = {"section": section, "primitive": "all_reduce", "dtype": "float32", "ranks": 2}
            own = found.by_size(**keys, case=FACADE)
            cases = dict.fromkeys(one["case"] for one in found.find(**keys))
            for case in (case for case in cases if case not in (FACADE, TORCH, COPY)):
                other = found.by_size(**keys, case=case)
                each = _per(other, own, least, most)
                ratios |= {f"{size}, {case}": times for size, times in each.items()}
        name = f"all_reduce {name}: fastest other library / mpicoll"
        collected.append(_worst(name, limit, ratios))
    return collected


def _limit(found: Results) -> list[Aim]:
    """Compare all_reduce with measured copies: of the other rank's data, and in the own array."""
    own, read, write = (
        found.by_size(section="limit", case=case) for case in (FACADE, READ, OWN)
    )  # fmt: skip
    ratios = {
        format_bytes(size): read[size].pair(write[size], add).pair(times, truediv)
        for size, times in own.items()
    }
    return [_worst("all_reduce: share of the limit", 75.0, ratios, unit="%", scale=100.0)]


def slower_cells(found: Results) -> dict[int, dict[tuple[str, int], Times]]:
    """Return mpicoll's time / MPI's own by number of ranks, primitive and bytes, the worst first.

    Only cells where mpicoll is slower beyond the spread. Cells without one are missing.
    """
    cells: dict[int, dict[tuple[str, int], Times]] = {}
    for section, ranks in (("sizes", 2), ("growth", 4)):
        keys = {"section": section, "ranks": ranks, "dtype": "float32"}
        every = cells.setdefault(ranks, {})
        for primitive in dict.fromkeys(one["primitive"] for one in found.find(**keys)):
            own, raw = (
                found.by_size(**keys, primitive=primitive, case=case) for case in (FACADE, MPI4PY)
            )
            every |= {(primitive, size): own[size].pair(raw[size], truediv) for size in raw}
    return {ranks: dict(sorted(every.items(), key=_slowness)) for ranks, every in cells.items()}


def _slowness(cell: tuple[Any, Times]) -> float:
    """Order cells by their ratio, the greatest first."""
    return -cell[1].figure.median


def is_slower(ratio: Times) -> bool:
    """Return whether a ratio of times is above 1 beyond its spread."""
    figure = ratio.figure
    return round(figure.median, 2) - round(figure.spread, 2) > 1


def _cells(found: Results) -> list[Aim]:
    """Compare every primitive with MPI's own call with a prepared buffer, at every size."""
    collected = []
    for ranks, cells in slower_cells(found).items():
        figures = {f"{name} {format_bytes(size)}": times for (name, size), times in cells.items()}
        name = f"any primitive, {ranks} ranks: mpicoll / one call of mpi4py with a ready buffer"
        aim = _worst(name, 1.0, figures, at_least=False, within=True)
        slower = sum(map(is_slower, cells.values()))
        note = f"{aim.note}; {slower} of {len(cells)} cells slower" if cells else ""
        collected.append(replace(aim, note=note))
    return collected


def _start(found: Results) -> list[Aim]:
    """Compare the start of many ranks with that of mpi4py."""
    keys = {"section": "start"}
    own, raw = (found.by_size(**keys, case=case) for case in (FACADE, MPI4PY))
    name = "start of 48 ranks: init_process_group / mpi4py alone"
    return [_worst(name, 1.5, _per(own, raw), at_least=False)]


def _asynchronous(found: Results) -> list[Aim]:
    """Compare asynchronous calls with synchronous ones."""
    at_once, begun = (
        found.by_size(section="async", how=how) for how in ("synchronous", "asynchronous")
    )
    more = {format_bytes(size): begun[size].pair(at_once[size], sub) for size in begun}
    return [_worst("all_reduce: asynchronous less synchronous", 1.5, more, False, "us", 1e6)]


def _dtypes(found: Results) -> list[Aim]:
    """Compare narrow floats with float32."""
    keys = {"section": "dtypes", "case": FACADE, "primitive": "all_reduce"}
    wide = found.by_size(**keys, dtype="float32")
    return [
        _worst(
            f"all_reduce from 1 MiB on: {dtype} / float32 of as many bytes",
            1.3,
            _per(found.by_size(**keys, dtype=dtype), wide, least=MIB),
            at_least=False,
        )
        for dtype in ("bfloat16", "float16")
    ]


def _reproducible(found: Results) -> list[Aim]:
    """Compare reproducible groups with the default."""
    collected = []
    for level, limit in (("order", 1.1), ("exact", 3.0)):
        ratios: dict[str, Times] = {}
        for dtype in ("float32", "float64"):
            keys = {"section": "reproducible", "dtype": dtype}
            own, plain = (found.by_size(**keys, how=how) for how in (level, "default"))
            ratios |= {f"{dtype} {size}": times for size, times in _per(own, plain).items()}
        name = f"all_reduce 16 MiB: reproducible={level} / default"
        collected.append(_worst(name, limit, ratios, at_least=False))
    return collected


def _many(found: Results) -> list[Aim]:
    """Compare many calls with one coalesced call."""
    collected = []
    for count, size, limit in ((1000, 4 * KIB, 3.5), (16, 256 * KIB, 1.0)):
        keys = {"section": "many", "case": FACADE, "count": count, "bytes": size}
        one_by_one, coalesced = (
            found.by_size(**keys, how=how) for how in ("one by one", "coalesced")
        )
        name = f"{count} all_reduces of {format_bytes(size)}: one by one / coalesced"
        collected.append(_worst(name, limit, _per(one_by_one, coalesced)))
    return collected


def _memory(found: Results) -> list[Aim]:
    """Return the maximum memory of a collective besides its arrays."""
    taken = found.find(section="memory", case=FACADE)
    most = max(taken, key=lambda each: each["extra"], default=None)
    name, limit = "memory of a rank besides arrays of 256 MiB", 64.0
    if most is None:
        return [Aim(name, limit, None, "MiB")]
    return [Aim(name, limit, most["extra"] / MIB, "MiB", note=most["primitive"])]


def hidden(found: Results, caller: str, primitive: str, ranks: int) -> dict[int, Times]:
    """Return the overlap of a call with computation by size, as the OSU benchmarks define it.

    Overlap is 1 - (beside - compute) / pure.
    """
    pure, compute, beside = (
        found.by_size(section="overlap", case=caller, primitive=primitive, ranks=ranks, part=part)
        for part in ("pure", "compute", "beside")
    )
    shown = {size: beside[size].pair(compute[size], sub).pair(pure[size], truediv) for size in pure}
    return {size: Times(1 - share for share in own) for size, own in shown.items()}


def _overlap(found: Results) -> list[Aim]:
    """Compare the overlap of calls with computation."""
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
            totals[point] = beside[size].pair(in_turn[size], truediv)
            if size in raw:
                gains[point] = share.pair(raw[size], sub)
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
    small = {"section": "sizes", "case": TORCH, "primitive": "all_reduce", "bytes": 4}
    least = {format_bytes(size): each for size, each in found.by_size(**small).items()}
    collected = [_worst("all_reduce 4 B: mpicoll torch", 3.5, least, False, "us", 1e6)]
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
                {size: each.pair(local[size], sub) for size, each in times.items()}
                for times in (own, gloo)
            )
            name = "DDP step above the local step: mpicoll torch / Gloo"
            collected.append(_worst(name, 0.4, _per(above, other), at_least=False))
        name = f"DDP step, buckets of {bucket:g} MB: asynchronous / synchronous"
        collected.append(_worst(name, 1.0, _per(own, at_once), at_least=False))
    return collected
