"""TCP connections as the kernel tells them: which a process holds to whom. Python 3.8, standard library only."""

from __future__ import annotations

import os
import socket
from typing import Iterator, List, Optional, Sequence, Set, Tuple

End = Tuple[str, int]


def held_by(pid: int, ends: Optional[Sequence[End]] = None, proc: str = "/proc") -> List[End]:
    """The far ends of the process's established connections, only those to `ends` if given. Raises ValueError."""
    inodes = _socket_inodes(os.path.join(proc, str(pid), "fd"))
    if not inodes:
        return []
    tables = (os.path.join(proc, str(pid), "net", name) for name in ("tcp", "tcp6"))
    found = (line for table in tables for line in _established(table))
    return [remote for remote, inode in found if inode in inodes and (ends is None or remote in ends)]


def _socket_inodes(folder: str) -> Set[str]:
    inodes = set()
    try:
        for name in os.listdir(folder):
            target = os.readlink(os.path.join(folder, name))
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:  # the process or the descriptor is gone: what it held is gone too
        pass
    return inodes


def _established(table: str) -> Iterator[Tuple[End, str]]:
    try:
        with open(table, encoding="ascii") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "01":
            yield endpoint(fields[2]), fields[9]


def endpoint(text: str) -> End:
    """`0100007F:1F90` of /proc/net/tcp as ("127.0.0.1", 8080); the kernel prints addresses as host-order words."""
    address, _, port = text.partition(":")
    try:
        raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
        if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
            raw = raw[12:]
        return socket.inet_ntop(socket.AF_INET6 if len(raw) == 16 else socket.AF_INET, raw), int(port, 16)
    except ValueError:
        raise ValueError("the kernel's table of connections cannot be read: %r" % text[:60])


def resolved(address: str, port: int) -> List[End]:
    """What a name or address means to this machine; nothing when it means nothing."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys((str(row[4][0]), port) for row in found))


def reaches(address: str, port: int, timeout_s: float = 2.0) -> Optional[str]:
    """None when the server accepts a connection from this machine, else why not."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        return "%s:%d: %s" % (address, port, error.strerror or error)
    return None


def children(parent: int, proc: str = "/proc") -> Iterator[int]:
    """The processes whose parent is `parent`."""
    for entry in os.listdir(proc):
        if entry.isdigit() and identity(int(entry), proc)[1] == str(parent):
            yield int(entry)


def identity(pid: int, proc: str = "/proc") -> Tuple[str, str]:
    """Name and parent of a process; ("", "") when it is gone."""
    try:
        with open(os.path.join(proc, str(pid), "stat"), encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return "", ""
    return name, rest.split()[1]
