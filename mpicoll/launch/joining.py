"""Connect a rank that was not started by an MPI launcher to the server of its job."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

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
from mpicoll.line_protocol import is_proof, mac, tune
from mpicoll.processes import blocked_job_signals

_WHERE = "init_process_group"
#: The variable with the secret of the job, if the user has set one.
SECRET = settings.SECRET.name
#: The key under which rank 0 publishes the address of its server.
_KEY = "mpicoll"
#: Timeout of a connection attempt to one address, and of the server's answers, in seconds.
_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 3.0, 10.0
#: Maximum length of an answer in bytes.
_MAX_LINE_BYTES = 4096
#: Seconds for which a rank retries while another program answers at the server's port, or another
#: process has its rank.
_CONFLICT_TIMEOUT_S = 10.0
#: Seconds that the server process may need to start.
_START_TIMEOUT_S = 30.0
#: Seconds to wait for the server's list of missing ranks after the timeout.
_MISSING_TIMEOUT_S = 5.0
#: Maximum length of the failure that is sent to the other ranks.
_MAX_FAILURE_BYTES = 512


def join(rendezvous: Rendezvous, limit: float | None) -> Session:
    """Connect to the server and wait until all ranks have connected.

    limit: timeout in seconds; None: none. Raises CollectiveTimeoutError if a rank does not connect
    in time, and LaunchError if the ranks disagree.
    """
    limit = math.inf if limit is None else limit
    deadline = time.monotonic() + limit
    try:
        (sock, watch), secret = _connect_all(rendezvous, limit, ["pmi", "watch"])
        job = mac(secret, "job")
        session = Session(watch, sock.fileno(), rendezvous.rank, rendezvous.world_size, job)
        try:
            _await_all(session, limit, deadline)
        except BaseException:
            watch.close()
            sock.close()
            raise
    finally:
        if rendezvous.rank == 0:
            rendezvous.after()
    sock.detach()  # the MPI library uses the descriptor from now on
    set_current(session)
    return session


def send_failure(rendezvous: Rendezvous, text: str, limit: float) -> None:
    """Notify the ranks of a rendezvous that this rank has failed, so that they raise.

    Opens only the watch connection, so that the server does not count this rank as connected.

    limit: seconds for all ranks to connect. Rank 0, which starts the server, waits for them.
    """
    (watch,), _ = _connect_all(rendezvous, limit, ["watch"])
    with watch:
        session = Session(watch, -1, rendezvous.rank, rendezvous.world_size, "")
        words = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
        session.send(f"failed {words[:_MAX_FAILURE_BYTES]}")
        end = time.monotonic() + limit
        while rendezvous.rank == 0 and session.receive(max(0.0, end - time.monotonic())):
            pass
    if rendezvous.rank == 0:
        rendezvous.after()


def _connect_all(
    rendezvous: Rendezvous, limit: float, roles: Sequence[str]
) -> tuple[list[socket.socket], str]:
    """Return one connection per role to the server, which rank 0 starts, and the job's secret."""
    start, pause, reported = time.monotonic(), 0.05, None
    me = f"{_WHERE}: rank {rendezvous.rank} of {rendezvous.world_size}"
    known = rendezvous.server
    with contextlib.ExitStack() as stack:
        if rendezvous.rank == 0 and known is None:
            known, process = start_server(rendezvous.world_size, rendezvous.host, rendezvous.port)
            stack.enter_context(process)  # the server ends if rank 0 ends before it connects
            if rendezvous.store is not None:
                rendezvous.store.set(_KEY, known.format())
        elif known is None and rendezvous.store is None:
            known = ServerAddress([rendezvous.host], rendezvous.port, "", "")
        while True:
            try:
                address = known or ServerAddress.parse(_read_store(rendezvous))
                found = [_connect(address, role, rendezvous) for role in roles]
                return [sock for sock, _ in found], found[0][1]
            except RankTakenError as error:
                # The other process may be ending: of an earlier job, or of an earlier attempt.
                if time.monotonic() - start > _CONFLICT_TIMEOUT_S:
                    raise LaunchError(f"{_WHERE}: {error}") from None
            except ServerNotFoundError as error:
                waited = time.monotonic() - start
                # Another program may use a given port. An address from a store may be outdated.
                if error.is_other and rendezvous.port and waited > _CONFLICT_TIMEOUT_S:
                    raise LaunchError(
                        f"{me}: rank 0's server is expected at port {rendezvous.port}, but "
                        f"{error}. Choose another port, and set the same {SECRET} on all ranks, if "
                        "any"
                    ) from None
                reported = error if error.is_other or reported is None else reported
                if waited > limit:
                    raise CollectiveTimeoutError(
                        f"{me} did not reach rank 0's server within {limit:g} s: {reported}. Is "
                        "rank 0 running, and can this host reach its host?"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)


def _read_store(rendezvous: Rendezvous) -> bytes:
    """Return the address that rank 0 has published."""
    assert rendezvous.store is not None
    try:
        return rendezvous.store.get(_KEY)
    except (ServerNotFoundError, MpicollError):
        raise
    except Exception as error:  # any error of another library's store
        raise CollectiveTimeoutError(
            f"{_WHERE}: rank {rendezvous.rank} of {rendezvous.world_size}: rank 0 has not "
            f"published its server in the store: {type(error).__name__}: {error}"
        ) from error


def _await_all(session: Session, limit: float, deadline: float) -> None:
    line = session.receive(max(0, deadline - time.monotonic()))
    if line is None:
        session.send("late")
        line = session.receive(_MISSING_TIMEOUT_S)
    word, _, rest = ("late" if line is None else line).partition(" ")
    if word == "go":
        return
    late = f"timed out after {limit:g} s"
    kind, text = {
        "late": (CollectiveTimeoutError, f"{late}: rank 0's server does not answer"),
        "missing": (
            CollectiveTimeoutError,
            f"{late} waiting for rank{'s' * (',' in rest)} "
            f"{rest.replace(',', ', ')}. Check these ranks or increase the timeout",
        ),
        "lost": (LaunchError, f"rank {rest} ended before all ranks had connected"),
        "refused": (LaunchError, rest),
    }.get(word, (LaunchError, "lost the connection to rank 0's server"))
    raise kind(f"{_WHERE}: rank {session.rank} of {session.size}: {text}")


# --- the server ---------------------------------------------------------------------------------


def start_server(
    size: int, host: str = "", port: int = 0
) -> tuple[ServerAddress, subprocess.Popen[bytes]]:
    """Start the server of ``size`` ranks; return its address and the process.

    host, port: see ``Rendezvous``.

    The server waits for rank 0 as long as the standard input of the process is open.
    """
    # The user's secret is not published.
    published = "" if settings.SECRET.value() else os.urandom(32).hex()
    host = loopback(host) or (host and find_own_address(host))
    configuration = {
        "host": host,
        "port": port,
        "secret": settings.SECRET.value() or published,
        "size": size,
        "open": bool(port) and not settings.SECRET.value(),
    }
    with blocked_job_signals():
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", server.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # continues after rank 0 and ignores Ctrl-C
            cwd="/",
        )
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(configuration).encode() + b"\n")
        process.stdin.flush()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = process.stdout.readline() if poll.poll(1000 * _START_TIMEOUT_S) else b""
    answer = json.loads(line or "{}")
    if "port" not in answer:
        process.kill()
        process.communicate()
        raise LaunchError(
            f"{_WHERE}: rank 0 cannot listen at port {port or '0 (any)'} of "
            f"{host or 'this host'}: "
            f"{answer.get('error', 'its server process did not start')}"
        )
    master = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    hosts = [host] if host else [*master, *addresses()]
    return ServerAddress(hosts, answer["port"], published, machine()), process


# --- connecting ---------------------------------------------------------------------------------


def _connect(
    address: ServerAddress, role: str, rendezvous: Rendezvous
) -> tuple[socket.socket, str]:
    """Return a connection to the job's server, by the first working host, and the job's secret."""
    errors, is_other = [], True
    local = ["127.0.0.1", "::1"] if address.machine == machine() else []
    secret = settings.SECRET.value() or address.secret
    for host in [*local, *address.hosts]:
        try:
            sock = socket.create_connection((host, address.port), _CONNECT_TIMEOUT_S)
            try:
                return sock, _authenticate(sock, role, rendezvous, secret)
            except BaseException:
                sock.close()
                raise
        except (OSError, UnicodeError, ServerNotFoundError) as error:  # UnicodeError: invalid host
            errors.append(f"{host}: {error}")
            is_other = is_other and getattr(error, "is_other", False)
    raise ServerNotFoundError("; ".join(errors), is_other)


def _authenticate(sock: socket.socket, role: str, rendezvous: Rendezvous, secret: str) -> str:
    """Connect as a rank; return the secret, which the server sends if it is not known.

    The server sends the secret to any process that requests it if its port was given, so it is as
    open as a TCPStore of torch.distributed. Ranks that have MPICOLL_SECRET do not request it.
    """
    sock.settimeout(_ANSWER_TIMEOUT_S)
    tune(sock)
    greeting = _read_line(sock)
    theirs, mine = greeting.removeprefix(server.GREETING + " "), os.urandom(16).hex()
    if theirs == greeting:
        raise ServerNotFoundError("another program listens there", is_other=True)
    if not secret:
        sock.sendall(b"secret\n")
        secret = _read_line(sock).removeprefix("secret ")
    words = [role, str(rendezvous.rank), str(rendezvous.world_size), node(), mine]
    sock.sendall(" ".join([*words, mac(secret, "rank", theirs, *words)]).encode() + b"\n")
    answer, _, rest = _read_line(sock).partition(" ")
    if answer == "taken":
        raise RankTakenError(f"another process has connected as rank {rendezvous.rank} of this job")
    if answer == "refused":
        raise LaunchError(f"{_WHERE}: rank {rendezvous.rank} of {rendezvous.world_size}: {rest}")
    if answer != "ok" or not is_proof(rest, secret, "server", theirs, mine):
        raise ServerNotFoundError("that server does not have this job's secret", is_other=True)
    sock.settimeout(None)
    return secret


def _read_line(sock: socket.socket) -> str:
    """Read one line byte by byte, because another reader needs the bytes after it.

    Raises ServerNotFoundError if the peer does not send a line in time.
    """
    line = bytearray()
    try:
        while not line.endswith(b"\n"):
            byte = sock.recv(1)
            if not byte or len(line) > _MAX_LINE_BYTES:
                raise ConnectionResetError("the peer has closed the connection")
            line += byte
    except OSError as error:
        raise ServerNotFoundError(str(error), is_other=True) from None
    return line.decode("ascii", "replace").rstrip("\n")
