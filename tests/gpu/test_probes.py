"""Probes of MPI with device memory, and the reports of ``doctor`` and ``hello`` about GPUs.

The probes transfer device memory. The faults are those of an MPI that treats it as host memory.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli_jobs import Ended, job
from machine import find_gpus
from whole_jobs import assert_processes_end, run_program

from mpicoll.cuda.probe import OK, ProbeOutcome, run_probe
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes.registry import DEVICE

needs_two_gpus = pytest.mark.skipif(find_gpus()[0] < 2, reason="needs two GPUs")

#: Seconds after which a probe counts as hanging. It takes three to six.
TIMEOUT_S = 15.0

#: Start of each process. FAULT: see FAULTS. CLAIM=1: MPI reports support for device memory.
SITE = """
import os, sys, time
from types import SimpleNamespace
fault = os.environ.get("FAULT", "")

def fromaddress(address, nbytes):
    if fault == "crash":
        address = 4096
    if fault == "wrong":
        return buffer.frombuffer(bytearray(nbytes))
    if fault == "hang":
        time.sleep(1000)
    if fault == "error":
        raise RuntimeError("MPI breaks")
    if fault == "lost" and MPI.COMM_WORLD.Get_rank() == 1:
        os._exit(3)
    return buffer.fromaddress(address, nbytes)

if "-S" not in sys.orig_argv:
    from mpicoll.cuda import runtime
    if fault and "mpicoll.cuda.probe" in sys.orig_argv:
        get_runtime = runtime.get_runtime
        def patch_mpi():
            global MPI, buffer
            from mpi4py import MPI
            buffer, MPI.buffer = MPI.buffer, SimpleNamespace(fromaddress=fromaddress)
            return get_runtime()
        runtime.get_runtime = patch_mpi
    if os.environ.get("CLAIM"):
        from mpicoll.cuda import mpi_support
        mpi_support.SWITCHES = ()
        mpi_support.QUERIES.clear()
        mpi_support.QUERIES["query"] = lambda: 1
"""

#: Faults and the outcome of the probe.
FAULTS = {
    "nothing": (OK, OK),
    "crash": (OK, "crashed (SIGSEGV)"),
    "wrong": (OK, "moved wrong data"),
    "hang": (OK, "hung"),
    "error": (OK, "failed: RuntimeError: MPI breaks"),
    "lost": (OK, "crashed (exit code 3)"),
    "no GPU": ("failed: UnsupportedError: arrays on a GPU: CuPy finds no GPU on this host", ""),
}
#: Marks the processes of the probes.
MARK = f"probes of {os.getpid()}"
LIBRARY = run_program(
    sys.executable, "-c", "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; from mpicoll.launch.mpi_library import find_library\n"
    "print(MPI.get_vendor()[0]); print(find_library())",
).stdout.splitlines()  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of processes that run SITE."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "MARK": MARK, "XDG_CACHE_HOME": str(folder)}
    return os.environ | own


@pytest.fixture(scope="module")
def probes(environment):
    """Outcome and seconds of a probe with each fault."""

    def one(fault):
        start = time.monotonic()
        own = {"CUDA_VISIBLE_DEVICES": ""} if fault == "no GPU" else {"FAULT": fault}
        library = Path(LIBRARY[1])
        found = run_probe(LIBRARY[0] == "Open MPI", library, TIMEOUT_S, environment | own)
        return found, time.monotonic() - start

    with ThreadPoolExecutor(3) as pool:
        yield dict(zip(FAULTS, pool.map(one, FAULTS), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_probe_reports_the_fault(fault, probes):
    found, seconds = probes[fault]
    assert found == ProbeOutcome(2, *FAULTS[fault])
    if fault != "hang":
        assert seconds < TIMEOUT_S, "ended by the timeout"


def test_probes_leave_no_process(probes):
    assert_processes_end(MARK)


def test_probe_uses_one_rank_if_two_cannot_be_started(monkeypatch, environment):
    """As with an Open MPI without mpirun."""
    monkeypatch.setattr("mpicoll.cuda.probe._mpirun", lambda *_: None)
    found = run_probe(True, Path(LIBRARY[1]), TIMEOUT_S, environment)
    assert found == ProbeOutcome(1, OK, OK)


PROBE = """
import mpicoll as dist
dist.init_process_group()
from mpicoll.cuda import capabilities, mpi_support, probe
mpi_support.SWITCHES = ()  # some libraries support device memory only on request
probes = []
def run_probe(*arguments):
    probes.append(arguments)
    return probe.ProbeOutcome(2, "ok", "ok")
probe.run_probe = run_probe
for may_probe in False, True, True:
    found = capabilities.discover(may_probe)
    print(found.cuda, len(found.gpus), found.settled, len(probes), found.why, sep="|")
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CLAIM": "1"},
         ["True|1|False|0|query: yes; not tried"]
         + ["True|1|True|1|query: yes; tried between two ranks: transfer ok"] * 2),
        ({"CLAIM": "1", "MPICOLL_CUDA_AWARE": "0"}, ["False|1|True|0|MPICOLL_CUDA_AWARE=0"] * 3),
        ({"MPICOLL_CUDA_AWARE": ""}, ["False|1|True|0|MPIX_Query_cuda_support"] * 3),
    ],
)  # fmt: skip
def test_discover_probes_once_if_needed(environment, variables, expected, tmp_path):
    own = {"XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    done = run_program(sys.executable, "-c", PROBE, env=environment | own | variables)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done
    assert all(line.startswith(want) for line, want in zip(lines, expected, strict=True)), done


# ---- python -m mpicoll ---------------------------------------------------------------------------


@job("doctor", ranks=2, site=SITE, environment={"CLAIM": "1", "FAULT": "crash"})
def test_doctor_reports_crashes_of_an_mpi_that_reports_cuda_support(ended: Ended) -> None:
    assert ended.code == 1, ended
    words = " ".join(ended.out.split())
    assert "query: yes; tried between two ranks: transfer crash" in words
    assert "WRONG: MPI says that it takes device memory (query: yes), but tried" in words
    assert words.count("Python") == 1, "every rank prints"
    for name in ("peer", "staged"):
        assert f" {name} used; the host waits {DEVICE[name].policy.host_waits_for}" in words
    assert " direct not used: each of ranks 0, 1 lacks an MPI that sends and receives" in words


@needs_two_gpus
@job(
    "doctor --json", ranks=2, site=SITE, environment={"CLAIM": "1", "MPICOLL_DEVICE_ROUTE": "peer"}
)
def test_doctor_with_a_forced_device_route(ended: Ended) -> None:
    found = json.loads(ended.out)
    assert ended.code == 0 and found["ok"], ended
    served = DEVICE["peer"].serves.primitives
    assert found["routes"]["device"] == {
        row.name: "peer" if row.name in served else "refused" for row in PRIMITIVES if row.output
    }


#: Two GPUs. The second one is far from all processors.
TOPOLOGY = """
import os, pathlib, sys
if "-S" not in sys.orig_argv:
    from mpicoll.cuda import binding, runtime
    root = pathlib.Path(os.environ["XDG_CACHE_HOME"], f"sys{os.getpid()}")
    far = max(os.sched_getaffinity(0)) + 1
    for number, near in (("00", "0-9999"), ("01", str(far))):
        place = root / f"0000:{number}:00.0"
        place.mkdir(parents=True)
        (place / "class").write_text("0x030200")
        (place / "local_cpulist").write_text(near)
    binding._DEVICES = root
    runtime.Runtime.pci_bus_id = lambda self, index: f"0000:{index:02x}:00.0"
"""


@needs_two_gpus
@job("doctor", ranks=2, site=TOPOLOGY, environment={"MPICOLL_CUDA_AWARE": "0"})
def test_doctor_warns_of_a_far_gpu(ended: Ended) -> None:
    assert ended.code == 0, ended
    words = " ".join(ended.out.split())
    assert re.search(r"rank 1: GPU 0000:01:00.0 is far from the processors", words)
    assert "rank 0: GPU" not in words


@needs_two_gpus
@job("hello", ranks=3, site=TOPOLOGY)
def test_hello_on_ranks_that_share_gpus(ended: Ended) -> None:
    ended.in_good_order()
    lines = ended.out.splitlines()
    assert len(lines) == 3, ended
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} of 3 on {socket.gethostname()}, local rank {rank} of")
        assert f"GPU {rank % 2} (0000:{rank % 2:02x}:00.0 " in line, ended
        far = f"GPU 0000:{rank % 2:02x}:00.0 is far from the processors" in line
        assert far == (rank == 1) and "device route " in line, ended
