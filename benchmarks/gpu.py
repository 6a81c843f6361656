"""Run all benchmarks on device memory, for ``make bench-gpu`` and tests/gpu/on_a_gpu.sh.

    python benchmarks/gpu.py [--ranks 2 4] [--out FOLDER] [options]

Each piece is a launch of ranks that writes a file in FOLDER:

    PRIMITIVE-DTYPE-RANKS.json  ``bench --device cuda`` from 4 B to 1 GiB: the route that mpicoll
                                selects, each route that these ranks support (always staging, NCCL
                                if each rank has a GPU), and a copy of the same number of bytes
    training-RANKS.json         ``host.py ddp fsdp --device cuda``: steps of DDP and FSDP2 on CUDA
                                tensors, over mpicoll and over Gloo

The output of the ranks is in a .log file with the same name. --resume skips the pieces whose files
exist, so that runs with --limit can continue each other. Run the script with the Python of the
ranks. The machine should be idle. Exit code: 0 on success, 1 if a piece failed, 3 if the time limit
was reached.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from compare import HERE, ROOT, Launch, run

from mpicoll.primitives import PRIMITIVES

#: Pieces, the most important ones first.
TRAINING = "training"
MEASURED = ["all_reduce", TRAINING]
MEASURED += [row.name for row in PRIMITIVES if row.output and row.name not in MEASURED]
DTYPES = ["float", "bfloat16"]
#: Minimum duration and timeout of a piece in seconds.
SHORTEST_S, LONGEST_S = 20, 300


def pieces(options: argparse.Namespace) -> Iterator[Launch]:
    """Yield all pieces."""
    for n in options.ranks:
        for name in options.only:
            if name == TRAINING:
                words = [str(HERE / "host.py"), "ddp", "fsdp", "--device", "cuda"]
                yield Launch(f"{TRAINING}-{n}", n, words)
                continue
            for dtype in options.dtypes:
                words = ["-m", "mpi4py", "-m", "mpicoll", "bench", name, "-d", dtype]
                words += ["-b", "4", "-e", options.largest, "-f", "4", "--device", "cuda"]
                words += ["--routes", "all", "--compare", "copy"]
                yield Launch(f"{name}-{dtype}-{n}", n, words)


def measure(options: argparse.Namespace) -> int:
    """Launch the pieces without a file. Return the exit code."""
    end, failed, over = time.monotonic() + options.limit, 0, 0
    mpiexec = shlex.split(options.mpiexec)
    left_out = [
        each for each in pieces(options) if not (options.out / f"{each.name}.json").exists()
    ]
    # Pieces that were started before run last, because they may fail again after a long time.
    for piece in sorted(left_out, key=lambda each: (options.out / f"{each.name}.log").exists()):
        left = end - time.monotonic()
        if left < SHORTEST_S:
            over += 1
            continue
        print(f"---- {piece.name}", flush=True)
        wrong = run(piece, Path(sys.executable), mpiexec, options.out, min(left, LONGEST_S))
        print((options.out / f"{piece.name}.log").read_text(), flush=True)
        if wrong.startswith("timed out") and left < LONGEST_S:
            over += 1
        elif wrong:
            failed += 1
            print(f"FAILED {piece.name}: {wrong}", flush=True)
    if over:
        print(f"NOT RUN {over} pieces: time limit reached; continue with --resume")
    return 1 if failed else 3 if over else 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--mpiexec", default=str(Path(sys.executable).parent / "mpiexec"),
        help="the launcher (default: %(default)s)")  # fmt: skip
    add("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    add("--only", nargs="+", choices=MEASURED, default=MEASURED, metavar="NAME",
        help=f"any of {', '.join(MEASURED)}")  # fmt: skip
    add("--dtypes", nargs="+", default=DTYPES, metavar="DTYPE",
        help=f"dtypes of bench (default: {' '.join(DTYPES)})")  # fmt: skip
    add("--largest", default="1G", metavar="SIZE", help="maximum size (default: %(default)s)")
    add("--limit", type=float, default=float("inf"), metavar="SECONDS", help="time limit")
    add("--out", type=lambda text: Path(text).resolve(), default=ROOT / ".cache" / "bench-gpu",
        metavar="FOLDER", help="output folder (default: %(default)s)")  # fmt: skip
    add("--resume", action="store_true", help="skip pieces with a file in that folder")
    return parser.parse_args()


def main() -> int:
    """Run the pieces."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `run` ends the ranks
    options.out.mkdir(parents=True, exist_ok=True)
    for piece in [] if options.resume else pieces(options):
        for ending in ("json", "log"):
            (options.out / f"{piece.name}.{ending}").unlink(missing_ok=True)
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
