"""torch.distributed over mpicoll beside torch.distributed over Gloo, in one run.

    mpirun -n 2 python benchmarks/torch_backend.py
    torchrun --nproc-per-node 2 benchmarks/torch_backend.py

The default group is mpicoll's, and a Gloo group of the same ranks is beside it. Prints

- the time of a synchronous all_reduce (sum, in place) for 4 B to 16 MiB;
- a 4 MiB all_reduce beside computation that takes about as long;
- the step of a model with 25 MB of parameters: local, under DDP over Gloo, under DDP over mpicoll,
  and under DDP over mpicoll with collectives that end before the backward pass goes on;
- what is aimed at, and what was measured.

Times are medians, of the slowest rank in each repetition; +- is half the distance between the
quartiles. Repetitions are interleaved, so that what else the machine does meets all alike. The
machine should do nothing else all the same, and have a core for every rank.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Aim, Case, Ranks, Report, measure
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

KIB, MIB = 1 << 10, 1 << 20

#: Message sizes, dtypes, and how many calls are timed together.
MESSAGES = [
    (4, torch.float32, 100),
    (KIB, torch.float32, 100),
    (64 * KIB, torch.float32, 20),
    (MIB, torch.float32, 5),
    (16 * MIB, torch.float32, 1),
    (16 * MIB, torch.bfloat16, 1),
]


def describe(report: Report, threads: int) -> None:
    """Say what runs here."""
    # Not at the top: where torchrun started the ranks, init_process_group makes MPI's world.
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].strip("\0")
    what = {
        "mpi": " ".join(library.split()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "ranks": dist.get_world_size(),
        "threads": threads,
        "load before": round(os.getloadavg()[0], 1),
    }
    report.record |= what
    report.line(", ".join(f"{name} {value}" for name, value in what.items()))


def check_sums(gloo: dist.ProcessGroup) -> None:
    """Both groups add right, or their times are not worth taking."""
    expected = sum(range(1, dist.get_world_size() + 1))
    for size, dtype, _ in MESSAGES:
        for group in (None, gloo):
            x = torch.full((size // dtype.itemsize,), dist.get_rank() + 1.0, dtype=dtype)
            dist.all_reduce(x, group=group)
            if not bool((x == expected).all()):
                raise SystemExit(f"all_reduce of {size} bytes of {dtype} gives a wrong sum")


def messages(report: Report, ranks: Ranks, gloo: dist.ProcessGroup, repetitions: int) -> None:
    """A synchronous all_reduce, by size."""
    report.line("\nall_reduce, microseconds a call")
    report.line(f"{'bytes':>9} {'dtype':<9}{'mpicoll':>18}{'Gloo':>18}{'Gloo / mpicoll':>16}")
    ratios: dict[tuple[int, torch.dtype], float] = {}
    for size, dtype, calls in MESSAGES:
        x = torch.zeros(size // dtype.itemsize, dtype=dtype)
        cases: dict[str, Case] = {
            "mpicoll": lambda x=x: dist.all_reduce(x),
            "gloo": lambda x=x: dist.all_reduce(x, group=gloo),
        }
        times = measure(ranks, cases, repetitions, calls)
        ratio = ratios[size, dtype] = times["gloo"].median / times["mpicoll"].median
        name = str(dtype).removeprefix("torch.")
        report.line(
            f"{size:>9} {name:<9}{times['mpicoll'].text(1e-6, 10)}{times['gloo'].text(1e-6, 10)}"
            f"{ratio:>15.1f}x"
        )
        entry = {name: each.record() for name, each in times.items()}
        report.add("all_reduce", {"bytes": size, "dtype": name, **entry, "ratio": ratio})
        if size == 4:
            report.aims.append(Aim("all_reduce 4 B", 10.0, 1e6 * times["mpicoll"].median, "us"))
    for name, limit, key in [
        ("all_reduce 4 B, Gloo / mpicoll", 15.0, (4, torch.float32)),
        ("all_reduce 16 MiB, Gloo / mpicoll", 6.0, (16 * MIB, torch.float32)),
        ("all_reduce bfloat16 16 MiB, Gloo / mpicoll", 6.0, (16 * MIB, torch.bfloat16)),
    ]:
        report.aims.append(Aim(name, limit, ratios[key], "x", at_least=True))


def overlap(report: Report, ranks: Ranks, gloo: dist.ProcessGroup, repetitions: int) -> None:
    """An asynchronous all_reduce of 4 MiB beside computation that takes about as long."""
    x = torch.zeros(MIB)
    matrix = torch.zeros(128, 128)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def beside(group: dist.ProcessGroup | None, products: int) -> None:
        work = dist.all_reduce(x, group=group, async_op=True)
        compute(products)
        work.wait()

    report.line("\nall_reduce of 4 MiB and as long a computation, milliseconds")
    report.line(
        f"{'':<9}{'all_reduce':>16}{'computation':>16}{'in turn':>16}{'async':>16}{'hidden':>9}"
    )
    for name, group in {"mpicoll": None, "Gloo": gloo}.items():
        trial = measure(
            ranks,
            {"call": lambda g=group: dist.all_reduce(x, group=g), "ten": lambda: compute(10)},
            10,
        )
        products = max(1, round(10 * trial["call"].median / trial["ten"].median))
        cases: dict[str, Case] = {
            "all_reduce": lambda g=group: dist.all_reduce(x, group=g),
            "computation": lambda n=products: compute(n),
            "in turn": lambda g=group, n=products: (dist.all_reduce(x, group=g), compute(n)),
            "async": lambda g=group, n=products: beside(g, n),
        }
        times = measure(ranks, cases, repetitions)
        saved = times["in turn"].over(times["async"]).median
        hidden = saved / min(times["all_reduce"].median, times["computation"].median)
        report.line(
            f"{name:<9}"
            + "".join(each.text(1e-3, 8) for each in times.values())
            + f"{hidden:>9.0%}"
        )
        entry = {case: each.record() for case, each in times.items()}
        report.add("overlap", {"backend": name, **entry, "hidden": hidden})


def make_step(network: nn.Module, batch: Tensor, divisor: int = 1) -> Case:
    """A training step; what it learns is next to nothing, so that its numbers stay as they are."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-9)

    def step() -> None:
        optimizer.zero_grad()
        loss = network(batch).square().mean()
        (loss / divisor).backward()
        optimizer.step()

    return step


def reduce_at_once(_, bucket):  # DDP refuses annotations that are text
    """A communication hook whose collective is over when it returns. It adds, as DDP's own does."""
    gradients = bucket.buffer()
    dist.all_reduce(gradients)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    """Whether the gradients are the same to rounding."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-10) for a, b in pairs)


def training(
    report: Report, ranks: Ranks, gloo: dist.ProcessGroup, repetitions: int, caps: list[float]
) -> None:
    """The step of a 25 MB model, for each size of DDP's buckets."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)]
    network = nn.Sequential(*layers)
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(16, 1024)
    size = sum(each.nbytes for each in network.parameters()) / 1e6
    report.line(f"\na step of a model of {size:.1f} MB, milliseconds; above: above the local step")
    report.line(
        f"{'bucket':>6}{'local':>16}{'DDP, Gloo':>16}{'DDP, mpicoll':>16}{'synchronous':>16}"
        f"{'Gloo above':>17}{'mpicoll above':>17}{'ratio':>7}"
    )
    for cap in caps:
        over_gloo = DistributedDataParallel(
            copy.deepcopy(network), process_group=gloo, bucket_cap_mb=cap
        )
        over_mpicoll = DistributedDataParallel(copy.deepcopy(network), bucket_cap_mb=cap)
        synchronous = DistributedDataParallel(copy.deepcopy(network), bucket_cap_mb=cap)
        synchronous.register_comm_hook(None, reduce_at_once)
        cases = {
            "local": make_step(copy.deepcopy(network), batch),
            "gloo": make_step(over_gloo, batch),
            "mpicoll": make_step(over_mpicoll, batch),
            # DDP's own collective adds gradients that it has divided on the way into the bucket,
            # for which a hook would need one more pass. So the loss is divided here.
            "synchronous": make_step(synchronous, batch, dist.get_world_size()),
        }
        times = measure(ranks, cases, repetitions)
        for other in (over_gloo, synchronous):
            if not same_gradients(over_mpicoll, other):
                raise SystemExit("the gradients differ")
        above = {name: times[name].over(times["local"]) for name in ("gloo", "mpicoll")}
        ratio = above["mpicoll"].median / above["gloo"].median
        report.line(
            f"{cap:>3g} MB"
            + "".join(each.text(1e-3, 8) for each in times.values())
            + "".join(each.text(1e-3, 9) for each in above.values())
            + f"{ratio:>7.0%}"
        )
        entry: dict[str, Any] = {name: each.record() for name, each in times.items()}
        entry |= {f"{name} above local": each.record() for name, each in above.items()}
        report.add("ddp", {"bucket_cap_mb": cap, **entry, "ratio": ratio})
        if cap == caps[0]:
            name = "DDP step above the local step, mpicoll / Gloo"
            report.aims.append(Aim(name, 0.45, ratio, "x"))
        slower = times["mpicoll"].median / times["synchronous"].median
        name = f"DDP step, buckets of {cap:g} MB, asynchronous / synchronous"
        report.aims.append(Aim(name, 1.0, slower, "x"))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=40, help="interleaved repetitions")
    parser.add_argument("--threads", type=int, default=1, help="of torch on each rank")
    parser.add_argument(
        "--bucket-mb", type=float, nargs="+", default=[25.0, 4.0], help="DDP's bucket_cap_mb"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if options.repetitions < 2:
        parser.error("--repetitions must be at least 2")
    torch.set_num_threads(options.threads)

    dist.init_process_group("mpicoll")
    gloo = dist.new_group(backend="gloo")
    ranks = Ranks(
        dist.get_rank(),
        dist.barrier,
        lambda table: dist.all_reduce(torch.from_numpy(table), dist.ReduceOp.MAX),
    )
    report = Report(ranks)
    describe(report, options.threads)
    check_sums(gloo)
    messages(report, ranks, gloo, options.repetitions)
    overlap(report, ranks, gloo, options.repetitions)
    training(report, ranks, gloo, options.repetitions, options.bucket_mb)

    report.line(f"\n{'aim, for two ranks':<74}measured")
    report.end(options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
