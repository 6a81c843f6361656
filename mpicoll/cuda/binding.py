"""Binding of ranks to GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mpicoll.cuda import runtime
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.errors import MpicollError, UnsupportedError
from mpicoll.launch.environment import has_own_gpus
from mpicoll.launch.launchers import find_local_rank
from mpicoll.machine import format_ranges

#: The kernel's folders of PCI devices.
_DEVICES = Path("/sys/bus/pci/devices")
#: PCI classes of GPUs: display controllers and processing accelerators.
_GPU_CLASSES = ("0x03", "0x12")


def device_for(
    local_rank: int, count: int, environment: Mapping[str, str] = os.environ
) -> int | None:
    """Return the GPU of a rank: round robin, or the first if the launcher exposes one GPU per rank.

    local_rank: rank on its node.
    count:      number of GPUs that the process sees: those in CUDA_VISIBLE_DEVICES, if it is set.

    Returns None without a GPU.
    """
    if count == 0:
        return None
    if has_own_gpus(environment):
        return 0
    return local_rank % count


def bind() -> int | None:
    """Make this rank's GPU current in CuPy, and return its number.

    Returns None without a GPU or CuPy. Raises MpicollError (a RuntimeError) if the local rank is
    unknown: the launcher does not set it, and init_process_group has not run.
    """
    try:
        cuda = runtime.get_runtime()
    except UnsupportedError:
        return None
    local_rank = find_local_rank()  # set by init_process_group
    if local_rank is None:
        raise MpicollError(
            "bind: the rank on this node is unknown: neither LOCAL_RANK nor a launcher's variable "
            "is set; call init_process_group first"
        )
    index = device_for(local_rank, cuda.count())
    if index is not None:
        cuda.use(index)
    return index


def describe_idle_gpus(
    all_ranks: Sequence[Capabilities], used: Sequence[int | None]
) -> dict[str, str]:
    """Return, by node, a warning that ranks share GPUs while other GPUs of the node are idle.

    all_ranks: capabilities of each rank. used: number of the GPU that each rank uses.
    """
    users: dict[str, dict[str, list[int]]] = {}
    for rank, (own, index) in enumerate(zip(all_ranks, used, strict=True)):
        here = users.setdefault(own.node, {})
        for number, gpu in enumerate(own.gpus):
            here.setdefault(gpu, []).extend([rank] * (number == index))
    found = {}
    for node, here in users.items():
        unused = [gpu for gpu, ranks in here.items() if not ranks]
        shared = [
            f"ranks {', '.join(map(str, ranks))} share GPU {gpu}"
            for gpu, ranks in here.items()
            if len(ranks) > 1
        ]
        if shared and unused:
            found[node] = (
                f"{', '.join(shared)}, while these GPUs of the node are idle: {', '.join(unused)}; "
                "call mpicoll.cuda.binding.bind() on every rank"
            )
    return found


def describe_far_gpu(own: Capabilities, used: int | None) -> list[str]:
    """Return a list of one warning if this rank's GPU is far from its processors, else [].

    used: number of the GPU that the rank uses.
    """
    if used is None:
        return []
    allowed = os.sched_getaffinity(0)
    near = {gpu.partition(" ")[0]: _near_processors(gpu) for gpu in own.gpus}
    name = own.gpus[used].partition(" ")[0]
    if not near[name] or not near[name].isdisjoint(allowed):
        return []
    better = [gpu for gpu, processors in near.items() if not processors.isdisjoint(allowed)]
    choice = f", or work on GPU {' or '.join(better)}" if better else ""
    return [
        f"GPU {name} is far from the processors that the rank may run on "
        f"({format_ranges(allowed)}): bind the rank to processors near it "
        f"({format_ranges(near[name])}){choice}"
    ]


def _near_processors(gpu: str) -> set[int]:
    """Return the processors near a GPU, which starts with its PCI address; empty if unknown."""
    domain, _, rest = gpu.partition(" ")[0].lower().partition(":")
    found: set[int] = set()
    with suppress(OSError, ValueError):
        address = f"{int(domain, 16):04x}:{rest}"  # NVIDIA's tools use 8 digits
        place = _DEVICES / address
        text = (place / "local_cpulist").read_text()  # such as 0-3,8
        if (place / "class").read_text().startswith(_GPU_CLASSES):
            for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
                found.update(range(int(first), int(last or first) + 1))
    return found
