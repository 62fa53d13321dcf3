"""What of a host was reviewed: which machine, boot, kernel, driver and cards, and what packages would become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuchange.checks.snapshot import mapping, parse, rows

Fingerprint = dict[str, str | dict[str, str]]
"""Key → text; "cards": slot → GPU UUID; "installed": package of the GPU stack → version; "packages": package → version
that it would get.
"""

_NESTED = {"cards": "card at {}", "installed": "package {}", "packages": "package {} to become"}
_HINTS = {"boot-id": " (it was rebooted)", "machine-id": " (it is another machine)"}


def of(body: Mapping[str, Any]) -> Fingerprint:
    """The part of the fingerprint that one report body tells; {} when it tells nothing of it. Never raises."""
    found: Fingerprint = {}
    facts = mapping(body.get("facts"))
    if facts:
        found |= _of_facts(facts)
    if isinstance(body.get("moves"), list):
        moves = rows(body["moves"])
        found["packages"] = {str(row.get("name")): str(row.get("to") or "absent") for row in moves}
    return found


def of_reports(reports: Mapping[str, Mapping[str, Any]], phase: str) -> Fingerprint:
    """The whole fingerprint of a host, from its reports of `phase` ("phase/provider" → body)."""
    found: Fingerprint = {}
    for step in sorted(reports):
        if step.startswith(f"{phase}/"):
            found |= of(reports[step])
    return found


def _of_facts(facts: Mapping[str, Any]) -> Fingerprint:
    seen = parse(facts)
    return {
        "machine-id": seen.machine_id,
        "boot-id": seen.boot_id,
        "kernel": seen.kernel,
        "driver": seen.driver.loaded or "",
        "CUDA": seen.cuda.active or "",
        "cuDNN": seen.cudnn.version or "",
        "container toolkit": seen.container_toolkit or "",
        "installed": dict(seen.packages),
        "cards": {card.bus_id: card.uuid or "" for card in seen.cards},
    }


def moved(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """What is no longer as it was, one sentence each. Only keys that `now` tells are compared."""
    lines: list[str] = []
    for key in sorted(was.keys() & now.keys()):
        before, after = was[key], now[key]
        if key in _NESTED:
            lines += _moved_parts(_NESTED[key], mapping(before), mapping(after))
        elif before != after:
            lines.append(f"{key} was {before or 'absent'}, is {after or 'absent'}{_HINTS.get(key, '')}")
    return tuple(lines)


def _moved_parts(says: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{says.format(name)} was {was.get(name) or 'absent'}, is {now.get(name) or 'absent'}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]
