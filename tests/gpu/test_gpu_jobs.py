"""Jobs on GPUs: contexts, visible devices, and memory after a rank was killed.

Without a GPU, some of the jobs run on simulated devices.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))
HERE = Path(__file__).resolve().parent
MPI_TESTS = HERE.parent / "mpi"
ON_A_GPU = os.environ.get("TEST_MPICOLL_DEVICE") == "cuda"
#: Seconds after which a job counts as hanging.
TIMEOUT_S = 90
#: Fluctuation of the GPU's free memory.
SLACK_BYTES = 64 << 20

needs_mpiexec = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC is not set")

PREAMBLE = f"""
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGALRM, chain=True)  # print the stacks of all threads and exit
signal.alarm({TIMEOUT_S})
import numpy as np
import mpicoll as dist
from device_arrays import LIBRARIES, devices

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
    paths = [str(HERE), str(MPI_TESTS), os.environ.get("PYTHONPATH", "")]
    variables = {
        "TEST_MPICOLL_DEVICES": "cupy" if ON_A_GPU else "simulated",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*MPIEXEC, "-n", str(ranks), sys.executable, str(path)], text=True, start_new_session=True,
        env=os.environ | variables | environment | {"PYTHONPATH": os.pathsep.join(paths)},
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
with devices(LIBRARIES[0]) as arrays:
    assert (all_reduced(arrays, 10, me + 1) == n * (n + 1) / 2).all()
    say("started")
    cuda, calls = runtime.get_runtime(), []
    original = cuda.CALL
    def die(*arguments):
        calls.append(arguments)
        if len(calls) == PLACE:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    if me == RANK % n:
        cuda.CALL = die
    all_reduced(arrays, 10_000_000, me, async_op=ASYNC)
    say("continued")
"""


@needs_mpiexec
@pytest.mark.parametrize(
    ("route", "call", "place", "rank"),
    [
        # Before the first synchronization; the rank that enqueues the work of all ranks.
        ("ipc", "record_again", 1, -1),
        ("ipc", "combine", 1, 0),
    ],
)
@pytest.mark.parametrize("async_op", [False, True])
def test_killed_rank_aborts_the_job_and_frees_memory(tmp_path, route, call, place, rank, async_op):
    before = free_bytes() if ON_A_GPU else 0
    script = KILLED
    for word, value in (("CALL", call), ("PLACE", place), ("RANK", rank), ("ASYNC", async_op)):
        script = script.replace(word, str(value))
    code, output = run(tmp_path, script, MPICOLL_DEVICE_ROUTE=route)
    assert code and output.count("started") == 2 and "continued" not in output, output
    until = time.monotonic() + 20  # the driver frees memory of a killed process later
    while ON_A_GPU and free_bytes() < before - SLACK_BYTES:
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
    for count_ in (10, 10_000_000):
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


@pytest.mark.on_a_gpu
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
with devices("cupy") as arrays:
    dist.init_process_group(timeout=60)
    me, n = dist.get_rank(), dist.get_world_size()
    for count in (10, 10_000_000):
        for async_op in (False, True):
            assert (all_reduced(arrays, count, me + 1, async_op=async_op) == n * (n + 1) / 2).all()
    say("route", dist.group.WORLD.resources.find("devices").names[0], len(gpus), "GPUs")
    dist.destroy_process_group()
"""


@pytest.mark.on_a_gpu
@needs_mpiexec
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
    with devices("cupy") as arrays:
        for count in (10, 10_000_000):
            assert (all_reduced(arrays, count, me + 1) == n * (n + 1) / 2).all()
    say("route", dist.group.WORLD.resources.find("devices").names[0])
dist.destroy_process_group()
"""


@pytest.mark.on_a_gpu
@needs_mpiexec
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
with devices("cupy") as arrays:
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


@pytest.mark.on_a_gpu
@needs_mpiexec
@pytest.mark.parametrize("route", ["ipc"])
def test_rank_that_cannot_write_the_kernel_cache(tmp_path, route):
    """Both ranks get the result or both get an error. If they share a GPU, only rank 0 compiles."""
    _, output = run(tmp_path, UNWRITABLE, MPICOLL_DEVICE_ROUTE=route)
    lines = [line for line in output.splitlines() if line.startswith(("right", "raised"))]
    assert [line.split()[0] for line in lines] in (["right"] * 2, ["raised"] * 2), output
    assert "Timeout" not in output, output
