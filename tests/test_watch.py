"""Reports about ranks that cannot report themselves: hangs, losses, ``mpicoll watch``."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_scripts import Ended, compiled, job, needs_mpiexec, run

from mpicoll.core.signature import encode_kind
from mpicoll.dtypes import DTYPES
from mpicoll.failures import monitor_client, node_monitor, report, watchdog
from mpicoll.failures.status_page import DONE, ENDING, LEFT, StatusPage
from mpicoll.launch import find_survival
from mpicoll.launch.launchers import is_launcher_variable
from mpicoll.line_protocol import JsonConnection, is_proof, mac
from mpicoll.primitives import PRIMITIVES

pytest_plugins = ["whole_jobs"]

__all__ = ["run"]  # for whole_jobs


# --- reports ------------------------------------------------------------------------------------

_KIND = encode_kind(PRIMITIVES[0], DTYPES[0], None, 0)


def _call(number: int, inside: bool, group: int = 5) -> dict[str, Any]:
    return {
        "group": group, "name": "0", "size": 10_000, "number": number, "kind": _KIND, "sizes": 4,
        "root": 0, "inside": int(inside), "since": 0.0, "messages": 0, "last_message": 0,
    }  # fmt: skip


def _snapshot(rank: int, number: int, inside: bool, **changed: Any) -> dict[str, Any]:
    return {
        "rank": rank, "host": "node", "pid": rank, "state": "running", "how": "", "main": 1,
        "stacks": {}, "calls": [_call(number, inside)], **changed,
    }  # fmt: skip


@pytest.mark.any_mpi
def test_a_report_on_10000_ranks_has_40_lines_and_names_the_rare_ones_first() -> None:
    ranks = [_snapshot(rank, 7, True) for rank in range(0, 10_000, 2)]
    ranks += [_snapshot(rank, 6, False) for rank in range(1, 9_900, 2)]
    for rank in range(9_901, 10_000, 2):  # a story each
        ranks.append(_snapshot(rank, 6, False, stacks={"1": [f"file.py:{rank} in f"] * 9}))
    ranks[-1] |= {"state": "gone", "how": "SIGKILL"}
    text = report.describe_hang(ranks, _call(7, True), 61.2, "the last line")
    lines = text.splitlines()
    assert len(lines) <= report.LINES and max(map(len, lines)) < 300
    assert lines[0].startswith("mpicoll: ranks 0, 2, 4, 6, 8, 10, 12, 14, and 4992 more of group 0")
    assert "wait for 61 s in call 7 of group 0" in lines[0]
    assert "rank 9901:" in lines[1] and "file.py:9901 in f" in lines[2]
    assert "other descriptions" in lines[-2] and lines[-1] == "the last line"


@pytest.mark.any_mpi
def test_ranks_with_the_same_story_share_a_line() -> None:
    ranks = [_snapshot(0, 7, True), *(_snapshot(rank, 6, False) for rank in range(1, 10_000))]
    ranks[3] |= {"state": "stopped"}
    ranks[4] |= {"state": "gone", "how": "SIGSEGV"}
    text = report.describe_hang(ranks, _call(7, True), 61.2)
    assert [line.split(",")[0] for line in text.splitlines()[1:]] == [
        "  rank 3: stopped", "  rank 4: gone: was killed by SIGSEGV", "  ranks 1-2",
    ]  # fmt: skip


@pytest.mark.any_mpi
def test_ranks_in_other_calls_are_told_from_those_in_this_one() -> None:
    ranks = [_snapshot(0, 7, True), _snapshot(1, 7, True), _snapshot(2, 9, True)]
    ranks[1]["calls"][0]["kind"] += 1 << 8
    text = report.describe_hang(ranks, _call(7, True), 3)
    assert text.splitlines()[0].startswith("mpicoll: rank 0 of group 0")
    assert "rank 1: in call 7" in text and "rank 2: in call 9" in text


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("how", "kind", "number", "words"),
    [
        ("code 142", 1 << 8, 7, "mpicoll: collective mismatch: the ranks made different calls"),
        ("code 142", 1 << 8, 9, "The last calls: rank 0: call 7 of group 0"),
        ("code 142", 0, 7, "The last calls: ranks 0-1: call 7 of group 0"),
        ("code 5", 1 << 8, 7, ""),
        ("SIGKILL", 1 << 8, 7, ""),
    ],
)
def test_a_rank_that_mpi_ended_is_compared_with_the_others(
    how: str, kind: int, number: int, words: str
) -> None:
    lost, other = _snapshot(0, 7, True, state="gone", how=how), _snapshot(1, number, True)
    other["calls"][0]["kind"] += kind
    assert report.is_ended_by_mpi(lost) == bool(words)
    if words:
        assert words in report.describe_mismatch(lost, [lost, other])


@pytest.mark.any_mpi
def test_a_loss_says_who_how_and_where() -> None:
    lost = _snapshot(3, 7, True, state="gone", how="SIGKILL", pid=77)
    text = report.describe_loss([lost], 8)
    who = "mpicoll: lost: rank 3 of 8 (pid 77 on node)"
    assert text.startswith(f"{who} was killed by SIGKILL (kill -9 or out of memory), in call 7 of")
    assert "in call 7 of group 0: " in text
    text = report.describe_loss([lost | {"how": "code 3", "calls": []}], 8)
    assert text.endswith("exited with code 3 and no message, before its first call")
    messages = {"messages": 12, "last_message": 2 * 3 + 1}
    only = lost | {"calls": [_call(0, False) | messages]}
    text = report.describe_loss([only], 8)
    assert text.endswith(", after 12 messages of group 0, the last one from rank 2")
    text = report.describe_loss([lost | {"calls": [_call(7, False) | messages]}], 8)
    assert ", after call 7 of group 0: " in text
    assert text.endswith(" and 12 messages, the last one from rank 2")
    hint = report.describe_survival([lost], "a setting")
    assert hint.startswith("mpicoll: to survive a lost rank: a setting")
    assert report.describe_survival([lost], "") == ""
    assert report.describe_survival([lost | {"how": "SIGTERM"}], "a setting") == ""


@pytest.mark.any_mpi
def test_what_would_have_saved_a_job_is_known_of_each_launcher() -> None:
    mpiexec = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "0"}
    for environment, words in (
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "--with-ft ulfm"),
        (mpiexec | {"HYDI_CONTROL_FD": "7"} | srun, "MPICOLL_SURVIVE=1"),
        (mpiexec | srun, "srun does not restart ranks"),
        (torchrun | mpiexec, "--max-restarts"),
        ({}, ""),
        (torchrun | {"TORCHELASTIC_MAX_RESTARTS": "3"}, ""),
    ):
        found = find_survival(environment)
        assert words in found and bool(words) == bool(found), environment


@pytest.mark.any_mpi
def test_stacks_are_read_as_python_prints_them(tmp_path: Path) -> None:
    script = "import faulthandler, threading\ndef f():\n    faulthandler.dump_traceback()\n"
    script += "threading.Thread(target=f).start()\n"
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True
    )
    stacks = report.parse_stacks(done.stderr)
    assert any(f"{tmp_path}/script.py:3 in f" == frames[0] for frames in stacks.values())


# --- the page ----------------------------------------------------------------------------------


@pytest.mark.any_mpi
def test_what_a_rank_writes_is_read_by_another() -> None:
    from mpicoll.kernels.calls import Calls, PythonCalls

    page = StatusPage()
    page.begin(7, 8)
    for kind in (Calls, PythonCalls):
        calls = kind(threading.Lock())
        calls.lock.acquire()
        calls.begin(1, 2, 3)
        address = page.take_cell(11, 5000, 4, 2, "née")
        calls.publish(address)
        page.record_message(address, 2, False)
        page.record_message(address, -1, True)
        (cell,) = StatusPage(page.descriptor).cells()
        assert cell[:8] == (11, 5000, 1, 1, 2, 3, 1, threading.get_ident())
        assert cell[8:] == (4, 2, "née", 2, 1)
        calls.end()
        assert not calls.lock.locked()
        calls.begin(4, 5, -1)
        (cell,) = page.cells()
        assert (cell.number, cell.kind, cell.sizes, cell.root) == (2, 4, 5, 0xFFFFFFFF)
        assert calls.thread == threading.get_ident()
        calls.publish(0)
        page.free_cell(address)
        assert page.cells() == [] and calls.thread == threading.get_ident()
    page.set_signal(15)
    page.set_ending(3, explained=False)
    page.set_ending(1, explained=True)  # the first reason counts
    page.set_monitor_pid(9)
    when = page.header().ending_ns
    assert page.header() == (ENDING, 3, 1, 7, 8, 15, when, 1, 9) and when <= time.monotonic_ns()
    page.set_explained()
    assert page.header().unexplained == 0
    page.set_state(DONE)  # as while MPI aborts
    assert page.header().state == ENDING
    page.begin(7, 8)
    page.set_state(DONE)
    assert page.header().state == DONE
    StatusPage(page.descriptor).order_end("ä" * 1000)
    assert page.end_order().startswith("ää")


@pytest.mark.any_mpi
def test_a_board_has_room_for_many_groups() -> None:
    page = StatusPage()
    addresses = [page.take_cell(k + 1, 0, 1, 0, "g" * 100) for k in range(50)]
    assert len(set(addresses)) == 50 and 0 not in addresses
    page.free_cell(addresses[20])
    assert page.take_cell(99, 0, 1, 0, "g") == addresses[20]


@pytest.mark.any_mpi
def test_how_a_process_has_ended() -> None:
    for script, how in (
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import sys; sys.exit(3)", "code 3"),
    ):
        process = subprocess.Popen([sys.executable, "-S", "-c", f"input(); {script}"],
                                   stdin=subprocess.PIPE)  # fmt: skip
        descriptor = os.pidfd_open(process.pid)
        process.communicate(b"\n")
        found = node_monitor._read_end(descriptor, process.pid, 0.0)
        assert found in (how, "")  # "": an older kernel
        os.close(descriptor)


# --- the monitor ----------------------------------------------------------------------------------

_SECRET = "s"
#: Closes its bell when it is told to, as the system does first when a process ends.
_WAITS = """
import os, sys, time
if sys.stdin.readline():
    os.close(int(sys.argv[1]))
    print(flush=True)
time.sleep(100)
"""


class Node:
    """Processes in place of the ranks of a node, and their monitor: a thread, once it is started.

    first: the first rank. size: of the job.
    """

    def __init__(self, first: int = 0, ranks: int = 3, size: int = 3, **given: Any) -> None:
        self.pages = [StatusPage() for _ in range(ranks)]
        self.processes = []
        known = []
        for k, page in enumerate(self.pages):
            bell, rings = os.pipe()
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-S", "-c", _WAITS, str(rings)],
                    pass_fds=(page.descriptor, bell, rings),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            pid = self.processes[-1].pid
            known.append({"rank": first + k, "pid": pid, "start": node_monitor.read_start(pid),
                          "signal": 60, "page": page.descriptor, "stacks": -1,
                          "bell": bell})  # fmt: skip
            os.close(rings)
        opened = monitor_client._Opened(known, 0, 0)
        for each in known:
            os.close(each["bell"])
        self.said, stderr = os.pipe()
        os.set_blocking(self.said, False)
        self.monitor = node_monitor.NodeMonitor({
            "job": "1", "size": size, "host": "here", "secret": _SECRET, "survives_losses": False,
            "node": f"node{first}", "addresses": [], "listeners": [], "names": [], "command": "",
            "survival": "", "reports": "", "launcher": 0, "launcher_pidfd": -1,
            "ranks": opened.ranks, "epoll": opened.epoll, "stderr": stderr, **given,
        })  # fmt: skip
        self._opened = opened  # which owns the descriptors that are open here
        self.thread = threading.Thread(target=self.monitor.serve)
        self.text = ""

    def start(self) -> None:
        self.thread.start()

    def kill(self, *signals: int) -> None:
        """Send each rank its signal, the last rank first, and wait until it has ended."""
        for process, number in [*zip(self.processes, signals, strict=True)][::-1]:
            if number:
                process.send_signal(number)
                process.wait()

    def wait_for(self, words: str) -> str:
        """Wait until the monitor has printed these words; return its output."""
        end = time.monotonic() + 30
        while words not in self.text and time.monotonic() < end:
            self.read()
            time.sleep(0.01)
        assert words in self.text, self.text
        return self.text

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.text += os.read(self.said, 1 << 16).decode()

    def end(self) -> str:
        """End the ranks, and so the monitor; return all that it has printed."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.thread.join(30)
        assert not self.thread.is_alive(), "the monitor does not end"
        self.read()
        return self.text


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """A function that makes a Node, which ends with the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made: list[Node] = []

    def make(**given: Any) -> Node:
        made.append(Node(**given))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes:
            process.kill()
            process.communicate()
        if one.thread.ident is not None:
            one.thread.join(30)


@pytest.mark.any_mpi
def test_ranks_that_are_stopped_do_not_outlive_one_that_ends_the_job(
    nodes: Callable[..., Node],
) -> None:
    node = nodes()
    zero, one, two = node.processes
    one.send_signal(signal.SIGSTOP)
    while node_monitor._state_of(one.pid) != "stopped":
        time.sleep(0.01)
    node.start()
    node.pages[0].set_ending(1, explained=True)
    zero.kill()
    assert one.wait(30) == -signal.SIGKILL
    assert two.poll() is None and node.end() == ""


KILL, TERM, SEGV = signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ((KILL, KILL, TERM), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGTERM"),
        ((KILL, KILL, SEGV), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGSEGV"),
        ((KILL, KILL, KILL), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGKILL"),
        ((TERM, TERM, SEGV), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGSEGV"),
        ((TERM, TERM, TERM), "lost together: ranks 0-2 of 3 (on here) were killed by SIGTERM"),
    ],
    ids=["SIGTERM", "SIGSEGV", "SIGKILL", "SIGSEGV, launcher by SIGTERM", "SIGTERM to all"],
)
def test_the_first_rank_that_ends_is_named_by_a_guard_that_starts_later(
    nodes: Callable[..., Node], signals: tuple[int, ...], said: str
) -> None:
    node = nodes()
    node.kill(*signals)
    node.start()
    text = node.end()
    assert said.format(*(one.pid for one in node.processes)) in text, text
    assert text.count("lost") == 1


@pytest.mark.any_mpi
def test_a_rank_is_named_whose_end_the_system_reports_after_that_of_its_victims(
    nodes: Callable[..., Node],
) -> None:
    node = nodes()
    stdin, stdout = node.processes[1].stdin, node.processes[1].stdout
    assert stdin is not None and stdout is not None
    stdin.write(b"\n")
    stdin.flush()
    stdout.readline()
    node.kill(KILL, 0, KILL)
    node.kill(0, KILL, 0)
    node.start()
    assert node.end().startswith("mpicoll: lost: rank 1 of 3 ")


@pytest.mark.any_mpi
def test_a_signal_to_one_rank_names_it_though_the_launcher_sends_the_others_the_same(
    nodes: Callable[..., Node],
) -> None:
    node = nodes()
    node.start()
    node.kill(0, TERM, 0)
    node.wait_for("lost: rank 1 of 3")
    node.kill(TERM, 0, TERM)
    assert node.end().count("lost: ") == 1


@pytest.mark.any_mpi
@pytest.mark.parametrize("explained", [True, False])
def test_ranks_that_end_after_one_has_ended_the_job_are_not_reported(
    nodes: Callable[..., Node], explained: bool
) -> None:
    node = nodes()
    node.pages[1].set_ending(3, explained)
    node.pages[1].set_state(DONE)  # MPI_Abort may finalize MPI
    node.kill(KILL, KILL, KILL)  # rank 1 is not the first of them
    node.start()
    pid = node.processes[1].pid
    exited = f"mpicoll: rank 1 of 3 (pid {pid} on here) exited with code 3 (sys.exit)"
    assert node.end().partition(";")[0] == ("" if explained else exited)


@pytest.mark.any_mpi
def test_a_rank_that_was_lost_before_another_ends_the_job_is_named(
    nodes: Callable[..., Node],
) -> None:
    node = nodes()
    node.start()
    node.kill(0, 0, KILL)
    node.wait_for("lost: rank 2 of 3")
    node.pages[0].set_ending(1, explained=False)
    node.kill(KILL, KILL, 0)
    assert node.end().count("mpicoll: ") == 1


@pytest.mark.any_mpi
def test_each_loss_that_is_survived_has_a_line(nodes: Callable[..., Node]) -> None:
    node = nodes(survives_losses=True)
    node.kill(0, KILL, KILL)
    node.start()
    node.wait_for("lost: rank 1 of 3")
    node.wait_for("lost: rank 2 of 3")
    node.kill(KILL, 0, 0)
    assert node.end().count("lost: ") == 3


def _listen() -> dict[str, Any]:
    """Return the configuration with which a head listens at the loopback address."""
    sock = socket.create_server(("127.0.0.1", 0))
    return {"listeners": [sock.detach()]}


def _address(node: Node) -> list[Any]:
    (descriptor,) = node.monitor._given["listeners"]
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        return list(sock.getsockname())


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("lost", "lost: rank 3 of 4 (pid {} on here) was killed by SIGKILL"),
        ("ending", "rank 3 of 4 (pid {} on here) exited with code 3"),
        ("none", "lost together: ranks 0-1 of 4 (on here) were killed by SIGKILL"),
    ],
)
def test_ranks_of_other_nodes_are_victims_of_the_first(
    nodes: Callable[..., Node], first: str, said: str
) -> None:
    head = nodes(ranks=2, size=4, **_listen())
    address = _address(head)
    # It is reached at several addresses, of which one counts.
    other = nodes(first=2, ranks=2, size=4, addresses=[["127.0.0.1", 1], address, address])
    for node in (head, other):
        node.start()
    while not head.monitor._nodes:
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):  # all nodes have connected
        socket.create_connection(address[:2])
    pid = other.processes[1].pid
    if first == "lost":
        other.kill(0, KILL)
    elif first == "ending":
        other.pages[1].set_ending(3, explained=False)
        other.kill(0, KILL)
    for process in head.processes:  # as a launcher does it: all of them at once
        os.kill(process.pid, KILL)
    text = head.end()
    assert said.format(pid) in text and text.count("mpicoll: ") == 1, text
    for line in head.monitor._lines.values():  # as the end of its process does
        line.sock.close()
    assert other.end() == ""


ATTACKS = {
    "not ASCII": '{"proof": "é"}\n'.encode(),
    "a surrogate": b'{"proof": "\\ud800"}\n',
    "deep": b"[" * 4000 + b"\n",
    "very deep": b"[" * 200_000 + b"\n",
    "no object": b"[1]\n1\nnull\n",
    "empty": b"\n\n{}\n",
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no UTF-8": b"\xff\xfe\n",
    "a number with many digits": b'{"proof": ' + b"9" * 4000 + b"}\n",
    "unusual types": b'{"proof": {"a": []}, "node": 1, "nonce": null, "ranks": "x"}\n',
    "news": b'{"lost": [], "alone": true}\n{"ask": "snapshots"}\n{"end": "now"}\n',
    "half a line": b'{"pro',
    "nothing": b"",
    "a long line": b" " * 10_000_000,
}


@pytest.mark.any_mpi
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_a_stranger_neither_ends_nor_blocks_the_guard(
    nodes: Callable[..., Node], attack: bytes
) -> None:
    head = nodes(ranks=1, size=2, **_listen())
    address = _address(head)
    head.start()
    with contextlib.ExitStack() as stack:
        for _ in range(100):  # they stay, and never read
            sock = stack.enter_context(socket.create_connection(address[:2]))
            sock.settimeout(10)
            with contextlib.suppress(ConnectionError):
                sock.sendall(attack)
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        while len(head.monitor._listeners) < 2:
            time.sleep(0.01)
        local.connect(str(node_monitor.find_folder() / f"{os.getpid()}{node_monitor.SOCKETS}"))
        with contextlib.suppress(ConnectionError):
            local.sendall(attack)
        other = nodes(first=1, ranks=1, size=2, addresses=[address])
        other.start()
        other.kill(SEGV)
        head.wait_for(f"lost: rank 1 of 2 (pid {other.processes[0].pid} on here) was killed by")
        assert len(head.monitor._lines) <= 2 * node_monitor._MAX_STRANGER_COUNT


@pytest.mark.any_mpi
def test_a_line_of_a_stranger_is_limited_and_a_proof_may_be_any_text() -> None:
    """Each by itself, without the monitor, which drops a connection at any error."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = JsonConnection(ours)
        for proof in ("é", "", None, 5, [], mac("x", "y")):
            assert not is_proof(proof, "secret", "head", line.nonce)
        assert is_proof(mac("secret", "head", line.nonce), "secret", "head", line.nonce)
        theirs.sendall(b'{"a": 1}\n' + b" " * (line.max_line_bytes + 1))
        line.fill()
        assert line.take() == {"a": 1}
        with pytest.raises(ConnectionResetError, match="invalid message: over 4096 bytes"):
            line.take()


@pytest.mark.any_mpi
def test_a_silent_connection_is_dropped_after_a_while(nodes: Callable[..., Node]) -> None:
    head = nodes(ranks=1, size=2, **_listen())
    address = _address(head)
    head.start()
    with socket.create_connection(address[:2]) as silent:
        silent.settimeout(30)
        while silent.recv(100):
            pass  # the monitor's nonce; then it closes the connection


@pytest.mark.any_mpi
def test_an_impostor_of_the_head_is_refused(nodes: Callable[..., Node]) -> None:
    """The monitor that finds no other head reports itself."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        node = nodes(first=1, ranks=1, size=2, addresses=[list(impostor.getsockname())])
        node.start()
        sock, _ = impostor.accept()
        with sock:
            sock.sendall('{"nonce": "é"}\n{"proof": "é"}\n{"end": "now"}\n'.encode())
            node.kill(SEGV)
            assert node.end().startswith("mpicoll: lost: rank 1 of 2")


@pytest.mark.any_mpi
def test_ranks_end_with_what_has_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if is_launcher_variable(name)]:
        monkeypatch.delenv(name)
    assert monitor_client._find_starter([7, 8]) == 0
    monkeypatch.setenv("SLURM_PROCID", "0")  # plain srun: ranks that meet by env://
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert monitor_client._find_starter([7, 8]) == 0
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert monitor_client._find_starter([7, 8]) == 7 and monitor_client._find_starter([]) == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert monitor_client._find_starter([7, 8]) == os.getppid()


@pytest.mark.any_mpi
def test_what_a_rank_starts_does_not_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the rank's variables, but its parent is not torchrun."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert other.stdout is not None and other.stdout.readline()  # it has started
    monkeypatch.setattr(os, "getppid", lambda: other.pid)
    try:
        assert monitor_client._find_starter([]) == 0
    finally:
        other.communicate(b"\n")


@pytest.mark.any_mpi
def test_a_rank_with_another_guard_is_asked_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = monitor_client._own
    monkeypatch.setattr(monitor_client, "_own", old := monitor_client._Own())
    monitor_client.renew()
    own = monitor_client._own
    assert own is not None and own is not old and old.page.header().state == LEFT
    assert faulthandler.unregister(own.signal)
    monkeypatch.setattr(monitor_client, "_find_signal", lambda: 0)  # fails
    monitor_client.renew()
    assert monitor_client._own is None
    monkeypatch.setattr(monitor_client, "_own", kept)


@pytest.mark.any_mpi
def test_the_watchdog_goes_on_while_a_group_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = [], threading.Event()

    def expire(group: Any, number: int) -> None:
        begun.append((group, number))
        goes_on.wait(30)

    monkeypatch.setattr(watchdog.timeouts, "fail_late_call", expire)
    dog: Any = object.__new__(watchdog.Watchdog)
    dog._failing = []
    wait, group = watchdog._Wait(1, 0.0), SimpleNamespace(error=None)
    for _ in range(2):
        dog._check_time(group, wait, 0.5)
    assert wait.failing is not None and wait.failing.is_alive()
    goes_on.set()
    wait.failing.join()
    assert begun == [(group, 1)]


@pytest.mark.any_mpi
def test_a_call_has_its_grace_from_the_closing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(watchdog, "grace", lambda: 2 * watchdog._CHECK_INTERVAL_S)
    monkeypatch.setattr(watchdog, "end_stuck_job", lambda *_: ended.append(_))
    dog: Any = object.__new__(watchdog.Watchdog)
    group = SimpleNamespace(error=Exception(), busy=lambda: False, thread=0)
    wait, first = watchdog._Wait(1, 0.0), 5 * watchdog._CHECK_INTERVAL_S  # closing took its time
    for over in (first, first + 1.9 * watchdog._CHECK_INTERVAL_S):
        dog._check_time(group, wait, over)
    assert not ended
    monkeypatch.setattr(watchdog, "grace", lambda: 0.0)
    dog._check_time(group, watchdog._Wait(1, 0.0), first)
    assert not ended, "the call had no time to leave"
    dog._check_time(group, wait, first + 2.1 * watchdog._CHECK_INTERVAL_S)
    assert ended


@pytest.mark.any_mpi
def test_a_call_that_has_ended_closes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it where the next one begins meanwhile."""
    closed = []
    monkeypatch.setattr(watchdog.timeouts.rank_status, "receive", lambda group: None)
    monkeypatch.setattr(watchdog.timeouts, "_time_out", lambda *given: closed.append(given))
    group: Any = SimpleNamespace(begun=2, timeout=1.0, group_name="0", lock=threading.Lock())
    watchdog.timeouts.fail_late_call(group, 2)
    with group.lock:
        watchdog.timeouts.fail_late_call(group, 1)
        assert not closed
        watchdog.timeouts.fail_late_call(group, 2)
    assert len(closed) == 1


# --- jobs ---------------------------------------------------------------------------------------

#: What rank 0 prints of the report in full.
READS = """
    def read_report():
        import glob, json
        while not (found := glob.glob(sys.argv[1] + "/hang-*.json")):
            time.sleep(0.1)
        time.sleep(0.2)
        report = json.load(open(found[0]))
        assert os.stat(found[0]).st_mode & 0o777 == 0o600
        one = report["ranks"][1]
        say(len(report["ranks"]), report["call"]["number"], one["rank"], one["state"],
            any("script.py" in frame for frames in one["stacks"].values() for frame in frames))
"""


@needs_mpiexec
@pytest.mark.waits
@pytest.mark.parametrize(
    ("calls", "does", "state", "said"),
    [
        (3, "load()", "running True", ("rank 1: in Python, after call", "in load")),
        (99, "ctypes.PyDLL(None).sleep(1000)", "running True", ("rank 1: in Python, after call",)),
        (99, "os.kill(os.getpid(), signal.SIGSTOP)", "stopped False", ("rank 1: stopped",)),
        (99, "dist.recv(x, 0)", "running True", ("rank 1: in Python, after call", "in recv")),
    ],
    ids=["asleep", "holding Python's lock", "stopped", "in a receive"],
)
@job(READS + """
    import ctypes
    def load():
        time.sleep(1000)
    os.environ |= {"MPICOLL_REPORT_AFTER": "1.5", "MPICOLL_REPORTS": sys.argv[1]}
    dist.init_process_group(timeout=5)
    x = np.ones(4)
    for _ in range($calls):
        dist.all_reduce(x)
    if dist.get_rank() == 1:
        $does
    if dist.get_rank() == 0:
        threading.Thread(target=read_report).start()
    dist.all_reduce(x)
""", ranks=3)  # fmt: skip
def test_a_hang_is_reported_once_before_it_ends(
    calls: int, does: str, state: str, said: tuple[str, ...], ended: Ended
) -> None:
    head = "mpicoll: ranks 0, 2 of group 0 (3 ranks) wait for 2 s in call"
    ended.badly(f"{head} {calls + 1} of group 0: all_reduce of 4 elements of float64, SUM", *said)
    assert ended.err.count(head) == 1
    assert ended.err.count(said[0]) > 1, "the timeout has the same information"
    assert ended.lines == [f"3 {calls + 1} 1 {state}"]


@needs_mpiexec
@job("""
    import glob
    os.environ |= {"MPICOLL_REPORT_AFTER": "0.2", "MPICOLL_REPORTS": sys.argv[1]}
    for turn in range(2):
        dist.init_process_group(timeout=20)
        while dist.get_rank() == 1 and len(glob.glob(sys.argv[1] + "/hang-*")) <= turn:
            time.sleep(0.02)
        dist.barrier()
        dist.destroy_process_group()
""")
def test_a_hang_after_another_beginning_is_reported_too(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.err.count("mpicoll: rank 0 of group 0 (2 ranks) waits for") == 2


@needs_mpiexec
@pytest.mark.waits
@job("""
    os.environ |= {"MPICOLL_REPORT_AFTER": "1.5", "MPICOLL_REPORTS": sys.argv[1]}
    dist.init_process_group(timeout=6)
    other = dist.new_group([0, 1])
    x = np.ones(4)
    if dist.get_rank() == 1:
        dist.all_reduce(x, group=other)
    dist.broadcast(x, 0)
""", ranks=3)  # fmt: skip
def test_a_rank_in_another_group_is_named(ended: Ended) -> None:
    ended.badly("rank 1: in call 1 of group ", "all_reduce of 4 elements of float64, SUM")


@needs_mpiexec
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "was killed by SIGABRT"),
        ("os._exit(3)", "exited with code 3 and no message"),
    ],
)
@job("""
    dist.init_process_group()
    x = np.ones(4)
    for _ in range(70):
        dist.all_reduce(x)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        $end
    dist.broadcast(x, 0)
""", ranks=3)  # fmt: skip
def test_a_lost_rank_is_named_once(end: str, how: str, ended: Ended) -> None:
    ended.badly("mpicoll: lost: ", "after call 70 of group 0: all_reduce of 4 elements of float64")
    assert ended.err.count("mpicoll: lost: ") == 1
    (line,) = [line for line in ended.err.splitlines() if "mpicoll: lost: " in line]
    assert ended.err.count("mpicoll: to survive a lost rank: ") == 1
    known = how in line or "the system does not say how" in line  # before Linux 6.15
    assert known and "rank 1 of 3 (pid " in line and ended.seconds < 20


@needs_mpiexec
@job("""
    dist.init_process_group()
    if dist.get_rank() == 0:
        dist.recv(np.ones(4), 1)
    elif dist.get_rank() == 1:
        dist.send(np.ones(4), 0)
        time.sleep(0.5)
        os._exit(5)
    dist.recv(np.ones(4), 1)
""", ranks=3)  # fmt: skip
def test_a_lost_rank_that_has_only_sent_messages_is_named_with_them(ended: Ended) -> None:
    ended.badly("exited with code 5", "after 1 message of group 0 to rank 0")


@needs_mpiexec
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(3)", ["rank 1 of 3 (pid {} on ", " exited with code 3 (sys.exit)"]),
        ("raise ValueError", ["ValueError"]),
        ("os._exit(5)", ["lost: rank 1 of 3 (pid {} on ", " exited with code 5"]),
        ("os.kill(os.getpid(), signal.SIGTERM)", ["lost: rank 1 of 3 (pid {}", "by SIGTERM"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["lost: rank 1 of 3 (pid {}", "by SIGKILL"]),
    ],
)
@job("""
    dist.init_process_group()
    if dist.get_rank() == 1:
        say(os.getpid())
        $end
        time.sleep(20)
    dist.barrier()
""", ranks=3)  # fmt: skip
def test_a_rank_that_ends_right_after_init_is_the_only_one_named(
    end: str, said: list[str], ended: Ended
) -> None:
    ended.badly(*(words.format(ended.out.split()[0]) for words in said))
    lines = [line for line in ended.err.splitlines() if line.startswith("mpicoll: ")]
    named = {rank for line in lines for rank in re.findall(r"ranks? [\d, -]+of 3", line)}
    assert named == (set() if "raise" in end else {"rank 1 of 3"})


@needs_mpiexec
@compiled
@pytest.mark.parametrize(
    ("handles", "printed"),
    [
        ("sys.exit(9)", ["finally"]),
        ("raise ZeroDivisionError", ["caught", "finally", "it cannot be used any more"]),
        ("None", ["finally", "went on", "went on too"]),
    ],
)
@job("""
    dist.init_process_group(timeout=20)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    def handle(number, frame):
        handled.append(1)
        $handles
    handled = []
    signal.signal(signal.SIGTERM, handle)
    x = np.ones(4)
    for _ in range(70):
        dist.all_reduce(x)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.7)
        os.kill(pids[0], signal.SIGTERM)
        time.sleep(0.7)
        dist.all_reduce(x)
        say("went on too")
        sys.exit(0)
    try:
        dist.all_reduce(x)
        assert handled == [1]
        say("went on")
    except ZeroDivisionError:
        say("caught")
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as error:
            say("it cannot be used any more") if "raised ZeroDivisionError" in str(error) else 0
        sys.exit(4)
    finally:
        say("finally")
""")
def test_handlers_run_in_the_middle_of_a_call(
    handles: str, printed: list[str], ended: Ended
) -> None:
    assert ended.lines == printed, ended
    assert len(re.findall(r"mpicoll: rank 0 of 2 \(on .*\) received SIGTERM", ended.err)) == 1


@needs_mpiexec
@compiled
@job("""
    dist.init_process_group(timeout=20)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    x, y, refused, other = np.ones(4), np.ones(1), [], dist.new_group()
    def handle(number, frame):
        for call in (dist.barrier, lambda: dist.all_reduce(x, async_op=True),
                     lambda: dist.all_gather_object([None, None], 1),
                     lambda: dist.monitored_barrier(timeout=3), dist.destroy_process_group):
            try:
                call()
            except ValueError as error:
                refused.append("inside call 72 of group 0" in str(error))
        dist.all_reduce(y, group=other)
    signal.signal(signal.SIGUSR2, handle)
    for _ in range(70):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGUSR2)
        dist.all_reduce(y, group=other)
    dist.all_reduce(x)
    say(x[0], y[0], *refused)
    dist.destroy_process_group()
""")
def test_a_handler_is_refused_what_waits_for_the_call_that_it_is_in(ended: Ended) -> None:
    ended.in_good_order()
    assert sorted(ended.lines) == ["2.0 2.0", "2.0 2.0" + 5 * " True"]


@needs_mpiexec
@job("""
    dist.init_process_group()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        import subprocess
        command = [sys.executable, "-m", "mpicoll", "watch", str(os.getppid()), "--stacks"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "MPI"))}
        done = subprocess.run(command, capture_output=True, text=True, env=clean)
        say(done.stdout, done.stderr, done.returncode)
    dist.barrier()
    dist.destroy_process_group()
""")
def test_a_job_is_watched_from_outside(ended: Ended) -> None:
    ended.in_good_order()
    assert "2 ranks: " in ended.out and "rank 0: in call 1 of group 0: barrier" in ended.out
    assert "rank 1: in Python, before its first call" in ended.out
    assert "in run" in ended.out and "script.py:" in ended.out


@pytest.mark.any_mpi
def test_there_is_no_such_job() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpicoll", "watch", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "no job 1 of this user" in done.stderr


@pytest.mark.any_mpi
def test_only_the_user_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = node_monitor.find_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="others may write to it"):
        node_monitor.find_folder()
