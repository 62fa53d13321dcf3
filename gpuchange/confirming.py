"""Steps that wait for a pair of hands: what they asked for, what they remember while they wait, who confirmed.

A step asks with `Verdict.again(..., asks=...)`. The answer is a note in the journal. While a controller has the journal
open nobody else may write it, so `gpuchange confirm` then leaves the note in `<change>/orders/`, from where the
controller takes it; what lies there when no controller runs is taken by the next one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gpuchange.states import Event, Kind

StepRun = tuple[str, str, str, str]
"""(host, phase, provider, direction)"""

INBOX = "orders"
_GOES_ON = frozenset({Kind.STARTED, Kind.PROBING, Kind.LOST})
"""What happens to a step that still waits for the same answer: it is looked at, or could not be."""


class Question(NamedTuple):
    """What a step asks an operator to do, line by line; `seq` is the event that asked first."""

    seq: int
    lines: tuple[str, ...]


@dataclass
class Confirmations:
    """Folded from a change's events in their order."""

    asked: dict[StepRun, Question] = field(default_factory=dict)
    confirmed: set[StepRun] = field(default_factory=set)
    memos: dict[StepRun, Mapping[str, Any]] = field(default_factory=dict)

    def fold(self, event: Event) -> None:
        run = run_of(event)
        if event.kind is Kind.NOTE:
            self._note(run, event)
        elif event.kind is Kind.AGAIN:
            self._again(run, event)
        elif event.kind is Kind.TURNED:
            self._forget(event.host)
        elif event.phase and event.kind not in _GOES_ON:
            self.asked.pop(run, None)

    def _note(self, run: StepRun, event: Event) -> None:
        if event.data.get("confirmed"):
            self.confirmed.add(run)
            self.asked.pop(run, None)

    def _again(self, run: StepRun, event: Event) -> None:
        if "memo" in event.data:
            self.memos[run] = dict(event.data["memo"])
        lines = tuple(str(line) for line in event.data.get("asks", ()))
        if lines:
            before = self.asked.get(run)
            self.asked[run] = Question(before.seq if before else event.seq, lines)
        else:
            self.asked.pop(run, None)

    def _forget(self, host: str) -> None:
        for run in [run for run in self.asked if run[0] == host]:
            del self.asked[run]

    def of(self, host: str) -> tuple[StepRun, Question] | None:
        """What `host` asks for now; None when it asks for nothing."""
        return next(((run, question) for run, question in self.asked.items() if run[0] == host), None)

    def fits(self, event: Event) -> bool:
        """Whether `event` answers the question that stands now: not an older one, and not twice."""
        question = self.asked.get(run_of(event))
        return question is not None and question.seq == event.data.get("answers")


def run_of(event: Event) -> StepRun:
    return event.host, event.phase, event.provider, event.direction


def confirmation(run: StepRun, question: Question, by: str) -> Event:
    """The note that answers `question`. `by` says who confirmed, for people."""
    host, phase, provider, direction = run
    return Event(Kind.NOTE, host, phase, provider, direction, data={"confirmed": by, "answers": question.seq})


def leave(home: Path, note: Event) -> Path:
    """Leave a note for the controller that has the change open. Whole or not at all; one file a note."""
    inbox = home / INBOX
    inbox.mkdir(mode=0o700, exist_ok=True)
    fields = {key: getattr(note, key) for key in ("host", "phase", "provider", "direction", "data")}
    descriptor, draft = tempfile.mkstemp(dir=inbox, prefix=".")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    target = Path(draft).with_name(Path(draft).name.lstrip(".") + ".json")
    os.replace(draft, target)
    return target


def left(home: Path) -> Iterator[tuple[Path, Event | None]]:
    """The notes that lie in the inbox, oldest first; None for a file that is no such note."""
    inbox = home / INBOX
    paths = sorted(inbox.glob("[!.]*.json"), key=lambda path: path.stat().st_mtime_ns) if inbox.is_dir() else []
    for path in paths:
        yield path, _read(path)


def _read(path: Path) -> Event | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        host, phase, provider, direction = (str(fields[key]) for key in ("host", "phase", "provider", "direction"))
        return Event(Kind.NOTE, host, phase, provider, direction, data=dict(fields["data"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
