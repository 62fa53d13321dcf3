"""Changes made by writing their journals, for tests of all that only reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuchange.journal import Journal
from gpuchange.states import Event, Kind

STEPS = [
    ("preflight", "host"),
    ("record", "host"),
    ("drain", "haproxy"),
    ("seal", "host"),
    ("stack", "apt"),
    ("verify", "host"),
    ("release", "haproxy"),
    ("watch", "host"),
]
CREATED = Event(Kind.CREATED, data={"hosts": ["gpu1", "gpu2"], "plan": "cuda-12-8"})
CONTROLLER = Event(Kind.CONTROLLER, data={"id": "c", "fence": 1, "pid": 1, "boot": "b"})


def make(
    root: Path, name: str, events: Sequence[Any], hosts: Sequence[str] = ("gpu1", "gpu2"), *, steps: Any = ()
) -> Path:
    """A change called `name` whose journal holds `events` (or (event, report body) pairs); `steps`: further ones."""
    directory = root / name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    meta = {
        "change": name,
        "version": "0.1.0",
        "report_schema": 1,
        "table": [list(step) for step in (*STEPS, *steps)],
        "hosts": list(hosts),
        "inventory": [],
        "playbooks": "",
    }
    with Journal.create(directory / "journal.db", meta) as journal:
        for event in events:
            journal.append([event])  # one transaction each, so that each has its own time
    return directory


def done(host: str, *steps: tuple[str, str], direction: str = "do") -> list[Event]:
    """Intent and acceptance of each step."""
    return [
        Event(kind, host, phase, provider, direction, attempt="1")
        for phase, provider in steps
        for kind in (Kind.STARTED, Kind.ACCEPTED)
    ]


def whole(host: str) -> list[Event]:
    return done(host, *STEPS)


def ended(code: int) -> Event:
    return Event(Kind.ENDED, data={"code": code})
