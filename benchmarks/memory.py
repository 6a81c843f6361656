"""What a collective takes in memory besides its arrays, at its peak, on two ranks or more.

    mpirun -n 2 python benchmarks/memory.py all_reduce mpicoll --json memory.json

The peak is the kernel's: VmHWM of /proc/self/status, which is brought down to what the process has
(by /proc/self/clear_refs) when the ranks are connected and the arrays are there, and read after
three calls. It counts pages that the process has touched since, those that it shares with other
ranks once for each rank that touched them, and what the MPI library and Python take in the calls.
A process measures one collective alone, for libraries keep what they took. The greatest of the
ranks is told. The file is one of host.py's kind, with ``extra`` (bytes) in the place of times.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

import numpy as np
from contestants import PLACE, World
from measure import FACADE, MIB, MPI4PY, Report, bytes_shown
from points import file, one_speaks

from mpicoll.cli.bench_calls import Buffers
from mpicoll.primitives import PRIMITIVES

SIZE = 256 * MIB
CALLS = 3


def peak() -> int:
    """The most bytes that the process had since the peak was forgotten."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no VmHWM")


def forget_peak() -> None:
    """The peak is what the process has now."""
    with suppress(OSError):  # not everywhere allowed; the arrays are most of the peak all the same
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("primitive", choices=[row.name for row in PRIMITIVES if row.output])
    parser.add_argument("who", choices=(MPI4PY, FACADE))
    parser.add_argument("--size", type=int, default=SIZE, metavar="BYTES",
                        help="of the larger array (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=file, metavar="FILE", help="write the figures there")
    with one_speaks():
        options = parser.parse_args()
    world = World(torch=False)
    report = Report(world.ranks)
    report.record |= world.facts()
    case = world.case(options.primitive, options.size)
    call = world.contestants[options.who].call(case, Buffers(case, PLACE))
    assert call is not None
    world.mpi.Barrier()
    forget_peak()
    before = peak()
    for _ in range(CALLS):
        call()
    extra = np.array([float(peak() - before)])
    world.ranks.slowest(extra)
    report.add("measurements", {
        "section": "memory", "case": options.who, "primitive": options.primitive,
        "ranks": world.n, "bytes": case.size, "dtype": "float32", "extra": int(extra[0]),
    })  # fmt: skip
    report.line(f"{options.primitive} {bytes_shown(case.size)} {options.who}: "
                f"{extra[0] / MIB:.1f} MiB more")  # fmt: skip
    report.write(options.json)
    world.close()


if __name__ == "__main__":
    main()
