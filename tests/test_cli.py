"""python -m mpicoll: output, exit codes, and doctor's advice."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from cli_jobs import LIMIT_S, SRUN, Ended, job

import mpicoll
from mpicoll import cli
from mpicoll.cli import doctor
from mpicoll.cli.doctor import Findings, Placement, advise
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.launch.exit_hooks import INTERRUPTED
from mpicoll.primitives import PRIMITIVES

pytest_plugins = ["whole_jobs"]

# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["hello --bad", "doctor --js", "doctor more", "hullo"])
@job("$words", ranks=3)
def test_invalid_command_line_ends_all_ranks(words: str, ended: Ended) -> None:
    ended.refused()
    assert ended.err.count("usage: python -m mpicoll") == 1, ended


@pytest.mark.parametrize("words", ["--help", ""])
@job("$words", ranks=3)
def test_help_is_printed_once(words: str, ended: Ended) -> None:
    ended.succeeded()
    assert ended.out.count("usage: ") == 1
    for name, summary in cli.COMMANDS.items():
        assert name in ended.out and summary[:30] in ended.out


def commands(parser: argparse.ArgumentParser, words: str = "") -> Iterator[str]:
    """Yield the words that select each command and subcommand."""
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from commands(command, f"{words} {name}".strip())


@pytest.mark.any_mpi
@pytest.mark.parametrize("words", list(commands(cli._parser())))
def test_every_command_has_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli._parser().parse_args([*words.split(), "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m mpicoll {words}".strip())


@job("--version", ranks=3)
def test_version_is_printed_once(ended: Ended) -> None:
    assert (ended.code, ended.out) == (0, f"mpicoll {mpicoll.__version__}\n"), ended


#: Sends SIGINT to the ranks in $RANKS after the first collective call. Ranks after the bar wait in
#: an MPI_Barrier that no other rank calls.
INTERRUPT = """
import os, signal, sys, threading, time
rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOME")
            if name in os.environ)
interrupted, _, blocked = "$RANKS".partition("|")
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


def interrupt(ranks: str) -> str:
    return INTERRUPT.replace("$RANKS", ranks)


def check_interrupted(ended: Ended) -> None:
    assert ended.code == INTERRUPTED, ended
    assert ended.err.count("interrupted") == 1 and "Traceback" not in ended.err, ended
    assert ended.seconds < LIMIT_S / 3, ended


@job("bench all_reduce -e 1 -b 1 -n 100000000", site=interrupt("0"))
def test_ctrl_c_without_mpiexec(ended: Ended) -> None:
    check_interrupted(ended)
    assert ended.err == "interrupted\n"


@pytest.mark.parametrize("words", ["bench all_reduce -e 8 -n 100000000", "tune -o $FOLDER/x"])
@job("$words", every_mpi=True, ranks=3, site=interrupt("0 1 2"))
def test_ctrl_c_on_all_ranks(words: str, ended: Ended) -> None:
    check_interrupted(ended)


@job("bench all_reduce -e 8 -n 100000000", every_mpi=True, ranks=3, site=interrupt("1"))
def test_ctrl_c_on_one_rank_ends_all_ranks(ended: Ended) -> None:
    check_interrupted(ended)


@job("bench all_reduce -b 8 -e 8 -c", every_mpi=True, ranks=3, site=interrupt("0|0"))
def test_ctrl_c_inside_mpi(ended: Ended) -> None:
    check_interrupted(ended)


# --- hello --------------------------------------------------------------------------------------


#: Binds the process to the last of its processors.
BIND = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})"


@job("hello", site=BIND)
def test_hello_on_one_rank(ended: Ended) -> None:
    ended.succeeded()
    host = re.escape(socket.gethostname())
    last, count = max(os.sched_getaffinity(0)), os.cpu_count()
    line = rf"rank 0 of 1 on {host}, local rank 0 of 1, on processors {last} of {count}, "
    assert re.fullmatch(line + r"[\w ]+ [\d.]+, no GPU\n", ended.out), ended


@job("hello", environment=SRUN)
def test_hello_reports_ranks_that_mpi_does_not_have(ended: Ended) -> None:
    assert ended.code == 1 and ended.out == "" and "Traceback" not in ended.err, ended
    assert "mpicoll hello: " in ended.err and "srun announces 2 ranks" in ended.err, ended


# --- doctor -------------------------------------------------------------------------------------


@job("doctor")
def test_doctor_on_one_rank(ended: Ended) -> None:
    ended.succeeded()
    for words in "Python", "MPI_THREAD_", "1 on 1 node", "C library", "none: arrays on a GPU":
        assert words in ended.out, ended
    for words in "system  ", "processors  ", "may run on  ", "/dev/shm  ", "NumPy  ", "ml_dtypes  ":
        assert f"\n  {words}" in ended.out, ended
    assert "WRONG" not in ended.out and "this process is the only rank" in ended.out


@job("doctor --json", every_mpi=True, ranks=3)
def test_doctor_on_several_ranks(ended: Ended) -> None:
    ended.succeeded()
    found = json.loads(ended.out)
    assert found["ok"] and len(found["ranks"]) == 3
    assert {each["ranks"] for each in found["ranks"]} == {"3 on 1 node"}
    served = {name.partition(" ")[0] for name in found["routes"]["host"]}
    assert served == {row.name for row in PRIMITIVES}
    each = found["ranks"][0]
    assert each["host"] == socket.gethostname() and platform.release() in each["system"]
    allowed = len(os.sched_getaffinity(0))
    assert each["may run on"].startswith(f"{allowed} of them: 0") == (0 in os.sched_getaffinity(0))
    assert re.fullmatch(r"[\d.]+ (GiB|MiB)|none", each["/dev/shm"])
    assert each["NumPy"] == np.__version__ and each["ml_dtypes"] == ml_dtypes.__version__
    crowded = any("they share processors" in each["text"] for each in found["advice"])
    assert crowded == (allowed < 3)
    assert not any("the only rank" in each["text"] for each in found["advice"])
    assert found["routes"]["device"] == {}
    routes = found["routes"]["host"]
    copies = "(one copy by the kernel|shared memory|messages over MPI)"
    assert re.fullmatch(rf"{copies}(; from \d+ (B|KiB|MiB) on {copies})*", routes["all_to_all"])
    if "compiled" in found["ranks"][0]["C library"]:
        assert routes["all_reduce (bfloat16)"] == "shared memory"
        route = "(MPI|MPI in chunks|shared memory|one copy by the kernel)"
        for name in ("broadcast", "gather", "all_reduce (float32)"):
            steps = rf"{route}(; from \d+ (B|KiB|MiB) on {route})*"
            assert re.fullmatch(steps, routes[name]), routes
            assert "shared memory" in routes[name]


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


@job("doctor", environment={**SRUN, "SLURM_PROCID": "1"})
def test_doctor_prints_only_on_the_first_rank(ended: Ended) -> None:
    assert (ended.code, ended.out) == (1, ""), ended


@job("doctor", environment={"MPI4PY_MPIABI": "mpich", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
def test_doctor_reports_an_mpi_library_that_does_not_load(ended: Ended) -> None:
    assert ended.code == 1, ended
    assert "WRONG: init_process_group: mpi4py cannot load an MPI library" in ended.out, ended
    assert "Traceback" not in ended.err


def facts(**others: str) -> dict[str, str]:
    return {"MPI": "M 1 (/a)", "mpicoll": "1 (/b)", **others}


@pytest.mark.parametrize(
    ("seen", "wrong", "words"),
    [
        (Findings([facts(), facts()]), None, ""),
        (Findings([facts(), facts(MPI="M 2 (/a)")]), True, "MPI differs between ranks"),
        (Findings([facts(), facts(MPI="M 1 (/c)")]), None, ""),
        (Findings([facts(), facts(mpicoll="2 (/b)")]), True, "mpicoll differs between ranks"),
        (
            Findings([facts(), facts(**{"C library": "numpy (it does not load: x)"})]),
            True, "rank 1: the C library does not load",
        ),
        (
            Findings([facts(**{"C library": "numpy (the C library was not built)"})] * 2),
            False, "ranks 0-1: NumPy replaces",
        ),
        (Findings([facts(threads="MPI_THREAD_SERIALIZED")]), False, "rank 0: MPI allows one"),
        (Findings([facts(torch="3; the backend mpicoll is not registered")]), False, "torch"),
        (Findings([facts(torch="3, cannot be imported: x")]), True, "torch is installed"),
        (Findings([facts()], shared=False), False, "do not share memory"),
        (Findings([facts()] * 2, shared=True, no_single_copy=["", ""]), None, ""),
        (
            Findings(
                [facts()] * 2, shared=True,
                no_single_copy=["", "rank 0's memory cannot be read: no"],
            ),
            False, "(rank 1: rank 0's memory cannot be read: no): the node must allow",
        ),
        (
            Findings([facts()], shared=True, no_single_copy=["MPICOLL_SINGLE_COPY=0"]),
            False, "unset MPICOLL_SINGLE_COPY",
        ),
        (Findings([facts()], idle=["GPU 1 is idle"]), False, "GPU 1 is idle"),
    ],
)  # fmt: skip
def test_advice_on_facts(seen: Findings, wrong: bool | None, words: str) -> None:
    advice = advise(seen)
    assert [bad for bad, _ in advice] == ([] if wrong is None else [wrong]), advice
    assert all(words in text for _, text in advice), advice


def test_facts_that_differ_are_listed_by_rank() -> None:
    seen = Findings([facts(host=host, ranks="3") for host in ("a", "b; c", "a")])
    lines = doctor._to_text(seen, []).splitlines()
    assert lines[3:6] == [
        "  host          ranks 0,2: a", "  host          rank 1: b; c", "  ranks         3",
    ]  # fmt: skip


def place(
    *allowed: int, host: str = "a", free: int | None = 1 << 30, threads: str = "1"
) -> Placement:
    return Placement(host, 4, allowed, 1 << 30, free, threads)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([place(0, 1, 2, 3)] * 4, "ranks 0-3: not bound to processors, so they may move"),
        ([place(0, 1), place(2, 3)], ""),
        ([place(0, 1), place(1), place(2, 3)], "rank 0: not bound"),
        ([place(0, 1, 2, 3)], ""),
        ([place(0, 1, 2, 3, host=host) for host in "abb"], "ranks 1-2: not bound"),
        ([place(0, 1, threads=""), place(2, 3, threads="")], ""),
        ([place(0, 1, 2, 3, threads="")], ""),
        ([place(0, 1, 2, 3)] * 5, "5 ranks on a, which has 4 processors: they share processors"),
        ([place(0), place(1), place(2)], ""),
        ([place(0, 1)] * 2, "ranks 0-1: not bound"),
        ([place(0, 1)] * 3, "3 ranks on a may only run on 2 of its 4 processors (0-1): "),
        ([place(2), place(2), place(0)], "2 ranks on a may only run on 1 of its 4 processors (2)"),
        ([place(0, 1), place(1, 2), place(0, 2), place(2)], "4 ranks on a may only run on 3 of"),
        ([place(0), place(0, host="b")], ""),
        ([place(0, host=host) for host in "aabbcc"], "2 ranks on a (and 2 more) may only run"),
        ([place(0, free=64 << 20)], "/dev/shm on a has 64 MiB left"),
        ([place(0, free=65 << 20), place(1, free=None)], ""),
    ],
)  # fmt: skip
def test_advice_on_binding_and_shared_memory(places: list[Placement], words: str) -> None:
    seen = Findings([facts()] * len(places), placements=places)
    advice = advise(seen)
    assert [bad for bad, _ in advice] == ([False] if words else []), advice
    assert all(text.startswith(words) for _, text in advice), advice


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([place(0, threads=""), place(1, threads="")], ""),
        ([place(0, 1), place(0, 1)], ""),
        ([place(0, 1, threads="")] * 2, "each rank on a, NumPy and PyTorch may start a thread for "
         "every processor, 4 threads on 2 processors. Set it: export OMP_NUM_THREADS=1"),
        ([place(*range(4), threads="")] * 2, "8 threads on 4 processors. Set it: export "
         "OMP_NUM_THREADS=2"),
        ([place(0, 1, threads="", host=host) for host in "aabb"], "each rank on a (and 1 more)"),
    ],
)  # fmt: skip
def test_advice_on_threads(places: list[Placement], words: str) -> None:
    advice = [text for _, text in advise(Findings([facts()] * len(places), placements=places))]
    advice = [text for text in advice if "OMP_NUM_THREADS" in text]
    assert len(advice) == bool(words) and all(words in text for text in advice), advice


def test_doctor_finds_no_problems_only_without_advice() -> None:
    seen = Findings([facts()] * 2, placements=[place(0, 1)] * 2)
    assert "No problems found" not in doctor._to_text(seen, advise(seen))
    seen.placements = [place(0), place(1)]
    assert doctor._to_text(seen, advise(seen)).endswith("\nNo problems found")


@pytest.mark.parametrize(
    ("gpus", "tls", "words"),
    [
        (("a",), "rc,sm", "excludes cuda: add cuda_copy,cuda_ipc"), (("a",), "rc,cuda", ""),
        (("a",), "^tcp", ""), (("a",), "all", ""), (("a",), "", ""), ((), "rc", ""),
    ],
)  # fmt: skip
def test_advice_on_ucx(
    gpus: tuple[str, ...], tls: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Capabilities("M", "1", "", True, "", "a", gpus=gpus)
    monkeypatch.setenv("UCX_TLS", tls)
    advice = [text for _, text in advise(Findings([facts()], all_ranks=(own,)))]
    assert len(advice) == bool(words) and all(words in text for text in advice), advice


def test_advice_on_gpus_far_from_processors() -> None:
    advice = advise(Findings([facts()] * 3, far=[["GPU a is far"], [], ["GPU a is far", "x"]]))
    assert advice == [(False, "ranks 0,2: GPU a is far"), (False, "rank 2: x")]


def test_advice_to_start_more_than_one_rank() -> None:
    alone = facts(launcher="none")
    others = [Findings([facts(launcher="srun")]), Findings([alone] * 2)]
    others.append(Findings([alone], problem="x"))
    advice = ["the only rank" in str(advise(seen)) for seen in [Findings([alone]), *others]]
    assert advice == [True, False, False, False]


def test_settings_that_differ_are_listed_by_rank() -> None:
    seen = Findings([facts()] * 3, misspelled=[{"A": "A: x"}, {}, {"A": "A: x", "B": "B: y"}])
    advice = advise(seen)
    assert advice == [(True, "ranks 0,2: A: x"), (True, "rank 2: B: y")]
