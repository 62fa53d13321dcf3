"""Event, Status, and the one transition table. Status is folded from events, never stored.

A *step* is one (host, phase, provider). Going forward it is done, going back it is undone; each way has the
same shape: an intent, then an outcome; an intent without an outcome is *unsure* and is probed before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpuchange.errors import IllegalTransition


class Kind(StrEnum):
    """What an event says. The first group moves one step, the second one host, the third the whole change."""

    STARTED = "started"  # intent: a play that acts is about to start (data: direction do|undo, attempt)
    PROBING = "probing"  # intent: a play that only looks is about to start
    ACCEPTED = "accepted"  # the verdict on the report: as wanted
    REJECTED = "rejected"  # not as wanted; going forward this turns the host back
    AGAIN = "again"  # not yet; look again later (data: after seconds, waited seconds so far)
    NOT_DONE = "not_done"  # a probe found that the intent never acted
    LOST = "lost"  # no report: unreachable, silent, or the controller died (data: why)
    HELD = "held"  # a human has to decide
    RETRY = "retry"  # an operator: try this step again
    MARKED = "marked"  # an operator: this step is done, believe me

    TURNED = "turned"  # this host goes back from here on (data: why)
    LEFT = "left"  # an operator: leave this host as it stands

    CREATED = "created"  # the change exists (data: hosts, steps, versions)
    CONTROLLER = "controller"  # a controller took the change over (data: id, fence, pid, boot)
    NOTE = "note"  # something worth keeping that moves nothing (hooks, new addresses, host keys, pauses)
    ENDED = "ended"  # the controller stopped with this exit code


class Status(StrEnum):
    """Where one step stands. `undo_*` is the same, going back."""

    PENDING = "pending"  # never touched, or found untouched
    DOING = "doing"  # a play acts
    WAITING = "waiting"  # acted; look again when due
    UNSURE = "unsure"  # acted or not: nobody knows until probed
    LOOKING = "looking"  # a probe runs
    DONE = "done"
    FAILED = "failed"
    HELD = "held"

    UNDOING = "undoing"
    UNDO_WAITING = "undo_waiting"
    UNDO_UNSURE = "undo_unsure"
    UNDO_LOOKING = "undo_looking"
    UNDONE = "undone"
    UNDO_FAILED = "undo_failed"  # the promise of rollback is broken: a human decides
    UNDO_HELD = "undo_held"


@dataclass(frozen=True)
class Event:
    """One journal record. `seq` and `at` (UTC, ISO 8601) are given by the journal when it is appended.

    `data` is small JSON; a report body travels beside it and is found again by its `body` digest (sha256 hex).
    `direction` is "do" or "undo" for step events, "" for the others.
    """

    kind: Kind
    host: str = ""
    phase: str = ""
    provider: str = ""
    direction: str = ""
    attempt: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    body: str = ""
    seq: int = 0
    at: str = ""


_FORWARD: dict[tuple[Status, Kind], Status] = {
    (Status.PENDING, Kind.STARTED): Status.DOING,
    (Status.WAITING, Kind.STARTED): Status.DOING,
    (Status.DOING, Kind.ACCEPTED): Status.DONE,
    (Status.DOING, Kind.REJECTED): Status.FAILED,
    (Status.DOING, Kind.AGAIN): Status.WAITING,
    (Status.DOING, Kind.HELD): Status.HELD,
    (Status.DOING, Kind.LOST): Status.UNSURE,
    (Status.WAITING, Kind.REJECTED): Status.FAILED,  # an operator aborts a wait
    (Status.WAITING, Kind.HELD): Status.HELD,  # waited long enough for an unreachable host
    (Status.UNSURE, Kind.PROBING): Status.LOOKING,
    (Status.UNSURE, Kind.HELD): Status.HELD,
    (Status.LOOKING, Kind.ACCEPTED): Status.DONE,
    (Status.LOOKING, Kind.REJECTED): Status.FAILED,
    (Status.LOOKING, Kind.AGAIN): Status.WAITING,
    (Status.LOOKING, Kind.NOT_DONE): Status.PENDING,
    (Status.LOOKING, Kind.HELD): Status.HELD,
    (Status.LOOKING, Kind.LOST): Status.UNSURE,
    (Status.HELD, Kind.RETRY): Status.UNSURE,  # look first: the world may have moved since
    (Status.FAILED, Kind.RETRY): Status.UNSURE,
    (Status.HELD, Kind.MARKED): Status.DONE,
    (Status.FAILED, Kind.MARKED): Status.DONE,
}

_BACK = {
    Status.DOING: Status.UNDOING,
    Status.WAITING: Status.UNDO_WAITING,
    Status.UNSURE: Status.UNDO_UNSURE,
    Status.LOOKING: Status.UNDO_LOOKING,
    Status.DONE: Status.UNDONE,
    Status.FAILED: Status.UNDO_FAILED,
    Status.HELD: Status.UNDO_HELD,
}

_TURN = (Status.DONE, Status.FAILED, Status.HELD, Status.WAITING)
"""What may be undone. Not what is unsure: its work may still be running, so it is probed first."""

TRANSITIONS: dict[tuple[Status, str, Kind], Status] = (
    {(status, "do", kind): after for (status, kind), after in _FORWARD.items()}
    | {
        (_BACK[status], "undo", kind): _BACK.get(after, Status.UNDO_WAITING)
        for (status, kind), after in _FORWARD.items()
        if status in _BACK
    }
    | {(status, "undo", Kind.STARTED): Status.UNDOING for status in _TURN}
)
"""(status, direction of the event, kind) → status after. Pairs not listed are errors."""


def after(status: Status, event: Event) -> Status:
    """The status after `event`. Raises IllegalTransition for a pair that the table does not list."""
    try:
        return TRANSITIONS[status, event.direction, event.kind]
    except KeyError:
        raise IllegalTransition(
            f"{event.kind} ({event.direction}) does not follow {status}",
            where=f"{event.host} {event.phase}/{event.provider}, event {event.seq}",
            remedy="the journal was written by another version or was edited: run gpuchange audit verify",
        ) from None
