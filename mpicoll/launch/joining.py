"""How a rank that no launcher of MPI started joins its job: it finds the server and connects."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from mpicoll import settings
from mpicoll.errors import CollectiveTimeoutError, LaunchError, MpicollError
from mpicoll.launch import server
from mpicoll.launch.host_identity import addresses, find_own_address, machine, node
from mpicoll.launch.rendezvous import (
    RankTakenError,
    Rendezvous,
    ServerAddress,
    ServerNotFoundError,
    loopback,
)
from mpicoll.launch.session import Session, set_current
from mpicoll.line_protocol import is_proof, mac, nonce
from mpicoll.signals import blocked_job_signals

__all__ = ["SECRET", "join", "meet", "read_greeting", "read_line", "send_failure"]

_WHERE = "init_process_group"
#: A secret that all processes may be given when they are started.
SECRET = settings.SECRET.name
#: The key under which rank 0 publishes where its server is.
_KEY = "mpicoll"
#: Seconds for a connection to one address, and for an answer on it.
_CONNECT, _ANSWER = 3.0, 10.0
#: Seconds after which whatever answers at the port that was given counts as something else.
_DOUBT = 10.0
#: Seconds that a server process needs to start, with plenty to spare.
_START = 30.0
#: Seconds that the server has to say which ranks are missing, once this rank has given up.
_LAST_WORDS = 5.0
#: Most bytes of a line.
_LONGEST = 1024


def join(rendezvous: Rendezvous, limit: float | None) -> Session:
    """Connect to the server and wait for the other ranks.

    limit: seconds to wait for all of them; None: for ever.

    Raises CollectiveTimeoutError where some do not come in time, LaunchError where they disagree.
    """
    pmi, session = _gather(rendezvous, limit, node())
    pmi.detach()  # it is the MPI library's from now on
    set_current(session)
    return session


def meet(rendezvous: Rendezvous, limit: float | None, text: str) -> list[str]:
    """Exchange a line of text with the ranks of a rendezvous, whose MPI runs already.

    limit: seconds to wait for all of them; None: for ever.
    text:  at most some 900 characters, in one line.

    Returns the texts by rank.

    Raises CollectiveTimeoutError if a rank does not come in time, and LaunchError if the ranks
    disagree, if one of them has not started MPI, or if one ends meanwhile.
    """
    pmi, session = _gather(rendezvous, limit, server.RUNS_MPI)
    with pmi, session:
        pmi.settimeout(_ANSWER)
        try:
            pmi.sendall(f"cmd=put key=mpi-{session.rank} value={text}\ncmd=barrier_in\n".encode())
            answers = [read_line(pmi), read_line(pmi)]  # the second one once all have put theirs
            for rank in range(session.size):
                pmi.sendall(f"cmd=get key=mpi-{rank}\n".encode())
                answers.append(read_line(pmi))
        except (OSError, ServerNotFoundError) as error:
            raise LaunchError(
                f"{_WHERE}: rank {session.rank} of {session.size}: all ranks had connected, but "
                f"rank 0's server is gone: {error}"
            ) from None
        session.send("free")
    for rank, answer in enumerate(answers[2:]):
        if " rc=0 " not in answer:
            raise LaunchError(f"{_WHERE}: rank {rank} of {session.size} ended before all had met")
    return [answer.partition(" value=")[2] for answer in answers[2:]]


def send_failure(rendezvous: Rendezvous, text: str, limit: float) -> None:
    """Have the ranks of a rendezvous raise, because this one has failed.

    It makes one connection only, so that the server does not take it for a rank that has come.

    limit: seconds in which all ranks have to connect. Rank 0, which starts the server, waits for
           them.
    """
    (watch,), _ = _find(rendezvous, limit, time.monotonic() + limit, node(), ["watch"])
    with Session(watch, -1, rendezvous.rank, rendezvous.world_size, "") as session:
        words = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
        session.send(f"failed {words[: _LONGEST // 2]}")
        end = time.monotonic() + limit
        while rendezvous.rank == 0 and session.receive(max(0.0, end - time.monotonic())):
            pass
    if rendezvous.rank == 0:
        rendezvous.after()


def _gather(
    rendezvous: Rendezvous, limit: float | None, node: str
) -> tuple[socket.socket, Session]:
    """Connect to the server and wait for all ranks; return the PMI connection and the session.

    node: the name of this node, or RUNS_MPI.
    """
    limit = math.inf if limit is None else limit
    deadline = time.monotonic() + limit
    try:
        (pmi, watch), secret = _find(rendezvous, limit, deadline, node, ["pmi", "watch"])
        job = mac(secret, "job")
        session = Session(watch, pmi.fileno(), rendezvous.rank, rendezvous.world_size, job)
        try:
            _await_all(session, limit, deadline)
        except BaseException:
            watch.close()
            pmi.close()
            raise
    finally:
        if rendezvous.rank == 0:
            rendezvous.after()
    return pmi, session


def _find(
    rendezvous: Rendezvous, limit: float, deadline: float, node: str, roles: Sequence[str]
) -> tuple[list[socket.socket], str]:
    """Return one connection per role to the server, which rank 0 starts, and the job's secret."""
    with contextlib.ExitStack() as stack:
        address = None
        if rendezvous.rank == 0:
            address, process = _start_server(rendezvous, limit)
            stack.enter_context(process)  # which ends with rank 0 until that is connected to it
            rendezvous.store.set(_KEY, address.format())
        return _reach(address, rendezvous, limit, deadline, node, roles)


def _reach(
    known: ServerAddress | None,
    rendezvous: Rendezvous,
    limit: float,
    deadline: float,
    node: str,
    roles: Sequence[str],
) -> tuple[list[socket.socket], str]:
    start, pause, reported = time.monotonic(), 0.05, None
    while True:
        try:
            address = known or ServerAddress.parse(_read_store(rendezvous))
            found = [_connect(address, role, rendezvous, node) for role in roles]
            return found, _given_secret() or address.secret
        except RankTakenError as error:
            # Perhaps by a process that is ending: of an earlier job, or an earlier try of this one.
            if time.monotonic() - start > _DOUBT:
                raise LaunchError(f"{_WHERE}: {error}") from None
        except ServerNotFoundError as error:
            now = time.monotonic()
            # Another program may have the port that was given; an address found may be out of date.
            if error.is_other and rendezvous.port and now - start > _DOUBT:
                raise LaunchError(
                    f"{_WHERE}: rank {rendezvous.rank} of {rendezvous.world_size}: rank 0's server "
                    f"is expected at port {rendezvous.port}, but {error}; choose another port, and "
                    f"give all ranks the same {SECRET}, if any"
                ) from None
            reported = error if error.is_other or reported is None else reported
            if now > deadline:
                raise CollectiveTimeoutError(
                    f"{_WHERE}: rank {rendezvous.rank} of {rendezvous.world_size} did not reach "
                    f"rank 0's server within {limit:g} s: {reported}. Is rank 0 running, and can "
                    "this host reach its host?"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _read_store(rendezvous: Rendezvous) -> bytes:
    """Return what rank 0 has published."""
    try:
        return rendezvous.store.get(_KEY)
    except (ServerNotFoundError, MpicollError):
        raise
    except Exception as error:  # the store may be another library's, with errors of its own
        raise CollectiveTimeoutError(
            f"{_WHERE}: rank {rendezvous.rank} of {rendezvous.world_size}: rank 0 has not come to "
            f"the store: {type(error).__name__}: {error}"
        ) from error


def _await_all(session: Session, limit: float, deadline: float) -> None:
    me = f"rank {session.rank} of {session.size}"
    line = session.receive(max(0, deadline - time.monotonic()))
    if line is None:
        session.send("late")
        line = session.receive(_LAST_WORDS)
    if line is None:
        raise CollectiveTimeoutError(
            f"{_WHERE}: {me}: the server that rank 0 started has stopped: it said nothing within "
            f"{limit:g} s, nor when it was asked"
        )
    word, _, rest = line.partition(" ")
    if word == "go":
        return
    if word == "missing":
        ranks = "ranks" if "," in rest else "rank"
        raise CollectiveTimeoutError(
            f"{_WHERE}: {me}: {ranks} {rest.replace(',', ', ')} did not come within {limit:g} s; "
            "see what became of them, or give a longer timeout"
        )
    if word == "lost":
        raise LaunchError(f"{_WHERE}: {me}: rank {rest} ended before all had come")
    if word == "refused":
        raise LaunchError(f"{_WHERE}: {me}: {rest}")
    raise LaunchError(f"{_WHERE}: {me}: the server that rank 0 started is gone")


# --- the server ---------------------------------------------------------------------------------


def _start_server(
    rendezvous: Rendezvous, limit: float
) -> tuple[ServerAddress, subprocess.Popen[bytes]]:
    """Start the server; return its address, and the process.

    The server waits for this rank as long as the standard input of the process is open.
    """
    # A secret that all ranks were given is not published.
    published = "" if _given_secret() else secrets.token_hex(32)
    host = loopback(rendezvous.host) or (rendezvous.host and find_own_address(rendezvous.host))
    configuration = {
        "host": host,
        "port": rendezvous.port,
        "secret": _given_secret() or published,
        "size": rendezvous.world_size,
        "limit": limit,
        "open": bool(rendezvous.port) and not _given_secret(),
    }
    with blocked_job_signals():
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", server.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives rank 0, and Ctrl-C is for the ranks
            cwd="/",
        )
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(configuration).encode() + b"\n")
        process.stdin.flush()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = process.stdout.readline() if poll.poll(1000 * _START) else b""
    answer = json.loads(line or "{}")
    if "port" not in answer:
        process.kill()
        process.communicate()
        raise LaunchError(
            f"{_WHERE}: rank 0 cannot listen at port {rendezvous.port or '0 (any)'} of "
            f"{host or 'this host'}: "
            f"{answer.get('error', 'its server process did not start')}"
        )
    master = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    hosts = [host] if host else [*master, *addresses()]
    return ServerAddress(hosts, answer["port"], published, machine()), process


def _given_secret() -> str:
    return settings.SECRET.value()


# --- connecting ---------------------------------------------------------------------------------


def _candidates(address: ServerAddress) -> Iterator[str]:
    if address.machine == machine():
        yield from ("127.0.0.1", "::1")
    yield from address.hosts


def _connect(address: ServerAddress, role: str, rendezvous: Rendezvous, node: str) -> socket.socket:
    """Return a connection to the server of this job, by the first host name that leads there."""
    errors, is_other = [], True
    for host in _candidates(address):
        try:
            sock = socket.create_connection((host, address.port), _CONNECT)
            try:
                _introduce(sock, role, rendezvous, node, _given_secret() or address.secret)
            except BaseException:
                sock.close()
                raise
            return sock
        except (OSError, UnicodeError, ServerNotFoundError) as error:  # UnicodeError: a bad name
            errors.append(f"{host}: {error}")
            is_other = is_other and getattr(error, "is_other", False)
    raise ServerNotFoundError("; ".join(errors), is_other)


def _introduce(
    sock: socket.socket, role: str, rendezvous: Rendezvous, node: str, secret: str
) -> None:
    theirs, mine = read_greeting(sock), nonce()
    words = [role, str(rendezvous.rank), str(rendezvous.world_size), node, mine]
    proof = mac(secret, "rank", theirs, *words)
    sock.sendall(" ".join([*words, proof]).encode() + b"\n")
    answer, _, rest = read_line(sock).partition(" ")
    if answer == "taken":
        raise RankTakenError(f"another process says that it is rank {rendezvous.rank} of this job")
    if answer == "refused":
        raise LaunchError(f"{_WHERE}: rank {rendezvous.rank} of {rendezvous.world_size}: {rest}")
    if answer != "ok" or not is_proof(rest, secret, "server", theirs, mine):
        raise ServerNotFoundError("the server there does not have this job's secret", is_other=True)
    sock.settimeout(None)


def read_greeting(sock: socket.socket) -> str:
    """Return the nonce of our server's greeting; raise ServerNotFoundError for any other."""
    sock.settimeout(_ANSWER)
    server.tune(sock)
    greeting = read_line(sock)
    theirs = greeting.removeprefix(server.GREETING + " ")
    if theirs == greeting:
        raise ServerNotFoundError("something else listens there", is_other=True)
    return theirs


def read_line(sock: socket.socket) -> str:
    """Read one line byte by byte: what follows is for another reader."""
    line = bytearray()
    while not line.endswith(b"\n"):
        try:
            byte = sock.recv(1)
        except TimeoutError:
            raise ServerNotFoundError(
                "whatever listens there says nothing", is_other=True
            ) from None
        if not byte or len(line) > _LONGEST:
            raise ServerNotFoundError("whatever listens there closed the connection", is_other=True)
        line += byte
    return line.decode("ascii", "replace").rstrip("\n")
