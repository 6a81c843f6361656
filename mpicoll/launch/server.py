"""The process through which ranks that no launcher of MPI started become one MPI world.

Rank 0 starts it as ``python -I -S server.py``: one file, with the standard library alone, starts
fast. It cannot be a thread of rank 0, because MPI_Init blocks all threads. It reads its settings on
standard input, one line of JSON, and it answers with its port, one line on standard output.

Each rank makes two connections. Its MPI library uses the first one for PMI-1. On the second one,
the watch, the rank reports its end and receives the ends of other ranks. A connection begins with

    server  mpicoll 1 NONCE
    rank    ROLE RANK SIZE NODE NONCE MAC           ROLE: pmi or watch; MAC: of the words before it
    server  ok MAC, or refused WHY, or taken (by another process that is this rank)

MACs are HMAC-SHA256 under the secret of the job. Both sides prove that they know it, and neither
sends it, unless the port is all that ranks are given (``open``): then a rank may ask

    rank    secret
    server  secret SECRET

The words on a watch:

    rank    busy, free        in a process group of all ranks; has left its groups
            busy part         in a process group of some ranks
            failed WHY        cannot begin
            end               wants to finalise MPI, and waits for the answer
            abort CODE        ends the job
            late              will not wait any longer for ranks that have not come
            there             asks whether the server still runs
    server  go                all ranks have connected
            refused WHY       a rank belongs to a different job
            stuck RANK,...    these do not come out of MPI_Init
            missing RANK,...  some rank will not wait any longer for these
            lost RANK         a rank ended without a word
            abort RANK CODE   a rank ended the job
            end all           all ranks are ready to finalise MPI
            end some          a rank is not
            here              it runs
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import selectors
import socket
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent.parent)]

from mpicoll.line_protocol import LineConnection, is_proof, mac

__all__ = ["GREETING", "RUNS_MPI", "Server", "mapping"]

GREETING = "mpicoll 1"
#: The node of ranks whose MPI runs already: they only exchange values by PMI's put and get.
RUNS_MPI = "runs-mpi"
#: Seconds within which a connection has to identify itself.
_IDENTIFY_TIMEOUT = 10.0
#: Seconds between the news that a rank was lost and the end of the others' connections to PMI: a
#: rank inside MPI_Init learns it that way.
_GRACE = 3.0
#: Most bytes of a line: before and after a connection has identified itself.
_SHORT, _LONG = 1024, 1 << 16
#: Most connections that are not identified, bytes that a rank has not read (others: _SHORT), and
#: bytes that ranks have put.
_STRANGERS, _UNREAD, _STORED = 4096, 1 << 24, 1 << 28

#: PMI-1: commands with an answer that does not depend on the state.
_ANSWERS = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=64 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname={name}",
    "get_universe_size": "cmd=universe_size rc=0 size={size}",
    "finalize": "cmd=finalize_ack rc=0",
}


def mapping(nodes: list[str]) -> str:
    """Format which rank is on which node as PMI does, from the nodes' names by rank.

    Blocks of (number of the first node, nodes, ranks on each).
    """
    numbers: dict[str, int] = {}
    blocks: list[list[int]] = []
    for node in nodes:
        number = numbers.setdefault(node, len(numbers))
        if blocks and blocks[-1][0] == number:
            blocks[-1][1] += 1
        else:
            blocks.append([number, 1])
    return f"(vector,{','.join(f'({number},1,{ranks})' for number, ranks in blocks)})"


class _Connection(LineConnection):
    """A connection and the rank of its peer."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _SHORT, _SHORT)
        self.role = ""
        self.rank = -1
        self.is_closing = False  # once everything has been sent

    def accept_rank(self, role: str, rank: int) -> None:
        """Record that the peer has proved that it is a rank of the job."""
        self.role, self.rank = role, rank
        self.max_line_bytes, self.max_unread_bytes = _LONG, _UNREAD


class Server:
    """Serves one job until no rank is left.

    listener: the listening socket.
    secret:   of the job.
    size:     number of ranks.
    limit:    seconds that ranks which have all come may take to start MPI.
    hands_out: gives the secret to any process that asks.
    starter:  a descriptor that is at its end when rank 0 has ended or is connected: without rank 0
              there is no job.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        size: int,
        limit: float,
        hands_out: bool = False,
        starter: int | None = None,
    ) -> None:
        self.listener = listener
        self.secret = secret
        self.size = size
        self.limit = limit
        self.hands_out = hands_out
        self.starter = starter
        # MPI libraries name shared memory by it: no other job may have it on any node.
        self.name = f"mpicoll-{secrets.token_hex(8)}"
        self.selector = selectors.DefaultSelector()
        self.connections: set[_Connection] = set()
        self.pmi: dict[int, _Connection] = {}
        self.watch: dict[int, _Connection] = {}
        self.nodes: dict[int, str] = {}
        self.state: dict[int, str] = {}  # busy, free, end or gone, of each rank that has come
        self.cycles: dict[int, int] = {}  # how often each rank has become busy
        self.values: dict[str, str] = {}
        self.stored = 0
        self.fence: set[int] = set()  # ranks that wait in PMI's barrier
        self.starting: set[int] = set()  # ranks inside MPI_Init
        self.ended: set[int] = set()  # ranks in state end or gone
        self.earliest = -1  # the one of them that was in the fewest process groups
        self.latest = 0  # the most process groups that any rank was in
        self.has_announced_end = False  # the ranks know how to end
        self.is_complete = False  # all ranks have come
        self.init_deadline = 0.0  # until when ranks may be inside MPI_Init
        self.why = ""  # why the job ends badly
        self.cut_off = float("inf")  # when it is cut off

    # --- the loop --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until all ranks have gone, or none has come."""
        try:
            self._serve()
        finally:
            for peer in self.connections:
                peer.sock.close()
            self.listener.close()
            self.selector.close()

    def _serve(self) -> None:
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        if self.starter is not None:
            self.selector.register(self.starter, selectors.EVENT_READ, None)
        while True:
            for key, events in self.selector.select(1.0):
                if key.fileobj is self.listener:
                    self._accept()
                    continue
                if key.data is None:
                    self.selector.unregister(key.fileobj)
                    self.starter = None
                    continue
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ and key.data in self.connections:
                    self._read(key.data)
            now = time.monotonic()
            for peer in list(self.connections):
                if not peer.role and now - peer.since > _IDENTIFY_TIMEOUT:
                    self._drop(peer)
            if self.starting and now > self.init_deadline:
                self._end_badly(f"stuck {','.join(map(str, sorted(self.starting)))}")
            if now > self.cut_off or not (self.pmi or self.watch or self.starter is not None):
                return

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            if len(self.connections) >= _STRANGERS + 2 * self.size:
                sock.close()
                return
            tune(sock)
            peer = _Connection(sock)
            self.connections.add(peer)
            self.selector.register(sock, selectors.EVENT_READ, peer)
            self._send(peer, f"{GREETING} {peer.nonce}")

    def _send(self, peer: _Connection, line: str) -> None:
        if peer in self.connections:
            try:
                peer.send_line(line.encode())
            except OSError:
                self._drop(peer)
            self._flush(peer)

    def _flush(self, peer: _Connection) -> None:
        if peer not in self.connections:
            return
        try:
            peer.flush()
        except OSError:
            self._drop(peer)
            return
        if peer.is_closing and not peer.has_unsent:
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_unsent else 0)
        self.selector.modify(peer.sock, events, peer)

    def _read(self, peer: _Connection) -> None:
        try:
            peer.fill()
            while peer in self.connections and not peer.is_closing:
                line = peer.take_line()
                if line is None:
                    return
                self._handle(peer, line.decode("ascii").rstrip("\r"))
        except Exception:  # OSError, or a line that no rank sends
            self._drop(peer)

    def _drop(self, peer: _Connection) -> None:
        if peer not in self.connections:
            return
        self.connections.discard(peer)
        self.selector.unregister(peer.sock)
        peer.sock.close()
        if peer.role == "pmi":
            self.fence.discard(peer.rank)
            del self.pmi[peer.rank]
            self._check_fence()
        elif peer.role == "watch":
            del self.watch[peer.rank]
            if self.state[peer.rank] == "busy":
                self._end_badly(f"lost {peer.rank}")
            self._set_state(peer.rank, "gone")

    def _handle(self, peer: _Connection, line: str) -> None:
        if peer.role == "pmi":
            self._handle_pmi(peer, line)
        elif peer.role == "watch":
            self._handle_watch(peer, line)
        elif line == "secret" and self.hands_out:
            self._send(peer, f"secret {self.secret}")
        else:
            self._identify(peer, line)

    # --- ranks that come -------------------------------------------------------------------------

    def _identify(self, peer: _Connection, line: str) -> None:
        *words, proof = line.split(" ")
        if not is_proof(proof, self.secret, "rank", peer.nonce, *words):
            self._drop(peer)
            return
        role, number, size, node, nonce = words
        rank, known = int(number), {"pmi": self.pmi, "watch": self.watch}[role]
        why = ""
        if int(size) != self.size:
            why = f"rank {rank} has world_size={size}, and rank 0 has world_size={self.size}"
        elif not 0 <= rank < self.size:
            why = f"there is no rank {rank} in a world of {self.size}"
        if why:
            self._end_badly(f"refused {why}")
        if why or rank in known:
            peer.is_closing = True
            self._send(peer, f"refused {why}" if why else "taken")
            return
        peer.accept_rank(role, rank)
        known[rank] = peer
        self._send(peer, f"ok {mac(self.secret, 'server', peer.nonce, nonce)}")
        if role == "watch":
            self.nodes[rank] = node
            self.state[rank] = "busy"
            self.cycles[rank] = 0  # the first process group is on its way
            if self.why:
                self._send(peer, self.why)
        if len(self.pmi) == len(self.watch) == self.size:
            self._complete()

    def _complete(self) -> None:
        """Let the ranks go on: all have come, and no other connection belongs here."""
        running = [rank for rank, node in sorted(self.nodes.items()) if node == RUNS_MPI]
        if running and len(running) < self.size:
            fresh = sorted(set(range(self.size)) - set(running))
            self._end_badly(
                f"refused MPI runs already on ranks {running}, in a world without ranks {fresh}: "
                "processes that start later cannot join it"
            )
            return
        self.is_complete = True
        self.selector.unregister(self.listener)
        self.listener.close()
        for peer in list(self.connections):
            if not peer.role:
                self._drop(peer)
        self.init_deadline = time.monotonic() + self.limit
        self.starting = set(range(self.size))
        nodes = [self.nodes[rank] for rank in range(self.size)]
        self.values["PMI_process_mapping"] = mapping(nodes)
        self._send_all("go")

    # --- how ranks end ---------------------------------------------------------------------------

    def _handle_watch(self, peer: _Connection, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in ("busy", "free", "end"):
            self.cycles[peer.rank] += line == "busy"
            self._set_state(peer.rank, word)
        elif word == "abort":
            self._end_badly(f"abort {peer.rank} {int(rest)}")
        elif word == "failed":
            self._end_badly(f"refused rank {peer.rank} failed: {rest}")
        elif word == "late" and not self.is_complete:
            missing = [rank for rank in range(self.size) if rank not in self.watch]
            self._end_badly(f"missing {','.join(map(str, missing))}")
        elif word == "there":
            self._send(peer, "here")

    def _send_all(self, line: str) -> None:
        for peer in list(self.watch.values()):
            self._send(peer, line)

    def _end_badly(self, why: str) -> None:
        """Tell all ranks, once: what follows are ranks that end because of it."""
        if not self.why:
            self.why = why
            self.cut_off = time.monotonic() + _GRACE
            self._send_all(why)

    def _set_state(self, rank: int, state: str) -> None:
        self.state[rank] = state
        if state == "busy":
            self.starting.discard(rank)
            self.latest = max(self.latest, self.cycles[rank])
        elif state in ("end", "gone"):
            self.ended.add(rank)
            if self.cycles[rank] < self.cycles.get(self.earliest, self.latest + 1):
                self.earliest = rank
        # A later process group lacks a rank that has ended.
        if self.cycles.get(self.earliest, self.latest) < self.latest:
            self._end_badly(f"lost {self.earliest}")
        if len(self.ended) == self.size and not self.has_announced_end:
            self.has_announced_end = True
            self._send_all("end some" if "gone" in self.state.values() else "end all")

    # --- PMI-1 -----------------------------------------------------------------------------------

    def _handle_pmi(self, peer: _Connection, line: str) -> None:
        if not line.startswith("cmd="):
            if line == "endcmd":  # the end of an mcmd, which is a spawn
                self._send(peer, "cmd=spawn_result rc=-1 msg=not_supported")
            return
        # The value of a put comes last and may hold anything.
        line, _, value = line.partition(" value=")
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        answer = _ANSWERS.get(words["cmd"])
        if answer is not None:
            self._send(peer, answer.format(size=self.size, name=self.name))
        elif words["cmd"] == "put":
            self.stored += len(words["key"]) + len(value)
            if self.stored > _STORED:
                raise ValueError("too much")
            self.values[words["key"]] = value
            self._send(peer, "cmd=put_result rc=0 msg=success")
        elif words["cmd"] == "get":
            found = self.values.get(words["key"])
            status = (
                "rc=-1 msg=key_not_found value=unknown" if found is None else "rc=0 msg=success"
            )
            self._send(
                peer, f"cmd=get_result {status}" + ("" if found is None else f" value={found}")
            )
        elif words["cmd"] == "barrier_in":
            self.fence.add(peer.rank)
            self._check_fence()
        elif words["cmd"] == "abort":
            self._end_badly(f"abort {peer.rank} {int(words.get('exitcode', 1))}")
        else:
            self._send(peer, f"cmd={words['cmd']}_result rc=-1 msg=not_supported")

    def _check_fence(self) -> None:
        """Release the barrier when all ranks that are left are in it."""
        if self.fence and len(self.fence) == len(self.pmi) and self.is_complete:
            waiting, self.fence = self.fence, set()
            for peer in [self.pmi[rank] for rank in waiting]:
                self._send(peer, "cmd=barrier_out rc=0")


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer whose machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: of peer address, or of all where the host is empty."""
    backlog = 4096
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def main() -> None:
    """Read the settings, answer with the port, and serve."""
    settings = json.loads(sys.stdin.readline())
    try:
        listener = listen(settings["host"], settings["port"])
    except OSError as error:
        print(json.dumps({"error": error.strerror}), flush=True)
        return
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    if os.fork():  # a child of rank 0 would be found by its os.wait()
        os._exit(0)
    # A reader of rank 0's output must not wait for this process.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))  # two a rank
    served = Server(
        listener,
        settings["secret"],
        settings["size"],
        settings["limit"],
        settings["open"],
        sys.stdin.fileno(),
    )
    served.serve()


if __name__ == "__main__":
    main()
