"""A bundle applies once: which change began from it, recorded durably before that change is there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuchange.bundle import REVIEW_AGAIN
from gpuchange.errors import StaleError

RECORDS = ".bundles"


@contextmanager
def records(root: Path) -> Iterator[Path]:
    """The directory of records, one controller at a time."""
    place = root / RECORDS
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield place
    finally:
        os.close(handle)


def refuse_if_applied(root: Path, digest: str) -> None:
    """Raises StaleError when a change below `root` began from the bundle of this digest."""
    record = root / RECORDS / digest
    try:
        found = json.loads(record.read_text())
        change, begun = str(found["change"]), bool(found["begun"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        change, begun = "unknown: its record cannot be read", True
    there = (root / change).is_dir()
    if there or begun:  # neither: a crash before the change was there; nothing was done
        raise StaleError(
            f"already applied as change {change}",
            where="" if there else str(record),
            remedy=f"gpuchange status {change}, gpuchange resume {change}" if there else REVIEW_AGAIN,
        )


def keep(record: Path, fields: Mapping[str, Any]) -> None:
    """Write atomically and durably."""
    draft = record.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(record)
    handle = os.open(record.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
