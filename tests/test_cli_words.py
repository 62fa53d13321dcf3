"""What an operator reads while a change runs and afterwards: proposed commands, heartbeats, standings, notes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from gpuchange.cli import changes, live, main, story
from gpuchange.history import History
from gpuchange.states import Event, Kind
from tests.fleetfake import World
from tests.test_cli_changes import PLAN, Captured, home, kept, resolve, world

__all__ = ["home", "resolve", "world"]  # fixtures


def test_a_proposed_command_repeats_the_flags_and_works_when_copied(
    world: World, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "bare plan.yaml"
    plan.write_text(PLAN.replace("inventory: inventory.yaml\n", ""))
    monkeypatch.delenv("GPUCHANGE_STATE")
    state = ["--state-dir", str(tmp_path / "changes")]
    assert main(["plan", str(plan), "-i", "inventory.yaml", "-b", *state]) == 0
    proposed = capsys.readouterr().out.rsplit("next:", 1)[1].strip()
    assert main([*shlex.split(proposed)[1:], "--yes"]) == 0
    assert f"{shlex.join(state)} -o report.html" in capsys.readouterr().out
    assert main(["status", *state]) == 0
    noted = [
        event for event in changes.read(changes.find(tmp_path / "changes", None)).events if event.data.get("flags")
    ]
    assert [event.data["flags"] for event in noted] == ["--become"]


def test_a_heartbeat_says_what_a_step_waits_for_also_while_it_looks_again(capsys: Captured) -> None:
    with live.Plain(History(), heartbeat_s=0.05) as plain:
        for kind, why in ((Kind.STARTED, ""), (Kind.AGAIN, "GPU in use: pid 7"), (Kind.STARTED, "")):
            plain._note(Event(kind, "h1", "drain", "gpu_users", "do", data={"why": why} if why else {}))
        plain._over.wait(0.4)
    assert "h1 drain/gpu_users waiting: GPU in use: pid 7" in capsys.readouterr().out
    plain._note(Event(Kind.STARTED, "h1", "seal", "host", "do"))
    assert plain._working["h1"][1] == "h1 seal/host starts", "the next step waits for nothing yet"


def test_nobody_is_said_to_work_on_a_change_that_was_stopped(
    world: World, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: World, request: Any, host: str) -> Any:
        if request.role == "drain_gpu_users":
            (kept()[0] / "pause").touch()
        return answered(self, request, host)

    answered = World.answer
    monkeypatch.setattr(World, "answer", answer)
    assert main(["apply", "plan.yaml", "--yes"]) == 5
    assert "stopped (" in (out := capsys.readouterr().out) and "working" not in out
    assert main(["status"]) == 0
    assert "working" not in (out := capsys.readouterr().out) and "stopped before its end" in out
    assert main(["show"]) == 0
    out = capsys.readouterr().out
    assert "note: the preview was agreed to" in out and "True" not in out


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"agreed": True}, "h1 note: the preview was agreed to"),
        ({"unmarked": True}, "h1 note: its owner marker was given back"),
        ({"confirmed": "ops", "answers": 4}, "h1 note: ops confirmed that it was done by hand"),
    ],
)
def test_a_note_is_told_in_words(data: dict[str, Any], says: str) -> None:
    assert story.sentence(Event(Kind.NOTE, "h1", data=data)) == says


def test_a_host_left_out_of_service_is_named_to_those_that_wait_for_its_place(world: World, capsys: Captured) -> None:
    world.faults["h1", "seal_host", "apply"] = ["silent"]
    world.faults["h1", "seal_host", "probe"] = ["failed"] * 3
    assert main(["apply", "plan.yaml", "--yes"]) == 5
    (directory,) = kept()
    assert main(["resolve", directory.name, "h1", "--leave"]) == 0
    assert main(["resume"]) == 5
    said = capsys.readouterr().out
    assert "h1 left out of service, which counts: h2 may have to wait" in said
    assert f"gpuchange resolve {directory.name} h1 --undo" in said
    assert main(["resolve", directory.name, "h1", "--undo"]) == 0
    assert main(["resume"]) == 3 and "may have to wait" not in capsys.readouterr().out
