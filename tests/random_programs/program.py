"""One rank of a random program: collectives on random arrays, checked against the oracle.

    mpiexec -n N python tests/random_programs/program.py SEED SECONDS [--far] [--any-order]

What all ranks have to do alike comes from SEED; how a rank's own arrays lie in memory, and when it
is late, from another generator. A wrong result, an error and a missing error end the job with the
call, its number and the seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "mpi"))

import oracle
from conftest import Team, team
from driver import (
    COALESCED,
    DTYPES,
    MOVES,
    REDUCTIONS,
    Call,
    Exact,
    check_same_bits,
    guarded,
    legal_operations,
    together,
)
from oracle import Between

import mpicoll as dist
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.failures import consistency

try:
    import torch
except ImportError:
    torch = None

#: Bytes around which some route begins, ends, or cuts messages.
THRESHOLDS = (64, 512, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 2 << 20)
#: How often each is drawn: the oracle takes its time.
OFTEN = (9, 9, 9, 9, 9, 9, 6, 3, 2, 1)
#: Calls between two looks at the clock, and calls of one kind in the palette of a while.
STRIDE, PALETTE = 50, 30

# ---- Arrays, as this rank happens to have them ---------------------------------------------------


def strided(shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
    """Return every other element of an array."""
    array = np.zeros((*shape, 2), dtype.numpy)[..., 0]
    return array, array


def unaligned(shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
    """Return an array that begins at an odd address."""
    memory = np.zeros(int(np.prod(shape)) * dtype.itemsize + 1, np.uint8)
    array = memory[1:].view(dtype.numpy).reshape(shape)
    return array, array


def tensor(shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
    """Return a tensor of torch; an array of NumPy if torch has no such dtype, or is not here."""
    kind = getattr(torch, dtype.name, None)
    if kind is None:
        return guarded(shape, dtype)
    made = torch.zeros(shape, dtype=kind)
    return made, made.reshape(-1).view(torch.uint8).numpy().view(dtype.numpy).reshape(shape)


MAKERS = [guarded] * 6 + [tensor] * 3 + [strided, unaligned]


class Rounded(Call):
    """A call in a group of exact sums: those of narrow floats are rounded once, to any zero."""

    def result(self) -> Between:
        if self.dtype.kind is not Kind.NARROW_FLOAT or self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            return super().result()
        arrays = [self.given(rank) for rank in self.terms]
        once = oracle.reduced(self.op, self.dtype, arrays, [1] * len(arrays))
        # An average of what float32 cannot hold is infinite.
        with np.errstate(invalid="ignore"):
            total = np.stack(arrays).astype(np.longdouble).sum(axis=0)
        too_large = np.abs(total) > np.finfo(np.float32).max
        infinite = oracle.rounded(np.copysign(np.float32(np.inf), total), self.dtype)
        return Between(*(np.where(too_large, infinite, end) for end in (once.low, once.high)))


# ---- Programs ------------------------------------------------------------------------------------


class Program:
    """A rank's part.

    alike: generator of what all ranks do; own: of what is this rank's own affair.
    """

    def __init__(self, seed: int, far: bool, any_order: bool) -> None:
        self.mpi = MPI.COMM_WORLD
        self.alike = random.Random(seed)
        self.own = random.Random(f"{seed} {self.mpi.rank}")
        self.far = far
        #: Narrow floats have values that are combined exactly, for MPI combines in any order.
        self.made: type[Call] = Exact if any_order else Call
        self.calls = 0
        self.what = "init_process_group"
        self.teams: list[Team] = [team("world", range(self.mpi.size))]
        self.pending: list[tuple[Any, Call]] = []
        self.palette: list[tuple[Any, ...]] = []

    def run(self, seconds: float) -> None:
        """Go on until rank 0 says that the time is over."""
        end = time.monotonic() + seconds
        while self.mpi.bcast(time.monotonic() < end):
            self.wait()
            self.change_groups()
            self.palette = [self.draw() for _ in range(PALETTE)]
            for _ in range(STRIDE * self.alike.choice((1, 3))):
                self.step()
        self.wait()
        self.what = "destroy_process_group"
        dist.destroy_process_group()

    def change_groups(self) -> None:
        """Make a group, end one, or leave them; ranks outside make it, too."""
        if len(self.teams) > 1 and self.alike.random() < 0.4:
            ended = self.teams.pop(self.alike.randrange(1, len(self.teams)))
            self.what = f"destroy_process_group({ended.name})"
            if ended.me is not None:
                dist.destroy_process_group(ended.group)
        if len(self.teams) < 5:
            n = self.mpi.size
            ranks = self.alike.sample(range(n), self.alike.randint(1, n))
            level = self.alike.choice([None, None, "order", "exact"])
            self.what = f"new_group({ranks}, reproducible={level})"
            group = dist.new_group(ranks, sort_ranks=False, reproducible=level)
            me = ranks.index(self.mpi.rank) if self.mpi.rank in ranks else None
            name = f"{len(ranks)} ranks {level} {self.calls}"
            self.teams.append(Team(name, group, tuple(ranks), me))
        for one in self.teams:
            early = self.alike.random() < 0.3
            if one.me is not None:
                self.begin(one, early)

    def begin(self, one: Team, early: bool) -> None:
        """Bring a group past the calls after which its ranks share memory; set its distances."""
        if not early:
            while one.group.sequence < consistency.FIRST + 2:
                dist.all_reduce(np.zeros(1, np.float32), group=one.group)
        memory = one.group.resources.find("shared")
        if memory is not None and self.far:
            memory._segment.far_bits = self.own.choice([0, 1, 2, 0xFF])
            memory._segment.bytes_until_measurement = 1 << 62

    def draw(self) -> tuple[Any, ...]:
        """Return a name, dtype, operation, count of a block, and whether it is asynchronous."""
        dtype = self.alike.choice(DTYPES)
        operations = legal_operations(dtype)
        reduces = bool(operations) and self.alike.random() < 0.55
        name = self.alike.choice(REDUCTIONS if reduces else MOVES)
        op = self.alike.choice(operations) if reduces else None
        (nbytes,) = self.alike.choices(THRESHOLDS, OFTEN)
        count = max(0, nbytes // dtype.itemsize + self.alike.choice((-1, 0, 0, 1)))
        if self.alike.random() < 0.4:
            count = self.alike.choice((1, 2, 3, 7, 17))
        return name, dtype, op, count, self.alike.random() < 0.25

    def step(self) -> None:
        """Make one call, or a call that the others do not make."""
        self.calls += 1
        one = self.alike.choice(self.teams)
        name, dtype, op, count, later = self.alike.choice(self.palette)
        wrong = self.alike.random() < 0.01
        which = self.alike.randrange(one.size), self.alike.randrange(4)
        root, in_place, same = (
            self.alike.randrange(one.size), self.alike.random() < 0.15, self.alike.random() < 0.05
        )  # fmt: skip
        several = self.alike.random() < 0.15
        more = [self.alike.randrange(9) for _ in range(self.alike.choice((1, 2, 40)) * several)]
        if one.me is None:
            return
        if self.own.random() < 0.01:
            time.sleep(0.003)
        if wrong:
            self.mismatch(one, *which)
            return
        make = self.own.choice(MAKERS)
        self.what = f"{name} of {dtype} {op} {count} in {one.name}"
        exact = one.group.reproducible == "exact"
        made = Rounded if exact else Call if op is ReduceOp.PREMUL_SUM else self.made
        listed = bool(more) and name in COALESCED
        calls = [
            made(name, one, dtype, count + k, op, root, make if k == 0 else self.own.choice(MAKERS))
            for k in (more if listed else [0])
        ]
        if in_place and make is guarded and not listed:
            put_in_place(calls[0])
        try:
            work = together(name, calls, later) if listed else calls[0].start(later)
        except dist.UnsupportedError:
            if not exact or op is None or dtype.kind is Kind.INTEGER:
                raise
            return
        if later:
            self.pending.extend((work, call) for call in calls)
            if self.own.random() < 0.3:
                self.wait()
        else:
            for call in calls:
                call.check()
            if same and op is not None and name.startswith("all_reduce") and one.name == "world":
                check_same_bits(self.mpi, calls)

    def mismatch(self, one: Team, rank: int, other: int) -> None:
        """Make another call on one rank: where each call is compared, all are told."""
        self.wait()
        if one.size == 1 or not one.group.compared:
            return
        self.what = f"call {other} on rank {rank} of {one.name} alone"
        x, n = np.ones(100, np.float32), one.size
        calls: list[Callable[[], object]] = [
            lambda: dist.barrier(group=one.group),
            lambda: dist.all_reduce(np.ones(101, np.float32), group=one.group),
            lambda: dist.all_gather_single(np.ones(100 * n, np.float32), x, group=one.group),
            lambda: dist.all_reduce(np.ones(100, np.float64), group=one.group),
        ]
        try:
            if one.me == rank:
                calls[other]()
            else:
                dist.all_reduce(x, group=one.group)
        except dist.MismatchError:
            return
        raise AssertionError("no MismatchError")

    def wait(self) -> None:
        """Wait for what is pending, and check it."""
        for work, call in self.pending:
            self.what = f"waiting for {call.what}"
            work.wait()
            call.check()
        self.pending.clear()


def put_in_place(call: Call) -> None:
    """Let a call read its own block from where it writes, or write it where it reads."""
    if call.name not in ("all_gather_single", "reduce_scatter_single") or call.count == 0:
        return
    (_, mine, _), (_, whole, _) = sorted(call.watched, key=lambda one: one[1].size)
    part = whole[call.me * call.count : (call.me + 1) * call.count]
    gathers = call.name == "all_gather_single"
    if gathers:
        part[...] = mine
        call.arguments[call.row.input] = part
    else:
        call.arguments[call.row.output] = part
    # Of the array that is both, what the call is to give, and nothing of the array no longer used.
    expected = next(e for name, _, e in call.watched if name == call.row.output)
    call.watched = [(call.row.output, whole if gathers else part, expected)]
    call.make = unaligned  # nothing beside a part stays as it was


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--far", action="store_true")
    parser.add_argument("--any-order", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group(timeout=60)
    program = Program(arguments.seed, arguments.far, arguments.any_order)
    try:
        program.run(arguments.seconds)
    except BaseException:
        rank = program.mpi.rank
        print(
            f"rank {rank}, seed {arguments.seed}, call {program.calls}: {program.what}\n"
            + traceback.format_exc(),
            file=sys.stderr, flush=True,
        )  # fmt: skip
        program.mpi.Abort(3)
    if program.mpi.rank == 0:
        print(program.calls)


if __name__ == "__main__":
    main()
