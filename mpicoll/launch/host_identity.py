"""Names and addresses of this host."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import socket
import struct
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
        info = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        found = {(each[0], each[4]) for each in info}
        if len(found) != 1:
            return ""
        ((family, address),) = found
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # sends nothing; raises OSError for another host's address
    except (OSError, UnicodeError):
        return ""
    text = str(address[0])
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
