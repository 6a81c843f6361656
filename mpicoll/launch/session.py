"""A rank's place in a job that MPI's own launcher did not start: joining it, and leaving it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from mpicoll import settings
from mpicoll.errors import CollectiveTimeoutError, LaunchError, MpicollError
from mpicoll.launch import server
from mpicoll.launch.meeting import Meeting, NotThere, Place, Taken
from mpicoll.output import write_lines

__all__ = ["SECRET", "Session", "addresses", "current", "greeted", "join", "read_line"]

_WHERE = "init_process_group"
#: A secret that whoever starts the processes gives to all of them.
SECRET = settings.SECRET.name
#: The key under which rank 0 says where its server is.
_KEY = "mpicoll"
#: Seconds for a connection to one address, and for an answer on it.
_CONNECT, _ANSWER = 3.0, 10.0
#: Seconds after which who answers at a place that was named is taken for somebody else.
_DOUBT = 10.0
#: Seconds that a server process needs to start, with plenty to spare.
_START = 30.0
#: Seconds that the others have, once this rank has given up, to hear why from the server.
_LAST_WORDS = 5.0
#: Asks Linux for the address of an interface.
_SIOCGIFADDR = 0x8915
#: Bytes of a line at the most.
_LONGEST = 1024
#: While others are waited for at the end, seconds between looks at what MPI has on its way, between
#: questions whether the server runs, and until one without an answer shows that it does not.
_BETWEEN_LOOKS, _BETWEEN_QUESTIONS, _SILENCE = 0.02, 2.0, 10.0
#: Seconds that poll can wait, which counts milliseconds in an int.
_LONGEST_POLL = 1e6


class Session:
    """The connection on which this rank says how it ends and hears how the others do.

    pmi:  the descriptor of the other connection, on which the MPI library speaks PMI-1.
    rank, size: this rank, and the number of ranks.
    """

    def __init__(self, watch: socket.socket, pmi: int, rank: int, size: int) -> None:
        self._sock = watch
        self._inbox = bytearray()
        self._pid = os.getpid()
        self.pmi = pmi
        self.rank = rank
        self.size = size

    def fileno(self) -> int:
        """For poll."""
        return self._sock.fileno()

    def say(self, line: str) -> None:
        """Tells the server; one that is gone, or has stopped reading, need not know."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.send(line.encode() + b"\n", socket.MSG_DONTWAIT)

    def check(self) -> None:
        """Raises LaunchError where the job has ended already."""
        found = self.news()
        if found is not None:
            raise LaunchError(f"{_WHERE}: rank {self.rank} of {self.size}: {found[0]}")

    def abort(self, code: int) -> NoReturn:
        """Ends this process with an exit code, and the others with the same."""
        code = exit_status(code)
        self.say(f"abort {code}")
        os._exit(code)

    def hear(self, limit: float) -> str | None:
        """The next line from the server, "" when it is gone, None if none comes in time."""
        deadline = time.monotonic() + limit
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while b"\n" not in self._inbox:
            left = max(0, deadline - time.monotonic())
            if not poll.poll(1000 * min(left, _LONGEST_POLL)):
                if left > _LONGEST_POLL:
                    continue
                return None
            try:
                data = self._sock.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                return ""
            self._inbox += data
        line, _, self._inbox = self._inbox.partition(b"\n")
        return line.decode("ascii", "replace")

    @contextlib.contextmanager
    def alarm(self) -> Iterator[None]:
        """In here any news end this process, by SIGIO.

        For MPI_Init: nothing else can, for it lets no other thread run, and waits for ranks that
        may be lost. Raises LaunchError where there are news already.
        """
        flags = fcntl.fcntl(self._sock, fcntl.F_GETFL)
        fcntl.fcntl(self._sock, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._sock, fcntl.F_SETFL, flags | os.O_ASYNC)
        try:
            self.check()
            yield
        finally:
            fcntl.fcntl(self._sock, fcntl.F_SETFL, flags)

    def news(self) -> tuple[str, int] | None:
        """Why the job ends, "" where this rank ends it itself, and with what exit code; None if it
        goes on.
        """
        line = self.hear(0)
        if line is None:
            return None
        word, _, rest = line.partition(" ")
        if word == "lost":
            return f"rank {rest} of {self.size} was lost: it ended while others needed it", 1
        if word == "abort":
            rank, code = rest.split(" ")
            mine = int(rank) == self.rank
            why = "" if mine else f"rank {rank} of {self.size} ended the job with exit code {code}"
            return why, exit_status(int(code))
        if word == "stuck":
            return f"ranks {rest} do not come out of MPI_Init", 1
        return "the server that rank 0 started, or its host, is gone", 1

    def finalize(self) -> bool:
        """Waits until all ranks want to finalise MPI; False where some never will, and where the
        server, which would know, has stopped.

        Without this MPI_Finalize would wait for a rank that has gone, for ever.
        """
        from mpi4py import MPI

        self.say("end")
        asked, answered = time.monotonic(), True
        while (line := self.hear(_BETWEEN_LOOKS)) in (None, "here"):
            now, answered = time.monotonic(), answered or line == "here"
            if answered and now - asked > _BETWEEN_QUESTIONS:
                asked, answered = now, False
                self.say("there")
            elif not answered and now - asked > _SILENCE:
                write_lines(
                    f"mpicoll: rank {self.rank} of {self.size}: the server that rank 0 started has "
                    f"not answered for {_SILENCE:g} s; MPI is not finalised"
                )
                return False
            MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # lets MPI move what is on its way
        return line == "end all"

    def forget(self) -> None:
        """In a forked child: the connections are the parent's, and end with it."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for one in (self.fileno(), self.pmi):
            os.dup2(nowhere, one, inheritable=False)
        os.close(nowhere)


_session: Session | None = None


def _after_fork() -> None:
    if _session is not None:
        _session.forget()


os.register_at_fork(after_in_child=_after_fork)


def exit_status(code: int) -> int:
    """The 8 bits of an exit code that count; not 0, which would say that all is well."""
    return code & 255 or 1


def current() -> Session | None:
    """The session of this process, if there is one."""
    return _session


def join(meeting: Meeting, limit: float | None) -> Session:
    """Comes together with the other ranks.

    limit: seconds to wait for all of them; None: for ever.

    Raises CollectiveTimeoutError where some do not come in time, LaunchError where they disagree.
    """
    global _session
    limit = math.inf if limit is None else limit
    deadline = time.monotonic() + limit
    try:
        pmi, watch = _find(meeting, limit, deadline)
        session = Session(watch, pmi.fileno(), meeting.rank, meeting.world_size)
        try:
            _await_all(session, limit, deadline)
        except BaseException:
            watch.close()
            pmi.close()
            raise
    finally:
        if meeting.rank == 0:
            meeting.after()
    pmi.detach()  # it is the MPI library's from now on
    _session = session
    return session


def _find(meeting: Meeting, limit: float, deadline: float) -> tuple[socket.socket, socket.socket]:
    """The two connections to the server, which rank 0 starts."""
    with contextlib.ExitStack() as stack:
        place = None
        if meeting.rank == 0:
            place, process = _start_server(meeting, limit)
            stack.enter_context(process)  # which ends with rank 0 until that is connected to it
            meeting.store.set(_KEY, place.text())
        return _reach(place, meeting, limit, deadline)


def _reach(
    known: Place | None, meeting: Meeting, limit: float, deadline: float
) -> tuple[socket.socket, socket.socket]:
    start, pause, telling = time.monotonic(), 0.05, None
    while True:
        try:
            place = known or Place.read(_ask(meeting))
            return _connect(place, "pmi", meeting), _connect(place, "watch", meeting)
        except Taken as error:
            # Perhaps by a process that is ending: of an earlier job, or an earlier try of this one.
            if time.monotonic() - start > _DOUBT:
                raise LaunchError(f"{_WHERE}: {error}") from None
        except NotThere as error:
            now = time.monotonic()
            # A place that was named may be somebody else's; one that was found may be out of date.
            if error.wrong and meeting.port and now - start > _DOUBT:
                raise LaunchError(
                    f"{_WHERE}: rank {meeting.rank} of {meeting.world_size}: rank 0's server is "
                    f"expected at port {meeting.port}, but {error}; choose another port, and give "
                    f"all ranks the same {SECRET}, if any"
                ) from None
            telling = error if error.wrong or telling is None else telling
            if now > deadline:
                raise CollectiveTimeoutError(
                    f"{_WHERE}: rank {meeting.rank} of {meeting.world_size} did not reach rank 0's "
                    f"server within {limit:g} s: {telling}. Is rank 0 running, and can this host "
                    "reach its host?"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _ask(meeting: Meeting) -> bytes:
    """What rank 0 has left at the store."""
    try:
        return meeting.store.get(_KEY)
    except (NotThere, MpicollError):
        raise
    except Exception as error:  # a store of somebody else's, with errors of its own
        raise CollectiveTimeoutError(
            f"{_WHERE}: rank {meeting.rank} of {meeting.world_size}: rank 0 has not come to the "
            f"store: {type(error).__name__}: {error}"
        ) from error


def _await_all(session: Session, limit: float, deadline: float) -> None:
    me = f"rank {session.rank} of {session.size}"
    line = session.hear(max(0, deadline - time.monotonic()))
    if line is None:
        session.say("late")
        line = session.hear(_LAST_WORDS)
    if line is None:
        raise CollectiveTimeoutError(
            f"{_WHERE}: {me}: the server that rank 0 started has stopped: it said nothing within "
            f"{limit:g} s, nor when it was asked"
        )
    word, _, rest = line.partition(" ")
    if word == "go":
        return
    if word == "missing":
        many = "ranks" if "," in rest else "rank"
        raise CollectiveTimeoutError(
            f"{_WHERE}: {me}: {many} {rest.replace(',', ', ')} did not come within {limit:g} s; "
            "see what became of them, or give a longer timeout"
        )
    if word == "lost":
        raise LaunchError(f"{_WHERE}: {me}: rank {rest} ended before all had come")
    if word == "refused":
        raise LaunchError(f"{_WHERE}: {me}: the ranks disagree: {rest}")
    raise LaunchError(f"{_WHERE}: {me}: the server that rank 0 started is gone")


# --- the server ---------------------------------------------------------------------------------


def _start_server(meeting: Meeting, limit: float) -> tuple[Place, subprocess.Popen[bytes]]:
    """Starts the server; returns what the other ranks need to find it, and the process.

    As long as the standard input of the process is open the server waits for this rank.
    """
    # A secret that all ranks were given is told to nobody.
    told = "" if _given() else secrets.token_hex(32)
    settings = {
        "host": meeting.host, "port": meeting.port, "secret": _given() or told,
        "size": meeting.world_size, "limit": limit, "open": bool(meeting.port) and not _given(),
    }  # fmt: skip
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
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = process.stdout.readline() if poll.poll(1000 * _START) else b""
    answer = json.loads(line or "{}")
    if "port" not in answer:
        process.kill()
        process.communicate()
        raise LaunchError(
            f"{_WHERE}: rank 0 cannot listen at port {meeting.port or '0 (any)'} of "
            f"{meeting.host or 'this host'}: "
            f"{answer.get('error', 'its server process did not start')}"
        )
    named = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    hosts = [meeting.host] if meeting.host else [*named, *addresses()]
    return Place(hosts, answer["port"], told, _machine()), process


def _given() -> str:
    return settings.SECRET.value()


def addresses() -> list[str]:
    """This host's addresses, those that others most likely reach first."""
    found: dict[str, None] = {}
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            found[str(info[4][0])] = None
    # Connecting a datagram socket sends nothing; it asks the kernel which address it would use.
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            found[str(probe.getsockname()[0])] = None
    for _, interface in socket.if_nameindex():
        asked = struct.pack("256s", interface.encode()[:15])
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
            found[socket.inet_ntoa(fcntl.ioctl(any_, _SIOCGIFADDR, asked)[20:24])] = None
    local = ("127.", "::1", "fe80:")
    return [*(one for one in found if not one.startswith(local)), name]


def _machine() -> str:
    """Names what shares a loopback address: a network namespace of a running kernel."""
    boot, inode = "", 0
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inode = Path("/proc/self/ns/net").stat().st_ino
    return f"{socket.gethostname()}/{boot}/{inode}" if not boot else f"{boot}/{inode}"


def node() -> str:
    """Names what shares memory: a host, a file system for it, and numbers of processes."""
    words = [socket.gethostname(), _machine().partition("/")[0]]
    for path in ("/dev/shm", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            status = Path(path).stat()
            words.append(f"{status.st_dev}-{status.st_ino}")
    return hashlib.sha256("/".join(words).encode()).hexdigest()[:16]


# --- connecting ---------------------------------------------------------------------------------


def _candidates(place: Place) -> Iterator[str]:
    if place.machine == _machine():
        yield from ("127.0.0.1", "::1")
    yield from place.hosts


def _connect(place: Place, role: str, meeting: Meeting) -> socket.socket:
    """A connection to the server of this job, to the first address that leads there."""
    said, wrong = [], True
    for host in _candidates(place):
        try:
            sock = socket.create_connection((host, place.port), _CONNECT)
            try:
                _introduce(sock, role, meeting, _given() or place.secret)
            except BaseException:
                sock.close()
                raise
            return sock
        except (OSError, UnicodeError, NotThere) as error:  # UnicodeError: no name of a host
            said.append(f"{host}: {error}")
            wrong = wrong and getattr(error, "wrong", False)
    raise NotThere("; ".join(said), wrong)


def _introduce(sock: socket.socket, role: str, meeting: Meeting, secret: str) -> None:
    nonce = greeted(sock)
    mine = secrets.token_hex(server.NONCE)
    words = [role, str(meeting.rank), str(meeting.world_size), node(), mine]
    proof = server.mac(secret, "rank", nonce, *words)
    sock.sendall(" ".join([*words, proof]).encode() + b"\n")
    answer, _, rest = read_line(sock).partition(" ")
    if answer == "taken":
        raise Taken(f"another process says that it is rank {meeting.rank} of this job")
    if answer == "refused":
        raise LaunchError(f"{_WHERE}: rank {meeting.rank} of {meeting.world_size}: {rest}")
    if answer != "ok" or not hmac.compare_digest(rest, server.mac(secret, "server", nonce, mine)):
        raise NotThere("the server there does not have this job's secret", wrong=True)
    sock.settimeout(None)


def greeted(sock: socket.socket) -> str:
    """The nonce with which a server of ours greets; raises NotThere for whoever else listens."""
    sock.settimeout(_ANSWER)
    server.tune(sock)
    greeting = read_line(sock)
    nonce = greeting.removeprefix(server.GREETING + " ")
    if nonce == greeting:
        raise NotThere("something else listens there", wrong=True)
    return nonce


def read_line(sock: socket.socket) -> str:
    """One line, read byte by byte: what follows is for somebody else."""
    line = bytearray()
    while not line.endswith(b"\n"):
        try:
            byte = sock.recv(1)
        except TimeoutError:
            raise NotThere("whoever listens there says nothing", wrong=True) from None
        if not byte or len(line) > _LONGEST:
            raise NotThere("whoever listens there closed the connection", wrong=True)
        line += byte
    return line.decode("ascii", "replace").rstrip("\n")
