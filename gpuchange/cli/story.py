"""Events and standings as sentences: one place for live progress, show, status and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuchange.cli import again
from gpuchange.cli.words import clean, duration
from gpuchange.fold import Ask
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
    (Kind.LOST, "do"): "no answer, state unknown",
    (Kind.LOST, "undo"): "no answer, state unknown (going back)",
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

_TOLD = frozenset({Kind.NOTE, Kind.CREATED})
"""Kinds without a reason of their own: their data is told."""

_NOTES = {
    "plan": "plan {}",
    "agreed": "the preview was agreed to",
    "unmarked": "its owner marker was given back",
    "flags": "reached with {}",
    "host_key_accepted": "its host key {} was accepted as a new one",
    "machine_id": "its machine-id is {}",
    "confirmed": "{} confirmed that it was done by hand",
}
_UNTOLD = frozenset({"answers"})  # which question a confirmation answers, by number

QUIET = frozenset({Kind.STARTED, Kind.PROBING, Kind.CREATED, Kind.CONTROLLER, Kind.NOTE, Kind.ENDED})
"""Kinds that a live log leaves out: the outcome says it again."""


BEGINS = frozenset({Kind.STARTED, Kind.PROBING})
"""Kinds that say nothing of what a step waits for."""

GOES_ON = frozenset({Kind.STARTED, Kind.PROBING, Kind.AGAIN, Kind.LOST})
"""Kinds after which the step is still to end."""


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
    said = event.data.get("why") or event.data.get("text")
    return str(said or (", ".join(_told(event.data)) if event.kind in _TOLD else ""))


def _told(data: Mapping[str, Any]) -> Iterator[str]:
    for key, value in data.items():
        if key not in _UNTOLD:
            yield _NOTES.get(key, f"{key.replace('_', ' ')}: {{}}").format(value)


_OUTCOME = {
    0: "done",
    1: "failed before any change",
    3: "rolled back",
    4: "unreachable",
    5: "needs operator",
    6: "rollback failed",
}

STOPPED, CUT_SHORT, ANSWERED = "stopped before its end", "cut short", "answered, to be resumed"
GOES_ON_BY_RESUME = frozenset({STOPPED, CUT_SHORT, ANSWERED})
_ORDERS = frozenset({Kind.RETRY, Kind.MARKED, Kind.TURNED, Kind.LEFT})


def outcome(events: Sequence[Event], state: State, alive: bool) -> str:
    """Where the whole change stands. `alive`: a controller has it in hand now."""
    last = next((event for event in reversed(events) if event.kind in (Kind.CONTROLLER, Kind.ENDED)), None)
    if alive:
        return "under way"
    if last is None:
        return "not begun"
    if last.kind is Kind.CONTROLLER:
        return CUT_SHORT
    if all(host.left for host in state.hosts.values()):
        return "left as it stands"
    if any(event.kind in _ORDERS and event.seq > last.seq for event in events):
        return ANSWERED
    return ended(int(last.data.get("code", 0)), state)


def ended(code: int, state: State) -> str:
    """What a controller that stopped with `code` left behind."""
    if code == 5 and not any(host.held or host.failed for host in state.hosts.values()):
        return STOPPED
    if code == 0 and any(host.rolled_back for host in state.hosts.values()):
        return "rolled back as ordered"
    return _OUTCOME.get(code, f"exit {code}")


_UNDER_WAY = {"working": "stopped", "waiting": "stopped", "going back": "stopped going back"}


def standing(host: HostState, alive: bool = True) -> tuple[str, str]:
    """(where the host stands, at which step): ("done", ""), ("going back", "stack/apt"), ("held", "verify/host").

    Without a controller that is `alive` nobody is at work on it: it has stopped there.
    """
    at = "/".join(host.frontier or ())
    settled = (
        (host.left, "left as it stands"),
        (host.as_wanted and not host.touched, "as wanted"),
        (host.done, "done"),
        (host.rolled_back, "rolled back"),
    )
    word = next((word for true, word in settled if true), "")
    if word:
        return word, at if host.left else ""
    moving = _moving(host)
    return moving if alive else _UNDER_WAY.get(moving, moving), at


def _moving(host: HostState) -> str:
    status = host.steps[host.frontier].status if host.frontier else Status.DONE
    words = (
        (status is Status.UNDO_FAILED, "rollback failed"),
        (host.held, "held"),
        (bool(host.turned), "going back"),
        (host.failed, "failed"),
        (status is Status.WAITING, "waiting"),
        (host.stance.ask is Ask.SLOT, "in service"),
        (_begun(host), "working"),
    )
    return next((word for true, word in words if true), "not begun")


def _begun(host: HostState) -> bool:
    return any(step.status is not Status.PENDING for step in host.steps.values())


def confirm(change: str, host: str) -> str:
    """The command that confirms what a step asked for."""
    return again.command("confirm", change, clean(host))


def asked(event: Event) -> list[str]:
    """What the event asks an operator to do by hand, and the command that confirms it; [] when it asks for nothing."""
    lines = [f"  {clean(line)}" for line in event.data.get("asks", ())]
    return [*lines, f"  next: {confirm(event.attempt.partition('/')[0], event.host)}"] if lines else []


def needs_answer(host: HostState) -> bool:
    """Whether only `gpuchange resolve` moves this host on: held, or failed under a plan that says `hold`."""
    failed = host.stance.ask is Ask.TURN and host.touched > 0 and not host.turned
    return not host.left and (failed or standing(host)[0] in ("held", "rollback failed"))
