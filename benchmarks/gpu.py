"""Measure everything on device memory; ``make bench-gpu`` and tests/gpu/on_a_gpu.sh call it.

    python benchmarks/gpu.py [--ranks 2 4] [--out FOLDER] [options]

Each piece is a launch of ranks, and is done when its file is in FOLDER:

    PRIMITIVE-DTYPE-RANKS.json  ``bench --device cuda``, from 4 B to 1 GiB: by the route that
                                mpicoll chooses, by each that these ranks can take (plain staging
                                always, NCCL where each has a GPU), and a copy of as many bytes
    training-RANKS.json         ``host.py ddp fsdp --device cuda``: steps of DDP and FSDP2 on CUDA
                                tensors, over mpicoll and over Gloo

What the ranks print is in a file .log beside it. With --resume and --limit a run goes on, piece by
piece, where the one before was ended. Run it by the Python that the ranks are to run. Let the
machine do nothing else. Exit code: 0 where all went well, 1 where a piece failed, 3 where the time
was over.
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

#: What is measured, the most telling first.
TRAINING = "training"
MEASURED = ["all_reduce", TRAINING]
MEASURED += [row.name for row in PRIMITIVES if row.output and row.name not in MEASURED]
DTYPES = ["float", "bfloat16"]
#: Seconds that a piece needs at least, and after which it hangs.
SHORTEST, LONGEST = 20, 300


def pieces(options: argparse.Namespace) -> Iterator[Launch]:
    """Yield what is to be launched."""
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
    """Launch what has not been measured; return the exit code."""
    end, failed, over = time.monotonic() + options.limit, 0, 0
    mpiexec = shlex.split(options.mpiexec)
    left_out = [
        each for each in pieces(options) if not (options.out / f"{each.name}.json").exists()
    ]
    # What has been begun before comes last, as it may fail again, and slowly.
    for piece in sorted(left_out, key=lambda each: (options.out / f"{each.name}.log").exists()):
        left = end - time.monotonic()
        if left < SHORTEST:
            over += 1
            continue
        print(f"---- {piece.name}", flush=True)
        wrong = run(piece, Path(sys.executable), mpiexec, options.out, min(left, LONGEST))
        print((options.out / f"{piece.name}.log").read_text(), flush=True)
        if wrong.startswith("no end") and left < LONGEST:
            over += 1
        elif wrong:
            failed += 1
            print(f"FAILED {piece.name}: {wrong}", flush=True)
    if over:
        print(f"NOT RUN {over} pieces: the time was over; --resume goes on with them")
    return 1 if failed else 3 if over else 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--mpiexec", default=str(Path(sys.executable).parent / "mpiexec"),
        help="what starts ranks (default: %(default)s)")  # fmt: skip
    add("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of them (default: 2 4)")
    add("--only", nargs="+", choices=MEASURED, default=MEASURED, metavar="NAME",
        help=f"some of {', '.join(MEASURED)}")  # fmt: skip
    add("--dtypes", nargs="+", default=DTYPES, metavar="DTYPE",
        help=f"as bench takes them (default: {' '.join(DTYPES)})")  # fmt: skip
    add("--largest", default="1G", metavar="SIZE", help="the last size (default: %(default)s)")
    add("--limit", type=float, default=float("inf"), metavar="SECONDS", help="in all")
    add("--out", type=lambda text: Path(text).resolve(), default=ROOT / ".cache" / "bench-gpu",
        metavar="FOLDER", help="for the files (default: %(default)s)")  # fmt: skip
    add("--resume", action="store_true", help="what is in that folder is not measured again")
    return parser.parse_args()


def main() -> int:
    """Measure."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks end, too
    options.out.mkdir(parents=True, exist_ok=True)
    for piece in [] if options.resume else pieces(options):
        for ending in ("json", "log"):
            (options.out / f"{piece.name}.{ending}").unlink(missing_ok=True)
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
