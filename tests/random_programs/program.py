"""Make random collectives on random arrays, and compare the results with the oracle.

    mpiexec -n N python tests/random_programs/program.py SEED SECONDS [options]

SEED determines the calls of all ranks. Each rank has another generator for the memory layout of its
arrays and for its delays. After a wrong result, an error or a missing error, the job prints the
call, its number and the seed, and ends. With --processors, groups that share memory use it as if
each rank had several processors: with threads, and with calls of MPI.
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
from mpicoll.kernels.library import kernels
from mpicoll.routes.host import hierarchy, shared, shared_segment

try:
    import torch
except ImportError:
    torch = None

#: Sizes at which routes or algorithms change, in bytes.
THRESHOLDS = (64, 512, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 2 << 20)
#: Their weights: the oracle is slow for large arrays.
WEIGHTS = (9, 9, 9, 9, 9, 9, 6, 3, 2, 1)
#: Number of calls between two checks of the clock, and number of call signatures drawn for them.
STRIDE, PALETTE_SIZE = 50, 30

# ---- Arrays with a memory layout of this rank ----------------------------------------------------


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
    """Return a tensor, or a NumPy array if torch is missing or does not have the dtype."""
    kind = getattr(torch, dtype.name, None)
    if kind is None:
        return guarded(shape, dtype)
    made = torch.zeros(shape, dtype=kind)
    return made, made.reshape(-1).view(torch.uint8).numpy().view(dtype.numpy).reshape(shape)


MAKERS = [guarded] * 6 + [tensor] * 3 + [strided, unaligned]


class Rounded(Call):
    """A call in a group with level exact: sums of narrow floats are rounded once, to any zero."""

    def result(self) -> Between:
        if self.dtype.kind is not Kind.NARROW_FLOAT or self.op not in (ReduceOp.SUM, ReduceOp.AVG):
            return super().result()
        arrays = [self.given(rank) for rank in self.terms]
        once = oracle.reduced(self.op, self.dtype, arrays, [1] * len(arrays))
        # The average of a sum outside float32's range is infinite.
        with np.errstate(invalid="ignore"):
            total = np.stack(arrays).astype(np.longdouble).sum(axis=0)
        too_large = np.abs(total) > np.finfo(np.float32).max
        infinite = oracle.rounded(np.copysign(np.float32(np.inf), total), self.dtype)
        return Between(*(np.where(too_large, infinite, end) for end in (once.low, once.high)))


# ---- Programs ------------------------------------------------------------------------------------


class Program:
    """A random program.

    common: random generator with the same state on all ranks. own: generator of this rank.
    """

    def __init__(self, seed: int, any_order: bool) -> None:
        self.mpi = MPI.COMM_WORLD
        self.common = random.Random(seed)
        self.own = random.Random(f"{seed} {self.mpi.rank}")
        #: With any_order, sums of narrow floats are exact, because MPI reduces in any order.
        self.made: type[Call] = Exact if any_order else Call
        self.calls = 0
        self.current = "init_process_group"
        self.teams: list[Team] = [team("world", range(self.mpi.size))]
        self.pending: list[tuple[Any, Call]] = []
        self.palette: list[tuple[Any, ...]] = []

    def run(self, seconds: float) -> None:
        """Make calls until the time of rank 0 is over."""
        end = time.monotonic() + seconds
        while self.mpi.bcast(time.monotonic() < end):
            self.wait()
            self.change_groups()
            self.palette = [self.draw() for _ in range(PALETTE_SIZE)]
            for _ in range(STRIDE * self.common.choice((1, 3))):
                self.step()
        self.wait()
        self.current = "destroy_process_group"
        dist.destroy_process_group()

    def change_groups(self) -> None:
        """Create or destroy a group, or do nothing, and make the first calls of some groups, which
        do not use shared memory. All ranks call.
        """
        if len(self.teams) > 1 and self.common.random() < 0.4:
            ended = self.teams.pop(self.common.randrange(1, len(self.teams)))
            self.current = f"destroy_process_group({ended.name})"
            if ended.me is not None:
                dist.destroy_process_group(ended.group)
        if len(self.teams) < 5:
            n = self.mpi.size
            ranks = self.common.sample(range(n), self.common.randint(1, n))
            level = self.common.choice([None, None, "order", "exact" if kernels else None])
            self.current = f"new_group({ranks}, reproducible={level})"
            group = dist.new_group(ranks, sort_ranks=False, reproducible=level)
            me = ranks.index(self.mpi.rank) if self.mpi.rank in ranks else None
            name = f"{len(ranks)} ranks {level} {self.calls}"
            self.teams.append(Team(name, group, tuple(ranks), me))
        for one in self.teams:
            make_first_calls = self.common.random() < 0.7
            if one.me is not None and make_first_calls:
                while one.group.sequence < consistency.FIRST + 2:
                    dist.all_reduce(np.zeros(1, np.float32), group=one.group)

    def draw(self) -> tuple[Any, ...]:
        """Return a primitive, dtype, reduction operation, count of a block, and async_op."""
        dtype = self.common.choice(DTYPES)
        operations = legal_operations(dtype)
        reduces = bool(operations) and self.common.random() < 0.55
        name = self.common.choice(REDUCTIONS if reduces else MOVES)
        op = self.common.choice(operations) if reduces else None
        (nbytes,) = self.common.choices(THRESHOLDS, WEIGHTS)
        count = max(0, nbytes // dtype.itemsize + self.common.choice((-1, 0, 0, 1)))
        if self.common.random() < 0.4:
            count = self.common.choice((1, 2, 3, 7, 17))
        return name, dtype, op, count, self.common.random() < 0.25

    def step(self) -> None:
        """Make one call, or a mismatch."""
        self.calls += 1
        one = self.common.choice(self.teams)
        name, dtype, op, count, later = self.common.choice(self.palette)
        wrong = self.common.random() < 0.01
        which = self.common.randrange(one.size), self.common.randrange(4)
        root = self.common.randrange(one.size)
        in_place, same = self.common.random() < 0.15, self.common.random() < 0.05
        several = self.common.random() < 0.15
        more = [self.common.randrange(9) for _ in range(self.common.choice((1, 2, 40)) * several)]
        if one.me is None:
            return
        if self.own.random() < 0.01:
            time.sleep(0.003)
        if wrong:
            self.mismatch(one, *which)
            return
        make = self.own.choice(MAKERS)
        self.current = f"{name} of {dtype} {op} {count} in {one.name}"
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
        """Make another call on one rank. All ranks raise if the group compares each call."""
        self.wait()
        if one.size == 1 or not one.group.compared:
            return
        self.current = f"call {other} on rank {rank} of {one.name} alone"
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
        """Wait for the pending works and check their results."""
        for work, call in self.pending:
            self.current = f"waiting for {call.what}"
            work.wait()
            call.check()
        self.pending.clear()


def put_in_place(call: Call) -> None:
    """Make a call use one array for its input and output."""
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
    # Watch only the remaining array, with the expected output.
    expected = next(e for name, _, e in call.watched if name == call.row.output)
    call.watched = [(call.row.output, whole if gathers else part, expected)]
    call.make = unaligned  # the call may write beside the part


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--any-order", action="store_true")
    parser.add_argument("--processors", action="store_true")
    parser.add_argument("--nodes", action="store_true", help="as if ranks were on two nodes")
    arguments = parser.parse_args()
    if arguments.processors:
        shared_segment._processors = lambda: set(range(64))
        shared.SPIN_COUNT = shared.CROWDED_SPIN_COUNT
    if arguments.nodes:
        hierarchy.node_of = lambda: f"node {dist.get_rank() % 2}"
    dist.init_process_group(timeout=60)
    program = Program(arguments.seed, arguments.any_order)
    try:
        program.run(arguments.seconds)
    except BaseException:
        rank = program.mpi.rank
        print(
            f"rank {rank}, seed {arguments.seed}, call {program.calls}: {program.current}\n"
            + traceback.format_exc(),
            file=sys.stderr, flush=True,
        )  # fmt: skip
        program.mpi.Abort(3)
    if program.mpi.rank == 0:
        print(program.calls)


if __name__ == "__main__":
    main()
