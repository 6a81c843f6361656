"""Topology of GPUs, network cards and processors, with a simulated /sys and NVML."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import pytest

from mpicoll.cli.doctor_facts import NodeTopology, Row, format_table
from mpicoll.cuda import topology
from mpicoll.cuda.binding import warn_of_far_gpu
from mpicoll.cuda.capabilities import Capabilities, CudaSupport
from mpicoll.cuda.topology import find, find_far

pytestmark = pytest.mark.any_mpi

#: Two sockets. The first one has a PCIe switch with GPUs A and B, a card, and a second switch with
#: GPU C; another card under the same host bridge; and GPU D under another host bridge. The second
#: socket has GPU E and a card.
A, B, C, D, E = (f"0000:{bus}:00.0" for bus in ("03", "04", "09", "41", "83"))
SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"
MACHINE = {
    A: (f"{SWITCH}/0000:02:00.0/{A}", 0, "0-3,8", "0x030200"),
    B: (f"{SWITCH}/0000:02:01.0/{B}", 0, "0-3,8", "0x030000"),
    "0000:05:00.0": (f"{SWITCH}/0000:02:02.0/0000:05:00.0", 0, "0-3,8", "0x020700"),
    C: (f"{SWITCH}/0000:02:03.0/0000:07:00.0/0000:08:00.0/{C}", 0, "0-3,8", "0x120000"),
    "0000:0a:00.0": ("pci0000:00/0000:00:02.0/0000:0a:00.0", 0, "0-3,8", "0x020000"),
    D: (f"pci0000:40/0000:40:01.0/{D}", 0, "0-3,8", "0x030200"),
    E: (f"pci0000:80/0000:80:01.0/{E}", 1, "4-7", "0x030200"),
    "0000:84:00.0": ("pci0000:80/0000:80:02.0/0000:84:00.0", 1, "4-7", "0x020700"),
    "0000:00:1f.0": ("pci0000:00/0000:00:1f.0", 0, "0-3,8", "0x060000"),
}
GPUS = (A, B, C, D, E)
CARDS = {"mlx5_0": "0000:05:00.0", "mlx5_1": "0000:0a:00.0", "mlx5_2": "0000:84:00.0"}


def build(root: Path, machine=MACHINE, cards=CARDS, folder="class/infiniband") -> Path:
    """Create a simulated /sys."""
    (root / "bus/pci/devices").mkdir(parents=True)
    for address, (path, numa, processors, kind) in machine.items():
        place = root / "devices" / path
        place.mkdir(parents=True, exist_ok=True)
        (place / "numa_node").write_text(f"{numa}\n")
        (place / "local_cpulist").write_text(f"{processors}\n")
        (place / "class").write_text(f"{kind}\n")
        (root / "bus/pci/devices" / address).symlink_to(place)
    for name, address in cards.items():
        place = root / "devices" / machine[address][0]
        (place / "infiniband" / name).mkdir(parents=True)
        (place / "infiniband" / name / "device").symlink_to(place)
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).symlink_to(place / "infiniband" / name)
    return root


@pytest.fixture
def sys_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(topology, "_SYS", tmp_path)
    return build(tmp_path)


def raise_not_found(name):
    raise OSError(f"{name}: not found")


@pytest.fixture(autouse=True)
def no_nvml(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", raise_not_found)


def names(devices) -> list[str]:
    return [one.name for one in devices]


# ---- PCIe ----------------------------------------------------------------------------------------


def test_distances(sys_folder):
    known = find(GPUS)
    assert names(known.gpus) == list(GPUS) and names(known.cards) == list(CARDS)
    places = {one.name: one for one in (*known.gpus, *known.cards)}
    expected = {
        (A, B): "PIX", (A, C): "PXB", (A, D): "NODE", (A, E): "SYS", (D, E): "SYS",
        (A, "mlx5_0"): "PIX", (B, "mlx5_0"): "PIX", (C, "mlx5_0"): "PXB", (D, "mlx5_0"): "NODE",
        (A, "mlx5_1"): "PHB", (E, "mlx5_2"): "PHB", (E, "mlx5_0"): "SYS",
    }  # fmt: skip
    for (one, other), distance in expected.items():
        assert known.between(places[one], places[other]) == distance, (one, other)
        assert known.between(places[other], places[one]) == distance, (other, one)
    nearest = {A: ("PIX", ["mlx5_0"]), C: ("PXB", ["mlx5_0"]), D: ("NODE", ["mlx5_0", "mlx5_1"]),
               E: ("PHB", ["mlx5_2"])}  # fmt: skip
    for gpu, (distance, cards) in nearest.items():
        assert known.nearest_cards(places[gpu]) == (distance, tuple(places[name] for name in cards))


def test_find_ignores_addresses_that_are_not_gpus(sys_folder):
    """Addresses may have the formats of NVML and nvidia-smi."""
    assert not find(["0000:00:1f.0", "0000:ff:00.0", "nonsense", ""]).gpus
    assert names(find([A.upper().replace("0000:", "00000000:", 1), A]).gpus) == [A]
    assert find([A]).gpu("00000000:03:00.0").name == A
    assert find([A]).gpus[0].processors == {0, 1, 2, 3, 8}


def test_empty_sys(tmp_path, monkeypatch):
    monkeypatch.setattr(topology, "_SYS", tmp_path)
    assert find(GPUS) == topology.Topology((), (), {})
    assert find_far(find(GPUS), A, range(4)) == []


def test_slingshot_and_ethernet_cards(tmp_path, monkeypatch):
    """Without InfiniBand and Slingshot cards, uses network interfaces that have a device."""
    monkeypatch.setattr(topology, "_SYS", tmp_path)
    root = build(tmp_path, cards={"cxi0": "0000:05:00.0"}, folder="class/cxi")
    (root / "class/net/lo").mkdir(parents=True)
    (root / "class/net/eth0").mkdir()
    (root / "class/net/eth0/device").symlink_to(root / "devices" / MACHINE["0000:0a:00.0"][0])
    assert names(find([A]).cards) == ["cxi0"]
    (root / "class/cxi/cxi0").unlink()
    assert names(find([A]).cards) == ["eth0"]


# ---- NVLink -------------------------------------------------------------------------------------


class Nvml:
    """NVIDIA's management library. links: the peers of each GPU's links; None: a switch."""

    def __init__(self, links, fails=0) -> None:
        self.links, self.fails, self.open = links, fails, 0

    def nvmlInit_v2(self):
        self.open += not self.fails
        return self.fails

    def nvmlShutdown(self):
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address, device):
        device._obj.value = list(self.links).index(address.decode()) + 1
        return 0

    def _links(self, device):
        return list(self.links.values())[device.value - 1]

    def nvmlDeviceGetNvLinkState(self, device, link, active):
        if link >= len(self._links(device)):
            return 2  # invalid argument
        active._obj.value = self._links(device)[link] != "down"
        return 0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device, link, kind):
        kind._obj.value = 2 if self._links(device)[link] is None else 0
        return 0

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, device, link, remote):
        there = self._links(device)[link].upper().replace("0000:", "00000000:", 1)
        remote._obj.address = there.encode()
        return 0


def test_direct_nvlinks(sys_folder, monkeypatch):
    links = {A: [B, "down", B], B: [A, A], C: [], D: [E], E: [D]}
    nvml = Nvml(links)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert not find(GPUS, links=False).links
    known = find(GPUS)
    assert known.links == {(A, B): "NV2", (D, E): "NV1"} and nvml.open == 0
    places = {one.name: one for one in known.gpus}
    assert known.between(places[B], places[A]) == "NV2"
    assert known.between(places[A], places[C]) == "PXB"


def test_nvlinks_through_switches(sys_folder, monkeypatch):
    """The number of links between two GPUs is the smaller number of links to switches."""
    nvml = Nvml({A: [None] * 18, B: [None] * 18, C: [None] * 12, D: [], E: ["down"]})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert find(GPUS).links == {(A, B): "NV18", (A, C): "NV12", (B, C): "NV12"}


def test_nvml_that_fails_to_initialize(sys_folder, monkeypatch):
    nvml = Nvml({}, fails=9)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    assert not find(GPUS).links and nvml.open == 0


def test_pci_info_has_the_layout_of_nvml_h():
    assert ctypes.sizeof(topology._PciInfo) == 16 + 5 * 4 + 32
    assert topology._PciInfo.address.offset == 36


# ---- warnings ------------------------------------------------------------------------------------


def test_find_far_processors(sys_folder):
    known = find(GPUS)
    assert find_far(known, A, range(8), {}) == []
    assert find_far(known, A, [2, 5], {}) == []
    (text,) = find_far(known, A, [4, 5, 6], {})
    assert text == (
        "GPU 0000:03:00.0 is far from the processors that the rank may run on (4-6): bind the rank "
        "to processors near it (0-3,8)"
    )
    (text,) = find_far(known, A, [4, 5, 6], {}, GPUS)
    assert text.endswith(f", or work on GPU {E}")
    assert find_far(known, "0000:ff:00.0", [4], {}) == []


@pytest.mark.parametrize(
    ("gpu", "devices", "near"),
    [
        (A, "mlx5_0:1", ""), (A, "mlx5_2:1", "mlx5_0 is nearer (PIX)"), (A, "", ""),
        (A, "mlx5_1:1,mlx5_0:1", ""), (A, "mlx5_1:1", "mlx5_0 is nearer (PIX)"), (A, "all", ""),
        (E, "mlx5_0:1,mlx5_1:1", "mlx5_2 is nearer (PHB)"), (D, "mlx5_1:1", ""),
    ],
)  # fmt: skip
def test_find_far_cards(sys_folder, gpu, devices, near):
    found = find_far(find(GPUS), gpu, range(9), {"UCX_NET_DEVICES": devices} if devices else {})
    assert len(found) == bool(near)
    for text in found:
        assert near in text and f"UCX_NET_DEVICES={devices}" in text


def test_rank_warns_of_a_far_gpu(sys_folder, monkeypatch):
    own = Capabilities("M", "1", "", CudaSupport.NONE, "", "a", gpus=(f"{A} u", f"{E} v"))
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_far_gpu(own, 1, 3)
    with pytest.warns(
        RuntimeWarning, match=f"mpicoll: rank 3: GPU {A} is far .*or work on GPU {E}"
    ):
        warn_of_far_gpu(own, 0, 3)


# ---- output --------------------------------------------------------------------------------------


def test_format_table():
    to = {"b": "NV18", "mlx5_0": "PIX"}
    one = NodeTopology(
        "host", (Row("a", (0, 1, 3), "0-3", to), Row("b", (), "", {"a": "NV18", "mlx5_0": "SYS"})),
        ("mlx5_0",),
    )  # fmt: skip
    assert format_table(one) == [
        "        GPU0  GPU1  mlx5_0  near processors  ranks",
        "GPU0 a  X     NV18  PIX     0-3              0-1,3",
        "GPU1 b  NV18  X     SYS     unknown          none",
    ]
