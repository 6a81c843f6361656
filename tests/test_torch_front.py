"""How PyTorch finds the backend, and what a whole job of PyTorch's sees of it.

Scripts say what a user's script says; mpiexec and torchrun run them. What the backend does once it
is there is in tests/pytorch.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
FOUND = tuple(map(int, torch.__version__.split(".")[:2]))

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


def test_import_torch_registers_and_loads_no_mpi():
    done = python("""
        loaded = [name for name in sys.modules if name.partition(".")[0] in ("mpi4py", "ml_dtypes")]
        say(loaded, "mpicoll" in dist.Backend.backend_list, dist.is_backend_available("mpicoll"))
    """)
    assert done.stdout == "[] True True\n", done.stdout + done.stderr


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
    told = "mpicoll cannot register with torch 2.9.1 (it needs 2.13 or newer, and was tested with "
    assert done.stdout.startswith(told), done.stdout + done.stderr
    assert "AttributeError" in done.stdout, done.stdout


def test_only_mpi_is_stood_in_for():
    import mpicoll.torch

    with pytest.raises(ValueError, match="install_as: expected 'mpi', got 'nccl'"):
        mpicoll.torch.install_as("nccl")


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
    known = "it needs 2.13 or newer, and was tested with 2.13 to 2.15"
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


@needs_mpiexec
@pytest.mark.parametrize("how", ["environment", "call"])
def test_in_place_of_torchs_own_mpi_backend(how):
    script = """
        dist.init_process_group(backend="mpi")
        from torch.distributed import distributed_c10d
        assert isinstance(dist.HashStore(), distributed_c10d.Store)
        assert not isinstance(dist, distributed_c10d.Store)
        x = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        pair = dist.new_group([0, 1])
        gloo = dist.new_group(backend="gloo")
        y = torch.ones(1)
        if dist.get_rank() < 2:
            dist.all_reduce(y, group=pair)
        dist.all_reduce(y, group=gloo)
        say(x.tolist(), y.tolist(), dist.get_backend(), dist.get_backend(gloo))
        dist.destroy_process_group()
    """
    if how == "call":
        call = "import mpicoll.torch; mpicoll.torch.install_as('mpi')\n"
        lines = on_ranks(call + textwrap.dedent(script), 3)
    else:
        lines = on_ranks(script, 3, MPICOLL_INSTALL_AS="mpi")
    assert lines == ["[6.0, 6.0] [5.0] mpi gloo"] * 3


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
        f"mpicoll: backend 'cpu:gloo,cuda:mpicoll': torch {torch.__version__} lets a backend",
        "all_reduce: tensor: tensors on meta are not supported",
    )
    for words in (
        *(older if FOUND < (2, 15) else ()),
        "init_process_group: rank=7 disagrees with MPI's own",
        "broadcast: requires a single-element tensor list (one device a process), got 2",
    ):
        assert sum(line.startswith(words) for line in lines) >= 2, (words, lines)


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
        if dist.get_rank() == 0:
            try:
                dist.barrier(group=group)
            except RuntimeError as error:
                assert "timeout of 0.3 s" in str(error), error
            else:
                say("no error")
        dist.barrier()
        if dist.get_rank() != 0:
            dist.barrier(group=group)
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


@needs_mpiexec
def test_backward_knows_the_timeout():
    """DDP waits for futures, in C++: a rank that does not come is an error there.

    What the exit code is, is the launcher's: the call is still inside MPI, which is not finalised.
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
                say("not complete within the timeout of 8 s" in str(error))
        else:
            time.sleep(13)
        dist.destroy_process_group()
    """
    done = python(script, *MPIEXEC, "-n", "2")
    assert "True\n" in done.stdout, done.stdout + done.stderr


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
