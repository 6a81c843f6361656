"""Hang reports, the status page and node monitors. test_timeouts.py has whole jobs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mpicoll import processes
from mpicoll.core.signature import encode_kind
from mpicoll.dtypes import DTYPES
from mpicoll.failures import monitor_client, node_monitor, report
from mpicoll.failures.status_page import DONE, ENDING, RUNNING, map_page
from mpicoll.line_protocol import JsonConnection, is_proof, mac
from mpicoll.primitives import PRIMITIVES

pytestmark = pytest.mark.any_mpi


# --- reports ------------------------------------------------------------------------------------

_KIND = encode_kind(PRIMITIVES[0], DTYPES[0], None)


def _call(number, inside, **changed):
    return {
        "group": 5, "name": "0", "size": 10_000, "number": number, "kind": _KIND, "sizes": 4,
        "root": 0, "inside": int(inside), "late_ms": 61_200, **changed,
    }  # fmt: skip


def _snapshot(rank, number, inside, **changed):
    return {
        "rank": rank, "host": "node", "pid": rank, "state": "running", "how": "", "main": 1,
        "stacks": {}, "calls": [_call(number, inside)], **changed,
    }  # fmt: skip


def test_hang_report_of_10000_ranks_is_short_and_lists_small_sets_of_ranks_first():
    ranks = [_snapshot(rank, 7, True) for rank in range(0, 10_000, 2)]
    ranks += [_snapshot(rank, 6, False) for rank in range(1, 9_900, 2)]
    for rank in range(9_901, 10_000, 2):  # each with its own stack
        ranks.append(_snapshot(rank, 6, False, stacks={"1": [f"file.py:{rank} in f"] * 9}))
    ranks[-1] |= {"state": "gone", "how": "SIGKILL"}
    lines = report.describe_hang(ranks, _call(7, True)).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) < 300
    assert lines[0].startswith("mpicoll: ranks 0, 2, 4, 6, 8, 10, 12, 14, and 4992 more of group 0")
    assert "wait for 61 s in call 7 of group 0" in lines[0]
    assert "rank 9901:" in lines[1] and "file.py:9901 in f" in lines[2]
    assert lines[-1].endswith(": 46 other descriptions")


def test_hang_report_merges_ranks_with_the_same_description():
    ranks = [_snapshot(0, 7, True), *(_snapshot(rank, 6, False) for rank in range(1, 10_000))]
    ranks[3] |= {"state": "stopped"}
    ranks[4] |= {"state": "gone", "how": "SIGSEGV"}
    ranks[5] = _snapshot(5, 7, True)
    ranks[5]["calls"][0]["kind"] += 1 << 8
    ranks[6] = _snapshot(6, 9, True)
    lines = report.describe_hang(ranks, _call(7, True)).splitlines()
    assert lines[0].startswith("mpicoll: rank 0 of group 0")
    assert [re.split(",| of group", line)[0] for line in lines[1:]] == [
        "  rank 3: stopped", "  rank 4: gone: was killed by SIGSEGV",
        "  rank 5: in call 7", "  rank 6: in call 9", "  ranks 1-2",
    ]  # fmt: skip


@pytest.mark.parametrize(("how", "ended"), [("code 142", True), ("SIGKILL", False)])
def test_exit_code_of_a_rank_that_mpi_aborted_is_recognized(how, ended):
    assert report.is_ended_by_mpi(_snapshot(0, 7, True, state="gone", how=how)) == ended
    assert not report.is_ended_by_mpi(_snapshot(0, 7, False, state="gone", how=how))


# --- the status page ----------------------------------------------------------------------------


def test_status_page_shows_the_state_of_a_rank():
    from mpicoll.kernels.calls import Calls, PythonCalls

    descriptor = os.memfd_create("page")
    page, seen = map_page(descriptor), map_page(descriptor)
    for kind in (Calls, PythonCalls):
        calls = kind(threading.Lock())
        calls.lock.acquire()
        calls.begin(1, 2, 3)
        cell = page.take_cell(11, 4, "née")
        calls.publish(ctypes.addressof(cell))
        (copied,) = seen.read_cells()
        assert copied.as_dict() == {
            "group": 11, "late": 0, "number": 1, "kind": 1, "sizes": 2, "root": 3, "inside": 1,
            "thread": threading.get_ident(), "late_ms": 0, "size": 4, "name": "née",
        }  # fmt: skip
        calls.end()
        assert not calls.lock.locked()
        calls.begin(4, 5, -1)
        assert (cell.number, cell.kind, cell.sizes, cell.root) == (2, 4, 5, 0xFFFFFFFF)
        assert calls.thread == threading.get_ident()
        calls.publish(0)
        cell.group = 0
        assert not seen.read_cells() and calls.thread == threading.get_ident()
    page.set_ending()
    page.set_done()  # MPI_Abort may do this
    assert seen.state == ENDING and 0 < seen.ending_ns <= time.monotonic_ns()
    page.state = RUNNING
    page.set_done()
    assert seen.state == DONE


# --- the node monitor ---------------------------------------------------------------------------

KILL, TERM, SEGV = signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV

#: A process in place of a rank. After a line of input it closes its bell, which is also the first
#: thing that the system closes when a process ends.
_RANK = """
import os, sys, time
if sys.stdin.readline():
    os.close(int(sys.argv[1]))
    print(flush=True)
time.sleep(100)
"""


class Node:
    """Processes in place of the ranks of a node, and their node monitor in a thread.

    first: rank of the first process. size: number of ranks of the job.
    """

    def __init__(self, first=0, ranks=3, size=3, **given):
        self.pages, self.processes, known = [], [], []
        for k in range(ranks):
            page, stacks = os.memfd_create("page"), os.memfd_create("stacks")
            self.pages.append(map_page(page))
            bell, rings = os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", _RANK, str(rings)],
                pass_fds=(page, stacks, bell, rings), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            self.processes.append(process)
            known.append({"rank": first + k, "pid": process.pid, "signal": 60, "page": page,
                          "stacks": stacks, "bell": bell})  # fmt: skip
            os.close(rings)
        self._poll = select.epoll()
        opened = monitor_client.open_ranks(known, self._poll, lambda descriptor: descriptor)
        for each in known:
            os.close(each["bell"])
        self.output, stderr = os.pipe()
        os.set_blocking(self.output, False)
        self.monitor = node_monitor.NodeMonitor({
            "job": "1", "size": size, "host": "here", "secret": "s", "survives_losses": False,
            "addresses": [], "listener": None, "names": [], "command": "",
            "launcher": 0, "launcher_pidfd": -1, "ranks": opened,
            "epoll": os.dup(self._poll.fileno()), "stderr": stderr, **given,
        })  # fmt: skip
        self.thread = threading.Thread(target=self.monitor.serve)
        self.text = ""

    def start(self):
        self.thread.start()

    def kill(self, *signals):
        """Send each rank its signal and wait until it has ended, the last rank first."""
        for process, number in [*zip(self.processes, signals, strict=True)][::-1]:
            if number:
                process.send_signal(number)
                process.wait()

    def wait_for(self, words):
        """Wait until the monitor has printed ``words``."""
        deadline = time.monotonic() + 30
        while words not in self.text and time.monotonic() < deadline:
            self._read()
            time.sleep(0.01)
        assert words in self.text, self.text

    def _read(self):
        with contextlib.suppress(BlockingIOError):
            self.text += os.read(self.output, 1 << 16).decode()

    def end(self):
        """Kill the ranks, wait until the monitor ends, and return its output."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.thread.join(30)
        assert not self.thread.is_alive(), "the monitor does not end"
        self._read()
        return self.text


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Return a function that creates a Node for the duration of the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = []

    def make(**given):
        made.append(Node(**given))
        return made[-1]

    yield make
    for node in made:
        for process in node.processes:
            process.kill()
            process.communicate()
        if node.thread.ident is not None:
            node.thread.join(30)


def test_monitor_kills_stopped_ranks_when_another_rank_ends_the_job(nodes):
    node = nodes()
    zero, one, two = node.processes
    one.send_signal(signal.SIGSTOP)
    while processes.state_of(one.pid) != "stopped":
        time.sleep(0.01)
    node.start()
    node.pages[0].set_ending()
    zero.kill()
    assert one.wait(30) == -signal.SIGKILL
    assert two.poll() is None and node.end() == ""


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ((KILL, KILL, TERM), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGTERM"),
        ((KILL, KILL, SEGV), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGSEGV"),
        ((KILL, KILL, KILL), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGKILL"),
        ((TERM, TERM, SEGV), "lost: rank 2 of 3 (pid {2} on here) was killed by SIGSEGV"),
        ((TERM, TERM, TERM), "lost together: ranks 0-2 of 3 (on here) were killed by SIGTERM"),
    ],
    ids=["SIGTERM", "SIGSEGV", "SIGKILL", "SIGSEGV, launcher by SIGTERM", "SIGTERM to all"],
)
def test_monitor_that_starts_after_the_ranks_ended_reports_the_first_lost_rank(
    nodes, signals, expected
):
    node = nodes()
    node.kill(*signals)
    node.start()
    text = node.end()
    assert expected.format(*(process.pid for process in node.processes)) in text, text
    assert text.count("lost") == 1


def test_rank_that_closed_its_bell_first_is_reported_even_if_it_ends_last(nodes):
    node = nodes()
    node.processes[1].stdin.write(b"\n")
    node.processes[1].stdin.flush()
    node.processes[1].stdout.readline()
    node.kill(KILL, 0, KILL)
    node.kill(0, KILL, 0)
    node.start()
    assert node.end().startswith("mpicoll: lost: rank 1 of 3 ")


def test_ranks_that_end_after_a_lost_rank_are_not_reported(nodes):
    node = nodes()
    node.start()
    node.kill(0, TERM, 0)
    node.wait_for("lost: rank 1 of 3")
    node.pages[0].set_ending()
    node.kill(TERM, 0, TERM)
    assert node.end().count("mpicoll: ") == 1


def test_ranks_that_end_after_a_rank_ended_the_job_are_not_reported(nodes):
    node = nodes()
    node.pages[1].set_ending()
    node.pages[1].set_done()  # MPI_Abort may finalize MPI
    node.kill(KILL, KILL, KILL)  # rank 1 is not the first of them
    node.start()
    assert node.end() == ""


def test_each_lost_rank_is_reported_if_the_job_survives_losses(nodes):
    node = nodes(survives_losses=True)
    node.kill(0, KILL, KILL)
    node.start()
    node.wait_for("lost: rank 1 of 3")
    node.wait_for("lost: rank 2 of 3")
    node.kill(KILL, 0, 0)
    assert node.end().count("lost: ") == 3


def _make_head(nodes, **given):
    """Return the node of a head monitor on the loopback interface, and the monitor's address."""
    sock = socket.create_server(("127.0.0.1", 0))
    address = list(sock.getsockname())
    return nodes(listener=sock.detach(), **given), address


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("lost", "lost: rank 3 of 4 (pid {} on here) was killed by SIGKILL"),
        ("ending", ""),
        ("none", "lost together: ranks 0-1 of 4 (on here) were killed by SIGKILL"),
    ],
)
def test_head_monitor_reports_the_first_lost_rank_of_all_nodes(nodes, first, expected):
    head, address = _make_head(nodes, ranks=2, size=4)
    # Nothing listens at the first address.
    other = nodes(first=2, ranks=2, size=4, addresses=[["127.0.0.1", 1], address, address])
    for node in (head, other):
        node.start()
    while not head.monitor._nodes:
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):  # the head stops listening after the last node
        socket.create_connection(address[:2])
    if first == "ending":
        find = other.monitor._find_losses
        other.monitor._find_losses = lambda: (time.sleep(0.7), find())  # its node is loaded
        other.pages[1].set_ending()
    if first != "none":
        other.kill(0, KILL)
    for process in head.processes:  # all at once, as a launcher does
        os.kill(process.pid, KILL)
    text = head.end()
    assert expected.format(other.processes[1].pid) in text, text
    assert text.count("mpicoll: ") == bool(expected), text
    for line in head.monitor.lines.values():  # the end of a monitor process closes them
        line.sock.close()
    assert other.end() == ""


def test_head_waits_for_its_own_rank_that_is_ending(nodes, monkeypatch):
    head, address = _make_head(nodes, ranks=1, size=3)
    other = nodes(first=1, ranks=2, size=3, addresses=[address])
    (first,) = head.processes
    monkeypatch.setattr(node_monitor, "is_dying", lambda pid: pid == first.pid)
    for node in (head, other):
        node.start()
    first.stdin.write(b"\n")
    first.stdin.flush()
    while not (head.monitor._nodes and head.monitor._dying):
        time.sleep(0.01)
    other.kill(KILL, 0)
    time.sleep(0.3)  # the head has the loss of the other node
    assert "lost: rank 0 of 3" in head.end()


def test_head_asks_a_node_that_connects_after_a_loss(nodes, monkeypatch):
    monkeypatch.setattr(node_monitor, "_NODES_TIMEOUT_S", 30)
    head, address = _make_head(nodes, ranks=2, size=3)
    other = nodes(first=2, ranks=1, size=3, addresses=[address])
    other.kill(KILL)
    head.start()
    for process in head.processes:
        os.kill(process.pid, KILL)
    while not head.monitor._losses:
        time.sleep(0.01)
    other.start()
    assert "lost: rank 2 of 3" in head.end()


ATTACKS = [
    '{"proof": "é"}\n'.encode(),
    b"[" * 4000 + b"\n",
    b"[1]\n1\nnull\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xfe\n",
    b'{"proof": {"a": []}, "nonce": null, "ranks": "x"}\n',
    b'{"lost": [], "alone": true}\n{"ask": "snapshots"}\n{"end": true}\n',
    b"",
    b" " * 10_000_000,
]


def test_monitor_survives_connections_without_the_secret(nodes):
    head, address = _make_head(nodes, ranks=1, size=2)
    head.start()
    with contextlib.ExitStack() as stack:
        for k in range(100):  # they stay connected and never read
            sock = stack.enter_context(socket.create_connection(address[:2]))
            sock.settimeout(10)
            with contextlib.suppress(ConnectionError):
                sock.sendall(ATTACKS[k % len(ATTACKS)])
        while len(head.monitor.listeners) < 2:
            time.sleep(0.01)
        for attack in ATTACKS:
            local = stack.enter_context(socket.socket(socket.AF_UNIX))
            local.connect(str(node_monitor.find_folder() / f"{os.getpid()}{node_monitor.SOCKETS}"))
            with contextlib.suppress(ConnectionError):
                local.sendall(attack)
        other = nodes(first=1, ranks=1, size=2, addresses=[address])
        other.start()
        other.kill(SEGV)
        head.wait_for(f"lost: rank 1 of 2 (pid {other.processes[0].pid} on here) was killed by")
        assert len(head.monitor.lines) <= 2 * node_monitor._MAX_STRANGER_COUNT


def test_connection_limits_lines_and_rejects_wrong_proofs():
    """Without a monitor, which drops a connection at any error."""
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


def test_monitor_rejects_a_head_without_the_secret(nodes):
    """A monitor without a head prints its own reports."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = nodes(first=1, ranks=1, size=2, addresses=[list(server.getsockname())])
        node.start()
        sock, _ = server.accept()
        with sock:
            sock.sendall('{"nonce": "é"}\n{"proof": "é"}\n{"end": "now"}\n'.encode())
            node.kill(SEGV)
            assert node.end().startswith("mpicoll: lost: rank 1 of 2")


def test_folder_of_the_monitors_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = node_monitor.find_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="others may write to it"):
        node_monitor.find_folder()
