"""Jobs on GPUs: contexts, visible devices, memory after a rank was killed, `bench`, and gpu.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "gpu.md"
#: Seconds after which a job counts as hanging.
TIMEOUT_S = 90
#: Fluctuation of the GPU's free memory.
SLACK_BYTES = 64 << 20

needs_mpiexec = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC is not set")
needs_smi = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")

PREAMBLE = f"""
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGALRM, chain=True)  # print the stacks of all threads and exit
signal.alarm({TIMEOUT_S})
import numpy as np
import mpicoll as dist
from device_arrays import devices

def say(*words):  # one write, so that lines of ranks are not mixed
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def all_reduced(arrays, count, value, index=0, **options):
    array = arrays.make(np.full(count, value, np.float32), index)
    array.upload()
    work = dist.all_reduce(array.given, **options)
    if work is not None:
        work.wait()
    array.host[...] = -1
    array.download()
    return array.host
"""


def run(folder: Path, script: str, ranks: int = 2, **environment: str) -> tuple[int, str]:
    """Run a job. Return its exit code and output."""
    path = folder / "script.py"
    path.write_text(PREAMBLE + script)
    return run_command([str(path)], ranks, **environment)


def run_command(words: list[str], ranks: int = 2, **environment: str) -> tuple[int, str]:
    """Run Python on ranks. Return the job's exit code and output."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [*MPIEXEC, "-n", str(ranks), sys.executable, *words], text=True, start_new_session=True,
        env=os.environ | variables | environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S + 10)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the job did not end: {error.output}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "(most recent call first)" not in output, f"a rank hung\n{output}"
    return process.returncode, output


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
    if me == RANK % n:
        runtime.get_runtime().CALL = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    all_reduced(arrays, 1_000_000, me, async_op=ASYNC)
    say("continued")
"""


@needs_mpiexec
@pytest.mark.parametrize(
    ("call", "rank", "async_op"),
    # Before the first synchronization; the rank that enqueues the work of all ranks.
    [("record_again", -1, False), ("combine", 0, True)],
)
def test_killed_rank_aborts_the_job_and_frees_memory(tmp_path, call, rank, async_op):
    before = free_bytes()
    script = KILLED
    for word, value in (("CALL", call), ("RANK", rank), ("ASYNC", async_op)):
        script = script.replace(word, str(value))
    code, output = run(tmp_path, script, MPICOLL_DEVICE_ROUTE="ipc")
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
    for count_ in (10, 1_000_000):
        for async_op in (False, True):
            y = cupy.full(count_, me + 1, cupy.float32)
            work = dist.all_reduce(y, async_op=async_op)
            if async_op:
                work.wait()
            assert (y.get() == n * (n + 1) / 2).all()
    left, right = (me - 1) % n, (me + 1) % n
    z = cupy.empty_like(y)
    for work in [dist.irecv(z, left), dist.isend(y, right)]:
        work.wait()
    assert (z.get() == n * (n + 1) / 2).all()
assert contexts() == [mine], "rank %d has contexts on %s" % (me, contexts())
dist.destroy_process_group()
assert contexts() == [mine], contexts()
say("contexts", mine)
"""


@needs_mpiexec
@pytest.mark.parametrize("ranks", [1, 2])
def test_contexts(tmp_path, ranks):
    """No context before a call on device memory, then only on the GPU of the arrays. A context uses
    half a gigabyte.
    """
    code, output = run(tmp_path, CONTEXTS, ranks)
    assert code == 0 and output.count("contexts") == ranks, output


VISIBLE = """
import subprocess
from mpicoll.launch.launchers import find_local_rank
local = find_local_rank()
gpus = subprocess.check_output(
    ["nvidia-smi", "--query-gpu=" + QUERY, "--format=csv,noheader"], text=True
).split()
turned = local % len(gpus)
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
    [gpus[turned]] if ONE else gpus[turned:] + gpus[:turned])
with devices("cupy") as arrays, arrays.working():
    dist.init_process_group(timeout=60)
    me, n = dist.get_rank(), dist.get_world_size()
    for count in (10, 1_000_000):
        for async_op in (False, True):
            assert (all_reduced(arrays, count, me + 1, async_op=async_op) == n * (n + 1) / 2).all()
    say("route", dist.group.WORLD.resources.find("devices").names[0], len(gpus), "GPUs")
    dist.destroy_process_group()
"""


@needs_mpiexec
@needs_smi
@pytest.mark.parametrize("query", ["index", "uuid"])
@pytest.mark.parametrize("one", [True, False], ids=["own", "own first"])
def test_visible_devices(tmp_path, query, one):
    """CUDA_VISIBLE_DEVICES has only the rank's GPU, or all GPUs in another order on each rank. With
    several GPUs, device 0 differs on each rank.
    """
    script = VISIBLE.replace("QUERY", repr(query)).replace("ONE", str(one))
    code, output = run(tmp_path, script)
    lines = [line for line in output.splitlines() if line.startswith("route ")]
    assert code == 0 and len(lines) == 2 and lines[0] == lines[1], output


MIG = """
import re, subprocess
from mpicoll.launch.launchers import find_local_rank
listed = subprocess.check_output(["nvidia-smi", "-L"], text=True)
instances = re.findall(r"UUID: (MIG-[^)]*)", listed)
local = find_local_rank()
if len(instances) > local:
    os.environ["CUDA_VISIBLE_DEVICES"] = instances[local]
dist.init_process_group(timeout=60)
me, n = dist.get_rank(), dist.get_world_size()
if len(instances) < n:
    say("too few", len(instances))
else:
    from mpicoll.cuda import runtime
    named = [None] * n
    dist.all_gather_object(named, runtime.get_runtime().identity(0))
    assert len(set(named)) == n, named
    with devices("cupy") as arrays, arrays.working():
        for count in (10, 1_000_000):
            assert (all_reduced(arrays, count, me + 1) == n * (n + 1) / 2).all()
    say("route", dist.group.WORLD.resources.find("devices").names[0])
dist.destroy_process_group()
"""


@needs_mpiexec
@needs_smi
def test_mig_instances_count_as_gpus(tmp_path):
    """The instances have the same PCI bus ID."""
    code, output = run(tmp_path, MIG)
    assert code == 0, output
    if "too few" in output:
        pytest.skip("needs a GPU with two MIG instances")
    assert output.count("route ") == 2 and "ipc" not in output, output


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


@needs_mpiexec
def test_rank_that_cannot_write_the_kernel_cache(tmp_path):
    """Both ranks get the result or both get an error. If they share a GPU, only rank 0 compiles."""
    _, output = run(tmp_path, UNWRITABLE, MPICOLL_DEVICE_ROUTE="ipc")
    lines = [line for line in output.splitlines() if line.startswith(("right", "raised"))]
    assert [line.split()[0] for line in lines] in (["right"] * 2, ["raised"] * 2), output
    assert "Timeout" not in output, output


@needs_mpiexec
def test_bench_measures_device_routes(tmp_path):
    """The output has the reasons for routes that are not measured."""
    names, report = ["all_reduce", "gather", "all_to_all", "barrier"], tmp_path / "report.json"
    words = "-b 4K -e 4K --device cuda --routes all -c -n 2 --compare copy --json"
    code, output = run_command(["-m", "mpicoll", "bench", *names, *words.split(), str(report)])
    assert code == 0 and " 0 OK" in output, output
    found = {row["primitive"]: row["compare"] for row in json.loads(report.read_text())["results"]}
    assert not any(found["barrier"].values())
    for name in names[:-1]:
        timing = found[name]
        assert timing["ipc"] and timing["staged"] and timing["copy"], found
        assert not timing["ipc"]["wrong"] and not timing["staged"]["wrong"]
    assert "# not measured: nccl: MPICOLL_DEVICE_ROUTE=nccl:" in output


@needs_mpiexec
def test_bench_uses_cupy_arrays():
    words = "bench all -b 64 -e 64K -f 256 --device cuda -c -n 1"
    code, output = run_command(["-m", "mpicoll", *words.split()], 1)
    assert code == 0 and "GPU memory, CuPy" in output and " 0 OK" in output, output


@needs_mpiexec
def test_programs_of_the_page(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "page.py").write_text(block)
        code, output = run_command([str(tmp_path / "page.py")])
        assert code == 0, output
