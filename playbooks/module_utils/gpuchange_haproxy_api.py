"""HAProxy's runtime API over its unix socket, and what its workers still carry. Python 3.8, standard library only."""

from __future__ import annotations

import csv
import errno
import io
import os
import re
import socket
from typing import Any, Dict, Iterator, List, Tuple

from ansible.module_utils import gpuchange_connections as connections

FORCED_MAINT, CONFIG_MAINT, FORCED_DRAIN = 0x01, 0x04, 0x08
RUNNING_STATES = (1, 2)  # starting (slow start) and running take new requests; stopped and stopping do not
CHECK_ENABLED = 0x02  # bit of srv_check_state
ANSWER_LIMIT = 16 * 1024 * 1024


class HaproxyError(Exception):
    """HAProxy cannot be asked or refuses; the text says what, where, and what would help."""


class Haproxy:
    """One running HAProxy, reached through `path`. One connection a command: the API closes after each."""

    def __init__(self, path: str, timeout_s: float = 5.0) -> None:
        self.path, self.timeout_s = path, timeout_s

    def ask(self, command: str) -> str:
        """The answer to one command. Raises HaproxyError when the socket cannot be used."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
                door.settimeout(self.timeout_s)
                door.connect(self.path)
                door.sendall(command.encode("ascii") + b"\n")
                return _read_all(door).decode("utf-8", "replace").strip()
        except OSError as error:
            raise HaproxyError(_socket_trouble(self.path, error))

    def order(self, command: str) -> None:
        """A command that says nothing when it succeeds. Raises HaproxyError with HAProxy's own words otherwise."""
        said = self.ask(command)
        if "permission denied" in said.lower():
            raise HaproxyError(
                "HAProxy refused `%s` at %s: the socket lacks admin level; write `stats socket %s level admin`"
                % (command, self.path, self.path)
            )
        if said:
            raise HaproxyError("HAProxy refused `%s`: %s" % (command, said.splitlines()[0]))

    def level(self) -> str:
        """What this socket may do: admin | operator | user; "" where HAProxy is too old to say."""
        said = self.ask("show cli level").split()
        return said[0] if said and said[0] in ("admin", "operator", "user") else ""

    def process(self) -> Dict[str, str]:
        """pid and start of the worker that answers: another one means that runtime state may be lost."""
        info = dict(line.partition(": ")[::2] for line in self.ask("show info").splitlines())
        if "Pid" not in info:
            raise HaproxyError("%s does not answer as HAProxy does" % self.path)
        return {"pid": info["Pid"], "start": info.get("Start_time_sec", ""), "version": info.get("Version", "")}

    def servers(self) -> List[Dict[str, Any]]:
        """Every server of every backend, as `_row` describes it."""
        stat = {(row["pxname"], row["svname"]): row for row in _stat_rows(self.ask("show stat"))}
        sticky = set(re.findall(r"(?m)^# table: ([^,\s]+),", self.ask("show table")))
        states = _state_rows(self.ask("show servers state"))
        return [_row(state, stat.get((state["be_name"], state["srv_name"]), {}), sticky) for state in states]

    def set_admin(self, backend: str, server: str, word: str) -> None:
        """`word`: ready | drain | maint."""
        self.order("set server %s/%s state %s" % (backend, server, word))


def _read_all(door: socket.socket) -> bytes:
    parts, size = [], 0
    while size < ANSWER_LIMIT:
        part = door.recv(65536)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _socket_trouble(path: str, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "no permission to use HAProxy's socket %s: use become (-b)" % path
    if error.errno == errno.ENOENT:
        there = _sockets_beside(path)
        hint = "sockets there: %s" % ", ".join(there) if there else "is HAProxy running, with `stats socket` set?"
        return "HAProxy's socket %s does not exist; %s" % (path, hint)
    if error.errno == errno.ECONNREFUSED:
        return "nobody listens on %s: HAProxy is not running" % path
    return "HAProxy's socket %s: %s" % (path, error.strerror or error)


def _sockets_beside(path: str) -> List[str]:
    folder = os.path.dirname(path) or "/"
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith((".sock", ".stats", ".socket")))[:8]
    except OSError:
        return []


def _stat_rows(text: str) -> List[Dict[str, str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(text.lstrip("# "))))
    except csv.Error as error:
        raise HaproxyError("HAProxy's statistics cannot be read: %s" % error)
    return [{str(key): value or "" for key, value in row.items()} for row in rows if row.get("type") == "2"]


def _state_rows(text: str) -> List[Dict[str, str]]:
    """Rows of `show servers state`: a version line, a header that begins with #, then one line a server."""
    lines = text.splitlines()
    header = next((line[1:].split() for line in lines if line.startswith("#")), [])
    rows = [line.split() for line in lines if line and not line.startswith("#") and len(line.split()) > 1]
    return [
        {key: row[i] for i, key in enumerate(header) if i < len(row)} for row in rows if len(row) >= len(header) - 1
    ]


def _row(state: Dict[str, str], stat: Dict[str, str], sticky: "set[str]") -> Dict[str, Any]:
    """One server as plain data. `sessions` are streams of the answering worker that are open or queued for it."""
    bits = int(state["srv_admin_state"])
    words = (stat.get("check_status", "").lstrip("* "), stat.get("check_code", ""), stat.get("last_chk", ""))
    return {
        "backend": state["be_name"],
        "server": state["srv_name"],
        "address": state.get("srv_addr", ""),
        "port": int(state.get("srv_port") or 0),
        "admin_bits": bits,
        "admin": admin_word(bits),
        "up": int(state["srv_op_state"]) in RUNNING_STATES,
        "status": stat.get("status", ""),
        "weight": int(state["srv_uweight"]),
        "checked": bool(int(state.get("srv_check_state") or 0) & CHECK_ENABLED),
        "check": " ".join(word for word in words if word),
        "sessions": int(stat.get("scur") or 0) + int(stat.get("qcur") or 0),
        "persistent": bool(stat.get("cookie")) or state["be_name"] in sticky,
    }


def admin_word(bits: int) -> str:
    if bits & (FORCED_MAINT | CONFIG_MAINT):
        return "maint"
    return "drain" if bits & FORCED_DRAIN else "ready"


def serves(row: Dict[str, Any]) -> bool:
    """Whether new requests really reach this server: no administrative state, checks passed, a weight."""
    return row["admin_bits"] == 0 and row["up"] and row["weight"] > 0


# --------------------------------------------------------------------------------------- workers of before a reload


def carried_by_old_workers(current_pid: int, servers: List[Tuple[str, int]], proc: str = "/proc") -> Dict[int, int]:
    """{pid: established connections to `servers`} of the workers that a reload left behind.

    A reload moves the listening sockets only: the new worker counts no session for a stream that an old one carries.
    """
    held = ((pid, len(connections.held_by(pid, servers, proc))) for pid in _siblings(proc, current_pid))
    return {pid: count for pid, count in held if count}


def _siblings(proc: str, pid: int) -> Iterator[int]:
    """Other processes of the same program under the same parent."""
    name, parent = connections.identity(pid, proc)
    if not name:
        return
    for other in connections.children(int(parent), proc):
        if other != pid and connections.identity(other, proc)[0] == name:
            yield other
