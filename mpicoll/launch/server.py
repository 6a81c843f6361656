"""The process through which ranks that no launcher of MPI started become one MPI world.

Rank 0 starts it, as a file of its own and with the standard library alone, so that it is there in
no time: ``python -I -S server.py``. It is no thread of rank 0, because MPI_Init does not let other
threads run. Its settings come on standard input, one line of JSON, and it answers with its port,
one line on standard output.

Each rank makes two connections: one that it hands to its MPI library, which speaks PMI-1 there, and
one to watch, on which ranks say how they end and hear how others do. A connection begins with

    server  mpicoll 1 NONCE
    rank    ROLE RANK SIZE NODE NONCE MAC           ROLE: pmi or watch; MAC: of all the other words
    server  ok MAC, or refused WHY, or taken (by another process that is this rank)

MACs are HMAC-SHA256 under the secret of the job. Both sides prove that they know it, and neither
says it, unless this server stands where everybody is to find it (``open``): then a rank may ask

    rank    secret
    server  secret SECRET

The words on a connection that watches:

    rank    busy, free        in a process group; in none any more
            end               wants to finalise MPI, and waits to hear how
            abort CODE        ends the job
            late              will not wait any longer for ranks that have not come
            there             asks whether the server still runs
    server  go                all ranks have come
            refused WHY       a rank has another idea of the job
            stuck RANK,...    these do not come out of MPI_Init
            missing RANK,...  somebody will not wait any longer for these
            lost RANK         a rank ended without a word
            abort RANK CODE   a rank ended the job
            end all           all ranks are there to finalise MPI
            end some          they are not
            here              it runs
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import sys
import time

__all__ = ["GREETING", "NONCE", "Server", "mac", "mapping"]

GREETING = "mpicoll 1"
#: Bytes of a nonce.
NONCE = 16
#: Seconds within which a connection has to say who it is.
_PATIENCE = 10.0
#: Seconds between the news that a rank was lost and the end of the others' connections to PMI: who
#: is inside MPI_Init learns it that way.
_GRACE = 3.0
#: Bytes of a line at the most: before and after a connection has said who it is.
_SHORT, _LONG = 1024, 1 << 16
#: Connections that have not said who they are, bytes that a peer has not read, and bytes that ranks
#: have put, at the most.
_STRANGERS, _UNREAD, _STORED = 4096, 1 << 24, 1 << 28

#: PMI-1: what is asked, and answered without a look.
_ANSWERS = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=64 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname={name}",
    "get_universe_size": "cmd=universe_size rc=0 size={size}",
    "finalize": "cmd=finalize_ack rc=0",
}


def mac(secret: str, *words: object) -> str:
    """What proves that its sender knows the secret."""
    message = " ".join(map(str, words)).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def mapping(nodes: list[str]) -> str:
    """Which rank is on which node, from the nodes' names by rank, as PMI writes it.

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


class _Connection:
    """One connection: what came and is no line yet, what goes out, and who is there."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.since = time.monotonic()
        self.nonce = secrets.token_hex(NONCE)
        self.role = ""
        self.rank = -1
        self.closing = False  # when everything has gone out


class Server:
    """Serves one job until nobody is left.

    listener: the listening socket.
    secret:   of the job.
    size:     number of ranks.
    limit:    seconds that ranks which have all come may take to start MPI.
    hands_out: gives the secret to whoever asks.
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
        # MPI libraries name shared memory by it: it must be nobody else's on any node.
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
        self.told = False  # how to end
        self.complete = False  # all ranks have come
        self.patience = 0.0  # until when ranks may be inside MPI_Init
        self.why = ""  # the job ends badly
        self.cut_off = float("inf")  # when it is cut off

    # --- the loop --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Returns when all ranks have gone, or nobody has come."""
        try:
            self._serve()
        finally:
            for one in self.connections:
                one.sock.close()
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
            for one in list(self.connections):
                if not one.role and now - one.since > _PATIENCE:
                    self._drop(one)
            if self.starting and now > self.patience:
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
            sock.setblocking(False)
            one = _Connection(sock)
            self.connections.add(one)
            self.selector.register(sock, selectors.EVENT_READ, one)
            self._say(one, f"{GREETING} {one.nonce}")

    def _say(self, one: _Connection, line: str) -> None:
        one.outbox += line.encode() + b"\n"
        self._flush(one)

    def _flush(self, one: _Connection) -> None:
        if one not in self.connections:
            return
        try:
            sent = one.sock.send(one.outbox) if one.outbox else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(one)
            return
        del one.outbox[:sent]
        if len(one.outbox) > _UNREAD or (one.closing and not one.outbox):
            self._drop(one)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.outbox else 0)
        self.selector.modify(one.sock, events, one)

    def _read(self, one: _Connection) -> None:
        try:
            data = one.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            return
        one.inbox += data
        while one in self.connections and not one.closing:
            line, newline, rest = one.inbox.partition(b"\n")
            if len(line) > (_LONG if one.role else _SHORT):
                self._drop(one)
                return
            if not newline:
                return
            one.inbox = rest
            try:
                self._hear(one, line.decode("ascii").rstrip("\r"))
            except (ValueError, KeyError):  # nothing that a rank would say
                self._drop(one)

    def _drop(self, one: _Connection) -> None:
        if one not in self.connections:
            return
        self.connections.discard(one)
        self.selector.unregister(one.sock)
        one.sock.close()
        if one.role == "pmi":
            self.fence.discard(one.rank)
            del self.pmi[one.rank]
            self._look_at_fence()
        elif one.role == "watch":
            del self.watch[one.rank]
            if self.state[one.rank] == "busy":
                self._end_badly(f"lost {one.rank}")
            self._set(one.rank, "gone")

    def _hear(self, one: _Connection, line: str) -> None:
        if one.role == "pmi":
            self._hear_pmi(one, line)
        elif one.role == "watch":
            self._hear_watch(one, line)
        elif line == "secret" and self.hands_out:
            self._say(one, f"secret {self.secret}")
        else:
            self._identify(one, line)

    # --- who is there ----------------------------------------------------------------------------

    def _identify(self, one: _Connection, line: str) -> None:
        *words, proof = line.split(" ")
        if not hmac.compare_digest(proof, mac(self.secret, "rank", one.nonce, *words)):
            self._drop(one)
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
            one.closing = True
            self._say(one, f"refused {why}" if why else "taken")
            return
        one.role, one.rank = role, rank
        known[rank] = one
        self._say(one, f"ok {mac(self.secret, 'server', one.nonce, nonce)}")
        if role == "watch":
            self.nodes[rank] = node
            self.state[rank] = "busy"
            self.cycles[rank] = 0  # the first process group is on its way
            if self.why:
                self._say(one, self.why)
        if len(self.pmi) == len(self.watch) == self.size:
            self._begin()

    def _begin(self) -> None:
        """All have come; nobody else has business here."""
        self.complete = True
        self.selector.unregister(self.listener)
        self.listener.close()
        for one in list(self.connections):
            if not one.role:
                self._drop(one)
        self.patience = time.monotonic() + self.limit
        self.starting = set(range(self.size))
        nodes = [self.nodes[rank] for rank in range(self.size)]
        self.values["PMI_process_mapping"] = mapping(nodes)
        self._tell("go")

    # --- how ranks end ---------------------------------------------------------------------------

    def _hear_watch(self, one: _Connection, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in ("busy", "free", "end"):
            self.cycles[one.rank] += word == "busy"
            self._set(one.rank, word)
        elif word == "abort":
            self._end_badly(f"abort {one.rank} {int(rest)}")
        elif word == "late" and not self.complete:
            missing = [rank for rank in range(self.size) if rank not in self.watch]
            self._end_badly(f"missing {','.join(map(str, missing))}")
        elif word == "there":
            self._say(one, "here")

    def _tell(self, line: str) -> None:
        for one in list(self.watch.values()):
            self._say(one, line)

    def _end_badly(self, why: str) -> None:
        """Tells everybody, once: what follows are ranks that end because of it."""
        if not self.why:
            self.why = why
            self.cut_off = time.monotonic() + _GRACE
            self._tell(why)

    def _set(self, rank: int, state: str) -> None:
        self.state[rank] = state
        if state == "busy":
            self.starting.discard(rank)
            self.latest = max(self.latest, self.cycles[rank])
        elif state in ("end", "gone"):
            self.ended.add(rank)
            if self.cycles[rank] < self.cycles.get(self.earliest, self.latest + 1):
                self.earliest = rank
        # Who has ended is missed in a later process group.
        if self.cycles.get(self.earliest, self.latest) < self.latest:
            self._end_badly(f"lost {self.earliest}")
        if len(self.ended) == self.size and not self.told:
            self.told = True
            self._tell("end some" if "gone" in self.state.values() else "end all")

    # --- PMI-1 -----------------------------------------------------------------------------------

    def _hear_pmi(self, one: _Connection, line: str) -> None:
        if not line.startswith("cmd="):
            if line == "endcmd":  # the end of an mcmd, which is a spawn
                self._say(one, "cmd=spawn_result rc=-1 msg=not_supported")
            return
        # The value of a put comes last and may hold anything.
        line, _, value = line.partition(" value=")
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        answer = _ANSWERS.get(words["cmd"])
        if answer is not None:
            self._say(one, answer.format(size=self.size, name=self.name))
        elif words["cmd"] == "put":
            self.stored += len(words["key"]) + len(value)
            if self.stored > _STORED:
                raise ValueError("too much")
            self.values[words["key"]] = value
            self._say(one, "cmd=put_result rc=0 msg=success")
        elif words["cmd"] == "get":
            found = self.values.get(words["key"])
            said = "rc=-1 msg=key_not_found value=unknown" if found is None else "rc=0 msg=success"
            self._say(one, f"cmd=get_result {said}" + ("" if found is None else f" value={found}"))
        elif words["cmd"] == "barrier_in":
            self.fence.add(one.rank)
            self._look_at_fence()
        elif words["cmd"] == "abort":
            self._end_badly(f"abort {one.rank} {int(words.get('exitcode', 1))}")
        else:
            self._say(one, f"cmd={words['cmd']}_result rc=-1 msg=not_supported")

    def _look_at_fence(self) -> None:
        """Lets those in the barrier go on when all that are left are there."""
        if self.fence and len(self.fence) == len(self.pmi) and self.complete:
            waiting, self.fence = self.fence, set()
            for one in [self.pmi[rank] for rank in waiting]:
                self._say(one, "cmd=barrier_out rc=0")


def tune(sock: socket.socket) -> None:
    """Small messages go at once, and a peer whose machine is gone is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: of one address, or of all where the host is empty."""
    backlog = 4096
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def main() -> None:
    """Reads the settings, answers with the port and serves."""
    settings = json.loads(sys.stdin.readline())
    try:
        listener = listen(settings["host"], settings["port"])
    except OSError as error:
        print(json.dumps({"error": error.strerror}), flush=True)
        return
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    if os.fork():  # a child of rank 0 would be found by its os.wait()
        os._exit(0)
    # Whoever reads what rank 0 prints must not wait for this process.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))  # two a rank
    one = Server(
        listener,
        settings["secret"],
        settings["size"],
        settings["limit"],
        settings["open"],
        sys.stdin.fileno(),
    )
    one.serve()


if __name__ == "__main__":
    main()
