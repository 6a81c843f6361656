"""Kernels of route ``peer`` on one GPU. Each rank is a stream of this process. The GPU runs the
blocks of all ranks at the same time.

tests/gpu/test_peer.py tests the route, which needs one GPU per rank.
tests/sanitize/device_peers_test.cpp searches for races.
"""

from __future__ import annotations

import itertools

import cupy
import numpy as np
import pytest
from oracle import operands
from test_kernels import OnDevice, assert_same

from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels import peers, reduction
from mpicoll.kernels.device_kernels import DeviceKernels
from mpicoll.kernels.peers import ALL, Collective, Failure, Peers

#: Blocks of a rank: 4 ranks have 8 blocks of 512 threads together.
BLOCKS = 2
#: Size of an area. A long call uses several.
AREA_BYTES = 16 * 1024
#: Timeout of kernels.
TIMEOUT_S = 60
#: One block; two blocks, one-shot; one-shot or two-shot, depending on the dtype; two-shot.
COUNTS = (7, 20_000, 100_003, 300_007)


class Placed:
    """One array per rank on the device, at different alignments."""

    def __init__(self, op, dtype, counts, seed):
        self.dtype = dtype
        self.given = [operands(op, dtype, count, seed + r) for r, count in enumerate(counts)]
        number = dtype.itemsize // (2 if dtype.numpy.kind == "c" else 1)
        self.held = [
            OnDevice(array, number * offset)
            for array, offset in zip(self.given, (0, 1, 5, 2), strict=False)
        ]

    def address(self, rank):
        return self.held[rank].address

    def check(self, rank, expected):
        assert_same(self.held[rank].got(), expected, self.dtype.kind, f"rank {rank}")


class Ranks:
    """Ranks with workspaces and streams on one GPU."""

    def __init__(self, n, limit=TIMEOUT_S):
        self.kernels, self.n = DeviceKernels(0), n
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(n)]
        nbytes = peers.HEADER.itemsize + 2 * n * BLOCKS * AREA_BYTES
        self.workspaces = [OnDevice(np.zeros(nbytes, np.uint8)) for _ in range(n)]
        self.pinned = cupy.cuda.alloc_pinned_memory(8 * n)
        self.reports = np.frombuffer(self.pinned, np.uint64, n)
        self.reports.fill(0)
        addresses = tuple(each.address for each in self.workspaces)
        self.peers = [
            Peers(addresses, r, self.pinned.ptr + 8 * r, int(limit * 1e9), AREA_BYTES, BLOCKS)
            for r in range(n)
        ]

    def enqueue(self, rank, collective):
        self.kernels.collective(self.peers[rank], collective, self.streams[rank].ptr)

    def run(self):
        """Synchronize all streams. Return the failure words of the ranks."""
        for stream in self.streams:
            stream.synchronize()
        return self.reports.tolist()

    def check(self, checks):
        failures = [Failure.unpack(word) for word in self.run() if word]
        assert not failures, f"kernels have failed: {failures}"
        for check in checks:
            check()


def enqueue(ranks, name, dtype, op, counts, root, seed):
    """Enqueue a call on all ranks. Return a function that checks their arrays.

    counts: number of elements of each block; of the whole array for all_reduce and broadcast.
    """
    by, total = reduction.find_loop(op, dtype) if op is not None else None, sum(counts)
    numbers, kind = by.elements if by else 1, ReduceOp.SUM if op is None else op
    starts = [0, *itertools.accumulate(counts)]
    sends = counts if name == "all_gather" else [total] * ranks.n
    send = recv = Placed(kind, dtype, sends, seed)
    extent = {"count": total * numbers, "root": root}
    if name in ("all_gather", "reduce_scatter"):
        received = counts if name == "reduce_scatter" else [total] * ranks.n
        recv = Placed(kind, dtype, received, seed + 9)
        extent = {"starts": [each * numbers for each in starts]}
    divisor = ranks.n if op is ReduceOp.AVG else 1
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            name, by, dtype.itemsize // numbers, 0 if recv is send else send.address(r),
            recv.address(r), divisor=divisor, **extent,
        ))  # fmt: skip
    if op is not None:
        expected = np.empty(total, dtype.numpy)
        with np.errstate(all="ignore"):
            reduction.combine(op, dtype, send.given, expected, divisor)
    else:
        expected = send.given[root] if name == "broadcast" else np.concatenate(send.given)

    def check():
        for r in range(ranks.n):
            if name == "reduce_scatter":
                recv.check(r, expected[starts[r] : starts[r + 1]])
            else:
                written = name != "all_reduce" or root in (ALL, r)
                recv.check(r, expected if written else send.given[r])
            if recv is not send:
                send.check(r, send.given[r])

    return check


@pytest.fixture(params=[1, 2, 3, 4])
def ranks(request):
    return Ranks(request.param)


#: A sample with each size, format and operation. test_kernels.py covers all of them.
ROWS = [
    ("SUM", "float32"), ("AVG", "bfloat16"), ("MIN", "float64"), ("PRODUCT", "float16"),
    ("SUM", "float8_e4m3fn"), ("BXOR", "int8"), ("MAX", "uint16"), ("SUM", "int64"),
    ("BOR", "bool"), ("SUM", "complex64"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_reductions(ranks, op, name):
    """One-shot and two-shot, at any alignment, several calls in order."""
    kind, n, checks = (by_name[name], getattr(ReduceOp, op)), ranks.n, []
    for turn, count in enumerate(COUNTS):
        for root in (ALL, turn % n):
            checks.append(enqueue(ranks, "all_reduce", *kind, [count], root, 10 * turn))
        counts = [count // 2, 0, count, 5][:n]
        checks.append(enqueue(ranks, "reduce_scatter", *kind, counts, ALL, 10 * turn))
    ranks.check(checks)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_data_movement(ranks, width):
    kind, n, checks = (by_name[f"uint{8 * width}"], None), ranks.n, []
    for turn, count in enumerate(COUNTS):
        counts = [count, 0, 2 * count, 5][:n]
        checks.append(enqueue(ranks, "all_gather", *kind, counts, ALL, turn))
        checks.append(enqueue(ranks, "broadcast", *kind, [count], turn % n, turn))
    ranks.check(checks)


def without(ranks, missing, shorter=None):
    """Enqueue an all_reduce on all ranks but one. Another rank makes a shorter call."""
    dtype = by_name["float32"]
    by = reduction.find_loop(ReduceOp.SUM, dtype)
    placed = Placed(ReduceOp.SUM, dtype, [1000] * ranks.n, 0)
    for r in {*range(ranks.n)} - {missing}:
        ranks.enqueue(r, Collective(
            "all_reduce", by, 4, 0, placed.address(r), count=20 if r == shorter else 1000,
            call=5 + (r == shorter),
        ))  # fmt: skip
    return placed


@pytest.mark.parametrize("n", [2, 4])
def test_kernels_time_out_if_a_rank_is_missing(n):
    ranks = Ranks(n, limit=2)
    held = without(ranks, n - 1)
    *failures, last = ranks.run()
    assert last == 0 and held
    for failure in map(Failure.unpack, failures):
        assert failure.why == peers.LATE and failure.other == n - 1


@pytest.mark.parametrize("n", [2, 4])
def test_all_ranks_report_calls_that_differ(n):
    ranks = Ranks(n)
    held = without(ranks, None, shorter=1)
    for failure in map(Failure.unpack, ranks.run()):
        assert failure.why == peers.DIFFERS and 1 in (failure.rank, failure.other) and held
        assert failure.call == 5 + (failure.rank == 1), "not the call of the reporting rank"


@pytest.mark.parametrize("n", [2, 4])
def test_host_aborts_waiting_and_later_kernels(n):
    """By a store to host memory. The kernels keep the host's failure word."""
    ranks = Ranks(n)
    held = [without(ranks, n - 1)]
    aborted = Failure(0, peers.FAILED, n - 1, 0).pack()
    ranks.reports.fill(aborted)
    assert ranks.run() == [aborted] * n and held
    held.append(without(ranks, None))
    assert ranks.run() == [aborted] * n
