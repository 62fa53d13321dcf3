"""Balancers as they are reported: what a server's state means, and the sentences about drain and release. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Admin = Literal["ready", "drain", "maint", "down"]

OUT_WORDS = {"drain": "drained", "maint": "in maintenance", "down": "marked down"}


class _Data(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Server(_Data):
    """One server of one backend. `sessions` counts open and queued streams; `check` is the last check's own words."""

    backend: str
    server: str
    address: str = ""
    port: int = 0
    admin: Admin
    admin_bits: int = 0
    up: bool
    status: str = ""
    weight: int
    check: str = ""
    sessions: int = 0
    persistent: bool = False

    @property
    def serves(self) -> bool:
        return self.admin_bits == 0 and self.up and self.weight > 0

    @property
    def name(self) -> str:
        return f"{self.backend}/{self.server}"


class Member(_Data):
    """Any server of a backend concerned."""

    backend: str
    server: str
    admin: Admin
    weight: int = 0


class Reload(_Data):
    """What a reload does to others: connections to other servers, their time limit, edited files that it brings in."""

    others: int = 0
    limit: str = ""
    not_loaded: tuple[str, ...] = ()


class Part(_Data):
    """What one balancer reports of one server, over all backends concerned. `found`: as it was before the drain."""

    state: str
    why: str = ""
    balancer: str = ""
    servers: tuple[Server, ...] = ()
    members: tuple[Member, ...] = ()
    found: dict[str, Server] = Field(default_factory=dict)
    others_serving: dict[str, int] = Field(default_factory=dict)
    sessions: int = 0
    old_workers: dict[str, int] = Field(default_factory=dict)
    waited_s: float = 0.0
    cut: int = 0
    short: str = ""
    level: str = ""
    reload: Reload | None = None
    foreign: dict[str, Any] = Field(default_factory=dict)

    def says(self, text: str) -> str:
        return f"{self.balancer}: {text}" if self.balancer else text


def unfinished(parts: Iterable[Part]) -> str:
    """Why those parts that are not done are not."""
    return "; ".join(part.why for part in parts if part.state != "done" and part.why)


def objections(part: Part, min_serving: int = 0) -> tuple[str, ...]:
    """What would make a drain fail for certain, known before anything is changed.

    A member that is drained now may be another change's and come back: it could serve by the time it counts.
    """
    found = []
    if part.short and any(_could_serve(part, server) < min_serving for server in part.servers):
        found.append(part.says(f"{part.short}: bring up others first, or write min_serving: 0 to go without"))
    if part.level not in ("", "admin"):
        found.append(part.says(f"the socket has level {part.level}; write `stats socket ... level admin`"))
    if part.foreign:
        by = part.foreign
        found.append(part.says(f"{_names(part)} belongs to change {by.get('change')} since {by.get('since', '?')}"))
    return tuple(found)


def _could_serve(part: Part, mine: Server) -> int:
    others = (row for row in part.members if row.backend == mine.backend and row.server != mine.server)
    return part.others_serving.get(mine.backend, 0) + sum(row.admin == "drain" and row.weight > 0 for row in others)


def _names(part: Part) -> str:
    return ", ".join(dict.fromkeys(server.server for server in part.servers)) or "the server"


def before_drain(part: Part) -> tuple[str, ...]:
    """What a preview says: state and sessions now, who else serves, what would stand against the drain."""
    lines = [_standing(server, part.others_serving.get(server.backend, 0)) for server in part.servers]
    lines += [f"would not be drained now: {part.short}"] if part.short else []
    lines += _reloading(part.reload) if part.reload else []
    return tuple(map(part.says, lines))


def _reloading(seen: Reload) -> list[str]:
    """Whom a reload concerns besides our server."""
    count = f"{seen.others} connection" + ("" if seen.others == 1 else "s")
    if not seen.others:
        lines = ["the drain needs a reload; nothing else is open now"]
    elif seen.limit:
        lines = [f"the drain needs a reload; {count} on other servers may be cut after {seen.limit}"]
    else:
        lines = [f"the drain needs a reload; {count} on other servers keep an old worker until they end"]
    return lines + [f"the reload also brings in {file}, edited since the last one" for file in seen.not_loaded]


def _standing(server: Server, others: int) -> str:
    found = "" if server.admin == "ready" else f", already {OUT_WORDS[server.admin]}: stays so"
    sessions = f"{server.sessions} session" + ("" if server.sessions == 1 else "s")
    return f"{server.name} is {server.status}, {sessions} open, {others} other server(s) serve{found}"


def drained(part: Part) -> tuple[str, ...]:
    """What is said once the server is out."""
    end = f"{part.cut} session(s) cut" if part.cut else "no session left"
    lines = [part.says(f"{server.name} {OUT_WORDS.get(server.admin, server.admin)}, {end}") for server in part.servers]
    kept = [part.says(f"{row.name} was {OUT_WORDS[row.admin]} before this change") for row in _out(part)]
    return tuple(lines + kept)


def released(part: Part) -> tuple[str, ...]:
    """What is said once the state found is restored; differences that are not ours are named."""
    return tuple(
        part.says(line) for server in part.servers for line in _restored(server, part.found.get(server.backend))
    )


def _restored(now: Server, found: Server | None) -> Iterable[str]:
    if found is None:
        yield f"{now.name} was never taken out by this change"
        return
    if found.admin != "ready":
        yield f"{now.name} was {OUT_WORDS[found.admin]} before this change: left so"
    elif not now.serves:
        yield f"{now.name} is as found and does not serve: {now.status}, weight {now.weight}"
    else:
        yield f"{now.name} serves again ({now.status}, weight {now.weight})"
    yield from (f"{now.name}: {line}" for line in differences(found, now))


def _out(part: Part) -> list[Server]:
    return [row for row in part.found.values() if row.admin != "ready"]


def differences(found: Server, now: Server) -> tuple[str, ...]:
    """What of a server's lasting state is not as it was found; empty when all is."""
    fields = ("admin", "weight", "address", "port")
    pairs = ((name, getattr(found, name), getattr(now, name)) for name in fields)
    return tuple(f"{name} was {before}, is {after}" for name, before, after in pairs if before != after)
