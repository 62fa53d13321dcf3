"""Long trials can be stopped and go on: what of them is kept, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reliability import figures


@pytest.mark.parametrize(
    ("at", "broken", "calls"),
    [("abc", [], 1), ("abc+", [], 2), ("abc", ["it broke"], 2)],
    ids=["kept", "an edited tree is not kept", "what broke is tried again"],
)
def test_a_part_of_a_trial_is_tried_once_for_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, broken: list[str], calls: int
) -> None:
    made: list[int] = []

    def part() -> dict[str, Any]:
        made.append(1)
        return {"broken": broken, "tried": [["cut", "stack/apt"]]}

    monkeypatch.setattr(figures, "commit", lambda: at)
    found = [figures.tried_once("a/b", part, tmp_path) for _ in range(2)]
    assert (len(made), found[0]) == (calls, found[1])
    monkeypatch.setattr(figures, "commit", lambda: "another")
    figures.tried_once("a/b", part, tmp_path)
    assert len(made) == calls + 1
