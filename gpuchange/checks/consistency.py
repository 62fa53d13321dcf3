"""Consistency of data before and after a change: checksum lists, checkpoints, locks and half-written files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SHOWN = 5
OUTLIVES_ITS_HOLDER = frozenset({"git lock", "lock of a process", "half-written"})
"""What somebody has to take away once its holder is gone. The kernel frees the other locks with their process."""


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Findings(_Read):
    """`kept` are the first of `count` sentences, `digest` is over all."""

    count: int = 0
    kept: list[str] = []
    digest: str = ""


class Leftover(_Read):
    """`kind`: lock, git lock, lock of a process or half-written. `by`: who holds it."""

    path: str
    kind: str
    held: bool = False
    by: str = ""

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}, {f'held by {self.by}' if self.held else 'nobody holds it'})"


class Leftovers(_Read):
    count: int = 0
    kept: list[Leftover] = []


class Sums(_Read):
    """Counts of one checksum file's lines."""

    file: str
    listed: int = 0
    equal: int = 0


class Data(_Read):
    findings: Findings = Findings()
    sums: list[Sums] = []
    checkpoints: dict[str, int] = Field(default_factory=dict)
    leftovers: Leftovers = Leftovers()


def parse(manifest: Any) -> Data | None:
    """What a manifest's summary says of its data, or None when nothing was looked at or it cannot be read."""
    raw = manifest.get("data") if isinstance(manifest, Mapping) else None
    try:
        return Data.model_validate(raw) if isinstance(raw, Mapping) else None
    except ValidationError:
        return None


def told(data: Data | None) -> tuple[str, ...]:
    """Lines about a host before its change; what is wrong already is named as such."""
    if data is None:
        return ()
    wrong = [f"inconsistent before the change: {line}" for line in _first(data.findings.kept, data.findings.count)]
    left = _first([str(item) for item in data.leftovers.kept], data.leftovers.count)
    return (*_good(data), *wrong, *(f"lies there before the change: {line}" for line in left))


def stopping(data: Data | None, inspect: str) -> str:
    """Why the data as it is before the change stops it, or '': only where the plan says `require`."""
    if inspect != "require" or data is None or not data.findings.count:
        return ""
    return "inconsistent before the change: " + "; ".join(_first(data.findings.kept, data.findings.count))


def judge(before: Data | None, now: Data | None) -> list[tuple[bool, str]]:
    """(good, line) for each finding after the change, held against those from before it."""
    if before is None:
        return []
    if now is None:
        return [(False, "data consistency: not looked at")]
    return [*((True, line) for line in _good(now)), *_findings(before.findings, now.findings), *_left(before, now)]


def _good(data: Data) -> list[str]:
    lines = [f"{each.file}: {each.equal} of {each.listed} as listed" for each in data.sums]
    looked = [f"{count} {kind}" for kind, count in sorted(data.checkpoints.items()) if count]
    return [*lines, *([f"checkpoints looked into: {', '.join(looked)}"] if looked else [])]


def _findings(before: Findings, now: Findings) -> list[tuple[bool, str]]:
    if now.digest == before.digest and now.count == before.count:
        same = _first(now.kept, now.count)
        return [(True, f"inconsistent before the change already: {line}") for line in same]
    known = set(before.kept)
    new = [line for line in now.kept if line not in known]
    lines = [(False, f"inconsistent since the change: {line}") for line in _first(new, len(new))]
    if now.count > len(now.kept) or before.count > len(before.kept):
        said = f"{before.count} inconsistencies before the change, {now.count} now: too many to tell which are new"
        lines.append((False, said))
    old = [line for line in now.kept if line in known]
    return [*lines, *((True, f"inconsistent before the change already: {line}") for line in _first(old, len(old)))]


def _left(before: Data, now: Data) -> list[tuple[bool, str]]:
    """New ones that nobody holds, and those that lost the holder they need, are the change's."""
    known = {item.path: item for item in before.leftovers.kept}
    whole = before.leftovers.count <= len(before.leftovers.kept)
    lines: list[tuple[bool, str]] = []
    for item in now.leftovers.kept:
        was = known.get(item.path)
        if was is None and whole:
            lines.append((item.held, f"{'new' if item.held else 'left behind'} since the change: {item}"))
        elif was and was.held and not item.held:
            ended = f"left behind by {was.by}, which is gone: {item}"
            lines.append((item.kind not in OUTLIVES_ITS_HOLDER, ended))
        else:
            lines.append((True, f"lay there before the change: {item}"))
    bad = [line for line in lines if not line[0]]
    good = [line for line in lines if line[0]]
    return [*bad[: SHOWN * 4], *good[:SHOWN]]


def _first(lines: Sequence[str], count: int) -> list[str]:
    shown = list(lines[:SHOWN])
    return [*shown, f"and {count - len(shown)} more"] if count > len(shown) else shown
