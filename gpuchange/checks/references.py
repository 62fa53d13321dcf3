"""Configuration that names cards by UUID, and which of those names mean no card any more. Pure.

CUDA accepts a UUID cut short (`CUDA_VISIBLE_DEVICES=GPU-8932f9`), so a name means each card whose UUID begins with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

SHOWN = 20


class Reference(NamedTuple):
    """One place that names a card."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} named in {self.file}:{self.line}"


def parse(found: Any) -> tuple[Reference, ...]:
    """The rows {name, file, line} of a report. Never raises: a row that cannot be read is left out."""
    rows = found if isinstance(found, Sequence) and not isinstance(found, str) else ()
    read = (_row(row) for row in rows)
    return tuple(sorted({row for row in read if row}))


def _row(row: Any) -> Reference | None:
    try:
        return Reference(str(row["name"]), str(row["file"]), int(row["line"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def means(name: str, uuid: str | None) -> bool:
    return bool(uuid) and str(uuid).lower().startswith(name.lower())


def to_cards(references: Iterable[Reference], uuids: Collection[str]) -> tuple[Reference, ...]:
    """The references that mean one of these cards."""
    return tuple(each for each in references if any(means(each.name, uuid) for uuid in uuids))


def stale(references: Iterable[Reference], present: Collection[str]) -> tuple[Reference, ...]:
    """The references that mean no card that is there."""
    return tuple(each for each in references if not any(means(each.name, uuid) for uuid in present))


def sentences(references: Sequence[Reference], say: str) -> tuple[str, ...]:
    """`say` is put before each place; what is beyond the first SHOWN is counted."""
    lines = [f"{say} {each.file}:{each.line} ({each.name})" for each in references[:SHOWN]]
    more = len(references) - SHOWN
    return (*lines, f"and in {more} more places") if more > 0 else tuple(lines)
