"""Whole jobs on GPUs, by mpiexec: which contexts they set up, which GPUs ranks see, what is left of
a job whose rank is killed.

The jobs take simulated devices where there is no GPU, as far as that shows something.
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
LIMIT = 90
#: Bytes of the GPU's memory that come and go by themselves.
SLACK = 64 << 20

needs_mpiexec = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")

PREAMBLE = f"""
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGALRM, chain=True)  # print where all threads are, then die
signal.alarm({LIMIT})
import numpy as np
import mpicoll as dist
from device_arrays import LIBRARIES, devices

def say(*words):  # one write, so that ranks do not print into each other's lines
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def total(arrays, count, value, index=0, **how):
    array = arrays.make(np.full(count, value, np.float32), index)
    array.upload()
    work = dist.all_reduce(array.given, **how)
    if work is not None:
        work.wait()
    array.host[...] = -1
    array.download()
    return array.host
"""


def run(folder: Path, script: str, ranks: int = 2, **environment: str) -> tuple[int, str]:
    """The exit code of a job, and what it printed. Fails if it does not end."""
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
        output, _ = process.communicate(timeout=LIMIT + 10)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the job did not end: {error.output}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "(most recent call first)" not in output, f"a rank hung\n{output}"
    return process.returncode, output


def free_bytes() -> int:
    """Of the first GPU, as a process of its own sees it."""
    code = "import cupy; print(cupy.cuda.runtime.memGetInfo()[0])"
    return int(subprocess.check_output([sys.executable, "-c", code]))


# ---- A rank that is killed -----------------------------------------------------------------------

KILLED = """
from mpicoll.cuda import runtime
dist.init_process_group(timeout=20)
me, n = dist.get_rank(), dist.get_world_size()
with devices(LIBRARIES[0]) as arrays:
    assert (total(arrays, 10, me + 1) == n * (n + 1) / 2).all()
    say("begun")
    cuda, calls = runtime.get_runtime(), []
    works = cuda.CALL
    def dies(*what):
        calls.append(what)
        if len(calls) == PLACE:
            os.kill(os.getpid(), signal.SIGKILL)
        return works(*what)
    if me == RANK % n:
        cuda.CALL = dies
    total(arrays, 10_000_000, me, async_op=ASYNC)
    say("went on")
"""


@needs_mpiexec
@pytest.mark.parametrize(
    ("route", "call", "place", "rank"),
    [
        # In the middle of a call of several rounds.
        ("ipc", "copy", 1, -1),
        ("ipc", "copy", 5, -1),
        # Before the ranks meet; and the one that works for all, whose array the others wait for.
        ("shared_gpu", "record_again", 1, -1),
        ("shared_gpu", "combine_for_all", 1, 0),
    ],
)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_rank_that_is_killed(tmp_path, route, call, place, rank, async_op):
    """The job ends, and its memory comes back."""
    before = free_bytes() if ON_A_GPU else 0
    script = KILLED
    for word, value in (("CALL", call), ("PLACE", place), ("RANK", rank), ("ASYNC", async_op)):
        script = script.replace(word, str(value))
    code, output = run(tmp_path, script, MPICOLL_DEVICE_ROUTE=route)
    assert code and output.count("begun") == 2 and "went on" not in output, output
    until = time.monotonic() + 20  # the driver takes a while to clear up behind a killed process
    while ON_A_GPU and free_bytes() < before - SLACK:
        assert time.monotonic() < until, f"{(before - free_bytes()) >> 20} MiB are still taken"


# ---- Contexts and visible GPUs -------------------------------------------------------------------

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
assert contexts() == [], "calls on host memory have set up a GPU: %s" % contexts()
import cupy
from mpicoll.cuda import binding
assert contexts() == [], "loading CuPy has set up a GPU: %s" % contexts()
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
    """None before a call on device memory, then on the GPU of the arrays alone: each context on
    another takes half a gigabyte there.
    """
    code, output = run(tmp_path, CONTEXTS, ranks)
    assert code == 0 and output.count("contexts") == ranks, output


VISIBLE = """
import subprocess
from mpicoll import launch
local = launch.find_local_rank()
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
            assert (total(arrays, count, me + 1, async_op=async_op) == n * (n + 1) / 2).all()
    say("route", dist.group.WORLD.resources.find("devices").names[0], len(gpus), "GPUs")
    dist.destroy_process_group()
"""


@pytest.mark.on_a_gpu
@needs_mpiexec
@pytest.mark.parametrize("query", ["index", "uuid"])
@pytest.mark.parametrize("one", [True, False], ids=["its own", "its own first"])
def test_visible_devices(tmp_path, record_property, query, one):
    """Each rank sees its own GPU alone, or all, in another order than the others: device 0 is
    another GPU on each, where there are several. UUIDs name them as well as numbers.
    """
    script = VISIBLE.replace("QUERY", repr(query)).replace("ONE", str(one))
    code, output = run(tmp_path, script)
    said = [line for line in output.splitlines() if line.startswith("route ")]
    assert code == 0 and len(said) == 2 and said[0] == said[1], output
    record_property("route", said[0].removeprefix("route "))


MIG = """
import re, subprocess
from mpicoll import launch
listed = subprocess.check_output(["nvidia-smi", "-L"], text=True)
instances = re.findall(r"UUID: (MIG-[^)]*)", listed)
local = launch.find_local_rank()
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
            assert (total(arrays, count, me + 1) == n * (n + 1) / 2).all()
    say("route", dist.group.WORLD.resources.find("devices").names[0])
dist.destroy_process_group()
"""


@pytest.mark.on_a_gpu
@needs_mpiexec
def test_instances_of_one_gpu(tmp_path):
    """MIG instances, one for each rank: two GPUs, though they have one PCI bus id."""
    code, output = run(tmp_path, MIG)
    assert code == 0, output
    if "too few" in output:
        pytest.skip("needs a GPU with two MIG instances")
    assert output.count("route ") == 2 and "shared_gpu" not in output, output


# ---- Kernels -------------------------------------------------------------------------------------

UNWRITABLE = """
import pathlib, shutil, tempfile
kernels = pathlib.Path(tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(__file__))))
os.environ["CUPY_CACHE_DIR"] = str(kernels)  # each rank's own, with nothing in it
dist.init_process_group(timeout=40)
me, n = dist.get_rank(), dist.get_world_size()
with devices("cupy") as arrays:
    array = arrays.make(np.full(1_000_000, me + 1, np.float32))
    array.upload()
    array.download()  # what CuPy needs of its own kernels is there
    if me == 0:  # a file in its place, as nothing is forbidden to root; some CuPys asked before
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
@pytest.mark.parametrize("route", ["shared_gpu", "ipc"])
def test_a_kernel_that_one_rank_cannot_keep(tmp_path, route):
    """Where it cannot write the folder of compiled kernels: both ranks have the result, or both an
    error, and neither waits for the other. By `shared_gpu` only the first rank compiles one.
    """
    _, output = run(tmp_path, UNWRITABLE, MPICOLL_DEVICE_ROUTE=route)
    said = [line for line in output.splitlines() if line.startswith(("right", "raised"))]
    assert [line.split()[0] for line in said] in (["right"] * 2, ["raised"] * 2), output
    assert "Timeout" not in output, output
