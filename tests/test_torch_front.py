"""How PyTorch finds the backend, and what a whole job of PyTorch's sees of it.

Scripts say what a user's script says; mpiexec and torchrun run them. What the backend does once it
is there is in tests/pytorch.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.waits, pytest.mark.slow]

torch = pytest.importorskip("torch")
FOUND = tuple(map(int, torch.__version__.split(".")[:2]))

ROOT = Path(__file__).resolve().parent.parent
MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]

needs_mpiexec = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")

#: Where Python can make a backend.
first_class = pytest.mark.skipif(FOUND < (2, 15), reason="torch 2.15 is the first to have it")

PREAMBLE = """
import os, sys
import torch
import torch.distributed as dist

def say(*words):  # one write, so that ranks do not print into each other's lines
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def python(script: str, *start: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, as a function, behind the words of a launcher where there are some."""
    # What a function holds is gone when the interpreter ends: torch's Gloo may abort otherwise.
    script = "def main():\n" + textwrap.indent(textwrap.dedent(script), "    ") + "\nmain()\n"
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*start, sys.executable, "-c", PREAMBLE + script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=variables | environment,
    )


def on_ranks(script: str, ranks: int = 2, **environment: str) -> list[str]:
    """What the ranks of a job that ends well print, sorted."""
    done = python(script, *MPIEXEC, "-n", str(ranks), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.split("\n"))[1:]


def family() -> str:
    """The MPI library: "MPICH", "Open MPI", ..."""
    code = "import mpi4py; mpi4py.rc.initialize = False\nfrom mpi4py import MPI\n"
    code += "print(MPI.get_vendor()[0])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


# ---- import torch --------------------------------------------------------------------------------


@pytest.mark.any_mpi
def test_import_torch_registers_and_loads_no_mpi():
    done = python("""
        loaded = [name for name in sys.modules if name.partition(".")[0] in ("mpi4py", "ml_dtypes")]
        say(loaded, "mpicoll" in dist.Backend.backend_list, dist.is_backend_available("mpicoll"))
    """)
    assert done.stdout == "[] True True\n", done.stdout + done.stderr


@pytest.mark.any_mpi
def test_without_autoload_register_does_the_same():
    done = python(
        """
        say(dist.is_backend_available("mpicoll"))
        import mpicoll.torch
        mpicoll.torch.register()
        mpicoll.torch.register()
        say(dist.is_backend_available("mpicoll"), dist.Backend.backend_list.count("mpicoll"))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.stdout == "False\nTrue 1\n", done.stdout + done.stderr


@pytest.mark.any_mpi
def test_what_mpicoll_cannot_do_never_breaks_import_torch():
    """As with an old torch, in which something that registering needs has another name."""
    done = python(
        """
        import warnings
        import mpicoll.torch
        del dist.Backend.register_backend
        torch.__version__ = "2.9.1"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mpicoll.torch.autoload()
        say(caught[0].message)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    told = "mpicoll cannot register with torch 2.9.1 (it needs 2.11 or newer, and was tested with "
    assert done.stdout.startswith(told), done.stdout + done.stderr
    assert "AttributeError" in done.stdout, done.stdout


@pytest.mark.any_mpi
@pytest.mark.parametrize("names", ["ucc", "gloo;nccl", "gloo,", ""])
def test_other_names_are_not_stood_in_for(names):
    import mpicoll.torch

    with pytest.raises(ValueError, match=f"expected gloo, mpi, nccl or several.*got '{names}'"):
        mpicoll.torch.install_as(names)


@pytest.mark.any_mpi
def test_what_names_mean_by_device():
    done = python(
        """
        from mpicoll.torch.aliases import resolve_backend
        for asked in ("gloo", "cpu:gloo,cuda:nccl", "CPU:Gloo", "undefined", "nccl", "ucc"):
            say(resolve_backend(asked))
        """,
        MPICOLL_INSTALL_AS="gloo",
    )
    expected = ["mpicoll", "cpu:mpicoll,cuda:nccl", "mpicoll", "mpicoll", "nccl", "ucc"]
    assert done.stdout.split() == expected, done.stdout + done.stderr


# ---- under mpiexec -------------------------------------------------------------------------------

ALL_REDUCE = """
x = torch.full((2,), dist.get_rank() + 1.0)
dist.all_reduce(x)
"""


@needs_mpiexec
def test_a_script_says_the_name_and_no_more():
    """The variables that other libraries read are there then, and a second beginning works."""
    lines = on_ranks(
        """
        for _ in range(2):
            dist.init_process_group("mpicoll")
            x = torch.full((2,), dist.get_rank() + 1.0)
            dist.all_reduce(x)
            rank, size = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        say(rank, size, x.tolist(), *[os.environ[name] for name in names])
        assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
        """,
        3,
    )
    assert lines == [f"{r} 3 [6.0, 6.0] {r} 3 {r} 3" for r in range(3)]


@pytest.mark.any_mpi
@needs_mpiexec
def test_a_newer_torch_is_warned_of_once():
    lines = on_ranks("""
        import warnings
        torch.__version__ = "99.1.0a0"
        with warnings.catch_warnings(record=True) as caught:
            for _ in range(2):
                dist.init_process_group("mpicoll")
                dist.all_reduce(x := torch.ones(1))
                dist.destroy_process_group()
        told = [str(one.message) for one in caught if "mpicoll" in str(one.message)]
        say(x.item(), *told)
    """)
    known = "it needs 2.11 or newer, and was tested with 2.11 and 2.13 to 2.15"
    told = f"mpicoll has not been tested with torch 99.1.0a0: {known}"
    assert lines == ["2.0 ", f"2.0 {told}"] or lines == ["2.0", f"2.0 {told}"]


@needs_mpiexec
@first_class
@pytest.mark.parametrize("of", ["WORLD", "dist.new_group([0, 1, 2])"])
def test_shrink_group(of):
    """The others go on, and the one that was left out ends."""
    lines = on_ranks(
        f"""
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
        """,
        3,
    )
    assert lines == ["4.0 4.0 0 2", "4.0 4.0 1 2"]


@pytest.mark.any_mpi
@needs_mpiexec
@first_class
@pytest.mark.parametrize("of", ["None", "dist.new_group([0, 1, 2])"])
def test_shrink_group_gives_up_what_is_pending(of):
    """What is stuck stays inside MPI, so the ranks end without finalising it. Some launchers kill
    the others then: how the job ends is not asked.
    """
    done = python(
        f"""
        import time
        dist.init_process_group("mpicoll")
        me, wide = dist.get_rank(), {of}
        if me != 1:
            work = dist.all_reduce(torch.ones(1), group=wide, async_op=True)
            small = dist.shrink_group([1], wide, shrink_flags=1)
            x = torch.full((1,), me + 1.0)
            dist.all_reduce(x, group=small)
            try:
                work.wait()
            except RuntimeError as error:
                say(x.item(), "aborted" in str(error))
            dist.barrier(small)
        else:
            time.sleep(30)
        """,
        *MPIEXEC,
        "-n",
        "3",
    )
    assert done.stdout.count("4.0 True") == 2, done.stdout + done.stderr


@pytest.mark.any_mpi
@needs_mpiexec
@first_class
@pytest.mark.parametrize("backend", ["mpicoll", "cpu:mpicoll,cuda:gloo"])
def test_torchs_own_wrapper_for_debugging(backend):
    """It holds what torch's C++ has of a backend, and lets go of the rest."""
    lines = on_ranks(
        f"""
        import gc
        dist.init_process_group("{backend}")
        gc.collect()
        x, y = torch.ones(1), torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(x)
        dist.broadcast(y, 1, async_op=True).wait()
        say(x.item(), y.tolist())
        dist.destroy_process_group()
        """,
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )
    assert lines == ["2.0 [1.0, 1.0]"] * 2


@pytest.mark.any_mpi
@needs_mpiexec
def test_the_facade_beside():
    """``import mpicoll`` has the same default group."""
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
@needs_mpiexec
def test_mpi_rendezvous_for_another_backend():
    """Gloo's group gets its ranks from MPI; groups of mpicoll can be made beside."""
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
        dist.destroy_process_group(group)  # the others live on
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
@needs_mpiexec
@pytest.mark.parametrize("how", ["environment", "call"])
def test_in_place_of_torchs_own_backends(how):
    """get_backend says what was asked for, and name() who carries it; new groups inherit both."""
    script = """
        for name in "gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl", None:
            dist.init_process_group(name)
            x = torch.full((2,), dist.get_rank() + 1.0)
            dist.all_reduce(x)
            pair = dist.new_group([0, 1])
            beside = dist.new_group(backend="mpicoll")
            y = torch.ones(1)
            if dist.get_rank() < 2:
                dist.all_reduce(y, group=pair)
                assert dist.get_backend(pair) == dist.get_backend()
                assert pair.name() == "mpicoll"
            dist.all_reduce(y, group=beside)
            found = [None] * 3
            dist.all_gather_object(found, dist.get_rank())
            say(x.tolist(), y.tolist(), found, dist.get_backend(), dist.group.WORLD.name())
            dist.destroy_process_group()
    """
    if how == "call":
        call = "import mpicoll.torch; mpicoll.torch.install_as('gloo,nccl,mpi')\n"
        lines = on_ranks(call + textwrap.dedent(script), 3)
    else:
        lines = on_ranks(script, 3, MPICOLL_INSTALL_AS="Gloo, nccl,mpi")
    # Without a name torch itself says "undefined".
    names = "gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl", "undefined"
    told = [f"[6.0, 6.0] [5.0] [0, 1, 2] {name} mpicoll" for name in names for _ in range(3)]
    assert lines == sorted(told)


@pytest.mark.any_mpi
@needs_mpiexec
def test_other_names_stay_torchs_own():
    lines = on_ranks(
        """
        dist.init_process_group("mpi")
        gloo = dist.new_group(backend="gloo")
        y = torch.ones(1)
        dist.all_reduce(y, group=gloo)
        say(y.tolist(), dist.get_backend(gloo), gloo.name())
        dist.destroy_process_group()
        """,
        MPICOLL_INSTALL_AS="mpi",
    )
    assert lines == ["[2.0] gloo gloo"] * 2


@pytest.mark.any_mpi
@needs_mpiexec
def test_what_torch_does_for_gloo_alone_is_there():
    """monitored_barrier, and a checkpoint with a group of its own."""
    lines = on_ranks(
        """
        import tempfile
        from datetime import timedelta
        import torch.distributed.checkpoint as checkpoint
        dist.init_process_group("gloo")
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        held = {"w": torch.arange(4.0)}
        group = dist.new_group(backend="gloo")
        checkpoint.async_save(held, checkpoint_id=folder[0], process_group=group).result()
        found = {"w": torch.zeros(4)}
        checkpoint.load(found, checkpoint_id=folder[0], process_group=group)
        say(found["w"].tolist(), group.name())
        dist.destroy_process_group()
        """,
        MPICOLL_INSTALL_AS="gloo",
    )
    assert lines == ["[0.0, 1.0, 2.0, 3.0] mpicoll"] * 2


CHILDREN = """
import os, sys
import torch.distributed as dist
import torch.multiprocessing

def beside(index, rank, port):
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
    torch.multiprocessing.spawn(beside, (dist.get_rank(), port[0]))
    dist.destroy_process_group()
"""


@pytest.mark.any_mpi
@needs_mpiexec
def test_a_process_beside_a_rank_keeps_gloo(tmp_path):
    """As asynchronous checkpoints have one. It is no rank of the job that mpiexec started."""
    done = carried(CHILDREN, tmp_path, [*MPIEXEC, "-n", "2"], "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "[0, 1] gloo\n" * 2, done.stdout + done.stderr


MEETING = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing

def rank(index, size, how, path):
    meet = {"file": lambda: {"init_method": "file://" + path},
            "store": lambda: {"store": dist.FileStore(path, size)}}[how]
    dist.init_process_group("mpicoll", rank=index, world_size=size, **meet())
    x = torch.tensor([index + 1.0])
    dist.all_reduce(x)
    os.write(1, f"{index} {dist.get_world_size()} {x.item()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (3, *sys.argv[1:]), nprocs=3)
"""


@needs_mpiexec
@pytest.mark.parametrize("variables", ["MASTER_PORT", "MASTER_PORT and RANK"])
def test_a_busy_master_port(variables):
    """As of another job on the node. The ranks learn the port from MPI, so another one will do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        lines = on_ranks(
            f"""
            me = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
            if "RANK" in {variables!r}:
                os.environ |= {{"RANK": me, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}}
            dist.init_process_group("mpicoll")
            x = torch.ones(1)
            dist.all_reduce(x)
            store = dist.distributed_c10d._get_default_store()
            store.set(f"key {{me}}", me)
            say(dist.get_rank() == int(me), x.item(), store.get("key 1").decode())
            """,
            MASTER_PORT=str(other.getsockname()[1]),
        )
    assert lines == ["True 2.0 1"] * 2


@needs_mpiexec
def test_a_rank_that_fails_to_open_the_store():
    lines = on_ranks(
        """
        me = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
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


@needs_mpiexec
@pytest.mark.parametrize("name", ["mpi", "mpicoll"], ids="name_{}".format)
def test_ranks_numbered_by_the_program(name, tmp_path):
    """By its own store, by the environment and by a file, whatever MPI's own ranks are."""
    lines = on_ranks(
        f"""
        me = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
        def check(**how):
            dist.init_process_group({name!r}, **how)
            x = torch.tensor([me])
            dist.broadcast(x, 0)
            say(dist.get_rank() + me, x.item(), os.environ["RANK"] == str(dist.get_rank()))
            dist.destroy_process_group()
        os.environ |= {{"RANK": str(1 - me), "WORLD_SIZE": "2"}}
        check()
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        check(store=store, rank=1 - me, world_size=2)
        assert store.num_keys() > 0  # torch's barrier has used it
        check(init_method={f"file://{tmp_path}/file"!r}, rank=1 - me, world_size=2)
        """,
        MPICOLL_INSTALL_AS="mpi",
    )
    assert lines == ["1 1 True"] * 6


@pytest.mark.any_mpi
@pytest.mark.parametrize("how", ["file", "store"])
def test_processes_of_no_launcher_meet_in_a_file(how, tmp_path):
    if "Open MPI" in family():
        pytest.skip("Open MPI makes no world of processes that it has not started")
    (tmp_path / "job.py").write_text(MEETING)
    done = subprocess.run(
        [sys.executable, tmp_path / "job.py", how, tmp_path / "meet"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 3 6.0" for rank in range(3)]


def test_a_store_of_one_process():
    done = python("""
        dist.init_process_group("mpicoll", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.ones(1)
        dist.all_reduce(x)
        say(dist.get_world_size(), x.item())
        dist.destroy_process_group()
    """)
    assert (done.returncode, done.stdout) == (0, "1 1.0\n"), done.stdout + done.stderr


# ---- python -m mpicoll run -----------------------------------------------------------------------


def carried(
    script: str, folder: Path, start: list[str], *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A job of ``python -m mpicoll run``; words go before the script's name."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH", "")]))
    python = [] if start[-1:] == ["-m"] else [sys.executable, "-m"]
    return subprocess.run(
        [*start, *python, "mpicoll", "run", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=variables | {"PYTHONPATH": path} | environment,
    )


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
SAYS = "['__main__', 'train.py', '-m', '--backend', 'x'] 2.0 gloo "


@pytest.mark.any_mpi
@needs_mpiexec
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train.py"], "mpicoll"),
        (["-m", "train"], "mpicoll"),
        (["--backend", "nccl,gloo", "train.py"], "mpicoll"),
        (["--backend", "mpi", "train.py"], "gloo"),
    ],
)
def test_run(words, name, tmp_path):
    done = carried(STOCK, tmp_path, [*MPIEXEC, "-n", "2"], *words, "-m", "--backend", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{SAYS}{name}\n" * 2, done.stdout + done.stderr


#: Tests for RANK like nanoGPT, reads torchrun's variables like pytorch/examples' ddp, opens its own
#: store, chooses the backend like Accelerate, and trains one step with DDP.
READS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ddp = int(os.environ.get("RANK", -1)) != -1
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
rank, local_rank, size, local_size, host, port = (os.environ[name] for name in names)
rank, size = int(rank), int(size)
store = dist.TCPStore(host, int(port), size, rank == 0, multi_tenant=True)
store.set(f"port {rank}", port)
assert all(store.get(f"port {each}") == port.encode() for each in range(size))

backend = "mpi" if dist.is_mpi_available() else "gloo"
dist.init_process_group(backend, rank=rank, world_size=size)
assert (rank, size) == (dist.get_rank(), dist.get_world_size())
assert rank == int(os.environ["RANK"]) and size == int(os.environ["WORLD_SIZE"])
assert (local_rank, local_size) == (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
model = DistributedDataParallel(model)
x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).chunk(size)[rank]
model(x).square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.5).step()
if backend == "gloo":
    parts = [torch.empty(1) for _ in range(size)]
    dist.all_gather(parts, torch.ones(1))
else:
    dist.all_gather_into_tensor(torch.empty(size), torch.ones(1))
weight = model.module.weight.tolist()[0]
os.write(1, f"{ddp} {rank} {local_rank} {size} {local_size} {weight} ".encode()
         + f"{backend} {dist.group.WORLD.name()}\\n".encode())
dist.destroy_process_group()
"""
#: w - 0.5 * the mean over the four rows x of 2 (w x) x, with w = (1, 1).
WEIGHT = [1 - sum((a + b) * a for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))) / 4,
          1 - sum((a + b) * b for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))) / 4]  # fmt: skip


def expected_lines(backend: str, group: str = "mpicoll") -> list[str]:
    return [f"True {rank} {rank} 2 2 {WEIGHT} {backend} {group}" for rank in range(2)]


@needs_mpiexec
def test_a_script_for_torchrun_trains_as_it_is_under_mpiexec(tmp_path):
    """Two jobs at the same time. Like torchrun with Gloo, they print nothing to stderr."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(carried, READS, tmp_path, [*MPIEXEC, "-n", "2"], "train.py")
            for _ in range(2)
        ]
    for job in jobs:
        done = job.result()
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(done.stdout.splitlines()) == expected_lines("gloo"), done.stdout
        assert done.stderr == "", done.stderr


@pytest.mark.any_mpi
@needs_mpiexec
def test_scripts_that_ask_find_mpi_where_gloo_is_torchs_own(tmp_path):
    start = [*MPIEXEC, "-n", "2"]
    done = carried(READS, tmp_path, start, "--backend", "mpi", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == expected_lines("mpi"), done.stdout


@needs_mpiexec
def test_ranks_of_several_nodes_learn_where_rank_0_is(tmp_path):
    """One machine by two names counts as two nodes."""
    if family() != "MPICH":
        pytest.skip("MPICH's mpiexec starts ranks on other names of this machine without ssh")
    start = [*MPIEXEC, "-launcher", "fork", "-hosts", "127.0.0.1,localhost", "-n", "2"]
    done = carried(READS, tmp_path, start, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.replace("0 2 1 [", "0 2 2 [") for line in sorted(done.stdout.splitlines())]
    assert lines == [line.replace("1 1 2", "1 0 2") for line in expected_lines("gloo")]


@pytest.mark.any_mpi
def test_a_variable_that_is_not_set_is_explained(tmp_path):
    script = "import torch, os\nos.environ['WORLD_SIZE']"
    done = carried(script, tmp_path, [], "train.py")
    assert done.returncode == 1, done.stderr
    told = "python -m mpicoll run: WORLD_SIZE is not set: no launcher started this process."
    assert done.stderr.count(told) == 1, done.stderr
    done = carried(script, tmp_path, [], "train.py", PMIX_RANK="0", PMIX_NAMESPACE="j")
    told = "WORLD_SIZE is not set: a PMIx process manager does not provide it before"
    assert done.stderr.count(told) == 1, done.stderr


def test_run_under_torchrun(tmp_path):
    if family() == "Open MPI":
        pytest.skip("torchrun needs a library of the MPICH family")
    start = [*TORCHRUN, "2", "-m"]
    done = carried(STOCK, tmp_path, start, "train.py", "-m", "--backend", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{SAYS}mpicoll\n" * 2, done.stdout + done.stderr


@pytest.mark.any_mpi
@needs_mpiexec
def test_run_ends_as_the_script_does(tmp_path):
    start = [*MPIEXEC, "-n", "2"]
    done = carried(STOCK, tmp_path, start, "train.py", "fail")
    assert done.returncode == 1, done.stdout + done.stderr
    script = STOCK.replace(
        "    x = torch", "    dist.get_rank() or {}['the reason']\n    x = torch"
    )
    done = carried(script, tmp_path, start, "train.py")
    assert done.returncode != 0 and "KeyError: 'the reason'" in done.stderr, done.stderr


@needs_mpiexec
@pytest.mark.parametrize("script", ["", "1 / 0", "dist.init_process_group('mpicoll')"])
def test_run_says_that_ranks_were_alone(script, tmp_path):
    script = f"import torch\nimport torch.distributed as dist\n{script}"
    done = carried(script, tmp_path, [*MPIEXEC, "-n", "2"], "train.py")
    told = done.stderr.count("2 ranks were started, but the script created no process group")
    assert told == (script.endswith("\n")), done.stderr


@pytest.mark.any_mpi
def test_run_says_nothing_of_ranks_that_met_without_mpi(tmp_path):
    start = [*TORCHRUN, "2", "-m"]
    done = carried(STOCK, tmp_path, start, "--backend", "mpi", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "['__main__', 'train.py'] 2.0 gloo gloo\n" * 2, done.stdout
    assert "ranks were started" not in done.stderr, done.stderr


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("words", "environment", "why"),
    [
        ([], {}, "expected a script, or -m and a module"),
        (["--backend", "ucc", "x.py"], {}, "expected gloo, mpi, nccl or several"),
        (["x.py"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "prevents torch from loading mpicoll"),
    ],
)
def test_run_refuses(words, environment, why, tmp_path):
    done = carried("", tmp_path, [], *words, **environment)
    assert done.returncode == 2 and why in done.stderr, done.stdout + done.stderr


# ---- under mpiexec, refused ----------------------------------------------------------------------


@pytest.mark.any_mpi
@needs_mpiexec
def test_refused_by_name():
    lines = on_ranks("""
        from datetime import timedelta
        OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
        def refused(*words, call=dist.init_process_group, **more):
            try:
                call(*words, **more)
            except ValueError as error:
                say(error)
        if OLD:
            refused("cpu:gloo,cuda:mpicoll", init_method="mpi://")
        refused("mpicoll", init_method="mpi://", rank=7, world_size=9)
        dist.init_process_group("mpicoll")
        if OLD:
            refused(torch.ones(2).to("meta"), call=dist.all_reduce)
        refused([torch.ones(1)] * 2, call=dist.group.WORLD.broadcast)
        dist.destroy_process_group()
    """)
    older = (
        f"mpicoll: backend 'cpu:gloo,cuda:mpicoll': not supported by torch {torch.__version__}",
        "all_reduce: tensor: tensors on meta are not supported",
    )
    for words in (
        *(older if FOUND < (2, 15) else ()),
        "init_process_group: rank=7 disagrees with MPI's own",
        "broadcast: requires a single-element tensor list (one device per process), got 2",
    ):
        assert sum(line.startswith(words) for line in lines) >= 2, (words, lines)


@pytest.mark.any_mpi
@needs_mpiexec
def test_options_have_no_effect_and_one_warning():
    lines = on_ranks("""
        import warnings
        from datetime import timedelta
        def backend(group):
            return group._get_backend(torch.device("cpu"))
        def seconds(group):
            return backend(group).options._timeout.total_seconds()
        options = torch._C._distributed_c10d.Backend.Options("mpicoll", timedelta(seconds=7))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.init_process_group("mpicoll", timeout=timedelta(seconds=90), pg_options=options)
            group = dist.new_group(pg_options=object(), timeout=timedelta(seconds=80))
        said = [str(one.message) for one in caught if "pg_options" in str(one.message)]
        assert len(said) == 1 and "Options" in said[0], said
        assert [one.filename for one in caught if "pg_options" in str(one.message)] == ["<string>"]
        world = dist.group.WORLD
        assert isinstance(backend(world).options, type(options))
        assert (seconds(world), seconds(group)) == (90, 80)
        assert backend(world).options.backend == "mpicoll"
        assert backend(world).options.global_ranks_in_group == list(range(dist.get_world_size()))
        backend(group).options._timeout = timedelta(seconds=0.3)
        assert seconds(group) == 0.3 and seconds(world) == 90
        for late in (False, True):  # the group is closed then
            if late == (dist.get_rank() != 0):
                try:
                    dist.barrier(group=group)
                except RuntimeError as error:
                    assert "timeout of 0.3 s" in str(error), error
                else:
                    say("no error")
            dist.barrier()
        say("done")
        dist.destroy_process_group()
    """)
    assert lines == ["done"] * 2, lines


@needs_mpiexec
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback():
    """torch collects what is printed of it, and would print it after the end."""
    done = python(
        """
        dist.init_process_group("mpicoll")
        if dist.get_rank() == 1:
            raise KeyError("the reason")
        dist.barrier()
        """,
        *MPIEXEC,
        "-n",
        "2",
    )
    assert done.returncode != 0
    assert "KeyError: 'the reason'" in done.stderr, done.stderr


@needs_mpiexec
def test_destroyed_on_the_way_of_an_exception():
    """``finally: destroy_process_group()``, as in PyTorch's examples: the others hear of it."""
    done = python(
        """
        dist.init_process_group("mpicoll")
        try:
            if dist.get_rank() == 1:
                raise KeyError("the reason")
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
        """,
        *MPIEXEC,
        "-n",
        "3",
    )
    assert done.returncode != 0
    assert "KeyError: 'the reason'" in done.stderr, done.stderr


@pytest.mark.any_mpi
@needs_mpiexec
def test_backward_knows_the_timeout():
    """DDP waits for futures, in C++: a rank that does not come is an error there.

    What the exit code is, is the launcher's: the call is still inside MPI, which is not finalized.
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
    done = python(script, *MPIEXEC, "-n", "2")
    assert "True\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.any_mpi
def test_a_prompt_goes_on_after_a_mistake():
    lines = "import mpicoll as dist\ndist.init_process_group()\n1/0\nprint('still', 'here')\n"
    done = subprocess.run(
        [sys.executable, "-i"], input=lines, capture_output=True, text=True, timeout=60
    )
    assert "still here" in done.stdout and "ZeroDivisionError" in done.stderr, done


# ---- under torchrun ------------------------------------------------------------------------------


def torchrun(script: str, folder: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(PREAMBLE + textwrap.dedent(script))
    return subprocess.run(
        [*TORCHRUN, str(ranks), str(file)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_torchrun(tmp_path):
    """A script that says the name and no more; twice; and with the name of torch's MPI backend."""
    done = torchrun(
        """
        import mpicoll.torch
        mpicoll.torch.install_as("mpi")
        for name in "mpicoll", "mpicoll", "mpi":
            dist.init_process_group(name)
            x = torch.full((2,), dist.get_rank() + 1.0)
            dist.all_reduce(x)
            half = dist.new_group([0])
            say(name, dist.get_rank(), x.tolist(), dist.get_node_local_rank())
            dist.destroy_process_group()
        """,
        tmp_path,
    )
    if family() == "Open MPI":
        assert done.returncode != 0
        assert "mpirun -n 2" in done.stderr and "pip install mpich" in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == sorted(
        f"{name} {rank} [3.0, 3.0] {rank}"
        for name in ("mpicoll", "mpicoll", "mpi")
        for rank in range(2)
    )
