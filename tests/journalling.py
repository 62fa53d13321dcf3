"""Fixtures of the journal's tests: an empty home, an open journal, a written one; and ways to harm it."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuchange.errors import JournalError
from gpuchange.journal import FILE, Journal
from gpuchange.states import Event, Kind

META = {"change": "c1", "hosts": ["gpu1", "gpu2"]}
COLUMNS = ("at", "kind", "host", "phase", "provider", "direction", "attempt", "data", "body", "hash")


def event(number: int = 1, kind: Kind = Kind.STARTED, **more: Any) -> Event:
    return Event(kind, f"gpu{number}", "stack", "apt", "do", f"a{number}", **more)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is to be had: these tests commit by the thousand, and no power is cut in them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as directory:
        yield Path(directory) / "change"


@pytest.fixture
def journal(home: Path) -> Iterator[Journal]:
    with Journal.create(home, META) as made:
        yield made


@pytest.fixture
def written(home: Path) -> Path:
    """A journal of six events, two of them with a body, closed."""
    with Journal.create(home, META) as made:
        made.append([event(1, data={"x": 1}), event(2)])
        made.append([(event(1, Kind.ACCEPTED), {"state": "done", "lines": ["a", "b"]})])
        made.append([(event(2, Kind.ACCEPTED), {"state": "done"}), event(3), event(4)])
    return home


def altered(home: Path, *statements: str) -> None:
    """Edit the file behind the journal's back."""
    with sqlite3.connect(home / FILE) as database:
        database.execute("DROP TRIGGER events_stay")
        database.execute("DROP TRIGGER events_last")
        for statement in statements:
            database.execute(statement)
    database.close()


def fault(home: Path, anchor: tuple[int, str] | None = None) -> str:
    with Journal.open(home, readonly=True) as opened, pytest.raises(JournalError) as caught:
        opened.verify(anchor)
    return str(caught.value)
