"""Taking one server out of HAProxy and putting it back as it was found: what is decided, and the notes that it needs.

Notes live in `<change>/haproxy-<server>.json` on the balancer: {process, servers: {backend: {found, left}}, clocks,
rechecked, released}. They are written before the first action, so a half-done drain knows what it found.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from ansible.module_utils.gpuchange_draining import NAME
from ansible.module_utils.gpuchange_haproxy_api import Haproxy, HaproxyError, carried_by_old_workers, serves
from ansible.module_utils.gpuchange_notes import Notes

MEMBERS_SHOWN = 64


def check_names(backends: List[str]) -> None:
    """Names travel inside commands of a line protocol: anything else is refused. Raises HaproxyError."""
    for name in backends:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise HaproxyError("%r cannot be the name of a HAProxy backend" % (name,))


def pick(rows: List[Dict[str, Any]], backends: List[str], server: str) -> List[Dict[str, Any]]:
    """The rows of `server` in `backends` (in every backend that has it, if none is named); else says what there is."""
    known = sorted({row["backend"] for row in rows})
    for backend in backends:
        if backend not in known:
            raise HaproxyError("HAProxy has no backend %s; it has %s" % (backend, ", ".join(known) or "none"))
        names = sorted(row["server"] for row in rows if row["backend"] == backend)
        if server not in names:
            raise HaproxyError(
                "backend %s has no server %s; it has %s (another name: drain[].servers)"
                % (backend, server, ", ".join(names) or "none")
            )
    found = [row for row in rows if row["server"] == server and (not backends or row["backend"] in backends)]
    if not found:
        raise HaproxyError("no backend has a server %s; backends: %s" % (server, ", ".join(known) or "none"))
    return found


def others_serving(rows: List[Dict[str, Any]], mine: Dict[str, Any]) -> List[str]:
    """Names of the other servers of the same backend that really serve."""
    return [
        r["server"] for r in rows if r["backend"] == mine["backend"] and r["server"] != mine["server"] and serves(r)
    ]


class Look:
    """What HAProxy says at one moment about our server, and what old workers still carry for it."""

    def __init__(self, haproxy: Haproxy, backends: List[str], server: str) -> None:
        self.process = haproxy.process()
        self.rows = haproxy.servers()
        self.mine = pick(self.rows, backends, server)
        ends = [(row["address"], row["port"]) for row in self.mine]
        self.old = carried_by_old_workers(int(self.process["pid"]), ends)

    @property
    def sessions(self) -> int:
        return sum(row["sessions"] for row in self.mine)

    @property
    def idle(self) -> bool:
        return not self.sessions and not self.old

    def short_of(self, min_serving: int) -> str:
        """Why our server may not leave now: too few others serve. "" when it may, or does not serve anyway."""
        for row in self.mine:
            others = others_serving(self.rows, row)
            if serves(row) and len(others) < min_serving:
                return "backend %s: %d other server%s (%s), at least %d must" % (
                    row["backend"],
                    len(others),
                    " serves" if len(others) == 1 else "s serve",
                    ", ".join(others) or "none",
                    min_serving,
                )
        return ""

    def left(self) -> str:
        """The sessions that are still there, by where they are."""
        parts = ["%d in backend %s" % (row["sessions"], row["backend"]) for row in self.mine if row["sessions"]]
        parts += ["%d in old worker %d (before a reload)" % (count, pid) for pid, count in sorted(self.old.items())]
        return ", ".join(parts) or "0"

    def report(self) -> Dict[str, Any]:
        backends = {row["backend"] for row in self.mine}
        members = [row for row in self.rows if row["backend"] in backends]
        return {
            "version": self.process["version"],
            "servers": self.mine,
            "members": [dict(member_of(row)) for row in members[:MEMBERS_SHOWN]],
            "others_serving": {row["backend"]: len(others_serving(self.rows, row)) for row in self.mine},
            "sessions": self.sessions,
            "old_workers": {str(pid): count for pid, count in self.old.items()},
        }


def member_of(row: Dict[str, Any]) -> Dict[str, Any]:
    return {key: row[key] for key in ("backend", "server", "status", "admin", "weight", "sessions")}


class ServerNotes(Notes):
    """The notes of one server on this balancer."""

    def begin_with(self, look: Look) -> None:
        servers = {row["backend"]: {"found": row, "left": row["admin"]} for row in look.mine}
        self.begin(process=look.process, servers=servers, rechecked=False)

    def found(self, backend: str) -> Optional[Dict[str, Any]]:
        return (self.data.get("servers") or {}).get(backend, {}).get("found")

    def left(self, backend: str) -> str:
        return str((self.data.get("servers") or {}).get(backend, {}).get("left", ""))

    def set_left(self, backend: str, word: str) -> None:
        self.data["servers"][backend]["left"] = word
        self.save()
