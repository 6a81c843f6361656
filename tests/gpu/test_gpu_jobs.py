"""Jobs on GPUs: contexts, visible devices, memory after a rank was killed, `bench`, and gpu.md."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_scripts import HUNG, Job, needs_mpiexec, run_once

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
#: Fluctuation of the GPU's free memory.
SLACK_BYTES = 64 << 20

pytestmark = needs_mpiexec
needs_smi = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")

PREAMBLE = """
import runpy, subprocess
from mpicoll.launch.launchers import find_local_rank
from device_arrays import devices

def all_reduced(arrays, count, value, index=0, **options):
    array = arrays.make(np.full(count, value, np.float32), index)
    array.upload()
    work = dist.all_reduce(array.given, **options)
    if work is not None:
        work.wait()
    return array.download()

def check_calls():
    with devices("cupy") as arrays, arrays.working():
        me, n = dist.get_rank(), dist.get_world_size()
        for count in (10, 1_000_000):
            for async_op in (False, True):
                found = all_reduced(arrays, count, me + 1, async_op=async_op)
                assert (found == n * (n + 1) / 2).all()
    say("route", dist.group.WORLD.resources.find("devices").names[0])
"""


def run(
    folder: Path, script: str, values: dict[str, object], ranks: int = 2, **environment: str
) -> tuple[int, str]:
    """Run a job with $NAME replaced in its script. Return its exit code and output."""
    task = Job(PREAMBLE + script, ranks, environment=environment, limit=90)
    ended = run_once(task, values, folder)
    assert HUNG not in ended.err, f"a rank hung\n{ended}"
    return ended.code, ended.out + ended.err


def free_bytes() -> int:
    """Return the free memory of the first GPU, from a new process."""
    code = "import cupy; print(cupy.cuda.runtime.memGetInfo()[0])"
    return int(subprocess.check_output([sys.executable, "-c", code]))


KILLED = """
from mpicoll.cuda import runtime
dist.init_process_group(timeout=20)
me, n = dist.get_rank(), dist.get_world_size()
with devices("cupy") as arrays, arrays.working():
    assert (all_reduced(arrays, 10, me + 1) == n * (n + 1) / 2).all()
    say("started")
    if me == $rank % n:
        runtime.get_runtime().$call = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    all_reduced(arrays, 1_000_000, me, async_op=$async_op)
    say("continued")
"""


@pytest.mark.parametrize(
    ("call", "rank", "async_op"),
    # Before the first synchronization; the rank that enqueues the work of all ranks.
    [("record_again", -1, False), ("combine", 0, True)],
)
def test_killed_rank_aborts_the_job_and_frees_memory(tmp_path, call, rank, async_op):
    before = free_bytes()
    values = {"call": call, "rank": rank, "async_op": async_op}
    code, output = run(tmp_path, KILLED, values, MPICOLL_DEVICE_ROUTE="ipc")
    assert code and output.count("started") == 2 and "continued" not in output, output
    until = time.monotonic() + 20  # the driver frees memory of a killed process later
    while free_bytes() < before - SLACK_BYTES:
        assert time.monotonic() < until, f"{(before - free_bytes()) >> 20} MiB were not freed"


CONTEXTS = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0)
count = ctypes.c_int()
driver.cuDeviceGetCount(ctypes.byref(count))

def contexts():
    found = []
    for index in range(count.value):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if active.value:
            found.append(index)
    return found

dist.init_process_group(timeout=60)
me, n = dist.get_rank(), dist.get_world_size()
mine = me % count.value
x = np.ones(1_000_000)
dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
assert contexts() == [], "calls on host memory have created contexts: %s" % contexts()
import cupy
from mpicoll.cuda import binding
assert contexts() == [], "loading CuPy has created contexts: %s" % contexts()
assert binding.bind() == mine
with cupy.cuda.Device(mine):
    y = cupy.full(1_000_000, me + 1, cupy.float32)
    z = cupy.empty_like(y)
    dist.all_reduce(y[:10])
    dist.all_reduce(y[10:], async_op=True).wait()
    for work in [dist.irecv(z, (me - 1) % n), dist.isend(y, (me + 1) % n)]:
        work.wait()
    assert (z.get() == n * (n + 1) / 2).all()
assert contexts() == [mine], "rank %d has contexts on %s" % (me, contexts())
dist.destroy_process_group()
assert contexts() == [mine], contexts()
say("contexts", mine)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_contexts(tmp_path, ranks):
    """No context before a call on device memory, then only on the GPU of the arrays. A context uses
    half a gigabyte.
    """
    code, output = run(tmp_path, CONTEXTS, {}, ranks)
    assert code == 0 and output.count("contexts") == ranks, output


VISIBLE = """
gpus = subprocess.check_output(
    ["nvidia-smi", "--query-gpu=$query", "--format=csv,noheader"], text=True
).split()
turned = find_local_rank() % len(gpus)
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
    [gpus[turned]] if $one else gpus[turned:] + gpus[:turned])
dist.init_process_group(timeout=60)
check_calls()
dist.destroy_process_group()
"""


@needs_smi
@pytest.mark.parametrize("query", ["index", "uuid"])
@pytest.mark.parametrize("one", [True, False], ids=["own", "own first"])
def test_visible_devices(tmp_path, query, one):
    """CUDA_VISIBLE_DEVICES has only the rank's GPU, or all GPUs in another order on each rank. With
    several GPUs, device 0 differs on each rank.
    """
    code, output = run(tmp_path, VISIBLE, {"query": query, "one": one})
    lines = [line for line in output.splitlines() if line.startswith("route ")]
    assert code == 0 and len(lines) == 2 and lines[0] == lines[1], output


UNWRITABLE = """
import pathlib, shutil, tempfile
kernels = pathlib.Path(tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(__file__))))
os.environ["CUPY_CACHE_DIR"] = str(kernels)  # an empty folder for each rank
dist.init_process_group(timeout=40)
me, n = dist.get_rank(), dist.get_world_size()
with devices("cupy") as arrays, arrays.working():
    array = arrays.make(np.full(1_000_000, me + 1, np.float32))
    array.upload()
    array.download()  # CuPy has compiled its own kernels
    if me == 0:  # root can write to any folder, so use a file
        shutil.rmtree(kernels)
        kernels.touch()
    try:
        dist.all_reduce(array.given)
        array.download()
        assert (array.host == n * (n + 1) / 2).all()
        say("right")
    except (RuntimeError, OSError) as error:
        say("raised", type(error).__name__, *str(error).splitlines()[:1])
"""


def test_rank_that_cannot_write_the_kernel_cache(tmp_path):
    """Both ranks get the result or both get an error. If they share a GPU, only rank 0 compiles."""
    _, output = run(tmp_path, UNWRITABLE, {}, MPICOLL_DEVICE_ROUTE="ipc")
    lines = [line for line in output.splitlines() if line.startswith(("right", "raised"))]
    assert [line.split()[0] for line in lines] in (["right"] * 2, ["raised"] * 2), output
    assert "Timeout" not in output, output


BENCH = """
sys.argv[1:] = "bench $words".split()
runpy.run_module("mpicoll", run_name="__main__", alter_sys=True)
"""


def test_bench_measures_device_routes(tmp_path):
    """The output has the reasons for routes that are not measured."""
    report = tmp_path / "report.json"
    words = "all_reduce gather all_to_all barrier -b 4K -e 4K --device cuda --routes all -c -n 2"
    code, output = run(tmp_path, BENCH, {"words": f"{words} --compare copy --json {report}"})
    assert code == 0 and " 0 OK" in output, output
    found = {row["primitive"]: row["compare"] for row in json.loads(report.read_text())["results"]}
    assert not any(found.pop("barrier").values()) and len(found) == 3
    for timing in found.values():
        assert timing["ipc"] and timing["staged"] and timing["copy"], found
        assert not timing["ipc"]["wrong"] and not timing["staged"]["wrong"]
    assert "# not measured: nccl: MPICOLL_DEVICE_ROUTE=nccl:" in output


def test_bench_uses_cupy_arrays(tmp_path):
    words = "all -b 64 -e 64K -f 256 --device cuda -c -n 1"
    code, output = run(tmp_path, BENCH, {"words": words}, 1)
    assert code == 0 and "GPU memory, CuPy" in output and " 0 OK" in output, output


def test_programs_of_the_page(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "page.py").write_text(block)
        script = f"runpy.run_path({str(tmp_path / 'page.py')!r}, run_name='__main__')"
        code, output = run(tmp_path, script, {})
        assert code == 0, output
