"""python -m mpicoll: output, exit codes, and doctor's advice."""

from __future__ import annotations

import json
import os
import re
import socket

import numpy as np
import pytest
from cli_jobs import LIMIT_S, SRUN, Ended, job

from mpicoll import cli
from mpicoll.cli import doctor
from mpicoll.cli.doctor import Findings, Placement, advise
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.launch.exit_hooks import INTERRUPTED
from mpicoll.primitives import PRIMITIVES

# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["hello --bad", "hullo"])
@job("$words", ranks=3)
def test_invalid_command_line_ends_all_ranks(words: str, ended: Ended) -> None:
    ended.refused()
    assert ended.err.count("usage: python -m mpicoll") == 1, ended


@pytest.mark.parametrize("words", ["--help", ""])
@job("$words", ranks=3)
def test_help_is_printed_once(words: str, ended: Ended) -> None:
    ended.in_good_order()
    assert ended.out.count("usage: ") == 1
    for name, summary in cli.COMMANDS.items():
        assert name in ended.out and summary[:30] in ended.out


#: Sends SIGINT to the ranks in $ranks after the first collective call. Ranks after the bar wait in
#: an MPI_Barrier that no other rank calls.
INTERRUPT = """
import os, signal, sys, threading, time
rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOME")
            if name in os.environ)
interrupted, _, blocked = "$ranks".partition("|")
def interrupt():
    while "mpicoll.dispatch.execute" not in sys.modules:
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGINT)
if rank in interrupted or not rank.isdigit():
    threading.Thread(target=interrupt, daemon=True).start()
if rank in blocked:
    def block(*rest):
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
    from mpicoll.cli import bench_table
    bench_table.count_wrong = block
"""


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("bench all_reduce -e 8 -n 100000000", "0 1 2"),
        ("tune -o $FOLDER/x", "0 1 2"),
        ("bench all_reduce -e 8 -n 100000000", "1"),
        ("bench all_reduce -b 8 -e 8 -c", "0|0"),
    ],
)
@job("$words", every_mpi=True, ranks=3, site=INTERRUPT)
def test_ctrl_c_ends_all_ranks(words: str, ranks: str, ended: Ended) -> None:
    """On all ranks, on one rank, and inside MPI."""
    assert ended.code == INTERRUPTED, ended
    assert ended.err.count("interrupted") == 1 and "Traceback" not in ended.err, ended
    assert ended.seconds < LIMIT_S / 3, ended


# --- hello --------------------------------------------------------------------------------------


#: Binds the process to the last of its processors.
BIND = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})"


@job("hello", site=BIND)
def test_hello_on_one_rank(ended: Ended) -> None:
    ended.in_good_order()
    host = re.escape(socket.gethostname())
    last, count = max(os.sched_getaffinity(0)), os.cpu_count()
    line = rf"rank 0 of 1 on {host}, local rank 0 of 1, on processors {last} of {count}, "
    assert re.fullmatch(line + r"[\w ]+ [\d.]+, no GPU\n", ended.out), ended


# --- doctor -------------------------------------------------------------------------------------


@job("doctor")
def test_doctor_on_one_rank(ended: Ended) -> None:
    ended.in_good_order()
    for words in "Python", "MPI_THREAD_", "1 on 1 node", "C library", "none: arrays on a GPU":
        assert words in ended.out, ended
    for words in "system  ", "processors  ", "may run on  ", "/dev/shm  ", "NumPy  ", "ml_dtypes  ":
        assert f"\n  {words}" in ended.out, ended
    assert "WRONG" not in ended.out and "this process is the only rank" in ended.out


@job("doctor --json", every_mpi=True, ranks=3)
def test_doctor_on_several_ranks(ended: Ended) -> None:
    ended.in_good_order()
    found = json.loads(ended.out)
    assert found["ok"] and len(found["ranks"]) == 3
    each = found["ranks"][0]
    assert each["ranks"] == "3 on 1 node" and each["host"] == socket.gethostname()
    assert each["NumPy"] == np.__version__
    crowded = any("they share processors" in each["text"] for each in found["advice"])
    assert crowded == (len(os.sched_getaffinity(0)) < 3)
    routes = found["routes"]["host"]
    assert {name.partition(" ")[0] for name in routes} == {row.name for row in PRIMITIVES}
    assert found["routes"]["device"] == {}
    if "compiled" in each["C library"]:
        assert routes["all_reduce (bfloat16)"] == "shared memory"
        route = "(MPI|shared memory)"
        steps = rf"{route}(; from \d+ (B|KiB|MiB) on {route})*"
        assert re.fullmatch(steps, routes["broadcast"]), routes


@job("doctor --json", ranks=2, environment={"MPICOLL_SHARED_MEMORY": "0"})
def test_doctor_without_shared_memory(ended: Ended) -> None:
    found = json.loads(ended.out)
    assert ended.code == 0 and found["ok"], ended
    routes = found["routes"]["host"]
    assert routes["broadcast"] == "MPI"
    assert routes["all_reduce (bfloat16)"] == "messages over MPI"
    assert not any("shared" in words for words in routes.values())
    assert any("MPICOLL_SHARED_MEMORY=0" in each["text"] for each in found["advice"])


@job("doctor --json", environment={"MPICOLL_DEVICE_ROUTE": "direct"})
def test_doctor_reports_an_unavailable_device_route(ended: Ended) -> None:
    found = json.loads(ended.out)
    assert ended.code == 1 and not found["ok"], ended
    (advice,) = [each["text"] for each in found["advice"] if each["wrong"]]
    assert advice.startswith("MPICOLL_DEVICE_ROUTE=direct: rank 0 lacks an MPI that")


MISSPELT = {"MPICOLL_CUDA_AWARE": "perhaps", "MPICOLL_SHARED_MEM": "0", "MPICOLL_DEBUG": "INFO",
            "MPICOLL_SECRET": "hush", "MPICOLL_TABLE": "0"}  # fmt: skip


@job("doctor --json", ranks=2, environment=MISSPELT)
def test_doctor_reports_invalid_settings(ended: Ended) -> None:
    found = json.loads(ended.out)
    assert ended.code == 1 and not found["ok"], ended
    name, value = (each["text"] for each in found["advice"] if each["wrong"])
    assert name.startswith("ranks 0-1: MPICOLL_SHARED_MEM: ")
    assert name.endswith("did you mean MPICOLL_SHARED_MEMORY?")
    assert value == "ranks 0-1: MPICOLL_CUDA_AWARE: expected 0 or 1, got 'perhaps'"
    assert found["routes"]["host"], "the report is incomplete"
    settings = (
        "MPICOLL_DEBUG=INFO; MPICOLL_TABLE=0; MPICOLL_CUDA_AWARE=perhaps; MPICOLL_SECRET=(set)"
    )
    assert [each["settings"] for each in found["ranks"]] == [settings] * 2


@job("doctor", environment=SRUN)
def test_doctor_reports_ranks_that_mpi_does_not_have(ended: Ended) -> None:
    assert ended.code == 1, ended
    words = " ".join(ended.out.split())
    assert "WRONG: init_process_group: srun announces 2 ranks" in words, ended
    assert "launcher srun" in words


@job("doctor", environment={"MPI4PY_MPIABI": "mpich", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
def test_doctor_reports_an_mpi_library_that_does_not_load(ended: Ended) -> None:
    assert ended.code == 1, ended
    assert "WRONG: init_process_group: mpi4py cannot load an MPI library" in ended.out, ended
    assert "Traceback" not in ended.err


def facts(**others: str) -> dict[str, str]:
    return {"MPI": "M 1 (/a)", "mpicoll": "1 (/b)", **others}


def place(*allowed: int, host: str = "a", free: int = 1 << 30, threads: str = "1") -> Placement:
    return Placement(host, 4, allowed, 1 << 30, free, threads)


def placed(*places: Placement) -> Findings:
    return Findings([facts()] * len(places), placements=list(places))


GPU = (Capabilities("M", "1", "", True, "", "a", gpus=("a",)),)
NO_LIBRARY = facts(**{"C library": "numpy (it does not load: x)"})


@pytest.mark.parametrize(
    ("seen", "wrong", "words"),
    [
        (Findings([facts(), facts(MPI="M 1 (/c)")]), None, ""),
        (Findings([facts(), facts(MPI="M 2 (/a)")]), True, "MPI differs between ranks"),
        (Findings([facts(), facts(mpicoll="2 (/b)")]), True, "mpicoll differs between ranks"),
        (Findings([facts(), NO_LIBRARY]), True, "rank 1: the C library does not load"),
        (Findings([facts(threads="MPI_THREAD_SERIALIZED")]), False, "rank 0: MPI allows one"),
        (Findings([facts(torch="3; the backend mpicoll is not registered")]), False, "torch"),
        (Findings([facts(torch="3, cannot be imported: x")]), True, "torch is installed"),
        (Findings([facts()], shared=False), False, "do not share memory"),
        (Findings([facts()] * 2, shared=True, no_single_copy=["", ""]), None, ""),
        (
            Findings([facts()] * 2, shared=True, no_single_copy=["", "rank 0: no"]),
            False, "(rank 1: rank 0: no): the node must allow",
        ),
        (Findings([facts()], idle=["GPU 1 is idle"]), False, "GPU 1 is idle"),
        (Findings([facts()] * 3, far=[["far"], [], ["far"]]), False, "ranks 0,2: far"),
        (Findings([facts(launcher="none")]), False, "the only rank"),
        (Findings([facts(launcher="none")] * 2), None, ""),
        # Binding.
        (placed(*[place(0, 1, 2, 3)] * 4), False, "ranks 0-3: not bound to processors"),
        (placed(place(0, 1), place(2, 3)), None, ""),
        (placed(place(0, 1), place(1), place(2, 3)), False, "rank 0: not bound"),
        (placed(*(place(0, 1, 2, 3, host=host) for host in "abb")), False, "ranks 1-2: not bound"),
        (placed(*[place(0, 1, 2, 3)] * 5), False, "5 ranks on a, which has 4 processors: they"),
        (
            placed(*[place(0, 1)] * 3), False,
            "3 ranks on a may only run on 2 of its 4 processors (0-1): ",
        ),
        (
            placed(*(place(0, host=host) for host in "aabbcc")), False,
            "2 ranks on a (and 2 more) may only run",
        ),
        (placed(place(0, free=64 << 20)), False, "/dev/shm on a has 64 MiB left"),
        # Threads.
        (placed(place(0, 1, threads=""), place(2, 3, threads="")), None, ""),
    ],
)  # fmt: skip
def test_advice(seen: Findings, wrong: bool | None, words: str) -> None:
    advice = advise(seen)
    assert [bad for bad, _ in advice] == ([] if wrong is None else [wrong]), advice
    assert all(words in text for _, text in advice), advice


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([place(0, threads=""), place(1, threads="")], ""),
        ([place(0, 1, threads="")] * 2, "may start a thread for every processor, 4 threads on 2 "
         "processors. Set it: export OMP_NUM_THREADS=1"),
        ([place(*range(4), threads="")] * 2, "Set it: export OMP_NUM_THREADS=2"),
    ],
)  # fmt: skip
def test_advice_on_threads(places: list[Placement], words: str) -> None:
    advice = [text for _, text in advise(placed(*places)) if "OMP_NUM_THREADS" in text]
    assert len(advice) == bool(words) and all(words in text for text in advice), advice


@pytest.mark.parametrize(("tls", "count"), [("rc,sm", 1), ("rc,cuda", 0), ("^tcp", 0)])
def test_advice_on_ucx(tls: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    advice = advise(Findings([facts()], all_ranks=GPU))
    assert ["excludes cuda: add cuda_copy,cuda_ipc" in text for _, text in advice] == [True] * count


def test_facts_that_differ_are_listed_by_rank() -> None:
    seen = Findings([facts(host=host, ranks="3") for host in ("a", "b; c", "a")])
    lines = doctor._to_text(seen, []).splitlines()
    assert lines[3:6] == [
        "  host          ranks 0,2: a", "  host          rank 1: b; c", "  ranks         3",
    ]  # fmt: skip
