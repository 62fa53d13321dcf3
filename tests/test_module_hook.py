"""gpuchange_hook on this machine: each command once a direction, order kept, failures and losses told."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_unit as unit

OWNER, call = hostcode.OWNER, hostcode.call
STEP = {"phase": "drain", "provider": "hooks", "direction": "do"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "ROOT", str(tmp_path / "state"))
    monkeypatch.setattr(unit, "ROOT", str(tmp_path / "state"))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    return tmp_path


def hook(script: str, timeout: int = 20) -> dict[str, Any]:
    return {"command": ["/bin/sh", "-c", script], "timeout": timeout}


def play(*hooks: dict[str, Any], mode: str = "apply", step: dict[str, str] = STEP, **args: Any) -> dict[str, Any]:
    given = {"groups": [{"on": "host", "hooks": list(hooks)}], "host": "gpu1", "wait_s": 10, **args}
    return dict(call("gpuchange_hook", mode=mode, owner=OWNER, args=given, step=step)["report"])


def test_each_command_runs_once_a_direction(here: Path) -> None:
    one = hook(f"echo $GPUCHANGE_PHASE >> {here}/log")
    assert play(one, mode="probe")["state"] == "not_done"
    assert [play(one)["state"] for _ in range(2)] == ["done", "done"]
    assert play(one, mode="probe")["state"] == "done"
    assert play(one, step={**STEP, "phase": "release", "direction": "undo"}, mode="undo")["state"] == "done"
    assert play(one)["state"] == "done"
    assert (here / "log").read_text() == "drain\nrelease\ndrain\n"


def test_a_failed_command_stops_the_row_and_is_tried_again(here: Path) -> None:
    hooks = (hook(f"echo a >> {here}/log"), hook(f"echo b >> {here}/log; test -e {here}/ok || exit 7"))
    failed = play(*hooks, hook(f"echo c >> {here}/log"))
    assert failed["state"] == "not_done" and "ended with 7" in failed["why"]
    (here / "ok").touch()
    assert play(*hooks, hook(f"echo c >> {here}/log"))["state"] == "done"
    assert (here / "log").read_text().split() == ["a", "b", "b", "c"]


def test_a_long_command_is_attached_to_not_started_again(here: Path) -> None:
    slow = hook(f"echo begun >> {here}/log; while [ ! -e {here}/go ]; do sleep 0.05; done; echo ended >> {here}/log")
    assert play(slow, wait_s=0.3)["state"] == "running"
    (here / "go").touch()
    assert play(slow)["state"] == "done"
    assert (here / "log").read_text() == "begun\nended\n"


def test_a_command_without_end_is_ended_at_its_deadline(here: Path) -> None:
    late = play(hook("echo thinking; sleep 60", timeout=1))
    assert late["state"] == "not_done" and "did not end within 1 s: thinking" in late["why"]


def test_a_command_that_was_killed_with_its_runner_runs_again(here: Path) -> None:
    slow = hook(f"echo begun >> {here}/log; [ -e {here}/go ] || sleep 60")
    assert play(slow, wait_s=0.5)["state"] == "running"
    begun = next((here / "state" / "c1").glob("*.begun"))
    os.killpg(int(host.read_json(str(begun))["pid"]), signal.SIGKILL)
    (here / "go").touch()
    assert play(slow)["state"] == "done"
    assert (here / "log").read_text() == "begun\nbegun\n"


def test_a_group_waits_for_the_one_before(here: Path) -> None:
    later = hook(f"echo never >> {here}/log")
    assert play(later, before="running")["state"] == "running"
    assert play(later, before="not_done")["state"] == "not_done"
    assert not (here / "log").exists()


def test_words_are_not_read_by_a_shell(here: Path) -> None:
    said = play({"command": ["/bin/echo", "$(touch x); {{ 1 + 1 }}", "*"], "timeout": 5})
    assert said["hooks"][0]["out"] == "$(touch x); {{ 1 + 1 }} *"


def test_a_program_that_is_not_there_is_named() -> None:
    missing = play({"command": ["/nonexistent/silence"], "timeout": 5})
    assert missing["state"] == "not_done" and "/nonexistent/silence" in missing["why"]
