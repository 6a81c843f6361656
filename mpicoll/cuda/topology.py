"""Topology of this node: how its GPUs, network cards and processors are connected.

PCIe is described in /sys, also GPUs that this process does not see. NVLink is reported by NVIDIA's
management library (NVML). No device is initialised.

Distances have the names that ``nvidia-smi topo -m`` and NCCL use:

- ``NV#``: number of NVLinks, directly or through switches
- ``PIX``: at most one PCIe switch between them
- ``PXB``: several PCIe switches, but not the host bridge
- ``PHB``: the host bridge
- ``NODE``: two host bridges of one NUMA node
- ``SYS``: the link between NUMA nodes
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll.machine import format_ranges

__all__ = ["DISTANCES", "LEGEND", "Device", "Topology", "find", "find_far", "parse_ranges"]

#: Distances over PCIe, nearest first.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
#: Explanation of the distances for users.
LEGEND = (
    "NV4: four NVLinks; PIX: at most one PCIe switch; PXB: several; PHB: "
    "the host bridge; NODE: two of them on one NUMA node; SYS: between NUMA nodes"
)

#: Root of the kernel's device tree.
_SYS = Path("/sys")
#: PCI classes of GPUs: display controllers and processing accelerators.
_GPU_CLASSES = ("0x03", "0x12")
#: Folders of network cards, in the order in which MPI prefers them: InfiniBand, RoCE, Omni-Path and
#: EFA; Slingshot; others. The first folder with cards is used.
_CARD_FOLDERS = ("class/infiniband", "class/cxi", "class/net")
#: Maximum number of NVLinks per GPU in NVML.
_MAX_LINKS = 18
#: NVML's type of a switch at the remote end of an NVLink.
_SWITCH = 2


class Device(NamedTuple):
    """A GPU or a network card.

    name:  PCI address of a GPU; system name of a card.
    path:  in /sys: the host bridge, all bridges below it, and the device itself.
    numa:  its NUMA node; -1 if unknown, or on a machine with a single node.
    processors: numbers of the near processors; empty if unknown.
    """

    name: str
    path: tuple[str, ...]
    numa: int
    processors: frozenset[int]

    def distance(self, other: Device) -> str:
        """Return the distance to another device over PCIe, as one of DISTANCES."""
        pairs = zip(self.path, other.path, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not common:
            return "NODE" if self.numa == other.numa else "SYS"
        if common == 1:
            return "PHB"
        # A switch has an upstream bridge, and a downstream bridge for each port.
        bridges = max(len(self.path), len(other.path)) - common - 1
        return "PIX" if bridges <= 1 else "PXB"


class Topology(NamedTuple):
    """The GPUs and network cards of one node.

    links: by pairs of GPU names in sorted order: "NV4" for four NVLinks.
    """

    gpus: tuple[Device, ...]
    cards: tuple[Device, ...]
    links: Mapping[tuple[str, str], str]

    def between(self, one: Device, other: Device) -> str:
        """Return the connection of two devices: NVLink, else one of DISTANCES."""
        first, second = sorted((one.name, other.name))
        return self.links.get((first, second)) or one.distance(other)

    def gpu(self, name: str) -> Device | None:
        """Return the GPU with a PCI address."""
        return next((one for one in self.gpus if one.name == _normal(name)), None)

    def nearest_cards(self, gpu: Device) -> tuple[str, tuple[Device, ...]]:
        """Return the nearest cards of a GPU and their distance; "" without cards."""
        by_distance: dict[str, list[Device]] = {}
        for card in self.cards:
            by_distance.setdefault(gpu.distance(card), []).append(card)
        for distance in DISTANCES:
            if distance in by_distance:
                return distance, tuple(by_distance[distance])
        return "", ()


def find(addresses: Iterable[str], links: bool = True) -> Topology:
    """Find the topology of the GPUs with these PCI addresses and of the network cards.

    Addresses that /sys does not list as GPUs are omitted.

    links: also query NVLink, which may take a while.
    """
    root = _SYS
    found = (_find_device(root / "bus/pci/devices" / name, name) for name in _sorted(addresses))
    gpus = tuple(one for one in found if one is not None and _is_gpu(one, root))
    names = {one.name for one in gpus}
    joined = _find_nvlinks(names) if links else {}
    return Topology(gpus, _find_cards(root), joined)


def _sorted(addresses: Iterable[str]) -> list[str]:
    return sorted({_normal(name) for name in addresses})


def _normal(address: str) -> str:
    """Normalise a PCI address as in /sys; NVML uses capitals and an 8-digit domain."""
    domain, _, rest = address.strip().lower().partition(":")
    with suppress(ValueError):
        return f"{int(domain, 16):04x}:{rest}"
    return address


def _is_gpu(device: Device, root: Path) -> bool:
    return _read(root / "bus/pci/devices" / device.name / "class").startswith(_GPU_CLASSES)


def _find_device(place: Path, name: str) -> Device | None:
    """Return the device of a folder in /sys, or None if it is not on PCI."""
    path = place.resolve()
    parts = path.parts
    bridge = next((i for i, part in enumerate(parts) if re.match(r"pci[0-9a-f]{4,}:", part)), None)
    if bridge is None or not path.exists():
        return None
    chain = [
        part for part in parts[bridge + 1 :] if re.fullmatch(r"[0-9a-f]{4,}(:..){2}\.\w", part)
    ]
    numa = _read(path / "numa_node")
    return Device(
        name,
        (parts[bridge], *chain),
        int(numa) if re.fullmatch(r"-?\d+", numa) else -1,
        parse_ranges(_read(path / "local_cpulist")),
    )


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def parse_ranges(text: str) -> frozenset[int]:
    """Parse a list of numbers of /sys, as ``0-3,8``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _find_cards(root: Path) -> tuple[Device, ...]:
    for folder in _CARD_FOLDERS:
        places = sorted((root / folder).glob("*/device"), key=lambda place: place.parent.name)
        found = (_find_device(place, place.parent.name) for place in places)
        cards = tuple(one for one in found if one is not None)
        if cards:
            return cards
    return ()


# --- NVLink -------------------------------------------------------------------------------------


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t of nvml.h."""

    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("address", ctypes.c_char * 32),
    )


def _find_nvlinks(names: set[str]) -> dict[tuple[str, str], str]:
    """Query NVML for the number of NVLinks between GPUs; empty without NVML."""
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    if nvml.nvmlInit_v2():
        return {}
    direct: dict[tuple[str, str], int] = {}
    switched: dict[str, int] = {}
    try:
        for name in sorted(names):
            for other in _list_links(nvml, name):
                if other is None:
                    switched[name] = switched.get(name, 0) + 1
                elif other in names and name < other:
                    direct[name, other] = direct.get((name, other), 0) + 1
    finally:
        nvml.nvmlShutdown()
    # Switches connect all GPUs that have links to them.
    for one in switched:
        for other in switched:
            if one < other:
                direct[one, other] = min(switched[one], switched[other])
    return {pair: f"NV{count}" for pair, count in direct.items()}


def _list_links(nvml: Any, name: str) -> list[str | None]:
    """Return the remote end of each active NVLink of a GPU: a GPU, or None for a switch."""
    device, found = ctypes.c_void_p(), list[str | None]()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(name.encode(), ctypes.byref(device)):
        return found
    for link in range(_MAX_LINKS):
        active, kind, remote = ctypes.c_uint(), ctypes.c_int(), _PciInfo()
        if nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(active)) or not active.value:
            continue
        if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link, ctypes.byref(kind)):
            kind.value = 0  # an older library, which reports switches with addresses like GPUs
        if kind.value == _SWITCH:
            found.append(None)
        elif not nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, ctypes.byref(remote)):
            found.append(_normal(remote.address.decode()))
    return found


# --- distant devices ----------------------------------------------------------------------------


def find_far(
    known: Topology,
    gpu: str,
    allowed: Iterable[int],
    environment: Mapping[str, str] = os.environ,
    others: Sequence[str] = (),
) -> list[str]:
    """Describe devices that are far from a process's GPU and could be nearer, with advice.

    gpu:     PCI address of the GPU.
    allowed: processors on which the process may run.
    others:  PCI addresses of all further GPUs that the process sees.
    """
    device = known.gpu(gpu)
    if device is None:
        return []
    found, own = [], frozenset(allowed)
    if device.processors and own and not own & device.processors:
        near = [name for name in others if (one := known.gpu(name)) and own & one.processors]
        choice = f", or work on GPU {' or '.join(near)}" if near else ""
        found.append(
            f"GPU {gpu} is far from the processors that the rank may run on "
            f"({format_ranges(own)}): bind the rank to processors near it "
            f"({format_ranges(device.processors)}){choice}"
        )
    cards = environment.get("UCX_NET_DEVICES", "")
    asked = [card for card in known.cards if card.name in re.split(r"[,:]", cards)]
    best, near_cards = known.nearest_cards(device)
    if asked and best:
        given = min((device.distance(card) for card in asked), key=DISTANCES.index)
        if DISTANCES.index(given) > DISTANCES.index(best):
            names = ", ".join(card.name for card in near_cards)
            found.append(
                f"UCX_NET_DEVICES={cards} names network cards far from GPU {gpu} ({given}), while "
                f"{names} is nearer ({best}): give each rank the card near its GPU, or unset "
                "it, and UCX chooses"
            )
    return found
