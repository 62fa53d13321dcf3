"""What a package transaction means: versions compared by number, moves said in words, results checked. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

COMPONENTS = ("driver", "cuda", "cudnn", "nccl", "container_toolkit")
WORDS = {"driver": "driver", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL", "container_toolkit": "container toolkit"}


class Move(BaseModel):
    """One package's way; "" stands for absent."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    name: str
    old: str = Field("", alias="from")
    new: str = Field("", alias="to")


class Transaction(BaseModel):
    """What preflight chose and stack carries out: {name: version} to install, names to remove, the driver to be loaded.

    `renamed` maps an old package to the one that takes its place, `mains` a component to its package.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    install: dict[str, str] = {}
    remove: tuple[str, ...] = ()
    renamed: dict[str, str] = {}
    mains: dict[str, str] = {}
    driver: str = ""

    def unmet(self, installed: Mapping[str, str]) -> tuple[str, ...]:
        """What `installed` ({name: version}) still lacks of this transaction, one sentence each."""
        wrong = [
            f"{name} is {installed.get(name) or 'absent'}, not {version}"
            for name, version in sorted(self.install.items())
            if installed.get(name) != version
        ]
        return (*wrong, *(f"{name} is still installed" for name in self.remove if name in installed))


def version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key: numbers by value, so that 570.86.10 comes before 570.172.08; letters after numbers, ~ before all."""
    parts = re.findall(r"\d+|~|[A-Za-z]+", version)
    return (*(_part(part) for part in parts), (0, 0, ""))


def _part(part: str) -> tuple[int, int, str]:
    if part.isdigit():
        return (1, int(part), "")
    return (-1, 0, "") if part == "~" else (2, 0, part)


def direction(before: str, after: str) -> str:
    """install, keep, upgrade or downgrade."""
    if not before:
        return "install"
    old, new = version_key(before), version_key(after)
    return "keep" if old == new else "upgrade" if old < new else "downgrade"


def component_lines(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """`driver 550.54.15 → 570.172.08 (upgrade)` for each component that moves."""
    rows = ((name, before.get(name, ""), after[name]) for name in COMPONENTS if name in after)
    return tuple(
        f"{WORDS[name]} {old or 'absent'} → {new} ({direction(old, new)})" for name, old, new in rows if old != new
    )


def count_line(moves: Iterable[Move]) -> str:
    """`19 packages: 8 new, 6 changed, 5 removed`; empty when nothing moves."""
    rows = tuple(moves)
    new = sum(1 for move in rows if not move.old)
    gone = sum(1 for move in rows if not move.new)
    parts = ((new, "new"), (len(rows) - new - gone, "changed"), (gone, "removed"))
    said = ", ".join(f"{count} {word}" for count, word in parts if count)
    return f"{len(rows)} packages: {said}" if rows else ""


def sealed_packages(facts: Mapping[str, Any], driver: str) -> dict[str, Any] | None:
    """A record's package facts in the shape that a stack's way back starts from; None when there are none."""
    packages = facts.get("packages")
    if not isinstance(packages, Mapping):
        return None
    return {
        "versions": dict(packages.get("packages") or {}),
        "holds": list(packages.get("holds") or ()),
        "auto": list(packages.get("auto") or ()),
        "alternatives": dict(packages.get("alternatives") or {}),
        "driver": driver,
    }
