"""Events and standings as sentences: one place for live progress, show, status and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuchange.cli.words import clean, duration
from gpuchange.states import Event, Kind, Status

if TYPE_CHECKING:
    from gpuchange.planner import HostState, State

_SAID: dict[tuple[Kind, str], str] = {
    (Kind.STARTED, "do"): "starts",
    (Kind.STARTED, "undo"): "is being taken back",
    (Kind.PROBING, "do"): "looking whether it was done",
    (Kind.PROBING, "undo"): "looking whether it was taken back",
    (Kind.ACCEPTED, "do"): "done",
    (Kind.ACCEPTED, "undo"): "taken back",
    (Kind.REJECTED, "do"): "failed",
    (Kind.REJECTED, "undo"): "could not be taken back",
    (Kind.AGAIN, "do"): "waiting",
    (Kind.AGAIN, "undo"): "waiting (going back)",
    (Kind.NOT_DONE, "do"): "was not done",
    (Kind.NOT_DONE, "undo"): "was not taken back",
    (Kind.LOST, "do"): "no answer",
    (Kind.LOST, "undo"): "no answer (going back)",
    (Kind.HELD, "do"): "held",
    (Kind.HELD, "undo"): "held (going back)",
    (Kind.RETRY, "do"): "an operator said: try again",
    (Kind.RETRY, "undo"): "an operator said: try again (going back)",
    (Kind.MARKED, "do"): "an operator said: it is done",
    (Kind.MARKED, "undo"): "an operator said: it is taken back",
    (Kind.TURNED, ""): "goes back",
    (Kind.LEFT, ""): "left as it stands",
    (Kind.CREATED, ""): "change created",
    (Kind.CONTROLLER, ""): "controller takes over",
    (Kind.NOTE, ""): "note",
    (Kind.ENDED, ""): "controller stops",
}

QUIET = frozenset({Kind.STARTED, Kind.PROBING, Kind.CREATED, Kind.CONTROLLER, Kind.NOTE})
"""Kinds that a live log leaves out: the outcome says it again."""


def subject(event: Event) -> str:
    """Who the event is about: `gpu1 drain/haproxy`, `gpu1`, or nothing for the whole change."""
    step = f"{event.phase}/{event.provider}" if event.phase else ""
    return clean(" ".join(part for part in (event.host, step) if part))


def sentence(event: Event, took: float | None = None) -> str:
    """The event as a sentence, with its reason and, if known, how long the step took (seconds)."""
    said = _SAID.get((event.kind, event.direction)) or _SAID.get((event.kind, ""), event.kind.value)
    why = clean(_reason(event))
    timing = f" ({duration(took)})" if took is not None else ""
    return " ".join(part for part in (subject(event), said) if part) + timing + (f": {why}" if why else "")


def _reason(event: Event) -> str:
    if event.kind is Kind.ENDED:
        return f"exit {event.data.get('code', '?')}"
    if event.kind is Kind.CREATED:
        return f"{len(event.data.get('hosts', ()))} host(s)"
    return str(event.data.get("why") or event.data.get("text") or "")


_OUTCOME = {
    0: "done",
    1: "failed before any change",
    3: "rolled back",
    4: "unreachable",
    5: "needs operator",
    6: "rollback failed",
}

_WORKING = {
    Status.WAITING: "waiting",
    Status.UNSURE: "to be looked at",
    Status.FAILED: "failed",
    Status.HELD: "held",
    Status.UNDO_FAILED: "rollback failed",
    Status.UNDO_HELD: "held",
}


def outcome(state: State, code: int) -> str:
    """Where the whole change stands, in the words of the exit codes."""
    hosts = state.hosts.values()
    if code in (5, 6) or all(host.finished for host in hosts):
        return _OUTCOME.get(code, f"exit {code}")
    if code in (1, 4) and not any(host.touched for host in hosts):
        return _OUTCOME[code]
    return "under way" if any(_begun(host) for host in hosts) else "not begun"


def standing(host: HostState) -> tuple[str, str]:
    """(where the host stands, at which step): ("done", ""), ("going back", "stack/apt"), ("held", "verify/host")."""
    key = host.frontier
    at = "/".join(key) if key else ""
    if host.left:
        return "left as it stands", at
    if host.as_wanted:
        return "as wanted", ""
    if key is None or (host.finished and not (host.held or host.failed)):
        return ("rolled back" if host.turned else "done"), ""
    word = _WORKING.get(host.steps[key].status)
    if word and word != "waiting":
        return word, at
    if host.turned:
        return "going back", at
    return (word or ("working" if _begun(host) else "not begun")), at


def _begun(host: HostState) -> bool:
    return any(step.status is not Status.PENDING for step in host.steps.values())


def needs_answer(host: HostState) -> bool:
    """Whether only `gpuchange resolve` moves this host on."""
    return not host.left and standing(host)[0] in ("held", "rollback failed")
