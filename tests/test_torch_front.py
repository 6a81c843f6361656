"""Registration of the PyTorch backend, and whole jobs of PyTorch programs.

tests/pytorch has the tests of the backend itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launch_jobs import VENDOR
from whole_jobs import MPIEXEC, run_program, without_launcher

pytestmark = [pytest.mark.waits, pytest.mark.slow]

torch = pytest.importorskip("torch")
TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
ON_2_RANKS = [*MPIEXEC, "-n", "2"]

python_backends = pytest.mark.skipif(
    TORCH_VERSION < (2, 15), reason="torch 2.15 is the first to have it"
)

PREAMBLE = """
import os, sys
import torch
import torch.distributed as dist

def say(*words):  # one write, so that ranks do not print into each other's lines
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def mpi_rank():
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
"""


def start(command, folder=None, **environment):
    """Run a command without the rank that this process may have.

    Skips the test if the command needs mpiexec and TEST_MPICOLL_MPIEXEC is not set.
    """
    if command[0].startswith("-"):  # the command has only the options of mpiexec
        pytest.skip("TEST_MPICOLL_MPIEXEC names no mpiexec")
    return run_program(*command, env=without_launcher() | environment, cwd=folder, timeout=120)


def output_of(done):
    """Return the output of a command that succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(script, *launcher, **environment):
    """Run a script, with a launcher's command before it if there is one."""
    # In a function, so that its variables are freed before the interpreter ends: torch's Gloo may
    # abort otherwise.
    script = "def main():\n" + textwrap.indent(textwrap.dedent(script), "    ") + "\nmain()\n"
    return start([*launcher, sys.executable, "-c", PREAMBLE + script], **environment)


def on_ranks(script, ranks=2, **environment):
    """Return the sorted lines that the ranks of a successful job print."""
    done = python(script, *MPIEXEC, "-n", str(ranks), **environment)
    return sorted(output_of(done).split("\n"))[1:]


# ---- import torch --------------------------------------------------------------------------------


@pytest.mark.any_mpi
def test_import_torch_registers_and_loads_no_mpi():
    done = python("""
        loaded = [name for name in sys.modules if name.partition(".")[0] in ("mpi4py", "ml_dtypes")]
        say(loaded, "mpicoll" in dist.Backend.backend_list, dist.is_backend_available("mpicoll"))
    """)
    assert done.stdout == "[] True True\n", done.stdout + done.stderr


@pytest.mark.any_mpi
def test_register_registers_without_autoload():
    script = """
    say(dist.is_backend_available("mpicoll"))
    import mpicoll.torch
    mpicoll.torch.register()
    mpicoll.torch.register()
    say(dist.is_backend_available("mpicoll"), dist.Backend.backend_list.count("mpicoll"))
    """
    done = python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "False\nTrue 1\n", done.stdout + done.stderr


@pytest.mark.any_mpi
def test_autoload_warns_if_registration_fails():
    script = """
    import warnings
    import mpicoll.torch
    del dist.Backend.register_backend
    torch.__version__ = "2.9.1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpicoll.torch.autoload()
    say(caught[0].message)
    """
    done = python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    warning = "mpicoll cannot register with torch 2.9.1 (it needs 2.11 or newer, and was tested "
    assert done.stdout.startswith(warning), done.stdout + done.stderr
    assert "AttributeError" in done.stdout, done.stdout


# ---- under mpiexec -------------------------------------------------------------------------------


def test_init_with_the_name_alone_sets_the_variables_of_a_launcher():
    """Other libraries read these variables. A second init_process_group works."""
    script = """
    for _ in range(2):
        dist.init_process_group("mpicoll")
        x = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    say(rank, size, x.tolist(), *[os.environ[name] for name in names])
    assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
    """
    lines = on_ranks(script, 3)
    assert lines == [f"{r} 3 [6.0, 6.0] {r} 3 {r} 3" for r in range(3)]


@python_backends
@pytest.mark.parametrize("of", ["WORLD", "dist.new_group([0, 1, 2])"])
def test_shrink_group(of):
    """The remaining ranks continue, and the removed rank ends."""
    script = f"""
    dist.init_process_group("mpicoll")
    WORLD, me = None, dist.get_rank()
    wide = {of}
    if me != 1:
        small = dist.shrink_group([1], wide)
        x = torch.full((1,), me + 1.0)
        dist.all_reduce(x, group=small)
        again = dist.new_group([0, 1] if wide is None else [0, 2])
        y = torch.full((1,), me + 1.0)
        dist.all_reduce(y, group=again)
        say(x.item(), y.item(), dist.get_rank(small), dist.get_world_size(small))
    dist.destroy_process_group()
    """
    lines = on_ranks(script, 3)
    assert lines == ["4.0 4.0 0 2", "4.0 4.0 1 2"]


@pytest.mark.any_mpi
@python_backends
@pytest.mark.parametrize("backend", ["mpicoll", "cpu:mpicoll,cuda:gloo"])
def test_torchs_debug_wrapper_works(backend):
    """It keeps only the C++ half of a backend alive."""
    script = f"""
    import gc
    dist.init_process_group("{backend}")
    gc.collect()
    x, y = torch.ones(1), torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(x)
    dist.broadcast(y, 1, async_op=True).wait()
    say(x.item(), y.tolist())
    dist.destroy_process_group()
    """
    lines = on_ranks(script, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert lines == ["2.0 [1.0, 1.0]"] * 2


@pytest.mark.any_mpi
def test_mpicoll_api_has_the_same_default_group():
    lines = on_ranks("""
        import numpy as np
        import mpicoll
        dist.init_process_group("mpicoll")
        x = np.full(2, mpicoll.get_rank() + 1.0)
        mpicoll.all_reduce(x)
        dist.destroy_process_group()
        say(x.tolist(), mpicoll.is_initialized())
        mpicoll.init_process_group()
        dist.init_process_group("mpicoll")
        y = torch.ones(1)
        dist.all_reduce(y)
        dist.destroy_process_group()
        mpicoll.all_reduce(x)
        mpicoll.destroy_process_group()
        say(x.tolist(), y.tolist())
    """)
    assert lines == ["[3.0, 3.0] False"] * 2 + ["[6.0, 6.0] [2.0]"] * 2


@pytest.mark.any_mpi
def test_gloo_uses_the_mpi_rendezvous():
    """The default group is Gloo's; new groups may use mpicoll."""
    lines = on_ranks("""
        dist.init_process_group("gloo", init_method="mpi://")
        x = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        try:
            dist.new_group([0], backend="mpicoll")
        except ValueError as error:
            say("refused:", str(error).split(":")[1])
        group = dist.new_group(backend="mpicoll")
        dist.all_reduce(x, group=group)
        half = dist.new_group([1], backend="mpicoll")
        if dist.get_rank() == 1:
            dist.all_reduce(x, group=half)
        say(x.tolist(), dist.get_backend(), dist.get_backend(group))
        dist.barrier()
        pair = dist.new_group([0, 1], backend="mpicoll")
        dist.destroy_process_group(group)  # the other groups keep working
        dist.all_reduce(x, group=pair)
        dist.destroy_process_group(pair)
        if dist.get_rank() == 1:
            dist.destroy_process_group(half)
        group = dist.new_group(backend="mpicoll")
        dist.all_reduce(x, group=group)
        assert x.tolist() == [24.0, 24.0], x
        dist.destroy_process_group()
    """)
    assert lines == ["[6.0, 6.0] gloo mpicoll"] * 2 + [
        "refused:  backend 'mpicoll' over a default group of backend 'gloo'"
    ]


@pytest.mark.any_mpi
@pytest.mark.parametrize("how", ["environment", pytest.param("call", marks=pytest.mark.nightly)])
def test_install_as_replaces_torchs_backends(how):
    """get_backend returns the requested name, and name() returns mpicoll, also for new groups."""
    script = """
        for name in "gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl", None:
            dist.init_process_group(name)
            x = torch.full((2,), dist.get_rank() + 1.0)
            dist.all_reduce(x)
            first = dist.new_group([0])
            beside = dist.new_group(backend="mpicoll")
            y = torch.ones(1)
            if dist.get_rank() == 0:
                dist.all_reduce(y, group=first)
                assert dist.get_backend(first) == dist.get_backend()
                assert first.name() == "mpicoll"
            dist.all_reduce(y, group=beside)
            if name == "gloo":
                dist.monitored_barrier()  # torch offers it only for this name
            found = [None] * 2
            dist.all_gather_object(found, dist.get_rank())
            say(x.tolist(), y.tolist(), found, dist.get_backend(), dist.group.WORLD.name())
            dist.destroy_process_group()
    """
    if how == "call":
        call = "import mpicoll.torch; mpicoll.torch.install_as('gloo,nccl,mpi')\n"
        lines = on_ranks(call + textwrap.dedent(script))
    else:
        lines = on_ranks(script, MPICOLL_INSTALL_AS="Gloo, nccl,mpi")
    # Without a name, torch's get_backend returns "undefined".
    names = "gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl", "undefined"
    expected = [f"[3.0, 3.0] [2.0] [0, 1] {name} mpicoll" for name in names]
    assert lines == sorted(expected * 2)


CHILD_PROCESSES = """
import os, sys
import torch.distributed as dist
import torch.multiprocessing

def child(index, rank, port):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    found = [None] * 2
    dist.all_gather_object(found, rank)
    os.write(1, f"{found} {dist.group.WORLD.name()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [store.port]
    del store
    dist.broadcast_object_list(port)
    torch.multiprocessing.spawn(child, (dist.get_rank(), port[0]))
    dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.any_mpi
def test_child_process_of_a_rank_uses_gloo(tmp_path):
    """As in asynchronous checkpoints. The child is not a rank of the job."""
    done = mpicoll_run(CHILD_PROCESSES, tmp_path, ON_2_RANKS, "train.py")
    assert output_of(done) == "[0, 1] gloo\n" * 2


RENDEZVOUS = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing

def rank(index, size, path):
    dist.init_process_group("mpicoll", "file://" + path, rank=index, world_size=size)
    x = torch.tensor([index + 1.0])
    dist.all_reduce(x)
    os.write(1, f"{index} {dist.get_world_size()} {x.item()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (2, *sys.argv[1:]), nprocs=2)
"""


@pytest.mark.any_mpi
def test_init_uses_another_port_if_master_port_is_busy():
    """Another job on the node may use it. The ranks receive the port over MPI."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        lines = on_ranks(f"""
            me = str(mpi_rank())
            for variables in {{}}, {{"RANK": me, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}}:
                os.environ |= {{"MASTER_PORT": "{port}", **variables}}
                dist.init_process_group("mpicoll")
                x = torch.ones(1)
                dist.all_reduce(x)
                store = dist.distributed_c10d._get_default_store()
                store.set(f"key {{me}}", me)
                say(dist.get_rank() == int(me), x.item(), store.get("key 1").decode())
                dist.destroy_process_group()
                for name in "RANK", "WORLD_SIZE", "MASTER_ADDR":
                    os.environ.pop(name, None)
        """)
    assert lines == ["True 2.0 1"] * 4


@pytest.mark.any_mpi
def test_all_ranks_raise_if_one_rank_cannot_open_the_store():
    lines = on_ranks(
        """
        me = mpi_rank()
        def init(words, failing, **variables):
            if me == failing:
                os.environ.update(variables)
            try:
                dist.init_process_group("mpicoll")
            except ValueError as error:
                say(("rank %d failed: " % failing in str(error)) != (me == failing),
                    words in str(error))
            for name in variables:
                os.environ.pop(name, None)
        init("MASTER_PORT: expected a port", 0, MASTER_PORT="x")
        init("RANK: expected a number", 1, RANK="x")
        init("world_size=3 disagrees", 1, WORLD_SIZE="3", RANK="1")
        init("unknown setting", 1, MPICOLL_NOTHING="1")
        dist.init_process_group("mpicoll")
        say(dist.get_world_size())
        """,
    )
    assert lines == ["2"] * 2 + ["True True"] * 8


@pytest.mark.nightly
@pytest.mark.any_mpi
def test_ranks_may_be_numbered_by_the_program(tmp_path):
    """By environment variables, by a store and by a file, in another order than MPI's ranks."""
    script = f"""
    me = mpi_rank()
    def check(name, **how):
        dist.init_process_group(name, **how)
        x = torch.tensor([me])
        dist.broadcast(x, 0)
        say(dist.get_rank() + me, x.item(), os.environ["RANK"] == str(dist.get_rank()))
        dist.destroy_process_group()
    os.environ |= {{"RANK": str(1 - me), "WORLD_SIZE": "2"}}
    for name in "mpi", "mpicoll":
        check(name)
        store = dist.FileStore(f"{tmp_path}/store of {{name}}", 2)
        check(name, store=store, rank=1 - me, world_size=2)
        assert store.num_keys() > 0  # torch's barrier has used it
        check(name, init_method=f"file://{tmp_path}/{{name}}", rank=1 - me, world_size=2)
    """
    lines = on_ranks(script, MPICOLL_INSTALL_AS="mpi")
    assert lines == ["1 1 True"] * 12


@pytest.mark.any_mpi
def test_processes_without_a_launcher_use_a_file_as_rendezvous(tmp_path):
    if VENDOR == "Open MPI":
        pytest.skip("Open MPI does not connect processes that it has not started")
    (tmp_path / "job.py").write_text(RENDEZVOUS)
    command = [sys.executable, tmp_path / "job.py", tmp_path / "rendezvous"]
    lines = output_of(start(command, PYTHONPATH=str(ROOT))).splitlines()
    assert sorted(lines) == [f"{rank} 2 3.0" for rank in range(2)]


# ---- python -m mpicoll run -----------------------------------------------------------------------


def mpicoll_run(script, folder, launcher, *words, **environment):
    """Run a script as train.py by ``python -m mpicoll run WORDS``."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    python = [] if launcher[-1:] == ["-m"] else [sys.executable, "-m"]
    command = [*launcher, *python, "mpicoll", "run", *words]
    return start(command, folder, PYTHONPATH=path, **environment)


STOCK = """
import os, sys
import torch
import torch.distributed as dist

def words():
    return [__name__, os.path.basename(sys.argv[0]), *sys.argv[1:]]

if __name__ == "__main__":
    assert sys.modules["__main__"].words is words
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    os.write(1, f"{words()} {x.item()} {dist.get_backend()} {dist.group.WORLD.name()}\\n".encode())
    dist.destroy_process_group()
    sys.exit("fail" in sys.argv)
"""
PRINTED = "['__main__', 'train.py', '-m', '--backend', 'x'] 2.0 gloo "


UNDER_TORCHRUN = [*TORCHRUN, "2", "-m"]


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("launcher", "words", "name"),
    [
        (ON_2_RANKS, ["train.py"], "mpicoll"),
        pytest.param(ON_2_RANKS, ["--backend", "nccl,gloo", "-m", "train"], "mpicoll",
                     marks=pytest.mark.nightly),
        pytest.param(UNDER_TORCHRUN, ["train.py"], "mpicoll", marks=[pytest.mark.nightly,
            pytest.mark.skipif(
                VENDOR == "Open MPI", reason="torchrun needs a library of the MPICH family")]),
        pytest.param(UNDER_TORCHRUN, ["--backend", "mpi", "train.py"], "gloo",
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_run_replaces_the_backend_of_a_script(launcher, words, name, tmp_path):
    done = mpicoll_run(STOCK, tmp_path, launcher, *words, "-m", "--backend", "x")
    assert output_of(done) == f"{PRINTED}{name}\n" * 2
    assert "ranks were started" not in done.stderr, done.stderr


#: Reads torchrun's variables like pytorch/examples' ddp, opens its own store, and selects the
#: backend like Accelerate.
TORCHRUN_SCRIPT = """
import os
import torch
import torch.distributed as dist

names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
rank, local_rank, size, local_size, host, port = (os.environ[name] for name in names)
rank, size = int(rank), int(size)
store = dist.TCPStore(host, int(port), size, rank == 0, multi_tenant=True)
store.set(f"port {rank}", port)
assert all(store.get(f"port {each}") == port.encode() for each in range(size))

backend = "mpi" if dist.is_mpi_available() else "gloo"
dist.init_process_group(backend, rank=rank, world_size=size)
assert (rank, size) == (dist.get_rank(), dist.get_world_size())
assert [os.environ[name] for name in names[:4]] == [str(rank), local_rank, str(size), local_size]
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
os.write(1, f"{rank} {local_rank} {size} {local_size} {x.item()} ".encode()
         + f"{backend} {dist.group.WORLD.name()}\\n".encode())
dist.destroy_process_group()
"""


def test_script_for_torchrun_runs_unchanged_under_mpiexec(tmp_path):
    """Two jobs at the same time. As with torchrun and Gloo, standard error stays empty."""
    with ThreadPoolExecutor(2) as pool:
        arguments = mpicoll_run, TORCHRUN_SCRIPT, tmp_path, ON_2_RANKS, "train.py"
        jobs = [pool.submit(*arguments) for _ in range(2)]
    expected = [f"{rank} {rank} 2 2 3.0 gloo mpicoll" for rank in range(2)]
    for job in jobs:
        assert sorted(output_of(job.result()).splitlines()) == expected
        assert job.result().stderr == ""


def test_ranks_of_several_nodes_connect_to_rank_0(tmp_path):
    """Two names of one machine count as two nodes."""
    if VENDOR != "MPICH":
        pytest.skip("MPICH's mpiexec starts ranks on other names of this machine without ssh")
    store = ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", "29731"]
    hosts = ["-launcher", "fork", "-hosts", "127.0.0.1,localhost"]
    nodes = [*MPIEXEC, *store, *hosts, "-n", "2"]
    done = mpicoll_run(TORCHRUN_SCRIPT, tmp_path, nodes, "train.py")
    lines = sorted(output_of(done).splitlines())
    assert lines == [f"{rank} 0 2 1 3.0 gloo mpicoll" for rank in range(2)]


@pytest.mark.any_mpi
def test_run_explains_a_missing_variable(tmp_path):
    script = "import torch, os\nos.environ['WORLD_SIZE']"
    done = mpicoll_run(script, tmp_path, [], "train.py")
    assert done.returncode == 1, done.stderr
    expected = "python -m mpicoll run: WORLD_SIZE is not set: no launcher started this process."
    assert done.stderr.count(expected) == 1, done.stderr
    done = mpicoll_run(script, tmp_path, [], "train.py", PMIX_RANK="0", PMIX_NAMESPACE="j")
    expected = "WORLD_SIZE is not set: a PMIx process manager does not provide it before"
    assert done.stderr.count(expected) == 1, done.stderr


@pytest.mark.any_mpi
def test_run_ends_with_the_exit_code_of_the_script(tmp_path):
    done = mpicoll_run(STOCK, tmp_path, ON_2_RANKS, "train.py", "fail")
    assert done.returncode == 1, done.stdout + done.stderr
    fails = "    dist.get_rank() or {}['the reason']\n    x = torch"
    done = mpicoll_run(STOCK.replace("    x = torch", fails), tmp_path, ON_2_RANKS, "train.py")
    assert done.returncode != 0 and "KeyError: 'the reason'" in done.stderr, done.stderr


@pytest.mark.any_mpi
@pytest.mark.parametrize("script", ["", "1 / 0"])
def test_run_warns_if_the_script_creates_no_process_group(script, tmp_path):
    script = f"import torch\nimport torch.distributed as dist\n{script}"
    done = mpicoll_run(script, tmp_path, ON_2_RANKS, "train.py")
    warnings = done.stderr.count("2 ranks were started, but the script created no process group")
    assert warnings == (script.endswith("\n")), done.stderr


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("words", "environment", "why"),
    [
        ([], {}, "expected a script, or -m and a module"),
        (["--backend", "ucc", "x.py"], {}, "expected gloo, mpi, nccl or several"),
        (["x.py"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "prevents torch from loading mpicoll"),
    ],
)
def test_run_rejects_invalid_arguments(words, environment, why, tmp_path):
    done = mpicoll_run("", tmp_path, [], *words, **environment)
    assert done.returncode == 2 and why in done.stderr, done.stdout + done.stderr


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.any_mpi
def test_pg_options_give_one_warning():
    lines = on_ranks("""
        import warnings
        from datetime import timedelta
        def seconds(group):
            return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        options = torch._C._distributed_c10d.Backend.Options("mpicoll", timedelta(seconds=7))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.init_process_group("mpicoll", timeout=timedelta(seconds=90), pg_options=options)
            group = dist.new_group(pg_options=object(), timeout=timedelta(seconds=80))
        (warning,) = [one for one in caught if "pg_options" in str(one.message)]
        assert "Options" in str(warning.message) and warning.filename == "<string>", warning
        say(seconds(dist.group.WORLD), seconds(group))
        dist.destroy_process_group()
    """)
    assert lines == ["90.0 80.0"] * 2, lines


@pytest.mark.parametrize(
    "last",
    ["dist.destroy_process_group()", pytest.param("pass", marks=pytest.mark.nightly)],
    ids=["destroy", "pass"],
)
def test_exception_on_one_rank_ends_the_job_with_its_traceback(last):
    """torch buffers the output of its excepthook, and would print it too late. PyTorch's examples
    destroy groups in a finally clause.
    """
    script = f"""
        dist.init_process_group("mpicoll")
        try:
            if dist.get_rank() == 1:
                raise KeyError("the reason")
            dist.all_reduce(torch.ones(1))
        finally:
            {last}
    """
    done = python(script, *ON_2_RANKS)
    assert done.returncode != 0
    assert "KeyError: 'the reason'" in done.stderr, done.stderr


@pytest.mark.any_mpi
def test_backward_raises_after_the_timeout():
    """DDP waits for futures in C++.

    The exit code depends on the launcher: the call is still inside MPI, so MPI is not finalized.
    """
    script = """
        import time
        from datetime import timedelta
        dist.init_process_group("mpicoll", timeout=timedelta(seconds=8))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        if dist.get_rank() == 0:
            try:
                model(torch.ones(1, 3)).sum().backward()
            except RuntimeError as error:
                say("within its timeout of 8 s" in str(error))
        else:
            time.sleep(13)
        dist.destroy_process_group()
    """
    done = python(script, *ON_2_RANKS)
    assert "True\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.any_mpi
def test_interactive_session_continues_after_an_exception():
    lines = "import mpicoll as dist\ndist.init_process_group()\n1/0\nprint('still', 'here')\n"
    done = subprocess.run(
        [sys.executable, "-i"], input=lines, capture_output=True, text=True, timeout=60
    )
    assert "still here" in done.stdout and "ZeroDivisionError" in done.stderr, done


# ---- under torchrun ------------------------------------------------------------------------------


def test_ranks_of_torchrun_use_mpi(tmp_path):
    """With the name mpicoll, twice, and with the name of torch's MPI backend."""
    script = """
import mpicoll.torch
mpicoll.torch.install_as("mpi")
for name in "mpicoll", "mpicoll", "mpi":
    dist.init_process_group(name)
    x = torch.full((2,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    half = dist.new_group([0])
    say(name, dist.get_rank(), x.tolist(), dist.get_node_local_rank())
    dist.destroy_process_group()
"""
    (tmp_path / "script.py").write_text(PREAMBLE + script)
    done = start([*TORCHRUN, "2", tmp_path / "script.py"])
    if VENDOR == "Open MPI":
        assert done.returncode != 0
        assert "mpirun -n 2" in done.stderr and "pip install mpich" in done.stderr, done.stderr
        return
    names = "mpicoll", "mpicoll", "mpi"
    expected = [f"{name} {rank} [3.0, 3.0] {rank}" for name in names for rank in range(2)]
    assert sorted(output_of(done).splitlines()) == sorted(expected)
