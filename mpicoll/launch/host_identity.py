"""Names and addresses of this host, and the name of the job."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

#: Linux's ioctl request for the address of an interface.
_SIOCGIFADDR = 0x8915


def addresses() -> list[str]:
    """Return this host's addresses, most likely reachable from other hosts first."""
    found: dict[str, None] = {}
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            found[str(info[4][0])] = None
    # Connecting a datagram socket sends nothing, but sets the source address of the route.
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            found[str(probe.getsockname()[0])] = None
    for _, interface in socket.if_nameindex():
        request = struct.pack("256s", interface.encode()[:15])
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            found[socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])] = None
    local = ("127.", "::1", "fe80:")
    return [*(address for address in found if not address.startswith(local)), name]


def find_own_address(host: str) -> str:
    """Return the address of this host to which a name resolves; "" unless it is exactly one.

    Other hosts cannot reach a loopback address. The address of a service, as in Kubernetes, is not
    an address of this host.
    """
    try:
        (address,) = {each[4] for each in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)}
        text = str(address[0])
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # sends nothing; raises OSError for another host's address
    except (OSError, ValueError):  # an invalid name, or several addresses
        return ""
    number = ipaddress.ip_address(text.partition("%")[0])
    return "" if number.is_loopback or number.is_unspecified else text


def machine() -> str:
    """Identify the network namespace: processes with the same name share the loopback address."""
    boot, inode = "", 0
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inode = Path("/proc/self/ns/net").stat().st_ino
    return f"{boot or socket.gethostname()}/{inode}"


def node() -> str:
    """Identify the node: processes with the same name share /dev/shm and a PID namespace."""
    words = [socket.gethostname(), machine().partition("/")[0]]
    for path in ("/dev/shm", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            status = Path(path).stat()
            words.append(f"{status.st_dev}-{status.st_ino}")
    return hashlib.sha256("/".join(words).encode()).hexdigest()[:16]


def job_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a name of this job, unique on its node and the same on its ranks; None if unknown.

    A PMIx manager names the job. A PMI manager is one process per node, the peer of each rank's
    PMI_FD, so its process ID is used.
    """
    job = environment.get("PMIX_NAMESPACE", "")
    if not job:
        with contextlib.suppress(OSError), open_manager(environment.get("PMI_FD", "")) as manager:
            found = manager.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            job = str(struct.unpack("3i", found)[0] or "")
    return f"mpicoll/{node()}/{job}" if job else None


def open_manager(descriptor: str) -> socket.socket:
    """Return a duplicate of the connection to the PMI process manager.

    descriptor: the value of PMI_FD.

    Raises OSError if it is not the number of a connected socket of this process.
    """
    if not descriptor.isdecimal() or not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
        raise OSError(f"PMI_FD={descriptor}: expected the number of a socket of this process")
    manager = socket.socket(fileno=os.dup(int(descriptor)))
    try:
        manager.getpeername()  # a program may have another socket with the same number
    except OSError:
        manager.close()
        raise
    return manager
