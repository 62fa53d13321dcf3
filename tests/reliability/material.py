"""Good plans and what tests make of them; the evidence of one play."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from gpuchange import player
from gpuchange.reports import Evidence

CASES = Path(__file__).parents[1] / "cases"
GOOD = sorted((CASES / "plan_good").glob("*.yaml"))


def text_positions(data: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The paths of all strings in plan data."""
    if isinstance(data, str):
        yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from text_positions(value, (*path, key))


def put(data: object, path: tuple[object, ...], value: object) -> str:
    """Plan text with another value at `path`."""
    copy = json.loads(json.dumps(data))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return yaml.safe_dump(copy, sort_keys=False, allow_unicode=True)


def as_text(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)


def evidence(play: player.Play) -> list[Evidence]:
    found: list[Evidence] = []
    while not play.ended:
        select.select([play], [], [], 60)
        found += play.evidence()
    return found
