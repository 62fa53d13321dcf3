"""What a reliability test tells of itself: what was promised, how often it was tried, what broke."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FULL = "full"
SHORT = "short"
ROOT = Path(__file__).parents[2]
TRIED = ROOT / ".tried"


@dataclass(frozen=True)
class Row:
    """A line of docs/reliability.md: `promise` in words for operators, what the best peer does, where it says so."""

    promise: str
    peer: str = "no figure known"
    source: str = ""


@dataclass(frozen=True)
class Effort:
    """How much to try: all of it (make reliability), or a seeded short form (make test)."""

    full: bool
    seed: int

    def of(self, full: int, short: int) -> int:
        return full if self.full else short


@dataclass
class Figures:
    """`tried`: cases; `broken`: a sentence for each that broke its promise; `counts`: further figures by name."""

    tried: int = 0
    broken: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    def count(self, **more: float) -> None:
        """Add to figures by name."""
        for name, number in more.items():
            self.counts[name] = self.counts.get(name, 0) + number


@dataclass(frozen=True)
class Result:
    """One test's figures as stored; `seconds` wall."""

    module: str
    test: str
    row: Row
    effort: str
    seed: int
    commit: str
    seconds: float
    tried: int
    broken: list[str]
    counts: dict[str, float]

    def store(self, directory: Path) -> None:
        """Write atomically to `directory`/<module>/<test>.json."""
        path = directory / self.module / f"{self.test.replace('/', '-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")
        new.replace(path)


def load(path: Path) -> Result:
    data = json.loads(path.read_text())
    return Result(**{**data, "row": Row(**data["row"])})


def commit() -> str:
    """The last commit that touched more than the documents, with "+" when the tree differs from it."""
    touched = _git("log", "-1", "--format=%h", "--", ".", ":!docs")
    return (touched or "unknown") + ("+" if _git("status", "--porcelain", "--", ".", ":!docs") else "")


def tried_once(key: str, make: Callable[[], dict[str, Any]], root: Path = TRIED) -> dict[str, Any]:
    """What `make` found of one part of a long trial (JSON data); kept for this commit, so that a trial can go on.

    A part that found something broken is not kept, nor is anything of a tree that differs from its commit.
    """
    at = commit()
    path = root / at / f"{key.replace('/', '-')}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    found = make()
    if not at.endswith("+") and not found["broken"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(path)
    return found


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)
