"""PMI server: the process manager of ranks that were not started by an MPI launcher.

Rank 0 starts it as ``python -I -S server.py``, a file that needs only the standard library, so it
starts fast. It cannot be a thread of rank 0, because MPI_Init blocks all threads. It reads its
settings as one line of JSON on standard input and prints its port as one line of JSON.

Each rank opens two connections. Its MPI library uses the first one for PMI-1. On the second one,
the watch connection, the rank reports its state and is notified when the job ends. A connection
begins with

    server  mpicoll 1 NONCE
    rank    ROLE RANK SIZE NODE NONCE MAC           ROLE: pmi or watch; MAC: of the preceding words
    server  ok MAC, or refused WHY, or taken (another process has connected as this rank)

MACs are HMAC-SHA256 under the secret of the job. Both sides prove that they have the secret without
sending it. If ranks know only the port (``open``), a rank may request the secret

    rank    secret
    server  secret SECRET

The messages on a watch connection:

    rank    busy, free        in a process group of all ranks; not in any process group
            busy part         in a process group of some ranks
            failed WHY        failed before it started MPI
            end               wants to finalize MPI, waits for the answer
            abort CODE        aborts the job
            late              timed out waiting for ranks to connect
    server  go                all ranks have connected
            refused WHY       a rank failed or does not belong to the job
            missing RANK,...  a rank timed out waiting for these ranks
            lost RANK         a rank ended without a message
            abort RANK CODE   a rank aborted the job
            end all           all ranks are ready to finalize MPI
            end some          some ranks are lost: do not finalize MPI
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent.parent)]

from mpicoll.line_protocol import LineConnection, LineServer, is_proof, mac

GREETING = "mpicoll 1"
#: Seconds from the failure of the job until the PMI connections are closed, which ends ranks inside
#: MPI_Init.
_CLOSE_DELAY_S = 3.0
#: Maximum length of a line before and after authentication, in bytes.
_MAX_UNAUTHENTICATED_LINE_BYTES, _MAX_LINE_BYTES = 1024, 1 << 16
#: Maximum number of unauthenticated connections, and of unread bytes per rank.
_MAX_UNAUTHENTICATED_COUNT, _MAX_UNREAD_BYTES = 4096, 1 << 24

#: PMI-1: commands with a constant answer.
_ANSWERS = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=64 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname={name}",
    "get_universe_size": "cmd=universe_size rc=0 size={size}",
    "finalize": "cmd=finalize_ack rc=0",
}


def mapping(nodes: list[str]) -> str:
    """Return PMI_process_mapping from the node names of the ranks.

    It has blocks of (number of the first node, number of nodes, ranks on each node).
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
    """A connection and the rank of its peer. ``peer`` is its role, "pmi" or "watch"."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _MAX_UNAUTHENTICATED_LINE_BYTES, _MAX_UNAUTHENTICATED_LINE_BYTES)
        self.rank = -1


class Server(LineServer[_Connection]):
    """Serves one job until all ranks have disconnected.

    sends_secret: send the secret to any process that requests it.
    starter: a descriptor that reaches its end when rank 0 has ended or has connected. The server
             stops if rank 0 ends before it connects.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        size: int,
        sends_secret: bool = False,
        starter: int | None = None,
    ) -> None:
        super().__init__(select.epoll(), _MAX_UNAUTHENTICATED_COUNT + 2 * size)
        self.listen(listener)
        self.secret, self.size = secret, size
        self.sends_secret, self.starter = sends_secret, starter
        # MPI libraries use it in names of shared memory, so it must be unique on every node.
        self.name = f"mpicoll-{os.urandom(8).hex()}"
        self.pmi: dict[int, _Connection] = {}
        self.watch: dict[int, _Connection] = {}
        self.nodes: dict[int, str] = {}
        self.state: dict[int, str] = {}  # of each connected rank: busy, free, end or gone
        self.cycles: dict[int, int] = {}  # number of times that each rank became busy
        self.values: dict[str, str] = {}  # of PMI's put
        self.fence: set[int] = set()  # ranks in PMI's barrier
        self.ended: set[int] = set()  # ranks in state end or gone
        self.latest = 0  # the largest number of cycles of any rank
        self.has_announced_end = False
        self.is_complete = False  # all ranks have connected
        self.failure = ""  # the message with which the job failed
        self.close_deadline = float("inf")  # when the server stops after a failure

    # --- the loop --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until all ranks have disconnected, or rank 0 has ended before it connected."""
        if self.starter is not None:
            self.poll.register(self.starter, select.EPOLLIN)
        try:
            while self.pmi or self.watch or self.starter is not None:
                for descriptor, _ in self.poll.poll(1.0):
                    if descriptor == self.starter:
                        self.poll.unregister(descriptor)
                        self.starter = None
                    else:
                        self.serve_descriptor(descriptor)
                self.drop_silent()
                if time.monotonic() > self.close_deadline:
                    break
        finally:
            for sock in (*(one.sock for one in self.lines.values()), *self.listeners.values()):
                sock.close()
            self.poll.close()

    def welcome(self, sock: socket.socket) -> None:
        """Add an accepted connection, and send the greeting."""
        peer = _Connection(sock)
        self.add(peer)
        self._send(peer, f"{GREETING} {peer.nonce}")

    def _send(self, peer: _Connection, line: str) -> None:
        self.send_to(peer, line.encode())

    def dropped(self, peer: _Connection) -> None:
        """Record that a rank has closed a connection."""
        if peer.peer == "pmi":
            self.fence.discard(peer.rank)
            del self.pmi[peer.rank]
            self._check_fence()
        elif peer.peer == "watch":
            del self.watch[peer.rank]
            if self.state[peer.rank] == "busy":
                self._fail(f"lost {peer.rank}")
            self._set_state(peer.rank, "gone")

    def handle_next(self, peer: _Connection) -> bool:
        """Handle the next line of a rank; return False if there is none."""
        if (data := peer.take_line()) is None:
            return False
        line = data.decode("ascii").rstrip("\r")
        if peer.peer == "pmi":
            self._handle_pmi(peer, line)
        elif peer.peer == "watch":
            self._handle_watch(peer, line)
        elif line == "secret" and self.sends_secret:
            self._send(peer, f"secret {self.secret}")
        else:
            self._authenticate(peer, line)
        return True

    # --- connecting ranks ------------------------------------------------------------------------

    def _authenticate(self, peer: _Connection, line: str) -> None:
        *words, proof = line.split(" ")
        if not is_proof(proof, self.secret, "rank", peer.nonce, *words):
            self.drop(peer)
            return
        role, number, size, node, nonce = words
        rank, known = int(number), {"pmi": self.pmi, "watch": self.watch}[role]
        failure = ""
        if int(size) != self.size:
            failure = f"rank {rank} has world_size={size}, and rank 0 has world_size={self.size}"
        elif not 0 <= rank < self.size:
            failure = f"rank {rank} is out of range: world_size is {self.size}"
        if failure:
            self._fail(f"refused {failure}")
        if failure or rank in known:
            peer.is_closing = True
            self._send(peer, f"refused {failure}" if failure else "taken")
            return
        peer.peer, peer.rank = role, rank
        peer.max_line_bytes, peer.max_unread_bytes = _MAX_LINE_BYTES, _MAX_UNREAD_BYTES
        known[rank] = peer
        self._send(peer, f"ok {mac(self.secret, 'server', peer.nonce, nonce)}")
        if role == "watch":
            self.nodes[rank] = node
            self.state[rank] = "busy"
            self.cycles[rank] = 0  # the rank is about to create its first process group
            if self.failure:
                self._send(peer, self.failure)
        if len(self.pmi) == len(self.watch) == self.size:
            self._complete()

    def _complete(self) -> None:
        """Stop listening and notify the ranks that all of them have connected."""
        self.is_complete = True
        for sock in list(self.listeners.values()):
            self.close_listener(sock)
        for peer in [one for one in self.lines.values() if not one.peer]:
            self.drop(peer)
        nodes = [self.nodes[rank] for rank in range(self.size)]
        self.values["PMI_process_mapping"] = mapping(nodes)
        self._send_all("go")

    # --- state of the ranks ----------------------------------------------------------------------

    def _handle_watch(self, peer: _Connection, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in ("busy", "free", "end"):
            self.cycles[peer.rank] += line == "busy"
            self._set_state(peer.rank, word)
        elif word == "abort":
            self._fail(f"abort {peer.rank} {int(rest)}")
        elif word == "failed":
            self._fail(f"refused rank {peer.rank} failed: {rest}")
        elif word == "late" and not self.is_complete:
            missing = [rank for rank in range(self.size) if rank not in self.watch]
            self._fail(f"missing {','.join(map(str, missing))}")

    def _send_all(self, line: str) -> None:
        for peer in list(self.watch.values()):
            self._send(peer, line)

    def _fail(self, failure: str) -> None:
        """Send the first failure to all ranks. Later failures are consequences and are ignored."""
        if not self.failure:
            self.failure = failure
            self.close_deadline = time.monotonic() + _CLOSE_DELAY_S
            self._send_all(failure)

    def _set_state(self, rank: int, state: str) -> None:
        self.state[rank] = state
        changed = {rank}
        if state == "busy":
            self.latest = max(self.latest, self.cycles[rank])
            changed = self.ended
        elif state in ("end", "gone"):
            self.ended.add(rank)
        # An ended rank is missing in a later process group.
        if missing := [each for each in changed & self.ended if self.cycles[each] < self.latest]:
            self._fail(f"lost {min(missing, key=self.cycles.__getitem__)}")
        if len(self.ended) == self.size and not self.has_announced_end:
            self.has_announced_end = True
            self._send_all("end some" if "gone" in self.state.values() else "end all")

    # --- PMI-1 -----------------------------------------------------------------------------------

    def _handle_pmi(self, peer: _Connection, line: str) -> None:
        if not line.startswith("cmd="):
            if line == "endcmd":  # the end of a spawn command (mcmd)
                self._send(peer, "cmd=spawn_result rc=-1 msg=not_supported")
            return
        # The value of a put comes last and may contain any characters.
        line, _, value = line.partition(" value=")
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        command = words["cmd"]
        if command in _ANSWERS:
            self._send(peer, _ANSWERS[command].format(size=self.size, name=self.name))
        elif command == "put":
            self.values[words["key"]] = value
            self._send(peer, "cmd=put_result rc=0 msg=success")
        elif command == "get":
            found = self.values.get(words["key"])
            result = "rc=0 msg=success" if found is not None else "rc=-1 msg=key_not_found"
            self._send(
                peer, f"cmd=get_result {result} value={'unknown' if found is None else found}"
            )
        elif command == "barrier_in":
            self.fence.add(peer.rank)
            self._check_fence()
        elif command == "abort":
            self._fail(f"abort {peer.rank} {int(words.get('exitcode', 1))}")
        else:
            self._send(peer, f"cmd={command}_result rc=-1 msg=not_supported")

    def _check_fence(self) -> None:
        """Release the barrier when all connected ranks are in it."""
        if self.fence and len(self.fence) == len(self.pmi) and self.is_complete:
            waiting, self.fence = self.fence, set()
            for peer in [self.pmi[rank] for rank in waiting]:
                self._send(peer, "cmd=barrier_out rc=0")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at one address, or at all addresses if ``host`` is empty."""
    backlog = 4096
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def main() -> None:
    """Read the settings, print the port, and serve."""
    settings = json.loads(sys.stdin.readline())
    try:
        listener = listen(settings["host"], settings["port"])
    except OSError as error:
        print(json.dumps({"error": error.strerror}), flush=True)
        return
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    if os.fork():  # os.wait() of rank 0 must not find this process
        os._exit(0)
    # A reader of rank 0's output must not wait for this process.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))  # two connections per rank
    Server(
        listener, settings["secret"], settings["size"], settings["open"], sys.stdin.fileno()
    ).serve()


if __name__ == "__main__":
    main()
