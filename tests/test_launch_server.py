"""The PMI server: its protocol, authentication, addresses and lifetime."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from launch_jobs import PROCESSES, TORCHRUN, Ended, job

from mpicoll.launch import server
from mpicoll.launch.host_identity import addresses, find_own_address
from mpicoll.line_protocol import mac

pytestmark = pytest.mark.waits


#: Prints the addresses at which the server listens before all ranks have connected.
LISTENS = (
    PROCESSES
    + """
    import glob
    def server():
        while True:
            for pid, name in processes().items():
                if name == "server.py":
                    return pid
            time.sleep(0.05)
    def listens():
        inodes, pid = set(), server()
        for path in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                inodes.add(os.readlink(path))
            except OSError:
                pass
        for path in "/proc/net/tcp", "/proc/net/tcp6":
            for line in open(path).read().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                    yield words[1].partition(":")[0]
    if os.environ["RANK"] == "1":
        while not (found := list(listens())):
            time.sleep(0.05)
        say("listens", *found)
    $begin
    say("done")
"""
)
LOOPBACK, ALL = "0100007F", "0" * 32
#: An IPv4 address by which other hosts reach this one, "" without one.
OWN = next((each for each in addresses()[:-1] if "." in each), "")
needs_address = pytest.mark.skipif(not OWN, reason="this host has only a loopback address")


@needs_address
def test_find_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "own": [OWN], "service": ["203.0.113.7"], "debian": ["127.0.1.1"], "any": ["0.0.0.0"],
        "two": [OWN, "203.0.113.7"], OWN: [OWN],
    }  # fmt: skip

    def find(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (each, 0)) for each in names[name]]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    found = {name: find_own_address(name) for name in (*names, "unknown")}
    assert found == dict.fromkeys((*names, "unknown"), "") | {"own": OWN, OWN: OWN}


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("env://", LOOPBACK),
        ("tcp://localhost:$PORT", LOOPBACK),
        pytest.param(
            f"tcp://{OWN}:$PORT",
            socket.inet_aton(OWN or "0.0.0.0")[::-1].hex().upper(),
            marks=needs_address,
        ),
        ("file://$FOLDER/meet", ALL),
    ],
)
@job(LISTENS, {"begin": "dist.init_process_group('mpi', '$method', 30)"})
def test_listening_address(method: str, where: str, ended: Ended) -> None:
    ended.printed("done", "done", f"listens {where}")


@pytest.mark.parametrize(
    "begin",
    [
        "dist.init_process_group(timeout=30)",
        "import torch; torch.distributed.init_process_group('mpicoll')",
    ],
    ids=["mpicoll", "torch"],
)
@job(LISTENS, size=2, by="torchrun")
@pytest.mark.skipif(not TORCHRUN.exists(), reason="there is no torchrun")
def test_listening_address_under_torchrun(begin: str, ended: Ended) -> None:
    ended.printed("done", "done", f"listens {LOOPBACK}")


class Peer:
    """A connection to a server under test."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 5)
        self.file = self.sock.makefile("rwb")

    def send(self, line: str) -> None:
        self.file.write(line.encode() + b"\n")
        self.file.flush()

    def receive(self) -> str:
        try:
            return self.file.readline().decode().rstrip("\n")
        except ConnectionError:
            return ""

    def close(self) -> None:
        self.sock.close()
        self.file.close()

    def authenticate(
        self, role: str, rank: int, size: int = 2, secret: str = "s", node: str = "n"
    ) -> str:
        nonce = self.receive().removeprefix(server.GREETING + " ")
        words = [role, rank, size, node, "mine"]
        self.send(" ".join(map(str, [*words, mac(secret, "rank", nonce, *words)])))
        answer = self.receive()
        if answer.startswith("ok"):
            assert answer == f"ok {mac(secret, 'server', nonce, 'mine')}"
        return answer.partition(" ")[0]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server of two ranks in a thread; its port."""
    monkeypatch.setattr(server.Server, "stranger_timeout_s", 1.0)
    monkeypatch.setattr(server, "_CLOSE_DELAY_S", 0.5)
    listener = server.listen("127.0.0.1", 0)
    reader, writer = os.pipe()  # open: rank 0 has not connected
    one = server.Server(listener, "s", 2, starter=reader)
    thread = threading.Thread(target=one.serve)
    thread.start()
    yield listener.getsockname()[1]
    os.close(writer)
    thread.join(10)
    os.close(reader)
    assert not thread.is_alive(), "the server did not end"


def connect_all(port: int) -> dict[tuple[str, int], Peer]:
    peers = {}
    for role in "pmi", "watch":
        for rank in range(2):
            peers[role, rank] = Peer(port)
            assert peers[role, rank].authenticate(role, rank, node="ab"[rank]) == "ok"
    assert [peers["watch", rank].receive() for rank in range(2)] == ["go", "go"]
    return peers


def test_unauthenticated_connections_are_closed(served: int) -> None:
    wrong = Peer(served)
    assert wrong.authenticate("pmi", 0, secret="another") == ""
    for garbage in "GET / HTTP/1.1", "pmi 0 2 n", "pmi 0 2 n mine 0", "\0\xff", "[" * 200_000:
        one = Peer(served)
        one.receive()
        with contextlib.suppress(ConnectionError):
            one.send(garbage)
        assert one.receive() == "", garbage
    cut = Peer(served)
    cut.sock.sendall(b"pmi 0")
    silent = Peer(served)
    assert silent.receive().startswith(server.GREETING)
    peers = connect_all(served)
    start = time.monotonic()
    assert silent.receive() == "" and time.monotonic() - start < 3
    for peer in peers.values():
        peer.close()


def test_unauthenticated_peer_that_never_reads_is_dropped() -> None:
    listener = server.listen("127.0.0.1", 0)
    one = server.Server(listener, "s", 2, sends_secret=True)
    with listener, socket.create_connection(listener.getsockname(), 5) as sock, one.poll:
        one.serve_descriptor(listener.fileno())
        (peer,) = one.lines.values()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for _ in range(100_000):
            if not one.lines:
                break
            with contextlib.suppress(OSError):
                sock.send(b"secret\n" * 100, socket.MSG_DONTWAIT)
            one.serve_descriptor(peer.fileno())
            assert len(peer.outbox) <= 2 * server._MAX_UNAUTHENTICATED_LINE_BYTES
        assert not one.lines


def test_duplicate_and_invalid_ranks_are_refused(served: int) -> None:
    first = Peer(served)
    assert first.authenticate("watch", 0) == "ok"
    assert Peer(served).authenticate("watch", 0) == "taken"
    assert Peer(served).authenticate("watch", 2) == "refused"
    assert first.receive() == "refused rank 2 is out of range: world_size is 2"
    late = Peer(served)
    assert late.authenticate("watch", 1) == "ok"
    assert late.receive() == "refused rank 2 is out of range: world_size is 2"


def test_pmi(served: int) -> None:
    peers = connect_all(served)
    zero, one = peers["pmi", 0], peers["pmi", 1]

    def ask(line: str, peer: Peer = zero) -> str:
        peer.send(line)
        return peer.receive()

    answer = ask("cmd=init pmi_version=1 pmi_subversion=1")
    assert answer == "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"
    assert ask("cmd=get_universe_size") == "cmd=universe_size rc=0 size=2"
    assert "vallen_max=" in ask("cmd=get_maxes") and "appnum=0" in ask("cmd=get_appnum")
    name = ask("cmd=get_my_kvsname").rpartition("=")[2]
    assert ask(f"cmd=put kvsname={name} key=k value=a=b c ") == "cmd=put_result rc=0 msg=success"
    found = ask(f"cmd=get kvsname={name} key=k", one)
    assert found == "cmd=get_result rc=0 msg=success value=a=b c "
    assert "rc=-1" in ask(f"cmd=get kvsname={name} key=other")
    mapping = ask(f"cmd=get kvsname={name} key=PMI_process_mapping")
    assert mapping.endswith("value=(vector,(0,1,1),(1,1,1))")
    assert "rc=-1" in ask("cmd=publish_name service=x port=y")
    zero.send("mcmd=spawn\nnprocs=1\nendcmd")
    assert "rc=-1" in zero.receive()
    zero.send("cmd=barrier_in")
    zero.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        zero.sock.recv(1)
    assert ask("cmd=barrier_in", one) == "cmd=barrier_out rc=0"
    zero.sock.settimeout(5)
    assert zero.sock.recv(100) == b"cmd=barrier_out rc=0\n"
    one.send("cmd=abort exitcode=5 message=abort job")
    assert [peers["watch", rank].receive() for rank in range(2)] == ["abort 1 5"] * 2


def test_lost_rank_is_reported_and_closes_pmi(served: int) -> None:
    peers = connect_all(served)
    peers["watch", 0].send("busy")
    peers["watch", 1].close()
    assert peers["watch", 0].receive() == "lost 1"
    assert peers["pmi", 0].receive() == "", "ranks inside MPI_Init must end"


def test_mapping() -> None:
    assert server.mapping(["a", "a", "b", "b"]) == "(vector,(0,1,2),(1,1,2))"
    assert server.mapping(["b", "a", "b"]) == "(vector,(0,1,1),(1,1,1),(0,1,1))"


def test_server_needs_only_the_standard_library() -> None:
    settings = {"host": "127.0.0.1", "port": 0, "secret": "s", "size": 1, "open": False}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(server.__file__)], input=json.dumps(settings) + "\n",
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["port"] > 0 and done.stderr == ""
    assert time.monotonic() - start < 10, "the server has kept its standard output open"
