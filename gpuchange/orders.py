"""What an operator orders of a change: rollback, resolve (nobody has it open); pause (somebody has); confirm (both)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from gpuchange import confirming
from gpuchange.change import Change
from gpuchange.errors import LockedError, NeedsOperator, UsageError
from gpuchange.fold import Ask
from gpuchange.planner import HostState, StepKey
from gpuchange.states import Event, Kind, Status


def order(home: Path, entries: Sequence[Event]) -> None:
    """Append an operator's orders to a change that no controller has open. Raises LockedError, IllegalTransition."""
    change = Change.open(home)
    try:
        for event in entries:
            change.fold(event)  # refuse what the table does not list before it is written
        change.journal.append(list(entries))
    finally:
        change.journal.close()


def rollback(home: Path, hosts: Sequence[str] | None, why: str = "ordered by the operator") -> list[str]:
    """Order the hosts that did something (all, or the named ones) back; run the engine afterwards. Returns them.

    Those that did nothing yet are left as they are: a run that takes a change back must not begin with others.
    """
    change = Change.open(home, readonly=True)
    try:
        open_ones = [standing for host in hosts or change.hosts if not (standing := change.state.hosts[host]).turned]
    finally:
        change.journal.close()
    touched = [host.name for host in open_ones if host.touched]
    idle = [host.name for host in open_ones if not (host.touched or host.done or host.left)]
    left = {"why": "not begun when the change was taken back"}
    order(
        home,
        [Event(Kind.LEFT, host=host, data=left) for host in idle]
        + [Event(Kind.TURNED, host=host, data={"why": why, "ordered": True}) for host in touched],
    )
    return touched


def resolve(home: Path, host: str, answer: str) -> None:
    """An operator's answer for a held host: retry, done, undo or leave. Raises NeedsOperator when nothing is held."""
    change = Change.open(home, readonly=True)
    try:
        event = _resolution(change, host, answer)
    finally:
        change.journal.close()
    order(home, [event])


def _resolution(change: Change, host: str, answer: str) -> Event:
    if host not in change.state.hosts:
        raise UsageError(f"{host} is not a host of {change.id}", remedy=f"its hosts: {', '.join(change.hosts)}")
    if answer == "leave":
        return Event(Kind.LEFT, host=host, data={"why": "left by the operator"})
    if answer == "undo":
        return Event(Kind.TURNED, host=host, data={"why": "ordered by the operator"})
    kind = Kind.RETRY if answer == "retry" else Kind.MARKED
    asked = asking(change.state.hosts[host])
    if asked is None:
        raise NeedsOperator(f"{host} is not held in {change.id}", remedy=f"see: gpuchange status {change.id}")
    (phase, provider), direction = asked
    return Event(kind, host, phase, provider, direction, data={"why": "by the operator"})


def asking(host: HostState) -> tuple[StepKey, str] | None:
    """The step and direction that a host is stuck at. An older failure is no question: going back has answered it."""
    key = host.frontier
    if key is None or not (host.stance.ask in (Ask.OPERATOR, Ask.TURN) or host.left):
        return None
    status = host.steps[key].status
    directions = {Status.HELD: "do", Status.FAILED: "do", Status.UNDO_HELD: "undo", Status.UNDO_FAILED: "undo"}
    return (key, directions[status]) if status in directions else None


def confirm(home: Path, host: str, by: str) -> Path | None:
    """Confirm that what `host` asks for was done by hand. None when it stands in the journal; when a controller has
    that open, the note that it will take. Raises NeedsOperator when nothing is asked for.
    """
    change = Change.open(home, readonly=True)
    try:
        asked = change.hands.of(host)
    finally:
        change.journal.close()
    if asked is None:
        raise NeedsOperator(
            f"{host} waits for no confirmation",
            why="only what a change has asked for can be confirmed, and only once",
            remedy=f"see: gpuchange status {home.name}",
        )
    note = confirming.confirmation(*asked, by)
    try:
        order(home, [note])
    except LockedError:
        return confirming.leave(home, note)
    return None


def pause(home: Path) -> None:
    """Tell the running controller, from elsewhere, to start nothing new."""
    (home / "pause").write_text(json.dumps({"pid": os.getpid()}))
